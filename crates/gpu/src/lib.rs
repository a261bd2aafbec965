//! Layers of a model on a GPU: upload of their weights, launches of their kernels, and observation of a layer.
//!
//! A [`DeviceModel`] holds the parts of layers that are on a device, with the buffers of the tokens that run. The
//! host calls its steps in the order of the forward pass and exchanges inputs, masks and cold sums with it through memory
//! that both can access. An [`ObservedLayer`] is a single layer whose active neurons are counted on the device. A
//! [`MeasuredGpu`] has the bandwidths and latencies that placement calculates with.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod bytes;
mod cold_neurons;
mod copied_parts;
mod expert_slots;
mod experts;
mod hardware;
mod head;
mod launches;
mod layer;
mod model;
mod observed;
mod scratch;
mod segments;
mod state;
mod upload;

pub use bytes::read_bandwidth;
pub use cold_neurons::{COPIED_NEURONS, ColdNeurons, HostLinear};
pub use copied_parts::{CopiedParts, HostAttention, HostNorm, HostParts, HostPrediction};
pub use experts::ExpertRows;
pub use hardware::{MeasuredGpu, gpu_instances, installed_gpus, vram_free};
pub use head::{DeviceEmbedding, DeviceHead};
pub use launches::FfnInput;
pub use layer::{DeviceAttention, DeviceFfn, DeviceLayer, DeviceSelector};
pub use model::{DeviceModel, ModelShape};
pub use observed::{ObservedLayer, ObservedToken};
pub use scratch::DeviceScratch;
pub use upload::{LayerSource, LayerWeights, Upload};
