//! The dense forward in candle: the oracle that the sparse runtime answers to, and the engine
//! that profiles a model one layer at a time.

mod ends;
mod feed_forward;
mod layer;
mod model;
mod operations;
mod tap;

pub use ends::{Beginning, Head};
pub use feed_forward::{FeedForward, Neurons};
pub use layer::Layer;
pub use model::ReferenceModel;
pub use tap::{FfnObservation, FfnTap, NoTap};
