//! The forward pass: embed, apply every layer, and project the last hidden states to logits.
//!
//! ```text
//! h ← E[token]  (+ P[position])
//! for each layer
//!     x ← norm(h)
//!     q, k, v ← W_q x, W_k x, W_v x                                   rotary embedding of q and k; KV cache
//!     h ← h + W_o · softmax(q · kᵀ / √d) · v                          attention
//!     x ← norm(h)
//!     h ← h + Σ_{i selected} act(gate_i · x) (up_i · x) · down_i      FFN: the policy selects neurons
//! logits ← W · norm(h)
//! ```
//!
//! That is a pre-norm block; [`Block`](powerinfer_model::Block) has the others. Placement changes rounding alone: which
//! neurons are computed is the policy's decision, made in the FFN and nowhere else.

use powerinfer_model::{ModelConfig, Positions, SoftCaps};

use crate::{
    RuntimeError, Stage, Statistics,
    executor::LayerExecutor,
    input::InputBuffers,
    model::Model,
    observer::Observers,
    pass::{Pass, PassBuffers},
    threads::add,
};

/// Runs the tokens of `pass` through all layers; on success its hidden states are those after the last one and its
/// sessions contain the tokens. On failure sessions are as before.
///
/// # Errors
///
/// The executor fails.
pub(crate) fn forward(
    executor: &mut dyn LayerExecutor,
    pass: &mut Pass<'_, '_>,
) -> Result<(), RuntimeError> {
    pass.buffers.positions.clear();
    for (index, session) in pass.sessions.iter().enumerate() {
        let end = session.position() + pass.tokens_of(index);
        pass.buffers.positions.extend(session.position()..end);
    }
    let before = pass.observers.statistics.clone();
    while let Err(error) = run_layers(executor, pass) {
        // Counts of the failed pass are dropped; the clock goes on.
        let stages = pass.observers.statistics.stages.take();
        pass.observers.statistics = Statistics {
            stages,
            ..before.clone()
        };
        // Removes the keys and values of this pass.
        for session in &mut *pass.sessions {
            session.truncate(session.position());
        }
        if !executor.recover(&error) {
            return Err(error);
        }
        debug_assert!(pass.observers.expects_retries, "run again: {error}");
        pass.observers.retries += 1;
    }
    let mut tokens = pass.tokens;
    for index in 0..pass.sessions.len() {
        let (own, rest) = tokens.split_at(pass.tokens_of(index));
        pass.sessions[index].tokens.extend(own);
        tokens = rest;
    }
    pass.observers.statistics.tokens += pass.tokens.len() as u64;
    Ok(())
}

fn run_layers(
    executor: &mut dyn LayerExecutor,
    pass: &mut Pass<'_, '_>,
) -> Result<(), RuntimeError> {
    let is_embedded = executor.has_embeddings(pass.tokens);
    embed(pass, is_embedded);
    executor.begin(pass)?;
    for layer in 0..pass.model.config.layer_count {
        executor.attention(pass, layer)?;
        executor.ffn(pass, layer)?;
    }
    executor.finish(pass)
}

/// Sets the hidden states to the rows of the token embedding, plus the learned position embedding, unless the executor has
/// them (`is_embedded`). Also sets the rotations of the rotary embedding.
fn embed(pass: &mut Pass<'_, '_>, is_embedded: bool) {
    let (model, weights) = (pass.model, &pass.model.weights);
    let (config, tensors) = (&model.config, model.bundle.weights());
    let PassBuffers {
        positions,
        rotations,
        hidden,
        embedded,
        input,
    } = &mut *pass.buffers;
    let table = weights.embedding.view(tensors);
    let tokens = if is_embedded { &[] } else { pass.tokens };
    let mut bytes_read = tokens.len() * table.row_bytes();
    let rows = match &weights.project_in {
        Some(_) => &mut *embedded,
        None => &mut *hidden,
    };
    rows.clear();
    rows.resize(pass.tokens.len() * config.embedding_size, 0.0);
    let vectors = rows.chunks_exact_mut(config.embedding_size);
    for (token, row) in tokens.iter().zip(vectors) {
        table.dequantise_row(*token as usize, row);
        row.iter_mut().for_each(|x| *x *= config.embedding_scale);
    }
    if let Some(project_in) = &weights.project_in {
        bytes_read += model.project(project_in, embedded, input, hidden);
    }
    rotations.clear();
    for rotary in config.rotary_tables() {
        let positions = positions.iter();
        rotations.extend(positions.flat_map(|position| rotary.rotations(*position)));
    }
    match &config.positions {
        Positions::Learned { offset } => {
            let table = weights
                .positions
                .as_ref()
                .map(|stored| stored.view(tensors));
            let table = table.expect("loading checked the position embedding");
            embedded.resize(config.hidden_size, 0.0);
            let vectors = hidden.chunks_exact_mut(config.hidden_size);
            for (position, hidden) in positions.iter().zip(vectors) {
                table.dequantise_row(position + offset, embedded);
                add(hidden, embedded);
            }
            bytes_read += positions.len() * table.row_bytes();
        }
        // Attention applies these encodings.
        Positions::Rotary(_) | Positions::RotaryByLayer { .. } | Positions::Alibi { .. } => {}
    }
    pass.observers.count_bytes(bytes_read);
    pass.observers.end_stage(Stage::Embedding);
}

/// Sets `logits [tokens, vocabulary]` to those of the hidden states `hidden [tokens, hidden]`.
pub(crate) fn head(
    model: &Model,
    hidden: &[f32],
    buffers: &mut HeadBuffers,
    logits: &mut Vec<f32>,
    observers: &mut Observers,
) {
    let HeadBuffers {
        normed,
        projected,
        input,
    } = buffers;
    match &model.weights.final_norm {
        Some(norm) => model.norm_of(norm, hidden, normed),
        None => hidden.clone_into(normed),
    }
    observers.end_stage(Stage::Norms);
    let mut bytes_read = 0;
    let x = match &model.weights.project_out {
        None => normed,
        Some(project_out) => {
            bytes_read += model.project(project_out, normed, input, projected);
            projected
        }
    };
    bytes_read += model.project(&model.weights.head, x, input, logits);
    observers.count_bytes(bytes_read);
    observers.end_stage(Stage::Head);
}

/// Applies the soft cap of the logits, if the model has one.
pub(crate) fn cap_logits(config: &ModelConfig, logits: &mut [f32]) {
    if let Some(cap) = config.soft_caps.logits {
        for logit in logits {
            *logit = SoftCaps::apply(cap, *logit);
        }
    }
}

/// Buffers of [`head`], reused from token to token.
#[derive(Debug, Default)]
pub(crate) struct HeadBuffers {
    normed: Vec<f32>,
    projected: Vec<f32>,
    input: InputBuffers,
}
