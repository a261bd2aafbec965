//! A profile as one page: sparsity per layer, the cumulative activation curve, locality, and how
//! alike the sources are. The page needs nothing from elsewhere and runs no scripts.

use std::fmt::Write;

use powerinfer_artifact::page::{self, escape};

use crate::{LOCALITY_WINDOWS, LayerActivity, Profile, ProfileDocument, Skew};

/// Width and height of a chart, in pixels at its natural size.
const CHART: (f64, f64) = (720.0, 260.0);
/// Room for the axes: left, bottom.
const MARGIN: (f64, f64) = (48.0, 36.0);
/// Points of a curve.
const POINTS: usize = 100;

/// The page for `profile`.
pub fn html(profile: &Profile) -> String {
    let body = profile.document();
    let header = profile.header();
    let title = format!("Profile of {}", header.model.name);
    let about = format!(
        "{} · model {} · {} tokens · {} layers of {} neurons",
        header.tool,
        header.model.fingerprint,
        body.tokens,
        body.layers.len(),
        body.ffn_size,
    );
    let mut page = page::begin(&title, &about);
    summary(&mut page, body);
    sparsity(&mut page, body);
    curve(&mut page, profile.activities());
    locality(&mut page, body);
    sources(&mut page, body);
    layers(&mut page, body);
    page + page::END
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn summary(page: &mut String, body: &ProfileDocument) {
    let _ = writeln!(
        page,
        "<p>{} of all FFN activations are exactly zero. Of the neurons of all layers, {} carry \
         half of the others, {} carry 80 %, {} carry 95 %. The hot sets (the hottest 20 % of a \
         layer) of two independent halves of the text overlap by {} on average.</p>",
        percent(body.mean(|layer| layer.sparsity)),
        percent(body.neurons_for.half),
        percent(body.neurons_for.most),
        percent(body.neurons_for.nearly_all),
        percent(body.mean(|layer| layer.half_overlap)),
    );
}

/// Opens a chart with a vertical axis from 0 to 100 %.
fn begin_chart(page: &mut String, title: &str, about: &str) {
    let (width, height) = CHART;
    let left = MARGIN.0;
    let _ = write!(
        page,
        "<h2>{title}</h2><p><small>{about}</small></p>\n\
         <svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">"
    );
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let y = vertical(share);
        let _ = write!(
            page,
            "<line x1=\"{left}\" x2=\"{width}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"var(--faint)\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
            left - 6.0,
            y + 4.0,
            100.0 * share
        );
    }
}

/// Where a share is on the vertical axis.
fn vertical(share: f64) -> f64 {
    let top = 8.0;
    let bottom = CHART.1 - MARGIN.1;
    bottom - share * (bottom - top)
}

/// Where a share is on the horizontal axis.
fn horizontal(share: f64) -> f64 {
    MARGIN.0 + share * (CHART.0 - MARGIN.0 - 24.0)
}

/// A word below the horizontal axis.
fn label(page: &mut String, share: f64, text: &str) {
    let _ = write!(
        page,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
        horizontal(share),
        CHART.1 - MARGIN.1 + 18.0
    );
}

fn sparsity(page: &mut String, body: &ProfileDocument) {
    begin_chart(
        page,
        "Sparsity per layer",
        "Share of activations that are exactly zero; first layer on the left.",
    );
    let count = body.layers.len().max(1) as f64;
    for layer in &body.layers {
        let (x, next) = (
            horizontal(layer.layer as f64 / count),
            horizontal((layer.layer + 1) as f64 / count),
        );
        let y = vertical(layer.sparsity);
        let _ = write!(
            page,
            "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"var(--mark)\">\
             <title>layer {}: {} zeros</title></rect>",
            x + 1.0,
            (next - x - 2.0).max(0.5),
            vertical(0.0) - y,
            layer.layer,
            percent(layer.sparsity)
        );
        if layer.layer.is_multiple_of(body.layers.len().div_ceil(12)) {
            let middle = (layer.layer as f64 + 0.5) / count;
            label(page, middle, &layer.layer.to_string());
        }
    }
    page.push_str("</svg>\n");
}

fn curve(page: &mut String, activities: &[LayerActivity]) {
    begin_chart(
        page,
        "Cumulative activations",
        "Share of activations (upwards) carried by the hottest share of neurons (to the right): \
         all layers together, and each layer as a thin line.",
    );
    let mut line = |skew: &Skew, style: &str, title: &str| {
        let points: Vec<String> = (0..=POINTS)
            .map(|point| {
                let share = point as f64 / POINTS as f64;
                let (x, y) = (horizontal(share), vertical(skew.activations_of(share)));
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let _ = write!(
            page,
            "<polyline points=\"{}\" fill=\"none\" {style}><title>{title}</title></polyline>",
            points.join(" ")
        );
    };
    for (layer, activity) in activities.iter().enumerate() {
        let title = format!("layer {layer}");
        line(&activity.skew(), "stroke=\"var(--soft)\"", &title);
    }
    let all = activities.iter().flat_map(|activity| &activity.active);
    let all = Skew::of(all.copied().collect());
    let style = "stroke=\"var(--warm)\" stroke-width=\"2.5\"";
    line(&all, style, "all layers");
    for step in 0..=5 {
        let share = f64::from(step) / 5.0;
        label(page, share, &format!("{:.0} %", 100.0 * share));
    }
    page.push_str("</svg>\n");
}

fn locality(page: &mut String, body: &ProfileDocument) {
    page.push_str(
        "<h2>Temporal locality</h2><p><small>Share of a token's active neurons that were active \
         on at least one of the tokens before it.</small></p>\n<table><tr>",
    );
    for window in LOCALITY_WINDOWS {
        let _ = write!(page, "<th>last {window}</th>");
    }
    page.push_str("</tr><tr>");
    for share in body.locality() {
        let shown = share.map_or_else(|| "–".to_owned(), percent);
        let _ = write!(page, "<td>{shown}</td>");
    }
    page.push_str("</tr></table>\n");
}

fn sources(page: &mut String, body: &ProfileDocument) {
    page.push_str(
        "<h2>Overlap of the sources</h2><p><small>Jaccard similarity of the hot sets (the hottest \
         20 % of a layer) on text from different sources, on average over the layers.</small></p>\n\
         <div class=\"scroll\"><table><tr><th>source</th><th>tokens</th>",
    );
    for number in 1..=body.sources.len() {
        let _ = write!(page, "<th>{number}</th>");
    }
    page.push_str("</tr>\n");
    for (number, (source, row)) in body.sources.iter().zip(&body.source_overlap).enumerate() {
        let _ = write!(
            page,
            "<tr><td>{} {}</td><td>{}</td>",
            number + 1,
            escape(&source.name),
            source.tokens
        );
        for share in row {
            let _ = write!(
                page,
                "<td style=\"background:color-mix(in srgb,var(--mark) {:.0}%,transparent)\">{}</td>",
                60.0 * share,
                percent(*share)
            );
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

fn layers(page: &mut String, body: &ProfileDocument) {
    page.push_str(
        "<h2>Layers</h2><div class=\"scroll\"><table><tr><th>layer</th><th>zeros</th>\
         <th>neurons for 50 %</th><th>80 %</th><th>95 %</th><th>never fired</th>\
         <th>halves overlap</th></tr>\n",
    );
    for layer in &body.layers {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            layer.layer,
            percent(layer.sparsity),
            percent(layer.neurons_for.half),
            percent(layer.neurons_for.most),
            percent(layer.neurons_for.nearly_all),
            percent(layer.dead),
            percent(layer.half_overlap),
        );
    }
    page.push_str("</table></div>\n");
}
