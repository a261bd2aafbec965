//! Plans how a model runs within a memory and a perplexity budget: the policy of each layer, and the device of each part.
//!
//! ```text
//! profile, predictors ──modes──▶ candidates ──solver crate──▶ plan ──pack──▶ bundle ──certify──▶ certificate
//!                                    ▲                          │
//!                                    └── search: perplexity ◀───┘
//! ```
//!
//! [`simulate`] estimates the speed of a model without its weights, on this engine and on others.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.
mod again;
mod candidates;
pub mod certify;
mod error;
mod expert_cache;
mod forecast;
mod inputs;
pub mod machine;
mod modes;
mod pins;
mod placement;
mod problem;
mod request;
mod search;
pub mod simulate;
mod solver;
pub mod sweep;

pub use again::{for_this_machine, place_again, rewrite};
pub use error::PlannerError;
pub use pins::{Part, Pin};
pub use placement::{Placement, certify_bundle, certify_shard, check_reserved, plan};
pub use request::{PlanOptions, Request, Vram, default_hardware, read_hardware};
pub use search::windows;
pub use solver::Scratch;
