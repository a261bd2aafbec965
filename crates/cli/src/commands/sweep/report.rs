//! What a sweep found, as a table, and as files beside the page.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, write::write_file};
use powerinfer_eval::{front, statistics::LEVEL};
use serde_json::{Value, json};

use super::{
    page,
    rows::{Functions, Interval, Row},
};
use crate::output::{Output, Table, percent};

/// The files beside the page at `html`: CSV and JSON.
fn beside(html: &Path) -> [PathBuf; 2] {
    ["csv", "json"].map(|kind| html.with_extension(kind))
}

/// Refuses a page whose files would be each other's, or the sweep's own, or among those of the bundle in `folder`.
pub(super) fn check_places(html: &Path, out: &Path, folder: &Path) -> Result<()> {
    for file in beside(html) {
        if file == html || file == out {
            bail!(
                "`--html {}` would put `{}` beside it, which is taken; name another file",
                html.display(),
                file.display()
            );
        }
        if file.is_dir() {
            bail!(
                "`{}` is a folder; name another file by `--html`",
                file.display()
            );
        }
    }
    if out.parent().is_some_and(|parent| parent == folder) {
        bail!(
            "`{}` would be among the bundle's own files; name another by `--out`",
            out.display()
        );
    }
    Ok(())
}

/// Writes the page, and the files beside it.
pub(super) fn write(html: &Path, rows: &[Row], output: Output) -> Result<()> {
    let [csv, json] = beside(html);
    write_file(&csv, csv_text(rows).as_bytes())?;
    let mut document = serde_json::to_vec_pretty(&document(rows))?;
    document.push(b'\n');
    write_file(&json, &document)?;
    write_file(html, page::html(rows).as_bytes())?;
    output.say(format!(
        "drawn in `{}`; the figures are in `{}` and `{}`",
        html.display(),
        csv.display(),
        json.display()
    ));
    Ok(())
}

/// Everything, for programs.
pub(super) fn document(rows: &[Row]) -> Value {
    let [measured, planned] = [Speeds::Measured, Speeds::Planned].map(|speeds| {
        let points = points(rows, speeds, |row| Some(row.quality.perplexity_rise.value));
        let front = front::front(&points.pairs());
        let knee = front::knee(&points.pairs(), &front).map(|place| points.rows[place].0);
        let front: Vec<usize> = front.iter().map(|place| points.rows[*place].0).collect();
        json!({ "front": front, "knee": knee })
    });
    json!({
        "rows": rows,
        "perplexity_against_measured_speed": measured,
        "perplexity_against_planned_speed": planned,
    })
}

/// Whose speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speeds {
    /// This machine's.
    Measured,
    /// Foreseen for the placement's.
    Planned,
}

/// Points of a picture: a row each, with a gain and a loss.
pub(super) struct Points {
    /// Places in the rows, gains and losses.
    pub(super) rows: Vec<(usize, f64, f64)>,
}

impl Points {
    pub(super) fn pairs(&self) -> Vec<(f64, f64)> {
        self.rows
            .iter()
            .map(|(_, gain, loss)| (*gain, *loss))
            .collect()
    }
}

/// The rows that have a speed and a `loss`; of a speed that several placements share one.
pub(super) fn points(rows: &[Row], speeds: Speeds, loss: impl Fn(&Row) -> Option<f64>) -> Points {
    let mut found: Vec<(usize, f64, f64)> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
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
                && (&other.level, other.batch, other.context_tokens)
                    == (&axes.level, axes.batch, axes.context_tokens)
        });
        if !is_known {
            found.push((index, speed, loss));
        }
    }
    Points { rows: found }
}

