//! Attention over a KV cache.

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic,
    cuda::{Attention, Buffer, CachePlace, CacheShape, Gpu, GpuCache, HeadNorms},
};
use powerinfer_tensor::{CacheFormat, NormKind};

use crate::{
    Norm,
    devices::{assert_near, on_every_device},
    noise::noise,
    upload, zeros,
};

/// A shape of attention, checked against its formula in `f64`, token by token.
struct AttentionCase {
    heads: usize,
    kv_heads: usize,
    size: usize,
    window: Option<usize>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    pairs: usize,
    norms: Option<[Norm; 2]>,
    format: CacheFormat,
}

impl AttentionCase {
    fn new(heads: usize, kv_heads: usize, size: usize) -> Self {
        Self {
            heads,
            kv_heads,
            size,
            window: None,
            slopes: None,
            sinks: None,
            pairs: 0,
            norms: None,
            format: CacheFormat::F32,
        }
    }

    /// Sine and cosine of the rotary angles at a position.
    fn rotations(&self, position: usize) -> Vec<[f32; 2]> {
        let rotation = |pair: usize| {
            let (sine, cosine) = (position as f32 * 0.7f32.powi(pair as i32)).sin_cos();
            [sine, cosine]
        };
        (0..self.pairs).map(rotation).collect()
    }

    /// A head, normalised and rotated.
    fn head(&self, x: &[f32], norm: Option<&Norm>, position: usize) -> Vec<f64> {
        let x = norm.map_or(x.to_vec(), |norm| norm.apply(x));
        let mut x: Vec<f64> = x.into_iter().map(f64::from).collect();
        for (pair, [sine, cosine]) in self.rotations(position).into_iter().enumerate() {
            let (a, b) = (x[pair], x[pair + self.pairs]);
            let (sine, cosine) = (f64::from(sine), f64::from(cosine));
            (x[pair], x[pair + self.pairs]) = (a * cosine - b * sine, a * sine + b * cosine);
        }
        x
    }

    fn check(&self, tokens: usize, context: usize, tolerance: f32) {
        let values_of = |seed, heads: usize| {
            let mut values = noise(seed, tokens * heads * self.size);
            if self.format == CacheFormat::F16 {
                // Without norms and rotations, the cache then stores these values exactly.
                for value in &mut values {
                    *value = half::f16::from_f32(*value).to_f32();
                }
            }
            values
        };
        let (queries, keys, values) = (
            values_of(8, self.heads),
            values_of(9, self.kv_heads),
            values_of(10, self.kv_heads),
        );
        let head_of = |all: &[f32], heads: usize, token: usize, head: usize| {
            all[(token * heads + head) * self.size..][..self.size].to_vec()
        };
        let [query_norm, key_norm] = match &self.norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let mut want = Vec::new();
        for token in 0..tokens {
            let first = self
                .window
                .map_or(0, |window| (token + 1).saturating_sub(window));
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let query = self.head(
                    &head_of(&queries, self.heads, token, head),
                    query_norm,
                    token,
                );
                let score = |position: usize| {
                    let key = self.head(
                        &head_of(&keys, self.kv_heads, position, kv_head),
                        key_norm,
                        position,
                    );
                    let product: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    let bias = self.slopes.as_ref().map_or(0.0, |slopes| {
                        f64::from(
                            half::bf16::from_f32(
                                slopes[head] * half::bf16::from_f32(position as f32).to_f32(),
                            )
                            .to_f32(),
                        )
                    });
                    (product + bias) / (self.size as f64).sqrt()
                };
                let scores: Vec<f64> = (first..=token).map(score).collect();
                let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                let largest = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
                let weights: Vec<f64> =
                    scores.iter().map(|score| (score - largest).exp()).collect();
                let sink = sink.map_or(0.0, |sink| (sink - largest).exp());
                let total = weights.iter().sum::<f64>() + sink;
                for column in 0..self.size {
                    let terms = weights.iter().zip(first..).map(|(weight, position)| {
                        weight
                            * f64::from(head_of(&values, self.kv_heads, position, kv_head)[column])
                    });
                    want.push((terms.sum::<f64>() / total) as f32);
                }
            }
        }
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let shape = CacheShape {
                format: self.format,
                kv_heads: self.kv_heads,
                head_size: self.size,
                context,
            };
            let cache = GpuCache::new(device, shape).unwrap();
            let norms = self.norms.as_ref().map(|[query, key]| HeadNorms {
                query: query.upload(device),
                key: key.upload(device),
            });
            let slopes = self.slopes.as_ref().map(|slopes| upload(device, slopes));
            let sinks = self.sinks.as_ref().map(|sinks| upload(device, sinks));
            let mut found = Vec::new();
            // Token by token; then the later tokens again in one call, after the first ones in the cache.
            let single = (0..tokens).map(|token| token..token + 1);
            let batch_start = tokens / 3 + 1;
            for part in single.chain(std::iter::once(batch_start..tokens)) {
                let count = part.len();
                let scratch = gpu.attention_scratch_len(count, self.heads, &shape);
                let mut partial = zeros(device, scratch);
                let mut counters = zeros(device, count * self.heads);
                let slice = |all: &[f32], heads: usize| {
                    let size = heads * self.size;
                    upload(device, &all[part.start * size..part.end * size])
                };
                let rotations: Vec<[f32; 2]> = part
                    .clone()
                    .flat_map(|token| self.rotations(token))
                    .collect();
                let positions: Vec<u32> = part.clone().map(|token| token as u32).collect();
                let caches = [CachePlace::default(), cache.place()];
                let mut out = zeros(device, count * self.heads * self.size);
                let attention = Attention {
                    tokens: count,
                    query: &slice(&queries, self.heads),
                    key: &slice(&keys, self.kv_heads),
                    value: &slice(&values, self.kv_heads),
                    norms: norms.as_ref(),
                    sin_cos: &Buffer::from_slice(device, &rotations).unwrap(),
                    alibi_slopes: slopes.as_ref(),
                    sinks: sinks.as_ref(),
                    window: self.window,
                    positions: &Buffer::from_slice(device, &positions).unwrap(),
                    caches: &Buffer::from_slice(device, &caches.repeat(count)).unwrap(),
                    layer: 1,
                    shape,
                };
                // SAFETY: the cache exists until the end, and has the positions.
                #[expect(unsafe_code, reason = "kernels follow addresses in device memory")]
                unsafe { gpu.attend(&attention, &mut partial, &mut counters, &mut out) }.unwrap();
                found.extend(out.to_vec().unwrap());
            }
            let again = &want[batch_start * self.heads * self.size..];
            assert_near(
                &found,
                &[&want, again].concat(),
                tolerance,
                &format!("{} heads of {}", self.heads, self.size),
            );
            found
        });
    }
}

