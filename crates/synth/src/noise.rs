//! Random rows, each from its own stream, so that the result does not depend on the number of threads.

use powerinfer_artifact::{Digest, random::Random};

/// Random streams of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise {
    seed: u64,
}

impl Noise {
    /// Creates the streams of the tensor called `name`.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let digest = Digest::of_parts([&seed.to_le_bytes()[..], name.as_bytes()]);
        Self {
            seed: digest.leading_bits(),
        }
    }

    /// Fills row `row` with uniformly distributed values of mean zero and standard deviation `deviation`: sums of
    /// thousands of them are normal, and four share one draw.
    pub(crate) fn fill(self, row: usize, deviation: f32, out: &mut [f32]) {
        let mut random = Random::new(self.seed ^ (row as u64).wrapping_mul(0xd134_2543_de82_ef95));
        // The 2¹⁶ values ±1, ±3, …, ±65535 have the mean square (2³² − 1)/3.
        let scale = deviation * (3.0f32 / 4_294_967_295.0).sqrt();
        for four in out.chunks_mut(4) {
            let mut bits = random.next_bits();
            for value in four {
                *value = (2 * i32::from(bits as u16 as i16) + 1) as f32 * scale;
                bits >>= 16;
            }
        }
    }

    /// Returns a random permutation of `0..count`.
    pub(crate) fn permutation(self, count: usize) -> Vec<u32> {
        let mut random = Random::new(self.seed);
        let mut order: Vec<u32> = (0..count as u32).collect();
        for index in (1..count).rev() {
            order.swap(index, random.below(index + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_independent_with_the_requested_deviation() {
        let noise = Noise::new(7, "t");
        let (mut a, mut b) = (vec![0.0; 40_001], vec![0.0; 40_001]);
        noise.fill(0, 0.5, &mut a);
        noise.fill(1, 0.5, &mut b);
        let moment = |values: &[f32], power: i32| {
            values
                .iter()
                .map(|v| f64::from(*v).powi(power))
                .sum::<f64>()
                / values.len() as f64
        };
        assert!(moment(&a, 1).abs() < 0.01 && (moment(&a, 2) - 0.25).abs() < 0.005);
        let dot: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(x * y)).sum();
        assert!((dot / 40_001.0).abs() < 0.005, "rows are independent");
        let mut order = noise.permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
