//! Decides how a model runs within a budget: which neurons every layer computes, and where.
//!
//! ```text
//! profile, predictors ──modes──▶ candidates ──solver crate──▶ plan ──pack──▶ bundle ──certify──▶ certificate
//!                                    ▲                          │
//!                                    └── search: perplexity ◀───┘
//! ```
//!
//! [`simulate`] estimates the same for a model without weights, and for other engines.

mod again;
mod candidates;
pub mod certify;
mod error;
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

pub use again::{place_again, rewrite};
pub use error::PlannerError;
pub use pins::{Part, Pin};
pub use placement::{Placement, certify_packed, plan};
pub use request::{PlanOptions, Request, Vram, read_hardware};
pub use search::windows;
pub use solver::Scratch;