#[test]
fn attention_equals_its_formula() {
    AttentionCase::new(4, 2, 16).check(70, 300, 1e-5);
    AttentionCase::new(3, 3, 5).check(34, 34, 1e-5);
    AttentionCase {
        pairs: 8,
        ..AttentionCase::new(6, 1, 24)
    }
    .check(33, 100, 1e-5);
    AttentionCase {
        window: Some(20),
        pairs: 4,
        ..AttentionCase::new(2, 2, 8)
    }
    .check(90, 200, 1e-5);
    AttentionCase {
        slopes: Some(vec![0.5, 0.25, 0.125, 0.0625]),
        ..AttentionCase::new(4, 4, 8)
    }
    .check(40, 64, 1e-5);
    AttentionCase {
        norms: Some([NormKind::RootMeanSquare, NormKind::Layer].map(|kind| Norm::new(kind, 12))),
        pairs: 6,
        format: CacheFormat::F16,
        ..AttentionCase::new(4, 2, 12)
    }
    .check(40, 64, 4e-3);
    AttentionCase {
        slopes: Some(vec![0.5, 0.25]),
        norms: Some([NormKind::Layer, NormKind::RootMeanSquare].map(|kind| Norm::new(kind, 134))),
        pairs: 67,
        ..AttentionCase::new(2, 1, 134)
    }
    .check(40, 64, 1e-5);
    AttentionCase {
        slopes: Some(vec![0.5, 0.25]),
        norms: Some([NormKind::RootMeanSquare, NormKind::Layer].map(|kind| Norm::new(kind, 134))),
        format: CacheFormat::F16,
        ..AttentionCase::new(2, 2, 134)
    }
    .check(40, 64, 4e-3);
}

#[test]
fn sinks_take_part_in_the_softmax() {
    // The last sink far exceeds all scores, so its head's output is 0.
    for (heads, kv_heads, size) in [(4, 2, 16), (3, 3, 20), (8, 2, 64)] {
        for format in CacheFormat::ALL {
            let mut sinks: Vec<f32> = (0..heads).map(|head| head as f32 - 2.0).collect();
            sinks[heads - 1] = 200.0;
            let tolerance = match format {
                CacheFormat::F32 => 1e-5,
                CacheFormat::F16 => 4e-3,
                CacheFormat::Q8_0 => 2e-2,
            };
            let case = AttentionCase {
                sinks: Some(sinks),
                window: (heads == 3).then_some(9),
                format,
                ..AttentionCase::new(heads, kv_heads, size)
            };
            case.check(150, 200, tolerance);
        }
    }
}

#[test]
fn attention_on_tensor_cores_has_the_precision_of_f32() {
    for (heads, kv_heads, size, window) in [
        (4, 2, 32, Some(37)),
        (3, 3, 16, None),
        (5, 1, 112, None),
        (1, 1, 128, Some(3)),
    ] {
        AttentionCase {
            format: CacheFormat::F16,
            slopes: Some((0..heads).map(|head| 0.5 / (head + 1) as f32).collect()),
            window,
            ..AttentionCase::new(heads, kv_heads, size)
        }
        .check(150, 200, 1e-5);
    }
}

#[test]
fn attention_splits_long_contexts_of_every_head_size() {
    for (heads, kv_heads, size) in [(1, 1, 64), (2, 1, 80), (8, 1, 128), (6, 1, 33)] {
        for format in CacheFormat::ALL {
            let tolerance = match format {
                CacheFormat::Q8_0 => 2e-2,
                _ => 4e-3,
            };
            AttentionCase {
                format,
                pairs: size / 2,
                window: (size == 80).then_some(70),
                ..AttentionCase::new(heads, kv_heads, size)
            }
            .check(100, 260, tolerance);
        }
    }
}
