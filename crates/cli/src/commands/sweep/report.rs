//! What a sweep found, as a table, and as files beside the page.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, write::write_file};
use powerinfer_eval::{front, statistics::Paired};
use powerinfer_report::sweep_page;
use serde_json::{Value, json};

use super::{
    csv,
    rows::{Functions, Interval, Measured, Row},
};
use crate::{
    commands::eval_code::told_beside,
    output::{Output, Table, percent},
    page_file::refuse_inside,
};

/// The files beside the page at `html`: CSV and JSON.
fn beside(html: &Path) -> [PathBuf; 2] {
    ["csv", "json"].map(|kind| html.with_extension(kind))
}

/// Refuses files that would be each other's or the bundle's in `folder`, and such that would take the place of something
/// that is none of ours: what is found goes to `out`, the page to `html`, figures beside it.
pub(super) fn check_places(html: Option<&Path>, out: &Path, folder: &Path) -> Result<()> {
    if placed(out).starts_with(placed(folder)) {
        bail!(
            "`{}` would be among the bundle's own files; name another by `--out`",
            out.display()
        );
    }
    let Some(html) = html else {
        return Ok(());
    };
    refuse_inside(Some(html), folder)?;
    let [csv, json] = beside(html);
    let others = [
        (html, vec![out]),
        (&csv, vec![out, html]),
        (&json, vec![out, html]),
    ];
    for (file, others) in others {
        if others.iter().any(|other| placed(other) == placed(file)) {
            bail!(
                "`--html {}` would write `{}`, which is taken; name another file",
                html.display(),
                file.display()
            );
        }
    }
    let beginnings = [(&csv, csv::BEGINNING), (&json, "{\n  \"rows\":")];
    for (file, beginning) in beginnings {
        if file.is_dir() {
            bail!(
                "`{}` is a folder; name another file by `--html`",
                file.display()
            );
        }
        if file.exists() && !std::fs::read(file)?.starts_with(beginning.as_bytes()) {
            bail!(
                "`{}` would be written beside the page, and is there and none of ours; remove it, or name another file by `--html`",
                file.display()
            );
        }
    }
    Ok(())
}

/// Where `path` is, whatever way leads there.
fn placed(path: &Path) -> PathBuf {
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let own = path.canonicalize();
    own.unwrap_or_else(|_| {
        let parent = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
        parent.join(path.file_name().unwrap_or_default())
    })
}

/// Writes the page, and the files beside it.
pub(super) fn write(html: &Path, rows: &[Row], output: Output) -> Result<()> {
    let [csv, json] = beside(html);
    write_file(&csv, csv::text(rows).as_bytes())?;
    let document = document(rows);
    let mut bytes = serde_json::to_vec_pretty(&document)?;
    bytes.push(b'\n');
    write_file(&json, &bytes)?;
    write_file(html, sweep_page(&document, &comparisons(rows))?.as_bytes())?;
    output.say(format!(
        "drawn in `{}`; the figures are in `{}` and `{}`",
        html.display(),
        csv.display(),
        json.display()
    ));
    Ok(())
}

/// The rows with the batch and the context of the first: what can be compared.
fn alike(rows: &[Row]) -> Vec<usize> {
    let extent = |row: &Row| (row.axes.batch, row.axes.context_tokens);
    let is_alike = |place: &usize| extent(&rows[*place]) == extent(&rows[0]);
    (0..rows.len()).filter(is_alike).collect()
}

/// The JSON document of a sweep: all rows, and of each chart of a loss against speed the rows that are its points, its
/// Pareto front and its knee.
pub(super) fn document(rows: &[Row]) -> Value {
    let chart = |speeds, loss: &dyn Fn(&Row) -> Option<f64>| {
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
    let rise = |row: &Row| Some(row.quality.perplexity_rise.value);
    let failures = |row: &Row| Some(1.0 - row.quality.functions.first()?.pass_at_1?.value);
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
    /// This machine's.
    Measured,
    /// Prediction for the placement's.
    Planned,
}

/// The rows with the batch and the context of the first that have a speed and a `loss`, with both; of rows that share a
/// measured speed, because their placements were not run, the first.
fn points(
    rows: &[Row],
    speeds: Speeds,
    loss: &dyn Fn(&Row) -> Option<f64>,
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
                && (&other.level, other.batch, other.context_tokens)
                    == (&axes.level, axes.batch, axes.context_tokens)
        });
        if !is_known {
            found.push((index, speed, loss));
        }
    }
    found
}

/// A share with its interval.
fn told(interval: Interval) -> String {
    let [value, low, high] = [interval.value, interval.low, interval.high];
    format!(
        "{} ({}–{})",
        percent(value),
        figure(100.0 * low),
        figure(100.0 * high)
    )
}

