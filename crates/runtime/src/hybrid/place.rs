//! Upload of a bundle's weights to a device, as its plan places them.

use std::sync::Arc;

use powerinfer_artifact::{
    Hint,
    plan::{self, LayerPlan, PINNED_EMBEDDINGS, Score, Threshold},
};
use powerinfer_bundle::{Bundle, Layout, StoredLinear};
use powerinfer_gpu::{
    DeviceEmbedding, DeviceFfn, DeviceHead, DeviceLayer, DeviceModel, DeviceSelector, ExpertRows,
    ModelShape, Upload,
};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{
        Buffer, Device, DeviceError, Gpu, GpuLinear, GpuMatrix, HostMatrix, Predictor, Router,
        SignBits,
    },
};

use powerinfer_model::RouterScores;

use super::{
    copied::{copied_parts, copies_parts},
    stored_layer::{StoredLayerSource, upload_stored},
};
use crate::{
    ActivationFormat, RuntimeError, memory::PREFILL_BATCH, memory_use::planned_prompt_tokens,
    model::Model, selector::Selector,
};

/// Uploads what a selector of `hot` neurons needs on the device; `is_here` if the plan has the predictor there.
pub(super) fn device_selector(
    upload: &Upload<'_>,
    selector: &Selector<'_>,
    reads_residual: bool,
    is_here: bool,
    hot: usize,
) -> Result<DeviceSelector, DeviceError> {
    Ok(match selector {
        Selector::Dense => DeviceSelector::Dense,
        Selector::Exact => DeviceSelector::Exact,
        Selector::Predicted(_) | Selector::SignBit(_) | Selector::Listed(_) if !is_here => {
            DeviceSelector::Host
        }
        Selector::Listed(_) => DeviceSelector::Host,
        Selector::Predicted(found) => DeviceSelector::Predicted {
            predictor: Box::new(Predictor {
                a: GpuLinear::upload(upload.device, &found.a, None)?,
                b_transposed: GpuMatrix::upload(upload.device, &found.units)?,
                b_scales: match found.scales {
                    [] => None,
                    scales => Some(upload.floats(scales)?),
                },
                bias: upload.floats(found.bias)?,
                threshold: found.threshold,
                is_linear: found.is_linear,
            }),
            reads_residual,
        },
        Selector::SignBit(found) => {
            let words: Vec<u64> = found.signs.words().collect();
            DeviceSelector::SignBit(SignBits {
                signs: Buffer::from_slice(upload.device, &words)?,
                neurons: found.signs.rows(),
                columns: found.signs.columns(),
                min_agreements: found.agreements,
            })
        }
        Selector::Threshold(scoring) => {
            let vectors = scoring.vectors;
            let Threshold {
                value: threshold,
                score,
                centred,
                ..
            } = scoring.threshold;
            match score {
                Score::Gate => DeviceSelector::Gate {
                    threshold,
                    scale: None,
                },
                Score::WeightedGate => DeviceSelector::Gate {
                    threshold,
                    scale: Some(upload.floats(&vectors.gate_scale[..hot])?),
                },
                Score::Contribution => DeviceSelector::Contribution {
                    threshold,
                    scale: upload.floats(&vectors.contribution_scale[..hot])?,
                    centre: if centred {
                        Some(upload.floats(&vectors.centre[..hot])?)
                    } else {
                        None
                    },
                },
            }
        }
    })
}

/// Uploads the router of layer `layer`; `None` in a dense model.
fn device_router(
    upload: &Upload<'_>,
    model: &Model,
    layer: usize,
) -> Result<Option<Router>, DeviceError> {
    let stored = &model.weights.layers[layer];
    let (Some(experts), Some(router)) = (&upload.config.experts, &stored.router) else {
        return Ok(None);
    };
    let file = model.bundle.weights();
    let linear = |stored: &StoredLinear| upload_stored(upload.device, file, stored);
    let dense = experts.dense_size(layer);
    let gate = stored.shared_gate.as_ref().filter(|_| dense.is_none());
    let selected = experts.selected_in(layer);
    Ok(Some(Router {
        linear: linear(router)?,
        shared_gate: gate.map(linear).transpose()?,
        shared_weight: if dense.is_some() { 0.0 } else { 1.0 },
        blocks: Buffer::from_slice(upload.device, model.experts[layer].blocks())?,
        biases: (stored.down.bias.as_deref())
            .map(|biases| upload.floats(biases))
            .transpose()?,
        block_count: experts.blocks(),
        // A dense layer's router matrix is 0, so the first blocks are selected, with equal weights.
        per_token: selected,
        is_sigmoid: matches!(experts.scores, RouterScores::SigmoidOfSelected),
        sums_all: matches!(experts.scores, RouterScores::Softmax) && dense.is_none(),
        scale: dense.map_or(experts.scale, |_| selected as f32),
    }))
}

