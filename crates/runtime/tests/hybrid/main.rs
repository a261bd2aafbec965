//! Device and host together, in all placements, against the goldens and against the CPU alone.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod batches;
mod case;
mod contexts;
mod experts;
mod failures;
mod logits;
mod memory;
mod placement;
mod predictors;
mod prompts;
mod times;

#[path = "../../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "../support/mixtures.rs"]
mod mixtures;
#[path = "../support/packing.rs"]
mod packing;
#[path = "../support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use powerinfer_model::{LanguageModel, greedy_token};
use powerinfer_runtime::SingleSession;

/// Greedy tokens after `prompt`, with the logits that they were taken from.
fn greedy(model: &mut SingleSession, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<f32>) {
    model.reset();
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    let mut logits = model.forward_last(prompt).unwrap();
    for _ in 0..count {
        let token = greedy_token(&logits);
        tokens.push(token);
        all.extend(&logits);
        logits = model.forward_last(&[token]).unwrap();
    }
    (tokens, all)
}

/// Logits of all tokens, each decoded in a separate pass.
fn one_by_one(model: &mut SingleSession, tokens: &[u32]) -> Vec<f32> {
    let passes = tokens.chunks(1);
    passes
        .flat_map(|token| model.forward(token).unwrap())
        .collect()
}

/// Fails unless both runtimes give the same greedy tokens and nearly the same logits.
#[track_caller]
fn assert_alike(
    host: &mut SingleSession,
    device: &mut SingleSession,
    prompt: &[u32],
    tolerance: f32,
    what: &str,
) {
    // The emulator is slow; a few tokens are enough.
    let (tokens, want) = greedy(host, &prompt[..6], 3);
    let (found_tokens, found) = greedy(device, &prompt[..6], 3);
    assert_near(&found, &want, tolerance, what);
    assert_eq!(found_tokens, tokens, "{what}");
}

/// Fails if logits differ by more than `tolerance` times the largest of `want`.
#[track_caller]
fn assert_near(found: &[f32], want: &[f32], tolerance: f32, what: &str) {
    let largest = want
        .iter()
        .fold(0.0f32, |most, logit| most.max(logit.abs()));
    for (index, (found, want)) in found.iter().zip(want).enumerate() {
        assert!(
            (found - want).abs() <= tolerance * largest,
            "{what}: logit {index} is {found}, expected {want}"
        );
    }
}
