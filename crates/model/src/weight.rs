//! The weights of a decoder, and what checkpoints call them.

/// One tensor of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Token embeddings, `[vocabulary, hidden]`.
    Embedding,
    /// Weight of the norm before the head, `[hidden]`.
    FinalNorm,
    /// Output head, `[vocabulary, hidden]`; absent where embeddings are tied.
    Head,
    /// A tensor of a layer.
    Layer(usize, LayerWeight),
}

/// One tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerWeight {
    /// Norm before attention, `[hidden]`.
    AttentionNorm,
    /// Query projection, `[heads·head_size, hidden]`.
    Query,
    /// Key projection, `[kv_heads·head_size, hidden]`.
    Key,
    /// Value projection, like the key's.
    Value,
    /// Output projection of attention, `[hidden, heads·head_size]`.
    Output,
    /// Norm before the FFN, `[hidden]`.
    FfnNorm,
    /// Gate projection, one row a neuron, `[ffn, hidden]`.
    Gate,
    /// Up projection, one row a neuron, `[ffn, hidden]`.
    Up,
    /// Down projection, one column a neuron, `[hidden, ffn]`.
    Down,
}

impl LayerWeight {
    /// All of them, in the order of the forward pass.
    pub const ALL: [Self; 9] = [
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Output,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

impl Weight {
    /// The tensor's name in a Hugging Face checkpoint of the Llama family.
    pub fn name(self) -> String {
        let (layer, weight) = match self {
            Self::Embedding => return "model.embed_tokens.weight".to_owned(),
            Self::FinalNorm => return "model.norm.weight".to_owned(),
            Self::Head => return "lm_head.weight".to_owned(),
            Self::Layer(layer, weight) => (layer, weight),
        };
        let part = match weight {
            LayerWeight::AttentionNorm => "input_layernorm",
            LayerWeight::Query => "self_attn.q_proj",
            LayerWeight::Key => "self_attn.k_proj",
            LayerWeight::Value => "self_attn.v_proj",
            LayerWeight::Output => "self_attn.o_proj",
            LayerWeight::FfnNorm => "post_attention_layernorm",
            LayerWeight::Gate => "mlp.gate_proj",
            LayerWeight::Up => "mlp.up_proj",
            LayerWeight::Down => "mlp.down_proj",
        };
        format!("model.layers.{layer}.{part}.weight")
    }
}
