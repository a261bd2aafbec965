//! Places neurons: what a profile says about a model, what a machine can do and how much of it may
//! be used, turned into a [`Plan`](powerinfer_artifact::plan::Plan).
//!
//! ```text
//! Problem ──latency──▶ Chain: all that a layer can be ──decomposition──▶ Places ──placement──▶ Plan
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
mod machine;
mod mixed_integer;
pub mod objective;
mod placement;
mod places;
mod problem;
mod program;
mod relaxation;
#[cfg(test)]
mod samples;
mod way;

pub use decide::{Candidate, Decision, Price, decide};
pub use error::SolveError;
pub use placement::{Backend, Options, SolveReport, place};
pub use problem::{GROUP_SIZE, Layer, Pins, Problem};
pub use way::{Foreseen, NeuronShape, Way, Work};
