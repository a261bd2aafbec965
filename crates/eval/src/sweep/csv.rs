//! A sweep as CSV: one line per row, for spreadsheets.

use super::{FunctionResults, PlacementSummary, PredictorQuality, SweepRow};
use crate::statistics::Interval;

/// First bytes of every such file.
pub const BEGINNING: &str = "setting,policy,parameter,";

/// The functions of a sweep, by their names in its rows.
const TASKS: &str = "held-out tasks";
const HUMANEVAL: &str = "HumanEval";

/// A column's name, and its cell in a row.
type Column = (&'static str, fn(&SweepRow) -> String);

const COLUMNS: &[Column] = &[
    ("setting", |row| row.axes.setting.clone()),
    ("policy", |row| row.axes.policy.clone()),
    ("parameter", |row| {
        row.axes.parameter.clone().unwrap_or_default()
    }),
    ("parameter_value", |row| or_empty(row.axes.parameter_value)),
    ("vram_bytes", |row| {
        row.axes
            .vram_bytes
            .map_or_else(String::new, |bytes| bytes.to_string())
    }),
    ("hot_threshold", |row| or_empty(row.axes.hot_threshold)),
    ("batch", |row| row.axes.batch.to_string()),
    ("context_tokens", |row| row.axes.context_tokens.to_string()),
    ("placement_error", |row| {
        row.placement_error.clone().unwrap_or_default()
    }),
    ("hot_neurons", |row| {
        placed(row, |placed| placed.hot_neurons as f64)
    }),
    ("hot_neuron_share", |row| {
        placed(row, |placed| placed.neuron_share)
    }),
    ("hot_activation_share", |row| {
        placed(row, |placed| placed.activation_share)
    }),
    ("gpu_load_share", |row| {
        placed(row, |placed| placed.load_share)
    }),
    ("gpu_bytes", |row| {
        placed(row, |placed| placed.gpu_bytes as f64)
    }),
    ("cpu_bytes", |row| {
        placed(row, |placed| placed.cpu_bytes as f64)
    }),
    ("true_sparsity", |row| row.sparsity.true_share.to_string()),
    ("predicted_sparsity", |row| {
        or_empty(row.sparsity.predicted_share)
    }),
    ("computed_share", |row| {
        row.sparsity.computed_share.to_string()
    }),
    ("relative_ffn_error", |row| {
        row.sparsity.relative_error.to_string()
    }),
    ("count_recall", |row| {
        predicted(row, |predictor| predictor.count_recall)
    }),
    ("contribution_recall", |row| {
        predicted(row, |predictor| predictor.contribution_recall)
    }),
    ("precision", |row| {
        predicted(row, |predictor| predictor.precision)
    }),
    ("predictor_time_share", |row| {
        predicted(row, |predictor| predictor.time_share)
    }),
    ("predictor_bytes_share", |row| {
        predicted(row, |predictor| predictor.bytes_share)
    }),
    ("measured_on", |row| row.speed.measured.device.clone()),
    ("placement_ran", |row| {
        row.speed.measured.placement_ran.to_string()
    }),
    ("emulated", |row| row.speed.measured.emulated.to_string()),
    ("disturbed", |row| row.speed.measured.disturbed.to_string()),
    ("first_token_milliseconds", |row| {
        row.speed
            .measured
            .first_token_milliseconds
            .median
            .to_string()
    }),
    ("decode_microseconds_median", |row| {
        row.speed.measured.decode_microseconds.median.to_string()
    }),
    ("decode_microseconds_p95", |row| {
        row.speed.measured.decode_microseconds.p95.to_string()
    }),
    ("decode_microseconds_p99", |row| {
        row.speed.measured.decode_microseconds.p99.to_string()
    }),
    ("tokens_per_second", |row| {
        row.speed.measured.tokens_per_second.median.to_string()
    }),
    ("tokens_per_second_least", |row| {
        row.speed.measured.tokens_per_second.least.to_string()
    }),
    ("tokens_per_second_most", |row| {
        row.speed.measured.tokens_per_second.most.to_string()
    }),
    ("bytes_per_token", |row| {
        row.speed.measured.bytes_per_token.to_string()
    }),
    ("bandwidth_share", |row| {
        row.speed.measured.bandwidth_share.to_string()
    }),
    ("measured_over_predicted", |row| {
        or_empty(row.speed.measured.measured_over_predicted)
    }),
    ("planned_for", |row| {
        row.speed
            .planned
            .as_ref()
            .map_or_else(String::new, |planned| planned.hardware.clone())
    }),
    ("planned_tokens_per_second_simulated", |row| {
        or_empty(
            row.speed
                .planned
                .as_ref()
                .map(|planned| planned.tokens_per_second),
        )
    }),
    ("perplexity", |row| row.quality.perplexity.to_string()),
    ("perplexity_rise", |row| {
        row.quality.perplexity_rise.value.to_string()
    }),
    ("perplexity_rise_low", |row| {
        row.quality.perplexity_rise.low.to_string()
    }),
    ("perplexity_rise_high", |row| {
        row.quality.perplexity_rise.high.to_string()
    }),
    ("kl_divergence_mean", |row| {
        row.quality.kl_divergence_mean.to_string()
    }),
    ("top1_agreement", |row| {
        row.quality.top1_agreement.to_string()
    }),
    ("tasks_pass_at_1", |row| {
        pass_at_1(row, TASKS, |pass| pass.value)
    }),
    ("tasks_pass_at_1_low", |row| {
        pass_at_1(row, TASKS, |pass| pass.low)
    }),
    ("tasks_pass_at_1_high", |row| {
        pass_at_1(row, TASKS, |pass| pass.high)
    }),
    ("tasks_p_value", |row| {
        or_empty(functions(row, TASKS).map(|found| found.p_value))
    }),
    ("humaneval_pass_at_1", |row| {
        pass_at_1(row, HUMANEVAL, |pass| pass.value)
    }),
    ("humaneval_pass_at_1_low", |row| {
        pass_at_1(row, HUMANEVAL, |pass| pass.low)
    }),
    ("humaneval_pass_at_1_high", |row| {
        pass_at_1(row, HUMANEVAL, |pass| pass.high)
    }),
    ("humaneval_p_value", |row| {
        or_empty(functions(row, HUMANEVAL).map(|found| found.p_value))
    }),
];

/// CSV document of `rows` with a header line.
pub fn text(rows: &[SweepRow]) -> String {
    let line = |cells: Vec<String>| cells.join(",") + "\n";
    let mut text = line(COLUMNS.iter().map(|(name, _)| (*name).to_owned()).collect());
    for row in rows {
        text += &line(COLUMNS.iter().map(|(_, cell)| quoted(cell(row))).collect());
    }
    text
}

/// `text` quoted if it contains a comma, quote or line break.
fn quoted(text: String) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text
    }
}

/// A figure, or an empty cell.
fn or_empty(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn placed(row: &SweepRow, figure: fn(&PlacementSummary) -> f64) -> String {
    or_empty(row.placement.as_ref().map(figure))
}

fn predicted(row: &SweepRow, figure: fn(&PredictorQuality) -> f64) -> String {
    or_empty(row.predictor.as_ref().map(figure))
}

fn functions<'a>(row: &'a SweepRow, name: &str) -> Option<&'a FunctionResults> {
    row.quality
        .functions
        .iter()
        .find(|found| found.name == name)
}

fn pass_at_1(row: &SweepRow, name: &str, figure: fn(&Interval) -> f64) -> String {
    or_empty(
        functions(row, name)
            .and_then(|found| found.pass_at_1.as_ref())
            .map(figure),
    )
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
