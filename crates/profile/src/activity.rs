//! Frequency, magnitude and temporal locality of each neuron's activity.

use serde::{Deserialize, Serialize};

use crate::ExpertActivity;

/// Windows of preceding tokens, in tokens, over which reuse is measured.
pub const LOCALITY_WINDOWS: [usize; 3] = [1, 4, 16];

/// Size of the hot sets that are compared, as a share of a layer's neurons.
pub const HOT_SHARE: f64 = 0.2;

/// Unit of sums of magnitudes. They are whole numbers, so that a sum does not depend on how a text is divided.
pub(crate) const MAGNITUDE_UNIT: f64 = 1.0 / (1u64 << 32) as f64;

/// `magnitude`, not negative, in units of [`MAGNITUDE_UNIT`].
pub(crate) fn in_units(magnitude: f64) -> u64 {
    (magnitude / MAGNITUDE_UNIT + 0.5) as u64
}

/// Activation counts of neurons.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Number of tokens.
    pub tokens: u64,
    /// Tokens on which each neuron was active.
    pub active: Vec<u64>,
}

impl Counts {
    /// Counts of zero for `neurons` neurons.
    pub fn new(neurons: usize) -> Self {
        Self {
            tokens: 0,
            active: vec![0; neurons],
        }
    }

    /// Adds other counts.
    pub fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        for (count, more) in self.active.iter_mut().zip(&other.active) {
            *count += more;
        }
    }

    /// Subtracts the counts of a `part` of the text.
    pub fn without(&self, part: &Self) -> Self {
        let active = self.active.iter().zip(&part.active);
        Self {
            tokens: self.tokens - part.tokens,
            active: active.map(|(all, part)| all - part).collect(),
        }
    }

    /// Jaccard similarity of the hot sets, the most frequently active [`HOT_SHARE`] of the neurons.
    ///
    /// Ties are ranked in opposite orders, so that they reduce the similarity: few tokens produce many ties.
    pub fn overlap(&self, other: &Self) -> f64 {
        let count = ((self.active.len() as f64 * HOT_SHARE).round() as usize).max(1);
        let mut order: Vec<usize> = (0..self.active.len()).collect();
        order.sort_by_key(|neuron| std::cmp::Reverse(self.active[*neuron]));
        let mut hot = vec![false; order.len()];
        for neuron in order.iter().take(count) {
            hot[*neuron] = true;
        }
        order.sort_by_key(|neuron| std::cmp::Reverse((other.active[*neuron], *neuron)));
        let both = order.iter().take(count).filter(|neuron| hot[**neuron]);
        let both = both.count();
        both as f64 / (2 * count.min(order.len()) - both).max(1) as f64
    }
}

/// Reuse of active neurons within a window of preceding tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reuse {
    /// Activations of neurons that were also active within the window.
    pub reused: u64,
    /// All activations, on tokens with a full window before them.
    pub active: u64,
}

impl Reuse {
    /// Share of reused activations; `None` if no token had a full window before it.
    pub fn share(self) -> Option<f64> {
        (self.active > 0).then(|| self.reused as f64 / self.active as f64)
    }
}

/// Activity of a layer over all calibration tokens; additive over shards, texts and rounds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerActivity {
    /// Number of tokens.
    pub tokens: u64,
    /// Tokens on which each neuron was active: `h_i != 0`.
    pub active: Vec<u64>,
    /// Sum of `|h_i|` over all tokens, `h_i = act(gate_i·x)·(up_i·x)`, in units of 2⁻³².
    pub magnitude_sum: Vec<u64>,
    /// `‖down_i‖`.
    pub down_norms: Vec<f32>,
    /// Counts over the first of two independent halves of the text.
    pub first_half: Counts,
    /// Counts per source of the text.
    pub sources: Vec<Counts>,
    /// Reuse within each of [`LOCALITY_WINDOWS`].
    pub locality: [Reuse; 3],
    /// Expert selections; `None` if they were not counted, as in dense models.
    pub experts: Option<ExpertActivity>,
}

impl LayerActivity {
    /// No activity, for `neurons` neurons and `sources` sources.
    pub fn new(neurons: usize, sources: usize) -> Self {
        Self {
            tokens: 0,
            active: vec![0; neurons],
            magnitude_sum: vec![0; neurons],
            down_norms: vec![0.0; neurons],
            first_half: Counts::new(neurons),
            sources: vec![Counts::new(neurons); sources],
            locality: Default::default(),
            experts: None,
        }
    }

