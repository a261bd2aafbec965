//! GGUF: a model in one file or several parts, with quantised weights, and tokenizer and settings as metadata.
//!
//! The metadata are converted to the files of a Hugging Face folder (`config.json`, `tokenizer.json`, …), so
//! that all other code knows one layout only.

mod architectures;
mod configuration;
mod contents;
mod dequantise;
mod export;
mod file;
mod foreign;
mod model;
mod names;
mod rope;
mod split;
mod stored_pieces;
mod tokenizer;
mod tokenizer_metadata;
mod value;
mod writer;

pub use export::{Content, Export, ExportOptions, MovedWeight, PlannedTensor};
pub use file::GgufFile;
pub use model::Gguf;
pub(crate) use model::IGNORED;
pub(crate) use names::Layout;
pub use value::Value;
pub use writer::{DataWriter, Dialect, Elements, Metadata, TensorEntry, write_gguf};
