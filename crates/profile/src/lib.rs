//! Measures which FFN neurons fire on calibration text.
//!
//! The model is streamed: one layer is loaded, all calibration text goes through it, its neurons
//! are counted, and the next layer takes its place.

mod activity;
mod calibration;
mod error;
mod measure;
mod observe;
mod profile;
mod resume;
mod traces;

pub use activity::LayerActivity;
pub use calibration::{Calibration, Part};
pub use error::ProfileError;
pub use measure::{Settings, measure};
pub use profile::{LayerSummary, Profile, ProfileDocument};
pub use traces::{ActivityBits, TracePart, Traces};
