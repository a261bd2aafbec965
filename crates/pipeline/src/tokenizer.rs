//! The tokenizer of a checkpoint or a bundle.

use powerinfer_model::Files;
use powerinfer_text::Tokenizer;

use crate::PipelineError;

/// The tokenizer among `files`.
///
/// # Errors
///
/// A file is missing, damaged or not supported, for example a Git LFS pointer or the error page of a failed download.
pub fn tokenizer(files: &Files) -> Result<Tokenizer, PipelineError> {
    if let Some(folder) = files.as_folder() {
        for name in Tokenizer::FILES {
            files.read(name)?;
        }
        return Ok(Tokenizer::from_directory(folder)?);
    }
    let read = |name: &str| {
        let bytes = files.read(name).ok().flatten();
        bytes.map(|bytes| bytes.to_vec().into())
    };
    Ok(match files {
        Files::Opened { folder, .. } => Tokenizer::from_files_in(folder, read)?,
        _ => Tokenizer::from_files(read)?,
    })
}
