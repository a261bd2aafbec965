//! The page of a sweep: quality against speed, curves along each axis of the grid, heat maps of the layers, and every row.

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    ReportError,
    chart::{Axis, Chart, Figure, Point, Scale, Series, Shape},
    page::{Templates, short_percent},
};

/// Size of a chart in pixels, on a page as wide as a phone.
const SIZE: (u32, u32) = (480, 300);
/// Largest p-value that counts as a difference.
const SIGNIFICANCE: f64 = 0.05;
/// Largest rise of perplexity, as a share, that the summary allows.
const ALLOWED_RISE: f64 = 0.01;

/// The page of a sweep's JSON document.
///
/// `document` has the measured `rows`, and for each chart of quality against speed which of them are its `points`, its
/// Pareto `front` and its `knee`, as indices. `comparisons` are sentences on what the sample shows relative to dense.
///
/// # Errors
///
/// Where a chart cannot be drawn, or a row lacks what the page shows.
pub fn sweep_page(document: &Value, comparisons: &[String]) -> Result<String, ReportError> {
    let templates = Templates::new()?;
    let rows = document["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let labels: Result<Vec<String>, ReportError> = rows
        .iter()
        .map(|row| templates.render("point.txt", row))
        .collect();
    let sweep = Sweep {
        rows,
        labels: labels?,
        settings: distinct(rows, "/axes/level"),
    };
    let figures = |charts: Vec<Chart>| -> Result<Vec<Figure>, ReportError> {
        charts.iter().map(Chart::figure).collect()
    };
    let dense = |row: &usize| text(&rows[*row], "/axes/level") == "dense";
    let context = json!({
        "rows": rows,
        "first": rows.first(),
        "quickest": sweep.quickest(measured_speed),
        "quickest_planned": sweep.quickest(planned_speed),
        "dense": sweep.comparable().find(dense),
        "fronts": figures(sweep.fronts(document))?,
        "axes": figures(sweep.axes())?,
        "maps": sweep.maps(),
        "comparisons": comparisons,
    });
    templates.render("sweep.html", context)
}

fn number(row: &Value, path: &str) -> Option<f64> {
    row.pointer(path)?.as_f64()
}

fn text<'a>(row: &'a Value, path: &str) -> &'a str {
    row.pointer(path).and_then(Value::as_str).unwrap_or("")
}

/// Distinct texts at `path`, in the order of the rows.
fn distinct<'a>(rows: impl IntoIterator<Item = &'a Value>, path: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for value in rows.into_iter().map(|row| text(row, path)) {
        if !value.is_empty() && !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Measured tokens per second; none where a device was emulated.
fn measured_speed(row: &Value) -> Option<f64> {
    let is_emulated = row.pointer("/speed/measured/emulated") == Some(&Value::Bool(true));
    let speed = number(row, "/speed/measured/tokens_per_second/median");
    speed.filter(|_| !is_emulated)
}

/// Tokens per second that the cost model predicts; none where there is no placement.
fn planned_speed(row: &Value) -> Option<f64> {
    number(row, "/speed/planned/tokens_per_second")
}

/// A value with its confidence interval.
type Estimate = (f64, Option<(f64, f64)>);

fn estimate(interval: &Value) -> Option<Estimate> {
    let at = |name: &str| interval[name].as_f64();
    Some((at("value")?, at("low").zip(at("high"))))
}

/// Rise of perplexity over dense, as a share.
fn rise(row: &Value) -> Option<Estimate> {
    estimate(row.pointer("/quality/perplexity_rise")?)
}

/// Share of the first kind of functions that fails.
fn failures(row: &Value) -> Option<Estimate> {
    let (passed, interval) = estimate(row.pointer("/quality/functions/0/pass_at_1")?)?;
    Some((
        1.0 - passed,
        interval.map(|(low, high)| (1.0 - high, 1.0 - low)),
    ))
}

/// A number on an axis.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{:.1}M", value / 1e6),
        size if size >= 1e4 => format!("{:.0}k", value / 1e3),
        size if size.fract() < 1e-6 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

fn axis(label: &str, format: fn(f64) -> String, include: &[f64]) -> Axis {
    Axis {
        label: label.to_owned(),
        scale: Scale::Linear,
        format,
        include: include.to_vec(),
        padding: 0.05,
    }
}

fn rise_axis() -> Axis {
    Axis {
        scale: Scale::SymmetricLog,
        ..axis("rise of perplexity", short_percent, &[0.0, ALLOWED_RISE])
    }
}

fn chart(title: String, x: Axis, y: Axis, series: Vec<Series>) -> Chart {
    Chart {
        title,
        size: SIZE,
        x,
        y,
        series,
        front: Vec::new(),
        knee: None,
    }
}

/// A heat map: a line per policy setting, a cell per layer.
#[derive(Serialize)]
struct HeatMap {
    title: &'static str,
    quantity: &'static str,
    /// Whether its values are of one layer alone under the policy, all others dense.
    is_alone: bool,
    lines: Vec<HeatMapLine>,
}

#[derive(Serialize)]
struct HeatMapLine {
    row: usize,
    cells: Vec<HeatMapCell>,
}

#[derive(Serialize)]
struct HeatMapCell {
    layer: usize,
    value: f64,
    /// From 0 to 100, relative to the largest value of the map.
    warmth: f64,
}

/// Rows of a sweep with their tooltips.
struct Sweep<'a> {
    rows: &'a [Value],
    labels: Vec<String>,
    /// Policy settings, whose positions here are their colours.
    settings: Vec<&'a str>,
}

