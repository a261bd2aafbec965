//! llama.cpp arguments for the placement that is closest to a plan for a mixture of experts.
//!
//! llama.cpp stores all experts of a layer in one tensor per matrix, so it can only place them together.

use std::{fmt::Write, ops::Range, path::Path};

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
        let hot = plan.layers.iter().map(|layer| hot(layer.hot_count));
        let fit = hot.sum::<usize>() / routed;
        let mut on_gpu: Vec<usize> = offloaded(bundle).rev().collect();
        // The sort is stable: if layers are equal, the last ones come first, as with `--n-cpu-moe`.
        on_gpu.sort_by_key(|layer| std::cmp::Reverse(plan.layers[*layer].hot_count));
        on_gpu.truncate(fit);
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
        let layers = offloaded(bundle).len();
        // llama.cpp counts the output head as a layer and places it first.
        let with_head = if layers > 0 { layers + 1 } else { 0 };
        let cold: Vec<String> = (0..self.layers)
            .filter(|layer| !self.on_gpu.contains(layer))
            .map(|layer| layer.to_string())
            .collect();
        let mut text = format!("--n-gpu-layers {with_head}");
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

/// Layers that llama.cpp puts on the GPU: the last ones, as many as have attention on the GPU in the plan.
fn offloaded(bundle: &Bundle) -> Range<usize> {
    let layers = &bundle.plan().layers;
    let on_gpu = layers.iter().filter(|layer| layer.attention == Device::Gpu);
    layers.len() - on_gpu.count()..layers.len()
}
