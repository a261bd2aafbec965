//! Exports for other programs: GGUF files for llama.cpp and Ollama, and the files of the original PowerInfer.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod error;
mod gguf;
mod gpu_index;
mod original;
mod predictor;
mod source;

pub use error::ExportError;
pub use gguf::{Exported, GgufOptions, to_gguf};
pub use gpu_index::GpuIndex;
pub use original::{OriginalFiles, index_path, to_original};
pub use source::Source;
