//! Charts with two axes: plotters computes the coordinates and draws axes, grid and labels; `figure.html` draws the series.

use std::ops::Range;

use plotters::{
    coord::{
        ranged1d::{DefaultFormatting, KeyPointHint, Ranged},
        types::RangedCoordf64,
    },
    prelude::*,
};
use serde::Serialize;

use crate::ReportError;

/// Units of the SVG in a pixel: plotters places everything on whole numbers.
const UNITS: i32 = 10;
/// Colours that tell series apart; further series begin anew with square marks.
const COLOURS: usize = 6;
/// Labels along an axis, at most.
const LABELS: usize = 6;

/// How values lie along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Proportionally.
    Linear,
    /// Proportionally up to 0.1 %, logarithmically beyond, for negative values too.
    SymmetricLog,
}

/// Where the symmetric logarithmic scale bends.
const BEND: f64 = 1e-3;

impl Scale {
    /// Position of `value` along the axis, up to a linear map.
    pub(crate) fn position(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::SymmetricLog => (value / BEND).asinh(),
        }
    }

    /// Value at `position`.
    fn value(self, position: f64) -> f64 {
        match self {
            Self::Linear => position,
            Self::SymmetricLog => position.sinh() * BEND,
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
        let positions = self.positions.range();
        self.scale.value(positions.start)..self.scale.value(positions.end)
    }
}

/// An axis of a chart.
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    /// Text of a value beside the axis; a value without a text has no grid line.
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
        let (mut low, mut high) = all.map(|value| self.scale.position(value)).fold(
            (f64::INFINITY, f64::NEG_INFINITY),
            |(low, high), position| (low.min(position), high.max(position)),
        );
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        let room = match high - low {
            0.0 => low.abs().max(1e-9) * 0.1,
            span => span * self.padding,
        };
        (low, high) = (low - room, high + room);
        let mut ticks = self.scale.ticks(low, high);
        ticks.retain(|tick| !(self.format)(*tick).is_empty());
        Coordinates {
            scale: self.scale,
            positions: (low..high).into(),
            ticks,
        }
    }
}

/// A point of a series.
#[derive(Debug, Clone, Default)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Ends of a whisker along x.
    pub(crate) x_range: Option<(f64, f64)>,
    /// Ends of a whisker along y.
    pub(crate) y_range: Option<(f64, f64)>,
    /// Tooltip.
    pub(crate) label: String,
}

/// How the points of a series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
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
    pub(crate) front: Vec<(f64, f64)>,
    /// A point with a ring around it, and its name.
    pub(crate) knee: Option<(f64, f64, String)>,
}

/// A chart in units of its SVG, as `figure.html` draws it.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    title: String,
    width: u32,
    height: u32,
    /// Axes, grid and labels, as SVG.
    axes: String,
    series: Vec<FigureSeries>,
    front: String,
    knee: Option<(i32, i32, String)>,
}

#[derive(Debug, Serialize)]
struct FigureSeries {
    name: String,
    shape: Shape,
    colour: usize,
    is_square: bool,
    /// All points, as the attribute of a polyline.
    path: String,
    marks: Vec<Mark>,
    /// `x1`, `y1`, `x2` and `y2` of each.
    whiskers: Vec<[i32; 4]>,
}

/// A mark around (`x`, `y`), or the column of that size whose top left corner it is.
#[derive(Debug, Serialize)]
struct Mark {
    x: i32,
    y: i32,
    width: i32,
    height: i32,
    label: String,
}

impl Chart {
    /// The chart laid out.
    pub(crate) fn figure(&self) -> Result<Figure, ReportError> {
        self.lay_out().map_err(|error| ReportError::Chart {
            chart: self.title.clone(),
            reason: error.to_string(),
        })
    }

