//! A plan as one page: which neurons are where and what they carry, predicted times, both memories
//! against their budgets. The page needs nothing from elsewhere and runs no scripts.

use std::{fmt::Write, fs::File, io::Read, path::Path};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize, ModelIdentity,
    page::{self, escape, table},
    plan::{Device, LayerPlan, Plan},
    write::write_file,
};

use crate::{
    output::{Output, percent},
    plan_table::{PLACEMENTS, place, placements, predicted},
};

/// Refuses a page that would be among the files of the bundle in `folder`, which are replaced, or
/// that would take the place of something that is no page.
pub(crate) fn refuse_inside(page: Option<&Path>, folder: &Path) -> Result<()> {
    let Some(page) = page else {
        return Ok(());
    };
    let place = match page.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let absolute = |path: &Path| {
        path.canonicalize()
            .or_else(|_| std::path::absolute(path))
            .ok()
    };
    if let (Some(place), Some(folder)) = (absolute(place), absolute(folder))
        && place.starts_with(folder)
    {
        bail!(
            "`{}` would be among the bundle's own files; write the page elsewhere",
            page.display()
        );
    }
    if page.is_dir() {
        bail!("`{}` is a folder; name a file for the page", page.display());
    }
    if page.is_file() {
        let mut start = [0; BEGINNING.len()];
        let read = File::open(page).and_then(|mut file| file.read(&mut start));
        let is_ours = match read {
            Ok(0) => true,
            Ok(length) => BEGINNING.as_bytes().starts_with(&start[..length]),
            Err(_) => false,
        };
        if !is_ours {
            bail!(
                "`{}` is there and no page of ours; remove it, or name another file",
                page.display()
            );
        }
    }
    Ok(())
}

/// What every page of ours begins with.
const BEGINNING: &str = "<!doctype html>";

/// Writes the page for `plan` to `path`, where that is asked for.
pub(super) fn draw(
    path: Option<&Path>,
    model: &ModelIdentity,
    plan: &Plan,
    output: Output,
) -> Result<()> {
    if let Some(path) = path {
        write_file(path, html(model, plan).as_bytes())?;
        output.say(format!("drawn in `{}`", path.display()));
    }
    Ok(())
}

/// Width of a chart, in pixels at its natural size.
const WIDTH: f64 = 720.0;
/// Room on the left for names, and on the right for figures.
const SIDES: (f64, f64) = (64.0, 150.0);
/// Height of one layer's bar, and of the gap after it.
const BAR: (f64, f64) = (12.0, 5.0);

/// The page for `plan`.
pub(super) fn html(model: &ModelIdentity, plan: &Plan) -> String {
    let about = format!(
        "{} · model {} · for {}, {}",
        concat!("powerinfer ", env!("CARGO_PKG_VERSION")),
        model.fingerprint,
        plan.hardware.name,
        plan.hardware.description,
    );
    let mut page = page::begin(&format!("Placement of {}", model.name), &about);
    page += &facts(plan);
    neurons(&mut page, plan);
    times(&mut page, plan);
    memory(&mut page, plan);
    others(&mut page, plan);
    layers(&mut page, plan);
    page + page::END
}

/// What holds of the whole plan: a row a fact.
fn facts(plan: &Plan) -> String {
    let (totals, solver) = (&plan.totals, &plan.solver);
    let rows = [
        (
            "neurons on the GPU",
            format!("{} of {}", totals.hot_count, totals.neuron_count),
        ),
        ("activations they carry", percent(totals.hot_share)),
        (
            "predicted time of a token",
            format!(
                "{:.1} µs, {:.0} tokens/s",
                totals.microseconds_per_token,
                1e6 / totals.microseconds_per_token
            ),
        ),
        (
            "context",
            format!(
                "{} tokens, KV cache in {}",
                plan.budget.context_tokens, plan.budget.kv_cache
            ),
        ),
        ("head", plan.head.to_string()),
        ("objective", plan.objective.to_string()),
        (
            "solved by",
            format!("{}, gap {:.3} %", solver.backend, 100.0 * solver.gap),
        ),
    ];
    table(
        &["plan", ""],
        rows.map(|(name, value)| vec![name.to_owned(), value]),
    )
}

