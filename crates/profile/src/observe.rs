//! Counts and samples one layer as the text goes through it.

use candle_core::{CpuStorage, Storage, Tensor, bail};
use half::bf16;
use powerinfer_reference::{FfnObservation, FfnTap};

use crate::{LayerActivity, Part, Traces};

/// Which tokens of a part are sampled: evenly spread, at most `wanted` of `total`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    pub(crate) wanted: usize,
    pub(crate) total: usize,
}

impl Sampling {
    /// Whether the token with this running number is sampled.
    fn takes(self, number: usize) -> bool {
        let taken = |count: usize| count as u128 * self.wanted as u128 / self.total.max(1) as u128;
        self.wanted >= self.total || taken(number + 1) > taken(number)
    }
}

/// Collects activity and samples of one layer.
pub(crate) struct Observer<'a> {
    contribution_norms: &'a [f32],
    pub(crate) part: Part,
    sampling: [Sampling; 2],
    seen: [usize; 2],
    active: Vec<u64>,
    magnitude: Vec<f64>,
    traces: Traces,
    finite: bool,
}

impl<'a> Observer<'a> {
    /// Starts with nothing seen; `sampling` is per part.
    pub(crate) fn new(
        contribution_norms: &'a [f32],
        hidden_size: usize,
        sampling: [Sampling; 2],
    ) -> Self {
        let neurons = contribution_norms.len();
        Self {
            contribution_norms,
            part: Part::Training,
            sampling,
            seen: [0; 2],
            active: vec![0; neurons],
            magnitude: vec![0.0; neurons],
            traces: Traces::new(hidden_size, neurons),
            finite: true,
        }
    }

    /// What was seen; `None` where a value was not finite.
    pub(crate) fn finish(self) -> Option<(LayerActivity, Traces)> {
        let tokens = (self.seen[0] + self.seen[1]) as u64;
        let mean = |sum: f64| (sum / tokens.max(1) as f64) as f32;
        let magnitude: Vec<f32> = self.magnitude.iter().map(|sum| mean(*sum)).collect();
        let contribution = magnitude
            .iter()
            .zip(self.contribution_norms)
            .map(|(mean, norm)| mean * norm)
            .collect();
        self.finite.then_some((
            LayerActivity {
                tokens,
                active: self.active,
                magnitude,
                contribution,
            },
            self.traces,
        ))
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
        let neurons = self.active.len();
        let (part, first) = (self.part as usize, self.seen[self.part as usize]);
        let sampling = self.sampling[part];
        let samples = self.traces.part_mut(self.part);
        // A neuron is active where it contributes: what decides is the product, not the gate
        // alone, since with a ReLU on both either may silence it.
        let tokens = with_values(observation.product, |product| {
            for (index, row) in product.chunks_exact(neurons).enumerate() {
                let mut sum = 0.0;
                for ((count, total), value) in
                    self.active.iter_mut().zip(&mut self.magnitude).zip(row)
                {
                    *count += u64::from(*value != 0.0);
                    sum += value;
                    *total += f64::from(value.abs());
                }
                self.finite &= sum.is_finite();
                if sampling.takes(first + index) {
                    samples.active.push(row);
                }
            }
            product.len() / neurons
        })?;
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
        sample(observation.input, &mut samples.inputs)?;
        if self.part == Part::HeldOut {
            sample(observation.residual, &mut samples.residuals)?;
        }
        self.seen[part] += tokens;
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
            let sampling = Sampling { wanted, total };
            let taken = (0..total).filter(|number| sampling.takes(*number)).count();
            prop_assert_eq!(taken, wanted.min(total));
        }
    }
}
