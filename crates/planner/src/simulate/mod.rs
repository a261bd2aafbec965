//! Estimates the speed of a model on a machine without its weights, for this engine and for others.

#[cfg(test)]
mod against_measured;
#[cfg(test)]
mod against_published;
mod answer;
pub(crate) mod engine;
mod published;
pub(crate) mod step;
pub(crate) mod subject;

pub use answer::{Answer, Decode, EngineAnswer, Model, Request, RequestTime, Solver, Speed};
pub use published::{Activity, ActivityOverrides, SourcedValue};
