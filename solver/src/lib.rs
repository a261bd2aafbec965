//! Places neurons: what a profile says about a model, what a machine can do and how much of it may
//! be used, turned into a [`Plan`](powerinfer_artifact::plan::Plan).
//!
//! ```text
//! Problem ──latency──▶ Chain: all that a layer can be ──decomposition──▶ Places ──write──▶ Plan
//!    │                   │            dual, fill, labels          ▲
//!    │                   └──mixed_integer (good_lp)───────────────┤
//!    └──dense──▶ what VRAM is left ──program, relaxation──▶ impact (good_lp)
//! ```

mod account;
mod baselines;
mod chain;
mod cost;
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
mod layer_mode;
mod limit;
mod machine;
mod mixed_integer;
pub mod objective;
mod options;
mod pins;
mod placement;
mod places;
mod problem;
mod program;
mod relaxation;
#[cfg(test)]
mod samples;
mod solve;
mod write;

pub use decide::{Candidate, Decision, Price, decide};
pub use error::SolveError;
pub use layer_mode::{LayerMode, NeuronShape, Prediction, Work};
pub use options::{Backend, Options};
pub use pins::Pins;
pub use placement::place;
pub use problem::{GROUP_SIZE, Layer, Problem};
pub use write::SolveReport;
