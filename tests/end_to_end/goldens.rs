//! `logits` and `tokenize` on the golden checkpoints, in both engines.

use crate::golden::{Golden, MODELS, PROMPTS, floats};
use powerinfer_artifact::TensorFile;

use crate::sandbox::Sandbox;

#[test]
fn logits_of_both_engines_equal_those_of_the_reference() {
    let sandbox = Sandbox::new();
    for name in MODELS {
        let golden = Golden::open(name);
        for prompt in PROMPTS {
            let ids: Vec<String> = golden
                .ids(&format!("{prompt}.input_ids"))
                .iter()
                .map(ToString::to_string)
                .collect();
            for engine in ["reference", "runtime"] {
                let model = golden.folder.to_str().unwrap();
                sandbox
                    .run(&[
                        "logits",
                        model,
                        "--ids",
                        &ids.join(","),
                        "--engine",
                        engine,
                        "--out",
                        "@logits.safetensors",
                    ])
                    .good();
                let file = TensorFile::open(&sandbox.path("logits.safetensors")).unwrap();
                golden.assert_logits(
                    &floats(&file, "logits"),
                    prompt,
                    &format!("{name} {prompt} {engine}"),
                );
            }
        }
    }
}

#[test]
fn encoding_and_decoding_a_text_is_the_identity() {
    let sandbox = Sandbox::new();
    for text in [
        "def f(xs):\n    \"\"\"Return the sum.\"\"\"\n",
        "  héllo 🙂  \n\n",
        "",
    ] {
        for model in ["demo", golden_model("llama-silu").as_str()] {
            let ids = sandbox
                .run_with(&["tokenize", model], text.as_bytes())
                .good();
            let back = sandbox
                .run_with(&["tokenize", model, "--decode"], &ids.stdout)
                .good();
            assert_eq!(back.text(), text, "{model}");
        }
    }
}

#[test]
fn prompts_are_encoded_to_the_ids_of_the_goldens() {
    let sandbox = Sandbox::new();
    for name in MODELS {
        let golden = Golden::open(name);
        let text = std::fs::read(golden.folder.join("expected.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        for prompt in json["prompts"].as_array().unwrap() {
            let text = prompt["text"].as_str().unwrap();
            let ids = sandbox
                .run_with(&["tokenize", &golden_model(name)], text.as_bytes())
                .good()
                .json();
            assert_eq!(ids, prompt["input_ids"], "{name}: {text:?}");
        }
    }
}

fn golden_model(name: &str) -> String {
    crate::sandbox::golden_model(name)
        .to_str()
        .unwrap()
        .to_owned()
}
