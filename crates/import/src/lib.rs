//! Imports from other programs: checkpoints written by `torch.save`, and the predictors of the original
//! PowerInfer.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod error;
mod original_predictors;
mod pickle;

pub use error::ImportError;
pub use original_predictors::{OriginalPredictor, OriginalPredictors, PredictedSizes};

use powerinfer_model::{Checkpoint, Files, container::Container};

use pickle::Pickles;

/// Opens the checkpoint that consists of `files`, with weights in a GGUF file, in safetensors or, if there
/// are neither, in `pytorch_model.bin`.
///
/// # Errors
///
/// A file is missing, damaged or contradicts the configuration, or a pickle names anything but tensors.
pub fn open_checkpoint(files: Files) -> Result<Checkpoint, ImportError> {
    Checkpoint::from_files_or(files, |files| {
        let pickles = Pickles::open(files)?;
        Ok(pickles.map(|pickles| Box::new(pickles) as Box<dyn Container>))
    })
}
