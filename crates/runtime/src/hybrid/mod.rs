//! A GPU and the CPU together: each layer's parts run where the plan puts them, hot neurons on the GPU while cold ones
//! are computed on the CPU, and both sums are added to the hidden state once.
//!
//! ```text
//! GPU   query, key, value ─ attention ─ output ─ predict ─ gate·up of the hot ──────── down, merge
//! CPU                                              └ input, mask ▸ cold neurons ▸ sum ┘
//! ```
//!
//! The hidden state is on one side at a time and is copied if a layer's attention is on the other.

mod copied;
mod executor;
mod expert_cache;
mod place;
mod stored_layer;
mod times;

pub(crate) use executor::HybridExecutor;
pub(crate) use expert_cache::ExpertCache;
pub use expert_cache::{EXPERT_COPY_BYTES, EXPERT_DISTANCES};
pub(crate) use place::{allocate_prompt_buffers, check_budget, place};
pub use times::{LayerTimes, PassTimes};
