//! Counts of selected and active neurons, token by token and layer by layer, on the inputs that the policy itself
//! produces.

use crate::verification::{Observation, relative_error, row_norms};

/// Counts of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerAudit {
    /// Tokens observed.
    pub tokens: u64,
    /// Neurons of the layer.
    pub neurons: u64,
    /// Active neurons (`h_i ≠ 0`), summed over tokens.
    pub active: u64,
    /// Predicted neurons, summed over tokens; none if the policy does not predict.
    pub predicted: Option<u64>,
    /// Predicted neurons that are active; if the policy does not predict, computed ones that are.
    pub found: u64,
    /// Per neuron, in the order of the bundle, the tokens for which it was computed.
    pub computed: Vec<u32>,
    /// Sum over tokens of the share of `Σ|h_i|·‖down_i‖` of the computed neurons.
    recalled: f64,
    /// Sum over tokens of `‖policy's output − exact output‖ / ‖exact output‖`.
    errors: f64,
    /// `‖down_i‖` of every neuron.
    norms: Vec<f32>,
}

impl LayerAudit {
    /// Adds the counts of some tokens; `predicted` lists the predicted neurons of a token, if the policy predicts.
    pub(crate) fn observe<Listed: IntoIterator<Item = u32>>(
        &mut self,
        observation: &Observation<'_>,
        predicted: Option<impl Fn(usize) -> Listed>,
    ) {
        if self.norms.is_empty() {
            self.norms = row_norms(observation.down);
            self.computed = vec![0; self.norms.len()];
            self.neurons = self.norms.len() as u64;
        }
        let tokens = observation.products.len();
        let size = observation.before.len() / tokens.max(1);
        self.tokens += tokens as u64;
        let mut is_chosen = vec![false; self.norms.len()];
        let mut is_computed = vec![false; self.norms.len()];
        for (token, products) in observation.products.iter().enumerate() {
            let own = token * size..(token + 1) * size;
            let [before, sparse, exact] =
                [observation.before, observation.sparse, observation.exact]
                    .map(|states| &states[own.clone()]);
            self.errors += relative_error(before, sparse, exact);
            is_computed.fill(false);
            for (neuron, _) in &observation.computed[token] {
                is_computed[*neuron as usize] = true;
                self.computed[*neuron as usize] += 1;
            }
            if let Some(predicted) = &predicted {
                is_chosen.fill(false);
                let mut count = 0;
                for neuron in predicted(token) {
                    is_chosen[neuron as usize] = true;
                    count += 1;
                }
                *self.predicted.get_or_insert(0) += count;
            } else {
                is_chosen.copy_from_slice(&is_computed);
            }
            let (mut all, mut recalled) = (0f64, 0f64);
            for (neuron, product) in products {
                let neuron = *neuron as usize;
                let added = f64::from(product.abs() * self.norms[neuron]);
                all += added;
                recalled += f64::from(u8::from(is_computed[neuron])) * added;
                let active = *product != 0.0;
                self.active += u64::from(active);
                self.found += u64::from(active && is_chosen[neuron]);
            }
            self.recalled += if all > 0.0 { recalled / all } else { 1.0 };
        }
    }

    fn places(&self) -> f64 {
        (self.tokens * self.neurons).max(1) as f64
    }

    /// Share of inactive neurons.
    pub fn sparsity(&self) -> f64 {
        1.0 - self.active as f64 / self.places()
    }

    /// Share of neurons that are not predicted; none if the policy does not predict.
    pub fn predicted_sparsity(&self) -> Option<f64> {
        let predicted = self.predicted?;
        Some(1.0 - predicted as f64 / self.places())
    }

    /// Share of computed neurons.
    pub fn computed_share(&self) -> f64 {
        let computed: u64 = self.computed.iter().copied().map(u64::from).sum();
        computed as f64 / self.places()
    }

    /// Share of the active neurons that are predicted, or computed if the policy does not predict.
    pub fn recall(&self) -> f64 {
        match self.active {
            0 => 1.0,
            active => self.found as f64 / active as f64,
        }
    }

    /// Share of the predicted neurons that are active; none if the policy does not predict.
    pub fn precision(&self) -> Option<f64> {
        let predicted = self.predicted?;
        Some(if predicted == 0 {
            1.0
        } else {
            self.found as f64 / predicted as f64
        })
    }

    /// Mean share of `Σ|h_i|·‖down_i‖` of the computed neurons.
    pub fn contribution_recall(&self) -> f64 {
        match self.tokens {
            0 => 1.0,
            tokens => self.recalled / tokens as f64,
        }
    }

    /// Mean relative error of the FFN's output.
    pub fn relative_error(&self) -> f64 {
        self.errors / self.tokens.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_tensor::{Format, pack};

    use super::*;

    #[test]
    fn choices_are_counted_beside_what_fired() {
        // Four neurons whose rows of down have the norms 1, 2, 1 and 1.
        let down = pack(Format::F32, 4, 2, &[1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 1.0]);
        let observation = Observation {
            before: &[0.0; 4],
            sparse: &[0.0, 4.0, 3.0, 0.0],
            exact: &[3.0, 4.0, 3.0, 0.0],
            computed: &[vec![(1, 2.0)], vec![(0, 3.0)]],
            products: &[
                vec![(0, 3.0), (1, 2.0), (2, 0.0), (3, 0.0)],
                vec![(0, 3.0), (1, 0.0), (2, 0.0), (3, 0.0)],
            ],
            down: &down.as_view(),
        };
        let mut audit = LayerAudit::default();
        let lists = [vec![1, 2], vec![0]];
        audit.observe(&observation, Some(|token: usize| lists[token].clone()));
        assert_eq!((audit.tokens, audit.neurons, audit.active), (2, 4, 3));
        assert_eq!((audit.predicted, audit.found), (Some(3), 2));
        assert_eq!(audit.computed, [1, 1, 0, 0]);
        let close = |found: f64, want: f64| assert!((found - want).abs() < 1e-9, "{found} {want}");
        close(audit.sparsity(), 5.0 / 8.0);
        close(audit.predicted_sparsity().unwrap(), 5.0 / 8.0);
        close(audit.computed_share(), 2.0 / 8.0);
        close(audit.recall(), 2.0 / 3.0);
        close(audit.precision().unwrap(), 2.0 / 3.0);
        // 4 of 7, and all.
        close(audit.contribution_recall(), (4.0 / 7.0 + 1.0) / 2.0);
        // 3 of a norm of 5, and 0.
        close(audit.relative_error(), 0.3);
        let mut plain = LayerAudit::default();
        plain.observe(&observation, None::<fn(usize) -> Vec<u32>>);
        assert_eq!((plain.predicted, plain.found), (None, 2));
        assert_eq!(plain.precision(), None);
    }
}
