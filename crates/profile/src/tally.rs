//! Counts of a layer's activity on text.

use crate::{
    Counts, LayerActivity,
    activity::{LOCALITY_WINDOWS, Reuse, in_units},
    calibration::Sequence,
    experts::ExpertCounter,
};

/// Activity of the last tokens of a sequence, one bit per neuron.
#[derive(Debug)]
struct Recent {
    /// Ring buffer of bit masks, one per token.
    rows: Vec<Vec<u64>>,
    tokens: usize,
}

impl Recent {
    /// A history as long as the longest window, plus the current token.
    fn new(neurons: usize) -> Self {
        let longest = LOCALITY_WINDOWS[LOCALITY_WINDOWS.len() - 1];
        Self {
            rows: vec![vec![0; neurons.div_ceil(64)]; longest + 1],
            tokens: 0,
        }
    }

    /// Clears the history.
    fn begin_sequence(&mut self) {
        self.tokens = 0;
    }

    /// Adds a token, and counts its active neurons that were also active within each window. Returns the mask of its active neurons.
    fn observe(&mut self, activations: &[f32], locality: &mut [Reuse]) -> &[u64] {
        let capacity = self.rows.len();
        let row = &mut self.rows[self.tokens % capacity];
        for (word, group) in row.iter_mut().zip(activations.chunks(64)) {
            *word = group.iter().enumerate().fold(0, |bits, (bit, value)| {
                bits | u64::from(*value != 0.0) << bit
            });
        }
        let newest = &self.rows[self.tokens % capacity];
        let active: u32 = newest.iter().map(|word| word.count_ones()).sum();
        let mut before = vec![0u64; newest.len()];
        let mut distance = 0;
        for (window, reuse) in LOCALITY_WINDOWS.iter().zip(locality) {
            if self.tokens < *window {
                break; // an incomplete window would bias reuse downwards
            }
            while distance < *window {
                distance += 1;
                let row = &self.rows[(self.tokens - distance) % capacity];
                for (before, word) in before.iter_mut().zip(row) {
                    *before |= word;
                }
            }
            let both = newest
                .iter()
                .zip(&before)
                .map(|(a, b)| (a & b).count_ones());
            reuse.reused += u64::from(both.sum::<u32>());
            reuse.active += u64::from(active);
        }
        self.tokens += 1;
        &self.rows[(self.tokens - 1) % capacity]
    }
}

/// Counts of a layer.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Activation counts, `[source][half]`.
    pub(crate) counts: Vec<[Counts; 2]>,
    /// `[neurons]`: sum of `|h|`, in units of [`MAGNITUDE_UNIT`](crate::activity::MAGNITUDE_UNIT).
    pub(crate) magnitude_sum: Vec<u64>,
    /// Reuse within each window.
    pub(crate) locality: [Reuse; 3],
    /// Whether every activation was finite.
    pub(crate) is_finite: bool,
}

/// Source and half of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SourceHalf {
    pub(crate) source: usize,
    pub(crate) half: usize,
}

impl SourceHalf {
    pub(crate) fn new(sequence: &Sequence) -> Self {
        Self {
            source: sequence.source,
            half: usize::from(!sequence.first_half),
        }
    }
}

impl Tally {
    /// Counts of zero.
    pub(crate) fn new(neurons: usize, sources: usize) -> Self {
        let counts = || [Counts::new(neurons), Counts::new(neurons)];
        Self {
            counts: (0..sources).map(|_| counts()).collect(),
            magnitude_sum: vec![0; neurons],
            locality: Default::default(),
            is_finite: true,
        }
    }

