//! Imported predictors of the original PowerInfer compute the results of its engine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{TensorFile, predictor_file::PredictorFile};
use powerinfer_import::{OriginalPredictors, PredictedSizes};
use powerinfer_model::greedy_token;

use crate::{
    golden::floats,
    sandbox::{Sandbox, assert_contains},
    torch::{Element, save},
};

/// Sizes of `tiny.powerinfer`.
const SIZES: PredictedSizes = PredictedSizes {
    layers: 2,
    hidden: 64,
    neurons: 1024,
};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

fn model(kind: &str) -> String {
    let path = golden(&format!("tiny.powerinfer.{kind}.gguf"));
    path.to_str().unwrap().to_owned()
}

/// A sandbox with a profile of the model of this `kind`, in `tiny.powerinfer.<kind>.powerinfer`.
fn profiled(kind: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    let words = (0..600).map(|index| format!(" w{}", index * index % 43));
    fs::write(sandbox.path("text.txt"), words.collect::<String>()).unwrap();
    sandbox
        .run(&["profile", &model(kind), "--data", "text.txt"])
        .good();
    sandbox
}

/// The predictors of the last run.
fn predictors(sandbox: &Sandbox, kind: &str) -> PredictorFile {
    let folder = format!("tiny.powerinfer.{kind}.powerinfer/predictors");
    PredictorFile::open(&sandbox.path(&folder)).unwrap()
}

#[test]
fn imported_predictors_compute_the_results_of_the_original() {
    let about = fs::read(golden("tiny.powerinfer.json")).unwrap();
    let about: serde_json::Value = serde_json::from_slice(&about).unwrap();
    let expected = TensorFile::open(&golden("tiny.powerinfer.safetensors")).unwrap();
    for (kind, least_recall) in [("f16", 0.99), ("q4_0", 0.75)] {
        let sandbox = profiled(kind);
        let model = model(kind);
        let import = ["train-predictors", &model, "--import", &model];
        let exactly = ["--predictor-quant", "f32", "--json"];
        let made = sandbox.run(&[&import[..], &exactly].concat()).good().json();
        for layer in made["layers"].as_array().unwrap() {
            assert_eq!(
                (&layer["threshold"], &layer["rank"]),
                (&0.0.into(), &32.into())
            );
            // In F16 these predictors find every active neuron, in Q4_0 82 to 89% of them.
            let recall = layer["recall"].as_f64().unwrap();
            assert!(recall > least_recall, "{kind}: {recall}");
            assert_eq!(recall > 0.95, kind == "f16", "{kind}: {recall}");
        }
        sandbox
            .run(&[
                "place",
                &model,
                "--vram",
                "0G",
                "--quant",
                "f32",
                "--kv-cache",
                "f32",
            ])
            .good();
        let bundle = format!("tiny.powerinfer.{kind}.powerinfer");
        let prompts = about["files"][kind]["prompts"].as_array().unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            let what = format!("{kind} p{index}");
            let ids =
                |key: &str| -> Vec<u32> { serde_json::from_value(prompt[key].clone()).unwrap() };
            let (ids, greedy) = (ids("input_ids"), ids("greedy_ids"));
            let all: Vec<String> = ids.iter().chain(&greedy).map(u32::to_string).collect();
            let arguments = ["logits", &bundle, "--ids", &all.join(",")];
            let how = ["--policy", "predicted", "--out", "@logits.safetensors"];
            sandbox.run(&[&arguments[..], &how].concat()).good();
            let got = TensorFile::open(&sandbox.path("logits.safetensors")).unwrap();
            let got = floats(&got, "logits");

            let last = |which: &str| floats(&expected, &format!("{kind}.p{index}.{which}"));
            let want = last("last_logits_predicted");
            let vocabulary = want.len();
            let rows: Vec<&[f32]> = got.chunks_exact(vocabulary).collect();
            let apart = |want: &[f32]| {
                let pairs = rows[ids.len() - 1].iter().zip(want);
                pairs
                    .map(|(got, want)| (got - want).abs())
                    .fold(0.0, f32::max)
            };
            assert!(apart(&want) <= 1e-3, "{what}: {}", apart(&want));
            if kind == "q4_0" {
                // Fails if the mask is ignored.
                assert!(apart(&last("last_logits_dense")) > 0.1, "{what}");
            }
            // Greedy decoding gives the tokens of the original program.
            for (step, token) in greedy.iter().enumerate() {
                let best = greedy_token(rows[ids.len() - 1 + step]);
                assert_eq!(best, *token, "{what}: step {step}");
            }
        }
    }
}

/// Writes the predictors of the GGUF file as a folder of pickles.
fn write_pickles(folder: &Path) {
    fs::create_dir(folder).unwrap();
    let original = OriginalPredictors::open(Path::new(&model("f16")), SIZES).unwrap();
    for (layer, prefix) in [(0, ""), (1, "module.")] {
        let predictor = original.read(layer).unwrap();
        let names = ["fc1.weight", "fc2.weight"].map(|name| format!("{prefix}{name}"));
        let tensors = [
            (
                &names[0][..],
                [predictor.rank, SIZES.hidden],
                &predictor.fc1[..],
            ),
            (
                &names[1][..],
                [SIZES.neurons, predictor.rank],
                &predictor.fc2[..],
            ),
        ];
        let path = folder.join(format!("model_{layer}.pt"));
        fs::write(path, save(&tensors, Element::F16)).unwrap();
    }
}

