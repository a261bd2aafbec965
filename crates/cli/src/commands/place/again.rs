//! Places a bundle again: other budgets, other places, the same neurons computed.

use std::path::Path;

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest,
    placing::{LayerFigures, LayerPlacing, ReadWork},
    plan::{Budget, LayerPlan, Plan},
};
use powerinfer_bundle::{Bundle, REQUEST, Verification};
use powerinfer_solver::{Candidate, Decision, LayerMode, Options, Problem, Work, decide};
use serde_json::{Value, json};

use super::{
    PlaceArguments, describe, forecast, inputs,
    problem::{largest_rank, problem},
    request, say_result,
};
use crate::{
    output::{Output, print, print_json},
    page_file::refuse_inside,
};

/// What a bundle keeps of the way that a layer goes.
pub(super) fn placing(candidate: &Candidate, attention_read_bytes: u64) -> LayerPlacing {
    let stored = |work: Work| ReadWork {
        bytes: work.bytes,
        rows: work.rows,
        sums: work.sums,
    };
    let LayerMode {
        policy,
        prediction,
        every,
        active,
    } = candidate.mode;
    LayerPlacing {
        figures: LayerFigures {
            policy,
            prediction: stored(prediction),
            every: stored(every),
            active: stored(active),
            predictor_bytes: candidate.predictor_bytes,
            attention_read_bytes,
        },
        frequencies: candidate
            .frequencies
            .iter()
            .map(|one| *one as f32)
            .collect(),
    }
}

/// The one way that a layer of a bundle can go.
fn candidate(layer: &LayerPlacing) -> Candidate {
    let work = |stored: ReadWork| Work {
        bytes: stored.bytes,
        rows: stored.rows,
        sums: stored.sums,
    };
    let figures = layer.figures;
    Candidate {
        mode: LayerMode {
            policy: figures.policy,
            prediction: work(figures.prediction),
            every: work(figures.every),
            active: work(figures.active),
        },
        frequencies: layer.frequencies.iter().copied().map(f64::from).collect(),
        predictor_bytes: figures.predictor_bytes,
        allowed: true,
    }
}

/// Places the bundle in `folder` again, and rewrites its plan.
pub(super) fn run(folder: &Path, arguments: &PlaceArguments, output: Output) -> Result<()> {
    refuse_decisions(arguments)?;
    refuse_inside(arguments.html.as_deref(), folder)?;
    let bundle = Bundle::open(folder, Verification::Quick)?;
    let layers = bundle.placing()?;
    let problem = stated(&bundle, &layers, arguments)?;
    let options = arguments.budget.placement.options();
    let decision = solved(&bundle, &problem, &layers, &options)?;
    let plan = decision.plan;
    if !arguments.json {
        print(describe(&plan))?;
    }
    say_result(&plan, &decision.report, output);
    let model = bundle.header().model.clone();
    let certificate = bundle.certificate().cloned();
    if !arguments.dry_run {
        let request = request(&bundle, &plan);
        bundle.place_again(plan.clone(), request)?;
        output.say(format!(
            "the bundle in `{}` was placed again; it computes the same neurons as before",
            folder.display()
        ));
    }
    describe::draw(arguments.html.as_deref(), &model, &plan, output)?;
    if arguments.json {
        print_json(&json!({
            "plan": plan,
            "objective": decision.report.objective,
            "bound": decision.report.bound,
            "gap": decision.report.gap,
            "solve_seconds": decision.report.solve_seconds,
            "certificate": certificate,
        }))?;
    }
    Ok(())
}

/// Refuses options that would change what a bundle computes, or where it is.
fn refuse_decisions(arguments: &PlaceArguments) -> Result<()> {
    let budget = &arguments.budget;
    let given = [
        ("--profile", arguments.profile.is_some()),
        ("--predictors", arguments.predictors.is_some()),
        ("--out", arguments.out.is_some()),
        ("--policy", budget.policy.is_some()),
        ("--max-ppl-increase", budget.max_ppl_increase.is_some()),
        ("--input-sparsity", budget.input_sparsity.is_some()),
        ("--certify-tokens", budget.certify_tokens.is_some()),
        ("--quant", budget.quant.is_some()),
    ];
    let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
    if let Some((option, _)) = given.next() {
        bail!(
            "`{}` is a bundle, and placing it again moves neurons without changing which are computed; `{option}` takes the model that it was made from",
            arguments.model
        );
    }
    Ok(())
}

