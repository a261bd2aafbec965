//! File formats that PowerInfer owns, and the primitives they share.
//!
//! Every artifact carries the same [`Header`]: format, version, tool, model, digests of its inputs,
//! seed and settings. There is no timestamp, so equal inputs and seed give equal bytes. Every file is
//! written to a temporary file in the same folder, then renamed.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

pub mod byte_size;
pub mod certificate;
mod counted;
pub mod digest;
pub mod document;
mod error;
pub mod hardware;
pub mod header;
mod hint;
pub mod json;
pub mod layer_mode;
pub mod mapped_file;
pub mod matrix_planes;
mod part_name;
pub mod placement_inputs;
pub mod plan;
pub mod predictor_file;
pub mod progress;
pub mod prompt_cache;
pub mod random;
mod shard;
mod shell;
mod stand_in;
pub mod tensor_file;
pub mod tensor_writer;
pub mod threshold_curve;
pub mod token_texts;
pub mod write;

pub use byte_size::ByteSize;
pub use counted::{counted, listed, numbered};
pub use digest::Digest;
pub use error::ArtifactError;
pub use header::{Header, ModelIdentity};
pub use hint::Hint;
pub use part_name::PartName;
pub use progress::Progress;
pub use shard::Shard;
pub use shell::shell_quoted;
pub use tensor_file::TensorFile;
