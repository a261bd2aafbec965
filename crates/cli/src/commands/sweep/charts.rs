//! Pictures of figures, as SVG that takes its colours from the page: points and lines between two axes, and maps of
//! layers.

use std::fmt::Write;

use powerinfer_artifact::page::escape;

/// Size of a picture in its own units, which are pixels on a page as wide as a phone.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 300.0;
/// Room for what is written beside the axes: left, right, top, bottom.
const ROOM: [f64; 4] = [78.0, 26.0, 14.0, 46.0];
/// Colours that tell series apart; further ones begin anew, with another mark.
pub(super) const COLOURS: usize = 6;

/// How figures lie along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// Evenly.
    Even,
    /// Evenly up to a tenth of a percent, by powers of ten beyond: what is small is seen beside what is large.
    Bent,
}

/// Where the bent scale bends.
const BEND: f64 = 1e-3;

impl Scale {
    fn along(self, value: f64) -> f64 {
        match self {
            Self::Even => value,
            Self::Bent => (value / BEND).asinh(),
        }
    }

    /// Figures to write beside the axis from `low` to `high`.
    fn ticks(self, low: f64, high: f64) -> Vec<f64> {
        match self {
            Self::Even => even_ticks(low, high),
            Self::Bent => {
                const STEPS: [f64; 9] = [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0];
                let all = STEPS.iter().flat_map(|step| [0.0 - step, *step]);
                let mut ticks: Vec<f64> = all.filter(|tick| (low..=high).contains(tick)).collect();
                ticks.sort_by(f64::total_cmp);
                ticks.dedup();
                ticks
            }
        }
    }
}

/// Four to eight round figures from `low` to `high`.
fn even_ticks(low: f64, high: f64) -> Vec<f64> {
    let span = (high - low).max(f64::MIN_POSITIVE);
    let power = 10f64.powf((span / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let step = steps
        .into_iter()
        .find(|step| span / step <= 6.0)
        .unwrap_or(span);
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last.min(first + 20))
        .map(|tick| tick as f64 * step)
        .collect()
}

/// An axis.
pub(super) struct Axis {
    pub(super) label: String,
    pub(super) scale: Scale,
    /// How a figure is written.
    pub(super) figure: fn(f64) -> String,
    /// What is always in sight.
    pub(super) holds: Vec<f64>,
}

/// A point of a picture.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) x: f64,
    pub(super) y: f64,
    /// Where an interval of `y` begins and ends.
    pub(super) interval: Option<(f64, f64)>,
    /// Where a range of `x` does.
    pub(super) range: Option<(f64, f64)>,
    /// What is said of it.
    pub(super) title: String,
}

/// Points that belong together.
pub(super) struct Series {
    pub(super) name: String,
    /// Which colour.
    pub(super) colour: usize,
    pub(super) marks: Vec<Mark>,
    /// Whether a line goes through them.
    pub(super) is_line: bool,
}

/// A picture of points between two axes.
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// A line of its own, dashed, from point to point.
    pub(super) front: Vec<(f64, f64)>,
    /// A point that is ringed, and what is written beside it.
    pub(super) knee: Option<(f64, f64, String)>,
}

/// From figures to places in the picture.
struct Frame {
    scale: Scale,
    low: f64,
    high: f64,
    begin: f64,
    end: f64,
}

impl Frame {
    /// Holds all of `values`, with a little room, between two places.
    fn of(scale: Scale, values: impl Iterator<Item = f64>, begin: f64, end: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| value.is_finite()) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        let (mut from, mut to) = (scale.along(low), scale.along(high));
        let room = match to - from {
            0.0 => from.abs().max(1e-9) * 0.1,
            span => span * 0.05,
        };
        (from, to) = (from - room, to + room);
        Self {
            scale,
            low: from,
            high: to,
            begin,
            end,
        }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (self.scale.along(value) - self.low) / (self.high - self.low);
        self.begin + share.clamp(0.0, 1.0) * (self.end - self.begin)
    }

    fn ticks(&self) -> Vec<f64> {
        let back = |along: f64| match self.scale {
            Scale::Even => along,
            Scale::Bent => BEND * along.sinh(),
        };
        self.scale.ticks(back(self.low), back(self.high))
    }
}