/// pass@1 with its interval, and how many could not be judged.
fn told_pass(functions: &Functions) -> String {
    let told = functions.pass_at_1.map_or_else(|| "–".to_owned(), told);
    match functions.unjudged {
        0 => told,
        unjudged => format!("{told}, {unjudged} unjudged"),
    }
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
fn speed(tokens_per_second: f64) -> String {
    match tokens_per_second {
        speed if speed >= 100.0 => format!("{speed:.0}"),
        speed if speed >= 10.0 => format!("{speed:.1}"),
        speed => format!("{speed:.2}"),
    }
}

/// The speed that was measured, with a star where others used the machine; nothing where a device was emulated.
fn told_speed(measured: &Measured) -> String {
    match (measured.emulated, measured.disturbed) {
        (true, _) => "–".to_owned(),
        (false, true) => format!("{} *", speed(measured.tokens_per_second.median)),
        (false, false) => speed(measured.tokens_per_second.median),
    }
}

/// Where placements ran, in words.
fn told_run(rows: &[Row]) -> String {
    let mut ran = rows.iter().filter(|row| row.speed.measured.placement_ran);
    match ran.next() {
        None => "placements were not run: what they would bring is predicted, what the CPU does of all neurons is measured".to_owned(),
        Some(row) if row.speed.measured.device == "cpu" => {
            "the CPU computed each placement in its two halves".to_owned()
        }
        Some(row) if row.speed.measured.emulated => {
            "placements ran on an emulated GPU, whose speed says nothing".to_owned()
        }
        Some(row) => format!("placements ran on {}", row.speed.measured.device),
    }
}

/// What is on the GPU, in a word.
fn told_hot(row: &Row) -> String {
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
        "tok/s predicted",
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
            told_speed(measured),
            match measured.emulated {
                true => none(),
                false => format!("{:.0}", measured.decode_microseconds.p99),
            },
            told_rise(row.quality.perplexity_rise),
        ]);
        let pass = row.quality.functions.iter();
        cells.extend(pass.map(told_pass));
        table.row(cells);
    }
    table.to_string()
}

/// A comparison with `dense` in a line.
fn told_functions(level: &str, functions: &Functions) -> String {
    let paired = Paired {
        first_only: functions.lost,
        second_only: functions.won,
        items: functions.pairs,
    };
    let name = format!("{level}, {},", functions.name);
    told_beside(&name, "dense", paired)
}

/// Fewer tokens tell nothing of how they vary.
pub(crate) const FEW_TOKENS: u64 = 32;

/// The rise of perplexity in a line.
fn told_perplexity(row: &Row) -> String {
    let quality = &row.quality;
    let Interval { low, high, .. } = quality.perplexity_rise;
    let verdict = match () {
        () if quality.largest_logit_difference == 0.0 => "every logit is the same".to_owned(),
        () if quality.tokens < FEW_TOKENS => "too little text to tell".to_owned(),
        () if low > 0.0 || high < 0.0 => "a difference".to_owned(),
        () => format!(
            "no difference shown; one of {:.3} % could have been",
            100.0 * quality.smallest_visible_rise
        ),
    };
    format!(
        "{} beside dense, perplexity: {} on {} tokens; {verdict}",
        row.axes.level,
        told_rise(quality.perplexity_rise),
        quality.tokens
    )
}

/// Rows that are the first of their level and say something that `dense` does not.
fn first_of_levels(rows: &[Row]) -> Vec<&Row> {
    let mut found: Vec<&Row> = Vec::new();
    for row in rows {
        let is_known = found.iter().any(|other| other.axes.level == row.axes.level);
        if !is_known && row.axes.level != "dense" {
            found.push(row);
        }
    }
    found
}

/// What the sample shows of each level relative to `dense`, a sentence each.
fn comparisons(rows: &[Row]) -> Vec<String> {
    let of_row = |row: &Row| {
        let functions = row.quality.functions.iter();
        let functions = functions.map(|one| told_functions(&row.axes.level, one));
        [vec![told_perplexity(row)], functions.collect()].concat()
    };
    first_of_levels(rows).into_iter().flat_map(of_row).collect()
}

/// What there is to say beside the table.
pub(super) fn say(rows: &[Row], out: &Path, output: Output) {
    for sentence in comparisons(rows) {
        output.say(sentence);
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
        let planned = row.speed.planned.as_ref();
        output.say(format!(
            "predicted: by the cost model, for {}; here: {}, {} thread(s), after {} tokens of prompt; {}; perplexity: rise over dense, 95 % by paired bootstrap",
            planned.map_or("no machine", |planned| &planned.hardware),
            row.identity.processor,
            measured.threads,
            measured.prompt_tokens,
            told_run(rows)
        ));
    }
    if rows.iter().any(|row| row.speed.measured.disturbed) {
        output.say("* others used the machine meanwhile: speeds are too low and vary");
    }
    output.say(format!("every point is a line of `{}`", out.display()));
}
