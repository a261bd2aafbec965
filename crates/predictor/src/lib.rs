//! Makes the small networks that predict which FFN neurons will fire, by training or from those of
//! the original PowerInfer, and measures on text they have not seen how well they do.
//!
//! A predictor only pays while it reads less than it saves, so the rank of a trained one is grown
//! for as long as the bytes a token reads, predictor and predicted neurons together, keep falling.

mod calibrate;
mod descent;
mod error;
mod import;
mod learn;
mod loss;
mod make;
mod network;
mod paper;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod seven_billion_layer;
mod sign_bit;
mod thresholds;
mod train;
mod verdict;

pub use calibrate::Targets;
pub use error::PredictorError;
pub use import::Import;
pub use make::{Recipe, is_current, make};
pub use train::{Settings, Sizing};
