//! Activation counts of a layer's neurons, kept on the device while text runs through the layer (the neuron
//! information table of PowerInfer, §6.1): the kernel of `observe.cu`.

use super::{
    Buffer, DeviceError, Gpu, WINDOWS, arguments,
    gpu::{THREADS, WORD},
};

/// Reuse of active neurons within one window of preceding tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reuse {
    /// Activations of neurons that were also active within the window.
    pub reused: u64,
    /// All activations, on tokens with a full window before them.
    pub active: u64,
}

/// Activation counts of a layer's neurons on a device.
#[derive(Debug)]
pub struct ActivityCounts {
    /// `[parts]` tables `[neurons]`: parts of the text are counted separately.
    active: Vec<Buffer<u32>>,
    magnitude: Buffer<f64>,
    /// `[neurons]`: activity on the last 32 tokens, one bit per token.
    history: Buffer<u32>,
    reuse: Buffer<u64>,
    /// `[1]`: 1 after a NaN or an infinity.
    not_finite: Buffer<u32>,
    windows: [usize; WINDOWS],
}

impl ActivityCounts {
    /// `[neurons]`: tokens of text part `part` on which each neuron was active.
    ///
    /// # Errors
    ///
    /// The device fails.
    ///
    /// # Panics
    ///
    /// There is no such part.
    pub fn active(&self, part: usize) -> Result<Vec<u32>, DeviceError> {
        self.active[part].to_vec()
    }

    /// `[neurons]`: sum of `|h|` over all tokens.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn magnitude(&self) -> Result<Vec<f64>, DeviceError> {
        self.magnitude.to_vec()
    }

    /// Reuse within each window.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn reuse(&self) -> Result<[Reuse; WINDOWS], DeviceError> {
        let counts = self.reuse.to_vec()?;
        Ok(std::array::from_fn(|window| Reuse {
            reused: counts[2 * window],
            active: counts[2 * window + 1],
        }))
    }

    /// Whether every activation was finite.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn is_finite(&self) -> Result<bool, DeviceError> {
        Ok(self.not_finite.to_vec()? == [0])
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        let counts = self.active.iter().map(Buffer::bytes).sum::<usize>();
        counts
            + self.magnitude.bytes()
            + self.history.bytes()
            + self.reuse.bytes()
            + self.not_finite.bytes()
    }
}

impl Gpu {
    /// Allocates counts, all 0, for `neurons` neurons and `parts` parts of the text.
    ///
    /// `windows` are lengths in tokens from 1 to 32, ascending.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    ///
    /// # Panics
    ///
    /// A window is empty or longer than 32 tokens.
    pub fn new_activity_counts(
        &self,
        neurons: usize,
        parts: usize,
        windows: [usize; WINDOWS],
    ) -> Result<ActivityCounts, DeviceError> {
        assert!(
            windows.iter().all(|window| (1..=WORD).contains(window)),
            "windows of 1 to 32 tokens"
        );
        let device = self.device();
        Ok(ActivityCounts {
            active: (0..parts)
                .map(|_| Buffer::new(device, neurons))
                .collect::<Result<_, _>>()?,
            magnitude: Buffer::new(device, neurons)?,
            history: Buffer::new(device, neurons)?,
            reuse: Buffer::new(device, 2 * WINDOWS)?,
            not_finite: Buffer::new(device, 1)?,
            windows,
        })
    }

    /// Adds the `activations` of some tokens, `[tokens, neurons]`, to the counts of text part `part`. A neuron is active
    /// if its activation is not 0.
    ///
    /// `preceding` is the number of tokens of the same text that were counted immediately before.
    ///
    /// # Errors
    ///
    /// The launch fails.
    ///
    /// # Panics
    ///
    /// A shape does not match, or there is no such part.
    pub fn observe(
        &self,
        activations: &Buffer<f32>,
        preceding: usize,
        part: usize,
        counts: &mut ActivityCounts,
    ) -> Result<(), DeviceError> {
        let neurons = counts.magnitude.len();
        let tokens = activations.len() / neurons.max(1);
        assert_eq!(activations.len(), tokens * neurons, "one per neuron");
        if activations.is_empty() {
            return Ok(());
        }
        let arguments = arguments::Observe {
            activations: activations.address(),
            tokens: tokens as i32,
            neurons: neurons as i32,
            preceding: preceding as i32,
            windows: counts.windows.map(|window| window as i32),
            active_tokens: counts.active[part].address(),
            magnitude: counts.magnitude.address(),
            history: counts.history.address(),
            reuse: counts.reuse.address(),
            not_finite: counts.not_finite.address(),
        };
        let grid = [neurons.div_ceil(THREADS) as u32, 1, 1];
        self.launch("observe", grid, THREADS, 0, "a neuron", &arguments)
    }
}
