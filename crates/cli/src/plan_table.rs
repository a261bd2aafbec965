//! A plan in words and tables.

use std::path::Path;

use anyhow::Result;
use powerinfer_artifact::{
    ByteSize, ModelIdentity, counted,
    plan::{BudgetLine, Device, Forecast, InputThresholds, PROMPT_TOKENS, Plan, Policy},
    write::write_file,
};
use powerinfer_model::ModelConfig;
use powerinfer_report::plan_page;
use powerinfer_solver::SolveReport;

use crate::output::{Output, Table, percent};

/// Writes the page of `plan` to `path`, if there is one.
pub(crate) fn draw(
    path: Option<&Path>,
    model: &ModelIdentity,
    plan: &Plan,
    output: Output,
) -> Result<()> {
    if let Some(path) = path {
        let forecast = plan.forecast.as_ref().filter(|_| !is_short(plan));
        let predictions = forecast.map_or_else(Vec::new, |forecast| predicted(plan, forecast));
        write_file(path, plan_page(model, plan, &predictions)?.as_bytes())?;
        output.say(format!("drawn in `{}`", path.display()));
    }
    Ok(())
}

/// Microseconds per token below which no speed is predicted: caches and waits between kernels then dominate, and the cost
/// model does not describe them well.
const SHORTEST_PREDICTED: f64 = 2000.0;
/// Plan size in bytes below which no speed is predicted, because caches hold the model and fixed costs dominate.
const SMALLEST_PREDICTED: u64 = 64 << 20;

/// Whether the plan is too small, or a token too fast, to predict a speed.
fn is_short(plan: &Plan) -> bool {
    let totals = &plan.totals;
    let bytes = totals.gpu_bytes + totals.cpu_bytes;
    totals.microseconds_per_token < SHORTEST_PREDICTED || bytes < SMALLEST_PREDICTED
}

/// The plan in a few lines: machine, placement, predicted speed, limits and, if there is a `report` of the solver,
/// optimality.
pub(crate) fn summary(plan: &Plan, report: Option<&SolveReport>) -> String {
    let layers = plan.layers.len();
    let on_gpu = plan.layers.iter();
    let on_gpu = on_gpu
        .filter(|layer| layer.attention == Device::Gpu)
        .count();
    let totals = &plan.totals;
    let memory = |device| {
        let (used, budget) = (totals.bytes(device), plan.budget.bytes(device));
        format!("{} of {}", ByteSize(used), ByteSize(budget))
    };
    let mut lines = vec![
        ("machine", format!("`{}`", plan.hardware.name)),
        ("policies", policies(plan)),
        (
            "GPU",
            match plan.budget.vram_bytes {
                0 => "not used".to_owned(),
                _ => format!(
                    "{} of {} neurons, with {} of the activations; attention of {on_gpu} of {layers} layers; {}",
                    totals.hot_count,
                    totals.neuron_count,
                    percent(totals.hot_share),
                    memory(Device::Gpu)
                ),
            },
        ),
        ("CPU", memory(Device::Cpu)),
    ];
    let cached = plan.layers.iter().filter(|layer| layer.cached_experts > 0);
    let cached = cached.count();
    if cached > 0 {
        let replaced = "the hot experts are replaced while the model runs";
        let text = format!("in {}, {replaced}", counted(cached, "layer"));
        lines.push(("experts", text));
    }
    if is_short(plan) {
        let speeds = "none, because the cost model is not accurate for models this small";
        lines.push(("forecast", speeds.to_owned()));
    }
    if let Some(forecast) = plan.forecast.as_ref().filter(|_| !is_short(plan)) {
        let mut predicted = predicted(plan, forecast).into_iter();
        lines.extend(predicted.next().map(|speeds| ("forecast", speeds)));
        let own = totals.microseconds_per_token;
        // The first two baselines: the CPU alone and whole layers on the GPU; in a mixture of experts, ways of placing experts.
        let others: Vec<String> = forecast
            .baselines
            .iter()
            .take(2)
            .map(|other| {
                let ratio = other.microseconds_per_token / own;
                format!("{ratio:.2}× that of {}", other.name)
            })
            .collect();
        if !others.is_empty() && plan.budget.vram_bytes > 0 {
            lines.push(("speed", others.join("; ")));
        }
        lines.extend(predicted.next().map(|value| ("VRAM", value)));
    }
    lines.extend(inputs(plan).map(|inputs| ("inputs", inputs)));
    let limits = plan.layers.iter().filter_map(|layer| layer.limit);
    lines.push((
        "limited by",
        layers_of(limits.map(|limit| limit.to_string())),
    ));
    lines.extend(report.map(|report| ("optimality", optimality(plan, report))));
    let lines = lines
        .iter()
        .map(|(name, text)| format!("{name:<12}{text}\n"));
    lines.collect()
}