    fn lay_out(&self) -> Result<Figure, DrawingAreaErrorKind<std::io::Error>> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let ends = |value: f64, range: Option<(f64, f64)>| {
            let (low, high) = range.unwrap_or((value, value));
            [low, value, high]
        };
        let xs = points().flat_map(|point| ends(point.x, point.x_range));
        let ys = points().flat_map(|point| ends(point.y, point.y_range));
        let (width, height) = (self.size.0 * UNITS as u32, self.size.1 * UNITS as u32);
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin_top(14 * UNITS)
            .margin_left(6 * UNITS)
            .margin_right(26 * UNITS)
            .x_label_area_size(46 * UNITS)
            .y_label_area_size(72 * UNITS)
            .build_cartesian_2d(self.x.coordinates(xs), self.y.coordinates(ys))?;
        let text = ("sans-serif", 15 * UNITS);
        let mut mesh = chart.configure_mesh();
        if self
            .series
            .iter()
            .any(|series| series.shape == Shape::Columns)
        {
            mesh.disable_x_mesh();
        }
        mesh.bold_line_style(BLACK)
            .light_line_style(TRANSPARENT)
            .axis_style(TRANSPARENT)
            .label_style(text)
            .axis_desc_style((text.0, text.1, FontStyle::Italic))
            .set_all_tick_mark_size(3 * UNITS)
            .x_label_formatter(&|value| (self.x.format)(*value))
            .y_label_formatter(&|value| (self.y.format)(*value))
            .x_desc(&*self.x.label)
            .y_desc(&*self.y.label)
            .draw()?;
        let place = |x: f64, y: f64| chart.plotting_area().map_coordinate(&(x, y));
        let path = |places: &mut dyn Iterator<Item = (f64, f64)>| {
            let places = places.map(|(x, y)| place(x, y));
            let places: Vec<String> = places.map(|(x, y)| format!("{x},{y}")).collect();
            places.join(" ")
        };
        let series = self.series.iter().map(|series| {
            let points = series.points.iter();
            let whiskers = points.clone().flat_map(|point| {
                let along = point
                    .x_range
                    .map(|(low, high)| [(low, point.y), (high, point.y)]);
                let upwards = point
                    .y_range
                    .map(|(low, high)| [(point.x, low), (point.x, high)]);
                [along, upwards].into_iter().flatten()
            });
            let whiskers = whiskers.map(|ends| {
                let [from, to] = ends.map(|(x, y)| place(x, y));
                [from.0, from.1, to.0, to.1]
            });
            let marks = points.clone().map(|point| {
                let label = point.label.clone();
                let (x, y) = place(point.x, point.y);
                if series.shape != Shape::Columns {
                    return Mark {
                        x,
                        y,
                        width: 0,
                        height: 0,
                        label,
                    };
                }
                let (left, floor) = place(point.x - 0.5, 0.0);
                let (right, _) = place(point.x + 0.5, 0.0);
                let gap = UNITS.min((right - left) / 12);
                Mark {
                    x: left + gap,
                    y,
                    width: right - left - 2 * gap,
                    height: floor - y,
                    label,
                }
            });
            FigureSeries {
                name: series.name.clone(),
                shape: series.shape,
                colour: series.colour % COLOURS,
                is_square: series.colour >= COLOURS,
                path: path(&mut points.clone().map(|point| (point.x, point.y))),
                marks: match series.shape {
                    Shape::Curve => Vec::new(),
                    _ => marks.collect(),
                },
                whiskers: whiskers.collect(),
            }
        });
        let series = series.collect();
        let front = path(&mut self.front.iter().copied());
        let knee = self.knee.as_ref().map(|(x, y, name)| {
            let (x, y) = place(*x, *y);
            (x, y, name.clone())
        });
        area.present()?;
        drop((chart, area));
        // Without the outermost element, which the template writes itself.
        let axes = svg.split_once('\n').map_or("", |(_, rest)| rest);
        let axes = axes.trim_end().trim_end_matches("</svg>").to_owned();
        Ok(Figure {
            title: self.title.clone(),
            width,
            height,
            axes,
            series,
            front,
            knee,
        })
    }
}
