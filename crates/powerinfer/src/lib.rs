//! Runs large language models fast on ordinary PCs by exploiting activation sparsity: most FFN neurons are inactive on most
//! tokens, so they need not be read.
//!
//! A *checkpoint* is a model as others publish it. The pipeline makes a *bundle* from it, and an [`Engine`] runs the bundle:
//!
//! ```text
//! checkpoint + text ──profile──▶ profile ──train──▶ predictors ──place──▶ bundle ──▶ Engine ──▶ tokens
//! ```
//!
//! # Generate text
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use powerinfer::{
//!     Engine, Execution, Generation, Sampler, Silent, SpecialText, SpecialTokens, Text,
//! };
//!
//! # let folder = tempfile::tempdir()?;
//! # powerinfer::pack_plain(&powerinfer::demo()?, 256, &folder.path().join("bundle"))?;
//! let bundle = powerinfer::open_bundle(folder.path().join("bundle"))?; // `powerinfer prepare` makes one
//! let tokenizer = powerinfer::tokenizer(&bundle.files())?;
//! let mut engine = Engine::open(bundle, None, &Execution::on_cpu(2), &Silent)?;
//! let mut session = engine.new_session(256)?;
//!
//! let mut text = Text::new(Sampler::greedy(), powerinfer::stop_conditions(&tokenizer, 64));
//! let prompt = "def odd(numbers):\n    \"\"\"Return numbers after selecting the odd numbers of numbers.\"\"\"";
//! let prompt = tokenizer.encode(prompt, SpecialTokens::Add)?;
//! let (generation, _) =
//!     Generation::start(&mut engine, &mut session, &mut text, &prompt, || false)?;
//! let mut tokens = prompt.clone();
//! for token in generation {
//!     let token = token?;
//!     if !token.is_stop {
//!         tokens.push(token.id);
//!     }
//! }
//! let completion = tokenizer.decode_after(&prompt, &tokens[prompt.len()..], SpecialText::Skip)?;
//! assert!(completion.contains("return"));
//!
//! // Continue the session with more text: tokens that it already has are not run again.
//! tokens.extend(tokenizer.encode("\n\n", SpecialTokens::Omit)?);
//! let (_, reused) = Generation::start(&mut engine, &mut session, &mut text, &tokens, || false)?;
//! assert!(reused >= prompt.len());
//! # Ok(())
//! # }
//! ```
//!
//! [`Generation`] is an iterator over tokens, stop tokens included. A [`Session`] keeps its tokens and their KV cache.
//! [`Text`] has all that chooses the next token: a [`Sampler`] ([`SamplingSettings`] sets temperature and the like), the stop
//! conditions, and optionally a [`Constraint`] or a [`Speculation`]. To print text while it is generated, push each token
//! into [`StreamDecoder::after`], as the example `generate` does.
//!
//! To run what the plan puts on a GPU, set [`Execution::device`] to [`DeviceChoice::Auto`].
//!
//! # Logits
//!
//! [`Engine::prefill`] runs tokens of one session, and [`Engine::decode`] one token of each of several:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use powerinfer::{Engine, Execution, Silent, Wanted};
//!
//! # let folder = tempfile::tempdir()?;
//! # let bundle = powerinfer::pack_plain(&powerinfer::demo()?, 64, &folder.path().join("bundle"))?;
//! let mut engine = Engine::open(bundle, None, &Execution::on_cpu(2), &Silent)?;
//! let mut one = engine.new_session(64)?;
//! let mut other = engine.new_session(32)?;
//! engine.prefill(&mut one, &[1, 2, 3], Wanted::None)?;
//! engine.prefill(&mut other, &[4, 5], Wanted::None)?;
//! let logits = engine.decode(&mut [(&mut one, 6), (&mut other, 7)])?; // [2, vocabulary]
//! # assert_eq!(logits.len() % 2, 0);
//! # assert_eq!((one.tokens(), other.tokens()), (&[1, 2, 3, 6][..], &[4, 5, 7][..]));
//! # Ok(())
//! # }
//! ```
//!
//! The logits of a token do not depend on what runs in the same pass: they are bit-identical to those of the session alone.
//!
//! # Make a bundle
//!
//! [`prepare`] runs all stages; [`profile`], [`train`] and [`place`] run one each. Every stage reuses its output if it is up to
//! date, resumes after an interruption, and reports to a [`Progress`]. The examples `sparsity` and `place` of this crate
//! show how to use them.

use std::path::Path;

pub use powerinfer_artifact::{
    ByteSize, Progress, Shard,
    mapped_file::Residence,
    plan::{Plan, Policy},
    predictor_file::PredictorFile,
    progress::{Interrupted, Silent},
};
pub use powerinfer_bundle::{Bundle, BundleError, IntegrityCheck};
pub use powerinfer_import::{ImportError, open_checkpoint};
pub use powerinfer_model::{Checkpoint, Files, LanguageModel, ModelConfig, ModelError};
pub use powerinfer_pipeline::{
    CalibrationText, PipelineError, Prepare, Stage, Tokens, Training, Work, place, prepare,
    profile, tokenizer, train,
};
pub use powerinfer_planner::{PlanOptions, Vram, read_hardware as hardware};
pub use powerinfer_predictor::Recipe;
pub use powerinfer_profile::{Amount, Calibration, Profile, Settings as ProfileSettings};
pub use powerinfer_runtime::{
    ActivationFormat, Constraint, DeviceChoice, Engine, Execution, Generation, Logits, Observers,
    Passes, Running, RuntimeError, Sampler, SamplingSettings, Session, SingleSession, Speculation,
    StopConditions, StopReason, Text, Token, Wanted,
};
pub use powerinfer_tensor::{CacheFormat, Format};
pub use powerinfer_text::{SpecialText, SpecialTokens, StreamDecoder, TextError, Tokenizer};

/// Opens the bundle in `folder`, or in its subfolder `bundle`, as `powerinfer prepare` makes it.
///
/// # Errors
///
/// There is no bundle, or it is damaged.
pub fn open_bundle(folder: impl AsRef<Path>) -> Result<Bundle, BundleError> {
    let folder = folder.as_ref();
    let inner = folder.join("bundle");
    let is_outer = !Bundle::is_bundle(folder) && Bundle::is_bundle(&inner);
    Bundle::open(
        if is_outer { &inner } else { folder },
        IntegrityCheck::Quick,
    )
}

/// Conditions that stop after `max_tokens` tokens, or at a token that ends the text.
pub fn stop_conditions(tokenizer: &Tokenizer, max_tokens: usize) -> StopConditions {
    StopConditions {
        max_tokens,
        stop_tokens: tokenizer.stop_ids().into(),
        vocabulary: tokenizer.vocabulary_size(),
    }
}

/// Packs `checkpoint` as it is, without a profile: float32, every neuron computed on the CPU, and room for `context` tokens.
/// The bundle replaces an earlier one in the folder `out`.
///
/// # Errors
///
/// The checkpoint cannot be read, the folder cannot be written, or it contains other files.
pub fn pack_plain(
    checkpoint: &Checkpoint,
    context: usize,
    out: &Path,
) -> Result<Bundle, BundleError> {
    powerinfer_bundle::pack_plain(checkpoint, context, &Tokenizer::FILES, out)
}

/// The demo model, which is part of this library: it completes small Python functions.
///
/// # Errors
///
/// There is not enough memory.
pub fn demo() -> Result<Checkpoint, ImportError> {
    open_checkpoint(Files::Embedded {
        name: "demo",
        files: powerinfer_datasets::demo::FILES,
    })
}
