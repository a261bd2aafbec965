//! The backend of the forward pass, and its implementation for the CPU.

use powerinfer_model::Positions;

use crate::{
    RuntimeError, Stage,
    attention::{AttentionMask, Heads, attend},
    ffn::FfnBuffers,
    input::InputBuffers,
    memory::PREFILL_BATCH,
    observer::{FfnCall, LayerInput},
    pass::Pass,
    rotary::rotate,
    threads::add,
};

/// Backend of the layers: the CPU, or a GPU and the CPU. Errors are those of a device.
pub(crate) trait LayerExecutor: std::fmt::Debug + Send {
    /// Largest number of tokens of a session in a pass.
    fn max_batch_tokens(&self) -> usize;

    /// Largest number of tokens in a pass, of any sessions, whose results match running each alone.
    fn max_exact_tokens(&self) -> usize;

    /// Starts a pass, whose hidden states are the embeddings.
    fn begin(&mut self, _pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Adds attention's output in `layer` to the hidden states, and appends keys and values to the KV cache.
    fn attention(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError>;

    /// Adds the FFN's output in `layer` to the hidden states.
    fn ffn(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError>;

    /// Ends a pass: its hidden states are those after the last layer.
    fn finish(&mut self, _pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Resets the executor after a pass that failed with `error`; returns whether the pass is to be run again.
    fn recover(&mut self, _error: &RuntimeError) -> bool {
        false
    }
}

/// Computes layers on the CPU.
#[derive(Debug, Default)]
pub(crate) struct CpuExecutor {
    /// Hidden states that the FFN reads, `[tokens, hidden]`.
    pub(crate) residual: Vec<f32>,
    attention: AttentionBuffers,
    ffn: FfnBuffers,
    ffn_input: Vec<f32>,
    /// Buffer for the FFN's output if that is normalised before it is added.
    ffn_output: Vec<f32>,
}

/// Buffers of attention, reused from layer to layer.
#[derive(Debug, Default)]
struct AttentionBuffers {
    input: InputBuffers,
    x: Vec<f32>,
    projections: Projections,
    output: Vec<f32>,
}

/// Queries, keys and values, `[tokens, heads, head_size]`.
#[derive(Debug, Default)]
pub(crate) struct Projections {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

impl LayerExecutor for CpuExecutor {
    fn max_batch_tokens(&self) -> usize {
        PREFILL_BATCH
    }

    fn max_exact_tokens(&self) -> usize {
        PREFILL_BATCH
    }

    fn attention(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        // The buffers of one token are kept; those of a batch are freed before its FFN takes its own.
        let mut of_batch = AttentionBuffers::default();
        let buffers = match pass.tokens.len() {
            1 => &mut self.attention,
            _ => &mut of_batch,
        };
        let (model, weights) = (pass.model, &pass.model.weights.layers[layer]);
        let threads = &model.threads;
        let thresholds = model.input_thresholds[layer];

        // x = norm(h), or h where the norm comes after.
        buffers.x.clear();
        buffers.x.extend_from_slice(&pass.buffers.hidden);
        if model.config.block.norms_input() {
            model.norm(model.attention_norm(layer), &mut buffers.x);
        }
        pass.observers.end_stage(Stage::Norms);

        // q, k, v = W_q x, W_k x, W_v x
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.attention);
        pass.observers
            .input(layer, LayerInput::Attention, &buffers.x);
        let query = model.linear(&weights.query);
        let x = query.input(threads, &buffers.x, threshold, &mut buffers.input);
        let Projections { query, key, value } = &mut buffers.projections;
        let stored = [
            (&weights.query, query),
            (&weights.key, key),
            (&weights.value, value),
        ];
        for (stored, out) in stored {
            let bytes = model.linear(stored).product(threads, &x, threshold, out);
            pass.observers.count_bytes(bytes);
        }
        pass.observers.end_stage(Stage::QueryKeyValue);

        // softmax(q · kᵀ / √d) · v
        mix(pass, layer, &mut buffers.projections);
        let mixed = &buffers.projections.query;
        pass.observers.end_stage(Stage::Attention);

        // h ← h + W_o · …
        pass.observers.input(layer, LayerInput::Output, mixed);
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.output);
        let output = model.linear(&weights.output);
        let mixed = output.input(threads, mixed, threshold, &mut buffers.input);
        let bytes = output.product(threads, &mixed, threshold, &mut buffers.output);
        pass.observers.count_bytes(bytes);
        pass.observers.end_stage(Stage::AttentionOutput);
        if let Some(norm) = &weights.attention_output_norm {
            model.norm(norm, &mut buffers.output);
        }
        let hidden = &mut pass.buffers.hidden;
        self.residual.clear();
        if model.config.block.is_parallel() {
            self.residual.extend_from_slice(hidden);
        }
        add(hidden, &buffers.output);
        if model.config.block.is_post_norm() {
            model.norm(model.attention_norm(layer), hidden);
        }
        if !model.config.block.is_parallel() {
            self.residual.extend_from_slice(hidden);
        }
        Ok(())
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        let (model, weights) = (pass.model, &pass.model.weights.layers[layer]);

        // x = norm(h)
        self.ffn_input.clear();
        self.ffn_input.extend_from_slice(&self.residual);
        model.ffn_norm(layer, &mut self.ffn_input);
        pass.observers.end_stage(Stage::Norms);

        // h ← h + Σ_{i selected} act(gate_i · x) (up_i · x) · down_i
        pass.observers
            .input(layer, LayerInput::Ffn, &self.ffn_input);
        let call = FfnCall {
            layer,
            positions: &pass.buffers.positions,
            is_decode: pass.tokens.len() == pass.sessions.len(),
            x: &self.ffn_input,
            predictor_input: if model.predictor_reads_residual(layer) {
                &self.residual
            } else {
                &self.ffn_input
            },
        };
        let (hidden, ffn) = (&mut pass.buffers.hidden, model.ffn(layer));
        if let Some(norm) = &weights.ffn_output_norm {
            self.ffn_output.clear();
            self.ffn_output.resize(hidden.len(), 0.0);
            let output = &mut self.ffn_output;
            pass.observers
                .run_ffn(&model.threads, &ffn, &call, output, &mut self.ffn);
            model.norm(norm, output);
            add(hidden, output);
            return Ok(());
        }
        pass.observers
            .run_ffn(&model.threads, &ffn, &call, hidden, &mut self.ffn);
        if let (true, Some(norm)) = (model.config.block.is_post_norm(), &weights.ffn_norm) {
            model.norm(norm, hidden);
        }
        Ok(())
    }
}

/// Appends keys and values to the KV caches of `layer`, and replaces the queries by what attention mixes of the values,
/// `[tokens, heads, head_size]`.
pub(crate) fn mix(pass: &mut Pass<'_, '_>, layer: usize, projections: &mut Projections) {
    let (model, weights) = (pass.model, &pass.model.weights.layers[layer]);
    let config = &model.config;
    let Projections { query, key, value } = projections;
    for session in pass.sessions.iter() {
        let cache = &session.layers[layer];
        for plane in [&cache.keys, &cache.values] {
            model.threads.isa().prefetch_next_position(plane);
        }
    }
    if let Some([query_norm, key_norm]) = &weights.head_norms {
        model.norm(query_norm, query);
        model.norm(key_norm, key);
    }
    let tokens = pass.tokens.len();
    let (query_size, key_size) = (query.len() / tokens, key.len() / tokens);
    if let Some(table) = config.rotary_table(layer) {
        let tables = config.rotary_tables().len();
        let length = pass.buffers.rotations.len() / tables;
        let rotations = &pass.buffers.rotations[table * length..][..length];
        let rotations = rotations.chunks_exact(length / tokens);
        let heads = query
            .chunks_exact_mut(query_size)
            .zip(key.chunks_exact_mut(key_size));
        for (rotations, (query, key)) in rotations.zip(heads) {
            rotate(rotations, query, config.head_size);
            rotate(rotations, key, config.head_size);
        }
    }
    let heads = Heads {
        count: config.head_count,
        kv_count: config.kv_head_count,
        size: config.head_size,
    };
    let mask = AttentionMask {
        window: config.attention_windows[layer],
        soft_cap: config.soft_caps.attention,
        slopes: match &config.positions {
            Positions::Alibi { slopes } => Some(slopes.as_slice()),
            _ => None,
        },
    };
    let (mut query, mut key, mut value) = (&mut query[..], &key[..], &value[..]);
    for index in 0..pass.sessions.len() {
        let tokens = pass.tokens_of(index);
        let (own_query, other_queries) = query.split_at_mut(tokens * query_size);
        let (own_key, other_keys) = key.split_at(tokens * key_size);
        let (own_value, other_values) = value.split_at(tokens * key_size);
        (query, key, value) = (other_queries, other_keys, other_values);
        let cache = &mut pass.sessions[index].layers[layer];
        let rows = own_key.chunks_exact(key_size);
        for (key, value) in rows.zip(own_value.chunks_exact(key_size)) {
            cache.push(key, value);
        }
        let bytes = attend(&model.threads, heads, &mask, cache, own_query);
        pass.observers.count_bytes(bytes);
    }
}