impl Plot {
    /// The picture, with a legend where there are several series.
    pub(super) fn draw(&self, page: &mut String) {
        let [left, right, top, bottom] = ROOM;
        let marks = || self.series.iter().flat_map(|series| &series.marks);
        let xs = marks()
            .flat_map(|mark| {
                let (least, most) = mark.range.unwrap_or((mark.x, mark.x));
                [least, mark.x, most]
            })
            .chain(self.x.holds.iter().copied());
        let ys = marks().flat_map(|mark| {
            let (low, high) = mark.interval.unwrap_or((mark.y, mark.y));
            [low, mark.y, high]
        });
        let ys = ys.chain(self.y.holds.iter().copied());
        let across = Frame::of(self.x.scale, xs, left, WIDTH - right);
        let up = Frame::of(self.y.scale, ys, HEIGHT - bottom, top);
        // Writing to a string cannot fail.
        let _ = write!(
            page,
            "<figure class=\"plot\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            escape(&self.title)
        );
        self.draw_axes(page, &across, &up);
        if self.front.len() > 1 {
            let places: Vec<String> = self
                .front
                .iter()
                .map(|(x, y)| format!("{:.1},{:.1}", across.at(*x), up.at(*y)))
                .collect();
            let _ = write!(
                page,
                "<polyline class=\"front\" points=\"{}\"/>",
                places.join(" ")
            );
        }
        let place = |mark: &Mark| (across.at(mark.x), up.at(mark.y));
        for series in &self.series {
            let colour = series.colour % COLOURS;
            if series.is_line && series.marks.len() > 1 {
                let places: Vec<String> = series
                    .marks
                    .iter()
                    .map(place)
                    .map(|(x, y)| format!("{x:.1},{y:.1}"))
                    .collect();
                let places = places.join(" ");
                let _ = write!(
                    page,
                    "<polyline class=\"line c{colour}\" points=\"{places}\"/>"
                );
            }
            for mark in &series.marks {
                let (x, y) = place(mark);
                if let Some((least, most)) = mark.range {
                    let _ = write!(
                        page,
                        "<line class=\"bar c{colour}\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
                        across.at(least),
                        across.at(most)
                    );
                }
                let Some((low, high)) = mark.interval else {
                    continue;
                };
                let _ = write!(
                    page,
                    "<line class=\"bar c{colour}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                    up.at(low),
                    up.at(high)
                );
            }
        }
        // Above all lines.
        for series in &self.series {
            for mark in &series.marks {
                draw_mark(page, series.colour, place(mark), &mark.title);
            }
        }
        if let Some((x, y, told)) = &self.knee {
            let knee = (across.at(*x), up.at(*y));
            let places: Vec<(f64, f64)> = marks()
                .map(|mark| (across.at(mark.x), up.at(mark.y)))
                .collect();
            draw_knee(page, knee, told, &places);
        }
        page.push_str("</svg>");
        if self.series.len() > 1 {
            page.push_str("<figcaption>");
            for series in &self.series {
                let shape = if series.colour < COLOURS {
                    "dot"
                } else {
                    "dot square"
                };
                let _ = write!(
                    page,
                    "<span class=\"key\"><i class=\"{shape} c{}\"></i>{}</span>",
                    series.colour % COLOURS,
                    escape(&series.name)
                );
            }
            page.push_str("</figcaption>");
        }
        page.push_str("</figure>\n");
    }

    fn draw_axes(&self, page: &mut String, across: &Frame, up: &Frame) {
        let [left, right, top, bottom] = ROOM;
        let (floor, wall) = (HEIGHT - bottom, WIDTH - right);
        // So many figures fit beside each other.
        let ticks = across.ticks();
        let every = ticks.len().div_ceil(6).max(1);
        for tick in ticks.iter().step_by(every) {
            let x = across.at(*tick);
            let _ = write!(
                page,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{floor}\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                floor + 16.0,
                escape(&(self.x.figure)(*tick))
            );
        }
        let mut last = f64::INFINITY;
        for tick in up.ticks() {
            let y = up.at(tick);
            let _ = write!(
                page,
                "<line class=\"grid\" x1=\"{left}\" x2=\"{wall}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
            );
            if last - y < 14.0 {
                continue;
            }
            last = y;
            let _ = write!(
                page,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                y + 4.0,
                escape(&(self.y.figure)(tick))
            );
        }
        let middle = (left + wall) / 2.0;
        let height = (top + floor) / 2.0;
        let _ = write!(
            page,
            "<text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"name\" transform=\"translate(13 {height:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 8.0,
            escape(&self.x.label),
            escape(&self.y.label)
        );
    }
}

/// Rings the point at `knee` and writes `told` beside it, where that covers the fewest of `marks`.
fn draw_knee(page: &mut String, (x, y): (f64, f64), told: &str, marks: &[(f64, f64)]) {
    // About, for letters differ; of a phone's larger ones.
    let width = 8.5 * told.chars().count() as f64;
    let [left, right, top, bottom] = ROOM;
    let sides = [
        (12.0, "start", 0.0),
        (-12.0, "end", width),
        (0.0, "middle", width / 2.0),
    ];
    let heights = [-14.0, 26.0, -34.0, 46.0, -54.0, 66.0];
    let places = heights
        .iter()
        .flat_map(|height| sides.map(|side| (*height, side)));
    let inside = places.filter(|(height, (shift, _, before))| {
        let begin = x + shift - before;
        let is_across = begin >= left && begin + width <= WIDTH - right;
        is_across && (top + 12.0..HEIGHT - bottom - 4.0).contains(&(y + height))
    });
    let covered = |(height, (shift, _, before)): &(f64, (f64, &str, f64))| {
        let begin = x + shift - before;
        let covers = |(mark_x, mark_y): &&(f64, f64)| {
            (begin - 5.0..begin + width + 5.0).contains(mark_x)
                && (y + height - 17.0..y + height + 8.0).contains(mark_y)
        };
        marks.iter().filter(covers).count()
    };
    let best = inside.min_by_key(covered);
    let (height, (shift, anchor, _)) = best.unwrap_or((-14.0, (-12.0, "end", width)));
    let _ = write!(
        page,
        "<circle class=\"knee\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"9\"/><text class=\"knee\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
        x + shift,
        y + height,
        escape(told)
    );
}

