//! Trains small networks that foresee which FFN neurons will fire, and measures on text they
//! have not seen how well they do.
//!
//! A predictor only pays while it reads less than it saves, so its rank is grown for as long as
//! the bytes a token reads, predictor and predicted neurons together, keep falling.

mod calibrate;
mod error;
mod loss;
mod network;
mod train;

pub use error::PredictorError;
pub use train::{Settings, is_current, train};
