//! From a checkpoint to a bundle, stage by stage.
//!
//! ```text
//! text ──profile──▶ profile ──train──▶ predictors ──place──▶ bundle ──certify──▶ certificate
//! ```
//!
//! Each stage reuses an artifact that is up to date: one that was made from the same inputs with the same settings.
//! Interrupted stages resume.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod calibration;
mod error;
mod prepare;
mod stages;
mod tokenizer;
mod training;

pub use calibration::{AUTO_LIMIT, CalibrationText, SEQUENCE, Tokens, check_paths, texts};
pub use error::PipelineError;
pub use prepare::{Prepare, Report, Work, place, prepare};
pub use stages::{Stage, profile, train};
pub use tokenizer::tokenizer;
pub use training::{ByteBudget, DEFAULT_TARGETS, Training, default_targets};
