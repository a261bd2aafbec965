//! Causal grouped-query attention with rotary positions over texts laid end to end.
//!
//! Texts are short, so attention is a small share of the work; what matters is that nothing of
//! size tokens² is ever written to memory.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{values, with_values};

/// `qkv [tokens, (heads + 2·kv_heads)·head_size]` to `[tokens, heads·head_size]`.
#[derive(Clone)]
pub(crate) struct Attention {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// Numbers per head.
    pub(crate) head_size: usize,
    /// Rotary base θ.
    pub(crate) theta: f32,
    /// Where each text begins, and the end of the last.
    pub(crate) bounds: Vec<usize>,
}

/// What one text's forward pass leaves for its backward pass.
struct Rotated {
    queries: Vec<f32>,
    keys: Vec<f32>,
}

/// Direction of the rotation: the gradient is rotated back.
#[derive(Clone, Copy)]
enum Turn {
    Forward,
    Back,
}

/// `a · b` for lengths that are a multiple of eight, in eight sums, so that it can be vectorised.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum()
}

fn add_scaled(scale: f32, x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += scale * x;
    }
}

impl Attention {
    fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Sines and cosines of the angles at `position`, one a pair of a head.
    fn angles(&self, position: usize) -> Vec<(f32, f32)> {
        let half = self.head_size / 2;
        let frequency = |pair: usize| self.theta.powf(-(pair as f32) / half as f32);
        (0..half)
            .map(|pair| (position as f32 * frequency(pair)).sin_cos())
            .collect()
    }

    /// Rotates `head` by `angles`: pairs (i, i + half), as Llama checkpoints have it.
    fn rotate(&self, head: &mut [f32], angles: &[(f32, f32)], turn: Turn) {
        let half = self.head_size / 2;
        for (pair, (sine, cosine)) in angles.iter().enumerate() {
            let sine = if let Turn::Back = turn { -sine } else { *sine };
            let (a, b) = (head[pair], head[pair + half]);
            head[pair] = a * cosine - b * sine;
            head[pair + half] = a * sine + b * cosine;
        }
    }

    /// Rotated queries and keys of the text whose rows of qkv are `rows`.
    fn rotated(&self, rows: &[f32]) -> Rotated {
        let (queries, keys) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let mut rotated = Rotated {
            queries: Vec::new(),
            keys: Vec::new(),
        };
        for (position, row) in rows.chunks_exact(self.width()).enumerate() {
            rotated.queries.extend(&row[..queries]);
            rotated.keys.extend(&row[queries..queries + keys]);
            let angles = self.angles(position);
            let turned = |out: &mut Vec<f32>, width: usize| {
                let start = out.len() - width;
                for head in out[start..].chunks_exact_mut(self.head_size) {
                    self.rotate(head, &angles, Turn::Forward);
                }
            };
            turned(&mut rotated.queries, queries);
            turned(&mut rotated.keys, keys);
        }
        rotated
    }