/// How good a plan is, and how it was found.
fn optimality(plan: &Plan, report: &SolveReport) -> String {
    let gap = if report.gap <= 1e-9 {
        "proven".to_owned()
    } else {
        format!("within {:.3}%", 100.0 * report.gap)
    };
    format!(
        "{gap} for {}, by {} in {:.3} s",
        plan.objective, report.backend, report.solve_seconds
    )
}

/// The policies of a plan, with the number of layers of each.
pub(crate) fn policies(plan: &Plan) -> String {
    layers_of(plan.layers.iter().map(|layer| layer.policy.to_string()))
}

/// Distinct `names` with the number of layers of each, the most frequent first.
fn layers_of(names: impl Iterator<Item = String>) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let parts = counts.iter();
    let parts = parts.map(|(name, count)| format!("{name} in {}", counted(count, "layer")));
    parts.collect::<Vec<_>>().join(", ")
}

/// The plan as tables: layers, memories, and other placements.
pub(crate) fn describe(plan: &Plan, report: Option<&SolveReport>) -> String {
    let mut text = format!("{}\n{}\n{}", layers(plan), reasons(plan), memory(plan));
    if let Some(forecast) = &plan.forecast {
        let mut table = Table::new(&["placement", "µs a token", "tokens/s", "this plan is"]);
        for row in placements(plan, forecast) {
            table.row(row);
        }
        text += &format!("\n{table}");
        for sentence in predicted(plan, forecast) {
            text += &format!("forecast: {sentence}\n");
        }
    }
    if let Some(report) = report {
        text += &format!("optimality: {}\n", optimality(plan, report));
    }
    text
}

fn layers(plan: &Plan) -> String {
    let has_gpus = plan.budget.vram_split.len() > 1;
    let mut columns = vec!["layer", "policy"];
    columns.extend(has_gpus.then_some("GPU"));
    columns.extend([
        "attention",
        "hot neurons",
        "carry",
        "on GPU",
        "on CPU",
        "GPU µs",
        "CPU µs",
        "sync µs",
        "layer µs",
        "waits for",
    ]);
    let mut table = Table::new(&columns);
    for layer in &plan.layers {
        let mut row = vec![layer.layer.to_string(), layer.policy.to_string()];
        row.extend(has_gpus.then(|| layer.gpu.to_string()));
        row.extend([
            layer.attention.to_string(),
            format!("{}/{}", layer.hot_count, layer.neuron_count),
            percent(layer.hot_share),
            ByteSize(layer.gpu_bytes).to_string(),
            ByteSize(layer.cpu_bytes).to_string(),
            format!("{:.1}", layer.gpu_microseconds),
            format!("{:.1}", layer.cpu_microseconds),
            format!("{:.1}", layer.sync_microseconds),
            format!("{:.1}", layer.microseconds),
            layer
                .limit
                .map_or("-".to_owned(), |limit| limit.to_string()),
        ]);
        table.row(row);
    }
    table.to_string()
}

fn reasons(plan: &Plan) -> String {
    let layers = plan.layers.iter();
    let lines = layers.map(|layer| {
        format!(
            "layer {}: {}; {}\n",
            layer.layer, layer.policy, layer.reason
        )
    });
    lines.collect()
}

/// Where a line's memory is.
fn place(plan: &Plan, line: &BudgetLine) -> String {
    if line.device == Device::Gpu && plan.budget.vram_split.len() > 1 {
        format!("gpu {}", line.gpu)
    } else {
        line.device.to_string()
    }
}

fn memory(plan: &Plan) -> String {
    let mut lines = Table::new(&["memory", "where", "bytes"]);
    for line in &plan.lines {
        lines.row(vec![
            line.name.clone(),
            place(plan, line),
            ByteSize(line.bytes).to_string(),
        ]);
    }
    for (gpu, budget) in plan.budget.vram_split.iter().enumerate() {
        let here = plan.lines.iter();
        let here = here.filter(|line| line.device == Device::Gpu && line.gpu == gpu);
        lines.row(vec![
            format!("total, of {}", ByteSize(*budget)),
            format!("gpu {gpu}"),
            ByteSize(here.map(|line| line.bytes).sum()).to_string(),
        ]);
    }
    for device in [Device::Gpu, Device::Cpu] {
        if device == Device::Gpu && plan.budget.vram_split.len() > 1 {
            continue;
        }
        lines.row(vec![
            format!("total, of {}", ByteSize(plan.budget.bytes(device))),
            device.to_string(),
            ByteSize(plan.totals.bytes(device)).to_string(),
        ]);
    }
    lines.to_string()
}

/// The plan and other ways of placing, a row each.
fn placements(plan: &Plan, forecast: &Forecast) -> Vec<Vec<String>> {
    let own = plan.totals.microseconds_per_token;
    let row = |name: String, time: f64, ratio: String| {
        let speed = format!("{:.1}", 1e6 / time);
        vec![name, format!("{time:.1}"), speed, ratio]
    };
    let mut rows = vec![row("this plan".to_owned(), own, String::new())];
    rows.extend(forecast.baselines.iter().map(|baseline| {
        let time = baseline.microseconds_per_token;
        let name = if baseline.fits_ram {
            baseline.name.clone()
        } else {
            format!("{} (exceeds the RAM budget)", baseline.name)
        };
        row(name, time, format!("{:.2}× as fast", time / own))
    }));
    rows
}

