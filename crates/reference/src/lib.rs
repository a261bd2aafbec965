//! The dense forward in candle: the oracle that the sparse runtime answers to, and the engine
//! that profiles a model one layer at a time.

mod layer;
mod model;
mod tap;

pub use layer::{Ends, Layer};
pub use model::ReferenceModel;
pub use tap::{FfnObservation, FfnTap, NoTap};
