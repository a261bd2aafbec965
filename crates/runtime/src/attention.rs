//! Causal grouped-query attention. The KV cache is streamed once for all queries that share it, in spans of positions
//! whose results are merged in order (online softmax).
//!
//! Spans start at fixed positions and each query is computed independently, so a token's result does not depend on
//! batching or on the number of threads.

use std::{cell::Cell, f32::consts::LOG2_E, ops::Range};

use crate::memory::{ATTENTION_ROWS, ATTENTION_SPAN, FEW_ROWS};
use powerinfer_kernels::{Isa, exp2};
use powerinfer_model::{SoftCaps, alibi_bias};
use powerinfer_tensor::BLOCK;

use crate::{Threads, rotary::rotate, scratch::ThreadBuffer, session::LayerCache};

thread_local! {
    /// The output of attention in one layer, `[kv_heads, rows, width]`, and the partial results of each span.
    static OUTPUTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PARTIALS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// Buffers of a thread for its part: queries, scores, a partial result, and the merged one.
    static QUERIES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static SCORES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PARTIAL: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static MERGED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Fixed cost of a row, regardless of the number of positions, as the bytes of cache that can be read in that time.
const ROW_BYTES: usize = 8 << 10;

/// Number and size of a layer's heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) count: usize,
    /// Heads of keys and values.
    pub(crate) kv_count: usize,
    /// Values of a head.
    pub(crate) size: usize,
    /// Values of a query before any projection into the latent space; scores are divided by the square root of this number.
    pub(crate) query_size: usize,
}

/// Positions that a token attends to, and adjustments of their scores: soft cap, ALiBi slopes and attention sinks.
pub(crate) struct AttentionMask<'a> {
    /// Positions of a sliding window, the token's own included; none for full causal attention.
    pub(crate) window: Option<usize>,
    /// Soft cap of the attention scores.
    pub(crate) soft_cap: Option<f32>,
    /// ALiBi slopes, `[heads]`.
    pub(crate) slopes: Option<&'a [f32]>,
    /// Attention sinks, `[heads]`: scores without value vectors.
    pub(crate) sinks: Option<&'a [f32]>,
}

impl AttentionMask<'_> {
    /// Positions that the token at `position` attends to.
    fn positions(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        let first = self.window.map_or(0, |window| end.saturating_sub(window));
        first..end
    }
}

/// Sets `mixed` to `softmax(q·kᵀ / √query_size) · v` for the `queries` of the last tokens in `cache`, after rotating them by `rotations
/// [tokens, pairs]`. `queries` and `mixed` are `[tokens, heads, head_size]`. Returns the bytes of the cache that were read.
pub(crate) fn attend(
    threads: &Threads,
    heads: Heads,
    mask: &AttentionMask<'_>,
    rotations: &[[f32; 2]],
    cache: &LayerCache,
    queries: &[f32],
    mixed: &mut [f32],
) -> usize {
    let tokens = queries.len() / (heads.count * heads.size);
    let group = heads.count / heads.kv_count;
    let rows = tokens * group;
    let layer = LayerAttention {
        isa: threads.isa(),
        mask,
        rotations,
        pairs: rotations.len() / tokens.max(1),
        cache,
        first: cache.keys.positions() - tokens,
        size: heads.size,
        group,
        rows,
        // Blocks of rows have one length, so that threads can share them.
        stride: match rows {
            0..=ATTENTION_ROWS => rows,
            _ => rows.next_multiple_of(ATTENTION_ROWS),
        },
        // Powers of two are cheaper than those of e.
        scale: LOG2_E / (heads.query_size as f32).sqrt(),
    };
    let width = cache.keys.width();
    if tokens == 1 && width == heads.size {
        return layer.run(threads, queries, mixed); // the rows are in the order of the heads
    }
    let values = heads.kv_count * layer.stride * width;
    ThreadBuffer(&OUTPUTS).stale(values, |outputs| {
        let bytes = layer.run(threads, queries, outputs);
        for (index, head) in mixed.chunks_exact_mut(heads.size).enumerate() {
            let (token, head_index) = (index / heads.count, index % heads.count);
            let (kv_head, member) = (head_index / group, head_index % group);
            let row = kv_head * layer.stride + token * group + member;
            head.copy_from_slice(&outputs[row * width..][..heads.size]);
        }
        bytes
    })
}

/// Attention of some tokens over one layer's cache. Row `token · group + head` of a KV head is that of query head
/// `head` of its group.
struct LayerAttention<'a> {
    isa: Isa,
    mask: &'a AttentionMask<'a>,
    /// Rotations of the queries, `[tokens, pairs]`.
    rotations: &'a [[f32; 2]],
    pairs: usize,
    cache: &'a LayerCache,
    /// Position of the first token.
    first: usize,
    /// Values of a head.
    size: usize,
    /// Query heads per KV head.
    group: usize,
    /// Rows of a KV head.
    rows: usize,
    /// Rows from one KV head to the next.
    stride: usize,
    /// Factor of the queries.
    scale: f32,
}

