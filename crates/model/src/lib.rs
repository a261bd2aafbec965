//! Checkpoints that others own: `config.json`, safetensors, tensor names; and what a language
//! model is to the rest of the program.

mod activation;
mod alibi;
mod checkpoint;
mod config;
pub mod container;
mod error;
mod families;
mod files;
pub mod gguf;
mod keys;
mod language_model;
mod rotary;
mod shards;
mod source;
mod stored;
mod weight;

pub use activation::Activation;
pub use alibi::alibi_bias;
pub use checkpoint::Checkpoint;
pub use config::{Biases, Block, FfnKind, ModelConfig, NormKind, Positions};
pub use error::ModelError;
pub use files::{Files, gguf_files};
pub use language_model::{LanguageModel, greedy_token};
pub use rotary::Rotary;
pub use stored::StoredTensor;
pub use weight::{LayerWeight, Weight};
