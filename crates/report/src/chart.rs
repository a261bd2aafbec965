//! Charts with two axes: plotters computes the coordinates and draws axes, grid and labels; `figure.html` draws the series.

use std::ops::Range;

use plotters::{
    coord::{
        ranged1d::{DefaultFormatting, KeyPointHint, Ranged},
        types::RangedCoordf64,
    },
    prelude::*,
};
use serde_json::{Value, json};

use crate::ReportError;

/// Units of the SVG in a pixel: plotters places everything on whole numbers.
const UNITS: i32 = 10;
/// Colours of the series; further series start over with square marks.
const COLOURS: usize = 6;
/// Labels along an axis, at most.
const LABELS: usize = 6;
/// Where the symmetric logarithmic scale bends.
const BEND: f64 = 1e-3;

/// How values lie along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Proportionally.
    Linear,
    /// Proportionally up to 0.1%, logarithmically beyond, for negative values too.
    SymmetricLog,
}

impl Scale {
    /// Position of `value` along the axis, up to a linear map.
    pub(crate) fn position(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::SymmetricLog => (value / BEND).asinh(),
        }
    }

    /// Round values between the positions `low` and `high`.
    fn ticks(self, low: f64, high: f64) -> Vec<f64> {
        const STEPS: [f64; 8] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0];
        if self == Self::Linear {
            return RangedCoordf64::from(low..high).key_points(LABELS);
        }
        let below = STEPS.iter().rev().map(|step| -step);
        let mut ticks: Vec<f64> = Vec::new();
        for tick in below.chain([0.0]).chain(STEPS) {
            let position = self.position(tick);
            let is_apart = |last: &f64| position - self.position(*last) > (high - low) / 16.0;
            if (low..=high).contains(&position) && ticks.last().is_none_or(is_apart) {
                ticks.push(tick);
            }
        }
        ticks
    }
}

/// An axis of a chart.
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    /// Label of a value at the axis; a value without a text has no grid line.
    pub(crate) format: fn(f64) -> String,
    /// Values that are always in sight.
    pub(crate) include: Vec<f64>,
    /// Room beyond the first and the last value, as a share of the span.
    pub(crate) padding: f64,
}

impl Axis {
    /// Coordinates that hold all finite `values`.
    fn coordinates(&self, values: impl Iterator<Item = f64>) -> Coordinates {
        let all = values.chain(self.include.iter().copied());
        let all = all.filter(|value| value.is_finite());
        let positions: Vec<f64> = all.map(|value| self.scale.position(value)).collect();
        let low = positions.iter().copied().reduce(f64::min).unwrap_or(0.0);
        let high = positions.iter().copied().reduce(f64::max).unwrap_or(1.0);
        let room = match high - low {
            0.0 => low.abs().max(1e-9) * 0.1,
            span => span * self.padding,
        };
        let (low, high) = (low - room, high + room);
        let mut ticks = self.scale.ticks(low, high);
        ticks.retain(|tick| !(self.format)(*tick).is_empty());
        Coordinates {
            scale: self.scale,
            positions: (low..high).into(),
            ticks,
        }
    }
}

/// An axis as plotters sees it.
struct Coordinates {
    scale: Scale,
    positions: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Ranged for Coordinates {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.positions.map(&self.scale.position(*value), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.positions.range()
    }
}

/// A point of a series: coordinates as value, lower and upper end of a whisker.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    pub(crate) x: [f64; 3],
    pub(crate) y: [f64; 3],
    /// Tooltip.
    pub(crate) label: String,
}

/// How the points of a series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A mark each.
    Points,
    /// A mark each, joined by a line.
    Line,
    /// A line without marks.
    Curve,
    /// A column each, from zero, one unit of x wide.
    Columns,
}

/// Points that belong together.
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// Number of its colour.
    pub(crate) colour: usize,
    pub(crate) points: Vec<Point>,
}

/// A chart with two axes.
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Width and height in pixels.
    pub(crate) size: (u32, u32),
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    /// Points joined by a dashed line.
    pub(crate) front: Vec<Point>,
    /// A point with a ring around it, and its name.
    pub(crate) knee: Option<(Point, String)>,
}

impl Chart {
    /// The chart in units of its SVG, as `figure.html` draws it.
    ///
    /// # Errors
    ///
    /// If plotters cannot draw the axes.
    pub(crate) fn figure(&self) -> Result<Value, ReportError> {
        self.lay_out().map_err(|error| ReportError::Chart {
            chart: self.title.clone(),
            reason: error.to_string(),
        })
    }

