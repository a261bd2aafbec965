//! [`Gpu`]: a device whose kernels are called as typed methods; every launch goes through here.

use std::sync::Arc;

use bytemuck::Pod;
use powerinfer_tensor::{BLOCK, Format};

use super::{Device, DeviceError, Launch};
use crate::Arithmetic;

/// Threads per block of most kernels.
pub(super) const THREADS: usize = 256;
pub(super) const WARP: usize = 32;
/// Neurons per word of a bit mask.
pub(super) const WORD: usize = 32;

/// Thread blocks per multiprocessor of kernels that read rows of weights.
const ROW_BLOCKS: usize = 3;

/// The kernels of a device as methods: shapes are checked, then one kernel or two are launched asynchronously.
#[derive(Debug, Clone)]
pub struct Gpu {
    device: Arc<dyn Device>,
    pub(super) arithmetic: Arithmetic,
}

impl Gpu {
    /// The kernels of `device`. `arithmetic` selects how quantised rows are multiplied.
    pub fn new(device: Arc<dyn Device>, arithmetic: Arithmetic) -> Self {
        Self { device, arithmetic }
    }

    /// The device that kernels are launched on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Whether rows of `format` are multiplied with an int8 input.
    pub(super) fn uses_int8(&self, format: Format) -> bool {
        self.arithmetic == Arithmetic::Integer && format.is_quantised()
    }

    /// Thread blocks for `rows` rows, one warp per row; warps loop where there are more rows.
    pub(super) fn row_blocks(&self, rows: usize) -> u32 {
        let limit = ROW_BLOCKS * self.device.info().multiprocessors;
        rows.div_ceil(THREADS / WARP).min(limit) as u32
    }

    /// Launches a kernel; `what` names the operand that has to fit into `shared_bytes` of shared memory.
    pub(super) fn launch<T: Pod>(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: usize,
        shared_bytes: usize,
        what: &'static str,
        arguments: &T,
    ) -> Result<(), DeviceError> {
        let info = self.device.info();
        if shared_bytes > info.shared_bytes {
            return Err(DeviceError::SharedMemory {
                what,
                device: info.name.clone(),
                needed: shared_bytes,
                available: info.shared_bytes,
            });
        }
        let launch = Launch {
            kernel,
            grid,
            threads: threads as u32,
            shared_bytes,
            arguments: bytemuck::bytes_of(arguments),
        };
        // SAFETY: the arguments are the kernel's, whose size the emulator checks for each; their addresses
        // belong to buffers whose lengths the caller has checked, and which free their memory only after the
        // launches before.
        #[expect(unsafe_code, reason = "launches kernels")]
        unsafe {
            self.device.launch(&launch)
        }
    }
}

/// Name of the instance of kernel `name` for `format`.
pub(super) fn kernel(name: &str, format: Format) -> String {
    format!("{name}_{format}")
}

/// Bytes of shared memory of an input vector: its values, scratch of the norm, and its int8 blocks.
pub(super) fn input_bytes(columns: usize, int8: bool) -> usize {
    let blocks = columns.div_ceil(BLOCK);
    let int8_bytes = match int8 {
        true => blocks * BLOCK + 2 * (blocks * 4).next_multiple_of(16),
        false => 0,
    };
    blocks * BLOCK * 4 + WARP * 4 + int8_bytes
}

/// Weights per 16 bytes.
pub(super) fn width(format: Format) -> usize {
    match format {
        Format::F32 => 4,
        Format::F16 | Format::Bf16 => 8,
        Format::Q8_0 => 16,
        Format::Q4K | Format::Q4_0 => 32,
    }
}
