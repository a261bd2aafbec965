//! Counting who fires while text goes through a layer: a table on the device, of which nothing is read before
//! the text is over (PowerInfer §6.1).

use super::{
    Buffer, DeviceError, Gpu, arguments,
    operations::{THREADS, WORD},
};

/// Spans of tokens before, in each of which it is counted who had fired already.
pub const WINDOWS: usize = 3;

/// How many of the neurons that fired had fired within a window before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reuse {
    /// Those.
    pub reused: u64,
    /// All, on tokens that have a whole window before them.
    pub active: u64,
}

/// What is counted of a layer's neurons on a device.
#[derive(Debug)]
pub struct ActivityCounts {
    /// A table each for texts that are counted apart.
    active: Vec<Buffer<u32>>,
    magnitude: Buffer<f64>,
    recent: Buffer<u32>,
    reuse: Buffer<u64>,
    strange: Buffer<u32>,
    windows: [usize; WINDOWS],
}

impl ActivityCounts {
    /// On how many tokens of text `part` each neuron fired.
    pub fn active(&self, part: usize) -> Result<Vec<u32>, DeviceError> {
        self.active[part].to_vec()
    }

    /// Sums of each neuron's absolute products over all tokens.
    pub fn magnitude(&self) -> Result<Vec<f64>, DeviceError> {
        self.magnitude.to_vec()
    }

    /// What was reused within each window.
    pub fn reuse(&self) -> Result<[Reuse; WINDOWS], DeviceError> {
        let numbers = self.reuse.to_vec()?;
        Ok(std::array::from_fn(|window| Reuse {
            reused: numbers[2 * window],
            active: numbers[2 * window + 1],
        }))
    }

    /// Whether every product was finite.
    pub fn is_finite(&self) -> Result<bool, DeviceError> {
        Ok(self.strange.to_vec()? == [0])
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        let counts = self.active.iter().map(Buffer::bytes).sum::<usize>();
        counts
            + self.magnitude.bytes()
            + self.recent.bytes()
            + self.reuse.bytes()
            + self.strange.bytes()
    }
}

impl Gpu {
    /// Counts of nothing yet, of so many neurons on texts of so many parts; `windows` in tokens, at most 32,
    /// the longest last.
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
            recent: Buffer::new(device, neurons)?,
            reuse: Buffer::new(device, 2 * WINDOWS)?,
            strange: Buffer::new(device, 1)?,
            windows,
        })
    }

    /// Counts of `products`, `[tokens, neurons]`, of a text of part `part`, of which `before` tokens were counted
    /// just before: on which each neuron's is not 0.
    ///
    /// Panics where shapes do not fit.
    pub fn observe(
        &self,
        products: &Buffer<f32>,
        before: usize,
        part: usize,
        tally: &mut ActivityCounts,
    ) -> Result<(), DeviceError> {
        let neurons = tally.magnitude.len();
        let tokens = products.len() / neurons.max(1);
        assert_eq!(products.len(), tokens * neurons, "a product per neuron");
        if products.is_empty() {
            return Ok(());
        }
        let arguments = arguments::Observe {
            products: products.address(),
            tokens: tokens as i32,
            neurons: neurons as i32,
            before: before as i32,
            windows: tally.windows.map(|window| window as i32),
            active: tally.active[part].address(),
            magnitude: tally.magnitude.address(),
            recent: tally.recent.address(),
            reuse: tally.reuse.address(),
            strange: tally.strange.address(),
        };
        let grid = [neurons.div_ceil(THREADS) as u32, 1, 1];
        self.launch("observe", grid, THREADS, 0, "a neuron", &arguments)
    }
}
