//! What a sweep found, as one page that needs nothing from elsewhere: what trades for what, axis by axis, layer by layer,
//! and every figure.

use std::fmt::Write;

use powerinfer_artifact::page::{self, escape};
use powerinfer_eval::{front, statistics::SIGNIFICANCE};

use super::{
    charts::{self, Axis, MapRow, Mark, Plot, Scale, Series},
    report::{
        Speeds, alike, first_of_levels, points, speed, told_functions, told_hot, told_pass,
        told_perplexity, told_rise, told_run,
    },
    rows::Row,
    sortable,
};
use crate::output::percent;

/// Colours and sizes of pictures, in light and in dark.
const STYLE: &str = "<style>\
:root{--c0:#2563eb;--c1:#d9480f;--c2:#2f9e44;--c3:#9c36b5;--c4:#b08900;--c5:#0c8599}\
@media(prefers-color-scheme:dark){:root{--c0:#7aa2ff;--c1:#ff9a5c;--c2:#69db7c;--c3:#e599f7;--c4:#ffd43b;--c5:#66d9e8}}\
.c0{--own:var(--c0)}.c1{--own:var(--c1)}.c2{--own:var(--c2)}.c3{--own:var(--c3)}.c4{--own:var(--c4)}.c5{--own:var(--c5)}\
figure.plot{margin:.6em 0 1.4em;max-width:640px}figcaption{font-size:.9em;padding-left:1em}\
.key{display:inline-block;margin-right:1.2em}.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;background:var(--own);margin-right:.4em}.square{border-radius:0}\
svg .mark{fill:var(--own);stroke:var(--paper);stroke-width:1}svg .line{fill:none;stroke:var(--own);stroke-width:1.8}\
svg .bar{stroke:var(--own);stroke-width:1.5;opacity:.6}svg .grid{stroke:var(--faint)}svg .front{fill:none;stroke:var(--ink);stroke-width:1.3;stroke-dasharray:5 4;opacity:.7}\
svg circle.knee{fill:none;stroke:var(--ink);stroke-width:1.6}svg text.knee{font-weight:600}svg text.name{font-style:italic}svg .cell{stroke:var(--faint);stroke-width:.5}svg text.figure{font-size:11px;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}\
body{max-width:1180px}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:0 2em}\
@media(max-width:600px){figure.plot svg text{font-size:14px}}\
th button{all:unset;cursor:pointer;font-weight:inherit}th button:focus-visible{outline:2px solid var(--mark)}\
th[aria-sort=ascending] button::after{content:' ▲'}th[aria-sort=descending] button::after{content:' ▼'}\
</style>\n";

/// The page for `rows`.
pub(super) fn html(rows: &[Row]) -> String {
    let Some(first) = rows.first() else {
        return page::begin("Sweep", "no point was measured") + page::END;
    };
    let identity = &first.identity;
    let about = format!(
        "{} · model {} · bundle {} · {} · {} tokens scored, seed {}",
        identity.tool,
        identity.fingerprint,
        identity.bundle,
        identity.quant,
        first.quality.tokens,
        identity.seed
    );
    let mut page = page::begin(&format!("Sweep of {}", identity.model), &about);
    page += STYLE;
    in_short(&mut page, rows);
    fronts(&mut page, rows);
    axes(&mut page, rows);
    layers(&mut page, rows);
    statistics(&mut page, rows);
    sortable::figures(&mut page, rows);
    page + sortable::SORTING + page::END
}

/// Levels, in the order in which they were asked for, whose places are their colours.
fn levels(rows: &[Row]) -> Vec<&str> {
    let mut levels: Vec<&str> = Vec::new();
    for row in rows {
        if !levels.contains(&&*row.axes.level) {
            levels.push(&row.axes.level);
        }
    }
    levels
}

