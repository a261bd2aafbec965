//! The page of a sweep: quality against speed, curves along each axis of the grid, heat maps of the layers, and every row.

use serde_json::{Value, json};

use crate::{
    ReportError,
    chart::{Axis, Chart, Point, Scale, Series, Shape},
    page::{Templates, short_percent},
};

/// Size of a chart in pixels, on a page as wide as a phone.
const SIZE: (u32, u32) = (480, 300);
/// Largest p-value that counts as a difference.
const SIGNIFICANCE: f64 = 0.05;
/// Largest rise of perplexity, as a share, that the summary allows.
const ALLOWED_RISE: f64 = 0.01;
const SETTING: &str = "/axes/setting";
const BATCH: &str = "/axes/batch";
const CONTEXT: &str = "/axes/context_tokens";

/// The page of a sweep's JSON document.
///
/// `document` has the measured `rows`, and for each chart of quality against speed which of them are its `points`, its
/// Pareto `front` and its `knee`, as indices. `comparisons` are sentences on what the sample shows relative to dense.
///
/// # Errors
///
/// If a chart cannot be drawn, or a row lacks what the page shows.
pub fn sweep_page(document: &Value, comparisons: &[String]) -> Result<String, ReportError> {
    let templates = Templates::new()?;
    let rows = list(document, "/rows");
    let labels = rows.iter().map(|row| templates.render("point.txt", row));
    let sweep = Sweep {
        rows,
        labels: labels.collect::<Result<_, _>>()?,
        settings: distinct(rows, SETTING),
    };
    let figures = |charts: Vec<Chart>| charts.iter().map(Chart::figure).collect();
    let (fronts, axes): (Result<Vec<Value>, _>, Result<Vec<Value>, _>) =
        (figures(sweep.fronts(document)), figures(sweep.axes()));
    let firsts = sweep.first_of_settings();
    let context = json!({
        "rows": rows,
        "first": rows.first(),
        "quickest": sweep.quickest(measured_speed),
        "quickest_planned": sweep.quickest(planned_speed),
        "dense": sweep.comparable().find(|row| text(row, SETTING) == "dense"),
        "fronts": fronts?,
        "axes": axes?,
        "firsts": firsts.into_iter().map(|row| &rows[row]).collect::<Vec<_>>(),
        "comparisons": comparisons,
    });
    templates.render("sweep.html", context)
}

fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    let list = value.pointer(path).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

fn text<'a>(row: &'a Value, path: &str) -> &'a str {
    row.pointer(path).and_then(Value::as_str).unwrap_or("")
}

fn number(row: &Value, path: &str) -> Option<f64> {
    row.pointer(path)?.as_f64()
}

/// Value, lower and upper end of the confidence interval at `path`; three times the same of a plain number.
fn estimate(row: &Value, path: &str) -> Option<[f64; 3]> {
    let found = row.pointer(path)?;
    if let Some(value) = found.as_f64() {
        return Some([value; 3]);
    }
    let [value, low, high] = ["value", "low", "high"].map(|name| found[name].as_f64());
    Some([value?, low?, high?])
}

/// Median, least and most measured tokens per second; none if a device was emulated.
fn measured_speed(row: &Value) -> Option<[f64; 3]> {
    let measured = row.pointer("/speed/measured")?;
    let spread = &measured["tokens_per_second"];
    let [median, least, most] = ["median", "least", "most"].map(|name| spread[name].as_f64());
    let is_real = measured["emulated"] != Value::Bool(true);
    is_real.then_some([median?, least?, most?])
}

/// Tokens per second that the cost model predicts; none if there is no placement.
fn planned_speed(row: &Value) -> Option<[f64; 3]> {
    estimate(row, "/speed/planned/tokens_per_second")
}

/// Rise of perplexity over dense, as a share.
fn rise(row: &Value) -> Option<[f64; 3]> {
    estimate(row, "/quality/perplexity_rise")
}

