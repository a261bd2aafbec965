//! A simulation's answer in tables.

use std::collections::BTreeMap;

use powerinfer_artifact::{
    ByteSize,
    plan::{Device, LayerPlan},
};
use powerinfer_planner::simulate::{Activity, Answer, Solver};

use crate::{
    output::{Output, Table, percent},
    plan_table::beyond_the_card,
};

/// A number of parameters in words.
fn parameters(count: u64) -> String {
    let count = count as f64;
    if count < 1e8 {
        format!("{:.1} million", count / 1e6)
    } else {
        format!("{:.1} billion", count / 1e9)
    }
}

/// The answer as tables.
pub(crate) fn describe(answer: &Answer) -> String {
    let mut text = format!(
        "{}: {} parameters, {} as {}; on {}\n\n",
        answer.model.name,
        parameters(answer.model.parameters),
        ByteSize(answer.model.bytes),
        answer.model.quant,
        answer.plan.hardware.description,
    );
    let mut assumed = Table::new(&["assumed", "value", "source"]);
    let Activity {
        sparsity,
        skew,
        predictor_share,
        first_half_density,
    } = &answer.activity;
    for (what, figure) in [
        ("zeros among FFN activations", Some(sparsity)),
        ("neurons that carry 80%", Some(skew)),
        ("predictors, of the model", Some(predictor_share)),
        ("active in the first half", first_half_density.as_ref()),
    ] {
        if let Some(figure) = figure {
            assumed.row(vec![
                what.to_owned(),
                percent(figure.value),
                figure.source.clone(),
            ]);
        }
    }
    text += &format!("{assumed}\n{}\n{}\n", layers(answer), memory(answer));
    let mut speeds = Table::new(&[
        "tokens/s",
        "on GPU",
        "load",
        "decode",
        "8 at once",
        "32 at once",
        "prompt",
        "request",
    ]);
    for engine in &answer.engines {
        let cells = match &engine.speed {
            None => vec!["–".to_owned(); 7],
            Some(speed) => {
                let at = |requests: u32| {
                    let found = speed.decode.iter().find(|at| at.requests == requests);
                    found.map_or(String::new(), |at| number(at.tokens_per_second))
                };
                let on_gpu = match &speed.placement[..] {
                    "neurons" => format!("{} of neurons", percent(speed.hot_neurons)),
                    placement => placement.to_owned(),
                };
                vec![
                    on_gpu,
                    percent(speed.gpu_load),
                    at(1),
                    at(8),
                    at(32),
                    number(speed.prompt_tokens_per_second),
                    number(speed.request.tokens_per_second),
                ]
            }
        };
        speeds.row([vec![engine.name.to_owned()], cells].concat());
    }
    text += &speeds.to_string();
    let mut speeds = answer
        .engines
        .iter()
        .filter_map(|engine| engine.speed.as_ref());
    if let Some(speed) = speeds.next() {
        text += &format!(
            "decode: with a context of {:.0}, the mean of a request of {} prompt and {} generated tokens; request: all of it\n",
            speed.request.prompt_tokens as f64 + speed.request.tokens as f64 / 2.0,
            speed.request.prompt_tokens,
            speed.request.tokens,
        );
    }
    let forecast = answer.plan.forecast.as_ref();
    let baselines = forecast.map_or(&[][..], |forecast| &forecast.baselines);
    if !baselines.is_empty() {
        // Plans are compared with a full KV cache, requests have their own context.
        let heading = format!(
            "this engine with a context of {}, placed",
            answer.plan.budget.context_tokens
        );
        let mut others = Table::new(&[&heading, "decode, tokens/s"]);
        let own = answer.plan.totals.microseconds_per_token;
        others.row(vec!["as above".to_owned(), number(1e6 / own)]);
        for baseline in baselines {
            let note = if baseline.fits_ram {
                ""
            } else {
                " (more than the RAM allowed)"
            };
            others.row(vec![
                format!("{}{note}", baseline.name),
                number(1e6 / baseline.microseconds_per_token),
            ]);
        }
        text += &format!("\n{others}");
    }
    for engine in &answer.engines {
        if let Some(warning) = &engine.warning {
            text += &format!("{}: {warning}\n", engine.name);
        }
    }
    text
}

/// The layers, those that are alike in one row.
fn layers(answer: &Answer) -> Table {
    let mut table = Table::new(&[
        "layers",
        "policy",
        "hot neurons",
        "carry",
        "attention",
        "KV",
        "GPU µs",
        "CPU µs",
        "sync µs",
        "layer µs",
    ]);
    let rest = |layer: &LayerPlan| {
        let place = |device: Device| device.to_string();
        vec![
            layer.policy.to_string(),
            format!("{}/{}", layer.hot_count, layer.neuron_count),
            percent(layer.hot_share),
            place(layer.attention),
            place(layer.kv),
            format!("{:.0}", layer.gpu_microseconds),
            format!("{:.0}", layer.cpu_microseconds),
            format!("{:.0}", layer.sync_microseconds),
            format!("{:.0}", layer.microseconds),
        ]
    };
    let rows: Vec<Vec<String>> = answer.plan.layers.iter().map(rest).collect();
    let mut first = 0;
    for last in 0..rows.len() {
        if rows.get(last + 1) == Some(&rows[last]) {
            continue;
        }
        let range = if first == last {
            first.to_string()
        } else {
            format!("{first}–{last}")
        };
        table.row([vec![range], rows[last].clone()].concat());
        first = last + 1;
    }
    table
}

fn memory(answer: &Answer) -> Table {
    let mut table = Table::new(&["memory", "GPU", "CPU"]);
    let mut lines: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    let place = |device: Device| usize::from(device == Device::Cpu);
    for line in &answer.plan.lines {
        lines.entry(&line.name).or_default()[place(line.device)] += line.bytes;
    }
    let format = |bytes: u64| match bytes {
        0 => "–".to_owned(),
        bytes => ByteSize(bytes).to_string(),
    };
    for (name, bytes) in lines {
        table.row([vec![name.to_owned()], bytes.map(format).to_vec()].concat());
    }
    let totals = [Device::Gpu, Device::Cpu].map(|device| {
        format!(
            "{} of {}",
            ByteSize(answer.plan.totals.bytes(device)),
            ByteSize(answer.plan.budget.bytes(device))
        )
    });
    table.row([vec!["total".to_owned()], totals.to_vec()].concat());
    table
}

/// Says how good the plan is.
pub(crate) fn say_result(answer: &Answer, output: Output) {
    let Solver {
        backend,
        objective,
        bound,
        gap,
        solve_seconds,
    } = &answer.solver;
    output.say(format!(
        "objective {}: {objective:.1} µs per token with a context of {}, proven bound {bound:.1} µs, gap {:.3}%; {backend} solved it in {solve_seconds:.3} s",
        answer.plan.objective,
        answer.plan.budget.context_tokens,
        100.0 * gap,
    ));
    if let Some(share) = answer.hot {
        output.say(format!(
            "the layers and memories shown are the solver's; `this engine` is rated with the hottest {} of every layer on the GPU, as `--hot` says",
            percent(share)
        ));
    }
    if let Some(warning) = beyond_the_card(&answer.plan) {
        output.say(warning);
    }
}

/// Three digits at most, for what is predicted to no more than that.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
