//! GGUF files against the results of llama.cpp's tools and of exact arithmetic.

use std::path::PathBuf;

use powerinfer_artifact::TensorFile;
use powerinfer_model::Files;
use powerinfer_text::{SpecialTokens, Tokenizer};
use serde_json::Value;

use crate::{
    golden::floats,
    sandbox::{QUICK, Sandbox},
};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap()
}

/// A GGUF file, the file of its expected results, and the prefix of their names in it.
struct Case {
    file: &'static str,
    expected: &'static str,
    prefix: &'static str,
    /// Whether logits of every position are expected, not only of the last one.
    whole: bool,
    tolerance: f32,
}

const CASES: [Case; 7] = [
    Case::new("llama-sp.q4_0.gguf", "llama-sp", "q4_0", false, 3e-4),
    Case::new("llama-sp.q4_k_m.gguf", "llama-sp", "q4_k_m", false, 3e-4),
    Case::new("llama-bpe.f16.gguf", "llama-bpe", "f16", true, 3e-4),
    Case::new("llama-bpe.q4_k_m.gguf", "llama-bpe", "q4_k_m", false, 3e-4),
    Case::new(
        "qwen2-bias-tied.f16.gguf",
        "families",
        "qwen2-bias-tied",
        true,
        5e-4,
    ),
    Case::new("gptneox.f16.gguf", "families", "gptneox", true, 5e-4),
    Case::new(
        "llama-rope3.f16.gguf",
        "families",
        "llama-rope3",
        true,
        5e-4,
    ),
];

impl Case {
    const fn new(
        file: &'static str,
        expected: &'static str,
        prefix: &'static str,
        whole: bool,
        tolerance: f32,
    ) -> Self {
        Self {
            file,
            expected,
            prefix,
            whole,
            tolerance,
        }
    }

    /// The prompts: name, text and ids.
    fn prompts(&self) -> Vec<(String, String, Value)> {
        let json = json(&format!("{}.json", self.expected));
        let prompts = match self.expected {
            "families" => &json[self.prefix]["prompts"],
            _ => &json["prompts"],
        };
        let prompts = prompts.as_array().unwrap();
        prompts
            .iter()
            .map(|prompt| {
                let text = |key: &str| prompt[key].as_str().unwrap().to_owned();
                (text("key"), text("text"), prompt["input_ids"].clone())
            })
            .collect()
    }
}

#[test]
fn logits_and_greedy_tokens_equal_those_of_exact_arithmetic() {
    let sandbox = Sandbox::new();
    for case in &CASES {
        let expected = format!("{}.safetensors", case.expected);
        let expected = TensorFile::open(&golden(&expected)).unwrap();
        let file = golden(case.file);
        for (prompt, _, ids) in case.prompts() {
            let ids: Vec<u32> = serde_json::from_value(ids).unwrap();
            let greedy = format!("{}.{prompt}.greedy_ids", case.prefix);
            let greedy = expected.find(&greedy).unwrap().bytes.chunks_exact(8);
            let greedy: Vec<u32> = greedy
                .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32)
                .collect();
            for engine in ["reference", "runtime"] {
                let what = format!("{} {prompt} {engine}", case.file);
                let logits = |ids: &[u32]| {
                    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
                    sandbox
                        .run(&[
                            "logits",
                            file.to_str().unwrap(),
                            "--ids",
                            &ids.join(","),
                            "--engine",
                            engine,
                            "--out",
                            "@logits.safetensors",
                        ])
                        .good();
                    let file = TensorFile::open(&sandbox.path("logits.safetensors")).unwrap();
                    floats(&file, "logits")
                };
                // Greedy decoding follows the logits of prompt and continuation.
                let all = logits(&[&ids[..], &greedy].concat());
                let vocabulary = all.len() / (ids.len() + greedy.len());
                for (step, token) in greedy.iter().enumerate() {
                    let row = &all[(ids.len() - 1 + step) * vocabulary..][..vocabulary];
                    let best = powerinfer_model::greedy_token(row);
                    assert_eq!(best, *token, "{what}: step {step}");
                }
                let got = &all[..ids.len() * vocabulary];
                let (name, got) = if case.whole {
                    ("logits", got)
                } else {
                    ("last_logits", &got[got.len() - vocabulary..])
                };
                let want = floats(&expected, &format!("{}.{prompt}.{name}", case.prefix));
                assert_eq!(got.len(), want.len(), "{what}");
                for (got, want) in got.iter().zip(&want) {
                    let tolerance = case.tolerance + 1e-4 * want.abs();
                    assert!(
                        (got - want).abs() <= tolerance,
                        "{what}: {got}, expected {want}"
                    );
                }
            }
        }
    }
}

