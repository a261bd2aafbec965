//! Every command, with models whose tokenizer is in older files instead of `tokenizer.json`.

use std::path::PathBuf;

use crate::sandbox::{QUICK, Sandbox, copy_folder, golden_model, words};

/// Creates a sandbox with texts and, as `model`, a copy of a golden checkpoint without `tokenizer.json`.
fn sandbox(model: PathBuf) -> Sandbox {
    let sandbox = Sandbox::new();
    copy_folder(&model, &sandbox.path("model"));
    let _ = std::fs::remove_file(sandbox.path("model/tokenizer.json"));
    let text = "def area(r):\n    return 3.14 * r ** 2\n\n".repeat(60);
    std::fs::write(sandbox.path("text.txt"), text).unwrap();
    sandbox
}

/// Prepares `model`, moves it away, and returns the output of running its bundle.
fn prepare_and_run(sandbox: &Sandbox) -> String {
    let prepare = words("prepare model --data text.txt --vram 0G --certify none");
    sandbox.run(&[&prepare[..], &QUICK].concat()).good();
    let there = sandbox.path("model");
    std::fs::rename(&there, sandbox.path("elsewhere")).unwrap();
    let run = [
        "run",
        "model.powerinfer",
        "--prompt",
        "def area",
        "-n",
        "12",
        "--temperature",
        "0",
    ];
    let text = sandbox.run(&run).good().text();
    sandbox
        .run(&words("eval perplexity model.powerinfer --data text.txt"))
        .good();
    std::fs::rename(sandbox.path("elsewhere"), &there).unwrap();
    text
}

#[test]
fn models_with_older_tokenizers_compute_what_converted_ones_do() {
    for name in ["llama-relu-gqa", "llama-tied-headdim"] {
        let older = sandbox(golden_model(name));
        let converted = sandbox(golden_model(name));
        let json = "tokenizer.json";
        let target = converted.path("model").join(json);
        std::fs::copy(golden_model(name).join(json), target).unwrap();
        let tokenize = |sandbox: &Sandbox, text: &[u8]| {
            sandbox.run_with(&["tokenize", "model"], text).good().text()
        };
        let text = "if x == 1:\n\treturn 'é'</s>".as_bytes();
        assert_eq!(tokenize(&older, text), tokenize(&converted, text));
        assert_eq!(
            prepare_and_run(&older),
            prepare_and_run(&converted),
            "{name}"
        );
    }
}

#[test]
fn a_published_layout_without_tokenizer_json_is_used_and_exported() {
    let shared =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/relullama-spm");
    if !shared.is_dir() {
        return;
    }
    let sandbox = sandbox(shared.clone());
    prepare_and_run(&sandbox);
    let export = words("export model --to gguf model.gguf --any-activation");
    sandbox.run(&export).good();
    let expected = std::fs::read(shared.join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
    for prompt in expected["prompts"].as_array().unwrap() {
        let text = prompt["text"].as_str().unwrap();
        for model in ["model", "model.powerinfer/bundle", "model.gguf"] {
            let run = sandbox
                .run_with(&["tokenize", model], text.as_bytes())
                .good();
            assert_eq!(run.json(), prompt["input_ids"], "{model}: {text:?}");
        }
    }
}

#[test]
fn a_damaged_tokenizer_is_reported_before_any_work() {
    let sandbox = sandbox(golden_model("llama-relu-gqa"));
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 499723\n";
    std::fs::write(sandbox.path("model/tokenizer.model"), pointer).unwrap();
    sandbox
        .run(&["profile", "model", "--data", "text.txt"])
        .bad(1, &["model/tokenizer.model", "git lfs pull"]);
    std::fs::remove_file(sandbox.path("model/tokenizer.model")).unwrap();
    sandbox
        .run(&["profile", "model", "--data", "text.txt"])
        .bad(
            1,
            &["tokenizer.json` does not exist", "nor `tokenizer.model`"],
        );
}