impl Sweep<'_> {
    /// Whether `row` has the first row's value at each of `paths`.
    fn is_like_first(&self, row: usize, paths: &[&str]) -> bool {
        let at = |row: usize, path: &str| self.rows[row].pointer(path);
        paths.iter().all(|path| at(row, path) == at(0, path))
    }

    /// Rows with the batch size and the context of the first one.
    fn comparable(&self) -> impl Iterator<Item = usize> {
        let is_like_first =
            |row: &usize| self.is_like_first(*row, &["/axes/batch", "/axes/context_tokens"]);
        (0..self.rows.len()).filter(is_like_first)
    }

    /// The first row of every policy setting but `dense`.
    fn first_of_settings(&self) -> Vec<usize> {
        let settings = self.settings.iter().filter(|setting| **setting != "dense");
        let first = |setting: &&str| {
            self.rows
                .iter()
                .position(|row| text(row, "/axes/level") == *setting)
        };
        settings.filter_map(first).collect()
    }

    /// The fastest comparable row whose rise of perplexity is allowed and which the sample shows to lose no function.
    fn quickest(&self, speed: fn(&Value) -> Option<f64>) -> Option<usize> {
        let is_allowed = |row: &usize| {
            let row = &self.rows[*row];
            let functions = row.pointer("/quality/functions").and_then(Value::as_array);
            let is_loss = |one: &Value| {
                number(one, "/p_value").is_some_and(|p| p < SIGNIFICANCE)
                    && number(one, "/difference").is_some_and(|difference| difference < 0.0)
            };
            let is_lost = functions.is_some_and(|all| all.iter().any(is_loss));
            let most = number(row, "/quality/perplexity_rise/high");
            most.is_some_and(|most| most <= ALLOWED_RISE) && !is_lost
        };
        let allowed = self.comparable().filter(is_allowed);
        let speeds = allowed.filter_map(|row| Some((row, speed(&self.rows[row])?)));
        speeds
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(row, _)| row)
    }

    /// Quality against speed, with the Pareto fronts that `document` names.
    fn fronts(&self, document: &Value) -> Vec<Chart> {
        let hardware = self
            .rows
            .iter()
            .find_map(|row| row.pointer("/speed/planned/hardware")?.as_str());
        let predicted = format!("tokens/s on {}, simulated", hardware.unwrap_or(""));
        let here = "tokens/s on this machine, measured";
        type Get<T> = fn(&Value) -> Option<T>;
        let charts: [(&str, &str, Get<f64>, Axis, Get<Estimate>); 3] = [
            (
                "perplexity_against_planned_speed",
                &predicted,
                planned_speed,
                rise_axis(),
                rise,
            ),
            (
                "perplexity_against_measured_speed",
                here,
                measured_speed,
                rise_axis(),
                rise,
            ),
            (
                "failures_against_measured_speed",
                here,
                measured_speed,
                axis("functions that fail", short_percent, &[]),
                failures,
            ),
        ];
        let mut drawn = Vec::new();
        for (key, label, speed, y, loss) in charts {
            let rows_of = |name: &str| {
                let rows = document[key][name].as_array().into_iter().flatten();
                let rows = rows.filter_map(|row| Some(row.as_u64()? as usize));
                rows.filter(|row| *row < self.rows.len())
                    .collect::<Vec<usize>>()
            };
            let is_measured = key.ends_with("measured_speed");
            let point = |row: usize| {
                let (y, y_range) = loss(&self.rows[row])?;
                let spread = |name: &str| {
                    number(
                        &self.rows[row],
                        &format!("/speed/measured/tokens_per_second/{name}"),
                    )
                };
                let x_range = spread("least").zip(spread("most")).filter(|_| is_measured);
                let label = self.labels[row].clone();
                Some(Point {
                    x: speed(&self.rows[row])?,
                    y,
                    x_range,
                    y_range,
                    label,
                })
            };
            let points = rows_of("points");
            let series = self.series(Shape::Points, |setting| {
                let of_setting = points
                    .iter()
                    .filter(|row| text(&self.rows[**row], "/axes/level") == setting);
                of_setting.filter_map(|row| point(*row)).collect()
            });
            if series.is_empty() {
                continue;
            }
            let front = rows_of("front").into_iter().filter_map(point);
            let front: Vec<(f64, f64)> = front.map(|point| (point.x, point.y)).collect();
            let knee = document[key]["knee"].as_u64().map(|row| row as usize);
            drawn.push(Chart {
                front: if front.len() > 1 { front } else { Vec::new() },
                knee: knee.and_then(|row| {
                    let point = point(row)?;
                    Some((
                        point.x,
                        point.y,
                        text(&self.rows[row], "/axes/level").to_owned(),
                    ))
                }),
                ..chart(
                    format!("{} against {label}", y.label),
                    axis(label, figure, &[0.0]),
                    y,
                    series,
                )
            });
        }
        drawn
    }

    /// A series of the points of every policy setting that has any.
    fn series(&self, shape: Shape, points: impl Fn(&str) -> Vec<Point>) -> Vec<Series> {
        let settings = self.settings.iter().enumerate();
        let series = settings.map(|(colour, name)| Series {
            name: (*name).to_owned(),
            shape,
            colour,
            points: points(name),
        });
        series.filter(|series| !series.points.is_empty()).collect()
    }

    /// A line of `y` over `x` through `rows`; where several rows share an `x`, the first counts.
    fn line(
        &self,
        rows: impl Iterator<Item = usize>,
        x: impl Fn(&Value) -> Option<f64>,
        y: impl Fn(&Value) -> Option<Estimate>,
    ) -> Vec<Point> {
        let point = |row: usize| {
            let (value, y_range) = y(&self.rows[row])?;
            let label = self.labels[row].clone();
            Some(Point {
                x: x(&self.rows[row])?,
                y: value,
                x_range: None,
                y_range,
                label,
            })
        };
        let mut points: Vec<Point> = rows.filter_map(point).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        points.dedup_by(|a, b| a.x == b.x);
        points
    }

    /// Whether `x` has more than one value.
    fn varies(&self, x: impl Fn(&Value) -> Option<f64>) -> bool {
        let mut found = self.rows.iter().filter_map(x);
        let first = found.next();
        found.any(|other| Some(other) != first)
    }

    /// Curves along each axis of the grid on which it has several points.
    fn axes(&self) -> Vec<Chart> {
        let mut charts = Vec::new();
        let mut along = |title: &str,
                         axis_of_x: Axis,
                         x: &dyn Fn(&Value) -> Option<f64>,
                         label: &str,
                         is_measured: bool,
                         same: &[&str]| {
            let speed = if is_measured {
                measured_speed
            } else {
                planned_speed
            };
            let series = self.series(Shape::Line, |setting| {
                let is_alike = |row: &usize| {
                    text(&self.rows[*row], "/axes/level") == setting
                        && self.is_like_first(*row, same)
                };
                let alike = (0..self.rows.len()).filter(is_alike);
                self.line(alike, x, |row| Some((speed(row)?, None)))
            });
            if self.varies(x) && !series.is_empty() {
                charts.push(chart(
                    format!("speed against {title}"),
                    axis_of_x,
                    axis(label, figure, &[0.0]),
                    series,
                ));
            }
        };
        let (batch, context) = ("/axes/batch", "/axes/context_tokens");
        let (simulated, both) = ("tokens/s, simulated", &[batch, context]);
        let budget = |row: &Value| number(row, "/axes/vram_bytes");
        let budgets = self.rows.iter().filter_map(budget);
        let most = budgets.clone().fold(0.0, f64::max);
        let nearest = budgets.filter(|bytes| *bytes > 0.0).fold(most, f64::min);
        let (unit, name) = match most >= (1u64 << 30) as f64 {
            true => ((1u64 << 30) as f64, "VRAM, GiB"),
            false => ((1u64 << 20) as f64, "VRAM, MiB"),
        };
        let positive = |row: &Value| budget(row).filter(|bytes| *bytes > 0.0);
        // A budget of zero far from all others would squeeze them together.
        let skip_zero = nearest > 0.5 * most && self.varies(positive);
        let shown = |row: &Value| {
            if skip_zero {
                positive(row)
            } else {
                budget(row)
            }
        };
        if self.varies(budget) {
            along(
                "VRAM",
                axis(name, figure, &[]),
                &|row| Some(shown(row)? / unit),
                simulated,
                false,
                both,
            );
        }
        let x = |path: &'static str| move |row: &Value| number(row, path);
        along(
            "the share of hot neurons",
            axis("neurons on the GPU", short_percent, &[0.0, 1.0]),
            &x("/placement/neuron_share"),
            simulated,
            false,
            both,
        );
        along(
            "the hot threshold",
            axis(
                "activation frequency from which a neuron is hot",
                short_percent,
                &[],
            ),
            &x("/axes/hot_threshold"),
            simulated,
            false,
            both,
        );
        let settings = self.along_settings();
        let mut measured = |title, label, path, same| {
            along(
                title,
                axis(label, figure, &[]),
                &x(path),
                "tokens/s, measured",
                true,
                &[same],
            )
        };
        measured("batch", "batch size", batch, context);
        measured("context", "tokens of context", context, batch);
        let before = charts.iter().position(|chart| {
            chart.title == "speed against batch" || chart.title == "speed against context"
        });
        let before = before.unwrap_or(charts.len());
        charts.splice(before..before, settings);
        charts
    }

    /// Quality and shares of neurons along the settings of each policy that has several.
    fn along_settings(&self) -> Vec<Chart> {
        let mut charts = Vec::new();
        for kind in distinct(self.rows, "/axes/level_of") {
            let mut rows = self.first_of_settings();
            rows.retain(|row| text(&self.rows[*row], "/axes/level_of") == kind);
            if rows.len() < 2 {
                continue;
            }
            let curve = |name: &str, colour, y: &dyn Fn(&Value) -> Option<Estimate>| Series {
                name: name.to_owned(),
                shape: Shape::Line,
                colour,
                points: self.line(
                    rows.iter().copied(),
                    |row| number(row, "/axes/level_value"),
                    y,
                ),
            };
            let format: fn(f64) -> String = match kind {
                "raised logit" => |value| format!("{value:+.1}"),
                _ => short_percent,
            };
            let x = || axis(kind, format, &[]);
            let quality = vec![curve("rise", 0, &rise)];
            charts.push(chart(
                format!("perplexity against {kind}"),
                x(),
                rise_axis(),
                quality,
            ));
            let share = |path: &'static str| move |row: &Value| Some((number(row, path)?, None));
            let mut shares = vec![curve(
                "neurons computed",
                0,
                &share("/sparsity/computed_share"),
            )];
            let functions = self.rows[rows[0]]
                .pointer("/quality/functions")
                .and_then(Value::as_array);
            for (index, one) in functions.into_iter().flatten().enumerate() {
                let path = format!("/quality/functions/{index}/pass_at_1");
                let name = format!("pass@1, {}", text(one, "/name"));
                shares.push(curve(&name, shares.len(), &|row| {
                    estimate(row.pointer(&path)?)
                }));
            }
            for (name, path) in [
                ("count recall", "/predictor/count_recall"),
                ("contribution recall", "/predictor/contribution_recall"),
                ("precision", "/predictor/precision"),
            ] {
                shares.push(curve(name, shares.len(), &share(path)));
            }
            shares.retain(|series| !series.points.is_empty());
            charts.push(chart(
                format!("shares against {kind}"),
                x(),
                axis("share", short_percent, &[0.0, 1.0]),
                shares,
            ));
        }
        charts
    }

    /// How sensitive the layers are, and how large their errors.
    fn maps(&self) -> Vec<HeatMap> {
        let map = |title, quantity, is_alone, field: &str| {
            let cells = |row: usize| {
                let layers = self.rows[row]
                    .pointer("/sparsity/layers")
                    .and_then(Value::as_array);
                let layers = layers.into_iter().flatten().enumerate();
                let cell = |(layer, found): (usize, &Value)| {
                    Some(HeatMapCell {
                        layer,
                        value: found[field].as_f64()?,
                        warmth: 0.0,
                    })
                };
                layers.filter_map(cell).collect::<Vec<_>>()
            };
            let lines = self.first_of_settings().into_iter();
            let lines = lines.map(|row| HeatMapLine {
                row,
                cells: cells(row),
            });
            let mut lines: Vec<HeatMapLine> = lines.filter(|line| !line.cells.is_empty()).collect();
            let position = |value: f64| Scale::SymmetricLog.position(value.max(0.0));
            let all = lines.iter().flat_map(|line| &line.cells);
            let most = all.map(|cell| cell.value).fold(1e-3, f64::max);
            for cell in lines.iter_mut().flat_map(|line| &mut line.cells) {
                cell.warmth = (100.0 * position(cell.value) / position(most)).round();
            }
            HeatMap {
                title,
                quantity,
                is_alone,
                lines,
            }
        };
        let mut maps = vec![
            map(
                "rise of perplexity with one layer alone under the policy",
                "perplexity",
                true,
                "perplexity_rise_alone",
            ),
            map(
                "relative error of each layer's FFN",
                "relative error",
                false,
                "relative_error",
            ),
        ];
        maps.retain(|map| !map.lines.is_empty());
        maps
    }
}
