//! Inputs that determine all weights.

use powerinfer_kernels::Isa;
use powerinfer_model::ModelConfig;

use crate::{Settings, noise::Noise, recipe::LayerRecipe};

/// Inputs that determine all weights.
pub(crate) struct Plan<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) settings: Settings,
    pub(crate) layers: &'a [LayerRecipe],
    pub(crate) isa: Isa,
}

impl Plan<'_> {
    /// Creates the random streams of the tensor called `name`.
    pub(crate) fn noise(&self, name: &str) -> Noise {
        Noise::new(self.settings.seed, name)
    }

    /// Returns the rank of each neuron of `layer` in the list of activation frequencies.
    pub(crate) fn ranks(&self, layer: usize) -> Vec<u32> {
        self.noise(&format!("layers.{layer}.ranks"))
            .permutation(self.config.ffn_size)
    }

    /// Returns the weight of channel 0 in each expert's row of the router.
    pub(crate) fn router_offsets(&self, layer: usize) -> Vec<f32> {
        let offsets = &self.layers[layer].router_offsets;
        let ranks = self.noise(&format!("layers.{layer}.experts"));
        let ranks = ranks.permutation(offsets.len()).into_iter();
        ranks.map(|rank| offsets[rank as usize] as f32).collect()
    }

    /// Returns the weight of channel 0 in each neuron's gate.
    pub(crate) fn gate_offsets(&self, layer: usize) -> Vec<f32> {
        let offsets = &self.layers[layer].gate_offsets;
        let ranks = self.ranks(layer).into_iter();
        ranks.map(|rank| offsets[rank as usize] as f32).collect()
    }
}
