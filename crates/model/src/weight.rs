//! The weights of a decoder.

/// One tensor of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weight {
    /// Token embeddings, `[vocabulary, embedding]`.
    Embedding,
    /// Learned positions, `[positions, hidden]`.
    Positions,
    /// From the embedding's width to the hidden one, `[hidden, embedding]`.
    ProjectIn,
    /// From the hidden width to the embedding's, `[embedding, hidden]`.
    ProjectOut,
    /// Weight of the norm before the head, `[hidden]`.
    FinalNorm,
    /// Bias of that norm, `[hidden]`.
    FinalNormBias,
    /// Output head, `[vocabulary, embedding]`; absent where embeddings are tied.
    Head,
    /// Bias of the head, `[vocabulary]`.
    HeadBias,
    /// A tensor of a layer.
    Layer(usize, LayerWeight),
}

/// One tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerWeight {
    /// Norm of attention, `[hidden]`.
    AttentionNorm,
    /// Its bias, `[hidden]`.
    AttentionNormBias,
    /// Query projection, `[heads·head_size, hidden]`.
    Query,
    /// Its bias.
    QueryBias,
    /// Key projection, `[kv_heads·head_size, hidden]`.
    Key,
    /// Its bias.
    KeyBias,
    /// Value projection, like the key's.
    Value,
    /// Its bias.
    ValueBias,
    /// Norm of each query head, `[head_size]`.
    QueryNorm,
    /// Its bias, `[head_size]`.
    QueryNormBias,
    /// Norm of each key head, `[head_size]`.
    KeyNorm,
    /// Its bias, `[head_size]`.
    KeyNormBias,
    /// Output projection of attention, `[hidden, heads·head_size]`.
    Output,
    /// Its bias, `[hidden]`.
    OutputBias,
    /// Norm of the FFN, `[hidden]`.
    FfnNorm,
    /// Its bias, `[hidden]`.
    FfnNormBias,
    /// The projection that the activation function is applied to, one row a neuron,
    /// `[ffn, hidden]`: the gate, or an ungated FFN's first matrix.
    Gate,
    /// Its bias, `[ffn]`.
    GateBias,
    /// Up projection of a gated FFN, one row a neuron, `[ffn, hidden]`.
    Up,
    /// Its bias, `[ffn]`.
    UpBias,
    /// Down projection, one column a neuron, `[hidden, ffn]`.
    Down,
    /// Its bias, `[hidden]`.
    DownBias,
}