/// What there is to say before anything is drawn, of the rows with the batch and the context of the first.
fn in_short(page: &mut String, rows: &[Row]) {
    let alike: Vec<&Row> = alike(rows).into_iter().map(|place| &rows[place]).collect();
    let measured = |row: &&&Row| row.speed.measured.tokens_per_second.median;
    let mut lines = Vec::new();
    let is_allowed = |row: &&&Row| {
        let mut losses = row.quality.functions.iter();
        let is_lost = losses.any(|one| one.p_value < SIGNIFICANCE && one.difference < 0.0);
        row.quality.perplexity_rise.high <= 0.01 && !is_lost
    };
    let real = alike.iter().filter(|row| !row.speed.measured.emulated);
    let best = real
        .filter(is_allowed)
        .max_by(|a, b| measured(a).total_cmp(&measured(b)));
    let dense = alike.iter().find(|row| row.axes.level == "dense");
    if let Some(best) = best {
        let times = dense.map_or_else(String::new, |dense| {
            format!(", {:.2} times dense", measured(&best) / measured(&dense))
        });
        let range = best.speed.measured.tokens_per_second;
        lines.push(format!(
            "Quickest here within 1 % of perplexity and without a loss of pass@1 that the sample shows: {}, {} tokens/s (repeats {}–{}){times}, {} of the FFN neurons computed, perplexity {}.",
            best.axes.level,
            speed(range.median),
            speed(range.least),
            speed(range.most),
            percent(best.sparsity.computed_share),
            told_rise(best.quality.perplexity_rise),
        ));
    }
    let planned = |row: &&&Row| {
        row.speed
            .planned
            .as_ref()
            .map_or(0.0, |one| one.tokens_per_second)
    };
    let best = alike
        .iter()
        .filter(is_allowed)
        .max_by(|a, b| planned(a).total_cmp(&planned(b)));
    if let Some((best, found)) = best.and_then(|row| Some((row, row.speed.planned.as_ref()?))) {
        lines.push(format!(
            "The same on {}, predicted by the cost model: {} with {} on the GPU, {} tokens/s (simulated).",
            found.hardware,
            best.axes.level,
            told_hot(best),
            speed(found.tokens_per_second)
        ));
    }
    let first = &rows[0];
    lines.push(format!(
        "Measured on {}, {}, {} thread(s), a batch of {} at {} tokens; {}.",
        first.identity.processor,
        first.identity.instruction_set,
        first.speed.measured.threads,
        first.axes.batch,
        first.axes.context_tokens,
        told_run(rows)
    ));
    if rows.iter().any(|row| row.speed.measured.disturbed) {
        lines.push(
            "Others used the machine meanwhile (rows with a star): speeds are too low and vary."
                .to_owned(),
        );
    }
    for line in lines {
        let _ = writeln!(page, "<p>{}</p>", escape(&line));
    }
}

/// All that is said of a point.
fn title(row: &Row) -> String {
    let mut text = format!("{}, {} on the GPU", row.axes.level, told_hot(row));
    if row.axes.batch > 1 {
        text += &format!(", {} at once", row.axes.batch);
    }
    text += &format!(
        ", context {}; {} computed, perplexity {}",
        row.axes.context_tokens,
        percent(row.sparsity.computed_share),
        told_rise(row.quality.perplexity_rise)
    );
    for functions in &row.quality.functions {
        text += &format!(", pass@1 {}", told_pass(functions));
    }
    if let Some(planned) = &row.speed.planned {
        text += &format!(", {} tokens/s predicted", speed(planned.tokens_per_second));
    }
    let measured = &row.speed.measured;
    match measured.emulated {
        true => text + ", on an emulated GPU",
        false => {
            let found = measured.tokens_per_second;
            let [median, least, most] = [found.median, found.least, found.most].map(speed);
            text + &format!(
                ", {median} tokens/s on {} ({least}–{most})",
                measured.device
            )
        }
    }
}

