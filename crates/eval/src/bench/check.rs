//! Comparison of a model with `dense` before it is timed.

use std::fmt;

use powerinfer_artifact::Progress;
use powerinfer_model::{LanguageModel, greedy_token};
use powerinfer_runtime::SingleSession;
use serde::Serialize;

use crate::EvalError;

/// Tokens run in one pass: more than a kernel takes together, and no multiple of that.
const BATCH: usize = 9;
/// Tokens run one by one after them.
const SINGLE: usize = 3;
/// Largest difference of logits, relative to the largest logit, if equality is promised: on the CPU the runtime
/// promises the same bits.
const TOLERANCE: f32 = 0.0;
/// The same on a device, which sums in another order and rounds a prompt's activations to 16 bits, while the CPU rounds
/// to 8.
const DEVICE_TOLERANCE: f32 = 0.05;

/// Results of [`check`].
#[derive(Debug, Serialize)]
pub struct Check {
    /// Tokens whose logits were compared.
    pub tokens: usize,
    /// The model relative to `dense`.
    pub dense: Comparison,
    /// Tokens in one pass relative to the same tokens one at a time.
    pub batch: Comparison,
    /// Sequences decoded together whose logits have the bits of decoding alone, over batches of all sizes.
    pub sequences: usize,
}

/// Logits computed in two ways.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Whether equality is promised.
    pub equality_promised: bool,
    /// Largest difference allowed then.
    #[serde(skip)]
    tolerance: f32,
    /// Whether all logits are equal.
    pub equal: bool,
    /// Share of tokens with the same arg max.
    pub top1_agreement: f64,
    /// Largest difference, relative to the largest logit.
    pub largest_difference: f32,
}

/// Tokens that [`check`] should get.
pub const CHECKED_TOKENS: usize = BATCH + SINGLE;

/// Compares `model` on `ids` with `dense`, the same bundle with every neuron computed, and one pass with single tokens.
///
/// # Errors
///
/// Fails with [`EvalError::ResultDiffers`] if results differ that should be equal, and if a model fails.
pub fn check(
    model: &mut SingleSession,
    dense: &mut SingleSession,
    ids: &[u32],
    progress: &dyn Progress,
) -> Result<Check, EvalError> {
    let logits = |model: &mut SingleSession, batch| logits(model, ids, batch, progress);
    let batch = ids.len().saturating_sub(SINGLE).max(1);
    let batched = logits(model, batch)?;
    let alone = logits(model, 1)?;
    let exact = logits(dense, batch)?;
    let vocabulary = model.config().vocabulary_size;
    let tolerance = if model.uses_device() {
        DEVICE_TOLERANCE
    } else {
        TOLERANCE
    };
    let compare = |found, want, equality_promised| Comparison {
        tolerance,
        ..compare(found, want, vocabulary, equality_promised)
    };
    let check = Check {
        tokens: ids.len(),
        dense: compare(&batched, &exact, is_lossless(model)),
        batch: compare(&batched, &alone, true),
        sequences: 0,
    };
    model.reset();
    check.verdict()?;
    Ok(check)
}

/// Logits of all `ids`, the first `batch` of them in one pass.
fn logits(
    model: &mut SingleSession,
    ids: &[u32],
    batch: usize,
    progress: &dyn Progress,
) -> Result<Vec<f32>, EvalError> {
    model.reset();
    let (first, rest) = ids.split_at(batch.min(ids.len()));
    let mut logits = model.forward(first)?;
    for id in rest {
        progress.advance(0)?;
        logits.extend(model.forward(&[*id])?);
    }
    Ok(logits)
}

/// Whether the result should equal dense's. `exact` computes every neuron if no activation is exactly zero.
fn is_lossless(model: &SingleSession) -> bool {
    model.policies().iter().all(|policy| policy.is_lossless()) && !model.skips_inputs()
}

fn compare(found: &[f32], want: &[f32], vocabulary: usize, equality_promised: bool) -> Comparison {
    let largest = want
        .iter()
        .fold(0.0f32, |most, logit| most.max(logit.abs()));
    let mut difference = 0.0f32;
    for (found, want) in found.iter().zip(want) {
        let apart = (found - want).abs();
        // NaN counts as infinitely far.
        difference = difference.max(if apart.is_nan() { f32::INFINITY } else { apart });
    }
    let tokens = found
        .chunks_exact(vocabulary)
        .zip(want.chunks_exact(vocabulary));
    let count = tokens.len().max(1);
    let same = tokens
        .filter(|(found, want)| greedy_token(found) == greedy_token(want))
        .count();
    Comparison {
        equality_promised,
        tolerance: TOLERANCE,
        equal: difference == 0.0 && found.len() == want.len(),
        top1_agreement: same as f64 / count as f64,
        largest_difference: difference / largest.max(f32::MIN_POSITIVE),
    }
}

impl Comparison {
    fn holds(&self) -> bool {
        !self.equality_promised || self.largest_difference <= self.tolerance
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.equal {
            formatter.write_str("equal")
        } else {
            write!(
                formatter,
                "top-1 agreement {:.1}%, logits differ by at most {:.1e} of the largest",
                100.0 * self.top1_agreement,
                self.largest_difference
            )
        }
    }
}

impl Check {
    /// An error if results differ that should be equal.
    fn verdict(&self) -> Result<(), EvalError> {
        for (expected, comparison) in [
            ("`dense`", &self.dense),
            ("the same tokens one at a time", &self.batch),
        ] {
            if !comparison.holds() {
                return Err(EvalError::ResultDiffers {
                    expected,
                    difference: comparison.to_string(),
                });
            }
        }
        Ok(())
    }
}

impl fmt::Display for Check {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tokens,
            dense,
            batch,
            sequences,
        } = self;
        write!(
            formatter,
            "{tokens} tokens; relative to `dense`: {dense}; one pass relative to single tokens: {batch}"
        )?;
        match sequences {
            0 => Ok(()),
            _ => write!(
                formatter,
                "; {sequences} sequences together with each alone: equal"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_fail_where_equality_is_promised() {
        let (one, other) = ([1.0, 2.0, 4.0, 3.0], [1.0, 2.0, 2.0, 3.0]);
        let same = || compare(&one, &one, 2, true);
        assert!(same().equal && same().holds());
        let apart = compare(&other, &one, 2, true);
        assert!(!apart.equal && !apart.holds());
        assert_eq!((apart.top1_agreement, apart.largest_difference), (0.5, 0.5));
        assert!(compare(&other, &one, 2, false).holds());
        let wrong = Check {
            tokens: 2,
            dense: apart,
            batch: same(),
            sequences: 0,
        };
        let error = wrong.verdict().unwrap_err().to_string();
        assert!(error.contains("`dense`"), "{error}");
        assert!(wrong.to_string().contains("50.0%"), "{wrong}");
        assert!(!compare(&[f32::NAN; 2], &[1.0, 2.0], 2, true).holds());
        assert!(!compare(&[f32::NAN, 1.0], &[1.0, 2.0], 2, true).holds());
    }
}
