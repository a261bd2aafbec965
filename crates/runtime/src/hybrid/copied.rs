//! Parts of layers that the plan leaves on the host and that long prompts copy to the device.

use std::sync::Arc;

use powerinfer_artifact::plan;
use powerinfer_bundle::{Layout, StoredLayer, StoredNorm};
use powerinfer_gpu::{
    CopiedParts, DeviceModel, HostAttention, HostLinear, HostNorm, HostPrediction, Upload,
};
use powerinfer_kernels::cuda::{Device, GpuCache};

use super::{place::device_selector, stored_layer::StoredLayerSource};
use crate::{
    RuntimeError,
    memory::{PREFILL_BATCH, copying_pays},
    model::Model,
    selector::Selector,
};

/// Whether prompts of more than [`PREFILL_BATCH`] tokens copy the parts that the device lacks: if the plan has memory for that, and
/// kernels support the layouts of all weights. For a plan without a memory account, its hardware decides.
pub(super) fn copies_parts(model: &Model) -> bool {
    let (plan, quant) = (model.bundle.plan(), model.bundle.quant());
    let is_planned = if plan.is_placed() {
        plan.prompt_batch > PREFILL_BATCH
    } else {
        copying_pays(&plan.hardware, quant)
    };
    let is_by_output = |layer: &StoredLayer| {
        let attention = [&layer.query, &layer.key, &layer.value, &layer.output];
        let mut linears = attention.into_iter().chain([&layer.gate]).chain(&layer.up);
        linears.all(|linear| linear.layout == Layout::ByOutput)
    };
    let has_kernels = model.config.attention_obstacle().is_none();
    is_planned && has_kernels && model.weights.layers.iter().all(is_by_output)
}

/// Device memory for the parts of one layer of `model` that `on_device` lacks.
///
/// # Errors
///
/// Returns an error if the device has no room for them.
pub(super) fn copied_parts(
    device: &Arc<dyn Device>,
    on_device: &DeviceModel,
    model: &Model,
) -> Result<CopiedParts, RuntimeError> {
    let (bundle, config) = (&model.bundle, model.bundle.config());
    let upload = Upload { device, config };
    let planned = &bundle.plan().layers;
    let lacks = |part: fn(&plan::LayerPlan) -> plan::Device| {
        planned
            .iter()
            .position(|plan| part(plan) == plan::Device::Cpu)
    };
    let attention = lacks(|plan| plan.attention).map(|layer| {
        let source = StoredLayerSource {
            file: bundle.weights(),
            layer: &model.weights.layers[layer],
        };
        upload.attention(&source, layer, upload.slopes()?.as_ref())
    });
    let cache = lacks(|plan| match plan.attention {
        plan::Device::Gpu => plan.kv,
        plan::Device::Cpu => plan::Device::Cpu,
    });
    let cache = cache.map(|_| GpuCache::new(device, on_device.cache_shape()));
    // The largest network, and the signs, whose size is the same in every layer.
    let (mut network, mut signs) = (None, None);
    for layer in 0..config.layer_count {
        if !on_device.layer(layer).is_predicted_on_host() {
            continue;
        }
        match model.selector(layer) {
            Selector::Predicted(found) => {
                let rank = found.units.rows();
                if network.is_none_or(|(_, largest)| rank > largest) {
                    network = Some((layer, rank));
                }
            }
            Selector::SignBit(_) => signs = Some(layer),
            _ => {}
        }
    }
    let upload_selector = |layer: usize| {
        let reads_residual = model.predictor_reads_residual(layer);
        device_selector(&upload, &model.selector(layer), reads_residual, true, 0)
    };
    let network = network.map(|(layer, _)| upload_selector(layer));
    let signs = signs.map(upload_selector);
    Ok(CopiedParts::new(
        device,
        attention.transpose()?,
        network.transpose()?,
        signs.transpose()?,
        cache.transpose()?,
    )?)
}

/// Attention of `layer` in host memory.
pub(super) fn host_attention(model: &Model, layer: usize) -> HostAttention<'_> {
    let stored = &model.weights.layers[layer];
    let file = model.bundle.weights();
    let linears = [&stored.query, &stored.key, &stored.value, &stored.output];
    fn norm(stored: &StoredNorm) -> HostNorm<'_> {
        (&stored.weight, stored.bias.as_deref())
    }
    let head_norms = stored.head_norms.as_ref();
    HostAttention {
        projections: linears
            .map(|stored| -> HostLinear<'_> { (stored.matrix.view(file), stored.bias.as_deref()) }),
        norm: stored.attention_norm.as_ref().map(norm),
        sinks: stored.sinks.as_deref(),
        head_norms: head_norms.map(|norms| [norm(&norms[0]), norm(&norms[1])]),
        window: model.config.attention_windows[layer],
    }
}

/// Predictor of `selector` in host memory; `None` if it uses none.
pub(super) fn host_prediction<'a>(selector: &Selector<'a>) -> Option<HostPrediction<'a>> {
    match selector {
        Selector::Predicted(found) => Some(HostPrediction::Network {
            a: found.a,
            b_transposed: found.units,
            b_scales: found.scales,
            bias: found.bias,
            threshold: found.threshold,
            is_linear: found.is_linear,
        }),
        Selector::SignBit(found) => Some(HostPrediction::Signs {
            words: found.signs.words().collect(),
            min_agreements: found.agreements,
        }),
        Selector::Dense | Selector::Exact | Selector::Threshold(_) | Selector::Listed(_) => None,
    }
}