/// Opens a chart with `rows` bars.
fn begin_chart(page: &mut String, title: &str, about: &str, rows: usize) {
    let height = rows as f64 * (BAR.0 + BAR.1) + BAR.1;
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<h2>{title}</h2><p><small>{about}</small></p>\n\
         <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">"
    );
}

/// Top of a bar.
fn top(row: usize) -> f64 {
    BAR.1 + row as f64 * (BAR.0 + BAR.1)
}

/// Part of a bar: where it begins and how long it is, as shares of the room, and its colour.
struct Part {
    start: f64,
    length: f64,
    /// Top and height as shares of the bar.
    vertical: (f64, f64),
    fill: String,
    title: String,
}

fn bar(page: &mut String, row: usize, name: &str, figure: &str, parts: &[Part]) {
    let room = WIDTH - SIDES.0 - SIDES.1;
    let (top, height) = (top(row), BAR.0);
    let _ = write!(
        page,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        SIDES.0 - 6.0,
        top + height - 2.0,
        escape(name)
    );
    for part in parts.iter().filter(|part| part.length > 0.0) {
        let _ = write!(
            page,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}</title></rect>",
            SIDES.0 + room * part.start,
            top + height * part.vertical.0,
            (room * part.length).max(0.5),
            height * part.vertical.1,
            part.fill,
            escape(&part.title)
        );
    }
    let _ = write!(
        page,
        "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        WIDTH - SIDES.1 + 6.0,
        top + height - 2.0,
        escape(figure)
    );
}

fn neurons(page: &mut String, plan: &Plan) {
    begin_chart(
        page,
        "Neurons",
        "Hot neurons, on the GPU, in full colour; cold ones, on the CPU, pale. On the right the share of \
         the layer's activations that the hot ones carry.",
        plan.layers.len(),
    );
    for layer in &plan.layers {
        let share = layer.hot_count as f64 / layer.neuron_count.max(1) as f64;
        let part = |start, length, fill: &str, count: usize, what: &str, carry: f64| Part {
            start,
            length,
            vertical: (0.0, 1.0),
            fill: fill.to_owned(),
            title: format!(
                "layer {}: {count} {what} neurons carry {}",
                layer.layer,
                percent(carry)
            ),
        };
        let cold = layer.neuron_count - layer.hot_count;
        let parts = [
            part(
                0.0,
                share,
                "var(--mark)",
                layer.hot_count,
                "hot",
                layer.hot_share,
            ),
            part(
                share,
                1.0 - share,
                "var(--soft)",
                cold,
                "cold",
                1.0 - layer.hot_share,
            ),
        ];
        let figure = format!("{} carry {}", layer.hot_count, percent(layer.hot_share));
        bar(page, layer.layer, &layer.layer.to_string(), &figure, &parts);
    }
    page.push_str("</svg>\n");
}

fn times(page: &mut String, plan: &Plan) {
    begin_chart(
        page,
        "Predicted time",
        "Of each layer, for one token: above the GPU, in the middle the CPU, below what handing work over \
         costs. On the right the time of the layer: less than the sum where both work at once.",
        plan.layers.len(),
    );
    let longest = |layer: &LayerPlan| {
        let sides = [layer.gpu_microseconds, layer.cpu_microseconds];
        sides.into_iter().fold(layer.sync_microseconds, f64::max)
    };
    let most = plan.layers.iter().map(longest).fold(1e-9, f64::max);
    for layer in &plan.layers {
        let part = |place: f64, time: f64, fill: &str, what: &str| Part {
            start: 0.0,
            length: time / most,
            vertical: (place / 3.0, 1.0 / 3.0),
            fill: fill.to_owned(),
            title: format!("layer {}: {what} {time:.1} µs", layer.layer),
        };
        let parts = [
            part(0.0, layer.gpu_microseconds, "var(--mark)", "GPU"),
            part(1.0, layer.cpu_microseconds, "var(--warm)", "CPU"),
            part(2.0, layer.sync_microseconds, "var(--ink)", "handing over"),
        ];
        let figure = format!("{:.1} µs", layer.microseconds);
        bar(page, layer.layer, &layer.layer.to_string(), &figure, &parts);
    }
    page.push_str("</svg>\n");
}