/// The tokenizer of a GGUF file.
fn tokenizer(file: &str) -> Tokenizer {
    let files = Files::open(&golden(file)).unwrap();
    let read = |name: &str| files.read(name).unwrap().map(|bytes| bytes.to_vec().into());
    Tokenizer::from_files(read).unwrap()
}

#[test]
fn texts_are_encoded_to_the_ids_of_llama_cpp() {
    for case in &CASES {
        let tokenizer = tokenizer(case.file);
        for (_, text, ids) in case.prompts() {
            let got = tokenizer.encode(&text, SpecialTokens::Add).unwrap();
            assert_eq!(
                serde_json::to_value(got).unwrap(),
                ids,
                "{}: {text:?}",
                case.file
            );
        }
        let json = json(&format!("{}.json", case.expected));
        let Some(cases) = json["tokenizer_cases"].as_array() else {
            continue;
        };
        assert!(cases.len() > 100);
        for tokens in cases {
            let text = tokens["text"].as_str().unwrap();
            let got = tokenizer.encode(text, SpecialTokens::Add).unwrap();
            let got = serde_json::to_value(got).unwrap();
            assert_eq!(got, tokens["llamacpp_ids"], "{}: {text:?}", case.file);
        }
    }
}

#[test]
fn texts_are_split_as_llama_cpp_splits_them() {
    let json = json("splittings.json");
    let texts: Vec<String> = serde_json::from_value(json["texts"].clone()).unwrap();
    for (splitting, expected) in json["llamacpp_ids"].as_object().unwrap() {
        let tokenizer = tokenizer(&format!("splitting-{splitting}.gguf"));
        for (text, ids) in texts.iter().zip(expected.as_array().unwrap()) {
            let got = tokenizer.encode(text, SpecialTokens::Add).unwrap();
            let got = serde_json::to_value(got).unwrap();
            assert_eq!(got, *ids, "{splitting}: {text:?}");
        }
    }
}

#[test]
fn a_gguf_file_goes_through_the_whole_pipeline() {
    let sandbox = Sandbox::new();
    let text = "def area(r):\n    return 3.14 * r ** 2\n\n".repeat(40);
    std::fs::write(sandbox.path("text.txt"), text).unwrap();
    let file = golden("llama-sp.q4_k_m.gguf");
    let arguments = [
        "prepare",
        file.to_str().unwrap(),
        "--data",
        "text.txt",
        "--vram",
        "1G",
    ];
    let prepared = sandbox.run(&[&arguments[..], &QUICK].concat()).good();
    prepared.stderr_contains(&["SiLU is assumed, as in llama.cpp"]);
    let run = sandbox
        .run(&[
            "run",
            // The file that was prepared means its bundle.
            file.to_str().unwrap(),
            "--prompt",
            "def",
            "-n",
            "4",
        ])
        .good();
    run.stderr_contains(&["decode: 4 tokens"]);
    let about = sandbox.run(&["inspect", file.to_str().unwrap()]).good();
    about.stdout_contains(&["2 of 256 hidden", "SiLU (assumed"]);
}

#[test]
fn files_of_the_original_powerinfer_are_read() {
    let sandbox = Sandbox::new();
    let json = json("tiny.powerinfer.json");
    let expected = TensorFile::open(&golden("tiny.powerinfer.safetensors")).unwrap();
    for kind in ["f16", "q4_0"] {
        let file = golden(&format!("tiny.powerinfer.{kind}.gguf"));
        let prompts = json["files"][kind]["prompts"].as_array().unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            let ids: Vec<String> = prompt["input_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(ToString::to_string)
                .collect();
            for engine in ["reference", "runtime"] {
                let arguments = ["logits", file.to_str().unwrap(), "--ids", &ids.join(",")];
                let out = ["--engine", engine, "--out", "@logits.safetensors"];
                sandbox.run(&[&arguments[..], &out].concat()).good();
                let got = TensorFile::open(&sandbox.path("logits.safetensors")).unwrap();
                let got = floats(&got, "logits");
                let want = floats(&expected, &format!("{kind}.p{index}.last_logits_dense"));
                let last = &got[got.len() - want.len()..];
                for (got, want) in last.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= 1e-3,
                        "{kind} p{index} {engine}: {got}, {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn hostile_files_are_refused_from_the_command_line() {
    let sandbox = Sandbox::new();
    let list = json("hostile/hostile.json");
    let files = list["files"].as_object().or(list.as_object()).unwrap();
    let mut refused = 0;
    for (name, about) in files.iter().filter(|(name, _)| name.ends_with(".gguf")) {
        if about["expect"] == "error" {
            let file = golden(&format!("hostile/{name}"));
            sandbox
                .run(&["inspect", file.to_str().unwrap()])
                .bad(1, &[name.as_str()]);
            refused += 1;
        }
    }
    assert!(refused > 30, "{refused}");
}
