//! Every figure of a sweep, a line a row, for spreadsheets.

use super::rows::{Functions, Placement, Planned, Predictor, Row};

/// How every such file begins.
pub(super) const BEGINNING: &str = "level,policy,level_of,";

/// The columns.
const NAMES: [&str; 54] = [
    "level",
    "policy",
    "level_of",
    "level_value",
    "vram_bytes",
    "hot_threshold",
    "batch",
    "context_tokens",
    "trouble",
    "hot_neurons",
    "hot_neuron_share",
    "hot_activation_share",
    "gpu_load_share",
    "gpu_bytes",
    "cpu_bytes",
    "true_sparsity",
    "predicted_sparsity",
    "computed_share",
    "relative_ffn_error",
    "count_recall",
    "contribution_recall",
    "precision",
    "predictor_time_share",
    "predictor_bytes_share",
    "measured_on",
    "placement_ran",
    "emulated",
    "disturbed",
    "first_token_milliseconds",
    "decode_microseconds_median",
    "decode_microseconds_p95",
    "decode_microseconds_p99",
    "tokens_per_second",
    "tokens_per_second_least",
    "tokens_per_second_most",
    "bytes_per_token",
    "bandwidth_share",
    "measured_over_predicted",
    "planned_for",
    "planned_tokens_per_second_simulated",
    "perplexity",
    "perplexity_rise",
    "perplexity_rise_low",
    "perplexity_rise_high",
    "kl_divergence_mean",
    "top1_agreement",
    "tasks_pass_at_1",
    "tasks_pass_at_1_low",
    "tasks_pass_at_1_high",
    "tasks_p_value",
    "humaneval_pass_at_1",
    "humaneval_pass_at_1_low",
    "humaneval_pass_at_1_high",
    "humaneval_p_value",
];

/// All rows, below their headings.
pub(super) fn text(rows: &[Row]) -> String {
    let mut text = NAMES.join(",") + "\n";
    for row in rows {
        let cells = cells(row).map(quoted);
        text += &(cells.join(",") + "\n");
    }
    text
}

/// A cell as spreadsheets take it.
fn quoted(text: String) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// A figure, or nothing.
fn or_nothing(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn cells(row: &Row) -> [String; NAMES.len()] {
    let Row {
        axes,
        sparsity,
        quality,
        ..
    } = row;
    let placed = |of: fn(&Placement) -> f64| or_nothing(row.placement.as_ref().map(of));
    let predicted = |of: fn(&Predictor) -> f64| or_nothing(row.predictor.as_ref().map(of));
    let planned = row.speed.planned.as_ref();
    let plan = |of: fn(&Planned) -> f64| or_nothing(planned.map(of));
    let measured = &row.speed.measured;
    let (steps, speed) = (&measured.decode_microseconds, &measured.tokens_per_second);
    let functions = |name: &str| -> [String; 4] {
        let found: Option<&Functions> = quality.functions.iter().find(|one| one.name == name);
        let pass = found.and_then(|found| found.pass_at_1);
        [
            or_nothing(pass.map(|pass| pass.value)),
            or_nothing(pass.map(|pass| pass.low)),
            or_nothing(pass.map(|pass| pass.high)),
            or_nothing(found.map(|found| found.p_value)),
        ]
    };
    let [tasks, tasks_low, tasks_high, tasks_p] = functions("held-out tasks");
    let [code, code_low, code_high, code_p] = functions("HumanEval");
    [
        axes.level.clone(),
        axes.policy.clone(),
        axes.level_of.clone().unwrap_or_default(),
        or_nothing(axes.level_value),
        axes.vram_bytes
            .map_or_else(String::new, |bytes| bytes.to_string()),
        or_nothing(axes.hot_threshold),
        axes.batch.to_string(),
        axes.context_tokens.to_string(),
        row.trouble.clone().unwrap_or_default(),
        placed(|placed| placed.hot_neurons as f64),
        placed(|placed| placed.neuron_share),
        placed(|placed| placed.activation_share),
        placed(|placed| placed.load_share),
        placed(|placed| placed.gpu_bytes as f64),
        placed(|placed| placed.cpu_bytes as f64),
        sparsity.true_share.to_string(),
        or_nothing(sparsity.predicted_share),
        sparsity.computed_share.to_string(),
        sparsity.relative_error.to_string(),
        predicted(|predictor| predictor.count_recall),
        predicted(|predictor| predictor.contribution_recall),
        predicted(|predictor| predictor.precision),
        predicted(|predictor| predictor.time_share),
        predicted(|predictor| predictor.bytes_share),
        measured.device.clone(),
        measured.placement_ran.to_string(),
        measured.emulated.to_string(),
        measured.disturbed.to_string(),
        measured.first_token_milliseconds.median.to_string(),
        steps.median.to_string(),
        steps.p95.to_string(),
        steps.p99.to_string(),
        speed.median.to_string(),
        speed.least.to_string(),
        speed.most.to_string(),
        measured.bytes_per_token.to_string(),
        measured.bandwidth_share.to_string(),
        or_nothing(measured.measured_over_predicted),
        planned.map_or_else(String::new, |planned| planned.hardware.clone()),
        plan(|planned| planned.tokens_per_second),
        quality.perplexity.to_string(),
        quality.perplexity_rise.value.to_string(),
        quality.perplexity_rise.low.to_string(),
        quality.perplexity_rise.high.to_string(),
        quality.kl_divergence_mean.to_string(),
        quality.top1_agreement.to_string(),
        tasks,
        tasks_low,
        tasks_high,
        tasks_p,
        code,
        code_low,
        code_high,
        code_p,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_begin_as_they_say_and_cells_cannot_break_out() {
        assert!(text(&[]).starts_with(BEGINNING));
        assert_eq!(quoted("a,\"b\"".to_owned()), "\"a,\"\"b\"\"\"");
        assert_eq!(quoted("plain".to_owned()), "plain");
    }
}