impl LayerAttention<'_> {
    /// Sets `outputs [kv_heads, stride, width]` to the attention of the `queries [tokens, heads, head_size]`; returns the bytes read.
    fn run(&self, threads: &Threads, queries: &[f32], outputs: &mut [f32]) -> usize {
        let (rows, width) = (self.rows, self.cache.keys.width());
        let tokens = rows / self.group;
        let positions = self.mask.positions(self.first).start..self.first + tokens;
        let spans = positions.start / ATTENTION_SPAN..positions.end.div_ceil(ATTENTION_SPAN);
        let bytes = positions.len() * self.cache.tile_bytes() / BLOCK;
        if rows <= FEW_ROWS.max(self.group) && spans.len() > 1 {
            self.by_spans(threads, queries, outputs, spans, bytes);
            return bytes;
        }
        // Threads share the rows.
        let block = self.stride.min(ATTENTION_ROWS);
        let blocks = self.stride / block;
        let work = bytes * blocks + outputs.len() / width * ROW_BYTES;
        threads.by_chunks(outputs, block * width, work, |index, outputs| {
            let (head, first_row) = (index / blocks, index % blocks * block);
            let rows = block.min(rows - first_row);
            self.gather(head, first_row..first_row + rows, queries, |queries| {
                ThreadBuffer(&SCORES).zeroed(rows * ATTENTION_SPAN, |scores| {
                    ThreadBuffer(&PARTIAL).zeroed(rows * (width + 2), |partial| {
                        ThreadBuffer(&MERGED).zeroed(rows * (width + 2), |merged| {
                            self.start(merged, head, first_row);
                            for span in spans.clone() {
                                self.span(head, span, first_row, queries, scores, partial);
                                merge(merged, partial, rows, width);
                            }
                            finish(merged, &mut outputs[..rows * width], width);
                        });
                    });
                });
            });
        });
        bytes
    }

    /// As [`Self::run`] for few rows that attend to several spans of positions: threads share the spans.
    fn by_spans(
        &self,
        threads: &Threads,
        queries: &[f32],
        outputs: &mut [f32],
        spans: Range<usize>,
        bytes: usize,
    ) {
        let (rows, width) = (self.rows, self.cache.keys.width());
        let (kv_heads, part) = (self.cache.keys.heads(), rows * (width + 2));
        ThreadBuffer(&PARTIALS).stale(kv_heads * spans.len() * part, |partials| {
            threads.by_chunks(partials, part, bytes, |index, partial| {
                let (head, span) = (index / spans.len(), index % spans.len());
                let scores = rows.min(ATTENTION_ROWS) * ATTENTION_SPAN;
                self.gather(head, 0..rows, queries, |queries| {
                    ThreadBuffer(&SCORES).zeroed(scores, |scores| {
                        self.span(head, spans.start + span, 0, queries, scores, partial);
                    });
                });
            });
            let (of_head, bytes) = (spans.len() * part, size_of_val(partials));
            threads.by_chunks(outputs, self.stride * width, bytes, |head, outputs| {
                ThreadBuffer(&MERGED).zeroed(part, |merged| {
                    self.start(merged, head, 0);
                    for partial in partials[head * of_head..][..of_head].chunks_exact(part) {
                        merge(merged, partial, rows, width);
                    }
                    finish(merged, &mut outputs[..rows * width], width);
                });
            });
        });
    }

    /// Calls `act` with the rotated and scaled queries `[rows, width]` of the given `rows` of `kv_head`, from `queries
    /// [tokens, heads, head_size]`.
    fn gather(
        &self,
        kv_head: usize,
        rows: Range<usize>,
        queries: &[f32],
        act: impl FnOnce(&[f32]),
    ) {
        let (width, heads) = (
            self.cache.keys.width(),
            self.cache.keys.heads() * self.group,
        );
        ThreadBuffer(&QUERIES).zeroed(rows.len() * width, |gathered| {
            for (row, gathered) in rows.zip(gathered.chunks_exact_mut(width)) {
                let (token, member) = (row / self.group, row % self.group);
                let head = token * heads + kv_head * self.group + member;
                let gathered = &mut gathered[..self.size];
                gathered.copy_from_slice(&queries[head * self.size..][..self.size]);
                let rotations = &self.rotations[token * self.pairs..][..self.pairs];
                rotate(rotations, gathered, self.size);
                gathered.iter_mut().for_each(|query| *query *= self.scale);
            }
            act(gathered);
        });
    }

    /// Resets `merged`, the result of the rows of `kv_head` from `first_row` on, to the result over no span: only the sinks, if any.
    fn start(&self, merged: &mut [f32], kv_head: usize, first_row: usize) {
        let width = self.cache.keys.width();
        let rows = merged.len() / (width + 2);
        let (sums, ends) = merged.split_at_mut(rows * width);
        sums.fill(0.0);
        let ends = ends.as_chunks_mut::<2>().0;
        ends.fill(EMPTY);
        if let Some(sinks) = self.mask.sinks {
            let sinks = &sinks[kv_head * self.group..][..self.group];
            for (row, end) in (first_row..).zip(ends) {
                // The sink is a score whose value vector is 0.
                *end = [LOG2_E * sinks[row % self.group], 1.0];
            }
        }
    }

    /// Sets `partial` to the attention of the rows from `first_row` on over one span of positions: for each the sum of
    /// values weighted by `2^(score − largest)`; after the sums, per row the largest score and the sum of weights.
    fn span(
        &self,
        head: usize,
        span: usize,
        first_row: usize,
        queries: &[f32],
        scores: &mut [f32],
        partial: &mut [f32],
    ) {
        let LayerCache { keys, values } = self.cache;
        let width = keys.width();
        let rows = queries.len() / width;
        let (sums, ends) = partial.split_at_mut(rows * width);
        let span = span * ATTENTION_SPAN..(span + 1) * ATTENTION_SPAN;
        let seen = |row: usize| {
            let seen = self
                .mask
                .positions(self.first + (first_row + row) / self.group);
            seen.start.max(span.start)..seen.end.min(span.end)
        };
        sums.fill(0.0);
        for start in (0..rows).step_by(ATTENTION_ROWS) {
            let chunk = start..rows.min(start + ATTENTION_ROWS);
            // Later rows see later positions.
            let union = seen(chunk.start).start..seen(chunk.end - 1).end;
            let tiles = union.start / BLOCK..union.end.div_ceil(BLOCK);
            let ends = &mut ends[2 * chunk.start..2 * chunk.end];
            if union.is_empty() {
                ends.as_chunks_mut::<2>().0.fill(EMPTY);
                continue;
            }
            let length = tiles.len() * BLOCK;
            let scores = &mut scores[..chunk.len() * length];
            let part = chunk.start * width..chunk.end * width;
            self.isa
                .scores(keys, head, tiles.clone(), &queries[part.clone()], scores);
            let rows = scores.chunks_exact_mut(length);
            for (row, (scores, end)) in chunk.zip(rows.zip(ends.as_chunks_mut::<2>().0)) {
                let seen = seen(row);
                if seen.is_empty() {
                    scores.fill(0.0);
                    *end = EMPTY;
                    continue;
                }
                let first = tiles.start * BLOCK;
                let valid = seen.start - first..seen.end - first;
                if let Some(slopes) = self.mask.slopes {
                    let slope = slopes[head * self.group + (first_row + row) % self.group];
                    for (score, position) in scores[valid.clone()].iter_mut().zip(seen) {
                        *score += alibi_bias(slope, position) * self.scale;
                    }
                }
                if let Some(cap) = self.mask.soft_cap {
                    let cap = cap * LOG2_E; // scores are base-2 exponents
                    for score in &mut scores[valid.clone()] {
                        *score = SoftCaps::apply(cap, *score);
                    }
                }
                *end = self.isa.exp2_minus_max(scores, valid).into();
            }
            self.isa
                .weighted_values(values, head, tiles, scores, &mut sums[part]);
        }
    }
}