/// Further predictions for the plan, one sentence each.
fn predicted(plan: &Plan, forecast: &Forecast) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut speeds: Vec<String> = forecast
        .decode
        .iter()
        .map(|speed| match speed.batch {
            1 => format!(
                "{} tokens/s decoding one sequence",
                figure(speed.tokens_per_second)
            ),
            batch => format!(
                "{} decoding {batch} at once",
                figure(speed.tokens_per_second)
            ),
        })
        .collect();
    if let Some(prompt) = forecast.prompt_tokens_per_second {
        speeds.push(format!(
            "{} reading a prompt of {PROMPT_TOKENS}",
            figure(prompt)
        ));
    }
    if !speeds.is_empty() {
        sentences.push(speeds.join(", "));
    }
    let own = plan.totals.microseconds_per_token;
    if let Some(saved) = forecast.microseconds_per_gibibyte
        && plan.totals.gpu_bytes > 0
    {
        // The value of a gibibyte says nothing if the model is smaller than that.
        let (unit, saved) = if saved > own / 2.0 {
            ("MiB", saved / 1024.0)
        } else {
            ("GiB", saved)
        };
        sentences.push(if saved * 1e3 > own * 1e-3 { format!(
                "1 {unit} more VRAM would save {saved:.1} µs a token, {:.2}% of its time (marginal value)",
                100.0 * saved / own
            ) } else { "more VRAM would save nothing".to_owned() });
    }
    sentences
}

/// A speed with about three digits.
fn figure(speed: f64) -> String {
    match speed {
        100.0.. => format!("{speed:.0}"),
        _ => format!("{speed:.1}"),
    }
}

/// Says what a user should know about a plan beyond its summary.
pub(crate) fn say_warnings(plan: &Plan, report: &SolveReport, output: Output) {
    if let Some(failure) = &report.failure {
        output.say(format!(
            "the integer program was not solved to optimality ({failure}); the plan is the best one found"
        ));
    }
    if plan.budget.vram_bytes > 0 && plan.totals.gpu_bytes == 0 {
        let reserve = report.gpu_reserve_bytes;
        output.say(if plan.budget.vram_bytes < reserve { format!(
                "the VRAM budget is below the {} that any use of the GPU needs, so everything stays on the CPU",
                ByteSize(reserve)
            ) } else { "no part of the model would be faster on the GPU, so everything stays on the CPU".to_owned() });
    }
    if let Some(warning) = beyond_the_card(plan) {
        output.say(warning);
    }
}

/// Says what a plan means for a model whose activation has no exact zeros. Without a certificate, no policy that skips
/// neurons is chosen.
pub(crate) fn say_cost_of_skipping(
    plan: &Plan,
    config: &ModelConfig,
    certifies: bool,
    output: Output,
) {
    if config.activation.has_exact_zeros() {
        return;
    }
    let skipping = plan.layers.iter();
    let skipping = skipping.filter(|layer| layer.policy != Policy::Dense);
    output.say(match skipping.count() {
        0 => format!(
            "every layer computes all neurons, so sparsity gives no speedup: the activation, {}, is never exactly zero, so skipping neurons would cost accuracy{}",
            config.activation.name(),
            if certifies { "; `--max-ppl-increase` sets how much loss is allowed" } else { "" }
        ),
        count => format!(
            "{} of {} {} the neurons that contribute least, which costs accuracy: the activation, {}, is never exactly zero; `--max-ppl-increase` sets how much loss is allowed",
            count,
            counted(plan.layers.len(), "layer"),
            if count == 1 { "skips" } else { "skip" },
            config.activation.name()
        ),
    });
}

/// The note for a budget that is larger than the memory of the plan's card.
pub(crate) fn beyond_the_card(plan: &Plan) -> Option<String> {
    let card = plan.hardware.gpu.as_ref()?;
    let budgets = plan.budget.vram_per_gpu().into_iter();
    let budget = budgets.max().filter(|most| *most > card.vram_bytes)?;
    Some(format!(
        "the budget of {} is more than the {} of the {} in `{}`",
        ByteSize(budget),
        ByteSize(card.vram_bytes),
        card.name,
        plan.hardware.name
    ))
}

/// Share of inputs that the layers of `plan` read, in words; none if they read all.
pub(crate) fn inputs(plan: &Plan) -> Option<String> {
    let with: Vec<InputThresholds> = plan
        .layers
        .iter()
        .filter_map(|layer| layer.input_thresholds)
        .collect();
    let share = with.first()?.share;
    let ffns = with.iter().filter(|found| found.ffn.is_some()).count();
    Some(format!(
        "{} of the channels are read in the attention of {}, and by gate and up of {ffns}",
        percent(1.0 - share),
        counted(with.len(), "layer")
    ))
}
