//! GPU kernels (`kernels/cuda/*.cu`) and the devices they run on.
//!
//! [`Device`] allocates memory and launches kernels; it is implemented by [`CudaDevice`] and, for tests, by the
//! emulator. [`Gpu`] has the kernels as typed methods on [`Buffer`]s.
//!
//! Vectors are `f32`; weights keep the planes of [`Matrix`](powerinfer_tensor::Matrix). Results equal those of the CPU
//! kernels up to the order of summation, which is fixed: the same bits from run to run.

mod arguments;
mod attention;
mod capture;
mod device;
mod driver;
mod feed_forward;
mod ffn;
mod gpu;
mod memory;
mod observe;
mod prediction;
mod projection;
mod prompt;
mod ptx;
mod routing;
mod staging;
mod timing;
mod weights;

pub use arguments::WINDOWS;
pub use attention::{Attention, HeadNorms};
pub use capture::{CaptureLock, Operation};
pub use device::{Device, DeviceError, DeviceInfo, Graph, Launch};
pub use driver::{CudaDevice, CudaUnavailable};
pub use feed_forward::{ColdSum, DownScratch, HostMirror, NeuronCounts};
pub use ffn::{Ffn, NeuronFilter};
pub use gpu::Gpu;
pub use memory::{Buffer, HostBuffer};
pub use observe::{ActivityCounts, Reuse};
pub use prediction::{PredictedMask, Predictor, SignBits};
pub use projection::{EmbeddingTable, KeptInput};
pub use prompt::{DownAddends, F16Buffer, SplitSums, TokenList, TokenMasks};
pub use ptx::ptx_modules;
pub use routing::{Router, Routes, Routing};
pub use staging::StagingStream;
pub use weights::{CachePlace, CacheShape, GpuCache, GpuLinear, GpuMatrix, GpuNorm, HostMatrix};
