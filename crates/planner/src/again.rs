//! Places an existing bundle within other budgets, with the same policies and thresholds.

use powerinfer_artifact::{
    ByteSize, Digest, Progress,
    placement_inputs::LayerInputs,
    plan::{Budget, LayerPlan, Plan},
};
use powerinfer_bundle::{Bundle, REQUEST};
use powerinfer_kernels::cuda::CudaDevice;
use powerinfer_solver::{Candidate, Decision, Options, Problem, decide};
use serde_json::{Value, json};

use crate::{
    PlanOptions, PlannerError, Vram,
    candidates::restored,
    default_hardware, forecast, inputs, machine, pins,
    problem::{PredictorSizes, problem},
};

/// Finds the best placement of `bundle` within other budgets, with the same policies and thresholds.
///
/// Options that are `None` keep their present value. Options that would change what the bundle computes are ignored.
///
/// # Errors
///
/// The placement inputs cannot be read, an option is invalid, or no placement keeps the budget.
pub fn place_again(
    bundle: &Bundle,
    options: &PlanOptions,
    progress: &dyn Progress,
) -> Result<Decision, PlannerError> {
    let layers = bundle.placement_inputs()?;
    let problem = build_problem(bundle, &layers, options, progress)?;
    solve(bundle, &problem, &layers, &options.solver())
}

/// Places `bundle` in memory for this machine if its plan is for a GPU that is not here; its files stay as they are.
/// Which neurons are computed does not change.
///
/// # Errors
///
/// This machine cannot be measured, or as [`place_again`].
pub fn for_this_machine(bundle: Bundle, progress: &dyn Progress) -> Result<Bundle, PlannerError> {
    let plan = bundle.plan();
    let Some(planned) = plan.hardware.gpu.as_ref().filter(|_| plan.uses_gpu()) else {
        return Ok(bundle);
    };
    let here = machine::this_machine(progress)?;
    let (hardware, vram, what) = match (&here.gpu, CudaDevice::open(0)) {
        (Some(gpu), _) if gpu.name == planned.name => return Ok(bundle),
        (Some(gpu), Ok(_)) => {
            let free: u64 = Vram::Auto.sizes(None)?.iter().sum();
            let vram = free.min(plan.budget.vram_bytes);
            (Some(here.clone()), vram, gpu.name.clone())
        }
        (None, Ok(_)) => return Ok(bundle),
        (_, Err(reason)) => (None, 0, format!("the CPU ({reason})")),
    };
    let options = PlanOptions {
        vram: Some(Vram::Sizes(vec![ByteSize(vram)])),
        // What does not fit is read from disk.
        ram_bytes: Some(plan.budget.ram_bytes.max(2 * bundle.bytes())),
        hardware,
        ..PlanOptions::default()
    };
    let again = place_again(&bundle, &options, progress)?.plan;
    progress.note(&format!(
        "the plan is for `{}`, which is not here: re-planned in memory for {what}; the same neurons are computed",
        plan.hardware.name
    ));
    Ok(bundle.with_plan(again)?)
}

/// Replaces the plan of `bundle` by `plan`, the result of [`place_again`].
///
/// # Errors
///
/// `plan` is inconsistent, another run changes the bundle, or a file cannot be written.
///
/// # Panics
///
/// If `plan` has other policies or thresholds than the bundle.
pub fn rewrite(bundle: Bundle, plan: Plan) -> Result<(), PlannerError> {
    let request = request(&bundle, &plan);
    bundle.place_again(plan, request)?;
    Ok(())
}

