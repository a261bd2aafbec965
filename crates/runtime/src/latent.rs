//! Projections of latent attention (DeepSeek-V2, §2.1), before and after attention with a single KV head.
//!
//! ```text
//! q_h, r_h = W_q x                     per head; r_h will be rotated
//! r, c     = W_k x,  c ← norm(c)       one rotated key and one latent vector, as stored in the KV cache
//! q̃_h      = U_hᵀ q_h                  the key projection U, applied to the query instead
//! scores   = [r_h, q̃_h] · [r, c]
//! output_h = V_h Σ weight · c          the value projection V, applied to the sum
//! ```

use std::cell::Cell;

use powerinfer_kernels::Norm;
use powerinfer_model::LatentAttention;

use crate::{
    Threads,
    input::{Input, InputBuffers},
    linear::Linear,
    memory::PREFILL_BATCH,
    model::Model,
    scratch::ThreadBuffer,
};

thread_local! {
    /// A thread's vectors of one head, and their prepared form.
    static VECTORS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PREPARED: Cell<InputBuffers> = Cell::default();
}

/// Buffers of latent attention, reused from layer to layer.
#[derive(Debug, Default)]
pub(crate) struct LatentBuffers {
    input: InputBuffers,
    /// Queries or their compressed form, then keys.
    products: Vec<f32>,
    /// Queries of `query_size` elements, if they were compressed.
    queries: Vec<f32>,
    /// Products by head, `[heads, tokens, rows]`.
    by_head: Vec<f32>,
}

/// Vectors of all heads of some tokens: `length` elements, from `first` on, of each row of `all [tokens, heads, stride]`.
struct Vectors<'a> {
    all: &'a [f32],
    stride: usize,
    first: usize,
    length: usize,
}

/// Sets `projections` to the queries `[tokens, heads, size]`, then the keys and the values, both `[tokens, size]`, of `x [tokens, hidden]`.
/// `x` is prepared for the key projection; `size` is that of a head in the KV cache. The values are the keys before rotation; only their
/// latent part is used. Returns the bytes read.
pub(crate) fn project(
    model: &Model,
    layer: usize,
    sizes: &LatentAttention,
    x: &Input<'_>,
    buffers: &mut LatentBuffers,
    projections: &mut Vec<f32>,
) -> usize {
    let (threads, stored) = (&model.threads, &model.weights.layers[layer]);
    let latent = stored.latent.as_ref();
    let latent = latent.expect("bundles store the weights of latent attention");
    let (heads, tokens) = (model.config.head_count, x.tokens());
    let (size, rotary) = (sizes.head_size(), sizes.rotary_size);

    let down = latent.query_down.as_ref().map(|(linear, _)| linear);
    let linears = [down.unwrap_or(&stored.query), &stored.key].map(|it| model.linear(it));
    let products = &mut buffers.products;
    let mut bytes = Linear::products(&linears, threads, x, 0.0, products);
    let (queries, keys) = products.split_at_mut(tokens * linears[0].outputs());
    let queries = match &latent.query_down {
        None => &*queries,
        Some((_, norm)) => {
            normalise(model, &norm.weight, queries);
            let (input, out) = (&mut buffers.input, &mut buffers.queries);
            bytes += model.project(&stored.query, queries, input, out);
            &buffers.queries
        }
    };
    for key in keys.chunks_exact_mut(size) {
        normalise(model, &latent.norm.weight, &mut key[rotary..]);
    }

    let vectors = Vectors {
        all: queries,
        stride: sizes.query_size(),
        first: rotary,
        length: sizes.key_size,
    };
    let by_head = &mut buffers.by_head;
    bytes += multiply(
        threads,
        &model.linear(&latent.query),
        heads,
        tokens,
        &vectors,
        by_head,
    );

    projections.resize(tokens * (heads + 2) * size, 0.0);
    let (all, rest) = projections.split_at_mut(tokens * heads * size);
    let written = size_of_val(all);
    threads.by_chunks(all, heads * size, written, |token, all| {
        for (head, query) in all.chunks_exact_mut(size).enumerate() {
            let index = token * heads + head;
            let (rotated, projected) = query.split_at_mut(rotary);
            rotated.copy_from_slice(&queries[index * sizes.query_size()..][..rotary]);
            let index = head * tokens + token;
            projected.copy_from_slice(&by_head[index * sizes.rank..][..sizes.rank]);
        }
    });
    for part in rest.chunks_exact_mut(tokens * size) {
        part.copy_from_slice(keys);
    }
    bytes
}

