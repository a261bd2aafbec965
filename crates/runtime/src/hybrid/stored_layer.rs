//! The weights of a bundle's layer, as uploads read them.

use std::sync::Arc;

use powerinfer_artifact::TensorFile;
use powerinfer_bundle::{StoredLayer, StoredLinear, StoredNorm};
use powerinfer_gpu::LayerSource;
use powerinfer_kernels::cuda::{Device, DeviceError, GpuLinear};
use powerinfer_model::LayerWeight;

/// Weights of a layer of a bundle.
pub(super) struct StoredLayerSource<'a> {
    pub(super) file: &'a TensorFile,
    pub(super) layer: &'a StoredLayer,
}

/// Uploads a matrix of a bundle and its bias.
pub(super) fn upload_stored(
    device: &Arc<dyn Device>,
    file: &TensorFile,
    stored: &StoredLinear,
) -> Result<GpuLinear, DeviceError> {
    let matrix = stored.matrix.view(file);
    GpuLinear::upload(device, &matrix, stored.bias.as_deref())
}

impl LayerSource for StoredLayerSource<'_> {
    fn linear(
        &self,
        device: &Arc<dyn Device>,
        weight: LayerWeight,
        _bias: LayerWeight,
        rows: Option<usize>,
    ) -> Result<GpuLinear, DeviceError> {
        let layer = self.layer;
        let stored = match weight {
            LayerWeight::Query => &layer.query,
            LayerWeight::Key => &layer.key,
            LayerWeight::Value => &layer.value,
            LayerWeight::Output => &layer.output,
            LayerWeight::Gate => &layer.gate,
            LayerWeight::Up => layer.up.as_ref().expect("a gated layer has it"),
            LayerWeight::Down => &layer.down,
            other => unreachable!("{other:?} is no matrix"),
        };
        let Some(rows) = rows else {
            return upload_stored(device, self.file, stored);
        };
        let matrix = stored.matrix.view(self.file).rows_range(0..rows);
        let bias = stored.bias.as_deref();
        let bias = match weight {
            // The router holds the down biases of experts.
            LayerWeight::Down if layer.router.is_some() => None,
            LayerWeight::Down => bias, // an entry per sum, not per neuron
            _ => bias.map(|bias| &bias[..rows]),
        };
        GpuLinear::upload(device, &matrix, bias)
    }

    fn vector(&self, weight: LayerWeight) -> Option<Vec<f32>> {
        let layer = self.layer;
        if weight == LayerWeight::Sinks {
            return layer.sinks.clone();
        }
        let head = |index: usize| layer.head_norms.as_ref().map(|norms| &norms[index]);
        let (norm, is_bias): (Option<&StoredNorm>, bool) = match weight {
            LayerWeight::AttentionNorm => (layer.attention_norm.as_ref(), false),
            LayerWeight::AttentionNormBias => (layer.attention_norm.as_ref(), true),
            LayerWeight::FfnNorm => (layer.ffn_norm.as_ref(), false),
            LayerWeight::FfnNormBias => (layer.ffn_norm.as_ref(), true),
            LayerWeight::AttentionOutputNorm => (layer.attention_output_norm.as_ref(), false),
            LayerWeight::FfnOutputNorm => (layer.ffn_output_norm.as_ref(), false),
            LayerWeight::QueryNorm => (head(0), false),
            LayerWeight::QueryNormBias => (head(0), true),
            LayerWeight::KeyNorm => (head(1), false),
            LayerWeight::KeyNormBias => (head(1), true),
            other => unreachable!("{other:?} is no part of a norm"),
        };
        if is_bias {
            norm.and_then(|norm| norm.bias.clone())
        } else {
            norm.map(|norm| norm.weight.clone())
        }
    }
}
