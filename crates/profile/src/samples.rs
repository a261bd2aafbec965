//! Which tokens of a layer's text are kept, and what is kept of them.

use half::bf16;

use crate::{Part, Traces};

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

/// What one token makes of a layer's FFN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<'a> {
    /// What goes into the FFN's norm: `[hidden]`.
    pub(crate) residual: &'a [f32],
    /// The FFN's input, after its norm: `[hidden]`.
    pub(crate) input: &'a [f32],
    /// The input of the down projection: `[ffn]`.
    pub(crate) product: &'a [f32],
}

/// Keeps samples of one layer.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// One a neuron.
    pub(crate) contribution_norms: Vec<f32>,
    /// Whether neurons fall silent at all.
    has_exact_zeros: bool,
    sampling: [Sampling; 2],
    seen: [usize; 2],
    /// What the sequence on its way is for.
    part: Part,
    pub(crate) traces: Traces,
}

impl Sampler {
    /// Starts with nothing kept; `sampling` is per part.
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

    /// Says what the sequence that comes next is for.
    pub(crate) fn begin(&mut self, part: Part) {
        self.part = part;
    }

    /// Whether token `index` of what comes next is kept.
    pub(crate) fn wants(&self, index: usize) -> bool {
        let part = self.part as usize;
        self.sampling[part].takes(self.seen[part] + index)
    }

    /// Keeps a token that is wanted.
    pub(crate) fn keep(&mut self, row: Row<'_>) {
        let samples = self.traces.part_mut(self.part);
        samples.active.push(row.product);
        if self.has_exact_zeros {
            let each = row.product.iter().zip(&self.contribution_norms);
            let fired = each.filter(|(value, _)| **value != 0.0);
            let added = fired.map(|(value, norm)| value.abs() * norm);
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

    /// So many tokens have come, wanted or not.
    pub(crate) fn pass(&mut self, tokens: usize) {
        self.seen[self.part as usize] += tokens;
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
}
