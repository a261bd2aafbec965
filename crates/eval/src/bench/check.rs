//! Holds what is to be timed against the dense path, before anything is timed.

use anyhow::{Result, bail};
use powerinfer_artifact::progress::Interrupted;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::Runtime;
use serde::Serialize;

use crate::{output::percent, progress::interrupted};

/// Tokens that go through at once, more than kernels take together and no multiple of that; and then
/// one by one.
const BATCH: usize = 9;
const SINGLE: usize = 3;
/// How far logits may be apart where equality is promised, as a share of the largest: on the CPU the runtime
/// promises the same bits; a device adds up in another order, and rounds what a prompt multiplies to 16 bits where
/// the CPU rounds to 8.
const PROMISED: f32 = 0.0;
const PROMISED_ON_DEVICE: f32 = 0.05;

/// What was found.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    /// Tokens whose logits were compared.
    tokens: usize,
    /// With the dense path.
    dense: Comparison,
    /// A batch with the same tokens one at a time.
    batch: Comparison,
    /// Sequences decoded together that had the bits of decoding alone, of batches of all sizes.
    pub(super) sequences: usize,
}

/// Two ways to compute the same logits.
#[derive(Debug, Serialize)]
struct Comparison {
    /// Whether equality is promised.
    equality_promised: bool,
    /// How far apart logits may be then.
    #[serde(skip)]
    promised: f32,
    /// Whether all logits are the same.
    equal: bool,
    /// Share of tokens with the same likeliest successor.
    top1_agreement: f64,
    /// Of logits, as a share of the largest one.
    largest_difference: f32,
}

/// How many tokens [`check`] would like to see.
pub(super) const TOKENS: usize = BATCH + SINGLE;

/// Compares `model` on `ids` with `dense`, which is the same bundle with every neuron, and with
/// itself. Fails where the results differ and should not.
pub(super) fn check(model: &mut Runtime, dense: &mut Runtime, ids: &[u32]) -> Result<Check> {
    let batched = logits(model, ids, ids.len().saturating_sub(SINGLE).max(1))?;
    let alone = logits(model, ids, 1)?;
    let exact = logits(dense, ids, ids.len().saturating_sub(SINGLE).max(1))?;
    let vocabulary = model.config().vocabulary_size;
    let promised = match model.uses_device() {
        true => PROMISED_ON_DEVICE,
        false => PROMISED,
    };
    let compare = |found, want, equality_promised| Comparison {
        promised,
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

/// The logits of all `ids`, the first `batch` of them at once.
fn logits(model: &mut Runtime, ids: &[u32], batch: usize) -> Result<Vec<f32>> {
    model.reset();
    let (first, rest) = ids.split_at(batch.min(ids.len()));
    let mut logits = model.forward(first)?;
    for id in rest {
        if interrupted() {
            return Err(Interrupted.into());
        }
        logits.extend(model.forward(&[*id])?);
    }
    Ok(logits)
}

/// Whether the result is that of the dense path; also where nothing is ever exactly 0, for then
/// `exact` computes every neuron.
fn is_lossless(model: &Runtime) -> bool {
    model.policies().iter().all(|policy| policy.is_lossless()) && !model.skips_inputs()
}

fn compare(found: &[f32], want: &[f32], vocabulary: usize, equality_promised: bool) -> Comparison {
    let largest = want
        .iter()
        .fold(0.0f32, |most, logit| most.max(logit.abs()));
    let mut difference = 0.0f32;
    for (found, want) in found.iter().zip(want) {
        let apart = (found - want).abs();
        // What is no number is as far off as can be.
        difference = difference.max(if apart.is_nan() { f32::INFINITY } else { apart });
    }
    let tokens = found
        .chunks_exact(vocabulary)
        .zip(want.chunks_exact(vocabulary));
    let count = tokens.len().max(1);
    let same = tokens
        .filter(|(found, want)| likeliest(found) == likeliest(want))
        .count();
    Comparison {
        equality_promised,
        promised: PROMISED,
        equal: difference == 0.0 && found.len() == want.len(),
        top1_agreement: same as f64 / count as f64,
        largest_difference: difference / largest.max(f32::MIN_POSITIVE),
    }
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|(_, one), (_, other)| one.total_cmp(other));
    best.map(|(index, _)| index)
}

impl Comparison {
    fn holds(&self) -> bool {
        !self.equality_promised || self.largest_difference <= self.promised
    }

    fn describe(&self) -> String {
        match self.equal {
            true => "equal".to_owned(),
            false => format!(
                "{} of the likeliest tokens are the same, logits are at most {:.1e} of the largest apart",
                percent(self.top1_agreement),
                self.largest_difference
            ),
        }
    }
}

impl Check {
    /// An error where what should be equal is not.
    fn verdict(&self) -> Result<()> {
        for (what, comparison) in [
            ("the dense path", &self.dense),
            ("the same tokens one at a time", &self.batch),
        ] {
            if !comparison.holds() {
                bail!(
                    "the result is not that of {what}: {}, so no speed is told",
                    comparison.describe()
                );
            }
        }
        Ok(())
    }

    /// In a line.
    pub(super) fn describe(&self) -> String {
        let mut text = format!(
            "{} tokens; with the dense path: {}; a batch with one at a time: {}",
            self.tokens,
            self.dense.describe(),
            self.batch.describe()
        );
        if self.sequences > 0 {
            text += &format!(
                "; {} sequences together with each alone: equal",
                self.sequences
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_and_fails_where_equality_is_promised() {
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
        assert!(error.contains("the dense path"), "{error}");
        assert!(wrong.describe().contains("50.0 %"), "{}", wrong.describe());
        assert!(!compare(&[f32::NAN; 2], &[1.0, 2.0], 2, true).holds());
        assert!(!compare(&[f32::NAN, 1.0], &[1.0, 2.0], 2, true).holds());
    }
}
