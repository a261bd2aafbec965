//! How often, and how strongly, each neuron of a layer fired.

/// Counts over all calibration tokens of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerActivity {
    /// Tokens that went through the layer.
    pub tokens: u64,
    /// Tokens on which each neuron fired: its activation was not exactly zero.
    pub active: Vec<u64>,
    /// Mean of `|h_i|` over all tokens, `h_i = act(gate_i·x)·(up_i·x)`.
    pub magnitude: Vec<f32>,
    /// Mean of `|h_i|·‖down_i‖`, what the neuron adds to the hidden state.
    pub contribution: Vec<f32>,
}

impl LayerActivity {
    /// Share of tokens on which each neuron fired.
    pub fn frequencies(&self) -> Vec<f64> {
        let tokens = self.tokens.max(1) as f64;
        self.active
            .iter()
            .map(|active| *active as f64 / tokens)
            .collect()
    }

    /// Share of all activations that are exactly zero.
    pub fn sparsity(&self) -> f64 {
        let total: u64 = self.active.iter().sum();
        1.0 - total as f64 / (self.tokens.max(1) * self.active.len().max(1) as u64) as f64
    }

    /// Share of neurons that never fired.
    pub fn dead(&self) -> f64 {
        self.active.iter().filter(|active| **active == 0).count() as f64
            / self.active.len().max(1) as f64
    }

    /// Neurons from the most to the least frequent; equals keep their order.
    pub fn hottest_first(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.active.len() as u32).collect();
        order.sort_by_key(|neuron| std::cmp::Reverse(self.active[*neuron as usize]));
        order
    }

    /// Share of activations carried by the hottest `neurons`.
    pub fn share_of_hottest(&self, neurons: usize) -> f64 {
        let mut counts = self.active.clone();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = counts.iter().sum();
        let carried: u64 = counts.iter().take(neurons).sum();
        if total == 0 {
            0.0
        } else {
            carried as f64 / total as f64
        }
    }

    /// Smallest share of neurons that carries at least `share` of all activations.
    pub fn neurons_for(&self, share: f64) -> f64 {
        let mut counts = self.active.clone();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = counts.iter().sum();
        let mut carried = 0;
        let mut needed = 0;
        while needed < counts.len() && (carried as f64) < share * total as f64 {
            carried += counts[needed];
            needed += 1;
        }
        needed as f64 / counts.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shares_and_counts_agree(active in prop::collection::vec(0u64..50, 1..40), share in 0.0f64..1.0) {
            let activity = LayerActivity { tokens: 50, active: active.clone(), ..LayerActivity::default() };
            let needed = (activity.neurons_for(share) * active.len() as f64).round() as usize;
            if active.iter().any(|count| *count > 0) {
                prop_assert!(activity.share_of_hottest(needed) >= share - 1e-12);
                prop_assert!(needed == 0 || activity.share_of_hottest(needed - 1) < share);
            }
            let order = activity.hottest_first();
            prop_assert!(order.windows(2).all(|pair| active[pair[0] as usize] >= active[pair[1] as usize]));
        }
    }
}
