//! Builds a [`Engine`] from a bundle: finds weights and predictors, puts on a device what the plan has there, and
//! checks the memory that this takes against the plan.

use std::sync::Arc;

use powerinfer_artifact::{
    Hint,
    plan::{self, LayerPlan, Policy},
};
use powerinfer_bundle::{Bundle, Layout, StoredLayer, StoredWeights};
use powerinfer_kernels::cuda::{Device, GpuCache};

use crate::{
    Engine, RuntimeError, Session, Threads,
    engine::Executor,
    executor::CpuExecutor,
    hybrid::{self, HybridExecutor},
    memory::{self, PREFILL_BATCH},
    memory_use,
    model::Model,
    router::ExpertPlaces,
    selector::LayerSelectors,
};

/// How to run a bundle.
#[derive(Debug)]
pub struct Options {
    /// Kernels and threads.
    pub threads: Threads,
    /// The policy of all layers; none for those of the plan.
    pub policy: Option<Policy>,
}

impl Engine {
    /// Loads `bundle` to run on the CPU alone; nothing is converted or copied.
    ///
    /// # Errors
    ///
    /// The bundle lacks what its policies need, memory for the KV cache is missing, or the
    /// plan accounts for other memory than running takes.
    pub fn new(bundle: Bundle, options: Options) -> Result<Self, RuntimeError> {
        load(bundle, options, None)
    }

    /// Loads `bundle` to run on the CPU and on `device`, which gets a copy of what the plan puts on a GPU.
    ///
    /// # Errors
    ///
    /// As [`Self::new`], or the device lacks the memory.
    pub fn with_device(
        bundle: Bundle,
        options: Options,
        device: Arc<dyn Device>,
    ) -> Result<Self, RuntimeError> {
        load(bundle, options, Some(device))
    }
}

fn load(
    bundle: Bundle,
    options: Options,
    device: Option<Arc<dyn Device>>,
) -> Result<Engine, RuntimeError> {
    let config = bundle.config().clone();
    let weights = StoredWeights::find(bundle.weights(), &config, bundle.quant())?;
    let layers = &bundle.plan().layers;
    let policies: Vec<Policy> = layers
        .iter()
        .map(|layer| options.policy.unwrap_or(layer.policy))
        .collect();
    let mut selectors = Vec::new();
    for (index, (layer, policy)) in layers.iter().zip(&policies).enumerate() {
        let found = LayerSelectors::find(bundle.predictors(), index, layer, &config)?;
        found.check(*policy, bundle.folder(), index)?;
        selectors.push(found);
    }
    // A policy that is asked for is measured by itself, without the plan's skipped inputs.
    let planned = layers.iter().map(|layer| layer.input_thresholds);
    let input_thresholds = planned.map(|found| found.filter(|_| options.policy.is_none()));
    let mut places = Vec::new();
    if let Some(experts) = &config.experts {
        for layer in 0..config.layer_count {
            places.push(ExpertPlaces::new(experts, &bundle.neuron_order(layer)?));
        }
    }
    let model = Model {
        experts: places,
        input_thresholds: input_thresholds.collect(),
        config,
        weights,
        selectors,
        policies,
        threads: options.threads,
        bundle,
    };
    let plan = model.bundle.plan();
    let has_attention = |layer: &LayerPlan| layer.attention == plan::Device::Gpu;
    let of_attention = model.config.attention_obstacle();
    let of_attention = of_attention.filter(|_| plan.layers.iter().any(has_attention));
    let obstacle = model.config.device_obstacle().or(of_attention);
    if let (Some(what), true) = (obstacle, device.is_some() && plan.uses_gpu()) {
        return Err(RuntimeError::OnDevice {
            folder: model.bundle.folder().to_owned(),
            layer: 0,
            what,
            hint: Hint::PlaceAgain,
        });
    }
    let mut on_device = match device {
        Some(device) if model.bundle.plan().uses_gpu() => Some(hybrid::place(device, &model)?),
        _ => None,
    };
    let context = model.context_limit();
    let session = Session::new(&model.bundle, on_device.as_ref(), context)?;
    if let Some(device) = &mut on_device {
        let caches = session.on_device.iter().flatten().map(GpuCache::bytes);
        let caches = caches.sum();
        hybrid::check_budget(device, &model.bundle, caches)?;
        hybrid::allocate_prompt_buffers(device, &model, caches)?;
    }
    let experts = match &mut on_device {
        Some(device) => hybrid::ExpertCache::new(&model, device)?,
        None => None,
    };
    memory_use::check(
        &model.bundle,
        &memory_use::held(&model, session.bytes() as u64),
    )?;
    let executor = match on_device {
        None => Executor::Cpu(Box::new(CpuExecutor::new(prompt_tokens(&model)))),
        Some(device) => Executor::Hybrid(Box::new(HybridExecutor::new(device, experts))),
    };
    Ok(Engine::from_parts(model, executor, session))
}

/// Number of prompt tokens that run together on the CPU.
fn prompt_tokens(model: &Model) -> usize {
    // Products of a matrix stored by input are computed for all neurons, so more tokens would exceed the planned memory.
    let by_output = |layer: &StoredLayer| layer.gate.layout == Layout::ByOutput;
    match model.weights.layers.iter().all(by_output) {
        true => memory::prompt_tokens(&model.config),
        false => PREFILL_BATCH,
    }
}
