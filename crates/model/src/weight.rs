//! Weights of a decoder.

/// Weight of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weight {
    /// Token embeddings, `[vocabulary, embedding]`.
    Embedding,
    /// Learned position embedding, `[positions, hidden]`.
    Positions,
    /// Projection from embedding to hidden size, `[hidden, embedding]`.
    ProjectIn,
    /// Projection from hidden to embedding size, `[embedding, hidden]`.
    ProjectOut,
    /// Scale of the norm before the head, `[hidden]`.
    FinalNorm,
    /// Bias of the norm before the head, `[hidden]`.
    FinalNormBias,
    /// Output head, `[vocabulary, embedding]`; absent if embeddings are tied.
    Head,
    /// Bias of the head, `[vocabulary]`.
    HeadBias,
    /// Weight of a layer.
    Layer(usize, LayerWeight),
}

/// Weight of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerWeight {
    /// Scale of the norm before attention, `[hidden]`.
    AttentionNorm,
    /// Bias of the norm before attention, `[hidden]`.
    AttentionNormBias,
    /// Down-projection of the queries of latent attention, `[query_rank, hidden]`.
    QueryDown,
    /// Scale of the norm of compressed queries, `[query_rank]`.
    QueryDownNorm,
    /// Query projection, `[heads·head_size, hidden]`; in [latent attention](crate::LatentAttention),
    /// `[heads·(rotary_size + key_size), query_rank or hidden]`.
    Query,
    /// Query bias, `[heads·head_size]`.
    QueryBias,
    /// Key projection, `[kv_heads·head_size, hidden]`.
    Key,
    /// Key bias, `[kv_heads·head_size]`.
    KeyBias,
    /// Scale of the norm of the latent vector, `[rank]`.
    LatentNorm,
    /// Projection of the queries of latent attention into the latent space, `[heads·rank, key_size]`: one matrix per head.
    LatentQuery,
    /// Value projection, `[kv_heads·head_size, hidden]`; in latent attention, the projection of the weighted sums of latent vectors,
    /// `[heads·value_size, rank]`: one matrix per head.
    Value,
    /// Value bias, `[kv_heads·head_size]`.
    ValueBias,
    /// Scale of the queries' norm, `[head_size]`, or `[heads·head_size]` if it normalises all heads together.
    QueryNorm,
    /// Bias of the queries' norm, as long as its scale.
    QueryNormBias,
    /// Scale of the keys' norm, `[head_size]`, or `[kv_heads·head_size]` if it normalises all heads together.
    KeyNorm,
    /// Bias of the keys' norm, as long as its scale.
    KeyNormBias,
    /// Attention sinks, `[heads]`: per head, a score in the softmax that has no value vector.
    Sinks,
    /// Output projection of attention, `[hidden, heads·head_size]`; in latent attention, `[hidden, heads·value_size]`.
    Output,
    /// Bias of the output projection, `[hidden]`.
    OutputBias,
    /// Scale of the norm of attention's output, `[hidden]`.
    AttentionOutputNorm,
    /// Scale of the norm before the FFN, `[hidden]`.
    FfnNorm,
    /// Bias of the norm before the FFN, `[hidden]`.
    FfnNormBias,
    /// Router of a mixture of experts: a row per expert, `[experts, hidden]`.
    Router,
    /// Router bias, `[experts]`.
    RouterBias,
    /// Projection to the logit of the shared expert's weight, `[1, hidden]`.
    SharedGate,
    /// Projection followed by the activation function, one row per neuron, `[ffn, hidden]`: the gate, or the
    /// first matrix of an FFN without gate.
    Gate,
    /// Gate bias, `[ffn]`.
    GateBias,
    /// Up projection of a gated FFN, one row per neuron, `[ffn, hidden]`.
    Up,
    /// Up bias, `[ffn]`.
    UpBias,
    /// Down projection, one column per neuron, `[hidden, ffn]`.
    Down,
    /// Down bias, `[hidden]`; in a mixture of experts, one per block of neurons, `[blocks, hidden]`.
    DownBias,
    /// Scale of the norm of the FFN's output, `[hidden]`.
    FfnOutputNorm,
}