/// Draws a mark of the colour `series` at a place.
fn draw_mark(page: &mut String, series: usize, (x, y): (f64, f64), title: &str) {
    let (colour, title) = (series % COLOURS, escape(title));
    let _ = match series < COLOURS {
        true => write!(
            page,
            "<circle class=\"mark c{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{title}</title></circle>"
        ),
        false => write!(
            page,
            "<rect class=\"mark c{colour}\" x=\"{:.1}\" y=\"{:.1}\" width=\"8\" height=\"8\"><title>{title}</title></rect>",
            x - 4.0,
            y - 4.0
        ),
    };
}

/// A row of a map: a name, and of each layer a figure, what is said of it, and what is written where there is room.
pub(super) struct MapRow {
    pub(super) name: String,
    pub(super) cells: Vec<(f64, String, String)>,
}

/// Draws a map whose cells are the warmer the larger their figures, by powers of ten.
pub(super) fn map(page: &mut String, title: &str, rows: &[MapRow]) {
    const NAMES: f64 = 116.0;
    const ROW: f64 = 24.0;
    // So many have room for their figures.
    const FEW: usize = 8;
    let columns = rows.iter().map(|row| row.cells.len()).max().unwrap_or(0);
    if columns == 0 {
        return;
    }
    let height = rows.len() as f64 * ROW + 34.0;
    let width = (WIDTH - NAMES - 6.0) / columns as f64;
    let all = || {
        rows.iter()
            .flat_map(|row| row.cells.iter().map(|cell| cell.0))
    };
    let most = all().fold(0.0, f64::max).max(BEND);
    let _ = write!(
        page,
        "<figure class=\"plot\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">",
        escape(title)
    );
    for (index, row) in rows.iter().enumerate() {
        let top = index as f64 * ROW;
        let _ = write!(
            page,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            NAMES - 6.0,
            top + ROW / 2.0 + 4.0,
            escape(&row.name)
        );
        for (layer, (figure, told, shown)) in row.cells.iter().enumerate() {
            let warmth = Scale::Bent.along(figure.max(0.0)) / Scale::Bent.along(most);
            let _ = write!(
                page,
                "<rect class=\"cell\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"color-mix(in srgb,var(--warm) {:.0}%,var(--paper))\"><title>{}</title></rect>",
                NAMES + layer as f64 * width,
                (width - 1.0).max(0.5),
                ROW - 1.0,
                100.0 * warmth.clamp(0.0, 1.0),
                escape(told)
            );
            if columns <= FEW {
                let _ = write!(
                    page,
                    "<text class=\"figure\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    NAMES + (layer as f64 + 0.5) * width,
                    top + ROW / 2.0 + 4.0,
                    escape(shown)
                );
            }
        }
    }
    let every = columns.div_ceil(12);
    for layer in (0..columns).step_by(every) {
        let _ = write!(
            page,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{layer}</text>",
            NAMES + (layer as f64 + 0.5) * width,
            rows.len() as f64 * ROW + 14.0
        );
    }
    let _ = writeln!(
        page,
        "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">layer</text></svg></figure>",
        (NAMES + WIDTH) / 2.0,
        height - 4.0
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_few_round_figures_are_written(low in -1e6f64..1e6, span in 1e-3f64..1e6) {
            let ticks = even_ticks(low, low + span);
            prop_assert!((1..=8).contains(&ticks.len()), "{:?}", ticks);
            for tick in &ticks {
                prop_assert!((low - span * 1e-6..=low + span * (1.0 + 1e-6)).contains(tick));
            }
        }

        #[test]
        fn places_keep_the_order(values in prop::collection::vec(-2.0f64..50.0, 1..20)) {
            for scale in [Scale::Even, Scale::Bent] {
                let frame = Frame::of(scale, values.iter().copied(), 10.0, 90.0);
                let mut sorted = values.clone();
                sorted.sort_by(f64::total_cmp);
                let places: Vec<f64> = sorted.iter().map(|value| frame.at(*value)).collect();
                prop_assert!(places.is_sorted());
                prop_assert!(places.iter().all(|place| (10.0..=90.0).contains(place)));
            }
        }
    }

    #[test]
    fn what_is_said_of_the_knee_covers_no_mark_where_it_need_not() {
        let knee = (240.0, 150.0);
        let above_right = (290.0, 132.0);
        let mut page = String::new();
        draw_knee(&mut page, knee, "knee: exact", &[knee, above_right]);
        assert!(page.contains("text-anchor=\"end\""), "{page}");
        let mut plain = String::new();
        draw_knee(&mut plain, knee, "knee: exact", &[knee]);
        assert!(plain.contains("text-anchor=\"start\""), "{plain}");
    }
}
