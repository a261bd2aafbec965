//! Sampling of tokens of a layer.

use half::bf16;

use crate::{Part, Traces};

/// Selects `wanted` of `total` tokens, evenly spread; all if there are fewer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    pub(crate) wanted: usize,
    pub(crate) total: usize,
    /// Index of the first token that will be seen.
    pub(crate) first: usize,
}

impl Sampling {
    /// Whether the token with this index is sampled.
    pub(crate) fn takes(self, number: usize) -> bool {
        let taken = |count: usize| count as u128 * self.wanted as u128 / self.total.max(1) as u128;
        self.wanted >= self.total || taken(number + 1) > taken(number)
    }
}

/// FFN values of one token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<'a> {
    /// Input of the FFN's norm: `[hidden]`.
    pub(crate) residual: &'a [f32],
    /// The FFN's input, after its norm: `[hidden]`.
    pub(crate) input: &'a [f32],
    /// The input of the down projection: `[ffn]`.
    pub(crate) product: &'a [f32],
}

/// Collects the samples of a layer.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// `[neurons]`: norm of each column of down.
    pub(crate) contribution_norms: Vec<f32>,
    /// Whether inactive neurons contribute exactly 0.
    has_exact_zeros: bool,
    sampling: [Sampling; 2],
    seen: [usize; 2],
    /// Part of the current sequence.
    part: Part,
    pub(crate) traces: Traces,
}

impl Sampler {
    /// An empty sampler; `sampling` is per part.
    pub(crate) fn new(
        contribution_norms: Vec<f32>,
        has_exact_zeros: bool,
        hidden_size: usize,
        sampling: [Sampling; 2],
    ) -> Self {
        let traces = Traces::new(hidden_size, contribution_norms.len());
        Self {
            contribution_norms,
            has_exact_zeros,
            seen: sampling.map(|sampling| sampling.first),
            sampling,
            part: Part::Training,
            traces,
        }
    }

    /// Begins a sequence of `part`.
    pub(crate) fn begin(&mut self, part: Part) {
        self.part = part;
    }

    /// Whether token `index` of the next batch is sampled.
    pub(crate) fn wants(&self, index: usize) -> bool {
        let part = self.part as usize;
        self.sampling[part].takes(self.seen[part] + index)
    }

    /// Stores a sample.
    pub(crate) fn keep(&mut self, row: Row<'_>) {
        let samples = self.traces.part_mut(self.part);
        samples.active.push(row.product);
        if self.has_exact_zeros {
            let each = row.product.iter().zip(&self.contribution_norms);
            let active = each.filter(|(value, _)| **value != 0.0);
            let added = active.map(|(value, norm)| value.abs() * norm);
            samples.contributions.push(added);
        }
        let sample = |from: &[f32], to: &mut Vec<bf16>| {
            to.extend(from.iter().map(|value| bf16::from_f32(*value)));
        };
        sample(row.input, samples.inputs.to_mut());
        if self.part == Part::HeldOut {
            sample(row.residual, samples.residuals.to_mut());
        }
    }

    /// Advances by `tokens` tokens, sampled or not.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.seen[self.part as usize] += tokens;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sampling_takes_exactly_the_wanted_number(wanted in 0usize..40, total in 1usize..100) {
            let sampling = Sampling { wanted, total, first: 0 };
            let taken = (0..total).filter(|number| sampling.takes(*number)).count();
            prop_assert_eq!(taken, wanted.min(total));
        }
    }
}
