//! Pages are the same every time, show what the documents say, and no name breaks out of the HTML.

use powerinfer_artifact::{
    Digest, ModelIdentity,
    plan::{Plan, Policy},
};
use powerinfer_report::{BEGINNING, plan_page, profile_page, sweep_page};
use serde_json::{Value, json};

const EVIL: &str = "\"><img src=x>'&<script>";

/// Refuses a page that loads something, holds an unescaped name, or prints an invalid number.
fn check(page: &str) {
    assert!(page.starts_with(BEGINNING), "{page}");
    assert!(
        page.ends_with("</html>\n") || page.ends_with("</html>"),
        "{page}"
    );
    for evil in [
        "<img", "'&<", "NaN", "http:", "https:", "url(", "@import", "{{", "{%",
    ] {
        assert!(!page.contains(evil), "{evil}");
    }
    assert!(page.contains("&lt;img"), "the name is there, escaped");
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.contains("prefers-color-scheme:dark"));
}

#[test]
fn a_plan_shows_its_layers_and_no_name_breaks_out() {
    let mut plan = Plan::unplaced(3, 8, Policy::Exact, 16);
    plan.layers[1].reason = EVIL.to_owned();
    plan.layers[1].hot_count = 3;
    plan.hardware.name = EVIL.to_owned();
    let model = ModelIdentity {
        name: EVIL.to_owned(),
        fingerprint: Digest::from_content(b"m"),
    };
    let sentences = [EVIL.to_owned()];
    let page = plan_page(&model, &plan, &sentences).unwrap();
    assert_eq!(page, plan_page(&model, &plan, &sentences).unwrap());
    check(&page);
    // Figures do not part from their units.
    let page = page.replace('\u{a0}', " ");
    assert!(!page.contains("<script"), "it needs no scripts");
    assert!(page.contains("layer 1: 3 hot neurons carry 0.0%"), "{page}");
    assert!(page.contains("width:max(1px,37.500%)"), "{page}");
}

#[test]
fn a_profile_shows_its_layers_and_no_name_breaks_out() {
    let layer = |layer: usize, sparsity: f64| {
        json!({
            "layer": layer, "sparsity": sparsity, "dead": 0.0, "half_overlap": 0.5,
            "neurons_for": {"50_percent": 0.1, "80_percent": 0.2, "95_percent": 0.4},
            "locality": [{"reused": 1, "active": 4}, {"reused": 2, "active": 4}, {"reused": 0, "active": 0}],
        })
    };
    let document = json!({
        "header": {"tool": "powerinfer", "model": {"name": EVIL, "fingerprint": "blake3:0"}},
        "tokens": 10, "ffn_size": 8,
        "neurons_for": {"50_percent": 0.1, "80_percent": 0.2, "95_percent": 0.4},
        "sources": [{"name": EVIL, "tokens": 4}, {"name": "b", "tokens": 6}],
        "source_overlap": [[1.0, 0.25], [0.25, 1.0]],
        "layers": [layer(0, 0.875), layer(1, 0.625)],
    });
    let curves = [
        vec![0.0, 0.5, 1.0],
        vec![0.0, 0.75, 1.0],
        vec![0.0, 0.6, 1.0],
    ];
    let none = [Vec::new(), Vec::new()];
    let page = profile_page(&document, &curves, &[], &none).unwrap();
    assert_eq!(page, profile_page(&document, &curves, &[], &none).unwrap());
    check(&page);
    // Figures do not part from their units.
    let page = page.replace('\u{a0}', " ");
    assert!(!page.contains("<script"), "it needs no scripts");
    for part in [
        "75.0% of all FFN activations",
        "layer 1: 62.5% zeros",
        "<td>50.0%</td>",
        "<td>–</td>",
        "<title>all layers</title>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert_eq!(page.matches("<rect class=\"mark").count(), 2);
    assert_eq!(page.matches("<polyline class=\"curve").count(), 3);
    assert!(!page.contains("Experts"));

    let frequencies = [vec![0.75, 0.25], vec![0.5, 0.5]];
    let hit_rates = [vec![0.0, 0.5, 1.0], vec![0.0, 0.25, 0.75]];
    let page = profile_page(&document, &curves, &frequencies, &hit_rates).unwrap();
    check(&page);
    let page = page.replace('\u{a0}', " ");
    for part in [
        "fill-opacity=\"1.000\"><title>layer 0, expert 0: 75.0%",
        "fill-opacity=\"0.667\"><title>layer 1, expert 1: 50.0%",
        "<title>fixed set</title>",
        "<title>cache</title>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert_eq!(page.matches("<polyline class=\"curve").count(), 5);
}

