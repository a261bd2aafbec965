//! Kernels of the GPU, from `kernels/cuda/*.cu`, on whatever runs them: a card, or the emulator that the
//! tests bring along. The same launches go to both.
//!
//! Vectors are `f32`, weights lie in the planes of [`Matrix`](powerinfer_tensor::Matrix). Results are those of the
//! processor's kernels up to the order of sums, which is fixed here too: the same bits from run to run.

mod arguments;
mod device;
mod driver;
mod memory;
mod observe;
mod operations;
mod prompt;
mod staging;
mod weights;

pub use device::{Device, DeviceError, DeviceInfo, Graph, Launch};
pub use driver::{CudaDevice, CudaUnavailable};
pub use memory::{Buffer, HostBuffer};
pub use observe::{ActivityCounts, Reuse, WINDOWS};
pub use operations::{
    Attention, ColdSum, DownScratch, Ffn, Gpu, GpuActivation, GpuFfnKind, HeadNorms, HostMirror,
    NeuronCounts, NeuronFilter, PredictedMask, Predictor, SignBits,
};
pub use prompt::{DownAddends, F16Buffer, TokenMasks};
pub use staging::StagingStream;
pub use weights::{GpuCache, GpuLinear, GpuMatrix, GpuNorm, GpuNormKind};