    /// Softmax weights of the query at `position` of `head` over all positions up to it.
    fn probabilities(&self, rotated: &Rotated, head: usize, position: usize, out: &mut Vec<f32>) {
        let size = self.head_size;
        let kv_head = head * self.kv_heads / self.heads;
        let query = &rotated.queries[(position * self.heads + head) * size..][..size];
        let scale = 1.0 / (size as f32).sqrt();
        out.clear();
        out.extend((0..=position).map(|key| {
            scale
                * dot(
                    query,
                    &rotated.keys[(key * self.kv_heads + kv_head) * size..][..size],
                )
        }));
        let largest = out.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in out.iter_mut() {
            *score = (*score - largest).exp();
            sum += *score;
        }
        out.iter_mut().for_each(|score| *score /= sum);
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "causal-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let all = values(storage, layout)?;
        let (width, size) = (self.width(), self.head_size);
        let value_offset = (self.heads + self.kv_heads) * size;
        let tokens = all.len() / width;
        let mut out = vec![0f32; tokens * self.heads * size];
        let mut weights = Vec::new();
        for text in self.bounds.windows(2) {
            let rows = &all[text[0] * width..text[1] * width];
            let rotated = self.rotated(rows);
            for position in 0..text[1] - text[0] {
                for head in 0..self.heads {
                    self.probabilities(&rotated, head, position, &mut weights);
                    let kv_head = head * self.kv_heads / self.heads;
                    let out = &mut out[((text[0] + position) * self.heads + head) * size..][..size];
                    for (key, weight) in weights.iter().enumerate() {
                        let value = &rows[key * width + value_offset + kv_head * size..][..size];
                        add_scaled(*weight, value, out);
                    }
                }
            }
        }
        Ok((CpuStorage::F32(out), (tokens, self.heads * size).into()))
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (width, size) = (self.width(), self.head_size);
        let (key_offset, value_offset) = (self.heads * size, (self.heads + self.kv_heads) * size);
        let scale = 1.0 / (size as f32).sqrt();
        let result = with_values(qkv, |all| {
            with_values(out, |out| {
                with_values(grad, |grad| {
                    let mut result = vec![0f32; all.len()];
                    let mut weights = Vec::new();
                    for text in self.bounds.windows(2) {
                        let rows = &all[text[0] * width..text[1] * width];
                        let result = &mut result[text[0] * width..text[1] * width];
                        let rotated = self.rotated(rows);
                        for position in 0..text[1] - text[0] {
                            for head in 0..self.heads {
                                self.probabilities(&rotated, head, position, &mut weights);
                                let kv_head = head * self.kv_heads / self.heads;
                                let at = ((text[0] + position) * self.heads + head) * size;
                                let (grad, out) = (&grad[at..at + size], &out[at..at + size]);
                                // d score_j = p_j (grad·v_j − grad·out), from the softmax.
                                let mean = dot(grad, out);
                                let query = &rotated.queries
                                    [(position * self.heads + head) * size..][..size];
                                let mut query_grad = vec![0f32; size];
                                for (key, weight) in weights.iter().enumerate() {
                                    let value_at = key * width + value_offset + kv_head * size;
                                    let score_grad = weight
                                        * (dot(grad, &rows[value_at..value_at + size]) - mean)
                                        * scale;
                                    add_scaled(
                                        *weight,
                                        grad,
                                        &mut result[value_at..value_at + size],
                                    );
                                    let rotated_key = &rotated.keys
                                        [(key * self.kv_heads + kv_head) * size..][..size];
                                    add_scaled(score_grad, rotated_key, &mut query_grad);
                                    let key_at = key * width + key_offset + kv_head * size;
                                    add_scaled(
                                        score_grad,
                                        query,
                                        &mut result[key_at..key_at + size],
                                    );
                                }
                                let query_at = position * width + head * size;
                                result[query_at..query_at + size].copy_from_slice(&query_grad);
                            }
                        }
                        for (position, row) in result.chunks_exact_mut(width).enumerate() {
                            let angles = self.angles(position);
                            for head in row[..value_offset].chunks_exact_mut(size) {
                                self.rotate(head, &angles, Turn::Back);
                            }
                        }
                    }
                    Ok(result)
                })
            })
        })?;
        Ok(Some(Tensor::from_vec(result, qkv.shape(), qkv.device())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn gradient_matches_finite_differences() {
        let attention = Attention {
            heads: 2,
            kv_heads: 1,
            head_size: 8,
            theta: 100.0,
            bounds: vec![0, 3, 4, 9],
        };
        let mix = Tensor::rand(-1f32, 1.0, (9, 16), &Device::Cpu).unwrap();
        super::super::check_gradient((9, 32), |x| {
            (x.apply_op1(attention.clone())? * &mix)?.sum_all()
        });
    }

    #[test]
    fn texts_do_not_see_each_other() {
        let attention = |bounds| Attention {
            heads: 2,
            kv_heads: 1,
            head_size: 8,
            theta: 100.0,
            bounds,
        };
        let both = Tensor::rand(-1f32, 1.0, (7, 32), &Device::Cpu).unwrap();
        let second = both.narrow(0, 3, 4).unwrap().contiguous().unwrap();
        let together = both
            .apply_op1(attention(vec![0, 3, 7]))
            .unwrap()
            .narrow(0, 3, 4)
            .unwrap();
        let alone = second.apply_op1(attention(vec![0, 4])).unwrap();
        assert_eq!(
            together.to_vec2::<f32>().unwrap(),
            alone.to_vec2::<f32>().unwrap()
        );
    }
}
