//! [`Gpu`]: a device whose kernels are called as typed methods; every launch goes through here.

use std::sync::Arc;

use bytemuck::Pod;
use powerinfer_tensor::{BLOCK, Format};

use super::{Device, DeviceError, Launch};
use crate::Arithmetic;

/// Threads per block of most kernels.
pub(super) const THREADS: usize = 256;
/// Threads per block of kernels whose warps compute the product of a row of weights each.
pub(super) const GEMV_THREADS: usize = 512;
pub(super) const WARP: usize = 32;
/// Maximum number of multiprocessors that kernels are divided among; scratch memory is sized for it.
pub(super) const MAX_MULTIPROCESSORS: usize = 192;
/// Neurons per word of a bit mask.
pub(super) const WORD: usize = 32;

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

    pub(super) fn multiprocessors(&self) -> usize {
        self.device.info().multiprocessors.min(MAX_MULTIPROCESSORS)
    }

    /// Whether rows of `format` are multiplied with an int8 input.
    pub fn uses_int8(&self, format: Format) -> bool {
        self.arithmetic == Arithmetic::Integer && format.is_quantised()
    }

    /// Most tokens of a batch, which share one pass over the weights; results are bit-identical to running each alone.
    pub const BATCH: usize = 8;

    /// Tokens up to [`BATCH`](Self::BATCH) whose inputs of `columns` fit the shared memory of a thread block next to a mask of
    /// `neurons`, for weights in `format`; at least one.
    pub fn batch_tokens(&self, columns: usize, format: Format, neurons: usize) -> usize {
        let int8 = self.uses_int8(format);
        let room = self.device.info().shared_bytes;
        let room = room.saturating_sub(mask_bytes(neurons.div_ceil(WORD)));
        let fits = |tokens: &usize| input_bytes(columns, int8, *tokens) <= room;
        (2..=Self::BATCH).rev().find(fits).unwrap_or(1)
    }

    /// Thread blocks for `rows` rows, one warp per row, at most one per multiprocessor; warps loop if there are more rows.
    pub(super) fn row_blocks(&self, rows: usize) -> u32 {
        let blocks = rows.div_ceil(GEMV_THREADS / WARP);
        blocks.min(self.multiprocessors()) as u32
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
        // SAFETY: the arguments are the kernel's, whose size the emulator checks for each; their addresses belong to buffers
        // whose lengths the caller has checked, and which free their memory only after the launches before. The caller of
        // `attend` guarantees that addresses in device memory are valid.
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

/// Bytes of shared memory of the inputs of `tokens` tokens: scratch of the norm, and their values, or the values of one and the
/// int8 blocks of all.
pub(super) fn input_bytes(columns: usize, int8: bool, tokens: usize) -> usize {
    let values = columns.next_multiple_of(BLOCK) * 4;
    let inputs = if int8 {
        values + tokens * int8_bytes(columns)
    } else {
        tokens * values
    };
    WARP * 4 + inputs
}

/// Bytes of an input in 8 bits, with its scales and sums.
pub(super) fn int8_bytes(columns: usize) -> usize {
    let blocks = columns.div_ceil(BLOCK);
    blocks * BLOCK + 2 * (blocks * 4).next_multiple_of(16)
}

/// Bytes of shared memory of a mask of `words`: its words, their prefix sums, and scratch.
pub(super) fn mask_bytes(words: usize) -> usize {
    2 * (words * 4).next_multiple_of(16) + WARP * 4
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