/// Builds the placement problem. Options that are `None` keep their value from the present plan.
fn build_problem(
    bundle: &Bundle,
    layers: &[LayerInputs],
    options: &PlanOptions,
    progress: &dyn Progress,
) -> Result<Problem, PlannerError> {
    let (config, plan) = (bundle.config(), bundle.plan());
    options.check_attention(config)?;
    let before = plan.budget.context_tokens as usize;
    let assumed = match &options.vram {
        // Another machine is needed, or no longer.
        Some(vram) if plan.hardware.gpu.is_some() != vram.asks_for_gpu() => {
            Some(default_hardware(vram, progress)?)
        }
        _ => None,
    };
    let named = options.hardware.as_ref().or(assumed.as_ref());
    let (hardware, ram_bytes) = match named {
        Some(hardware) => (hardware.clone(), hardware.cpu.ram_bytes),
        None => (plan.hardware.clone(), plan.budget.ram_bytes),
    };
    let mut budget = Budget {
        vram_split: plan.budget.vram_split.clone(),
        vram_bytes: plan.budget.vram_bytes,
        ram_bytes: options.ram_bytes.unwrap_or(ram_bytes),
        context_tokens: options.context(config, before)? as u64,
        kv_cache: options.kv_cache.unwrap_or(plan.budget.kv_cache),
    };
    match (&options.vram, named) {
        (Some(vram), _) => vram.set(&mut budget, named)?,
        // A plan for a machine without a GPU says nothing about the memory to use on one, and the reverse.
        (None, Some(machine)) if plan.hardware.gpu.is_some() != machine.gpu.is_some() => {
            Vram::Auto.set(&mut budget, named)?;
        }
        (None, _) => {}
    }
    let thresholds = plan
        .layers
        .iter()
        .filter_map(|layer| layer.input_thresholds);
    let left_out = thresholds.map(|thresholds| thresholds.share).next();
    let predictors = PredictorSizes::of(config, bundle.predictors());
    let mut problem = problem(
        config,
        budget,
        hardware,
        bundle.quant(),
        left_out,
        predictors,
        options.prompt_batch,
    );
    if named.is_none() {
        // The plan's hardware already has the figures for the model.
        problem.hardware = plan.hardware.clone();
    }
    for (layer, placing) in problem.layers.iter_mut().zip(layers) {
        layer.attention_read_bytes = placing.costs.attention_read_bytes;
    }
    pins::pin(&options.pins, &mut problem)?;
    Ok(problem)
}

/// Solves for the best placement with the present policy and thresholds of each layer.
fn solve(
    bundle: &Bundle,
    problem: &Problem,
    layers: &[LayerInputs],
    options: &Options,
) -> Result<Decision, PlannerError> {
    let before = bundle.plan();
    let differs =
        |(layer, placing): (&LayerPlan, &LayerInputs)| layer.policy != placing.costs.mode.policy;
    if before.layers.iter().zip(layers).any(differs) {
        return Err(PlannerError::OtherFigures {
            folder: bundle.folder().to_owned(),
        });
    }
    let candidates: Vec<_> = layers.iter().map(|layer| vec![restored(layer)]).collect();
    let mut decision =
        decide(problem, &candidates, options).map_err(|source| PlannerError::Again {
            folder: bundle.folder().to_owned(),
            source: Box::new(source),
        })?;
    let chosen: Vec<&Candidate> = candidates.iter().map(|modes| &modes[0]).collect();
    let (config, quant) = (bundle.config(), bundle.quant());
    let hits: Vec<&[f32]> = layers.iter().map(|layer| &layer.expert_hits[..]).collect();
    forecast::predict(&mut decision.plan, problem, config, quant, &chosen, &hits);
    for ((layer, before), costs) in decision
        .plan
        .layers
        .iter_mut()
        .zip(&before.layers)
        .zip(&decision.costs)
    {
        (layer.threshold, layer.input_thresholds) = (before.threshold, before.input_thresholds);
        layer.reason = format!(
            "{:.1} µs, {}; re-planned with the same policy",
            1e6 * costs[0].seconds,
            ByteSize(costs[0].work.bytes as u64)
        );
        if let Some(read) = inputs::reason(layer) {
            layer.reason += &format!("; {read}");
        }
    }
    Ok(decision)
}

/// Digest of the request, for the bundle's header. It includes the request that made the bundle, so it differs from
/// that of a bundle made for this budget, whose policies may differ.
fn request(bundle: &Bundle, plan: &Plan) -> Value {
    let first = powerinfer_bundle::FIRST_REQUEST;
    let settings = &bundle.header().settings;
    let made_by = settings.get(first).or_else(|| settings.get(REQUEST));
    let asked = json!({
        "made_by": made_by,
        "budget": plan.budget,
        "hardware": plan.hardware,
    });
    json!(Digest::from_content(asked.to_string().as_bytes()))
}
