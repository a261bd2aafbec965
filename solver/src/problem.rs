//! The placement problem: a model with its profile, a machine and a budget.

use powerinfer_artifact::{
    hardware::{Gpu, Hardware},
    plan::{Budget, Device},
};

use crate::{LayerMode, SolveError};

/// Number of neurons in a group of the paper: neurons of similar frequency that are placed together.
pub const GROUP_SIZE: usize = 64;

/// A model with its activation frequencies, a machine, and the memory budget.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// Bytes of the token embeddings, which are always on the CPU.
    pub embedding_bytes: u64,
    /// Bytes of a copy of the embeddings in pinned memory; 0 if the GPU does not look up embeddings there. The copy is made if the RAM
    /// budget has room for it and the GPU has the head and the attention of the first layer.
    pub pinned_embedding_bytes: u64,
    /// Bytes of the output head and the last norm.
    pub head_bytes: u64,
    /// Whether the output head is the embedding matrix, so that one copy on the CPU serves both.
    pub tied_head: bool,
    /// Bytes of activations and scratch on a GPU that is used, without [`Self::copied_bytes`].
    pub gpu_scratch_bytes: u64,
    /// Bytes of scratch for copies of one layer's parts; a part counts only if some layer does not have it on the GPU.
    pub copied_bytes: CopiedBytes,
    /// Prefill batch, in tokens, for which the GPU's scratch has memory.
    pub prompt_batch: usize,
    /// Larger prefill batches, in tokens, largest first; each with its additional bytes of scratch on a GPU that has all layers. If
    /// the budget has one GPU and all layers are on it, the first batch that fits is used.
    pub gpu_prompt_bytes: Vec<(usize, u64)>,
    /// Bytes of activations and scratch on the CPU.
    pub cpu_scratch_bytes: u64,
    /// Bytes of one hidden state, as it is copied between the devices.
    pub hidden_bytes: u64,
    /// Number of neurons placed together, usually [`GROUP_SIZE`]; the last group of a layer may be smaller.
    pub group_size: usize,
    /// Memory that may be used.
    pub budget: Budget,
    /// The machine, with values for the model ([`Hardware::for_model`]). The budget replaces its `vram_bytes`
    /// and `ram_bytes`.
    pub hardware: Hardware,
    /// Prescribed device of the output head, if any.
    pub head_pin: Option<Device>,
    /// In a mixture of experts, number of a layer's neurons that are in a shared expert.
    pub shared_neurons: Option<usize>,
}

/// Bytes of the buffers on a GPU into which long prompts copy the parts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopiedBytes {
    /// Bytes of attention.
    pub attention: u64,
    /// Bytes of the predictor.
    pub predictor: u64,
    /// Bytes of the KV cache.
    pub kv: u64,
    /// In a mixture of experts, routers, biases and tables of experts for all layers. Layers whose neurons are on the GPU or are
    /// copied need them there, also if their attention is on the CPU.
    pub routing: u64,
}

impl CopiedBytes {
    /// Sum over all parts.
    pub fn total(&self) -> u64 {
        self.attention + self.predictor + self.kv + self.routing
    }

    /// Whether nothing takes more than in `other`.
    pub(crate) fn fits(&self, other: Self) -> bool {
        self.attention <= other.attention
            && self.predictor <= other.predictor
            && self.kv <= other.kv
            && self.routing <= other.routing
    }
}

/// One layer, whose neurons all have the same size.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Execution mode of the FFN, from which its predicted time follows.
    pub mode: LayerMode,
    /// Activation frequency of each neuron, in falling order.
    pub frequencies: Vec<f64>,
    /// Bytes of one neuron, packed: its rows of gate and up and its column of down.
    pub neuron_bytes: u64,
    /// Bytes of attention weights and norms.
    pub attention_bytes: u64,
    /// Bytes of them that a token reads, fewer with input sparsity.
    pub attention_read_bytes: u64,
    /// Bytes of the predictor or of the gates' sign bits; 0 without prediction.
    pub predictor_bytes: u64,
    /// Bytes of the KV cache at the context length of the budget.
    pub kv_bytes: u64,
    /// Prescribed devices.
    pub pins: Pins,
}

/// Prescribed devices of the parts of a layer; `None` leaves a part to the solver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pins {
    /// Device of attention, which is also that of the hidden state.
    pub attention: Option<Device>,
    /// Device of all neurons of the layer.
    pub neurons: Option<Device>,
}

impl Layer {
    /// Bytes of the first `count` neurons.
    pub(crate) fn neurons_bytes(&self, count: usize) -> u64 {
        count as u64 * self.neuron_bytes
    }

    /// Bytes of the whole layer.
    fn bytes(&self) -> u128 {
        self.frequencies.len() as u128 * u128::from(self.neuron_bytes)
            + u128::from(self.attention_bytes)
            + u128::from(self.predictor_bytes)
            + u128::from(self.kv_bytes)
    }
}

impl Problem {
    /// The GPU, if the machine has one and the VRAM budget is not 0.
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        self.hardware
            .gpu
            .as_ref()
            .filter(|_| self.budget.vram_bytes > 0)
    }

    /// Bytes of a GPU's budget that are not available to the model; see [`Gpu::reserve_bytes`].
    pub fn gpu_reserve_bytes(&self) -> u64 {
        let largest = self.budget.vram_per_gpu().into_iter().max().unwrap_or(0);
        self.gpu().map_or(0, |gpu| gpu.reserve_bytes(largest))
    }

    /// The problem without its layers.
    pub(crate) fn without_layers(&self) -> Self {
        Self {
            layers: Vec::new(),
            budget: self.budget.clone(),
            hardware: self.hardware.clone(),
            gpu_prompt_bytes: self.gpu_prompt_bytes.clone(),
            ..*self
        }
    }

    /// Checks sizes, frequencies, pins and hardware. No sum of sizes of a valid problem overflows.
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
        let mut total: u128 = [
            self.embedding_bytes,
            self.head_bytes,
            self.pinned_embedding_bytes,
            self.gpu_scratch_bytes,
            self.copied_bytes.total(),
            self.cpu_scratch_bytes,
            self.gpu_reserve_bytes(),
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

/// Checks an execution mode of `layer` and the activation frequencies under it.
pub(crate) fn validate_neurons(
    layer: usize,
    mode: &LayerMode,
    frequencies: &[f64],
) -> Result<(), SolveError> {
    let LayerMode {
        prediction,
        per_neuron,
        per_active_neuron,
        ..
    } = *mode;
    for work in [prediction, per_neuron, per_active_neuron] {
        for value in [work.bytes, work.scattered_rows, work.axpy_rows] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(SolveError::Work { layer, value });
            }
        }
    }
    let mut previous = 1.0;
    for (neuron, &value) in frequencies.iter().enumerate() {
        if !(0.0..=1.0).contains(&value) {
            return Err(SolveError::Frequency {
                layer,
                neuron,
                value,
            });
        }
        if value > previous {
            return Err(SolveError::NotSorted { layer, neuron });
        }
        previous = value;
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
        // Compared as text, since NaN is not equal to itself.
        assert_eq!(placed.to_string(), error.to_string());
        error
    }

    #[test]
    fn frequencies_outside_0_to_1_or_out_of_order_are_refused() {
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
    fn invalid_shapes_are_refused() {
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
            let error = refused(|problem| problem.layers[1].mode.per_active_neuron.bytes = value)
                .to_string();
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
    fn invalid_machines_are_refused() {
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
