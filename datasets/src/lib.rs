//! Text and task sets: what the demonstration model is trained, calibrated and examined on.

pub mod demo;
pub mod minipython;

use powerinfer_artifact::random;
