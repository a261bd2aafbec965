//! Checkpoints of real shapes with random weights: an honest stand-in for work on speed and
//! memory, marked as such in their configuration.
//!
//! A random FFN fires half of its neurons. Here channel 0 of the hidden state holds a constant
//! that no layer changes, and every neuron's gate weighs it by an offset: with `x` normalised,
//! `gate_i·x` is normal around that offset, and the offset is chosen so that the neuron fires as
//! often as it should. How often each should follows a power law.

mod error;
mod noise;
mod predictor;
mod rates;
mod recipe;
mod shape;
mod tokenizer;
mod write;

pub use error::SynthError;
pub use rates::rates;
pub use shape::{SHAPES, Shape};
pub use write::{Settings, synthesise};
