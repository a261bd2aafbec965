//! Perplexity and fidelity against independently computed values.

use std::fs;

use powerinfer_artifact::TensorFile;
use serde_json::Value;

use crate::{
    golden::floats,
    sandbox::{Sandbox, assert_contains, golden_model, prepared_demo},
};

/// −ln softmax(logits)[target], in float64.
fn negative_log(logits: &[f32], target: usize) -> f64 {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    sum.ln() - f64::from(logits[target])
}

#[test]
fn perplexity_equals_that_of_the_reference_logits() {
    for name in ["llama-relu-gqa", "opt-preln"] {
        let folder = golden_model(name);
        let expected: Value =
            serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let prompts = expected["prompts"].as_array().unwrap();
        let prompt = prompts
            .iter()
            .find(|prompt| prompt["key"] == "p70")
            .unwrap();
        let ids: Vec<usize> = serde_json::from_value(prompt["input_ids"].clone()).unwrap();
        let file = TensorFile::open(&folder.join("expected.safetensors")).unwrap();
        let logits = floats(&file, "p70.logits");
        let vocabulary = logits.len() / ids.len();
        let scored = logits.chunks_exact(vocabulary).zip(&ids[1..]);
        let sum: f64 = scored.map(|(row, target)| negative_log(row, *target)).sum();
        let expected = (sum / (ids.len() - 1) as f64).exp();

        let sandbox = Sandbox::new();
        let text = prompt["text"].as_str().unwrap();
        fs::write(sandbox.path("text.txt"), text).unwrap();
        let model = folder.to_str().unwrap();
        let prose = "one two three four five six seven ".repeat(20);
        fs::write(sandbox.path("prose.txt"), prose).unwrap();
        sandbox
            .run(&["profile", model, "--data", "prose.txt", "--tokens", "200"])
            .good();
        sandbox
            .run(&[
                "place",
                model,
                "--vram",
                "0G",
                "--quant",
                "f32",
                "--kv-cache",
                "f32",
                "--context",
                "128",
            ])
            .good();
        let eval = |more: &[&str]| {
            let arguments = ["eval", "perplexity", name, "--data", "text.txt", "--json"];
            let run = sandbox.run(&[&arguments[..], &["--policy", "exact"], more].concat());
            run.good().json()
        };
        let whole = eval(&["--window", "128"]);
        assert_eq!(whole["tokens"], ids.len() as u64 - 1, "{name}");
        let found = whole["dense_perplexity"].as_f64().unwrap();
        assert!(
            (found / expected - 1.0).abs() < 1e-4,
            "{name}: {found} {expected}"
        );
        let exact = &whole["policies"][0];
        assert_eq!(exact["perplexity"], whole["dense_perplexity"], "{name}");
        assert_eq!(exact["kl_divergence_p99"], 0.0);
        assert_eq!(exact["top1_agreement"], 1.0);
        // Shorter windows have less context and still score every token once.
        let short = eval(&["--window", "16", "--stride", "8"]);
        assert_eq!(short["tokens"], whole["tokens"]);
        assert_ne!(short["dense_perplexity"], whole["dense_perplexity"]);
    }
}

#[test]
fn predicted_is_compared_with_dense_with_an_interval() {
    let demo = prepared_demo().to_str().unwrap();
    let sandbox = Sandbox::new();
    let eval = |measure: &str, more: &[&str]| {
        let arguments = ["eval", measure, demo, "--tokens", "600", "--threads", "1"];
        sandbox.run(&[&arguments[..], more].concat())
    };
    let report = eval("fidelity", &["--json"]).good().json();
    let [exact, predicted] = [0, 1].map(|policy| &report["policies"][policy]);
    assert_eq!(exact["perplexity_rise"]["value"], 0.0);
    let [low, value, high] =
        ["low", "value", "high"].map(|end| predicted["perplexity_rise"][end].as_f64().unwrap());
    assert!(low < value && value < high && high < 1.0, "{predicted}");
    assert!(predicted["kl_divergence_mean"]["value"].as_f64().unwrap() > 0.0);
    let agreement = predicted["top1_agreement"].as_f64().unwrap();
    assert!((0.5..1.0).contains(&agreement), "{predicted}");
    assert_eq!(report["window"], 512);

    let shown = eval("perplexity", &[]).good();
    assert!(
        shown.text().contains("rise (95%)") && !shown.text().contains("KL"),
        "{}",
        shown.text()
    );
    shown.stderr_contains(&["takes about"]);
    eval("perplexity", &["--window", "9999"]).bad(1, &["`--window` is 9999", "hint: the bundle"]);
    eval("perplexity", &["--stride", "512"]).bad(1, &["`--stride` is 512", "1 to 511"]);
    eval("perplexity", &["--data", "nowhere.txt"]).bad(1, &["`nowhere.txt`"]);
    sandbox
        .run(&["eval", "perplexity", demo, "--tokens", "1"])
        .bad(1, &["no tokens to score", "--data"]);
}

#[test]
fn verification_distinguishes_predicted_from_exact() {
    let demo = prepared_demo().to_str().unwrap();
    let sandbox = Sandbox::new();
    let run = |policy: &str, more: &[&str]| {
        let arguments = [
            "run",
            demo,
            "--policy",
            policy,
            "-n",
            "24",
            "--prompt",
            "def answer(",
        ];
        sandbox.run(&[&arguments[..], more].concat()).good()
    };
    let every = ["--verify-every", "4", "--json"];
    let [exact, predicted] = ["exact", "predicted"].map(|policy| run(policy, &every).json());
    let worst = |report: &Value| {
        let layers = report["verified"]["layers"].as_array().unwrap();
        let errors = layers
            .iter()
            .map(|layer| layer["worst_relative_error"].as_f64().unwrap());
        errors.fold(0.0, f64::max)
    };
    assert_eq!(worst(&exact), 0.0, "exact is dense");
    assert!((1e-4..1.0).contains(&worst(&predicted)), "{predicted}");
    assert!((5..=6).contains(&predicted["verified"]["tokens"].as_u64().unwrap()));
    let plain = run("predicted", &["--json"]).json();
    assert_eq!(
        plain["completion"], predicted["completion"],
        "looking changes nothing"
    );
    assert_eq!(plain["bytes_per_token"], predicted["bytes_per_token"]);
    assert!(plain["verified"].is_null());
    let message = run("predicted", &["--verify-every", "4"]).stderr;
    assert_contains(&message, &["relative FFN error"]);
}