    /// Adds the activity on other text from the same sources.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.magnitude_sum.iter_mut().zip(&other.magnitude_sum) {
            *sum = sum.saturating_add(*more);
        }
        // The same model's, or still 0.
        for (mine, theirs) in self.down_norms.iter_mut().zip(&other.down_norms) {
            *mine = mine.max(*theirs);
        }
        self.tokens += other.tokens;
        for (count, more) in self.active.iter_mut().zip(&other.active) {
            *count += more;
        }
        self.first_half.add(&other.first_half);
        for (mine, theirs) in self.sources.iter_mut().zip(&other.sources) {
            mine.add(theirs);
        }
        for (mine, theirs) in self.locality.iter_mut().zip(&other.locality) {
            mine.reused += theirs.reused;
            mine.active += theirs.active;
        }
        match (&mut self.experts, &other.experts) {
            (Some(mine), Some(theirs)) => mine.add(theirs),
            (mine @ None, theirs) => mine.clone_from(theirs),
            (Some(_), None) => {}
        }
    }

    /// Mean of `|h_i|` over all tokens.
    pub fn magnitude(&self) -> Vec<f32> {
        let tokens = self.tokens.max(1) as f64;
        let mean = |sum: &u64| (*sum as f64 * MAGNITUDE_UNIT / tokens) as f32;
        self.magnitude_sum.iter().map(mean).collect()
    }

    /// Mean contribution `|h_i|·‖down_i‖` to the hidden state.
    pub fn contribution(&self) -> Vec<f32> {
        let means = self.magnitude().into_iter().zip(&self.down_norms);
        means.map(|(mean, norm)| mean * norm).collect()
    }

    /// Counts over all text.
    pub fn counts(&self) -> Counts {
        Counts {
            tokens: self.tokens,
            active: self.active.clone(),
        }
    }

    /// Overlap of the hot sets of two independent halves of the text; near 1 when more text would not change the hot set.
    pub fn half_overlap(&self) -> f64 {
        let second = self.counts().without(&self.first_half);
        self.first_half.overlap(&second)
    }

    /// Activation frequency of each neuron.
    pub fn frequencies(&self) -> Vec<f64> {
        let tokens = self.tokens.max(1) as f64;
        self.active
            .iter()
            .map(|active| *active as f64 / tokens)
            .collect()
    }

    /// Sparsity: share of activations that are exactly zero.
    pub fn sparsity(&self) -> f64 {
        let total: u64 = self.active.iter().sum();
        1.0 - total as f64 / (self.tokens.max(1) * self.active.len().max(1) as u64) as f64
    }

    /// Share of neurons that were never active.
    pub fn dead(&self) -> f64 {
        self.active.iter().filter(|active| **active == 0).count() as f64
            / self.active.len().max(1) as f64
    }

    /// Neurons by descending activation frequency; stable.
    pub fn hottest_first(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.active.len() as u32).collect();
        order.sort_by_key(|neuron| std::cmp::Reverse(self.active[*neuron as usize]));
        order
    }

    /// Skewness of the layer's activations.
    pub fn skew(&self) -> Skew {
        Skew::new(self.active.clone())
    }
}

/// Cumulative activations of neurons, hottest first.
#[derive(Debug, Clone)]
pub struct Skew {
    /// Activations of the hottest 1, 2, … neurons.
    cumulative: Vec<u64>,
}

impl Skew {
    /// Curve of activation counts, of one layer or several.
    pub fn new(mut counts: Vec<u64>) -> Self {
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let mut sum = 0;
        for count in &mut counts {
            sum += *count;
            *count = sum;
        }
        Self { cumulative: counts }
    }

    /// Share of activations of the hottest `share` of the neurons.
    pub fn activations_of(&self, share: f64) -> f64 {
        let neurons = (share * self.cumulative.len() as f64) as usize;
        let total = self.cumulative.last().copied().unwrap_or(0);
        match neurons.min(self.cumulative.len()).checked_sub(1) {
            Some(last) if total > 0 => self.cumulative[last] as f64 / total as f64,
            _ => 0.0,
        }
    }

    /// Smallest share of neurons with at least `share` of all activations.
    pub fn neurons_for(&self, share: f64) -> f64 {
        let wanted = share * self.cumulative.last().copied().unwrap_or(0) as f64;
        if wanted <= 0.0 {
            return 0.0;
        }
        let before = self
            .cumulative
            .partition_point(|carried| (*carried as f64) < wanted);
        (before + 1).min(self.cumulative.len()) as f64 / self.cumulative.len() as f64
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
            let skew = activity.skew();
            let needed = skew.neurons_for(share);
            if active.iter().any(|count| *count > 0) && share > 0.0 {
                let one = 1.0 / active.len() as f64;
                prop_assert!(skew.activations_of(needed + one / 2.0) >= share - 1e-12);
                prop_assert!(skew.activations_of(needed - one / 2.0) < share);
            }
            let order = activity.hottest_first();
            prop_assert!(order.windows(2).all(|pair| active[pair[0] as usize] >= active[pair[1] as usize]));
        }

        #[test]
        fn overlap_is_that_of_sorted_sets(a in prop::collection::vec(0u64..1000, 10..60), seed in 0u64..100) {
            // Distinct counts, so that no tie decides.
            let n = a.len() as u64;
            let distinct = |counts: Vec<u64>| -> Vec<u64> {
                counts.iter().enumerate().map(|(index, count)| count * n + index as u64).collect()
            };
            let b = a.iter().enumerate().map(|(i, count)| (count * 7 + seed * (i as u64 + 1) * 13) % 1000).collect();
            let (a, b) = (distinct(a), distinct(b));
            let count = ((n as f64 * HOT_SHARE).round() as usize).max(1);
            let top = |counts: &[u64]| -> std::collections::BTreeSet<usize> {
                let mut order: Vec<usize> = (0..counts.len()).collect();
                order.sort_by_key(|i| std::cmp::Reverse(counts[*i]));
                order.into_iter().take(count).collect()
            };
            let (x, y) = (top(&a), top(&b));
            let expected = x.intersection(&y).count() as f64 / x.union(&y).count() as f64;
            let (a, b) = (Counts { tokens: 1, active: a }, Counts { tokens: 1, active: b });
            prop_assert!((a.overlap(&b) - expected).abs() < 1e-12);
            prop_assert!((b.overlap(&a) - expected).abs() < 1e-12);
            prop_assert!((a.overlap(&a) - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn ties_do_not_count_as_overlap() {
        let counts = Counts {
            tokens: 1,
            active: vec![0; 100],
        };
        assert_eq!(counts.overlap(&counts), 0.0);
    }
}
