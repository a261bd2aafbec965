//! `--input-sparsity`: calibrated, certified, run and inspected.

use crate::sandbox::{Sandbox, golden_model};

const MODEL: &str = "llama-silu";

/// A sandbox with a profile of a golden model without zeros.
fn profiled() -> Sandbox {
    let sandbox = Sandbox::new();
    let text = "a few words to calibrate on, again and again, until there are enough of them. ";
    std::fs::write(sandbox.path("text.txt"), text.repeat(120)).unwrap();
    let model = golden_model(MODEL);
    sandbox
        .run(&["profile", model.to_str().unwrap(), "--data", "text.txt"])
        .good();
    sandbox
}

fn place(sandbox: &Sandbox, more: &[&str]) -> crate::sandbox::Run {
    let model = golden_model(MODEL);
    let arguments = ["place", model.to_str().unwrap(), "--vram", "0G"];
    sandbox.run(&[&arguments[..], more].concat())
}

#[test]
fn input_sparsity_skips_small_inputs_and_is_certified() {
    let sandbox = profiled();
    let read = || {
        let arguments = ["run", "llama-silu.powerinfer", "--prompt", "words"];
        let run = sandbox.run(&[&arguments[..], &["-n", "8", "--json"]].concat());
        run.good().json()["bytes_per_token"].as_f64().unwrap()
    };
    place(&sandbox, &[]).good();
    let all = read();
    let place = place(&sandbox, &["--input-sparsity", "30%"]).good();
    place.stdout_contains(&["70.0% of the channels are read"]);
    assert!(read() < 0.9 * all, "{} of {all}", read());

    let bundle = "llama-silu.powerinfer/bundle";
    let inspect = sandbox.run(&["inspect", bundle, "--verify"]).good();
    inspect.stdout_contains(&["70.0% of the channels are read"]);
    let json = sandbox.run(&["inspect", bundle, "--json"]).good().json();
    for layer in json["plan"]["layers"].as_array().unwrap() {
        let thresholds = &layer["input_thresholds"];
        assert_eq!(thresholds["share"], 0.3);
        for site in ["attention", "output", "ffn"] {
            assert!(thresholds[site].as_f64().unwrap() > 0.0, "{thresholds}");
        }
    }
    assert_ne!(
        json["certificate"]["perplexity"], json["certificate"]["dense_perplexity"],
        "what is left out is certified"
    );
    let again = sandbox
        .run(&["eval", "fidelity", bundle, "--certificate"])
        .good();
    again.stderr_contains(&["equal to the certificate"]);
    let planned = sandbox
        .run(&["eval", "perplexity", bundle, "--json"])
        .good()
        .json();
    assert_eq!(planned["policies"][0]["policy"], "planned");
}

#[test]
fn invalid_input_sparsity_is_refused() {
    let sandbox = profiled();
    for bad in ["0%", "100%", "-5%", "30", "x"] {
        let argument = format!("--input-sparsity={bad}");
        place(&sandbox, &[&argument]).bad(2, &["such as `25%`"]);
    }
    let asked = ["--input-sparsity", "30%"];
    place(&sandbox, &[&asked[..], &["--dry-run"]].concat()).bad(1, &["a dry run measures nothing"]);
    place(&sandbox, &[&asked[..], &["--certify", "0"]].concat())
        .bad(1, &["no text to calibrate", "hint: profile more text"]);
}