/// Replaces `mixed [tokens, heads, size]`, the mixed vectors of the KV cache, with the output of each head, `[tokens, heads, value_size]`.
/// Returns the bytes read.
pub(crate) fn outputs(
    model: &Model,
    layer: usize,
    sizes: &LatentAttention,
    buffers: &mut LatentBuffers,
    mixed: &mut Vec<f32>,
) -> usize {
    let (threads, heads) = (&model.threads, model.config.head_count);
    let (size, value_size) = (sizes.head_size(), sizes.value_size);
    let tokens = mixed.len() / (heads * size);
    let vectors = Vectors {
        all: mixed,
        stride: size,
        first: sizes.rotary_size,
        length: sizes.rank,
    };
    let value = model.linear(&model.weights.layers[layer].value);
    let bytes = multiply(
        threads,
        &value,
        heads,
        tokens,
        &vectors,
        &mut buffers.by_head,
    );
    let by_head = &buffers.by_head;
    mixed.resize(tokens * heads * value_size, 0.0);
    let written = size_of_val(&mixed[..]);
    threads.by_chunks(mixed, heads * value_size, written, |token, mixed| {
        for (head, mixed) in mixed.chunks_exact_mut(value_size).enumerate() {
            mixed.copy_from_slice(&by_head[(head * tokens + token) * value_size..][..value_size]);
        }
    });
    bytes
}

/// Normalises the vectors of `x`, each as long as `weight`.
fn normalise(model: &Model, weight: &[f32], x: &mut [f32]) {
    let norm = Norm {
        kind: model.config.norm,
        epsilon: LatentAttention::NORM_EPSILON,
        weight,
        bias: None,
    };
    model.threads.isa().normalise(norm, x);
}

/// Sets `out [heads, tokens, rows]` to the products of the matrices of `linear`, one per head, with the vectors of that head. Returns the
/// bytes read.
fn multiply(
    threads: &Threads,
    linear: &Linear<'_>,
    heads: usize,
    tokens: usize,
    vectors: &Vectors<'_>,
    out: &mut Vec<f32>,
) -> usize {
    let matrix = &linear.matrix;
    let (rows, isa) = (matrix.rows() / heads, threads.isa());
    out.resize(heads * tokens * rows, 0.0);
    let bytes = matrix.rows() * matrix.row_bytes();
    threads.by_chunks(out, tokens * rows, bytes * tokens, |head, out| {
        let own = matrix.rows_range(head * rows..(head + 1) * rows);
        // A few vectors at a time, so that a thread needs little memory.
        for (batch, out) in out.chunks_mut(PREFILL_BATCH * rows).enumerate() {
            let count = out.len() / rows;
            ThreadBuffer(&VECTORS).stale(count * vectors.length, |x| {
                for (token, x) in x.chunks_exact_mut(vectors.length).enumerate() {
                    let index = (batch * PREFILL_BATCH + token) * heads + head;
                    let from = &vectors.all[index * vectors.stride + vectors.first..];
                    x.copy_from_slice(&from[..vectors.length]);
                }
                let mut prepared = PREPARED.take();
                let x = Input::new(threads, x, vectors.length, &own, &mut prepared);
                match count {
                    1 => x.vector(0).gemv(isa, &own, out),
                    _ => x.gemm(isa, &own, out),
                }
                PREPARED.set(prepared);
            });
        }
    });
    bytes
}
