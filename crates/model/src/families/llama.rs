//! Llama and models derived from it: RMS norms, rotary embedding, gated FFN, pre-norm blocks.

use crate::{
    Activation, Biases, Block, FfnKind, LayerWeight, ModelConfig, ModelError, Multipliers,
    NormKind, Positions, QueryKeyNorm, SoftCaps, Weight,
    families::{Family, layer_tensor},
    keys::Keys,
    rotary::{RotaryDefaults, long_rope_context, rotary},
    source::WeightSource,
};

/// Llama 1 to 3 and compatible models, including ReluLLaMA.
pub(super) const LLAMA: Family = Family {
    name: "llama",
    architectures: &["LlamaForCausalLM", "LLaMAForCausalLM"],
    describe: |keys| {
        let mut config = llama_like(keys, "llama", &LLAMA_DEFAULTS)?;
        config.biases = biases(keys)?;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};

/// Reads whether projections have biases.
pub(super) fn biases(keys: &Keys<'_>) -> Result<Biases, ModelError> {
    let attention_bias = keys.flag("attention_bias", false)?;
    Ok(Biases {
        query_key_value: attention_bias,
        attention_output: attention_bias,
        ffn: keys.flag("mlp_bias", false)?,
        head: false,
    })
}

/// Tensors of older checkpoints that repeat the configuration.
pub(super) const IGNORED: &[&str] = &["rotary_emb.inv_freq"];

/// Defaults of a Llama-like family for absent keys.
pub(super) struct Defaults {
    pub(super) hidden_size: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    /// Key and value heads; `None` for as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// Size of a head; `None` for hidden size divided by heads.
    pub(super) head_size: Option<usize>,
    pub(super) ffn_size: usize,
    pub(super) vocabulary: usize,
    pub(super) context: usize,
    pub(super) tied: bool,
    /// Key of the norms' ε, and its value.
    pub(super) epsilon: (&'static str, f64),
    pub(super) activation: &'static str,
    pub(super) rotary: RotaryDefaults,
}

pub(super) const LLAMA_DEFAULTS: Defaults = Defaults {
    hidden_size: 4096,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_size: None,
    ffn_size: 11008,
    vocabulary: 32000,
    context: 2048,
    tied: false,
    epsilon: ("rms_norm_eps", 1e-6),
    activation: "silu",
    rotary: RotaryDefaults::STANDARD,
};

/// Reads a configuration with Llama's keys; the family adds biases and windows.
pub(super) fn llama_like(
    keys: &Keys<'_>,
    family: &str,
    defaults: &Defaults,
) -> Result<ModelConfig, ModelError> {
    let hidden_size = keys.size_or(&["hidden_size"], defaults.hidden_size)?;
    let layer_count = keys.size_or(&["num_hidden_layers"], defaults.layers)?;
    let head_count = keys.size_or(&["num_attention_heads"], defaults.heads)?;
    let stated = keys.size("head_dim")?.or(defaults.head_size);
    let head_size = match stated {
        Some(size) => size,
        None => head_size(keys, hidden_size, head_count)?,
    };
    let kv_default = if keys.has("num_key_value_heads") {
        head_count // null means as many as query heads
    } else {
        defaults.kv_heads.unwrap_or(head_count)
    };
    let context = keys.size_or(&["max_position_embeddings"], defaults.context)?;
    let rotary = rotary(keys, head_size, context, &defaults.rotary)?;
    Ok(ModelConfig {
        family: family.to_owned(),
        hidden_size,
        embedding_size: hidden_size,
        embedding_scale: 1.0,
        layer_count,
        head_count,
        kv_head_count: keys.size_or(&["num_key_value_heads"], kv_default)?,
        head_size,
        ffn_size: keys.size_or(&["intermediate_size"], defaults.ffn_size)?,
        vocabulary_size: keys.size_or(&["vocab_size"], defaults.vocabulary)?,
        context_length: long_rope_context(keys)?.map_or(context, |short| short.min(context)),
        positions: Positions::Rotary(rotary),
        attention_windows: vec![None; layer_count],
        block: Block::PreNorm,
        norm: NormKind::RootMeanSquare,
        norm_epsilon: keys
            .positive(defaults.epsilon.0)?
            .unwrap_or(defaults.epsilon.1) as f32,
        query_key_norm: QueryKeyNorm::None,
        final_norm: true,
        ffn: FfnKind::Gated,
        experts: None,
        latent: None,
        activation: activation(keys, "hidden_act", defaults.activation)?,
        soft_caps: SoftCaps::default(),
        attention_sinks: false,
        multipliers: Multipliers::default(),
        biases: Biases::default(),
        tied_embeddings: keys.flag("tie_word_embeddings", defaults.tied)?,
        end_of_text: keys.token_ids("eos_token_id")?,
    })
}

/// Returns the hidden size divided by the number of heads, which must be exact.
pub(super) fn head_size(
    keys: &Keys<'_>,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, ModelError> {
    if hidden_size.is_multiple_of(heads) {
        return Ok(hidden_size / heads);
    }
    Err(keys.bad(format!(
        "the hidden size {hidden_size} is not a multiple of {heads} attention heads"
    )))
}

/// Names of activation functions, for messages.
const ACTIVATIONS: &str = "relu, relu2, fatrelu (with `hidden_act_param`), silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast";

/// Reads the activation function under `key`.
pub(super) fn activation(
    keys: &Keys<'_>,
    key: &str,
    default: &str,
) -> Result<Activation, ModelError> {
    let name = keys.text(key)?.unwrap_or(default);
    // Read for every function: a key that nothing reads is an error.
    let threshold = keys.number("hidden_act_param")?;
    Ok(match name {
        "relu" => Activation::Relu,
        "relu2" | "squared_relu" => Activation::SquaredRelu,
        "fatrelu" => match threshold {
            Some(threshold) => Activation::FatRelu {
                threshold: threshold as f32,
            },
            None => return Err(keys.unsupported(key, name, ACTIVATIONS)),
        },
        "silu" | "swish" => Activation::Silu,
        "gelu" | "gelu_python" => Activation::GeluErf,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_python_tanh" => Activation::GeluTanh,
        _ => return Err(keys.unsupported(key, name, ACTIVATIONS)),
    })
}

/// Returns tensor names as in Llama, for models whose FFN may have no gate. Without a gate, the first matrix is named `up`.
pub(super) fn ungated_names(config: &ModelConfig, weight: Weight) -> WeightSource {
    let layer_weight = |layer, weight| llama_names(Weight::Layer(layer, weight));
    match weight {
        Weight::Layer(layer, LayerWeight::Gate) if !config.is_gated() => {
            layer_weight(layer, LayerWeight::Up)
        }
        Weight::Layer(layer, LayerWeight::GateBias) if !config.is_gated() => {
            layer_weight(layer, LayerWeight::UpBias)
        }
        weight => llama_names(weight),
    }
}

/// Tensor names of Llama checkpoints.
pub(super) fn llama_names(weight: Weight) -> WeightSource {
    let (layer, weight) = match weight {
        Weight::Embedding => return WeightSource::tensor("model.embed_tokens.weight"),
        Weight::FinalNorm => return WeightSource::tensor("model.norm.weight"),
        Weight::FinalNormBias => return WeightSource::tensor("model.norm.bias"),
        Weight::Head => return WeightSource::tensor("lm_head.weight"),
        Weight::Layer(layer, weight) => (layer, weight),
        other => unreachable!("Llama has no {other:?}"),
    };
    let name = match weight {
        LayerWeight::AttentionNorm => "input_layernorm.weight",
        LayerWeight::AttentionNormBias => "input_layernorm.bias",
        LayerWeight::Query => "self_attn.q_proj.weight",
        LayerWeight::QueryBias => "self_attn.q_proj.bias",
        LayerWeight::Key => "self_attn.k_proj.weight",
        LayerWeight::KeyBias => "self_attn.k_proj.bias",
        LayerWeight::Value => "self_attn.v_proj.weight",
        LayerWeight::ValueBias => "self_attn.v_proj.bias",
        LayerWeight::QueryNorm => "self_attn.q_norm.weight",
        LayerWeight::KeyNorm => "self_attn.k_norm.weight",
        LayerWeight::Output => "self_attn.o_proj.weight",
        LayerWeight::OutputBias => "self_attn.o_proj.bias",
        LayerWeight::FfnNorm => "post_attention_layernorm.weight",
        LayerWeight::FfnNormBias => "post_attention_layernorm.bias",
        LayerWeight::Gate => "mlp.gate_proj.weight",
        LayerWeight::GateBias => "mlp.gate_proj.bias",
        LayerWeight::Up => "mlp.up_proj.weight",
        LayerWeight::UpBias => "mlp.up_proj.bias",
        LayerWeight::Down => "mlp.down_proj.weight",
        LayerWeight::DownBias => "mlp.down_proj.bias",
        other => unreachable!("Llama has no {other:?}"),
    };
    layer_tensor("model.layers", layer, name)
}
