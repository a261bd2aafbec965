//! Policies for models without zeros, and the certificate: made, checked and damaged.

use std::fs;

use super::sandbox::{Sandbox, golden_model, words};

/// Text for several sequences of 512 tokens.
fn write_text(sandbox: &Sandbox) {
    let line = |number: usize| format!("a few words to calibrate on, line {number} of many\n");
    let text: String = (0..400).map(line).collect();
    fs::write(sandbox.path("text.txt"), text).unwrap();
}

/// Profiles the golden model without zeros and calibrates its thresholds.
fn calibrated() -> (Sandbox, String) {
    let sandbox = Sandbox::new();
    write_text(&sandbox);
    let model = golden_model("llama-silu").to_str().unwrap().to_owned();
    sandbox
        .run(&["profile", &model, "--data", "text.txt", "--tokens", "3000"])
        .good();
    let trained = sandbox.run(&["train-predictors", &model]).good();
    trained.stdout_contains(&["weighted-gate"]);
    trained.stderr_contains(&["calibrated thresholds for"]);
    (sandbox, model)
}

#[test]
fn a_model_without_zeros_skips_neurons_within_the_perplexity_budget() {
    let (sandbox, model) = calibrated();
    let place = |rise: &str| {
        let arguments = [
            "place",
            &model,
            "--vram",
            "0G",
            "--hardware",
            "cpu-only",
            "--json",
        ];
        let more = ["--max-ppl-increase", rise];
        sandbox.run(&[&arguments[..], &more].concat()).good().json()
    };
    let computed = |placed: &serde_json::Value| {
        placed["certificate"]["ffn_neurons_computed"]
            .as_f64()
            .unwrap()
    };
    // The output of the random model hardly depends on its FFNs, so much can be skipped.
    let some = place("20%");
    assert!(computed(&some) < 0.95, "{some}");
    let certificate = &some["certificate"];
    let rise = certificate["perplexity_rise"]["value"].as_f64().unwrap();
    assert!((-0.2..0.2).contains(&rise), "{certificate}");
    for layer in some["plan"]["layers"].as_array().unwrap() {
        assert_eq!(layer["policy"], "threshold");
        assert!(
            layer["reason"]
                .as_str()
                .unwrap()
                .contains("dense would take")
        );
    }
    assert!(
        computed(&place("80%")) <= computed(&some),
        "more is allowed"
    );
    assert!(
        !sandbox
            .path("llama-silu.powerinfer/bundle.measuring")
            .exists()
    );

    let run = words("run llama-silu.powerinfer --prompt words -n 4 --json");
    let run = sandbox.run(&run).good().json();
    assert!(
        run["ffn_neurons_computed"].as_f64().unwrap() < 0.95,
        "{run}"
    );
    sandbox
        .run(&words(
            "run llama-silu.powerinfer --prompt words --policy predicted",
        ))
        .bad(1, &["no predictor", "use `threshold` or `dense`"]);
}

