//! Search for the sparsest policies whose perplexity on held-out text stays within the budget.

use powerinfer_artifact::{
    Progress,
    plan::{LayerPlan, Policy},
    progress::Silent,
    threshold_curve::ERRORS,
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::{TokenLosses, Windows, perplexity_rise, statistics::Interval, token_losses};
use powerinfer_pool::usable_cores;
use powerinfer_runtime::{Execution, SingleSession};

use crate::{PlannerError, modes::AllowedModes};

/// Steps of the search between two error levels.
const FRACTIONS: usize = 4;

/// Ladder of allowed modes by error level, from lossless to the largest error.
pub(crate) fn thresholds(layers: usize) -> Vec<AllowedModes> {
    let levels = (0..=(ERRORS.len() - 1) * FRACTIONS).map(|step| AllowedModes {
        level: Some(step as f64 / FRACTIONS as f64),
        ..AllowedModes::none(layers)
    });
    std::iter::once(AllowedModes::none(layers))
        .chain(levels)
        .collect()
}

/// Ladder of allowed modes: each step allows prediction in one more layer of `ranked`.
pub(crate) fn predicted(layers: usize, ranked: &[usize]) -> Vec<AllowedModes> {
    let mut ladder = vec![AllowedModes::none(layers)];
    for layer in ranked {
        let mut next = ladder[ladder.len() - 1].clone();
        next.predicted[*layer] = true;
        ladder.push(next);
    }
    ladder
}

/// Finds the last allowed step of `ladder` by bisection. The first step is allowed, and so is every step before an
/// allowed one. If `tries_last`, the last step is tried first.
pub(crate) fn last_allowed<T>(
    ladder: &[T],
    tries_last: bool,
    mut is_allowed: impl FnMut(&T) -> Result<bool, PlannerError>,
) -> Result<usize, PlannerError> {
    let (mut good, mut bad) = (0, ladder.len());
    if tries_last && ladder.len() > 1 {
        bad -= 1;
        if is_allowed(&ladder[bad])? {
            return Ok(bad);
        }
    }
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if is_allowed(&ladder[middle])? {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Ok(good)
}

/// Measures the rise of perplexity under given policies.
pub(crate) struct PerplexityProbe<'a> {
    model: SingleSession,
    texts: Vec<Vec<u32>>,
    windows: Windows,
    /// Losses under `dense`.
    dense: TokenLosses,
    progress: &'a dyn Progress,
}

impl<'a> PerplexityProbe<'a> {
    /// Measures the perplexity of `texts` under `dense`.
    pub(crate) fn new(
        bundle: Bundle,
        texts: Vec<Vec<u32>>,
        progress: &'a dyn Progress,
    ) -> Result<Self, PlannerError> {
        let windows = windows(&bundle);
        let policy = Some(Policy::Dense);
        let model =
            SingleSession::open(bundle, policy, &Execution::on_cpu(usable_cores()), &Silent)?;
        let mut judge = Self {
            model,
            texts,
            windows,
            dense: TokenLosses::default(),
            progress,
        };
        judge.dense = judge.losses("perplexity of dense")?;
        Ok(judge)
    }

    /// Relative rise of perplexity under the policies and thresholds of `layers`.
    pub(crate) fn rise(&mut self, layers: &[LayerPlan]) -> Result<Interval, PlannerError> {
        for layer in layers {
            self.model
                .experiments()
                .set_policy(layer.layer, layer.policy, layer.threshold)?;
            self.model
                .experiments()
                .set_input_thresholds(layer.layer, layer.input_thresholds);
        }
        let found = self.losses("perplexity of policies")?;
        Ok(perplexity_rise(&self.dense, &found))
    }

    fn losses(&mut self, label: &str) -> Result<TokenLosses, PlannerError> {
        let bar = self.progress;
        bar.begin(label, scored(&self.texts) as u64, "tokens");
        let found = token_losses(&mut self.model, &self.texts, self.windows, |tokens| {
            bar.advance(tokens).map_err(PlannerError::from)
        })?;
        bar.end();
        Ok(found)
    }
}

/// Default scoring windows for the context of `bundle`.
pub fn windows(bundle: &Bundle) -> Windows {
    Windows::for_context(bundle.plan().budget.context_tokens as usize)
}

/// Number of scored tokens of `texts`: all but the first of each text.
pub(crate) fn scored(texts: &[Vec<u32>]) -> usize {
    texts.iter().map(|text| text.len().saturating_sub(1)).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bisection_finds_the_last_allowed(length in 1usize..70, allowed in 0usize..70, tries_last: bool) {
            let ladder: Vec<usize> = (0..length).collect();
            let mut tried = Vec::new();
            let is_allowed = |step: &usize| {
                tried.push(*step);
                Ok(*step <= allowed)
            };
            let found = last_allowed(&ladder, tries_last, is_allowed).unwrap();
            prop_assert_eq!(found, allowed.min(length - 1));
            if tries_last && allowed >= length - 1 {
                prop_assert!(tried.len() <= 1, "{:?}", tried);
            }
            let count = tried.len();
            tried.sort_unstable();
            tried.dedup();
            prop_assert_eq!(tried.len(), count, "no step is tried twice");
        }
    }

    #[test]
    fn ladders_begin_with_nothing_and_grow() {
        let ladder = predicted(3, &[2, 0]);
        let masks: Vec<_> = ladder
            .iter()
            .map(|allowed| allowed.predicted.clone())
            .collect();
        assert_eq!(
            masks,
            [
                [false, false, false],
                [false, false, true],
                [true, false, true]
            ]
        );
        let ladder = thresholds(2);
        assert_eq!(ladder[0], AllowedModes::none(2));
        assert_eq!(ladder[1].level, Some(0.0));
        assert_eq!(
            ladder[ladder.len() - 1].level,
            Some((ERRORS.len() - 1) as f64)
        );
    }
}
