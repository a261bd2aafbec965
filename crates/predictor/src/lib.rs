//! Makes the predictors of active FFN neurons, by calculation, by training or from those of the original PowerInfer, and
//! evaluates them on held-out tokens.
//!
//! A predictor pays only while it reads fewer bytes than it saves, so its rank is chosen to minimise the bytes read per
//! token, predictor and predicted neurons together.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.
mod calibrate;
mod closed_form;
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
mod search;
mod settings;
mod sign_bit;
mod thresholds;
mod train;
mod verdict;

pub use calibrate::Targets;
pub use error::PredictorError;
pub use import::Import;
pub use make::{QUANT_SETTING, Recipe, is_current, make, merge};
pub use settings::{Method, Settings, Sizing};
pub use verdict::FEWEST_SAMPLES;
