//! `simulate`: estimates without weights, and invalid requests.

use std::fs;

use serde_json::{Value, json};

use crate::sandbox::{Sandbox, assert_contains, words};

/// The estimate of the first engine for one request.
fn speed(answer: &Value) -> f64 {
    answer["engines"][0]["decode"][0]["tokens_per_second"]
        .as_f64()
        .unwrap()
}

#[test]
fn estimates_name_their_sources_and_the_gap_of_the_solver() {
    let sandbox = Sandbox::new();
    let arguments = ["simulate", "--like", "llama-70b", "--hardware", "pc-high"];
    let arguments = [&arguments[..], &["--quant", "q4_0"]].concat();
    let text = sandbox.run(&arguments).good().text();
    for part in [
        "table 3, LLaMA2(ReGLU)-70B",
        "hot neurons",
        "KV cache",
        "llama.cpp",
        "32 at once",
        "decode: with a context of 128, the mean",
        "this engine with a context of 2048, placed",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    // Equal layers share a row.
    assert!(text.lines().count() < 45, "{text}");
    let answer = sandbox
        .run(&[&arguments[..], &["--json"]].concat())
        .good()
        .json();
    let solver = &answer;
    for figure in ["objective", "bound", "gap", "solve_seconds"] {
        assert!(solver[figure].as_f64().unwrap() >= 0.0, "{figure}");
    }
    let engines = answer["engines"].as_array().unwrap();
    assert_eq!(engines.len(), 3);
    for engine in engines {
        let decode = engine["decode"].as_array().unwrap();
        let speeds = decode.iter().map(|at| &at["tokens_per_second"]);
        let speeds: Vec<f64> = speeds.map(|speed| speed.as_f64().unwrap()).collect();
        assert_eq!(speeds.len(), 6);
        assert!(speeds.is_sorted(), "together is never slower: {speeds:?}");
    }
    assert_eq!(answer["plan"]["layers"].as_array().unwrap().len(), 80);
}

#[test]
fn several_gpus_are_used_and_the_placement_is_close_to_the_bound() {
    let sandbox = Sandbox::new();
    for (vram, largest_gap) in [("24G,24G", 1e-3), ("8G,8G", 1e-3), ("10G,10G,10G", 2e-3)] {
        let arguments = words("simulate --like llama-70b --quant q4_0 --json");
        let arguments = [&arguments[..], &["--vram", vram]].concat();
        let answer = sandbox.run(&arguments).good().json();
        let gap = answer["gap"].as_f64().unwrap();
        assert!(gap <= largest_gap, "{vram}: {gap}");
        let layers = answer["plan"]["layers"].as_array().unwrap();
        let mut gpus: Vec<u64> = layers
            .iter()
            .map(|l| l["gpu"].as_u64().unwrap_or(0))
            .collect();
        gpus.dedup();
        assert_eq!(gpus.len(), vram.split(',').count(), "{gpus:?}");
        assert!(answer["solve_seconds"].as_f64().unwrap() < 30.0);
    }
}

#[test]
fn more_sparsity_more_memory_and_more_hot_neurons_are_faster() {
    let sandbox = Sandbox::new();
    let with = |more: &[&str]| {
        let arguments = ["simulate", "--like", "llama-7b", "--json", "--hardware"];
        let arguments = [&arguments[..], &["rtx3060-12g"], more].concat();
        speed(&sandbox.run(&arguments).good().json())
    };
    assert!(with(&["--sparsity", "0.95"]) > with(&["--sparsity", "0.6"]));
    assert!(with(&["--vram", "12G"]) > with(&["--vram", "7G"]));
    assert!(with(&["--vram", "7G"]) > with(&["--vram", "0G"]));
    let line = |share: &str| with(&["--vram", "80G", "--hot", share]);
    assert!(line("0.4") > line("0"));
    assert!(with(&["--quant", "q4_0"]) > with(&["--quant", "f16"]));
}

/// Except for the KV cache, which a plan assumes to be full.
#[test]
fn a_simulated_step_takes_the_time_of_the_plan() {
    let sandbox = Sandbox::new();
    for vram in ["0G", "6G", "24G"] {
        let answer = sandbox
            .run(&[
                "simulate",
                "--like",
                "llama-7b",
                "--json",
                "--vram",
                vram,
                "--context",
                "2",
                "--prompt",
                "1",
                "--tokens",
                "1",
            ])
            .good()
            .json();
        let planned = 1e6
            / answer["plan"]["totals"]["microseconds_per_token"]
                .as_f64()
                .unwrap();
        let found = speed(&answer);
        assert!(
            (found / planned - 1.0).abs() < 0.02,
            "{vram}: {found}, {planned}"
        );
    }
}

#[test]
fn a_folder_with_a_configuration_gives_the_shape() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("mine")).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 4096,
        "vocab_size": 32000, "hidden_act": "silu", "max_position_embeddings": 4096,
    });
    fs::write(sandbox.path("mine/config.json"), config.to_string()).unwrap();
    let text = sandbox
        .run(&["simulate", "--like", "./mine", "--sparsity", "0.5"])
        .good()
        .text();
    assert_contains(&text, &["given"]);
    assert_contains(&text, &["threshold"]);
    // The default request fits a small context.
    let mut tiny = config.clone();
    tiny["max_position_embeddings"] = json!(100);
    fs::create_dir(sandbox.path("tiny")).unwrap();
    fs::write(sandbox.path("tiny/config.json"), tiny.to_string()).unwrap();
    let simulate = |more: &[&str]| {
        let line = ["simulate", "--like", "./tiny", "--json"];
        sandbox.run(&[&line[..], more].concat())
    };
    for (more, prompt, tokens) in [
        (&[][..], 33, 67),
        (&["--tokens", "90"], 10, 90),
        (&["--prompt", "99"], 99, 1),
    ] {
        let request = &simulate(more).good().json()["engines"][0]["request"];
        assert_eq!(request["prompt_tokens"], prompt, "{more:?}");
        assert_eq!(request["tokens"], tokens, "{more:?}");
    }
    simulate(&["--prompt", "100"]).bad(1, &["make 101 tokens", "supports no more"]);
    // SiLU has no zeros unless they are assumed.
    for more in [&[][..], &["--sparsity", "0"]] {
        let run = sandbox.run(&[&["simulate", "--like", "./mine"][..], more].concat());
        let text = run.good().text();
        assert_contains(&text, &["mine: 0.1 billion parameters", "0.0%", "dense"]);
        assert!(!text.contains("assumed: as a ReGLU model"), "{text}");
    }
}

