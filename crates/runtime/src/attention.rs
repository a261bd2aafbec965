//! Causal grouped-query attention over a KV cache.

use powerinfer_kernels::Isa;
use powerinfer_model::{ModelConfig, alibi_bias};

/// Keys and values of one layer, one run of positions per head, in float32.
#[derive(Debug)]
pub(crate) struct LayerCache {
    /// Per key and value head: `[positions, head_size]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl LayerCache {
    /// A cache with room for `positions` and never more; none where memory has not got it. What is
    /// not used yet is not touched.
    pub(crate) fn new(kv_heads: usize, head_size: usize, positions: usize) -> Option<Self> {
        let reserved = || {
            let mut head = Vec::new();
            head.try_reserve_exact(positions.checked_mul(head_size)?)
                .ok()?;
            Some(head)
        };
        let heads = || (0..kv_heads).map(|_| reserved()).collect::<Option<_>>();
        Some(Self {
            keys: heads()?,
            values: heads()?,
        })
    }

    /// Bytes that are reserved.
    pub(crate) fn bytes(&self) -> usize {
        let heads = self.keys.iter().chain(&self.values);
        heads.map(Vec::capacity).sum::<usize>() * size_of::<f32>()
    }

    /// Appends one position; `key` and `value` are `[kv_heads, head_size]`.
    pub(crate) fn push(&mut self, key: &[f32], value: &[f32]) {
        let size = key.len() / self.keys.len();
        debug_assert!(self.keys[0].len() + size <= self.keys[0].capacity());
        for (head, cache) in self.keys.iter_mut().enumerate() {
            cache.extend(&key[head * size..][..size]);
        }
        for (head, cache) in self.values.iter_mut().enumerate() {
            cache.extend(&value[head * size..][..size]);
        }
    }

    /// Forgets every position.
    pub(crate) fn clear(&mut self) {
        self.keys
            .iter_mut()
            .chain(&mut self.values)
            .for_each(Vec::clear);
    }
}

/// What attention does besides dotting: how far it looks back, and ALiBi's slopes.
pub(crate) struct Reach<'a> {
    /// Positions a token sees, itself among them; none means all.
    pub(crate) window: Option<usize>,
    /// One slope a head.
    pub(crate) slopes: Option<&'a [f32]>,
}

/// Mixes values for one token: `query` and `out` are `[heads, head_size]`; the token's own key
/// and value are the last in the cache. Returns the bytes of the cache that were read.
pub(crate) fn attend(
    isa: Isa,
    config: &ModelConfig,
    reach: &Reach<'_>,
    cache: &LayerCache,
    query: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) -> usize {
    let size = config.head_size;
    let group = config.head_count / config.kv_head_count;
    let scale = 1.0 / (size as f32).sqrt();
    let positions = cache.keys[0].len() / size;
    let first = reach
        .window
        .map_or(0, |window| positions.saturating_sub(window));
    for (head, (query, out)) in query
        .chunks_exact(size)
        .zip(out.chunks_exact_mut(size))
        .enumerate()
    {
        let keys = &cache.keys[head / group][first * size..];
        let values = &cache.values[head / group][first * size..];
        scores.clear();
        scores.extend(keys.chunks_exact(size).map(|key| isa.dot(query, key)));
        if let Some(slopes) = reach.slopes {
            for (key, score) in scores.iter_mut().enumerate() {
                *score += alibi_bias(slopes[head], first + key);
            }
        }
        scores.iter_mut().for_each(|score| *score *= scale);
        softmax(scores);
        out.fill(0.0);
        for (weight, value) in scores.iter().zip(values.chunks_exact(size)) {
            isa.axpy(*weight, value, out);
        }
    }
    2 * (positions - first) * config.kv_head_count * size * size_of::<f32>()
}

/// `e^x / Σ e^x`, without overflow.
fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for value in values.iter_mut() {
        *value = (*value - largest).exp();
        sum += *value;
    }
    values.iter_mut().for_each(|value| *value /= sum);
}