/// Uploads what the plan of `model` puts on `device`.
///
/// # Errors
///
/// Returns an error if the device has no room, or for projections by input, which no kernel supports.
pub(crate) fn place(device: Arc<dyn Device>, model: &Model) -> Result<DeviceModel, RuntimeError> {
    let (bundle, weights) = (&model.bundle, &model.weights);
    let context = model.context_limit();
    let (config, plan) = (bundle.config(), bundle.plan());
    let file = bundle.weights();
    let upload = Upload {
        device: &device,
        config,
    };
    let slopes = upload.slopes()?;
    let copies = copies_parts(model);
    let mut layers = Vec::new();
    for (index, (stored, plan)) in weights.layers.iter().zip(&plan.layers).enumerate() {
        let has_attention = plan.attention == plan::Device::Gpu;
        let has_cache = has_attention && plan.kv == plan::Device::Gpu;
        let unsupported = |what: &'static str, hint: Hint| RuntimeError::OnDevice {
            folder: bundle.folder().to_owned(),
            layer: index,
            what,
            hint,
        };
        let by_input = |linear: &StoredLinear| linear.layout == Layout::ByInput;
        if (has_attention && by_input(&stored.query))
            || (plan.hot_count > 0 && by_input(&stored.gate))
        {
            return Err(unsupported("projections by input", Hint::NoInputSparsity));
        }
        let source = StoredLayerSource {
            file,
            layer: stored,
        };
        let attention = || upload.attention(&source, index, slopes.as_ref());
        let (selectors, policy) = (&model.selectors[index], model.policies[index]);
        let hot = plan.hot_count;
        let ffn = || {
            let selector = selectors.selector(policy, bundle.predictors());
            let reads_residual = selectors.reads_residual(policy);
            let is_here = plan.predictor == Some(plan::Device::Gpu);
            Ok::<_, DeviceError>(DeviceFfn {
                norm: upload.ffn_norm(&source)?,
                ffn: upload.ffn(&source, hot)?,
                selector: device_selector(&upload, &selector, reads_residual, is_here, hot)?,
                router: device_router(&upload, model, index)?,
                experts: (model.experts.get(index))
                    .map_or_else(Vec::new, |places| ExpertRows::runs(places.blocks())),
                offset: selector
                    .offset()
                    .map(|offset| upload.floats(offset))
                    .transpose()?,
            })
        };
        // Long prompts copy everything that the device lacks.
        let always = copies.then_some(PREFILL_BATCH + 1);
        let streams_from = least_streamed_tokens(bundle, plan).filter(|_| !by_input(&stored.gate));
        let streams_from = streams_from.or(always.filter(|_| hot < config.ffn_size));
        let has_ffn = hot > 0 || streams_from.is_some();
        layers.push(DeviceLayer {
            attention: has_attention.then(attention).transpose()?,
            has_cache,
            neurons: config.ffn_size,
            streams_from,
            ffn: has_ffn.then(ffn).transpose()?,
            norms_after: if has_attention || has_ffn {
                upload.norms_after(&source)?
            } else {
                None
            },
        });
    }
    let gpu = Gpu::new(
        Arc::clone(&device),
        match model.threads.activations() {
            ActivationFormat::F32 => Arithmetic::Float,
            ActivationFormat::Int8 => Arithmetic::Integer,
        },
    );
    let embedding = || {
        if plan.layers[0].attention == plan::Device::Cpu || !config.embeds_by_lookup() {
            return Ok(None);
        }
        let scale = config.embedding_scale;
        if config.tied_embeddings {
            return Ok(Some(DeviceEmbedding { table: None, scale }));
        }
        if plan.is_placed() && plan.line(PINNED_EMBEDDINGS) == 0 {
            return Ok(None);
        }
        match HostMatrix::new(&device, &weights.embedding.view(file)) {
            Ok(table) => Ok(Some(DeviceEmbedding {
                table: Some(table),
                scale,
            })),
            // If there is too little pinned memory, the host looks up the rows.
            Err(DeviceError::OutOfMemory { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    };
    let head = || {
        let norm = weights.final_norm.as_ref();
        let norm = norm.map(|norm| upload.norm(&norm.weight, norm.bias.as_deref()));
        let project = weights.project_out.as_ref();
        let project = project.map(|project| upload_stored(&device, file, project));
        let head = upload_stored(&device, file, &weights.head)?;
        DeviceHead::new(
            norm.transpose()?,
            project.transpose()?,
            head,
            embedding()?,
            &gpu,
        )
    };
    let head = match plan.head {
        plan::Device::Gpu => Some(head()?),
        plan::Device::Cpu => None,
    };
    let shape = ModelShape::new(config, context, plan.budget.kv_cache);
    Ok(DeviceModel::new(gpu, shape, layers, head)?)
}

/// Makes room for as many tokens of a prompt at once as the plan's budget leaves, with `caches` bytes of a session on
/// the device.
///
/// # Errors
///
/// Returns an error if the device fails.
pub(crate) fn allocate_prompt_buffers(
    device: &mut DeviceModel,
    model: &Model,
    caches: usize,
) -> Result<(), RuntimeError> {
    let bundle = &model.bundle;
    let held = device.bytes() + caches;
    let (budget, is_placed) = (bundle.plan().budget.vram_bytes, bundle.plan().is_placed());
    let mut most = planned_prompt_tokens(bundle);
    if !device.computes_all_layers() {
        // The host computes its parts for at most `PREFILL_BATCH` tokens at a time.
        let parts =
            copies_parts(model).then(|| copied_parts(&Arc::clone(device.device()), device, model));
        match parts {
            Some(Ok(parts)) => device.use_copied_parts(parts, PREFILL_BATCH + 1),
            None | Some(Err(RuntimeError::Device(DeviceError::OutOfMemory { .. }))) => {
                most = PREFILL_BATCH;
            }
            Some(Err(other)) => return Err(other),
        }
    }
    let fits = |bytes: usize| !is_placed || (held + bytes) as u64 <= budget;
    Ok(device.allocate_prompt_buffers(most, fits)?)
}

/// Checks that the parts on the device fit the plan's budget, `caches` bytes of a session included.
///
/// # Errors
///
/// Returns [`RuntimeError::OverBudget`] if they do not.
pub(crate) fn check_budget(
    device: &DeviceModel,
    bundle: &Bundle,
    caches: usize,
) -> Result<(), RuntimeError> {
    let held = (device.bytes() + caches) as u64;
    let budget = bundle.plan().budget.vram_bytes;
    if bundle.plan().is_placed() && held > budget {
        Err(RuntimeError::OverBudget { held, budget })
    } else {
        Ok(())
    }
}

/// Prompt length in tokens from which copying the cold neurons of a layer costs less than computing them on the host, by
/// the speeds that the plan was made with; `None` if it never does.
///
/// ```text
/// copy     cold · bytes of a neuron / PCIe bandwidth
/// compute  the lesser of  tokens · the predicted time of one token
///                    and  2 · cold · weights of a neuron / operations per second
/// ```
fn least_streamed_tokens(bundle: &Bundle, layer: &LayerPlan) -> Option<usize> {
    let (hardware, config) = (&bundle.plan().hardware, bundle.config());
    let gpu = hardware.gpu.as_ref()?;
    let cold = layer.neuron_count.checked_sub(layer.hot_count)?;
    if cold == 0 {
        return None;
    }
    let bytes = cold as f64 * layer.neuron_bytes as f64;
    let copy = gpu.pcie_latency_seconds + bytes / gpu.pcie_bandwidth_bytes_per_second;
    let weights = config.matrices_per_neuron() * config.hidden_size;
    let products = 2.0 * (cold * weights) as f64;
    let operations = hardware.cpu.gemm_operations_per_second(bundle.quant());
    let at_once = operations.map_or(f64::INFINITY, |speed| products / speed);
    let computing = at_once.min(layer.cpu_microseconds * 1e-6);
    // Of no number of tokens where computing takes no time.
    let least = (copy / computing).ceil();
    (least <= PREFILL_BATCH as f64).then_some((least as usize).max(2))
}
