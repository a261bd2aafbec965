//! Causal grouped-query attention. The KV cache is streamed once for all queries that share it, in spans of positions
//! whose results are merged in order (online softmax).
//!
//! Spans start at fixed positions and each query is computed independently, so a token's result does not depend on
//! batching or on the number of threads.

use std::{cell::Cell, f32::consts::LOG2_E, ops::Range};

use powerinfer_bundle::memory::{ATTENTION_ROWS, ATTENTION_SPAN, FEW_ROWS};
use powerinfer_kernels::{Isa, exp2};
use powerinfer_model::alibi_bias;
use powerinfer_tensor::BLOCK;

use crate::{Threads, scratch::ThreadBuffer, sequence::LayerCache};

thread_local! {
    /// Queries of one layer, `[kv_heads, rows, width]`, what attention gives for them, and per span the partial results.
    static QUERIES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static OUTPUTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PARTIALS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// What a thread needs for its part: scores, a partial result, and the merged one.
    static SCORES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static PARTIAL: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static MERGED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Number and size of a layer's heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) count: usize,
    /// Heads of keys and values.
    pub(crate) kv_count: usize,
    /// Values of a head.
    pub(crate) size: usize,
}

/// The positions that a token attends to, and the bias of their scores.
pub(crate) struct AttentionMask<'a> {
    /// Positions of a sliding window, the token's own included; none for full causal attention.
    pub(crate) window: Option<usize>,
    /// ALiBi slopes, `[heads]`.
    pub(crate) slopes: Option<&'a [f32]>,
}

impl AttentionMask<'_> {
    /// Positions that the token at `position` attends to.
    fn positions(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        let first = self.window.map_or(0, |window| end.saturating_sub(window));
        first..end
    }
}

/// Replaces `queries [tokens, heads, head_size]`, those of the last tokens in `cache`, by `softmax(q·kᵀ / √head_size) · v`.
/// Returns the bytes of the cache that were read.
pub(crate) fn attend(
    threads: &Threads,
    heads: Heads,
    mask: &AttentionMask<'_>,
    cache: &LayerCache,
    queries: &mut [f32],
) -> usize {
    let tokens = queries.len() / (heads.count * heads.size);
    let group = heads.count / heads.kv_count;
    let rows = tokens * group;
    let layer = LayerAttention {
        isa: threads.isa(),
        mask,
        cache,
        first: cache.keys[0].positions() - tokens,
        size: heads.size,
        group,
        rows,
        // Blocks of rows have one length, so that threads can share them.
        stride: match rows {
            0..=ATTENTION_ROWS => rows,
            _ => rows.next_multiple_of(ATTENTION_ROWS),
        },
        // Powers of two are cheaper than those of e.
        scale: LOG2_E / (heads.size as f32).sqrt(),
    };
    let values = heads.kv_count * layer.stride * cache.keys[0].width();
    ThreadBuffer(&QUERIES).zeroed(values, |gathered| {
        ThreadBuffer(&OUTPUTS).zeroed(values, |outputs| {
            layer.for_each_head(queries, gathered, |query, row| {
                let scaled = query.iter().map(|query| query * layer.scale);
                row.iter_mut()
                    .zip(scaled)
                    .for_each(|(row, query)| *row = query);
            });
            let bytes = layer.run(threads, gathered, outputs);
            layer.for_each_head(queries, outputs, |out, row| {
                out.copy_from_slice(&row[..layer.size]);
            });
            bytes
        })
    })
}

/// Bytes of 32 positions of one plane.
fn kv_plane_bytes(cache: &LayerCache) -> usize {
    let plane = &cache.keys[0];
    plane.format().plane_bytes(plane.head_size(), BLOCK)
}

