//! Causal grouped-query attention over a KV cache that is streamed once for all queries that share
//! it, in spans of positions whose results are merged in order.
//!
//! Where spans begin depends on nothing but positions, and each query's numbers are computed by
//! themselves; so a token has the same bits alone and within a batch, on one thread and on many.

use std::{f32::consts::LOG2_E, ops::Range};

use powerinfer_bundle::memory::{ATTENTION_ROWS, ATTENTION_SPAN, FEW_ROWS};
use powerinfer_kernels::{BLOCK, CacheFormat, CachePlane, Isa, Lay, power_of_two};
use powerinfer_model::{ModelConfig, alibi_bias};

use crate::Threads;

/// Keys and values of one layer, a plane of each per head.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) keys: Vec<CachePlane>,
    pub(crate) values: Vec<CachePlane>,
}

impl LayerCache {
    /// A cache with room for `positions`; none where memory has not got it. What is not used yet is
    /// not touched.
    pub(crate) fn new(
        kv_heads: usize,
        head_size: usize,
        format: CacheFormat,
        positions: usize,
    ) -> Option<Self> {
        let heads = |lay| {
            let plane = |_| CachePlane::new(lay, format, head_size, positions);
            (0..kv_heads).map(plane).collect::<Option<_>>()
        };
        Some(Self {
            keys: heads(Lay::Keys)?,
            values: heads(Lay::Values)?,
        })
    }

    /// All planes, those of keys first.
    pub(crate) fn planes(&self) -> impl Iterator<Item = &CachePlane> {
        self.keys.iter().chain(&self.values)
    }

    /// The same, to be changed.
    pub(crate) fn planes_mut(&mut self) -> impl Iterator<Item = &mut CachePlane> {
        self.keys.iter_mut().chain(&mut self.values)
    }

    /// Bytes that are reserved.
    pub(crate) fn bytes(&self) -> usize {
        self.planes().map(CachePlane::bytes).sum()
    }

    /// Appends one position; `key` and `value` are `[kv_heads, head_size]`.
    pub(crate) fn push(&mut self, key: &[f32], value: &[f32]) {
        let size = key.len() / self.keys.len();
        for (plane, key) in self.keys.iter_mut().zip(key.chunks_exact(size)) {
            plane.push(key);
        }
        for (plane, value) in self.values.iter_mut().zip(value.chunks_exact(size)) {
            plane.push(value);
        }
    }

    /// Forgets all positions from `positions` on.
    pub(crate) fn truncate(&mut self, positions: usize) {
        self.planes_mut().for_each(|plane| plane.truncate(positions));
    }
}

/// What attention does besides dotting: how far it looks back, and ALiBi's slopes.
pub(crate) struct Reach<'a> {
    /// Positions a token sees, itself among them; none means all.
    pub(crate) window: Option<usize>,
    /// One slope a head.
    pub(crate) slopes: Option<&'a [f32]>,
}

impl Reach<'_> {
    /// Positions that the token at `position` sees.
    fn seen(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        let first = self.window.map_or(0, |window| end.saturating_sub(window));
        first..end
    }
}

