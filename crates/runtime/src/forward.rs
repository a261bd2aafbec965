//! The forward pass: embed, apply every layer, and project the last hidden states to logits.
//!
//! ```text
//! h ← E[token]  (+ P[position])
//! for each layer
//!     h ← h + W_o · softmax(q · kᵀ / √d) · v                          attention over the KV cache
//!     h ← h + Σ_{i selected} act(gate_i · x) (up_i · x) · down_i      FFN: the policy selects neurons
//! logits ← W · norm(h)
//! ```
//!
//! Where a neuron is computed never changes the result beyond summation order; whether it is computed is the policy's
//! decision, made in the FFN and nowhere else.

use powerinfer_model::Positions;

use crate::{
    RuntimeError, Sequence, Stage,
    input::InputBuffers,
    model::Model,
    observer::Observers,
    pass::{Pass, PassBuffers},
    threads::add,
};

/// Computes the layers of a model, on the CPU or on a device and the CPU. Methods fail where a device does.
pub(crate) trait LayerExecutor: std::fmt::Debug + Send {
    /// Tokens of a sequence that run together, at most.
    fn batch_tokens(&self) -> usize;

    /// Whether tokens of several sequences run together.
    fn batches_sequences(&self) -> bool;

    /// Starts a pass, whose hidden states are the embeddings.
    fn begin(&mut self, _pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Adds attention's output in `layer` to the hidden states, and appends keys and values to the KV cache.
    fn attention(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError>;

    /// Adds the FFN's output in `layer` to the hidden states.
    fn ffn(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError>;

    /// Ends a pass: its hidden states are those after the last layer.
    fn finish(&mut self, _pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Ends a pass that has failed; returns whether another attempt may succeed.
    fn abort(&mut self, _pass: &mut Pass<'_>) -> bool {
        false
    }
}

/// Runs the tokens of `pass` through all layers; on success its hidden states are those after the last one and its
/// sequences contain the tokens. On failure sequences are as before.
///
/// # Errors
///
/// Fails where the executor does.
pub(crate) fn forward(
    executor: &mut dyn LayerExecutor,
    pass: &mut Pass<'_>,
) -> Result<(), RuntimeError> {
    let starts = pass.sequences.iter().map(Sequence::position);
    let each = pass.tokens.len() / pass.sequences.len();
    let positions = starts.flat_map(|start| start..start + each);
    pass.buffers.positions.clear();
    pass.buffers.positions.extend(positions);
    while let Err(error) = layers(executor, pass) {
        for sequence in &mut *pass.sequences {
            sequence.truncate(sequence.position());
        }
        if !executor.abort(pass) {
            return Err(error);
        }
    }
    let tokens = pass.tokens.chunks_exact(each);
    for (sequence, tokens) in pass.sequences.iter_mut().zip(tokens) {
        sequence.tokens.extend(tokens);
    }
    pass.observers.statistics.tokens += pass.tokens.len() as u64;
    Ok(())
}

fn layers(executor: &mut dyn LayerExecutor, pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
    embed(pass);
    executor.begin(pass)?;
    for layer in 0..pass.model.config.layer_count {
        executor.attention(pass, layer)?;
        executor.ffn(pass, layer)?;
    }
    executor.finish(pass)
}

/// Sets the hidden states to the rows of the token embedding, plus those of learned positions.
fn embed(pass: &mut Pass<'_>) {
    let (model, weights) = (pass.model, &pass.model.weights);
    let (config, file) = (&model.config, model.bundle.weights());
    let PassBuffers {
        positions,
        rotations,
        hidden,
        embedded,
        input,
    } = &mut *pass.buffers;
    let table = weights.embedding.view(file);
    embedded.clear();
    embedded.resize(pass.tokens.len() * config.embedding_size, 0.0);
    let rows = embedded.chunks_exact_mut(config.embedding_size);
    for (token, out) in pass.tokens.iter().zip(rows) {
        table.dequantise_row(*token as usize, out);
        out.iter_mut().for_each(|x| *x *= config.embedding_scale);
    }
    let mut bytes = pass.tokens.len() * table.row_bytes();
    match &weights.project_in {
        None => std::mem::swap(hidden, embedded),
        Some(project) => {
            let linear = model.linear(project);
            let x = linear.input(&model.threads, embedded, 0.0, input);
            bytes += linear.product(&model.threads, &x, 0.0, hidden);
        }
    }
    rotations.clear();
    match (&config.positions, &weights.positions) {
        (Positions::Rotary(rotary), _) => {
            let of_positions = positions.iter();
            rotations.extend(of_positions.flat_map(|at| rotary.rotations(*at)));
        }
        (Positions::Learned { offset }, Some(table)) => {
            let table = table.view(file);
            embedded.resize(config.hidden_size, 0.0);
            for (position, hidden) in positions
                .iter()
                .zip(hidden.chunks_exact_mut(config.hidden_size))
            {
                table.dequantise_row(position + offset, embedded);
                add(hidden, embedded);
            }
            bytes += positions.len() * table.row_bytes();
        }
        _ => {}
    }
    pass.observers.read(bytes);
    pass.observers.stage(Stage::Embedding);
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
        x,
        projected,
        input,
    } = buffers;
    let mut linear = |stored, x: &[f32], out: &mut Vec<f32>| {
        let linear = model.linear(stored);
        let x = linear.input(&model.threads, x, 0.0, input);
        linear.product(&model.threads, &x, 0.0, out)
    };
    x.clear();
    x.extend_from_slice(hidden);
    if let Some(norm) = &model.weights.final_norm {
        model.norm(norm, x);
    }
    let mut bytes = 0;
    let x = match &model.weights.project_out {
        None => x,
        Some(project) => {
            bytes += linear(project, x, projected);
            projected
        }
    };
    observers.stage(Stage::Norms);
    bytes += linear(&model.weights.head, x, logits);
    observers.read(bytes);
    observers.stage(Stage::Head);
}

/// Buffers of [`head`], reused from token to token.
#[derive(Debug, Default)]
pub(crate) struct HeadBuffers {
    x: Vec<f32>,
    projected: Vec<f32>,
    input: InputBuffers,
}