/// A column: its heading, whether it sorts as text, and what it says of a row.
pub(super) type Column = (&'static str, fn(&Row) -> String);

fn or_nothing(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// All figures, as they are.
const COLUMNS: [Column; 46] = [
    ("level", |row| row.axes.level.clone()),
    ("policy", |row| row.axes.policy.clone()),
    ("level_of", |row| {
        row.axes.level_of.clone().unwrap_or_default()
    }),
    ("level_value", |row| or_nothing(row.axes.level_value)),
    ("vram_bytes", |row| {
        row.axes
            .vram_bytes
            .map_or_else(String::new, |bytes| bytes.to_string())
    }),
    ("hot_threshold", |row| or_nothing(row.axes.hot_threshold)),
    ("batch", |row| row.axes.batch.to_string()),
    ("context_tokens", |row| row.axes.context_tokens.to_string()),
    ("trouble", |row| row.trouble.clone().unwrap_or_default()),
    ("hot_neurons", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.hot_neurons as f64))
    }),
    ("hot_neuron_share", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.neuron_share))
    }),
    ("hot_activation_share", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.activation_share))
    }),
    ("gpu_load_share", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.load_share))
    }),
    ("gpu_bytes", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.gpu_bytes as f64))
    }),
    ("cpu_bytes", |row| {
        or_nothing(row.placement.as_ref().map(|found| found.cpu_bytes as f64))
    }),
    ("true_sparsity", |row| row.sparsity.true_share.to_string()),
    ("predicted_sparsity", |row| {
        or_nothing(row.sparsity.predicted_share)
    }),
    ("computed_share", |row| {
        row.sparsity.computed_share.to_string()
    }),
    ("relative_ffn_error", |row| {
        row.sparsity.relative_error.to_string()
    }),
    ("count_recall", |row| {
        or_nothing(row.predictor.as_ref().map(|found| found.count_recall))
    }),
    ("contribution_recall", |row| {
        or_nothing(
            row.predictor
                .as_ref()
                .map(|found| found.contribution_recall),
        )
    }),
    ("precision", |row| {
        or_nothing(row.predictor.as_ref().map(|found| found.precision))
    }),
    ("predictor_time_share", |row| {
        or_nothing(row.predictor.as_ref().map(|found| found.time_share))
    }),
    ("predictor_bytes_share", |row| {
        or_nothing(row.predictor.as_ref().map(|found| found.bytes_share))
    }),
    ("measured_on", |row| row.speed.measured.device.clone()),
    ("placement_ran", |row| {
        row.speed.measured.placement_ran.to_string()
    }),
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
    ("bytes_per_token", |row| {
        row.speed.measured.bytes_per_token.to_string()
    }),
    ("bandwidth_share", |row| {
        row.speed.measured.bandwidth_share.to_string()
    }),
    ("measured_over_predicted", |row| {
        or_nothing(row.speed.measured.measured_over_predicted)
    }),
    ("planned_for", |row| {
        row.speed
            .planned
            .as_ref()
            .map_or_else(String::new, |found| found.hardware.clone())
    }),
    ("planned_tokens_per_second_simulated", |row| {
        or_nothing(
            row.speed
                .planned
                .as_ref()
                .map(|found| found.tokens_per_second),
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
    ("same_likeliest_token", |row| {
        row.quality.same_likeliest_token.to_string()
    }),
    ("pass_at_1", |row| {
        or_nothing(
            row.quality
                .functions
                .first()
                .map(|found| found.pass_at_1.value),
        )
    }),
    ("pass_at_1_low", |row| {
        or_nothing(
            row.quality
                .functions
                .first()
                .map(|found| found.pass_at_1.low),
        )
    }),
    ("pass_at_1_high", |row| {
        or_nothing(
            row.quality
                .functions
                .first()
                .map(|found| found.pass_at_1.high),
        )
    }),
    ("pass_at_1_p_value", |row| {
        or_nothing(row.quality.functions.first().map(|found| found.p_value))
    }),
];

/// All figures, a line a row.
fn csv_text(rows: &[Row]) -> String {
    let quoted = |text: String| match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    };
    let line = |cells: Vec<String>| cells.join(",") + "\n";
    let mut text = line(COLUMNS.map(|(name, _)| name.to_owned()).to_vec());
    for row in rows {
        text += &line(COLUMNS.map(|(_, cell)| quoted(cell(row))).to_vec());
    }
    text
}

/// A share with its interval.
pub(super) fn told(interval: Interval) -> String {
    let [value, low, high] = [interval.value, interval.low, interval.high];
    format!(
        "{} ({}–{})",
        percent(value),
        figure(100.0 * low),
        figure(100.0 * high)
    )
}

/// A rise with its interval, in percent.
pub(crate) fn told_rise(interval: Interval) -> String {
    let [value, low, high] =
        [interval.value, interval.low, interval.high].map(|share| 100.0 * share);
    format!("{value:+.2} % ({low:+.2} to {high:+.2})")
}

fn figure(value: f64) -> String {
    format!("{value:.1}")
}

/// A speed, of three digits or so.
pub(super) fn speed(tokens_per_second: f64) -> String {
    match tokens_per_second {
        speed if speed >= 100.0 => format!("{speed:.0}"),
        speed if speed >= 10.0 => format!("{speed:.1}"),
        speed => format!("{speed:.2}"),
    }
}

/// What is on the GPU, in a word.
pub(super) fn told_hot(row: &Row) -> String {
    match (row.axes.vram_bytes, row.axes.hot_threshold) {
        (Some(bytes), _) => ByteSize(bytes).to_string(),
        (None, Some(share)) => format!("≥ {}", percent(share)),
        (None, None) => String::new(),
    }
}

/// For people.
pub(super) fn table(rows: &[Row]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let differs = |of: &dyn Fn(&Row) -> usize| rows.iter().any(|row| of(row) != of(first));
    let batches = differs(&|row| row.axes.batch);
    let contexts = differs(&|row| row.axes.context_tokens);
    let functions: Vec<&str> = first
        .quality
        .functions
        .iter()
        .map(|one| &*one.name)
        .collect();
    let mut headings = vec![
        "level",
        match first.axes.hot_threshold {
            Some(_) => "hot if it fires",
            None => "VRAM",
        },
    ];
    if batches {
        headings.push("batch");
    }
    if contexts {
        headings.push("context");
    }
    headings.extend([
        "hot neurons",
        "computed",
        "tok/s foreseen",
        "tok/s here",
        "P99 µs",
        "perplexity (95 %)",
    ]);
    let passes: Vec<String> = functions
        .iter()
        .map(|name| format!("pass@1, {name}"))
        .collect();
    headings.extend(passes.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in rows {
        let mut cells = vec![row.axes.level.clone(), told_hot(row)];
        if batches {
            cells.push(row.axes.batch.to_string());
        }
        if contexts {
            cells.push(row.axes.context_tokens.to_string());
        }
        let measured = &row.speed.measured;
        let none = || "–".to_owned();
        cells.extend([
            row.placement
                .as_ref()
                .map_or_else(none, |found| percent(found.neuron_share)),
            percent(row.sparsity.computed_share),
            row.speed
                .planned
                .as_ref()
                .map_or_else(none, |planned| speed(planned.tokens_per_second)),
            match measured.emulated {
                true => none(),
                false => speed(measured.tokens_per_second.median),
            },
            match measured.emulated {
                true => none(),
                false => format!("{:.0}", measured.decode_microseconds.p99),
            },
            told_rise(row.quality.perplexity_rise),
        ]);
        let pass = row.quality.functions.iter();
        cells.extend(pass.map(|functions| told(functions.pass_at_1)));
        table.row(cells);
    }
    table.to_string()
}

/// A comparison with `dense` in a line.
pub(super) fn told_functions(level: &str, functions: &Functions) -> String {
    let Functions {
        name,
        items,
        lost,
        won,
        p_value,
        smallest_visible,
        difference,
        ..
    } = functions;
    let p = match *p_value < 0.001 {
        true => "p < 0.001".to_owned(),
        false => format!("p = {p_value:.3}"),
    };
    let verdict = match (*p_value < LEVEL, *smallest_visible <= 1.0) {
        (true, _) => format!("a difference (McNemar, exact, {p})"),
        (false, true) => format!(
            "no difference shown (McNemar, exact, {p}; no less than {:.1} points could have been)",
            100.0 * smallest_visible
        ),
        (false, false) => "so few items can show no difference".to_owned(),
    };
    format!(
        "{level} beside dense, {name}: {:+.1} points on {items}, {lost} lost and {won} won; {verdict}",
        100.0 * difference
    )
}

/// The rise of perplexity in a line.
pub(super) fn told_perplexity(row: &Row) -> String {
    let Interval { value, low, high } = row.quality.perplexity_rise;
    let verdict = match low > 0.0 || high < 0.0 {
        true => "a difference".to_owned(),
        false => format!(
            "no difference shown; one of {:.2} % could have been",
            100.0 * row.quality.smallest_visible_rise
        ),
    };
    format!(
        "{} beside dense, perplexity: {} on {} tokens; {verdict}",
        row.axes.level,
        told_rise(Interval { value, low, high }),
        row.quality.tokens
    )
}

/// Rows that are the first of their level and say something that `dense` does not.
pub(super) fn first_of_levels(rows: &[Row]) -> Vec<&Row> {
    let mut found: Vec<&Row> = Vec::new();
    for row in rows {
        let is_known = found.iter().any(|other| other.axes.level == row.axes.level);
        if !is_known && row.axes.level != "dense" {
            found.push(row);
        }
    }
    found
}

/// What there is to say beside the table.
pub(super) fn say(rows: &[Row], out: &Path, output: Output) {
    for row in first_of_levels(rows) {
        output.say(told_perplexity(row));
        for functions in &row.quality.functions {
            output.say(told_functions(&row.axes.level, functions));
        }
    }
    for row in rows {
        if let Some(trouble) = &row.trouble {
            output.say(format!(
                "{} within {}: {trouble}",
                row.axes.level,
                told_hot(row)
            ));
        }
    }
    if let Some(row) = rows.first() {
        let measured = &row.speed.measured;
        let ran = rows.iter().any(|row| row.speed.measured.placement_ran);
        let planned = row.speed.planned.as_ref();
        output.say(format!(
            "foreseen: by the cost model, for {}; here: {}, {} thread(s), after {} tokens of prompt{}; perplexity: rise over dense, 95 % by paired bootstrap",
            planned.map_or("no machine", |planned| &planned.hardware),
            row.identity.processor,
            measured.threads,
            measured.prompt_tokens,
            match ran {
                true => ", on what ran the placement",
                false => ", on the CPU, whatever is hot",
            }
        ));
    }
    output.say(format!("every point is a line of `{}`", out.display()));
}