/// The placement as the solver takes it; what `arguments` do not say is as it was.
fn stated(bundle: &Bundle, layers: &[LayerPlacing], arguments: &PlaceArguments) -> Result<Problem> {
    let (config, plan) = (bundle.config(), bundle.plan());
    let given = &arguments.budget;
    let before = plan.budget.context_tokens as usize;
    let hardware = match &given.hardware {
        Some(name) => request::read_hardware(name)?,
        None => plan.hardware.clone(),
    };
    let ram = match given.hardware.is_some() {
        true => hardware.cpu.ram_bytes,
        false => plan.budget.ram_bytes,
    };
    let mut budget = Budget {
        vram_split: Vec::new(),
        vram_bytes: 0,
        ram_bytes: given.ram.unwrap_or(ByteSize(ram)).0,
        context_tokens: request::context(given, config, before)? as u64,
        kv_cache: given.kv_cache.unwrap_or(plan.budget.kv_cache),
    };
    given
        .vram
        .set(&mut budget, &hardware, given.hardware.is_none())?;
    let thresholds = plan
        .layers
        .iter()
        .filter_map(|layer| layer.input_thresholds);
    let left_out = thresholds.map(|thresholds| thresholds.share).next();
    let rank = largest_rank(bundle.predictors());
    let mut problem = problem(config, budget, hardware, bundle.quant(), left_out, rank);
    if given.hardware.is_none() {
        // A plan has its machine as the model finds it already.
        problem.hardware = plan.hardware.clone();
    }
    for (layer, placing) in problem.layers.iter_mut().zip(layers) {
        layer.attention_read_bytes = placing.figures.attention_read_bytes;
    }
    given.placement.pin(&mut problem)?;
    Ok(problem)
}

/// The best placement that leaves every layer's policy and thresholds as they are.
fn solved(
    bundle: &Bundle,
    problem: &Problem,
    layers: &[LayerPlacing],
    options: &Options,
) -> Result<Decision> {
    let before = bundle.plan();
    let differs =
        |(layer, placing): (&LayerPlan, &LayerPlacing)| layer.policy != placing.figures.policy;
    if before.layers.iter().zip(layers).any(differs) {
        bail!(
            "the bundle in `{}` follows other policies than it carries figures of; make it again from its model",
            bundle.folder().display()
        );
    }
    let candidates: Vec<_> = layers.iter().map(|layer| vec![candidate(layer)]).collect();
    let mut decision = decide(problem, &candidates, options)
        .with_context(|| format!("cannot place `{}` again", bundle.folder().display()))?;
    let chosen: Vec<&Candidate> = candidates.iter().map(|modes| &modes[0]).collect();
    let (config, quant) = (bundle.config(), bundle.quant());
    forecast::predict(&mut decision.plan, problem, config, quant, &chosen);
    for ((layer, before), prices) in decision
        .plan
        .layers
        .iter_mut()
        .zip(&before.layers)
        .zip(&decision.prices)
    {
        (layer.threshold, layer.input_thresholds) = (before.threshold, before.input_thresholds);
        layer.reason = format!(
            "{:.1} µs, {}; placed again, so the policy is as it was",
            1e6 * prices[0].seconds,
            ByteSize(prices[0].work.bytes as u64)
        );
        if let Some(read) = inputs::reason(layer) {
            layer.reason += &format!("; {read}");
        }
    }
    Ok(decision)
}

/// What is recorded as asked for: never what making a bundle would record, whose policies were
/// decided for the budget it names.
fn request(bundle: &Bundle, plan: &Plan) -> Value {
    let first = powerinfer_bundle::FIRST_REQUEST;
    let settings = &bundle.header().settings;
    let made_by = settings.get(first).or_else(|| settings.get(REQUEST));
    let asked = json!({
        "made_by": made_by,
        "budget": plan.budget,
        "hardware": plan.hardware,
    });
    json!(Digest::of(asked.to_string().as_bytes()))
}