/// A row of a sweep whose speed and rise of perplexity are given.
fn row(level: &str, speed: f64, rise: f64, p_value: f64) -> Value {
    json!({
        "axes": {"vram_bytes": 1u64 << 30, "hot_threshold": null, "setting": level, "policy": "x", "parameter": "raised logit",
            "parameter_value": rise, "batch": 1, "context_tokens": 64},
        "placement": {"neuron_share": 0.5, "activation_share": 0.75, "gpu_bytes": 1 << 20},
        "sparsity": {"true_share": 0.5, "computed_share": 0.25, "layers": [
            {"true_share": 0.5, "computed_share": 0.25, "relative_error": rise, "perplexity_rise_alone": rise / 2.0},
            {"true_share": 0.5, "computed_share": 0.25, "relative_error": rise / 4.0, "perplexity_rise_alone": rise}]},
        "predictor": {"count_recall": 0.9, "contribution_recall": 0.95, "precision": 0.5},
        "speed": {
            "measured": {"device": "cpu", "placement_ran": false, "emulated": false, "threads": 2, "disturbed": false,
                "first_token_milliseconds": {"median": 1.0}, "decode_microseconds": {"p95": 1.0, "p99": 2.0},
                "tokens_per_second": {"median": speed, "least": speed - 1.0, "most": speed + 1.0}, "bytes_per_token": 2000.0},
            "planned": {"hardware": EVIL, "tokens_per_second": 2.0 * speed},
        },
        "quality": {"tokens": 100, "perplexity_rise": {"value": rise, "low": rise - 0.001, "high": rise + 0.001},
            "functions": [{"name": "held-out tasks", "pass_at_1": {"value": 0.5, "low": 0.25, "high": 0.75}, "unjudged": 1,
                "p_value": p_value, "difference": -0.1}]},
        "identity": {"model": EVIL, "tool": "powerinfer", "processor": "p", "instruction_set": "i"},
    })
}

#[test]
fn a_sweep_shows_its_rows_and_no_name_breaks_out() {
    let front = json!({"points": [0, 1, 2], "front": [0, 1, 2], "knee": 1});
    let document = json!({
        "rows": [row("dense", 10.0, 0.0, 1.0), row(EVIL, 20.0, 0.001, 1.0), row("predicted", 30.0, 0.2, 0.01)],
        "perplexity_against_planned_speed": front,
        "perplexity_against_measured_speed": front,
        "failures_against_measured_speed": {"points": [0, 9], "front": [0], "knee": null},
    });
    let page = sweep_page(&document, &[EVIL.to_owned()]).unwrap();
    assert_eq!(page, sweep_page(&document, &[EVIL.to_owned()]).unwrap());
    check(&page);
    // Figures do not part from their units.
    let page = page.replace('\u{a0}', " ");
    assert_eq!(page.matches("<script").count(), 1);
    for part in [
        "Fastest on this machine with at most 1% more perplexity and no loss of pass@1 that the sample shows: &quot;&gt;",
        "2.00 times dense",
        "<polyline class=\"front\"",
        "predicted, 1.0 GiB on the GPU, context 64; 25.0% computed, perplexity +20.00% (+19.90 to +20.10), pass@1 50.0% (25.0–75.0), 1 unjudged, 60.0 tokens",
        "class=\"cell\" style=\"--warmth:100.0\"",
        "<td data-label=\"on GPU\" data-value=\"1048576\">1.0 MiB</td>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert_eq!(page.matches("<circle class=\"knee\"").count(), 2);
    let warmth = page.split("--warmth:").skip(1);
    let warmth = warmth.map(|rest| rest[..rest.find('"').unwrap()].parse::<f64>().unwrap());
    let warmth: Vec<f64> = warmth.collect();
    assert_eq!(warmth.len(), 8, "two maps of two settings and two layers");
    assert_eq!(warmth.iter().copied().fold(0.0, f64::max), 100.0);
    assert_eq!(warmth.iter().filter(|one| **one == 100.0).count(), 2);
}

#[test]
fn a_sweep_without_rows_is_a_page_too() {
    let page = sweep_page(&json!({"rows": []}), &[]).unwrap();
    assert!(page.contains("no point was measured"), "{page}");
}