#[test]
fn impossible_simulations_are_refused() {
    let sandbox = Sandbox::new();
    let refused = |more: &[&str], code: i32, parts: &[&str]| {
        let arguments = [&["simulate", "--like", "llama-7b"], more].concat();
        sandbox.run(&arguments).bad(code, parts);
    };
    sandbox.run(&["simulate"]).bad(2, &["--like"]);
    sandbox
        .run(&["simulate", "--like", "gpt-5"])
        .bad(1, &["gpt-5", "llama-70b", "opt-175b"]);
    refused(&["--hardware", "abacus"], 1, &["abacus", "pc-high"]);
    refused(
        &["--hardware", "cpu-only", "--vram", "8G"],
        1,
        &["cpu-only"],
    );
    refused(&["--quant", "q5_k"], 2, &["q5_k", "f16"]);
    for share in ["-0.1", "1", "1.5", "NaN", "inf"] {
        refused(&[&format!("--sparsity={share}")], 1, &["--sparsity", share]);
    }
    refused(&["--sparsity", "x"], 2, &["--sparsity"]);
    refused(&["--skew=-1"], 1, &["--skew"]);
    refused(&["--sparsity", "0.5", "--skew", "0.1"], 1, &["50.0% zeros"]);
    refused(&["--predictor-share", "2"], 1, &["--predictor-share"]);
    refused(
        &["--predictor-share", "0", "--policy", "predicted"],
        1,
        &["predicted", "dense"],
    );
    refused(&["--hot", "1.5"], 1, &["--hot"]);
    refused(&["--hot", "1", "--vram", "6G"], 1, &["--hot", "--vram"]);
    refused(&["--ram", "1G", "--vram", "0G"], 1, &["cpu memory"]);
    refused(&["--context", "100000"], 1, &["--context", "4096"]);
    refused(&["--prompt", "4000", "--tokens", "4000"], 1, &["4096"]);
    refused(&["--tokens", "0"], 2, &["--tokens"]);
    refused(&["--batch", "0"], 2, &["--batch"]);
}
