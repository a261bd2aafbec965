//! Measures what a language model can do: functions it writes are run and judged, and the
//! probability it gives to the right text is taken.

mod completion;
mod data_file;
mod error;
mod fidelity;
pub mod front;
pub mod function_tasks;
pub mod grade_school;
pub mod human_eval;
pub mod interpreter;
mod journal;
mod likelihood;
pub mod multiple_choice;
pub mod pruning;
mod python_sandbox;
mod sample_file;
pub mod statistics;

pub use completion::{Completion, Ends, complete};
pub use error::EvalError;
pub use fidelity::{Fidelity, Windows, fidelity, likelihoods, rise};
pub use journal::{Journal, RunName};
pub use likelihood::{Likelihood, continuation_likelihood};
pub use python_sandbox::PythonSandbox;
pub use sample_file::{Sample, SampleFile};