/// Mixes values for the last tokens in the cache: `queries`, `[tokens, heads, head_size]`, become what
/// attention gives for them. Returns the bytes of the cache that were read.
pub(crate) fn attend(
    threads: &Threads,
    config: &ModelConfig,
    reach: &Reach<'_>,
    cache: &LayerCache,
    queries: &mut [f32],
) -> usize {
    let tokens = queries.len() / (config.head_count * config.head_size);
    let mix = Mix {
        isa: threads.isa(),
        reach,
        cache,
        first: cache.keys[0].positions() - tokens,
        size: config.head_size,
        group: config.head_count / config.kv_head_count,
        // Powers of two are cheaper than those of e.
        scale: LOG2_E / (config.head_size as f32).sqrt(),
    };
    let width = cache.keys[0].width();
    let rows = tokens * mix.group;
    // Rows of one KV head side by side, so that they can be taken together.
    let mut gathered = vec![0.0; config.kv_head_count * rows * width];
    mix.for_each_head(queries, &mut gathered, |query, row| {
        let scaled = query.iter().map(|query| query * mix.scale);
        row.iter_mut()
            .zip(scaled)
            .for_each(|(row, query)| *row = query);
    });
    let mut mixed = vec![0.0; gathered.len()];
    let seen = reach.seen(mix.first).start..mix.first + tokens;
    let spans = seen.start / ATTENTION_SPAN..seen.end.div_ceil(ATTENTION_SPAN);
    let position_bytes = 2 * kv_plane_bytes(cache) / BLOCK;
    let read = config.kv_head_count * seen.len() * position_bytes;
    if rows <= FEW_ROWS.max(mix.group) && spans.len() > 1 {
        // Few rows see much: threads share what is seen.
        let part = rows * (width + 2);
        let mut partials = vec![0.0; config.kv_head_count * spans.len() * part];
        let mut parts = Vec::with_capacity(partials.len() / part);
        for (index, partial) in partials.chunks_exact_mut(part).enumerate() {
            let (head, span) = (index / spans.len(), index % spans.len());
            let queries = &gathered[head * rows * width..][..rows * width];
            parts.push((head, spans.start + span, queries, partial));
        }
        threads.share(read, parts, |(head, span, queries, partial)| {
            let mut scores = vec![0.0; rows.min(ATTENTION_ROWS) * ATTENTION_SPAN];
            mix.span(head, span, 0, queries, &mut scores, partial);
        });
        let heads = partials.chunks_exact(spans.len() * part);
        for (partials, mixed) in heads.zip(mixed.chunks_exact_mut(rows * width)) {
            let mut merged = vec![0.0; part];
            start(&mut merged, rows, width);
            for partial in partials.chunks_exact(part) {
                merge(&mut merged, partial, rows, width);
            }
            finish(&merged, mixed, width);
        }
    } else {
        // Threads share the rows.
        let mut parts = Vec::with_capacity(config.kv_head_count * rows.div_ceil(ATTENTION_ROWS));
        let heads = gathered.chunks_exact(rows * width);
        for (head, (queries, mixed)) in heads
            .zip(mixed.chunks_exact_mut(rows * width))
            .enumerate()
        {
            let chunk = ATTENTION_ROWS * width;
            let chunks = queries.chunks(chunk).zip(mixed.chunks_mut(chunk));
            parts.extend(
                chunks
                    .enumerate()
                    .map(|(index, (queries, mixed))| (head, index * ATTENTION_ROWS, queries, mixed)),
            );
        }
        let work = read * rows.div_ceil(ATTENTION_ROWS);
        threads.share(work, parts, |(head, first_row, queries, mixed)| {
            let rows = queries.len() / width;
            let mut scores = vec![0.0; rows * ATTENTION_SPAN];
            let mut partial = vec![0.0; rows * (width + 2)];
            let mut merged = vec![0.0; rows * (width + 2)];
            start(&mut merged, rows, width);
            for span in spans.clone() {
                mix.span(head, span, first_row, queries, &mut scores, &mut partial);
                merge(&mut merged, &partial, rows, width);
            }
            finish(&merged, mixed, width);
        });
    }
    mix.for_each_head(queries, &mut mixed, |out, mixed| {
        out.copy_from_slice(&mixed[..mix.size]);
    });
    read
}

/// Bytes of 32 positions of one plane.
fn kv_plane_bytes(cache: &LayerCache) -> usize {
    let plane = &cache.keys[0];
    plane.format().plane_bytes(plane.head_size(), BLOCK)
}

