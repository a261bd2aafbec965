//! The page of a profile: sparsity per layer, cumulative activations, locality and overlaps. It runs no scripts.

use serde_json::{Value, json};

use crate::{
    ReportError,
    chart::{Axis, Chart, Point, Scale, Series, Shape},
    page::{Templates, short_percent},
};

/// Size of a chart in pixels.
const SIZE: (u32, u32) = (720, 260);

/// The page of the profile whose `profile.json` is `document`.
///
/// Each of `curves` is a layer's cumulative curve, the last one that of all layers together: element `p` of `n + 1` is
/// the share of activations carried by the hottest `p / n` of the neurons.
///
/// # Errors
///
/// Where a chart cannot be drawn, or the profile lacks what the page shows.
pub fn profile_page(document: &Value, curves: &[Vec<f64>]) -> Result<String, ReportError> {
    let layers = document["layers"].as_array().into_iter().flatten();
    let sparsity: Vec<f64> = layers
        .filter_map(|layer| layer["sparsity"].as_f64())
        .collect();
    let context = json!({
        "profile": document,
        "sparsity": sparsity_chart(&sparsity).figure()?,
        "cumulative": cumulative_chart(curves).figure()?,
    });
    Templates::new()?.render("profile.html", context)
}

/// An axis of shares from 0 to 100 %.
fn shares(label: &str) -> Axis {
    Axis {
        label: label.to_owned(),
        scale: Scale::Linear,
        format: short_percent,
        include: vec![0.0, 1.0],
        padding: 0.0,
    }
}

fn chart(title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Chart {
    let title = title.to_owned();
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

fn sparsity_chart(sparsity: &[f64]) -> Chart {
    let point = |(layer, share): (usize, &f64)| Point {
        x: layer as f64,
        y: *share,
        label: format!("layer {layer}: {:.1} % zeros", 100.0 * share),
        ..Point::default()
    };
    let columns = Series {
        name: "sparsity".to_owned(),
        shape: Shape::Columns,
        colour: 0,
        points: sparsity.iter().enumerate().map(point).collect(),
    };
    let layers = Axis {
        include: vec![-0.5, sparsity.len() as f64 - 0.5],
        format: |value| match (value - value.round()).abs() < 1e-9 {
            true => format!("{value:.0}"),
            false => String::new(),
        },
        ..shares("layer")
    };
    chart(
        "Sparsity per layer",
        layers,
        shares("exact zeros"),
        vec![columns],
    )
}

fn cumulative_chart(curves: &[Vec<f64>]) -> Chart {
    let last = curves.len().saturating_sub(1);
    let series = curves.iter().enumerate().map(|(layer, curve)| {
        let steps = curve.len().saturating_sub(1).max(1) as f64;
        let point = |(step, share): (usize, &f64)| Point {
            x: step as f64 / steps,
            y: *share,
            ..Point::default()
        };
        Series {
            name: match layer == last {
                true => "all layers".to_owned(),
                false => format!("layer {layer}"),
            },
            shape: Shape::Curve,
            colour: usize::from(layer == last),
            points: curve.iter().enumerate().map(point).collect(),
        }
    });
    let (x, y) = (shares("hottest neurons"), shares("activations"));
    chart("Cumulative activations", x, y, series.collect())
}
