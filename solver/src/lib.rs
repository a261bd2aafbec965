//! Solves the placement problem: from activation frequencies, a machine and a memory budget to a
//! [`Plan`](powerinfer_artifact::plan::Plan) that says which part of a model is on which device.
//!
//! ```text
//! Problem ──latency──▶ Chain ──decomposition──▶ Placement ──write──▶ Plan
//!    │                   ▲ │   (dual, fill, labels)  ▲
//!    │                   │ └──mixed_integer──────────┘
//!    └──dense──impact────┘    (good_lp)
//! ```
//!
//! Start reading at [`decide`], which chooses the execution mode of each layer together with the placement,
//! and at [`objective`], the paper's objective.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod account;
mod baselines;
mod candidate;
mod chain;
pub mod cost;
mod decide;
mod decomposition;
mod dense;
mod dual;
mod error;
#[cfg(test)]
mod exhaustive;
mod fill;
mod general;
mod greedy;
mod impact;
mod labels;
mod latency;
mod limit;
mod mixed_integer;
pub mod objective;
mod options;
mod pins;
mod place;
mod placement;
mod problem;
#[cfg(test)]
mod samples;
mod solve;
mod write;

pub use candidate::Candidate;
pub use decide::{CandidateCost, Decision, decide};
pub use error::SolveError;
pub use options::{Backend, Options};
pub use place::place;
pub use powerinfer_artifact::layer_mode::{LayerMode, NeuronShape, Prediction, ReadCost};
pub use problem::{CopiedBytes, GROUP_SIZE, Layer, Pins, Problem};
pub use write::SolveReport;
