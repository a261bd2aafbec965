//! Reference engine: a dense forward pass in candle. The sparse runtime is tested against it, and profiling
//! runs it one layer at a time.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod embedding;
mod feed_forward;
mod head;
mod layer;
mod model;
mod observer;
mod operations;

pub use embedding::Embedding;
pub use feed_forward::{FeedForward, Neurons};
pub use head::Head;
pub use layer::Layer;
pub use model::ReferenceModel;
pub use observer::{FfnObservation, FfnObserver, NoObserver};
pub use operations::with_values;
