//! Quality and speed of language models: perplexity, fidelity to `dense`, pass@k of generated functions, sweeps and
//! benchmarks.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

pub mod bench;
mod completion;
mod contention;
mod data_file;
mod error;
mod fidelity;
pub mod format;
pub mod front;
pub mod function_tasks;
pub mod grade_school;
pub mod human_eval;
mod journal;
mod likelihood;
pub mod multiple_choice;
pub mod pruning;
mod python_sandbox;
mod result_file;
mod sample_file;
pub mod statistics;
mod subject;
pub mod sweep;
mod system_calls;
mod texts;
mod timing;
mod verdict;

pub use completion::{Completion, Ends, complete};
pub use contention::{Contention, CpuTimes};
pub use error::EvalError;
pub use fidelity::{
    Fidelity, MIN_INTERVAL_TOKENS, TokenLosses, WindowComparison, Windows, fidelity,
    perplexity_rise, token_losses,
};
pub use journal::{Run, is_shard, merge};
pub use likelihood::{Likelihood, continuation_likelihood};
pub use python_sandbox::{PythonSandbox, Tests};
pub use result_file::ResultFile;
pub use sample_file::{Sample, SampleFile};
pub use subject::Subject;
pub use texts::{TextSize, leading_tokens, scored_tokens};
pub use verdict::Verdict;
