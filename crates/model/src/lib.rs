//! Checkpoints that others own: `config.json`, safetensors, tensor names; and what a language
//! model is to the rest of the program.

mod checkpoint;
mod config;
mod error;
mod files;
mod language_model;
mod weight;

pub use checkpoint::Checkpoint;
pub use config::{Activation, ModelConfig};
pub use error::ModelError;
pub use files::Files;
pub use language_model::{LanguageModel, greedy_token};
pub use weight::{LayerWeight, Weight};