/// Attention of some tokens over one layer's cache. Row `token · group + head` of a KV head is that of query head
/// `head` of its group.
struct LayerAttention<'a> {
    isa: Isa,
    mask: &'a AttentionMask<'a>,
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
    /// Sets `outputs` to the attention of the rows in `queries`, both `[kv_heads, stride, width]`; returns the bytes
    /// read.
    fn run(&self, threads: &Threads, queries: &[f32], outputs: &mut [f32]) -> usize {
        let (rows, width) = (self.rows, self.cache.keys[0].width());
        let tokens = rows / self.group;
        let positions = self.mask.positions(self.first).start..self.first + tokens;
        let spans = positions.start / ATTENTION_SPAN..positions.end.div_ceil(ATTENTION_SPAN);
        let kv_heads = self.cache.keys.len();
        let position_bytes = 2 * kv_plane_bytes(self.cache) / BLOCK;
        let bytes = kv_heads * positions.len() * position_bytes;
        if rows <= FEW_ROWS.max(self.group) && spans.len() > 1 {
            self.by_spans(threads, queries, outputs, spans, bytes);
            return bytes;
        }
        // Threads share the rows.
        let block = self.stride.min(ATTENTION_ROWS);
        let blocks = self.stride / block;
        let work = bytes * blocks;
        threads.by_chunks(outputs, block * width, work, |index, outputs| {
            let (head, first_row) = (index / blocks, index % blocks * block);
            let rows = block.min(rows - first_row);
            let queries = &queries[(head * self.stride + first_row) * width..][..rows * width];
            ThreadBuffer(&SCORES).zeroed(rows * ATTENTION_SPAN, |scores| {
                ThreadBuffer(&PARTIAL).zeroed(rows * (width + 2), |partial| {
                    ThreadBuffer(&MERGED).zeroed(rows * (width + 2), |merged| {
                        start(merged, rows, width);
                        for span in spans.clone() {
                            self.span(head, span, first_row, queries, scores, partial);
                            merge(merged, partial, rows, width);
                        }
                        finish(merged, &mut outputs[..rows * width], width);
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
        let (rows, width) = (self.rows, self.cache.keys[0].width());
        let (kv_heads, part) = (self.cache.keys.len(), rows * (width + 2));
        ThreadBuffer(&PARTIALS).zeroed(kv_heads * spans.len() * part, |partials| {
            threads.by_chunks(partials, part, bytes, |index, partial| {
                let (head, span) = (index / spans.len(), index % spans.len());
                let queries = &queries[head * self.stride * width..][..rows * width];
                let scores = rows.min(ATTENTION_ROWS) * ATTENTION_SPAN;
                ThreadBuffer(&SCORES).zeroed(scores, |scores| {
                    self.span(head, spans.start + span, 0, queries, scores, partial);
                });
            });
            let partials = partials.chunks_exact(spans.len() * part);
            let outputs = outputs.chunks_exact_mut(self.stride * width);
            for (partials, outputs) in partials.zip(outputs) {
                ThreadBuffer(&MERGED).zeroed(part, |merged| {
                    start(merged, rows, width);
                    for partial in partials.chunks_exact(part) {
                        merge(merged, partial, rows, width);
                    }
                    finish(merged, &mut outputs[..rows * width], width);
                });
            }
        });
    }

    /// Calls `act` with each head of `heads [tokens, heads, head_size]` and its row of `rows [kv_heads, stride, width]`.
    fn for_each_head(
        &self,
        heads: &mut [f32],
        rows: &mut [f32],
        act: impl Fn(&mut [f32], &mut [f32]),
    ) {
        let (kv_heads, width) = (self.cache.keys.len(), self.cache.keys[0].width());
        for (index, head) in heads.chunks_exact_mut(self.size).enumerate() {
            let (token, head_index) = (
                index / (kv_heads * self.group),
                index % (kv_heads * self.group),
            );
            let (kv_head, member) = (head_index / self.group, head_index % self.group);
            let row = kv_head * self.stride + token * self.group + member;
            act(head, &mut rows[row * width..][..width]);
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
        let (keys, values) = (&self.cache.keys[head], &self.cache.values[head]);
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
                .scores(keys, tiles.clone(), &queries[part.clone()], scores);
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
                *end = self.isa.exp2_minus_max(scores, valid).into();
            }
            self.isa
                .weighted_values(values, tiles, scores, &mut sums[part]);
        }
    }
}

/// Largest score and sum of weights of a row without positions.
const EMPTY: [f32; 2] = [f32::NEG_INFINITY, 0.0];

/// Resets `merged` to the sum over no span.
fn start(merged: &mut [f32], rows: usize, width: usize) {
    let (sums, ends) = merged.split_at_mut(rows * width);
    sums.fill(0.0);
    ends.as_chunks_mut::<2>().0.fill(EMPTY);
}

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
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_tensor::CacheFormat;
    use proptest::prelude::*;

    use super::*;

    /// What some tokens see, and what they ask.
    struct Case {
        heads: Heads,
        window: Option<usize>,
        slopes: Option<Vec<f32>>,
        queries: Vec<f32>,
        keys: Vec<f32>,
        values: Vec<f32>,
    }

    impl Case {
        fn new(heads: Heads, window: Option<usize>, with_slopes: bool, tokens: usize) -> Self {
            let mut random = Random::new(tokens as u64);
            let mut normal = |count: usize| {
                let numbers = (0..count).map(|_| random.normal() as f32);
                numbers.collect::<Vec<_>>()
            };
            Self {
                queries: normal(tokens * heads.count * heads.size),
                keys: normal(tokens * heads.kv_count * heads.size),
                values: normal(tokens * heads.kv_count * heads.size),
                slopes: with_slopes.then(|| {
                    let slope = |head| 0.5f32.powi(head as i32 + 1);
                    (0..heads.count).map(slope).collect()
                }),
                heads,
                window,
            }
        }

        fn tokens(&self) -> usize {
            self.queries.len() / (self.heads.count * self.heads.size)
        }

        /// What attention gives for the tokens in batches of these sizes, the last one repeated.
        fn run(&self, format: CacheFormat, batches: &[usize], threads: &Threads) -> Vec<f32> {
            let Heads {
                count,
                kv_count,
                size,
            } = self.heads;
            let mut cache = LayerCache::new(kv_count, size, format, self.tokens()).unwrap();
            let mask = AttentionMask {
                window: self.window,
                slopes: self.slopes.as_deref(),
            };
            let mut out = self.queries.clone();
            let mut token = 0;
            let sizes = batches
                .iter()
                .chain(std::iter::repeat(&batches[batches.len() - 1]));
            for batch in sizes {
                let batch = token..self.tokens().min(token + batch);
                for token in batch.clone() {
                    let own = token * kv_count * size..(token + 1) * kv_count * size;
                    cache.push(&self.keys[own.clone()], &self.values[own]);
                }
                let queries = &mut out[batch.start * count * size..batch.end * count * size];
                attend(threads, self.heads, &mask, &cache, queries);
                token = batch.end;
                if token == self.tokens() {
                    return out;
                }
            }
            unreachable!("batches have no end")
        }

        /// The same for one head of one token, in double precision.
        fn exact(&self, token: usize, head: usize) -> Vec<f64> {
            let Heads {
                count,
                kv_count,
                size,
            } = self.heads;
            let kv_head = head / (count / kv_count);
            let query = &self.queries[(token * count + head) * size..][..size];
            let first = self
                .window
                .map_or(0, |window| (token + 1).saturating_sub(window));
            let score = |position: usize| {
                let key = &self.keys[(position * kv_count + kv_head) * size..][..size];
                let pairs = query.iter().zip(key);
                let product: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let slopes = self.slopes.as_ref();
                let bias = slopes.map_or(0.0, |slopes| alibi_bias(slopes[head], position));
                (product + f64::from(bias)) / (size as f64).sqrt()
            };
            let scores: Vec<f64> = (first..=token).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut out) = (0.0, vec![0.0; size]);
            for (score, position) in scores.iter().zip(first..) {
                let weight = (score - largest).exp();
                let value = &self.values[(position * kv_count + kv_head) * size..][..size];
                out.iter_mut()
                    .zip(value)
                    .for_each(|(out, value)| *out += weight * f64::from(*value));
                sum += weight;
            }
            out.into_iter().map(|out| out / sum).collect()
        }

        /// Fails where `found` is further off than `allowed` for `token`.
        fn check(&self, found: &[f32], token: usize, allowed: f64) {
            let Heads { count, size, .. } = self.heads;
            for head in 0..count {
                let found = &found[(token * count + head) * size..][..size];
                for (found, exact) in found.iter().zip(self.exact(token, head)) {
                    let off = (f64::from(*found) - exact).abs();
                    assert!(off <= allowed, "token {token} head {head}: {found} {exact}");
                }
            }
        }
    }

    /// How far results may be off whose values are normal.
    fn allowed(format: CacheFormat) -> f64 {
        match format {
            CacheFormat::F32 => 1e-5,
            CacheFormat::F16 => 6e-3,
            CacheFormat::Q8_0 => 1e-1,
        }
    }

    fn threads(count: usize) -> Threads {
        Threads::new(Isa::detect().unwrap(), count).unwrap()
    }

    #[test]
    fn attention_is_that_of_double_precision() {
        for format in CacheFormat::ALL {
            for (count, kv_count, size) in [
                (1, 1, 8),
                (4, 2, 64),
                (6, 1, 33),
                (8, 8, 80),
                (9, 3, 96),
                (8, 1, 128),
                (71, 1, 64),
                (2, 1, 256),
            ] {
                let heads = Heads {
                    count,
                    kv_count,
                    size,
                };
                for (window, with_slopes) in [
                    (None, false),
                    (Some(5), false),
                    (Some(70), true),
                    (None, true),
                ] {
                    let case = Case::new(heads, window, with_slopes, 100);
                    let found = case.run(format, &[40, 1], &threads(1));
                    for token in [0, 1, 31, 32, 39, 40, 76, 99] {
                        case.check(&found, token, allowed(format));
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn batches_and_threads_change_no_bit(
            format in 0usize..3,
            kv_count in 1usize..4,
            group in 1usize..6,
            size in 1usize..70,
            window in proptest::option::of(1usize..900),
            with_slopes: bool,
            tokens in 1usize..1200,
            batches in proptest::collection::vec(1usize..600, 1..6),
        ) {
            let heads = Heads { count: kv_count * group, kv_count, size };
            let case = Case::new(heads, window, with_slopes, tokens);
            let format = CacheFormat::ALL[format];
            let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let one_by_one = bits(case.run(format, &[1], &threads(1)));
            prop_assert_eq!(&bits(case.run(format, &batches, &threads(1))), &one_by_one);
            prop_assert_eq!(&bits(case.run(format, &batches, &threads(3))), &one_by_one);
            prop_assert_eq!(&bits(case.run(format, &[1], &threads(2))), &one_by_one);
        }
    }

    #[test]
    fn long_contexts_are_as_exact_as_short_ones() {
        let heads = Heads {
            count: 4,
            kv_count: 1,
            size: 16,
        };
        let tokens = 32_768;
        for (format, window) in [
            (CacheFormat::F32, None),
            (CacheFormat::F16, None),
            (CacheFormat::Q8_0, None),
            (CacheFormat::F16, Some(4096)),
        ] {
            let mut case = Case::new(heads, window, false, tokens);
            // All but the last few tokens are only seen.
            let seen = tokens - 40;
            let mut cache = LayerCache::new(1, heads.size, format, tokens).unwrap();
            for (key, value) in case
                .keys
                .chunks_exact(heads.size)
                .zip(case.values.chunks_exact(heads.size))
            {
                cache.push(key, value);
            }
            let mask = AttentionMask {
                window,
                slopes: None,
            };
            let queries = &mut case.queries.clone()[seen * heads.count * heads.size..];
            attend(&threads(2), heads, &mask, &cache, queries);
            let mut last = case.queries.clone()[(tokens - 1) * heads.count * heads.size..].to_vec();
            attend(&threads(2), heads, &mask, &cache, &mut last);
            assert_eq!(last, queries[39 * heads.count * heads.size..]);
            case.queries[seen * heads.count * heads.size..].copy_from_slice(queries);
            let found = std::mem::take(&mut case.queries);
            case.queries = Case::new(heads, window, false, tokens).queries;
            for token in [seen, tokens - 1] {
                case.check(&found, token, allowed(format) / 10.0);
            }
        }
    }
}
