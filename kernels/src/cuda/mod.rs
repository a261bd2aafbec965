//! Kernels of the GPU, from `kernels/cuda/*.cu`, on whatever runs them: a card, or the emulator that the
//! tests bring along. The same launches go to both.
//!
//! Vectors are `f32`, weights lie in the planes of [`Matrix`](powerinfer_tensor::Matrix). Results are those of the
//! processor's kernels up to the order of sums, which is fixed here too: the same bits from run to run.

mod arguments;
mod device;
mod driver;
mod lane;
mod memory;
mod observe;
mod operations;
mod prompt;
mod weights;

pub use device::{Device, DeviceError, DeviceInfo, Launch, Recording};
pub use driver::{Card, NoCard};
pub use lane::Lane;
pub use memory::{Buffer, HostBuffer};
pub use observe::{Reuse, Tally, WINDOWS};
pub use operations::{
    Attention, ColdShare, DownScratch, Ffn, FfnRule, Gpu, GpuActivation, GpuFfnKind, HeadNorms,
    HostView, NeuronCounts, Prediction, Predictor, SignBits,
};
pub use prompt::{Beside, Chosen, Halves};
pub use weights::{GpuCache, GpuLinear, GpuMatrix, GpuNorm, GpuNormKind};
