//! Cohere (Command R): parallel attention and FFN with one layer norm without bias, interleaved rotary pairs, scaled logits.

use crate::{
    Block, LayerWeight, NormKind, Weight,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
    source::{Transform, WeightSource},
};

/// Command R and Aya.
pub(super) const COHERE: Family = Family {
    name: "cohere",
    architectures: &["CohereForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 8192,
            layers: 40,
            heads: 64,
            ffn_size: 22528,
            vocabulary: 256_000,
            context: 8192,
            tied: true,
            epsilon: ("layer_norm_eps", 1e-5),
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "cohere", &defaults)?;
        if keys.flag("use_qk_norm", false)? {
            let value = "true (Command R+: a norm for each head)";
            return Err(keys.unsupported("use_qk_norm", value, "false"));
        }
        config.norm = NormKind::Layer;
        config.block = Block::ParallelSharedNorm;
        config.biases = biases(keys)?;
        config.multipliers.logits = keys.positive("logit_scale")?.unwrap_or(0.0625) as f32;
        Ok(config)
    },
    source: |config, weight| match weight {
        Weight::FinalNormBias | Weight::Layer(_, LayerWeight::AttentionNormBias) => {
            WeightSource::Constant(0.0)
        }
        Weight::Layer(_, LayerWeight::Query | LayerWeight::QueryBias) => {
            llama_names(weight).with(Transform::Deinterleave {
                heads: config.head_count,
            })
        }
        Weight::Layer(_, LayerWeight::Key | LayerWeight::KeyBias) => {
            llama_names(weight).with(Transform::Deinterleave {
                heads: config.kv_head_count,
            })
        }
        weight => llama_names(weight),
    },
    ignored: IGNORED,
};
