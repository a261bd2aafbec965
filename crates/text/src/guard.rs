//! Protection against what a hostile `tokenizer.json` makes of the tokenizers library: panics, and texts that grow with
//! every step.

use powerinfer_guard::panics::caught;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

/// Factor by which all steps together may lengthen a text; those of published tokenizers stay below 10.
const MAX_GROWTH: f64 = 256.0;

/// Calls `run`, whose panic becomes an error.
///
/// # Errors
///
/// The library failed, or panicked.
pub(crate) fn guarded<T>(
    run: impl FnOnce() -> Result<T, tokenizers::Error>,
) -> Result<T, tokenizers::Error> {
    caught(run)
        .unwrap_or_else(|message| Err(format!("the tokenizers library panicked: {message}").into()))
}

/// Refuses a tokenizer whose steps lengthen a text without measure.
///
/// # Errors
///
/// The steps together may lengthen a text more than any published tokenizer's.
pub(crate) fn check_growth(tokenizer: &tokenizers::Tokenizer) -> Result<(), tokenizers::Error> {
    let growth = tokenizer.get_normalizer().map_or(1.0, of_normalizer)
        * tokenizer.get_pre_tokenizer().map_or(1.0, of_pre_tokenizer);
    if growth <= MAX_GROWTH {
        Ok(())
    } else {
        Err(
            "its steps lengthen a text without measure: remove repeated ones, such as `ByteLevel`"
                .into(),
        )
    }
}

fn of_normalizer(step: &NormalizerWrapper) -> f64 {
    match step {
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().map(of_normalizer).product(),
        // A byte becomes up to two.
        NormalizerWrapper::ByteLevel(_) => 2.0,
        NormalizerWrapper::Replace(replace) => replace.content.len().max(1) as f64,
        // Compatibility decompositions of a character, usually of a few.
        NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => 2.0,
        _ => 1.0,
    }
}

fn of_pre_tokenizer(step: &PreTokenizerWrapper) -> f64 {
    match step {
        PreTokenizerWrapper::Sequence(steps) => {
            steps.as_ref().iter().map(of_pre_tokenizer).product()
        }
        PreTokenizerWrapper::ByteLevel(_) => 2.0,
        // A space becomes `▁`, three bytes.
        PreTokenizerWrapper::Metaspace(_) => 3.0,
        _ => 1.0,
    }
}
