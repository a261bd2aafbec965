//! What there is to place, and where it may go.

use powerinfer_artifact::{
    hardware::{Gpu, Hardware},
    plan::{Budget, Device},
};

use crate::{LayerMode, Pins, SolveError};

/// The paper's group: neurons of similar frequency that are placed together.
pub const GROUP_SIZE: usize = 64;

/// A model with its profile, a machine, and how much of it may be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// Token embeddings, always on the CPU.
    pub embedding_bytes: u64,
    /// Output head and last norm.
    pub head_bytes: u64,
    /// Whether the head is the embedding matrix, so that on the CPU one copy serves both.
    pub tied_head: bool,
    /// Activations and scratch on the GPU, if it is used at all.
    pub gpu_scratch_bytes: u64,
    /// Activations and scratch on the CPU.
    pub cpu_scratch_bytes: u64,
    /// One hidden state, as it crosses between the devices.
    pub hidden_bytes: u64,
    /// Neurons placed together, [`GROUP_SIZE`] unless there is a reason; the last group of a layer
    /// has what is left.
    pub group_size: usize,
    /// What may be used.
    pub budget: Budget,
    /// The machine, as the model finds it ([`Hardware::for_model`]). Its `vram_bytes` and `ram_bytes` are
    /// not consulted: the budget is.
    pub hardware: Hardware,
    /// Where the head has to be, if a person says so.
    pub head_pin: Option<Device>,
}

/// One layer; all its neurons are equally large.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Which neurons are computed for a token. It sets the predicted time, not the place.
    pub mode: LayerMode,
    /// Share of tokens for which each neuron is active, hottest first.
    pub frequencies: Vec<f64>,
    /// One neuron, packed: its rows of gate and up and its column of down.
    pub neuron_bytes: u64,
    /// Attention weights and norms.
    pub attention_bytes: u64,
    /// What a token reads of them: less where it skips inputs.
    pub attention_read_bytes: u64,
    /// What predicts, the predictor and signs of gates; 0 where there is none.
    pub predictor_bytes: u64,
    /// The KV cache at the budget's context.
    pub kv_bytes: u64,
    /// What has to be where.
    pub pins: Pins,
}

impl Layer {
    /// Bytes of the first `count` neurons.
    pub(crate) fn neurons_bytes(&self, count: usize) -> u64 {
        count as u64 * self.neuron_bytes
    }

    /// All bytes of the layer, exactly.
    fn bytes(&self) -> u128 {
        self.frequencies.len() as u128 * u128::from(self.neuron_bytes)
            + u128::from(self.attention_bytes)
            + u128::from(self.predictor_bytes)
            + u128::from(self.kv_bytes)
    }
}

impl Problem {
    /// The GPU, when there is one and the budget allows its use.
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        self.hardware
            .gpu
            .as_ref()
            .filter(|_| self.budget.vram_bytes > 0)
    }

    /// The same without its layers.
    pub(crate) fn without_layers(&self) -> Self {
        Self {
            layers: Vec::new(),
            budget: self.budget.clone(),
            hardware: self.hardware.clone(),
            ..*self
        }
    }

    /// Checks everything that [`place`](crate::place) relies on. Past this, no sum of sizes
    /// overflows and no frequency surprises.
    pub(crate) fn validate(&self) -> Result<(), SolveError> {
        self.hardware.validate()?;
        if self.budget.vram_bytes > 0 && self.hardware.gpu.is_none() {
            return Err(SolveError::NoGpu {
                vram_bytes: self.budget.vram_bytes,
                hardware: self.hardware.name.clone(),
            });
        }
        if self.group_size == 0 {
            return Err(SolveError::GroupSize);
        }
        if self.layers.is_empty() {
            return Err(SolveError::NoLayers);
        }
        let pins = self
            .layers
            .iter()
            .flat_map(|layer| [layer.pins.attention, layer.pins.neurons]);
        if self.gpu().is_none()
            && pins
                .chain([self.head_pin])
                .any(|pin| pin == Some(Device::Gpu))
        {
            return Err(SolveError::PinnedToNoGpu {
                hardware: self.hardware.name.clone(),
            });
        }
        let gpu_context = self
            .hardware
            .gpu
            .as_ref()
            .map_or(0, |gpu| gpu.context_bytes);
        let mut total: u128 = [
            self.embedding_bytes,
            self.head_bytes,
            self.gpu_scratch_bytes,
            self.cpu_scratch_bytes,
            gpu_context,
        ]
        .into_iter()
        .map(u128::from)
        .sum();
        for (index, layer) in self.layers.iter().enumerate() {
            layer.validate(index)?;
            total += layer.bytes();
            if total > u128::from(u64::MAX) {
                return Err(SolveError::TooLarge {
                    layer: index,
                    total,
                });
            }
        }
        Ok(())
    }
}

