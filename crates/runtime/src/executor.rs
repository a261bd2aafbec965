//! The backend of the forward pass, and its implementation for the CPU.

use powerinfer_model::Positions;

use crate::{
    RuntimeError, Stage,
    attention::{AttentionMask, Heads, attend},
    ffn::{FfnBuffers, FfnInputs},
    input::InputBuffers,
    latent::{self, LatentBuffers},
    linear::Linear,
    memory::PREFILL_BATCH,
    model::Model,
    observer::{FfnCall, LayerInput},
    pass::Pass,
    session::{HeadTiles, emptied, store},
    threads::add,
};

/// Backend of the layers: the CPU, or a GPU and the CPU. Errors are those of a device.
pub(crate) trait LayerExecutor: std::fmt::Debug + Send {
    /// Largest number of tokens of a session in a pass.
    fn max_batch_tokens(&self) -> usize;

    /// Largest number of tokens in a pass, of any sessions, whose results match running each alone.
    fn max_exact_tokens(&self) -> usize;

    /// Whether the executor has the embeddings of `tokens`, so that the host need not look them up.
    fn has_embeddings(&self, _tokens: &[u32]) -> bool {
        false
    }

    /// Starts a pass, whose hidden states are the embeddings.
    fn begin(&mut self, _pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Adds attention's output in `layer` to the hidden states, and appends keys and values to the KV cache.
    fn attention(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError>;

    /// Adds the FFN's output in `layer` to the hidden states.
    fn ffn(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError>;

    /// Ends a pass: its hidden states are those after the last layer, unless the executor has found the largest logit.
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
    /// Number of prompt tokens that run together; 0 stands for [`PREFILL_BATCH`].
    prompt_tokens: usize,
    /// Hidden states before attention, `[tokens, hidden]`, if the FFN or its predictor reads them.
    pub(crate) residual: Vec<f32>,
    /// Hidden states before attention, `[tokens, hidden]`, if routers read them.
    layer_input: Vec<f32>,
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
    /// Queries, then keys, then values, each `[tokens, heads, head_size]`.
    projections: Vec<f32>,
    latent: LatentBuffers,
    mixed: Vec<f32>,
    output: Vec<f32>,
    /// Memory for the tiles of a position's heads; empty between uses.
    heads: Vec<HeadTiles<'static>>,
}

impl CpuExecutor {
    /// An executor that runs up to `prompt_tokens` tokens of a prompt together.
    pub(crate) fn new(prompt_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            ..Self::default()
        }
    }
}

impl LayerExecutor for CpuExecutor {
    fn max_batch_tokens(&self) -> usize {
        self.prompt_tokens.max(PREFILL_BATCH)
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
        let hidden = &pass.buffers.hidden;
        if model.routes_layer_input() {
            hidden.clone_into(&mut self.layer_input);
        }
        if model.config.block.norms_input() {
            model.norm_of(model.attention_norm(layer), hidden, &mut buffers.x);
        } else {
            hidden.clone_into(&mut buffers.x);
        }
        pass.observers.end_stage(Stage::Norms);

        // q, k, v = W_q x, W_k x, W_v x
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.attention);
        pass.observers
            .input(layer, LayerInput::Attention, &buffers.x);
        let latent = model.config.latent.as_ref();
        let key = model.linear(&weights.key);
        let x = key.input(threads, &buffers.x, threshold, &mut buffers.input);
        let stored = [&weights.query, &weights.key, &weights.value];
        let linears = stored.map(|stored| model.linear(stored));
        let projections = &mut buffers.projections;
        let one =
            pass.tokens.len() == 1 && latent.is_none() && linears.iter().all(Linear::is_by_output);
        let heads = std::mem::take(&mut buffers.heads);
        let cache = one.then(|| pass.sessions[0].layers[layer].append(heads, 1));
        let cache = cache.flatten();
        let is_stored = cache.is_some();
        let bytes = match cache {
            None if let Some(sizes) = latent => {
                let latent = &mut buffers.latent;
                latent::project(model, layer, sizes, &x, latent, projections)
            }
            None => Linear::products(&linears, threads, &x, threshold, projections),
            Some(mut position) => {
                // Threads write the key and the value as soon as they are known.
                let rotations = rotations_of(model, layer, &pass.buffers.rotations);
                let size = model.config.head_size;
                let (isa, writers) = (threads.isa(), position.writers);
                let bytes = Linear::products_then(
                    &linears,
                    threads,
                    &x,
                    projections,
                    |projections| {
                        norm_heads(model, layer, 1, projections);
                        let keys = model.config.head_count * size;
                        let numbers = &projections[keys..];
                        numbers.split_at(numbers.len() / 2)
                    },
                    (&mut position.heads, position.bytes),
                    |all, heads, (keys, values)| {
                        let own = all.start * size..all.end * size;
                        let numbers = [&keys[own.clone()], &values[own]];
                        store(isa, writers, heads, rotations, numbers);
                    },
                );
                buffers.heads = emptied(position.heads);
                bytes
            }
        };
        pass.observers.count_bytes(bytes);
        pass.observers.end_stage(Stage::QueryKeyValue);

        // softmax(q · kᵀ / √d) · v
        let mixed = &mut buffers.mixed;
        mix(pass, layer, &mut buffers.projections, is_stored, mixed);
        pass.observers.end_stage(Stage::Attention);

        if let Some(sizes) = latent {
            let bytes = latent::outputs(model, layer, sizes, &mut buffers.latent, mixed);
            pass.observers.count_bytes(bytes);
        }

        // h ← h + W_o · …
        pass.observers.input(layer, LayerInput::Output, mixed);
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.output);
        let output = model.linear(&weights.output);
        let mixed = output.input(threads, mixed, threshold, &mut buffers.input);
        let (product, hidden) = (&mut buffers.output, &mut pass.buffers.hidden);
        if model.config.block.is_parallel() {
            hidden.clone_into(&mut self.residual);
        }
        let bytes = match &weights.attention_output_norm {
            None => output.add_product(threads, &mixed, threshold, product, hidden),
            Some(norm) => {
                let bytes = output.product(threads, &mixed, threshold, product);
                model.norm(norm, product);
                add(hidden, product);
                bytes
            }
        };
        pass.observers.count_bytes(bytes);
        pass.observers.end_stage(Stage::AttentionOutput);
        if model.config.block.is_post_norm() {
            model.norm(model.attention_norm(layer), hidden);
        }
        Ok(())
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        let (model, weights) = (pass.model, &pass.model.weights.layers[layer]);

        // x = norm(h)
        let predicts_residual = model.predictor_reads_residual(layer);
        let reads = if model.config.block.is_parallel() {
            &self.residual
        } else {
            if predicts_residual {
                pass.buffers.hidden.clone_into(&mut self.residual);
            }
            &pass.buffers.hidden
        };
        model.ffn_norm(layer, reads, &mut self.ffn_input);
        pass.observers.end_stage(Stage::Norms);

        // h ← h + Σ_{i selected} act(gate_i · x) (up_i · x) · down_i
        pass.observers
            .input(layer, LayerInput::Ffn, &self.ffn_input);
        let call = FfnCall {
            layer,
            positions: &pass.buffers.positions,
            is_decode: pass.tokens.len() == pass.sessions.len(),
            inputs: FfnInputs {
                x: &self.ffn_input,
                predictor: predicts_residual.then_some(&self.residual),
                router: model.routes_layer_input().then_some(&self.layer_input),
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

/// Rotations of the pass's tokens in `layer`, `[tokens, pairs]`: a slice of `all`, which holds those of all tables.
fn rotations_of<'a>(model: &Model, layer: usize, all: &'a [[f32; 2]]) -> &'a [[f32; 2]] {
    let Some(table) = model.config.rotary_table(layer) else {
        return &[];
    };
    let length = all.len() / model.config.rotary_tables().len();
    &all[table * length..][..length]
}

/// Normalises the heads of queries and keys in `projections`, if the model has such norms.
fn norm_heads(model: &Model, layer: usize, tokens: usize, projections: &mut [f32]) {
    if let Some([query_norm, key_norm]) = &model.weights.layers[layer].head_norms {
        let sizes = [model.config.head_count, model.config.kv_head_count];
        let [queries, keys] = sizes.map(|heads| tokens * heads * model.config.head_size);
        model.norm(query_norm, &mut projections[..queries]);
        model.norm(key_norm, &mut projections[queries..queries + keys]);
    }
}

/// Appends keys and values, `[tokens, kv_heads, head_size]` each, to the host's KV cache of `layer`. `pass` must have one sequence. Head
/// norms and rotation are applied first.
pub(crate) fn append(pass: &mut Pass<'_, '_>, layer: usize, [mut keys, values]: [Vec<f32>; 2]) {
    let model = pass.model;
    if let Some([_, norm]) = &model.weights.layers[layer].head_norms {
        model.norm(norm, &mut keys);
    }
    let rotations = rotations_of(model, layer, &pass.buffers.rotations);
    let [session] = pass.sessions else {
        unreachable!("prompts on a device run alone")
    };
    let (cache, tokens) = (&mut session.layers[layer], pass.tokens.len());
    cache.push_all(&model.threads, rotations, [&keys, &values], tokens);
}

/// Appends keys and values to the KV caches of `layer`, unless they are already there (`is_stored`); then sets
/// `mixed [tokens, heads, head_size]` to the values mixed by attention. `projections` holds the queries of all tokens, then their keys,
/// then their values.
pub(crate) fn mix(
    pass: &mut Pass<'_, '_>,
    layer: usize,
    projections: &mut [f32],
    is_stored: bool,
    mixed: &mut Vec<f32>,
) {
    let model = pass.model;
    let config = &model.config;
    let tokens = pass.tokens.len();
    let query_size = config.head_count * config.head_size;
    let key_size = config.kv_head_count * config.head_size;
    if !is_stored {
        norm_heads(model, layer, tokens, projections);
    }
    let (query, rest) = projections.split_at(tokens * query_size);
    let (key, value) = rest.split_at(tokens * key_size);
    mixed.resize(query.len(), 0.0);
    let rotations = rotations_of(model, layer, &pass.buffers.rotations);
    let pairs = rotations.len() / tokens;
    let heads = Heads {
        count: config.head_count,
        kv_count: config.kv_head_count,
        size: config.head_size,
        query_size: config.query_size(),
    };
    let mask = AttentionMask {
        window: config.attention_windows[layer],
        soft_cap: config.soft_caps.attention,
        slopes: match &config.positions {
            Positions::Alibi { slopes } => Some(slopes.as_slice()),
            _ => None,
        },
        sinks: model.weights.layers[layer].sinks.as_deref(),
    };
    let mut start = 0;
    for index in 0..pass.sessions.len() {
        let own = start..start + pass.tokens_of(index);
        start = own.end;
        let cache = &mut pass.sessions[index].layers[layer];
        if !is_stored {
            let numbers = own.start * key_size..own.end * key_size;
            let rotations = &rotations[own.start * pairs..own.end * pairs];
            let both = [&key[numbers.clone()], &value[numbers]];
            cache.push_all(&model.threads, rotations, both, own.len());
        }
        let rotations = &rotations[own.start * pairs..own.end * pairs];
        let own = own.start * query_size..own.end * query_size;
        let (query, mixed) = (&query[own.clone()], &mut mixed[own]);
        let bytes = attend(&model.threads, heads, &mask, rotations, cache, query, mixed);
        pass.observers.count_bytes(bytes);
    }
}