#[test]
fn a_certificate_is_reproduced_to_the_digit_and_a_changed_one_is_refused() {
    let (sandbox, model) = calibrated();
    let place = [
        "place",
        &model,
        "--vram",
        "0G",
        "--policy",
        "threshold",
        "--max-ppl-increase",
        "50%",
    ];
    let placed = sandbox.run(&place).good();
    placed.stdout_contains(&["certified on"]);
    placed.stderr_contains(&["never exactly zero", "`--max-ppl-increase` sets"]);
    let bundle = "llama-silu.powerinfer/bundle";
    let again = sandbox
        .run(&["eval", "fidelity", bundle, "--certificate"])
        .good();
    again.stderr_contains(&["equal to the certificate"]);
    let inspected = sandbox.run(&["inspect", bundle, "--verify"]).good();
    inspected.stdout_contains(&["the certificate is of these weights"]);
    let alone = format!("{bundle}/certificate.json");
    let alone = sandbox.run(&["inspect", &alone]).good();
    alone.stdout_contains(&["certified on"]);
    // Perplexity on other text names the policy.
    let other = [
        "eval",
        "perplexity",
        bundle,
        "--data",
        "text.txt",
        "--tokens",
        "500",
        "--json",
    ];
    let other = sandbox.run(&other).good().json();
    assert_eq!(other["policies"][0]["policy"], "threshold");
    // The certificate's own text can be shortened too.
    let short = words("eval perplexity llama-silu.powerinfer --tokens 40 --json");
    let short = sandbox.run(&short).good().json();
    assert_eq!(short["tokens"], 39, "{short}");
    let pruned = words("eval prune llama-silu.powerinfer --tokens 40 --keep 0.5 --json");
    assert_eq!(sandbox.run(&pruned).good().json()["tokens"], 39);

    // A changed figure does not match the digest of the bundle.
    let path = sandbox.path(bundle).join("certificate.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let perplexity = document["perplexity"].as_f64().unwrap();
    document["perplexity"] = (perplexity * 0.99).into();
    fs::write(&path, document.to_string()).unwrap();
    sandbox
        .run(&["inspect", bundle, "--verify"])
        .bad(1, &["certificate.json", "damaged"]);
}

#[test]
fn without_held_out_text_nothing_is_skipped_or_certified() {
    let sandbox = Sandbox::new();
    let model = golden_model("llama-silu").to_str().unwrap().to_owned();
    fs::write(sandbox.path("text.txt"), "a few words ".repeat(20)).unwrap();
    let arguments = ["prepare", &model, "--data", "text.txt", "--vram", "0G"];
    let prepared = sandbox.run(&arguments).good();
    for message in ["0 tokens to decide on", "there is no certificate"] {
        prepared.stderr_contains(&[message]);
    }
    let run = words("run llama-silu.powerinfer --prompt words -n 4 --json");
    assert_eq!(sandbox.run(&run).good().json()["ffn_neurons_computed"], 1.0);
    sandbox
        .run(&["eval", "fidelity", "llama-silu.powerinfer", "--certificate"])
        .bad(
            1,
            &[
                "has no certificate",
                "hint: `powerinfer place MODEL` makes one",
            ],
        );
    sandbox
        .run(&["place", &model, "--vram", "0G", "--policy", "threshold"])
        .bad(1, &["tokens of held-out text", "hint: profile more text"]);
}

#[test]
fn sign_bits_are_stored_only_for_policies_that_use_them() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let place = |policy: &str| {
        let arguments = [
            "place", "demo", "--vram", "0G", "--policy", policy, "--json",
        ];
        sandbox.run(&[&arguments[..], &["--certify", "600"]].concat())
    };
    let certificate = place("sign-bit").good().json()["certificate"].clone();
    assert!(
        certificate["ffn_neurons_computed"].as_f64().unwrap() < 0.5,
        "{certificate}"
    );
    let recall = certificate["layers"][0]["contribution_recall"]
        .as_f64()
        .unwrap();
    assert!(recall > 0.9, "{certificate}");
    let evaluated = ["eval", "fidelity", "demo", "--tokens", "400", "--json"];
    let report = sandbox.run(&evaluated).good().json();
    let names: Vec<&str> = report["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["policy"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["exact", "predicted", "sign-bit"]);
    place("exact").good();
    sandbox
        .run(&[
            "run",
            "demo",
            "--prompt",
            "def f(x):",
            "--policy",
            "sign-bit",
        ])
        .bad(
            1,
            &[
                "no signs of its gate for layer 0",
                "hint: use `exact` or `dense`",
            ],
        );
}

#[test]
fn invalid_policy_options_are_refused() {
    let sandbox = Sandbox::new();
    for rise in ["1", "-1%", "x%", "nan%"] {
        sandbox
            .run(&[
                "place",
                "demo",
                "--vram",
                "0G",
                &format!("--max-ppl-increase={rise}"),
            ])
            .bad(2, &["give a share in percent"]);
    }
}