/// Share of the first kind of functions that fails.
fn failures(row: &Value) -> Option<[f64; 3]> {
    let [passed, low, high] = estimate(row, "/quality/functions/0/pass_at_1")?;
    Some([1.0 - passed, 1.0 - high, 1.0 - low])
}

/// Reads a value with its range from a row.
type Read = fn(&Value) -> Option<[f64; 3]>;

/// Distinct texts at `path`, in the order of the rows.
fn distinct<'a>(rows: &'a [Value], path: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for value in rows.iter().map(|row| text(row, path)) {
        if !value.is_empty() && !found.contains(&value) {
            found.push(value);
        }
    }
    found
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

/// Rows of a sweep with their tooltips.
struct Sweep<'a> {
    rows: &'a [Value],
    labels: Vec<String>,
    /// Policy settings, whose positions here are their colours.
    settings: Vec<&'a str>,
}

impl Sweep<'_> {
    /// Rows that have the first row's value at each of `paths`.
    fn alike(&self, paths: &[&str]) -> Vec<usize> {
        let at = |row: usize, path: &str| self.rows[row].pointer(path);
        let is_alike = |row: &usize| paths.iter().all(|path| at(*row, path) == at(0, path));
        (0..self.rows.len()).filter(is_alike).collect()
    }

    /// Rows with the batch size and the context of the first.
    fn comparable(&self) -> impl Iterator<Item = &Value> {
        let rows = self.alike(&[BATCH, CONTEXT]).into_iter();
        rows.map(|row| &self.rows[row])
    }

    /// The first row of every policy setting but `dense`.
    fn first_of_settings(&self) -> Vec<usize> {
        let settings = self.settings.iter().filter(|setting| **setting != "dense");
        let first = |setting: &&str| {
            self.rows
                .iter()
                .position(|row| text(row, SETTING) == *setting)
        };
        settings.filter_map(first).collect()
    }

    /// The fastest row like the first whose rise of perplexity is allowed and which the sample shows to lose no function.
    fn quickest(&self, speed: Read) -> Option<&Value> {
        let is_loss = |one: &Value| {
            let at = |path: &str| number(one, path).unwrap_or(1.0);
            at("/p_value") < SIGNIFICANCE && at("/difference") < 0.0
        };
        let is_allowed = |row: &&Value| {
            let is_close = rise(row).is_some_and(|[_, _, high]| high <= ALLOWED_RISE);
            is_close && !list(row, "/quality/functions").iter().any(is_loss)
        };
        let rows = self.comparable();
        let speeds = rows
            .filter(is_allowed)
            .filter_map(|row| Some((row, speed(row)?[0])));
        speeds
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(row, _)| row)
    }

    /// Points of `rows` at the `x` and `y` they have.
    fn points(
        &self,
        rows: impl IntoIterator<Item = usize>,
        x: &dyn Fn(&Value) -> Option<[f64; 3]>,
        y: &dyn Fn(&Value) -> Option<[f64; 3]>,
    ) -> Vec<Point> {
        let point = |row: usize| {
            let (x, y) = (x(&self.rows[row])?, y(&self.rows[row])?);
            let label = self.labels[row].clone();
            Some(Point { x, y, label })
        };
        rows.into_iter().filter_map(point).collect()
    }

    /// The same as a line from the lowest `x` on; if several rows share an `x`, the first counts.
    fn line(
        &self,
        rows: impl IntoIterator<Item = usize>,
        x: &dyn Fn(&Value) -> Option<f64>,
        y: &dyn Fn(&Value) -> Option<[f64; 3]>,
    ) -> Vec<Point> {
        let mut points = self.points(rows, &|row| Some([x(row)?; 3]), y);
        points.sort_by(|a, b| a.x[0].total_cmp(&b.x[0]));
        points.dedup_by(|a, b| a.x == b.x);
        points
    }

    /// A series for every policy setting that has `points`.
    fn by_setting(
        &self,
        rows: &[usize],
        shape: Shape,
        points: impl Fn(Vec<usize>) -> Vec<Point>,
    ) -> Vec<Series> {
        let settings = self.settings.iter().enumerate();
        let series = settings.map(|(colour, name)| {
            let mut rows = rows.to_vec();
            rows.retain(|row| text(&self.rows[*row], SETTING) == *name);
            let (name, points) = ((*name).to_owned(), points(rows));
            Series {
                name,
                shape,
                colour,
                points,
            }
        });
        series.filter(|series| !series.points.is_empty()).collect()
    }

    /// Quality against speed, with the Pareto fronts that `document` names.
    fn fronts(&self, document: &Value) -> Vec<Chart> {
        let hardware = self
            .rows
            .iter()
            .map(|row| text(row, "/speed/planned/hardware"));
        let hardware = hardware.max().unwrap_or("");
        let predicted = format!("tokens/s on {hardware}, simulated");
        let here = "tokens/s on this machine, measured";
        let fails = axis("functions that fail", short_percent, &[]);
        let charts: [(&str, &str, Read, Axis, Read); 3] = [
            (
                "/perplexity_against_planned_speed",
                &predicted,
                planned_speed,
                rise_axis(),
                rise,
            ),
            (
                "/perplexity_against_measured_speed",
                here,
                measured_speed,
                rise_axis(),
                rise,
            ),
            (
                "/failures_against_measured_speed",
                here,
                measured_speed,
                fails,
                failures,
            ),
        ];
        let charts = charts.map(|(path, label, speed, y, loss)| {
            let rows = |name: &str| {
                let indices = list(document, &format!("{path}/{name}")).iter();
                let indices = indices.filter_map(|row| Some(row.as_u64()? as usize));
                indices
                    .filter(|row| *row < self.rows.len())
                    .collect::<Vec<_>>()
            };
            let points = |rows| self.points(rows, &speed, &loss);
            let knee = number(document, &format!("{path}/knee")).map(|row| row as usize);
            let knee = knee.filter(|row| *row < self.rows.len());
            let name = |row: usize| text(&self.rows[row], SETTING).to_owned();
            let mut front = points(rows("front"));
            front.truncate(if front.len() > 1 { front.len() } else { 0 });
            let title = format!("{} against {label}", y.label);
            let series = self.by_setting(&rows("points"), Shape::Points, points);
            Chart {
                front,
                knee: knee.and_then(|row| Some((points(vec![row]).pop()?, name(row)))),
                ..chart(title, axis(label, figure, &[0.0]), y, series)
            }
        });
        charts
            .into_iter()
            .filter(|chart| !chart.series.is_empty())
            .collect()
    }

    /// Speed against `x`, a line per policy setting, of the rows that have the first row's value at each of `same`; none
    /// if `x` has fewer than two values.
    fn speed_against(
        &self,
        title: &str,
        axis_of_x: Axis,
        x: &dyn Fn(&Value) -> Option<f64>,
        (label, speed): (&str, Read),
        same: &[&str],
    ) -> Option<Chart> {
        let speed = |row: &Value| Some([speed(row)?[0]; 3]);
        let series = self.by_setting(&self.alike(same), Shape::Line, |rows| {
            self.line(rows, x, &speed)
        });
        let title = format!("speed against {title}");
        let is_drawn = self.varies(x) && !series.is_empty();
        is_drawn.then(|| chart(title, axis_of_x, axis(label, figure, &[0.0]), series))
    }

    /// Whether `x` has more than one value.
    fn varies(&self, x: &dyn Fn(&Value) -> Option<f64>) -> bool {
        let mut found = self.rows.iter().filter_map(x);
        let first = found.next();
        found.any(|other| Some(other) != first)
    }

    /// Curves along each axis of the grid on which it has several points.
    fn axes(&self) -> Vec<Chart> {
        let budget = |row: &Value| number(row, "/axes/vram_bytes");
        let positive = |row: &Value| budget(row).filter(|bytes| *bytes > 0.0);
        let budgets = || self.rows.iter().filter_map(positive);
        let most = budgets().fold(0.0, f64::max);
        let (unit, vram) = if most >= (1u64 << 30) as f64 {
            ((1u64 << 30) as f64, "VRAM, GiB")
        } else {
            ((1u64 << 20) as f64, "VRAM, MiB")
        };
        // A budget of zero far from all others would squeeze them together.
        let skips_zero = budgets().all(|bytes| bytes > 0.5 * most) && self.varies(&positive);
        let shown = |row: &Value| budget(row).filter(|bytes| !skips_zero || *bytes > 0.0);
        let shown = |row: &Value| Some(shown(row)? / unit);
        let at = |path: &'static str| move |row: &Value| number(row, path);
        let simulated: (&str, Read) = ("tokens/s, simulated", planned_speed);
        let measured: (&str, Read) = ("tokens/s, measured", measured_speed);
        let both = &[BATCH, CONTEXT];
        let neurons = axis("neurons on the GPU", short_percent, &[0.0, 1.0]);
        let threshold = axis(
            "activation frequency from which a neuron is hot",
            short_percent,
            &[],
        );
        let neuron_share = at("/placement/neuron_share");
        let hot_threshold = at("/axes/hot_threshold");
        let of_placements = [
            self.speed_against("VRAM", axis(vram, figure, &[]), &shown, simulated, both),
            self.speed_against(
                "the share of hot neurons",
                neurons,
                &neuron_share,
                simulated,
                both,
            ),
            self.speed_against(
                "the hot threshold",
                threshold,
                &hot_threshold,
                simulated,
                both,
            ),
        ];
        let (batch, context) = (
            axis("batch size", figure, &[]),
            axis("tokens of context", figure, &[]),
        );
        let of_extents = [
            self.speed_against("batch", batch, &at(BATCH), measured, &[CONTEXT]),
            self.speed_against("context", context, &at(CONTEXT), measured, &[BATCH]),
        ];
        let settings = self.along_settings().into_iter().map(Some);
        of_placements
            .into_iter()
            .chain(settings)
            .chain(of_extents)
            .flatten()
            .collect()
    }

    /// Quality and shares of neurons along the settings of each policy that has several.
    fn along_settings(&self) -> Vec<Chart> {
        let mut charts = Vec::new();
        for kind in distinct(self.rows, "/axes/parameter") {
            let mut rows = self.first_of_settings();
            rows.retain(|row| text(&self.rows[*row], "/axes/parameter") == kind);
            if rows.len() < 2 {
                continue;
            }
            let format: fn(f64) -> String = match kind {
                "raised logit" => |value| format!("{value:+.1}"),
                _ => short_percent,
            };
            let x = |row: &Value| number(row, "/axes/parameter_value");
            let curve = |colour: usize, name: String, path: &str| Series {
                name,
                shape: Shape::Line,
                colour,
                points: self.line(rows.iter().copied(), &x, &|row| estimate(row, path)),
            };
            let rises = vec![curve(0, "rise".to_owned(), "/quality/perplexity_rise")];
            let mut shares = vec![(
                "neurons computed".to_owned(),
                "/sparsity/computed_share".to_owned(),
            )];
            for (index, one) in list(&self.rows[rows[0]], "/quality/functions")
                .iter()
                .enumerate()
            {
                let path = format!("/quality/functions/{index}/pass_at_1");
                shares.push((format!("pass@1, {}", text(one, "/name")), path));
            }
            for name in ["count recall", "contribution recall", "precision"] {
                shares.push((
                    name.to_owned(),
                    format!("/predictor/{}", name.replace(' ', "_")),
                ));
            }
            let shares = shares.into_iter().enumerate();
            let shares = shares.map(|(colour, (name, path))| curve(colour, name, &path));
            let shares = shares.filter(|series| !series.points.is_empty()).collect();
            let share = axis("share", short_percent, &[0.0, 1.0]);
            charts.push(chart(
                format!("perplexity against {kind}"),
                axis(kind, format, &[]),
                rise_axis(),
                rises,
            ));
            charts.push(chart(
                format!("shares against {kind}"),
                axis(kind, format, &[]),
                share,
                shares,
            ));
        }
        charts
    }
}
