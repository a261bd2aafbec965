//! Checkpoints in other projects' formats (Hugging Face folders and GGUF), the model configuration they
//! describe, and the interface of a language model.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod alibi;
mod checkpoint;
mod config;
pub mod container;
mod error;
mod experts;
mod families;
mod files;
mod foreign;
mod generation;
pub mod gguf;
mod keys;
mod kinds;
mod language_model;
mod mxfp4;
mod quantised;
mod rotary;
mod shards;
mod source;
mod stored;
pub mod tokenizer;
mod weight;

pub use alibi::alibi_bias;
pub use checkpoint::Checkpoint;
pub use config::{
    Biases, Block, LatentAttention, ModelConfig, Multipliers, Positions, QueryKeyNorm, SoftCaps,
};
pub use error::ModelError;
pub use experts::{DenseLayers, Experts, RouterScores};
pub use files::{Files, gguf_files, gguf_model, gguf_name};
pub use generation::GenerationConfig;
pub use language_model::{LanguageModel, check_finite, greedy_token, log_sum_exp};
pub use powerinfer_tensor::{Activation, FfnKind, NormKind};
pub use rotary::Rotary;
pub use stored::StoredTensor;
pub use weight::{LayerWeight, Weight};
