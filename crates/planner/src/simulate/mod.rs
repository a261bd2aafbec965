//! Estimates how fast a model would be on a machine, without its weights: by this engine and by others.

#[cfg(test)]
mod against_published;
mod answer;
pub(crate) mod engine;
mod published;
pub(crate) mod step;
mod subject;

pub use answer::{Answer, Decode, EngineAnswer, Model, Request, Solver, Speed, Whole};
pub use published::{Activity, Figure, Said};