    fn lay_out(&self) -> Result<Value, DrawingAreaErrorKind<std::io::Error>> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let size = (self.size.0 * UNITS as u32, self.size.1 * UNITS as u32);
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(14 * UNITS)
            .margin_left(4 * UNITS)
            .margin_right(26 * UNITS)
            .x_label_area_size(46 * UNITS)
            .y_label_area_size(74 * UNITS)
            .build_cartesian_2d(
                self.x.coordinates(points().flat_map(|point| point.x)),
                self.y.coordinates(points().flat_map(|point| point.y)),
            )?;
        let mut mesh = chart.configure_mesh();
        if self.series.iter().any(|one| one.shape == Shape::Columns) {
            mesh.disable_x_mesh();
        }
        // The page's style gives lines and text their colours and sizes.
        mesh.bold_line_style(BLACK)
            .light_line_style(TRANSPARENT)
            .axis_style(TRANSPARENT)
            .axis_desc_style(("sans-serif", 15 * UNITS, FontStyle::Italic))
            .set_all_tick_mark_size(2 * UNITS)
            .x_label_formatter(&|value| (self.x.format)(*value))
            .y_label_formatter(&|value| (self.y.format)(*value))
            .x_desc(&*self.x.label)
            .y_desc(&*self.y.label)
            .draw()?;
        let plot = chart.plotting_area();
        let place = |x: f64, y: f64| plot.map_coordinate(&(x, y));
        let path = |points: &[Point]| {
            let places = points.iter().map(|point| place(point.x[0], point.y[0]));
            let places: Vec<String> = places.map(|(x, y)| format!("{x},{y}")).collect();
            places.join(" ")
        };
        let whiskers = |point: &Point| {
            let ([x, left, right], [y, low, high]) = (point.x, point.y);
            let across = (left < right).then(|| (place(left, y), place(right, y)));
            let upwards = (low < high).then(|| (place(x, low), place(x, high)));
            [across, upwards].into_iter().flatten()
        };
        let column = |point: &Point| {
            let (left, top) = place(point.x[0] - 0.5, point.y[0]);
            let (right, floor) = place(point.x[0] + 0.5, 0.0);
            let gap = UNITS.min((right - left) / 12);
            json!({ "x": left + gap, "y": top, "width": right - left - 2 * gap, "height": floor - top, "label": point.label })
        };
        let mark = |point: &Point| {
            let (x, y) = place(point.x[0], point.y[0]);
            json!({ "x": x, "y": y, "label": point.label })
        };
        let series = self.series.iter().map(|series| {
            let points = &series.points;
            let (has_marks, is_columns) = match series.shape {
                Shape::Curve => (false, false),
                shape => (true, shape == Shape::Columns),
            };
            let is_line = matches!(series.shape, Shape::Line | Shape::Curve);
            json!({
                "name": series.name,
                "colour": series.colour % COLOURS,
                "is_square": series.colour >= COLOURS,
                "line": is_line.then(|| path(points)),
                "columns": points.iter().filter(|_| is_columns).map(column).collect::<Vec<_>>(),
                "marks": points.iter().filter(|_| has_marks && !is_columns).map(mark).collect::<Vec<_>>(),
                "whiskers": points.iter().flat_map(whiskers).collect::<Vec<_>>(),
            })
        });
        let series: Vec<Value> = series.collect();
        let front = path(&self.front);
        let knee = self
            .knee
            .as_ref()
            .map(|(point, name)| json!({ "place": place(point.x[0], point.y[0]), "name": name }));
        area.present()?;
        drop((chart, area));
        // Without the outermost element, which the template writes itself.
        let axes = svg.split_once('\n').map_or("", |(_, rest)| rest);
        let axes = axes.trim_end().trim_end_matches("</svg>");
        Ok(json!({
            "title": self.title, "width": size.0, "height": size.1,
            "axes": axes, "series": series, "front": front, "knee": knee,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_few_and_ascend_within_the_axis() {
        for scale in [Scale::Linear, Scale::SymmetricLog] {
            for (low, high) in [(-2.0, 50.0), (0.0, 0.01), (-0.0005, 0.2), (515.0, 517.0)] {
                let (low, high) = (scale.position(low), scale.position(high));
                let ticks = scale.ticks(low, high);
                let positions: Vec<f64> = ticks.iter().map(|tick| scale.position(*tick)).collect();
                let is_inside = |position: &f64| (low - 1e-9..=high + 1e-9).contains(position);
                assert!(ticks.len() <= 16, "{ticks:?}");
                assert!(positions.is_sorted(), "{ticks:?}");
                assert!(positions.iter().all(is_inside), "{ticks:?}");
            }
            assert!(
                !scale
                    .ticks(scale.position(0.0), scale.position(0.2))
                    .is_empty()
            );
        }
    }
}
