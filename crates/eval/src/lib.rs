//! Measures what a language model can do: functions it writes are run and judged, and the
//! probability it gives to the right text is taken.

mod completion;
mod error;
mod fidelity;
pub mod function_tasks;
pub mod interpreter;
mod likelihood;

pub use completion::{Completion, complete};
pub use error::EvalError;
pub use fidelity::{Fidelity, Windows, fidelity, likelihoods, rise};
pub use likelihood::{Likelihood, continuation_likelihood};
