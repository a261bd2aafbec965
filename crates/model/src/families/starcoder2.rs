//! StarCoder 2: Llama's layout with layer norms, GELU without gate, biases everywhere and a sliding window.

use crate::{
    Biases, FfnKind, LayerWeight, NormKind, Weight,
    families::{
        Family, layer_tensor,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, llama_like, llama_names},
    },
};

/// StarCoder 2.
pub(super) const STARCODER2: Family = Family {
    name: "starcoder2",
    architectures: &["Starcoder2ForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 3072,
            layers: 30,
            heads: 24,
            kv_heads: Some(2),
            ffn_size: 12288,
            vocabulary: 49152,
            context: 4096,
            tied: true,
            epsilon: ("norm_epsilon", 1e-5),
            activation: "gelu_pytorch_tanh",
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "starcoder2", &defaults)?;
        config.norm = NormKind::Layer;
        config.ffn = FfnKind::Plain;
        let biased = keys.flag("use_bias", true)?;
        config.biases = Biases {
            query_key_value: biased,
            attention_output: biased,
            ffn: biased,
            head: false,
        };
        config.attention_windows = vec![keys.size("sliding_window")?; config.layer_count];
        Ok(config)
    },
    source: |_, weight| match weight {
        Weight::Layer(layer, layer_weight) => {
            let name = match layer_weight {
                LayerWeight::Gate => "mlp.c_fc.weight",
                LayerWeight::GateBias => "mlp.c_fc.bias",
                LayerWeight::Down => "mlp.c_proj.weight",
                LayerWeight::DownBias => "mlp.c_proj.bias",
                _ => return llama_names(weight),
            };
            layer_tensor("model.layers", layer, name)
        }
        weight => llama_names(weight),
    },
    ignored: IGNORED,
};