/// Attention of some tokens over one layer's cache. Row `token · group + head` of a KV head is of the
/// group's query head `head`.
struct Mix<'a> {
    isa: Isa,
    reach: &'a Reach<'a>,
    cache: &'a LayerCache,
    /// Position of the first token.
    first: usize,
    /// Numbers of a head.
    size: usize,
    /// Query heads per KV head.
    group: usize,
    /// What queries are multiplied by.
    scale: f32,
}

impl Mix<'_> {
    /// Hands each head of `heads`, `[tokens, heads, head_size]`, to `act` with its row of `rows`,
    /// `[kv_heads, tokens · group, width]`.
    fn for_each_head(
        &self,
        heads: &mut [f32],
        rows: &mut [f32],
        act: impl Fn(&mut [f32], &mut [f32]),
    ) {
        let (kv_heads, width) = (self.cache.keys.len(), self.cache.keys[0].width());
        let tokens = heads.len() / (kv_heads * self.group * self.size);
        for (index, head) in heads.chunks_exact_mut(self.size).enumerate() {
            let (token, head_index) = (
                index / (kv_heads * self.group),
                index % (kv_heads * self.group),
            );
            let (kv_head, member) = (head_index / self.group, head_index % self.group);
            let row = (kv_head * tokens + token) * self.group + member;
            act(head, &mut rows[row * width..][..width]);
        }
    }

    /// What rows from `first_row` on get of one span: for each a sum of values, weighted by powers of
    /// their scores over the largest; behind these sums, that largest score and the sum of weights.
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
            let seen = self.reach.seen(self.first + (first_row + row) / self.group);
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
                ends.as_chunks_mut::<2>().0.fill(NOTHING);
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
                    *end = NOTHING;
                    continue;
                }
                let first = tiles.start * BLOCK;
                let valid = seen.start - first..seen.end - first;
                if let Some(slopes) = self.reach.slopes {
                    let slope = slopes[head * self.group + (first_row + row) % self.group];
                    for (score, position) in scores[valid.clone()].iter_mut().zip(seen) {
                        *score += alibi_bias(slope, position) * self.scale;
                    }
                }
                *end = self.isa.powers(scores, valid).into();
            }
            self.isa
                .weighted_values(values, tiles, scores, &mut sums[part]);
        }
    }
}

/// Largest score and sum of weights of a row that sees nothing.
const NOTHING: [f32; 2] = [f32::NEG_INFINITY, 0.0];

/// Makes `merged` what nothing has been added to.
fn start(merged: &mut [f32], rows: usize, width: usize) {
    let (sums, ends) = merged.split_at_mut(rows * width);
    sums.fill(0.0);
    ends.as_chunks_mut::<2>().0.fill(NOTHING);
}

/// Adds what rows get of one more span.
fn merge(merged: &mut [f32], partial: &[f32], rows: usize, width: usize) {
    let (sums, ends) = merged.split_at_mut(rows * width);
    let (added_sums, added_ends) = partial.split_at(rows * width);
    let ends = ends.as_chunks_mut::<2>().0;
    for (row, (end, added)) in ends.iter_mut().zip(added_ends.as_chunks().0).enumerate() {
        if *added == NOTHING {
            continue;
        }
        let largest = end[0].max(added[0]);
        let (before, new) = (
            power_of_two(end[0] - largest),
            power_of_two(added[0] - largest),
        );
        let row = row * width..(row + 1) * width;
        for (sum, added) in sums[row.clone()].iter_mut().zip(&added_sums[row]) {
            *sum = *sum * before + added * new;
        }
        *end = [largest, end[1] * before + added[1] * new];
    }
}

/// Divides the sums by those of the weights.
fn finish(merged: &[f32], mixed: &mut [f32], width: usize) {
    let (sums, ends) = merged.split_at(mixed.len());
    let rows = sums.chunks_exact(width).zip(ends.as_chunks::<2>().0);
    for (mixed, (sums, [_, weights])) in mixed.chunks_exact_mut(width).zip(rows) {
        for (mixed, sum) in mixed.iter_mut().zip(sums) {
            *mixed = sum / weights;
        }
    }
}