#[test]
fn a_folder_of_pickles_gives_the_predictors_of_the_gguf_file() {
    let sandbox = profiled("f16");
    write_pickles(&sandbox.path("pickles"));
    let model = model("f16");
    for quant in ["f32", "bf16", "q8_0", "q4_0"] {
        let import = |from: &str| {
            let arguments = ["train-predictors", &model, "--import", from];
            sandbox
                .run(&[&arguments[..], &["--predictor-quant", quant]].concat())
                .good();
            let file = predictors(&sandbox, "f16");
            let mut header = file.header().clone();
            header.inputs.remove("imported").unwrap();
            assert_eq!(file.weights().name(), quant);
            let tensors: Vec<(String, Vec<u8>)> = file
                .tensors()
                .names()
                .into_iter()
                .map(|name| {
                    let bytes = file.tensors().find(&name).unwrap().bytes.to_vec();
                    (name, bytes)
                })
                .collect();
            (header, file.layers().to_vec(), tensors)
        };
        let (from_gguf, from_pickles) = (import(&model), import("pickles"));
        assert!(from_gguf == from_pickles, "{quant}");
    }
}

#[test]
fn thresholds_are_kept_unless_a_recall_is_asked_for() {
    let sandbox = profiled("f16");
    write_pickles(&sandbox.path("pickles"));
    fs::write(
        sandbox.path("pickles/config.json"),
        r#"{"sparse_threshold": 0.5}"#,
    )
    .unwrap();
    let model = model("f16");
    let import = ["train-predictors", &model, "--import", "pickles"];
    let kept = sandbox.run(&import).good();
    kept.stderr_contains(&["keep their threshold"]);
    let kept = predictors(&sandbox, "f16");
    assert!(kept.layers().iter().all(|layer| layer.threshold == 0.5));
    sandbox
        .run(&[&import[..], &["--recall", "0.9"]].concat())
        .good();
    let anew = predictors(&sandbox, "f16");
    for layer in anew.layers() {
        assert_ne!(layer.threshold, 0.5);
        assert!((0.85..0.99).contains(&layer.recall), "{layer:?}");
    }
    sandbox
        .run(&[&import[..], &["--recall", "1.5"]].concat())
        .bad(1, &["1.5"]);
}

#[test]
fn prepare_imports_predictors_and_detects_changed_ones() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("text.txt"), " w1 w2 w3 w4 w5 w6 w7".repeat(80)).unwrap();
    let model = model("q4_0");
    let prepare = |import: &str| {
        let arguments = ["prepare", &model, "--data", "text.txt", "--vram", "1G"];
        sandbox
            .run(&[&arguments[..], &["--import", import]].concat())
            .good()
            .stderr
    };
    assert!(prepare(&model).contains("imported 2 predictors"));
    assert_eq!(prepare(&model).matches("up to date").count(), 3);
    write_pickles(&sandbox.path("pickles"));
    let other = prepare("pickles");
    assert_contains(&other, &["imported 2 predictors"]);
    assert_contains(&other, &["profile: ", "up to date"]);
    let run = [
        "run",
        "tiny.powerinfer.q4_0.powerinfer",
        "--prompt",
        " w1 w2",
    ];
    let how = ["-n", "3", "--policy", "predicted"];
    sandbox.run(&[&run[..], &how].concat()).good();
}

#[test]
fn predictors_that_do_not_match_the_model_are_refused() {
    let sandbox = profiled("f16");
    let model = model("f16");
    let refused = |from: &str, parts: &[&str]| {
        sandbox
            .run(&["train-predictors", &model, "--import", from])
            .bad(1, parts);
    };
    refused("nowhere", &["nowhere", "does not exist", "give a"]);
    fs::create_dir(sandbox.path("empty")).unwrap();
    refused("empty", &["empty", "`model_0.pt`"]);
    write_pickles(&sandbox.path("pickles"));
    let (first, second) = (
        sandbox.path("pickles/model_0.pt"),
        sandbox.path("pickles/model_1.pt"),
    );
    let good = fs::read(&second).unwrap();
    fs::remove_file(&second).unwrap();
    refused("pickles", &["pickles", "layer 1", "download it again"]);
    let nan = vec![f32::NAN; 32 * 64];
    let fc2 = vec![1.0; 1024 * 32];
    let matrices = |fc1: &[f32]| {
        let tensors = [
            ("fc1.weight", [32, 64], fc1),
            ("fc2.weight", [1024, 32], &fc2),
        ];
        save(&tensors, Element::F32)
    };
    fs::write(&second, matrices(&nan)).unwrap();
    refused("pickles", &["model_1.pt", "`fc1.weight`", "NaN"]);
    fs::write(&second, matrices(&vec![1e9; 32 * 64])).unwrap();
    refused(
        "pickles",
        &["layer 1", "range of q8_0", "--predictor-quant f32"],
    );
    fs::write(&second, &good[..good.len() - 100]).unwrap();
    refused("pickles", &["model_1.pt"]);
    fs::write(&second, &good).unwrap();
    fs::write(&first, "no zip").unwrap();
    refused("pickles", &["model_0.pt", "not a zip"]);
    assert!(
        !sandbox
            .path("tiny.powerinfer.f16.powerinfer/predictors")
            .exists()
    );
    let demo = ["train-predictors", "demo", "--import", &model];
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    sandbox
        .run(&demo)
        .bad(1, &["tiny.powerinfer.f16.gguf", "layers 2–5"]);
}
