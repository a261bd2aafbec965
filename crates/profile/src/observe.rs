//! Counts and samples one layer as the text goes through it.

use std::time::{Duration, Instant};

use candle_core::{CpuStorage, Storage, Tensor, bail};
use half::bf16;
use powerinfer_reference::{FfnObservation, FfnTap};

use crate::{
    Counts, LayerActivity, Part, Traces,
    activity::{LOCALITY_WINDOWS, Reuse},
    calibration::Sequence,
};

/// Which tokens of a part are sampled: evenly spread, `wanted` of `total` or all there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    pub(crate) wanted: usize,
    pub(crate) total: usize,
    /// Running number of the first token that will be seen.
    pub(crate) first: usize,
}

impl Sampling {
    /// Whether the token with this running number is sampled.
    pub(crate) fn takes(self, number: usize) -> bool {
        let taken = |count: usize| count as u128 * self.wanted as u128 / self.total.max(1) as u128;
        self.wanted >= self.total || taken(number + 1) > taken(number)
    }
}

/// Who fired on the last tokens of a sequence, a bit a neuron.
#[derive(Debug)]
struct Recent {
    /// A row of words a token, the oldest overwritten by the newest.
    rows: Vec<Vec<u64>>,
    tokens: usize,
}

impl Recent {
    /// Remembers as many tokens as the longest window needs, and the newest.
    fn new(neurons: usize) -> Self {
        let longest = LOCALITY_WINDOWS[LOCALITY_WINDOWS.len() - 1];
        Self {
            rows: vec![vec![0; neurons.div_ceil(64)]; longest + 1],
            tokens: 0,
        }
    }

    /// Forgets what it saw of another sequence.
    fn begin_sequence(&mut self) {
        self.tokens = 0;
    }

    /// Takes in the next token and counts who of its active neurons was active before.
    fn observe(&mut self, activations: &[f32], locality: &mut [Reuse]) {
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
                break; // a shorter past would make the window look less used than it is
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
    }
}

/// Collects activity and samples of one layer.
pub(crate) struct Observer<'a> {
    contribution_norms: &'a [f32],
    /// Whether neurons fall silent at all.
    has_exact_zeros: bool,
    sampling: [Sampling; 2],
    seen: [usize; 2],
    /// What the sequence on its way is for.
    part: Part,
    /// Counts of the sequences of each half and source: `[source][half]`.
    counts: Vec<[Counts; 2]>,
    now: (usize, usize),
    magnitude: Vec<f64>,
    recent: Recent,
    locality: [Reuse; 3],
    traces: Traces,
    finite: bool,
    /// Time that watching has taken.
    pub(crate) elapsed: Duration,
}

impl<'a> Observer<'a> {
    /// Starts with nothing seen; `sampling` is per part.
    pub(crate) fn new(
        contribution_norms: &'a [f32],
        has_exact_zeros: bool,
        hidden_size: usize,
        sources: usize,
        sampling: [Sampling; 2],
    ) -> Self {
        let neurons = contribution_norms.len();
        let counts = || [Counts::new(neurons), Counts::new(neurons)];
        Self {
            contribution_norms,
            has_exact_zeros,
            seen: sampling.map(|sampling| sampling.first),
            sampling,
            part: Part::Training,
            counts: (0..sources).map(|_| counts()).collect(),
            now: (0, 0),
            magnitude: vec![0.0; neurons],
            recent: Recent::new(neurons),
            locality: Default::default(),
            traces: Traces::new(hidden_size, neurons),
            finite: true,
            elapsed: Duration::ZERO,
        }
    }

    /// Says which sequence comes next.
    pub(crate) fn begin_sequence(&mut self, sequence: &Sequence) {
        self.part = sequence.part;
        self.now = (sequence.source, usize::from(!sequence.first_half));
        self.recent.begin_sequence();
    }

    /// What was seen; `None` where a value was not finite.
    pub(crate) fn finish(self) -> Option<(LayerActivity, Traces)> {
        let neurons = self.magnitude.len();
        let mut activity = LayerActivity::new(neurons, self.counts.len());
        let mut all = Counts::new(neurons);
        for (source, [first, second]) in activity.sources.iter_mut().zip(&self.counts) {
            activity.first_half.add(first);
            source.add(first);
            source.add(second);
            all.add(source);
        }
        let mean = |sum: &f64| (sum / all.tokens.max(1) as f64) as f32;
        activity.magnitude = self.magnitude.iter().map(mean).collect();
        activity.contribution = activity
            .magnitude
            .iter()
            .zip(self.contribution_norms)
            .map(|(mean, norm)| mean * norm)
            .collect();
        activity.tokens = all.tokens;
        activity.active = all.active;
        activity.locality = self.locality;
        self.finite.then_some((activity, self.traces))
    }
}

/// Calls `read` with the contiguous values of `tensor`.
fn with_values<Output>(
    tensor: &Tensor,
    read: impl FnOnce(&[f32]) -> Output,
) -> candle_core::Result<Output> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            Ok(read(&values[start..end]))
        }
        _ => bail!("a contiguous float32 tensor on the CPU expected"),
    }
}

impl FfnTap for Observer<'_> {
    fn tap(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        let started = Instant::now();
        let neurons = self.magnitude.len();
        let (part, first) = (self.part as usize, self.seen[self.part as usize]);
        let sampling = self.sampling[part];
        let samples = self.traces.part_mut(self.part);
        let (source, half) = self.now;
        let counts = &mut self.counts[source][half];
        // A neuron is active where it contributes: what decides is the product, not the gate
        // alone, since with a ReLU on both either may silence it.
        let tokens = with_values(observation.product, |product| {
            for (index, row) in product.chunks_exact(neurons).enumerate() {
                let mut sum = 0.0;
                for ((count, total), value) in
                    counts.active.iter_mut().zip(&mut self.magnitude).zip(row)
                {
                    *count += u64::from(*value != 0.0);
                    sum += value;
                    *total += f64::from(value.abs());
                }
                self.finite &= sum.is_finite();
                self.recent.observe(row, &mut self.locality);
                if sampling.takes(first + index) {
                    samples.active.push(row);
                    if self.has_exact_zeros {
                        let each = row.iter().zip(self.contribution_norms);
                        let fired = each.filter(|(value, _)| **value != 0.0);
                        let added = fired.map(|(value, norm)| value.abs() * norm);
                        samples.contributions.push(added);
                    }
                }
            }
            product.len() / neurons
        })?;
        counts.tokens += tokens as u64;
        let hidden_size = samples.hidden_size;
        let sample = |tensor: &Tensor, out: &mut Vec<bf16>| {
            with_values(tensor, |values| {
                for (index, row) in values.chunks_exact(hidden_size).enumerate() {
                    if sampling.takes(first + index) {
                        out.extend(row.iter().map(|value| bf16::from_f32(*value)));
                    }
                }
            })
        };
        sample(observation.input, samples.inputs.to_mut())?;
        if self.part == Part::HeldOut {
            sample(observation.residual, samples.residuals.to_mut())?;
        }
        self.seen[part] += tokens;
        self.elapsed += started.elapsed();
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sampling_takes_just_what_is_wanted(wanted in 0usize..40, total in 1usize..100) {
            let sampling = Sampling { wanted, total, first: 0 };
            let taken = (0..total).filter(|number| sampling.takes(*number)).count();
            prop_assert_eq!(taken, wanted.min(total));
        }
    }
    #[test]
    fn reuse_is_what_a_set_would_count() {
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
        assert_eq!(locality, before, "a sequence has no past in another");
    }
}
