//! Rotary positions (Su et al., 2021) in the layout of Llama checkpoints: pairs (i, i + half).

use powerinfer_model::ModelConfig;

/// The rotary frequencies of a model.
#[derive(Debug)]
pub(crate) struct Rotary {
    /// θ^(−i/half) for pair i.
    frequencies: Vec<f64>,
}

impl Rotary {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let half = config.head_size / 2;
        let theta = f64::from(config.rope_theta);
        Self {
            frequencies: (0..half)
                .map(|pair| theta.powf(-(pair as f64) / half as f64))
                .collect(),
        }
    }

    /// Rotates every head in `heads` as at `position`.
    pub(crate) fn rotate(&self, heads: &mut [f32], position: usize) {
        let half = self.frequencies.len();
        // The angle is rounded to float32 before its sine is taken, as the standard does.
        let angles: Vec<(f32, f32)> = self
            .frequencies
            .iter()
            .map(|frequency| ((position as f64 * frequency) as f32).sin_cos())
            .collect();
        for head in heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for ((a, b), (sine, cosine)) in first.iter_mut().zip(second).zip(&angles) {
                (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_lengths_and_depends_on_distance_alone() {
        let rotary = Rotary {
            frequencies: vec![1.0, 0.1],
        };
        let turned = |position| {
            let mut head = [1.0, 2.0, -3.0, 0.5];
            rotary.rotate(&mut head, position);
            head
        };
        let dot = |a: [f32; 4], b: [f32; 4]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert_eq!(turned(0), [1.0, 2.0, -3.0, 0.5]);
        assert!((dot(turned(9), turned(9)) - dot(turned(0), turned(0))).abs() < 1e-4);
        assert!((dot(turned(3), turned(7)) - dot(turned(10), turned(14))).abs() < 1e-4);
    }
}
