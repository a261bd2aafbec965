//! A sweep as CSV: one line per row, for spreadsheets.

use super::{FunctionResults, PlacementSummary, PlannedSpeed, PredictorQuality, SweepRow};

/// First bytes of every such file.
pub const BEGINNING: &str = "setting,policy,parameter,";

/// Names of the columns.
const NAMES: [&str; 54] = [
    "setting",
    "policy",
    "parameter",
    "parameter_value",
    "vram_bytes",
    "hot_threshold",
    "batch",
    "context_tokens",
    "placement_error",
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

/// CSV document of `rows` with a header line.
pub fn text(rows: &[SweepRow]) -> String {
    let mut text = NAMES.join(",") + "\n";
    for row in rows {
        let cells = cells(row).map(quoted);
        text += &(cells.join(",") + "\n");
    }
    text
}

/// `text` quoted where it contains a comma, quote or line break.
fn quoted(text: String) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// A figure, or an empty cell.
fn or_empty(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn cells(row: &SweepRow) -> [String; NAMES.len()] {
    let SweepRow {
        axes,
        sparsity,
        quality,
        ..
    } = row;
    let placed = |of: fn(&PlacementSummary) -> f64| or_empty(row.placement.as_ref().map(of));
    let predicted = |of: fn(&PredictorQuality) -> f64| or_empty(row.predictor.as_ref().map(of));
    let planned = row.speed.planned.as_ref();
    let plan = |of: fn(&PlannedSpeed) -> f64| or_empty(planned.map(of));
    let measured = &row.speed.measured;
    let (steps, speed) = (&measured.decode_microseconds, &measured.tokens_per_second);
    let functions = |name: &str| -> [String; 4] {
        let found: Option<&FunctionResults> = quality.functions.iter().find(|one| one.name == name);
        let pass = found.and_then(|found| found.pass_at_1);
        [
            or_empty(pass.map(|pass| pass.value)),
            or_empty(pass.map(|pass| pass.low)),
            or_empty(pass.map(|pass| pass.high)),
            or_empty(found.map(|found| found.p_value)),
        ]
    };
    let [tasks, tasks_low, tasks_high, tasks_p] = functions("held-out tasks");
    let [code, code_low, code_high, code_p] = functions("HumanEval");
    [
        axes.setting.clone(),
        axes.policy.clone(),
        axes.parameter.clone().unwrap_or_default(),
        or_empty(axes.parameter_value),
        axes.vram_bytes
            .map_or_else(String::new, |bytes| bytes.to_string()),
        or_empty(axes.hot_threshold),
        axes.batch.to_string(),
        axes.context_tokens.to_string(),
        row.placement_error.clone().unwrap_or_default(),
        placed(|placed| placed.hot_neurons as f64),
        placed(|placed| placed.neuron_share),
        placed(|placed| placed.activation_share),
        placed(|placed| placed.load_share),
        placed(|placed| placed.gpu_bytes as f64),
        placed(|placed| placed.cpu_bytes as f64),
        sparsity.true_share.to_string(),
        or_empty(sparsity.predicted_share),
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
        or_empty(measured.measured_over_predicted),
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
    fn files_begin_with_their_first_columns_and_cells_are_quoted() {
        assert!(text(&[]).starts_with(BEGINNING));
        assert_eq!(quoted("a,\"b\"".to_owned()), "\"a,\"\"b\"\"\"");
        assert_eq!(quoted("plain".to_owned()), "plain");
    }
}