/// How much paler each use of memory is than the one before it.
const PALER: f64 = 0.72;

fn memory(page: &mut String, plan: &Plan) {
    let devices = [Device::Gpu, Device::Cpu];
    begin_chart(
        page,
        "Memory",
        "What is used, of the budget, in the order of the table below; the frame is the budget.",
        devices.len(),
    );
    for (row, device) in devices.into_iter().enumerate() {
        let (used, budget) = (plan.totals.bytes(device), plan.budget.bytes(device));
        let all = used.max(budget).max(1) as f64;
        let colour = match device {
            Device::Gpu => "var(--mark)",
            Device::Cpu => "var(--warm)",
        };
        let mut parts = vec![Part {
            start: 0.0,
            length: budget as f64 / all,
            vertical: (0.0, 1.0),
            fill: "var(--faint)".to_owned(),
            title: format!("{device}: {} may be used", ByteSize(budget)),
        }];
        let (mut start, mut strength) = (0.0, 100.0);
        for line in plan.lines.iter().filter(|line| line.device == device) {
            let length = line.bytes as f64 / all;
            parts.push(Part {
                start,
                length,
                vertical: (0.0, 1.0),
                fill: format!("color-mix(in srgb,{colour} {strength:.0}%,var(--paper))"),
                title: format!("{device}: {}, {}", line.name, ByteSize(line.bytes)),
            });
            (start, strength) = (start + length, strength * PALER);
        }
        let figure = format!("{} of {}", ByteSize(used), ByteSize(budget));
        bar(page, row, &device.to_string(), &figure, &parts);
    }
    page.push_str("</svg>\n");
    let share = |bytes: u64, device| match plan.budget.bytes(device) {
        0 => "–".to_owned(),
        budget => percent(bytes as f64 / budget as f64),
    };
    let row = |name: String, place_name: String, device: Device, bytes: u64| {
        vec![
            name,
            place_name,
            ByteSize(bytes).to_string(),
            share(bytes, device),
        ]
    };
    let lines = plan.lines.iter();
    let lines = lines.map(|line| {
        row(
            line.name.clone(),
            place(plan, line),
            line.device,
            line.bytes,
        )
    });
    let totals = devices.map(|device| {
        let name = format!("total, of {}", ByteSize(plan.budget.bytes(device)));
        row(name, device.to_string(), device, plan.totals.bytes(device))
    });
    *page += &table(
        &["memory", "where", "bytes", "of the budget"],
        lines.chain(totals),
    );
}

/// Other ways of placing, and what else is predicted.
fn others(page: &mut String, plan: &Plan) {
    let Some(forecast) = &plan.forecast else {
        return;
    };
    let own = plan.totals.microseconds_per_token;
    let baselines = forecast.baselines.iter();
    let times = baselines.map(|one| (one.name.as_str(), one.microseconds_per_token));
    let all: Vec<(&str, f64)> = [("this plan", own)].into_iter().chain(times).collect();
    let most = all.iter().map(|(_, time)| *time).fold(1e-9, f64::max);
    begin_chart(
        page,
        "Other placements",
        "Predicted time of a token, by the same arithmetic and within the same budget; the first is this \
         plan, the others are named in the table below.",
        all.len(),
    );
    for (row, (name, time)) in all.iter().enumerate() {
        let part = Part {
            start: 0.0,
            length: time / most,
            vertical: (0.0, 1.0),
            fill: if row == 0 {
                "var(--mark)"
            } else {
                "var(--soft)"
            }
            .to_owned(),
            title: format!("{name}: {time:.1} µs"),
        };
        bar(
            page,
            row,
            &row.to_string(),
            &format!("{time:.1} µs"),
            &[part],
        );
    }
    page.push_str("</svg>\n");
    *page += &table(&PLACEMENTS, placements(plan, forecast));
    for sentence in predicted(plan, forecast) {
        let _ = writeln!(page, "<p>{}</p>", escape(&sentence));
    }
}

