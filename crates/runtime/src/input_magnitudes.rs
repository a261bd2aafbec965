//! Histograms of the magnitudes of a layer's inputs, and thresholds below which a share of them lies.

use powerinfer_artifact::plan::InputThresholds;

/// Low bits of a float32 that a bin ignores: bins are less than 0.8% wide.
const SHIFT: u32 = 16;
/// Bins of all magnitudes: a float32 without its sign, in its upper bits.
const BINS: usize = 1 << (31 - SHIFT);

/// Histogram of magnitudes, with bins of equal relative width.
#[derive(Debug, Clone)]
pub struct Magnitudes {
    counts: Vec<u64>,
}

impl Default for Magnitudes {
    fn default() -> Self {
        Self {
            counts: vec![0; BINS],
        }
    }
}

impl Magnitudes {
    /// Counts the magnitudes of `x`.
    pub fn add(&mut self, x: &[f32]) {
        for x in x {
            self.counts[(x.abs().to_bits() >> SHIFT) as usize] += 1;
        }
    }

    /// Edge of the bin below which the share of magnitudes is closest to `share`.
    pub fn below(&self, share: f64) -> f32 {
        let total: u64 = self.counts.iter().sum();
        let wanted = share * total as f64;
        let (mut below, mut bin) = (0u64, 0);
        while (below as f64) < wanted && (below + self.counts[bin]) as f64 <= wanted {
            below += self.counts[bin];
            bin += 1;
        }
        if (below + self.counts[bin]) as f64 - wanted < wanted - below as f64 {
            bin += 1;
        }
        f32::from_bits(((bin as u32) << SHIFT).min(f32::MAX.to_bits()))
    }
}

/// Histograms of the inputs of a layer's projections.
#[derive(Debug, Clone, Default)]
pub struct InputMagnitudes {
    /// Inputs of query, key and value.
    pub attention: Magnitudes,
    /// Inputs of attention's output projection.
    pub output: Magnitudes,
    /// Inputs of gate and up.
    pub ffn: Magnitudes,
}

impl InputMagnitudes {
    /// Thresholds below which `share` of the inputs lies.
    pub fn thresholds(&self, share: f64) -> InputThresholds {
        InputThresholds {
            share,
            attention: self.attention.below(share),
            output: self.output.below(share),
            ffn: Some(self.ffn.below(share)),
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_share_lies_below(share in 0.01f64..0.99, scale in 1e-6f32..1e6, seed in 0u64..100) {
            let mut random = Random::new(seed);
            let values: Vec<f32> = (0..20_000).map(|_| random.normal() as f32 * scale).collect();
            let mut magnitudes = Magnitudes::default();
            for part in values.chunks(777) {
                magnitudes.add(part);
            }
            let edge = magnitudes.below(share);
            let below = values.iter().filter(|value| value.abs() < edge).count();
            let found = below as f64 / values.len() as f64;
            prop_assert!((found - share).abs() < 0.01, "{found} of {share}");
        }
    }

    #[test]
    fn zeros_and_nothing_give_thresholds_too() {
        let mut magnitudes = Magnitudes::default();
        assert_eq!(magnitudes.below(0.5), 0.0);
        magnitudes.add(&[0.0, -0.0, 0.0, 1.0, f32::INFINITY]);
        assert!(magnitudes.below(0.5) < 1e-37);
        assert!((1.0..1.1).contains(&magnitudes.below(0.8)));
        assert!(magnitudes.below(0.99).is_finite());
    }
}
