//! The rows of a sweep as one document, and what they show in sentences.

use serde_json::{Value, json};

use super::{FunctionResults, SweepRow};
use crate::{
    MIN_INTERVAL_TOKENS, format, front,
    statistics::{Interval, Paired},
};

/// Indices of the rows with the batch and the context of the first.
fn alike(rows: &[SweepRow]) -> Vec<usize> {
    let shape = |row: &SweepRow| (row.axes.batch, row.axes.context_tokens);
    let is_alike = |place: &usize| shape(&rows[*place]) == shape(&rows[0]);
    (0..rows.len()).filter(is_alike).collect()
}

/// JSON document of a sweep: all rows, and for each chart of a loss against speed the indices of the rows that are its
/// points, its Pareto front and its knee.
pub fn document(rows: &[SweepRow]) -> Value {
    let chart = |speeds, loss: &dyn Fn(&SweepRow) -> Option<f64>| {
        let points = points(rows, speeds, loss);
        let pairs: Vec<(f64, f64)> = points
            .iter()
            .map(|(_, gain, loss)| (*gain, *loss))
            .collect();
        let front = front::front(&pairs);
        let knee = front::knee(&pairs, &front).map(|place| points[place].0);
        let front: Vec<usize> = front.iter().map(|place| points[*place].0).collect();
        let points: Vec<usize> = points.iter().map(|(row, ..)| *row).collect();
        json!({ "points": points, "front": front, "knee": knee })
    };
    let rise = |row: &SweepRow| Some(row.quality.perplexity_rise.value);
    let failures = |row: &SweepRow| Some(1.0 - row.quality.functions.first()?.pass_at_1?.value);
    json!({
        "rows": rows,
        "perplexity_against_measured_speed": chart(Speeds::Measured, &rise),
        "perplexity_against_planned_speed": chart(Speeds::Planned, &rise),
        "failures_against_measured_speed": chart(Speeds::Measured, &failures),
    })
}

/// Which speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speeds {
    /// Measured on this machine.
    Measured,
    /// The cost model's estimate for the placement.
    Planned,
}

/// Index, speed and loss of the rows with the batch and the context of the first that have both; of rows that share a
/// measurement, because their placements were not run, the first.
fn points(
    rows: &[SweepRow],
    speeds: Speeds,
    loss: &dyn Fn(&SweepRow) -> Option<f64>,
) -> Vec<(usize, f64, f64)> {
    let mut found: Vec<(usize, f64, f64)> = Vec::new();
    for index in alike(rows) {
        let row = &rows[index];
        let speed = match speeds {
            Speeds::Measured if row.speed.measured.emulated => None,
            Speeds::Measured => Some(row.speed.measured.tokens_per_second.median),
            Speeds::Planned => row
                .speed
                .planned
                .as_ref()
                .map(|planned| planned.tokens_per_second),
        };
        let (Some(speed), Some(loss)) = (speed, loss(row)) else {
            continue;
        };
        let is_known = found.iter().any(|(other, gain, _)| {
            let other = &rows[*other].axes;
            let axes = &row.axes;
            speeds == Speeds::Measured
                && *gain == speed
                && (&other.setting, other.batch, other.context_tokens)
                    == (&axes.setting, axes.batch, axes.context_tokens)
        });
        if !is_known {
            found.push((index, speed, loss));
        }
    }
    found
}

/// Comparison of functions with dense's, in one line.
fn describe_functions(setting: &str, functions: &FunctionResults) -> String {
    let paired = Paired {
        first_only: functions.lost,
        second_only: functions.won,
        items: functions.pairs,
    };
    let name = format!("{setting}, {},", functions.name);
    format::paired(&name, "dense", paired)
}

/// Rise of perplexity over `dense`, in one line.
fn describe_perplexity(row: &SweepRow) -> String {
    let quality = &row.quality;
    let Interval { low, high, .. } = quality.perplexity_rise;
    let verdict = match () {
        () if quality.largest_logit_difference == 0.0 => "every logit is the same".to_owned(),
        () if quality.tokens < MIN_INTERVAL_TOKENS => "too little text for an interval".to_owned(),
        () if low > 0.0 || high < 0.0 => "a difference".to_owned(),
        () => format!(
            "no difference shown; minimum detectable effect {:.3}%",
            100.0 * quality.minimum_detectable_rise
        ),
    };
    format!(
        "{} relative to dense, perplexity: {} on {} tokens; {verdict}",
        row.axes.setting,
        format::rise(quality.perplexity_rise, quality.tokens),
        quality.tokens
    )
}

/// First row of every policy setting but `dense`.
fn first_of_settings(rows: &[SweepRow]) -> Vec<&SweepRow> {
    let mut found: Vec<&SweepRow> = Vec::new();
    for row in rows {
        let is_known = found
            .iter()
            .any(|other| other.axes.setting == row.axes.setting);
        if !is_known && row.axes.setting != "dense" {
            found.push(row);
        }
    }
    found
}

/// Results of each policy setting relative to `dense`, one sentence per comparison.
pub fn comparisons(rows: &[SweepRow]) -> Vec<String> {
    let of_row = |row: &SweepRow| {
        let functions = row.quality.functions.iter();
        let functions = functions.map(|one| describe_functions(&row.axes.setting, one));
        [vec![describe_perplexity(row)], functions.collect()].concat()
    };
    first_of_settings(rows)
        .into_iter()
        .flat_map(of_row)
        .collect()
}