fn whole(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{:.1}M", value / 1e6),
        size if size >= 1e4 => format!("{:.0}k", value / 1e3),
        size if size >= 10.0 || size == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

fn short_percent(share: f64) -> String {
    let value = 100.0 * share;
    match value.abs() {
        size if size < 0.05 => "0 %".to_owned(),
        size if size < 1.0 => format!("{value:.1} %"),
        _ => format!("{value:.0} %"),
    }
}

fn axis(label: impl Into<String>, scale: Scale, figure: fn(f64) -> String, holds: &[f64]) -> Axis {
    Axis {
        label: label.into(),
        scale,
        figure,
        holds: holds.to_vec(),
    }
}

/// What is lost, of a row: the figure, its interval.
type Loss = fn(&Row) -> Option<(f64, (f64, f64))>;

fn rise(row: &Row) -> Option<(f64, (f64, f64))> {
    let found = row.quality.perplexity_rise;
    Some((found.value, (found.low, found.high)))
}

/// The share of the first kind of functions that did not pass.
fn failed(row: &Row) -> Option<(f64, (f64, f64))> {
    let found = row.quality.functions.first()?.pass_at_1?;
    Some((1.0 - found.value, (1.0 - found.high, 1.0 - found.low)))
}

/// Quality against speed.
fn fronts(page: &mut String, rows: &[Row]) {
    page.push_str(
        "<h2>What speed costs</h2><p><small>Each point is a row of the table below; the dashed line joins those that no other beats in both ways, \
         and the ring marks its knee, where more speed begins to cost more. Whiskers are intervals of 95 %, across and the repeats' least and most speed along; all \
         points have the batch and the context of the first row.</small></p>\n<div class=\"plots\">\n",
    );
    let planned = rows.iter().find_map(|row| row.speed.planned.as_ref());
    let hardware = planned.map_or("", |planned| &planned.hardware);
    let predicted = format!("tokens/s on {hardware}, simulated");
    let here = "tokens/s on this machine, measured".to_owned();
    let perplexity = axis(
        "rise of perplexity",
        Scale::Bent,
        short_percent,
        &[0.0, 0.01],
    );
    let tests = axis("functions that fail", Scale::Even, short_percent, &[]);
    let pictures: [(Speeds, &String, Axis, Loss); 3] = [
        (Speeds::Planned, &predicted, perplexity, rise),
        (
            Speeds::Measured,
            &here,
            axis(
                "rise of perplexity",
                Scale::Bent,
                short_percent,
                &[0.0, 0.01],
            ),
            rise,
        ),
        (Speeds::Measured, &here, tests, failed),
    ];
    for (speeds, label, y, loss) in pictures {
        let found = points(rows, speeds, |row| loss(row).map(|(value, _)| value));
        if found.rows.is_empty() {
            continue;
        }
        let pairs = found.pairs();
        let front = front::front(&pairs);
        let knee = front::knee(&pairs, &front).map(|place| {
            let row = &rows[found.rows[place].0];
            (
                pairs[place].0,
                pairs[place].1,
                format!("knee: {}", row.axes.level),
            )
        });
        let series = levels(rows)
            .into_iter()
            .enumerate()
            .map(|(colour, level)| Series {
                name: level.to_owned(),
                colour,
                is_line: false,
                marks: found
                    .rows
                    .iter()
                    .filter(|(row, ..)| rows[*row].axes.level == level)
                    .map(|(row, x, y)| Mark {
                        x: *x,
                        y: *y,
                        interval: loss(&rows[*row]).map(|(_, interval)| interval),
                        range: (speeds == Speeds::Measured).then(|| {
                            let found = rows[*row].speed.measured.tokens_per_second;
                            (found.least, found.most)
                        }),
                        title: title(&rows[*row]),
                    })
                    .collect(),
            });
        Plot {
            title: format!("{} against {label}", y.label),
            x: axis(label, Scale::Even, whole, &[0.0]),
            y,
            series: series.collect(),
            front: front.iter().map(|place| pairs[*place]).collect(),
            knee,
        }
        .draw(page);
    }
    page.push_str("</div>\n");
}

/// A line for each level: of the rows that are alike but for what `x` says, from its lowest on.
fn lines(
    rows: &[Row],
    x: impl Fn(&Row) -> Option<f64>,
    y: impl Fn(&Row) -> Option<f64>,
    alike: impl Fn(&Row) -> bool,
) -> Vec<Series> {
    let series = levels(rows).into_iter().enumerate().map(|(colour, level)| {
        let of_level = rows
            .iter()
            .filter(|row| row.axes.level == level && alike(row));
        let mut marks: Vec<Mark> = of_level
            .filter_map(|row| {
                Some(Mark {
                    x: x(row)?,
                    y: y(row)?,
                    interval: None,
                    range: None,
                    title: title(row),
                })
            })
            .collect();
        marks.sort_by(|a, b| a.x.total_cmp(&b.x));
        marks.dedup_by(|a, b| a.x == b.x);
        Series {
            name: level.to_owned(),
            colour,
            marks,
            is_line: true,
        }
    });
    series.filter(|series| !series.marks.is_empty()).collect()
}

/// Whether an axis has more than one figure.
fn varies(rows: &[Row], x: impl Fn(&Row) -> Option<f64>) -> bool {
    let mut found = rows.iter().filter_map(x);
    let first = found.next();
    found.any(|other| Some(other) != first)
}

/// Curves along each axis of the grid.
fn axes(page: &mut String, rows: &[Row]) {
    page.push_str("<h2>Along each axis</h2>\n<div class=\"plots\">\n");
    let (batch, context) = (rows[0].axes.batch, rows[0].axes.context_tokens);
    let planned = |row: &Row| row.speed.planned.as_ref().map(|one| one.tokens_per_second);
    let measured = |row: &Row| {
        let speed = &row.speed.measured;
        (!speed.emulated).then_some(speed.tokens_per_second.median)
    };
    let same_extent = |row: &Row| (row.axes.batch, row.axes.context_tokens) == (batch, context);
    let mut picture = |title: &str, x: Axis, y: Axis, series: Vec<Series>| {
        if series.is_empty() {
            return;
        }
        Plot {
            title: title.to_owned(),
            x,
            y,
            series,
            front: Vec::new(),
            knee: None,
        }
        .draw(page);
    };
    let speeds = |label: &str| axis(label, Scale::Even, whole, &[0.0]);
    let budget = |row: &Row| row.axes.vram_bytes.map(|bytes| bytes as f64);
    if varies(rows, budget) {
        let most = rows.iter().filter_map(budget).fold(0.0, f64::max);
        let (unit, name) = match most >= (1u64 << 30) as f64 {
            true => ((1u64 << 30) as f64, "GiB"),
            false => ((1u64 << 20) as f64, "MiB"),
        };
        let budgets = |row: &Row| budget(row).map(|bytes| bytes / unit);
        // Beside what a card takes before any weight, nothing is far away.
        let some = |row: &Row| budget(row).filter(|bytes| *bytes > 0.0);
        let nearest = rows.iter().filter_map(some).fold(most, f64::min);
        let is_far = nearest > 0.5 * most && varies(rows, some);
        let shown = |row: &Row| budgets(row).filter(|budget| !(is_far && *budget == 0.0));
        picture(
            "speed against VRAM",
            axis(format!("VRAM, {name}"), Scale::Even, whole, &[]),
            speeds("tokens/s, simulated"),
            lines(rows, shown, planned, same_extent),
        );
    }
    let hot = |row: &Row| row.placement.as_ref().map(|found| found.neuron_share);
    if varies(rows, hot) {
        picture(
            "speed against the share of hot neurons",
            axis(
                "neurons on the GPU",
                Scale::Even,
                short_percent,
                &[0.0, 1.0],
            ),
            speeds("tokens/s, simulated"),
            lines(rows, hot, planned, same_extent),
        );
    }
    let threshold = |row: &Row| row.axes.hot_threshold;
    if varies(rows, threshold) {
        picture(
            "speed against the hot threshold",
            axis(
                "hot from this share of tokens on",
                Scale::Even,
                short_percent,
                &[],
            ),
            speeds("tokens/s, simulated"),
            lines(rows, threshold, planned, same_extent),
        );
    }
    of_levels(rows, &mut picture);
    let at_batch = |row: &Row| Some(row.axes.batch as f64);
    if varies(rows, at_batch) {
        let same = |row: &Row| row.axes.context_tokens == context;
        picture(
            "speed against batch",
            axis("sequences at once", Scale::Even, whole, &[]),
            speeds("tokens/s of all, measured"),
            lines(rows, at_batch, measured, same),
        );
    }
    let at_context = |row: &Row| Some(row.axes.context_tokens as f64);
    if varies(rows, at_context) {
        let same = |row: &Row| row.axes.batch == batch;
        picture(
            "speed against context",
            axis("tokens of context", Scale::Even, whole, &[]),
            speeds("tokens/s, measured"),
            lines(rows, at_context, measured, same),
        );
    }
    page.push_str("</div>\n");
}

/// A figure, and its interval where it has one.
type Figure = (f64, Option<(f64, f64)>);

/// A share by its name.
type Share = (&'static str, fn(&Row) -> Option<f64>);

/// Curves of quality and of neurons along the levels of each policy that has several.
fn of_levels(rows: &[Row], picture: &mut impl FnMut(&str, Axis, Axis, Vec<Series>)) {
    let mut kinds: Vec<&str> = Vec::new();
    for of in rows.iter().filter_map(|row| row.axes.level_of.as_deref()) {
        if !kinds.contains(&of) {
            kinds.push(of);
        }
    }
    for kind in kinds {
        let of_kind: Vec<&Row> = first_of_levels(rows)
            .into_iter()
            .filter(|row| row.axes.level_of.as_deref() == Some(kind))
            .collect();
        if of_kind.len() < 2 {
            continue;
        }
        let curve = |name: &str, colour, y: &dyn Fn(&Row) -> Option<Figure>| {
            let mut marks: Vec<Mark> = of_kind
                .iter()
                .filter_map(|row| {
                    let (value, interval) = y(row)?;
                    Some(Mark {
                        x: row.axes.level_value?,
                        y: value,
                        interval,
                        range: None,
                        title: title(row),
                    })
                })
                .collect();
            marks.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series {
                name: name.to_owned(),
                colour,
                marks,
                is_line: true,
            }
        };
        let is_share = kind != "raised logit";
        let figure: fn(f64) -> String = match is_share {
            true => short_percent,
            false => |value| format!("{value:+.1}"),
        };
        let x = || axis(kind, Scale::Even, figure, &[]);
        picture(
            &format!("perplexity against {kind}"),
            x(),
            axis(
                "rise of perplexity",
                Scale::Bent,
                short_percent,
                &[0.0, 0.01],
            ),
            vec![curve("rise", 0, &|row| {
                rise(row).map(|(value, interval)| (value, Some(interval)))
            })],
        );
        let mut shares = vec![curve("neurons computed", 0, &|row| {
            Some((row.sparsity.computed_share, None))
        })];
        let names: Vec<String> = of_kind[0]
            .quality
            .functions
            .iter()
            .map(|one| one.name.clone())
            .collect();
        for (index, name) in names.iter().enumerate() {
            shares.push(curve(&format!("pass@1, {name}"), 1 + index, &|row| {
                let found = row.quality.functions.get(index)?.pass_at_1?;
                Some((found.value, Some((found.low, found.high))))
            }));
        }
        if of_kind.iter().all(|row| row.predictor.is_some()) {
            let recall: [Share; 3] = [
                ("count recall", |row| {
                    row.predictor.as_ref().map(|one| one.count_recall)
                }),
                ("contribution recall", |row| {
                    row.predictor.as_ref().map(|one| one.contribution_recall)
                }),
                ("precision", |row| {
                    row.predictor.as_ref().map(|one| one.precision)
                }),
            ];
            for (name, of) in recall {
                let colour = shares.len();
                shares.push(curve(name, colour, &|row| {
                    of(row).map(|value| (value, None))
                }));
            }
        }
        picture(
            &format!("shares against {kind}"),
            x(),
            axis("share", Scale::Even, short_percent, &[0.0, 1.0]),
            shares,
        );
    }
}

/// Which layers bear what.
fn layers(page: &mut String, rows: &[Row]) {
    let of_levels = first_of_levels(rows);
    let map_rows = |figure: &dyn Fn(&super::rows::LayerSparsity) -> Option<f64>, what: &str| {
        let row = |row: &&Row| {
            let cells = row
                .sparsity
                .layers
                .iter()
                .enumerate()
                .filter_map(|(layer, found)| {
                    let value = figure(found)?;
                    let told = format!(
                        "layer {layer}, {}: {what} {:+.3} %; {} fire, {} computed",
                        row.axes.level,
                        100.0 * value,
                        percent(1.0 - found.true_share),
                        percent(found.computed_share)
                    );
                    Some((value, told, short_percent(value)))
                });
            MapRow {
                name: row.axes.level.clone(),
                cells: cells.collect(),
            }
        };
        let rows = of_levels.iter().map(row);
        rows.filter(|row| !row.cells.is_empty()).collect::<Vec<_>>()
    };
    let alone = map_rows(&|layer| layer.perplexity_rise_alone, "perplexity");
    let errors = map_rows(&|layer| Some(layer.relative_error), "relative error");
    if alone.is_empty() && errors.is_empty() {
        return;
    }
    page.push_str("<h2>Layer by layer</h2>\n<div class=\"plots\"><div>\n");
    if !alone.is_empty() {
        page.push_str(
            "<p><small>How sensitive each layer is: by how much perplexity rises where that layer alone follows the level and \
             all others are dense. The warmer, the more; point at a cell for its figure.</small></p>\n",
        );
        charts::map(
            page,
            "rise of perplexity where a layer follows alone",
            &alone,
        );
    }
    page.push_str(
        "</div><div><p><small>How far each layer's FFN output is from the exact one, on the inputs that the level itself makes.</small></p>\n",
    );
    charts::map(page, "relative error of each layer's FFN", &errors);
    page.push_str("</div></div>\n");
}

/// What the sample can tell.
fn statistics(page: &mut String, rows: &[Row]) {
    let of_levels = first_of_levels(rows);
    if of_levels.is_empty() {
        return;
    }
    page.push_str(
        "<h2>What the sample can tell</h2><p><small>Perplexity by the paired bootstrap of blocks of 64 tokens, functions by McNemar's exact test on the same \
         items; shares with Wilson's intervals; 95 % each.</small></p>\n",
    );
    for row in of_levels {
        let _ = writeln!(page, "<p>{}</p>", escape(&told_perplexity(row)));
        for functions in &row.quality.functions {
            let told = told_functions(&row.axes.level, functions);
            let _ = writeln!(page, "<p>{}</p>", escape(&told));
        }
    }
}
