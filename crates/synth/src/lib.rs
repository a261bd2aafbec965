//! Synthetic checkpoints: published shapes with random weights, for work on speed and memory; their
//! configuration marks them as synthetic.
//!
//! With random weights half of the FFN neurons would be active. Here channel 0 of the hidden state holds a
//! constant that no layer changes, and every neuron's gate weighs it by an offset: with normalised `x`,
//! `gate_i·x` is normally distributed around that offset, which is chosen to give the neuron its activation
//! frequency. Frequencies follow a power law.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod error;
mod noise;
mod plan;
mod predictor;
mod rates;
mod recipe;
mod shape;
mod tokenizer;
mod write;

pub use error::SynthError;
pub use rates::rates;
pub use shape::{EXPERT_SHAPES, SHAPES, Shape};
pub use write::{Settings, synthesise};
