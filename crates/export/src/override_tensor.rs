//! Arguments for llama.cpp whose placement is closest to a plan for a mixture of experts.
//!
//! llama.cpp stores all experts of a layer in one tensor per matrix, so it can only place them together.

use std::{fmt::Write, path::Path};

use powerinfer_artifact::{plan::Device, write::write_file};
use powerinfer_bundle::Bundle;

use crate::ExportError;

/// Placement of experts by whole layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLayers {
    /// Layers with all experts on the GPU, ascending: the layers with the most neurons on the GPU in the plan, as many as fit into the
    /// bytes of the plan's neurons there.
    pub on_gpu: Vec<usize>,
    /// Number of layers.
    pub layers: usize,
}

impl ExpertLayers {
    /// Returns the placement closest to the plan of `bundle`.
    ///
    /// # Errors
    ///
    /// The bundle is not a mixture of experts.
    pub fn new(bundle: &Bundle) -> Result<Self, ExportError> {
        let plan = bundle.plan();
        let Some(experts) = &bundle.config().experts else {
            return Err(ExportError::NotOfExperts {
                path: bundle.folder().to_owned(),
            });
        };
        // Shared experts are always on the GPU.
        let routed = experts.count * experts.size;
        let hot = |hot: usize| hot.saturating_sub(experts.shared_size);
        let fit = plan
            .layers
            .iter()
            .map(|layer| hot(layer.hot_count))
            .sum::<usize>()
            / routed;
        let mut order: Vec<usize> = (0..plan.layers.len()).collect();
        // The sort is stable: if layers are equal, the last ones come first, as with `--n-cpu-moe`.
        order.reverse();
        order.sort_by_key(|layer| std::cmp::Reverse(plan.layers[*layer].hot_count));
        let mut on_gpu = order[..fit].to_vec();
        on_gpu.sort_unstable();
        Ok(Self {
            on_gpu,
            layers: plan.layers.len(),
        })
    }

    /// Writes two lines of arguments to `out`: the first puts the experts of the last layers on the GPU, the second the experts of
    /// [`on_gpu`](Self::on_gpu).
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, bundle: &Bundle, out: &Path) -> Result<(), ExportError> {
        let on_gpu = |layer: &usize| bundle.plan().layers[*layer].attention == Device::Gpu;
        let with_attention = (0..self.layers).filter(on_gpu).count();
        let whole = if with_attention == self.layers {
            // llama.cpp counts the output head as a layer.
            self.layers + 1
        } else {
            with_attention
        };
        let cold: Vec<String> = (0..self.layers)
            .filter(|layer| !self.on_gpu.contains(layer))
            .map(|layer| layer.to_string())
            .collect();
        let mut text = format!("--n-gpu-layers {whole}");
        let mut chosen = text.clone();
        if !cold.is_empty() {
            let _ = write!(text, " --n-cpu-moe {}", cold.len());
            let layers = cold.join("|");
            let _ = write!(
                chosen,
                r" --override-tensor blk\.({layers})\.ffn_(gate|up|down)_exps\.weight=CPU"
            );
        }
        Ok(write_file(out, format!("{text}\n{chosen}\n").as_bytes())?)
    }
}
