//! Exports for other programs: GGUF files and placements of experts for llama.cpp, and the files of the original PowerInfer.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod error;
mod gguf;
mod gpu_index;
mod original;
mod override_tensor;
mod predictor;
mod source;

pub use error::ExportError;
pub use gguf::{Exported, GgufOptions, to_gguf};
pub use gpu_index::GpuIndex;
pub use original::{OriginalFiles, index_path, to_original};
pub use override_tensor::ExpertLayers;
pub use source::Source;