impl Layer {
    fn validate(&self, layer: usize) -> Result<(), SolveError> {
        if self.frequencies.is_empty() {
            return Err(SolveError::NoNeurons { layer });
        }
        if self.neuron_bytes == 0 {
            return Err(SolveError::NeuronBytes { layer });
        }
        validate_neurons(layer, &self.mode, &self.frequencies)
    }
}

/// Checks one way that the neurons of `layer` may go.
pub(crate) fn validate_neurons(
    layer: usize,
    mode: &LayerMode,
    frequencies: &[f64],
) -> Result<(), SolveError> {
    let LayerMode {
        prediction,
        every,
        active,
        ..
    } = *mode;
    for work in [prediction, every, active] {
        for value in [work.bytes, work.rows, work.sums] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(SolveError::Work { layer, value });
            }
        }
    }
    let mut before = 1.0;
    for (neuron, &value) in frequencies.iter().enumerate() {
        if !(0.0..=1.0).contains(&value) {
            return Err(SolveError::Frequency {
                layer,
                neuron,
                value,
            });
        }
        if value > before {
            return Err(SolveError::NotSorted { layer, neuron });
        }
        before = value;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::hardware;

    use super::*;
    use crate::samples;

    fn refused(edit: impl FnOnce(&mut Problem)) -> SolveError {
        let mut problem = samples::small();
        problem.validate().unwrap();
        edit(&mut problem);
        let error = problem.validate().unwrap_err();
        let placed = crate::place(&problem, &Default::default()).unwrap_err();
        // As text, for a NaN is not equal to itself.
        assert_eq!(placed.to_string(), error.to_string());
        error
    }

    #[test]
    fn a_frequency_that_is_no_share_is_refused() {
        for value in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
            let error = refused(|problem| problem.layers[1].frequencies[2] = value).to_string();
            assert!(error.contains("layer 1: neuron 2"), "{error}");
        }
        assert_eq!(
            refused(|problem| problem.layers[1].frequencies[0] = 0.0),
            SolveError::NotSorted {
                layer: 1,
                neuron: 1
            }
        );
    }

    #[test]
    fn impossible_shapes_are_refused() {
        assert_eq!(
            refused(|problem| problem.layers.clear()),
            SolveError::NoLayers
        );
        assert_eq!(
            refused(|problem| problem.group_size = 0),
            SolveError::GroupSize
        );
        assert_eq!(
            refused(|problem| problem.layers[1].frequencies.clear()),
            SolveError::NoNeurons { layer: 1 }
        );
        assert!(matches!(
            refused(|problem| problem.layers[0].neuron_bytes = 0),
            SolveError::NeuronBytes { layer: 0 }
        ));
        for value in [f64::NAN, -1.0, f64::INFINITY] {
            let error = refused(|problem| problem.layers[1].mode.active.bytes = value).to_string();
            assert!(error.contains("layer 1"), "{error}");
        }
        for edit in [
            (|problem| problem.layers[1].neuron_bytes = u64::MAX) as fn(&mut Problem),
            |problem| problem.layers[1].kv_bytes = u64::MAX,
        ] {
            assert!(matches!(
                refused(edit),
                SolveError::TooLarge { layer: 1, .. }
            ));
        }
        assert!(matches!(
            refused(|problem| problem.embedding_bytes = u64::MAX),
            SolveError::TooLarge { layer: 0, .. }
        ));
    }

    #[test]
    fn impossible_machines_are_refused() {
        let error = refused(|problem| {
            problem.hardware.cpu.read_bandwidth_bytes_per_second = 0.0;
        });
        assert!(matches!(error, SolveError::Hardware(_)));
        let error = refused(|problem| {
            problem.hardware = hardware::named("cpu-only").unwrap();
        });
        assert!(matches!(error, SolveError::NoGpu { .. }), "{error}");
    }
}
