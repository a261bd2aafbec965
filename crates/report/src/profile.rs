//! The page of a profile: sparsity per layer, cumulative activations, locality and overlaps. It runs no scripts.

use serde_json::{Value, json};

use crate::{
    ReportError,
    chart::{Axis, Chart, Point, Scale, Series, Shape},
    page::{Templates, short_percent},
};

/// The page of the profile whose `profile.json` is `document`.
///
/// Each of `curves` is a layer's cumulative curve, the last one that of all layers together: element `p` of `n + 1` is
/// the share of activations carried by the hottest `p / n` of the neurons.
///
/// `frequencies`, `[layers, experts]`, holds the share of tokens that selected each expert; empty in dense models. `hit_rates` holds the
/// hit rates of a fixed set and of a cache, if 0, 1, … all experts are kept in fast memory; each is empty if unknown.
///
/// # Errors
///
/// If a chart cannot be drawn, or the profile lacks what the page shows.
pub fn profile_page(
    document: &Value,
    curves: &[Vec<f64>],
    frequencies: &[Vec<f64>],
    hit_rates: &[Vec<f64>; 2],
) -> Result<String, ReportError> {
    let layers = document["layers"].as_array().map_or(&[][..], Vec::as_slice);
    let column = |(layer, found): (usize, &Value)| {
        let share = found["sparsity"].as_f64()?;
        let label = format!("layer {layer}: {:.1}% zeros", 100.0 * share);
        Some(point(layer as f64, share, label))
    };
    let columns = layers.iter().enumerate().filter_map(column);
    let columns = series("sparsity".to_owned(), Shape::Columns, 0, columns.collect());
    let of_layers = Axis {
        include: vec![-0.5, layers.len() as f64 - 0.5],
        format: |value| {
            if (value - value.round()).abs() < 1e-9 {
                format!("{value:.0}")
            } else {
                String::new()
            }
        },
        ..shares("layer")
    };
    let sparsity = chart(
        "Sparsity per layer",
        of_layers,
        shares("exact zeros"),
        vec![columns],
    );
    let curves = curves.iter().enumerate().map(|(layer, curve)| {
        let last = (curve.len() - 1).max(1) as f64;
        let points = curve.iter().enumerate();
        let points = points.map(|(step, share)| point(step as f64 / last, *share, String::new()));
        let (name, colour) = if layer + 1 == curves.len() {
            ("all layers".to_owned(), 1)
        } else {
            (format!("layer {layer}"), 0)
        };
        series(name, Shape::Curve, colour, points.collect())
    });
    let (x, y) = (shares("hottest neurons"), shares("activations"));
    let cumulative = chart("Cumulative activations", x, y, curves.collect());
    let experts = if frequencies.is_empty() {
        Value::Null
    } else {
        json!({ "frequencies": frequencies, "hit_rates": hit_rate_chart(hit_rates).figure()? })
    };
    let context = json!({
        "profile": document,
        "sparsity": sparsity.figure()?,
        "cumulative": cumulative.figure()?,
        "experts": experts,
    });
    Templates::new()?.render("profile.html", context)
}

/// Chart of the mean hit rates, over all layers, of a fixed set and of a cache, if 0, 1, … all experts are kept in fast memory.
fn hit_rate_chart(hit_rates: &[Vec<f64>; 2]) -> Chart {
    let names = ["fixed set", "cache"].into_iter().zip(2..);
    let curves = names.zip(hit_rates).filter(|(_, rates)| !rates.is_empty());
    let curves = curves.map(|((name, colour), rates)| {
        let all = (rates.len() - 1).max(1) as f64;
        let points = rates.iter().enumerate();
        let points = points.map(|(held, rate)| point(held as f64 / all, *rate, String::new()));
        series(name.to_owned(), Shape::Curve, colour, points.collect())
    });
    let (x, y) = (shares("experts in fast memory"), shares("hit rate"));
    chart("Hit rate of experts in fast memory", x, y, curves.collect())
}

fn point(x: f64, y: f64, label: String) -> Point {
    Point {
        x: [x; 3],
        y: [y; 3],
        label,
    }
}

fn series(name: String, shape: Shape, colour: usize, points: Vec<Point>) -> Series {
    Series {
        name,
        shape,
        colour,
        points,
    }
}

/// An axis of shares from 0 to 100%.
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
    let (title, front) = (title.to_owned(), Vec::new());
    Chart {
        title,
        size: (720, 260),
        x,
        y,
        series,
        front,
        knee: None,
    }
}
