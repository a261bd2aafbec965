//! A sweep as a table, and as files: page, CSV and JSON.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, counted, write::write_file};
use powerinfer_eval::{
    format,
    sweep::{FunctionResults, MeasuredSpeed, SweepRow, comparisons, csv, document},
};
use powerinfer_report::sweep_page;

use crate::{
    hint::Advised,
    output::{Output, Table, percent},
    page_file::{begins_with, refuse_inside},
};

/// Files next to the page at `html`: CSV and JSON.
fn data_files(html: &Path) -> [PathBuf; 2] {
    ["csv", "json"].map(|kind| html.with_extension(kind))
}

/// Checks that `out`, the page at `html` and the files next to it are distinct, outside the bundle in `folder`, and replace
/// no foreign file.
pub(super) fn check_paths(html: Option<&Path>, out: &Path, folder: &Path) -> Result<()> {
    if resolved(out).starts_with(resolved(folder)) {
        bail!(Advised::new(
            format!("`{}` would be among the bundle's own files", out.display()),
            "name another with `--out`"
        ));
    }
    let Some(html) = html else {
        return Ok(());
    };
    refuse_inside(Some(html), folder)?;
    let [csv, json] = data_files(html);
    let others = [
        (html, vec![out]),
        (&csv, vec![out, html]),
        (&json, vec![out, html]),
    ];
    for (file, others) in others {
        if others.iter().any(|other| resolved(other) == resolved(file)) {
            bail!(Advised::new(
                format!(
                    "`--html {}` would write `{}`, which is another output",
                    html.display(),
                    file.display()
                ),
                "name another file"
            ));
        }
    }
    let beginnings = [(&csv, csv::BEGINNING), (&json, "{\n  \"rows\":")];
    for (file, beginning) in beginnings {
        if file.is_dir() {
            bail!(Advised::new(
                format!("`{}` is a folder", file.display()),
                "name another file with `--html`"
            ));
        }
        if file.exists() && !begins_with(file, beginning.as_bytes()) {
            bail!(Advised::new(
                format!(
                    "`{}` would be written next to the page, but exists and is not a file of a sweep",
                    file.display()
                ),
                "remove it, or name another file with `--html`"
            ));
        }
    }
    Ok(())
}

/// `path` without links and relative parts.
fn resolved(path: &Path) -> PathBuf {
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

/// Writes the page and the files next to it.
pub(super) fn write(html: &Path, out: &Path, rows: &[SweepRow], output: Output) -> Result<()> {
    let [csv, json] = data_files(html);
    write_file(&csv, csv::text(rows).as_bytes())?;
    let document = document(rows);
    let mut bytes = serde_json::to_vec_pretty(&document)?;
    bytes.push(b'\n');
    write_file(&json, &bytes)?;
    write_file(html, sweep_page(&document, &comparisons(rows))?.as_bytes())?;
    output.say(format!(
        "drawn in `{}`; the figures are in `{}` and `{}`, every point is a line of `{}`",
        html.display(),
        csv.display(),
        json.display(),
        out.display()
    ));
    Ok(())
}

/// pass@1 with its interval, and the number of unjudged functions.
fn format_pass(functions: &FunctionResults) -> String {
    let pass = functions
        .pass_at_1
        .map_or_else(|| "–".to_owned(), format::share);
    match functions.unjudged {
        0 => pass,
        unjudged => format!("{pass}, {unjudged} unjudged"),
    }
}

/// Measured throughput, with a star if the measurement was disturbed; none for an emulated device.
fn format_speed(measured: &MeasuredSpeed) -> String {
    let speed = format::figure(measured.tokens_per_second.median);
    match (measured.emulated, measured.disturbed) {
        (true, _) => "–".to_owned(),
        (false, true) => format!("{speed} *"),
        (false, false) => speed,
    }
}

/// Where placements ran.
fn describe_device(rows: &[SweepRow]) -> String {
    let mut ran = rows.iter().filter(|row| row.speed.measured.placement_ran);
    match ran.next() {
        None => "placements were not run: their speed is predicted, that of the CPU with all neurons is measured".to_owned(),
        Some(row) if row.speed.measured.device == "cpu" => {
            "the CPU computed both parts of each placement".to_owned()
        }
        Some(row) if row.speed.measured.emulated => {
            "placements ran on an emulated GPU, whose speed is not representative".to_owned()
        }
        Some(row) => format!("placements ran on {}", row.speed.measured.device),
    }
}

/// Budget or activation frequency of a row's placement.
fn format_target(row: &SweepRow) -> String {
    match (row.axes.vram_bytes, row.axes.hot_threshold) {
        (Some(bytes), _) => ByteSize(bytes).to_string(),
        (None, Some(share)) => format!("≥ {}", percent(share)),
        (None, None) => String::new(),
    }
}

/// Table with a line per row.
pub(super) fn table(rows: &[SweepRow]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let differs = |of: &dyn Fn(&SweepRow) -> usize| rows.iter().any(|row| of(row) != of(first));
    let batches = differs(&|row| row.axes.batch);
    let contexts = differs(&|row| row.axes.context_tokens);
    let functions: Vec<&str> = first
        .quality
        .functions
        .iter()
        .map(|one| &*one.name)
        .collect();
    let mut headings = vec![
        "policy",
        match first.axes.hot_threshold {
            Some(_) => "hot threshold",
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
        "tok/s measured",
        "P99 µs",
        "perplexity (95%)",
    ]);
    let passes: Vec<String> = functions
        .iter()
        .map(|name| format!("pass@1, {name}"))
        .collect();
    headings.extend(passes.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for row in rows {
        let mut cells = vec![row.axes.setting.clone(), format_target(row)];
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
                .map_or_else(none, |planned| format::figure(planned.tokens_per_second)),
            format_speed(measured),
            if measured.emulated {
                none()
            } else {
                format!("{:.0}", measured.decode_microseconds.p99)
            },
            format::rise(row.quality.perplexity_rise, row.quality.tokens),
        ]);
        let pass = row.quality.functions.iter();
        cells.extend(pass.map(format_pass));
        table.row(cells);
    }
    table.to_string()
}

/// Reports what the sample shows, and how it was measured.
pub(super) fn report(rows: &[SweepRow], out: &Path, output: Output) {
    for sentence in comparisons(rows) {
        output.say(sentence);
    }
    for row in rows {
        if let Some(placement_error) = &row.placement_error {
            output.say(format!(
                "{} within {}: {placement_error}",
                row.axes.setting,
                format_target(row)
            ));
        }
    }
    if let Some(row) = rows.first() {
        let measured = &row.speed.measured;
        let planned = row.speed.planned.as_ref();
        output.say(format!(
            "predicted: by the cost model, for {}; measured: {}, {}, after {} of prompt; {}; perplexity: rise over dense, 95% by the paired block bootstrap",
            planned.map_or("no machine", |planned| &planned.hardware),
            row.identity.processor,
            counted(measured.threads, "thread"),
            counted(measured.prompt_tokens, "token"),
            describe_device(rows)
        ));
    }
    if rows.iter().any(|row| row.speed.measured.disturbed) {
        output.say("* disturbed by other processes: speeds are too low and vary");
    }
    output.say(format!("every point is a line of `{}`", out.display()));
}