/// Largest score and sum of weights of a row without positions.
const EMPTY: [f32; 2] = [f32::NEG_INFINITY, 0.0];

/// Merges the partial results of one more span into `merged`.
fn merge(merged: &mut [f32], partial: &[f32], rows: usize, width: usize) {
    let (sums, ends) = merged.split_at_mut(rows * width);
    let (added_sums, added_ends) = partial.split_at(rows * width);
    let ends = ends.as_chunks_mut::<2>().0;
    for (row, (end, added)) in ends.iter_mut().zip(added_ends.as_chunks().0).enumerate() {
        if *added == EMPTY {
            continue;
        }
        let largest = end[0].max(added[0]);
        let (before, new) = (exp2(end[0] - largest), exp2(added[0] - largest));
        let row = row * width..(row + 1) * width;
        for (sum, added) in sums[row.clone()].iter_mut().zip(&added_sums[row]) {
            *sum = *sum * before + added * new;
        }
        *end = [largest, end[1] * before + added[1] * new];
    }
}

/// Divides the sums of values by the sums of weights.
fn finish(merged: &[f32], mixed: &mut [f32], width: usize) {
    let (sums, ends) = merged.split_at(mixed.len());
    let rows = sums.chunks_exact(width).zip(ends.as_chunks::<2>().0);
    for (mixed, (sums, [_, weights])) in mixed.chunks_exact_mut(width).zip(rows) {
        for (mixed, sum) in mixed.iter_mut().zip(sums) {
            *mixed = sum / weights;
        }
    }
}

#[cfg(test)]
mod tests;