    /// Activity of the layer; `None` if an activation was not finite.
    pub(crate) fn activity(self, down_norms: &[f32]) -> Option<LayerActivity> {
        let neurons = self.magnitude_sum.len();
        let mut activity = LayerActivity::new(neurons, self.counts.len());
        let mut all = Counts::new(neurons);
        for (source, [first, second]) in activity.sources.iter_mut().zip(&self.counts) {
            activity.first_half.add(first);
            source.add(first);
            source.add(second);
            all.add(source);
        }
        activity.magnitude_sum = self.magnitude_sum;
        activity.down_norms = down_norms.to_vec();
        activity.tokens = all.tokens;
        activity.active = all.active;
        activity.locality = self.locality;
        self.is_finite.then_some(activity)
    }
}

/// Counts on the CPU, token by token.
#[derive(Debug)]
pub(crate) struct Counter {
    pub(crate) tally: Tally,
    place: SourceHalf,
    recent: Recent,
    /// Expert selections; `None` in dense models.
    experts: Option<ExpertCounter>,
}

impl Counter {
    /// Counts of zero.
    pub(crate) fn new(neurons: usize, sources: usize, experts: Option<usize>) -> Self {
        Self {
            tally: Tally::new(neurons, sources),
            experts: experts.map(ExpertCounter::new),
            place: SourceHalf { source: 0, half: 0 },
            recent: Recent::new(neurons),
        }
    }

    /// Begins a sequence with this source and half.
    pub(crate) fn begin(&mut self, place: SourceHalf) {
        self.place = place;
        self.recent.begin_sequence();
        if let Some(experts) = &mut self.experts {
            experts.begin();
        }
    }

    /// Counts the experts that a token selects, which are the ones with non-zero `weights`.
    pub(crate) fn count_experts(&mut self, weights: impl Iterator<Item = f32>) {
        if let Some(experts) = &mut self.experts {
            experts.count(self.place.half, weights);
        }
    }

    /// Activity of the layer; `None` if an activation was not finite.
    pub(crate) fn activity(self, down_norms: &[f32]) -> Option<LayerActivity> {
        let mut activity = self.tally.activity(down_norms)?;
        activity.experts = self.experts.map(|experts| experts.activity);
        Some(activity)
    }

    /// Counts the activations `h` of one token. A neuron is active if `h != 0`; the gate alone does not decide, since with a
    /// ReLU on both gate and up either may be 0.
    pub(crate) fn count(&mut self, product: &[f32]) {
        let Tally {
            counts,
            magnitude_sum,
            locality,
            is_finite,
        } = &mut self.tally;
        let counts = &mut counts[self.place.source][self.place.half];
        let active = self.recent.observe(product, locality);
        for (word, bits) in active.iter().enumerate() {
            let mut bits = *bits;
            while bits != 0 {
                let neuron = 64 * word + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let value = product[neuron];
                counts.active[neuron] += 1;
                *is_finite &= value.is_finite();
                let total = &mut magnitude_sum[neuron];
                *total = total.saturating_add(in_units(f64::from(value.abs())));
            }
        }
        counts.tokens += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_equals_a_straightforward_count() {
        let mut random = powerinfer_artifact::random::Random::new(3);
        let neurons = 70;
        let rows: Vec<Vec<f32>> = (0..40)
            .map(|_| (0..neurons).map(|_| f32::from(random.chance(20))).collect())
            .collect();
        let mut recent = Recent::new(neurons);
        let mut locality = [Reuse::default(); 3];
        for row in &rows {
            recent.observe(row, &mut locality);
        }
        for (window, reuse) in LOCALITY_WINDOWS.iter().zip(locality) {
            let mut expected = Reuse::default();
            for (token, row) in rows.iter().enumerate().skip(*window) {
                for neuron in (0..neurons).filter(|neuron| row[*neuron] != 0.0) {
                    let past = &rows[token - window..token];
                    expected.active += 1;
                    expected.reused += u64::from(past.iter().any(|row| row[neuron] != 0.0));
                }
            }
            assert_eq!(reuse, expected, "window {window}");
        }
        recent.begin_sequence();
        let before = locality;
        recent.observe(&rows[0], &mut locality);
        assert_eq!(locality, before, "sequences do not share a history");
    }
}
