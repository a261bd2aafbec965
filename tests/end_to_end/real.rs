//! Two small models that others trained, against the results of transformers; they are not part of the repository.

use std::path::{Path, PathBuf};

use powerinfer_artifact::TensorFile;
use powerinfer_model::greedy_token;
use serde_json::Value;

use crate::{golden::floats, sandbox::Sandbox};

/// Models that are there.
#[expect(clippy::print_stdout, reason = "skipped models are counted")]
fn models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/real");
    let names = ["stories260K-llama", "babyllama-105-llama"];
    let (found, missing): (Vec<_>, Vec<_>) = names
        .map(|name| folder.join(name))
        .into_iter()
        .partition(|path| path.is_dir());
    if !missing.is_empty() {
        println!(
            "skipped: {} of 2 models are not in {}",
            missing.len(),
            folder.display()
        );
    }
    found
}

fn reference(model: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(model.join("REFERENCE.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Logits of `tokens`, row by row.
fn logits(sandbox: &Sandbox, model: &str, tokens: &[u32], more: &[&str]) -> Vec<Vec<f32>> {
    let text: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let arguments = [
        "logits",
        model,
        "--ids",
        &text.join(","),
        "--out",
        "@logits",
    ];
    sandbox.run(&[&arguments[..], more].concat()).good();
    let all = floats(
        &TensorFile::open(&sandbox.path("logits")).unwrap(),
        "logits",
    );
    let rows = all.chunks_exact(all.len() / tokens.len());
    rows.map(<[f32]>::to_vec).collect()
}

#[test]
fn logits_and_continuations_are_those_of_transformers() {
    let sandbox = Sandbox::new();
    for model in models() {
        let name = model.to_str().unwrap();
        for run in reference(&model)["runs"].as_array().unwrap() {
            let (prompt, greedy) = (ids(&run["prompt_ids"]), ids(&run["greedy_ids"]));
            let text = run["prompt"].as_str().unwrap();
            let encoded = sandbox
                .run_with(&["tokenize", name], text.as_bytes())
                .good();
            assert_eq!(encoded.json(), run["prompt_ids"]);
            let all = [&prompt[..], &greedy].concat();
            for engine in ["reference", "runtime"] {
                let rows = logits(
                    &sandbox,
                    name,
                    &all,
                    &["--engine", engine, "--policy", "dense"],
                );
                for (step, token) in greedy.iter().enumerate() {
                    let best = greedy_token(&rows[prompt.len() - 1 + step]);
                    assert_eq!(best, *token, "{name} {engine} step {step}");
                }
                let last = &rows[prompt.len() - 1];
                for top in run["last_position_top10"].as_array().unwrap() {
                    let want = top["logit"].as_f64().unwrap() as f32;
                    let got = last[top["id"].as_u64().unwrap() as usize];
                    assert!((got - want).abs() < 1e-3, "{name} {engine}: {got}, {want}");
                }
            }
        }
    }
}

#[test]
fn exported_files_compute_the_same() {
    let sandbox = Sandbox::new();
    for model in models() {
        let name = model.to_str().unwrap();
        sandbox
            .run(&["export", name, "--to", "gguf", "out.gguf", "--quant", "f32"])
            .good();
        for run in reference(&model)["runs"].as_array().unwrap() {
            let text = run["prompt"].as_str().unwrap();
            let encoded = sandbox
                .run_with(&["tokenize", "out.gguf"], text.as_bytes())
                .good();
            assert_eq!(encoded.json(), run["prompt_ids"]);
            let prompt = ids(&run["prompt_ids"]);
            for engine in ["reference", "runtime"] {
                let more = ["--engine", engine];
                let own = logits(&sandbox, name, &prompt, &more);
                assert!(
                    own == logits(&sandbox, "out.gguf", &prompt, &more),
                    "{name} {engine}"
                );
            }
        }
    }
}

#[test]
fn thresholds_skip_neurons_of_a_trained_model() {
    let sandbox = Sandbox::new();
    for model in models() {
        let reference = reference(&model);
        let stories = reference["runs"].as_array().unwrap().iter();
        let stories = stories.map(|run| run["greedy_text_long"].as_str().unwrap());
        let text = stories.collect::<Vec<_>>().join("\n\n").repeat(6);
        std::fs::write(sandbox.path("text.txt"), text).unwrap();
        let name = model.to_str().unwrap();
        let bundle = model.file_name().unwrap().to_str().unwrap();
        let prepare = ["prepare", name, "--data", "text.txt", "--vram", "0G"];
        let more = ["--max-ppl-increase", "5%", "--hardware", "cpu-only"];
        sandbox.run(&[&prepare[..], &more].concat()).good();
        let prompt = reference["runs"][0]["prompt"].as_str().unwrap();
        let run = sandbox
            .run(&["run", bundle, "--prompt", prompt, "-n", "30"])
            .good();
        let told = run.text();
        // A little loss changes words, but not the language.
        let want = reference["runs"][0]["greedy_text"].as_str().unwrap();
        let start = &want[prompt.len()..][..12];
        assert!(told.contains(start), "{told:?} without {start:?}");
        // A prompt and its continuation together equal the text that the reference decodes as a whole.
        let cut = want[..want.len() / 2].rfind(' ').unwrap();
        let run = ["run", bundle, "--policy", "dense", "--echo", "-n", "12"];
        let run = [&run[..], &["--prompt", &want[..cut]]].concat();
        let text = sandbox.run(&run).good().text();
        let text = text.trim_end_matches('\n');
        assert!(text.len() > cut + 5 && want.starts_with(text), "{text:?}");
        let inspected = sandbox.run(&["inspect", bundle]).good();
        inspected.stdout_contains(&["threshold"]);
    }
}
