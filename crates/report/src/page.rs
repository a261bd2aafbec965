//! Templates and the filters they use.

use minijinja::{Environment, UndefinedBehavior, syntax::SyntaxConfig, value::Serde};
use powerinfer_artifact::ByteSize;
use serde::Serialize;

use crate::chart::Scale;

/// Templates by name. Templates ending in `.html` escape what they print.
const TEMPLATES: [(&str, &str); 7] = [
    ("base.html", include_str!("../templates/base.html")),
    ("figure.html", include_str!("../templates/figure.html")),
    ("plan.html", include_str!("../templates/plan.html")),
    ("point.txt", include_str!("../templates/point.txt")),
    ("profile.html", include_str!("../templates/profile.html")),
    ("sweep.html", include_str!("../templates/sweep.html")),
    ("sweep.txt", include_str!("../templates/sweep.txt")),
];

/// Why a page could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The document lacks what a template needs.
    #[error("the page cannot be made from this document")]
    Template(#[from] minijinja::Error),
    /// A chart cannot be drawn.
    #[error("the chart `{chart}` cannot be drawn: {reason}")]
    Chart {
        /// Title of the chart.
        chart: String,
        /// Message of the drawing library.
        reason: String,
    },
}

/// Templates, ready to render.
pub(crate) struct Templates(Environment<'static>);

impl Templates {
    /// All templates with their filters.
    pub(crate) fn new() -> Result<Self, ReportError> {
        let mut environment = Environment::new();
        // Documents leave out what they have no value for.
        environment.set_undefined_behavior(UndefinedBehavior::Chainable);
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(syntax);
        for (name, source) in TEMPLATES {
            environment.add_template(name, source)?;
        }
        environment.add_filter("bytes", |bytes: Option<u64>| {
            or_dash(bytes, |bytes| unbroken(&ByteSize(bytes).to_string()))
        });
        environment.add_filter("percent", |share: Option<f64>| {
            or_dash(share, |share| unbroken(&percent(share)))
        });
        environment.add_filter("short_percent", |share: Option<f64>| {
            or_dash(share, |share| unbroken(&short_percent(share)))
        });
        environment.add_filter("speed", |speed: Option<f64>| or_dash(speed, speed_figure));
        environment.add_filter("fixed", |value: Option<f64>, digits: usize| {
            or_dash(value, |value| format!("{value:.digits$}"))
        });
        environment.add_filter("signed", |value: Option<f64>, digits: usize| {
            or_dash(value, |value| format!("{value:+.digits$}"))
        });
        // A heat map's share of the warm colour, relative to its largest value.
        environment.add_filter("warmth", |value: Option<f64>, largest: f64| {
            let position = |value: f64| Scale::SymmetricLog.position(value.max(0.0));
            (100.0 * position(value.unwrap_or(0.0)) / position(largest)).round()
        });
        Ok(Self(environment))
    }

    /// The template `name` filled with the fields of `context`.
    pub(crate) fn render(
        &self,
        name: &str,
        context: impl Serialize,
    ) -> Result<String, ReportError> {
        Ok(self.0.get_template(name)?.render(Serde(context))?)
    }
}

fn or_dash<T>(value: Option<T>, format: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), format)
}

/// `text` with a value and its unit on one line.
fn unbroken(text: &str) -> String {
    text.replace(' ', "\u{a0}")
}

/// A share as a percentage with one digit.
fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A share as a percentage with as few digits as an axis or a cell has room for.
pub(crate) fn short_percent(share: f64) -> String {
    let value = 100.0 * share;
    match value.abs() {
        size if size < 0.05 => "0%".to_owned(),
        size if size < 1.0 => format!("{value:.1}%"),
        _ => format!("{value:.0}%"),
    }
}

/// A speed with three significant digits.
fn speed_figure(speed: f64) -> String {
    match speed {
        speed if speed >= 100.0 => format!("{speed:.0}"),
        speed if speed >= 10.0 => format!("{speed:.1}"),
        speed => format!("{speed:.2}"),
    }
}