/// A column of the table of layers.
type Column = (&'static str, fn(&LayerPlan) -> String);

const COLUMNS: [Column; 15] = [
    ("layer", |layer| layer.layer.to_string()),
    ("policy", |layer| layer.policy.to_string()),
    ("hot neurons", |layer| {
        format!("{}/{}", layer.hot_count, layer.neuron_count)
    }),
    ("carry", |layer| percent(layer.hot_share)),
    ("attention", |layer| layer.attention.to_string()),
    ("KV cache", |layer| layer.kv.to_string()),
    ("predictor", |layer| {
        let device = layer.predictor;
        device.map_or_else(|| "–".to_owned(), |device| device.to_string())
    }),
    ("on GPU", |layer| ByteSize(layer.gpu_bytes).to_string()),
    ("on CPU", |layer| ByteSize(layer.cpu_bytes).to_string()),
    ("GPU µs", |layer| format!("{:.1}", layer.gpu_microseconds)),
    ("CPU µs", |layer| format!("{:.1}", layer.cpu_microseconds)),
    ("sync µs", |layer| {
        format!("{:.1}", layer.sync_microseconds)
    }),
    ("layer µs", |layer| format!("{:.1}", layer.microseconds)),
    ("waits for", |layer| {
        let limit = layer.limit;
        limit.map_or_else(|| "–".to_owned(), |limit| limit.to_string())
    }),
    ("GPU", |layer| layer.gpu.to_string()),
];

fn layers(page: &mut String, plan: &Plan) {
    page.push_str("<h2>Layers</h2>");
    let rows = plan.layers.iter();
    *page += &table(
        &COLUMNS.map(|(heading, _)| heading),
        rows.map(|layer| COLUMNS.map(|(_, cell)| cell(layer)).to_vec()),
    );
    page.push_str("<h2>Policies</h2>");
    for layer in &plan.layers {
        let _ = writeln!(
            page,
            "<p>layer {}: {}; {}</p>",
            layer.layer,
            layer.policy,
            escape(&layer.reason)
        );
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{Digest, plan::Policy};

    use super::*;

    #[test]
    fn the_page_says_the_same_every_time_and_no_name_breaks_out() {
        let mut plan = Plan::unplaced(3, 8, Policy::Exact, 16);
        plan.layers[1].reason = "<script>".to_owned();
        plan.layers[1].hot_count = 3;
        plan.hardware.name = "\"><img>".to_owned();
        let model = ModelIdentity {
            name: "a<b".to_owned(),
            fingerprint: Digest::of(b"m"),
        };
        let page = html(&model, &plan);
        assert_eq!(page, html(&model, &plan));
        for evil in ["<script", "<img", "a<b", "NaN", "http"] {
            assert!(!page.contains(evil), "{evil}");
        }
        assert!(
            page.contains("layer 1: 3 hot neurons carry 0.0 %"),
            "{page}"
        );
        assert!(page.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn a_page_is_not_drawn_into_a_bundle() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("bundle");
        let inside = bundle.join("page.html");
        for there in [false, true] {
            if there {
                std::fs::create_dir(&bundle).unwrap();
            }
            refuse_inside(Some(&inside), &bundle).unwrap_err();
            refuse_inside(Some(&folder.path().join("page.html")), &bundle).unwrap();
        }
        refuse_inside(None, &bundle).unwrap();
        refuse_inside(Some(&bundle.join("deeper/page.html")), &bundle).unwrap_err();
        let file = folder.path().join("page.html");
        for (content, is_good) in [("", true), ("<!doctype html>\n<html>", true), ("{}", false)] {
            std::fs::write(&file, content).unwrap();
            assert_eq!(
                refuse_inside(Some(&file), &bundle).is_ok(),
                is_good,
                "{content}"
            );
        }
        refuse_inside(Some(folder.path()), &bundle).unwrap_err();
    }
}
