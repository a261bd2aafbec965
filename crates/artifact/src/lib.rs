//! The files PowerInfer owns, and what they have in common.
//!
//! Every artifact carries the same [`Header`]: format, version, tool, the model it was made for,
//! digests of its inputs, seed and settings, and no timestamp, so that the same inputs and seed
//! give the same bytes. Everything is written beside its target and renamed.

pub mod byte_size;
pub mod certificate;
pub mod digest;
pub mod document;
mod error;
pub mod hardware;
pub mod header;
mod hint;
pub mod mapped_file;
pub mod matrix_planes;
pub mod page;
pub mod placing;
pub mod plan;
pub mod predictor_file;
pub mod progress;
pub mod prompt_cache;
pub mod random;
pub mod tensor_file;
pub mod tensor_writer;
pub mod threshold_curve;
pub mod token_texts;
pub mod write;

pub use byte_size::ByteSize;
pub use digest::Digest;
pub use error::ArtifactError;
pub use header::{Header, ModelIdentity};
pub use hint::Hint;
pub use progress::Progress;
pub use tensor_file::TensorFile;
