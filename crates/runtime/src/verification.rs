//! A net at run time: some tokens' FFNs are computed exactly too, and the difference is told.

/// What exact recomputation found, over the tokens that were verified.
#[derive(Debug, Clone, PartialEq)]
pub struct Verification {
    every: usize,
    layers: Vec<Drift>,
}

/// How far a layer's FFN output was from the exact one.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Drift {
    /// Tokens verified.
    pub tokens: u64,
    /// Sum of the relative errors `‖sparse − exact‖ / ‖exact‖`.
    sum: f64,
    /// The largest of them.
    pub worst: f64,
}

impl Drift {
    /// Mean relative error.
    pub fn mean(&self) -> f64 {
        self.sum / self.tokens.max(1) as f64
    }
}

impl Verification {
    /// Verifies one token in `every`, which must be positive.
    pub(crate) fn new(every: usize, layers: usize) -> Self {
        Self {
            every: every.max(1),
            layers: vec![Drift::default(); layers],
        }
    }

    /// Whether the token at `position` is verified.
    pub(crate) fn takes(&self, position: usize) -> bool {
        position.is_multiple_of(self.every)
    }

    /// Takes in what a layer gave, sparse and exact, both added to `before`.
    pub(crate) fn observe(&mut self, layer: usize, before: &[f32], sparse: &[f32], exact: &[f32]) {
        let (mut error, mut size) = (0f64, 0f64);
        for ((before, sparse), exact) in before.iter().zip(sparse).zip(exact) {
            error += f64::from(sparse - exact).powi(2);
            size += f64::from(exact - before).powi(2);
        }
        let relative = if error == 0.0 {
            0.0
        } else {
            (error / size.max(f64::MIN_POSITIVE)).sqrt()
        };
        let drift = &mut self.layers[layer];
        drift.tokens += 1;
        drift.sum += relative;
        drift.worst = drift.worst.max(relative);
    }

    /// Tokens that were verified.
    pub fn tokens(&self) -> u64 {
        self.layers
            .iter()
            .map(|drift| drift.tokens)
            .max()
            .unwrap_or(0)
    }

    /// The layers, by index.
    pub fn layers(&self) -> &[Drift] {
        &self.layers
    }

    /// Mean relative error over the layers.
    pub fn mean(&self) -> f64 {
        self.layers.iter().map(Drift::mean).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// The layer that is furthest off on average; none where nothing was verified.
    pub fn worst_layer(&self) -> Option<usize> {
        let mean = |layer: &usize| self.layers[*layer].mean();
        (0..self.layers.len())
            .filter(|layer| self.layers[*layer].tokens > 0)
            .max_by(|a, b| mean(a).total_cmp(&mean(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_what_the_ffn_adds() {
        let mut verification = Verification::new(3, 2);
        assert!(verification.takes(6) && !verification.takes(7));
        assert_eq!(verification.worst_layer(), None);
        verification.observe(1, &[1.0, 1.0], &[4.0, 5.5], &[4.0, 5.0]);
        verification.observe(1, &[1.0, 1.0], &[4.0, 5.0], &[4.0, 5.0]);
        let drift = verification.layers()[1];
        assert!((drift.worst - 0.1).abs() < 1e-12 && (drift.mean() - 0.05).abs() < 1e-12);
        assert_eq!(
            (verification.tokens(), verification.worst_layer()),
            (2, Some(1))
        );
    }
}
