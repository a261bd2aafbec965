//! Synthetic checkpoints have the requested sparsity and work in the whole pipeline.

use std::fs;

use serde_json::{Value, json};

use crate::sandbox::{Sandbox, words};

/// Writes a small configuration of `family`.
fn config(sandbox: &Sandbox, family: &str) {
    let llama = |architecture: &str| {
        json!({
            "architectures": [architecture], "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 640,
            "vocab_size": 4000, "hidden_act": "relu", "max_position_embeddings": 512,
        })
    };
    let config = match family {
        "llama" => llama("LlamaForCausalLM"),
        "bamboo" => llama("BambooForCausalLM"),
        "fatrelu" => {
            let mut config = llama("SparseLlamaForCausalLM");
            config["hidden_act"] = "fatrelu".into();
            config["hidden_act_param"] = 0.1.into();
            config
        }
        "opt" => json!({
            "architectures": ["OPTForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4, "ffn_dim": 640, "vocab_size": 4000,
            "max_position_embeddings": 512,
        }),
        "falcon" => json!({
            "architectures": ["FalconForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 4000,
            "ffn_hidden_size": 640, "activation": "relu", "new_decoder_architecture": true,
        }),
        other => panic!("{other}"),
    };
    let folder = sandbox.path(&format!("{family}-shape"));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn synth(sandbox: &Sandbox, family: &str, more: &[&str]) -> Value {
    config(sandbox, family);
    let shape = format!("{family}-shape");
    let arguments = ["synth", "--like", &shape, "--out", family, "--json"];
    sandbox.run(&[&arguments[..], more].concat()).good().json()
}

fn prose(sandbox: &Sandbox) {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    fs::copy(readme, sandbox.path("text.txt")).unwrap();
}

#[test]
fn every_family_has_the_requested_activation_frequency() {
    let sandbox = Sandbox::new();
    prose(&sandbox);
    for family in ["llama", "bamboo", "fatrelu", "opt", "falcon"] {
        synth(&sandbox, family, &["--sparsity", "0.9", "--skew", "0.26"]);
        let profile = [
            "profile", family, "--data", "text.txt", "--tokens", "1800", "--json",
        ];
        let profile = sandbox.run(&profile).good().json();
        for layer in profile["profile"]["layers"].as_array().unwrap() {
            let (sparsity, skew) = (
                layer["sparsity"].as_f64().unwrap(),
                layer["neurons_for"]["80_percent"].as_f64().unwrap(),
            );
            assert!((sparsity - 0.9).abs() < 0.03, "{family}: {layer}");
            // In parallel with attention, the first FFN depends on the token alone, and this short text
            // has few distinct tokens.
            if family != "falcon" || layer["layer"] != 0 {
                assert!((skew - 0.26).abs() < 0.06, "{family}: {layer}");
            }
        }
    }
}

#[test]
fn constructed_predictors_predict_and_the_pipeline_runs() {
    let sandbox = Sandbox::new();
    prose(&sandbox);
    let made = synth(&sandbox, "llama", &["--predictor-rank", "128"]);
    assert_eq!(made["predictors"], "llama/predictors");
    let inspected = sandbox
        .run(&["inspect", "llama/predictors", "--json"])
        .good()
        .json();
    for layer in inspected["layers"]
        .as_array()
        .unwrap_or_else(|| panic!("{inspected}"))
    {
        assert!(layer["recall"].as_f64().unwrap() > 0.98, "{layer}");
        assert!(layer["precision"].as_f64().unwrap() > 0.9, "{layer}");
    }
    let data = ["profile", "llama", "--data", "text.txt", "--tokens", "1000"];
    sandbox.run(&data).good();
    let place = words("place llama --vram 0G --predictors llama/predictors");
    sandbox.run(&place).good();
    let text = |policy: &str| {
        let run = [
            "run", "llama", "--prompt", "once", "-n", "20", "--policy", policy,
        ];
        sandbox.run(&run).good().text()
    };
    assert_eq!(text("dense"), text("exact"));
    // Of the predicted neurons those are computed in full which the model's own gate activates: nearly all active ones.
    let computed = |policy: &str| {
        let run = [
            "run", "llama", "--prompt", "once", "-n", "20", "--policy", policy, "--json",
        ];
        let run = sandbox.run(&run).good().json();
        run["ffn_neurons_computed"].as_f64().unwrap()
    };
    let (active, both) = (computed("exact"), computed("predicted"));
    assert!(both > 0.9 * active, "{both} of {active}");
    let config: Value =
        serde_json::from_slice(&fs::read(sandbox.path("llama/config.json")).unwrap()).unwrap();
    assert_eq!(
        config["powerinfer_synthetic"]["sparsity"], 0.9,
        "it says what it is"
    );
}

#[test]
fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
    let digest = |threads: &str, seed: &str| {
        let sandbox = Sandbox::new();
        config(&sandbox, "llama");
        let status = sandbox
            .command(&[
                "synth",
                "--like",
                "llama-shape",
                "--out",
                "model",
                "--predictor-rank",
                "64",
                "--seed",
                seed,
                "-q",
            ])
            .env("RAYON_NUM_THREADS", threads)
            .status()
            .unwrap();
        assert!(status.success());
        [
            "model.safetensors",
            "predictors/predictors.safetensors",
            "tokenizer.json",
        ]
        .map(|file| fs::read(sandbox.path("model").join(file)).unwrap())
    };
    let first = digest("1", "3");
    assert!(first == digest("4", "3"));
    assert!(first[0] != digest("1", "4")[0]);
}

#[test]
fn impossible_synthetic_models_are_refused() {
    let sandbox = Sandbox::new();
    config(&sandbox, "llama");
    let synth = |more: &[&str]| {
        let arguments = ["synth", "--like", "llama-shape", "--out", "model"];
        sandbox.run(&[&arguments[..], more].concat())
    };
    sandbox
        .run(&["synth", "--like", "gpt-5", "--out", "model"])
        .bad(1, &["`gpt-5`", "; known are llama-1b"]);
    synth(&["--sparsity", "0.5", "--skew", "0.1"]).bad(1, &["50.0% zeros", "; "]);
    synth(&["--sparsity", "1.5"]).bad(1, &["150.0% zeros"]);
    synth(&["--predictor-rank", "40"]).bad(1, &["rank 40", "multiple of 32"]);
    synth(&["--layers", "0"]).bad(2, &["--layers"]);
    fs::create_dir(sandbox.path("there")).unwrap();
    sandbox
        .run(&["synth", "--like", "llama-shape", "--out", "there"])
        .bad(1, &["`there` exists already", "hint: "]);
    let path = sandbox.path("llama-shape/config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("relu", "silu")).unwrap();
    synth(&[]).bad(1, &["never exactly zero", "; change it to `relu`"]);
    for (from, to) in [
        (
            "\"num_hidden_layers\":3",
            "\"num_hidden_layers\":1000000000",
        ),
        ("\"vocab_size\":4000", "\"vocab_size\":1000000000"),
    ] {
        let huge = text.replace(from, to);
        assert_ne!(huge, text);
        fs::write(&path, huge).unwrap();
        synth(&[]).bad(1, &["1000000000, which is larger than supported"]);
    }
    fs::write(&path, text.replace("4000", "100")).unwrap();
    synth(&[]).bad(1, &["100 tokens", "; "]);
    assert!(!sandbox.path("model").exists());
}
