//! `export`, and what other commands make of its files.

use std::path::{Path, PathBuf};

use powerinfer_artifact::TensorFile;
use powerinfer_model::{container::Container, gguf::GgufFile};

use crate::{
    golden::floats,
    sandbox::{Sandbox, golden_model, words},
};

fn golden(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name);
    path.to_str().unwrap().to_owned()
}

/// Logits of some tokens.
fn logits(sandbox: &Sandbox, model: &str, more: &[&str]) -> Vec<f32> {
    let arguments = [
        "logits",
        model,
        "--ids",
        "1,30,261,275,290,300",
        "--out",
        "@logits",
    ];
    sandbox.run(&[&arguments[..], more].concat()).good();
    floats(
        &TensorFile::open(&sandbox.path("logits")).unwrap(),
        "logits",
    )
}

/// Prepares a file of the original PowerInfer with its own predictors.
fn prepare(sandbox: &Sandbox, model: &str) {
    let run = |arguments: &[&str]| drop(sandbox.run(arguments).good());
    run(&["profile", model, "--data", "text.txt"]);
    run(&[
        "train-predictors",
        model,
        "--import",
        model,
        "--predictor-quant",
        "f16",
    ]);
    run(&[
        "place",
        model,
        "--vram",
        "0G",
        "--quant",
        "f16",
        "--policy",
        "predicted",
    ]);
}

#[test]
fn a_model_of_the_original_goes_out_and_comes_back() {
    let sandbox = Sandbox::new();
    let words = (0..600).map(|index| format!(" w{}", index * index % 43));
    std::fs::write(sandbox.path("text.txt"), words.collect::<String>()).unwrap();
    let model = golden("tiny.powerinfer.f16.gguf");
    prepare(&sandbox, &model);
    let own = "tiny.powerinfer.f16.powerinfer";
    std::fs::create_dir(sandbox.path("out")).unwrap();
    let exported = sandbox
        .run(&["export", own, "--to", "powerinfer", "out"])
        .good();
    exported.stderr_contains(&["25 tensors, matrices in f16", "0 neurons on the GPU"]);
    let index = "out/tiny.powerinfer.f16.powerinfer.gguf.generated.gpuidx";
    let index = sandbox.run(&["inspect", index]).good();
    index.stdout_contains(&["layer 0      0 of 1024"]);
    // The name is the model's.
    let file = sandbox.path("out/tiny.powerinfer.f16.powerinfer.gguf");
    assert!(
        sandbox
            .path("out/tiny.powerinfer.f16.powerinfer.gguf.generated.gpuidx")
            .is_file()
    );
    let copy = "copy.gguf";
    std::fs::copy(&file, sandbox.path("without-ending")).unwrap();
    let inspected = sandbox.run(&["inspect", "without-ending"]).good();
    inspected.stdout_contains(&["layers"]);
    std::fs::rename(&file, sandbox.path(copy)).unwrap();
    prepare(&sandbox, copy);
    let policy = ["--policy", "predicted"];
    let (before, after) = (
        logits(&sandbox, own, &policy),
        logits(&sandbox, "copy.powerinfer", &policy),
    );
    assert!(before.iter().any(|logit| *logit != 0.0) && before == after);
}

#[test]
fn a_bundle_is_exported_with_its_weights() {
    let sandbox = Sandbox::new();
    let text = "def area(r):\n    return 3.14 * r ** 2\n\n".repeat(40);
    std::fs::write(sandbox.path("text.txt"), text).unwrap();
    let model = golden("llama-bpe.f16.gguf");
    sandbox
        .run(&["profile", &model, "--data", "text.txt"])
        .good();
    sandbox
        .run(&[
            "place", &model, "--vram", "0G", "--quant", "f16", "--policy", "dense",
        ])
        .good();
    sandbox
        .run(&["export", "llama-bpe.f16", "--to", "gguf", "out.gguf"])
        .good()
        .stderr_contains(&["those of the bundle in f16", "exported to `out.gguf`"]);
    let got = GgufFile::open(&sandbox.path("out.gguf")).unwrap();
    let want = GgufFile::open(Path::new(&model)).unwrap();
    assert_eq!(got.names(), want.names());
    for name in want.names() {
        assert!(
            got.stored(&name).unwrap() == want.stored(&name).unwrap(),
            "{name}"
        );
    }
    sandbox
        .run(&["export", "llama-bpe.f16", "--to", "powerinfer", "out.gguf"])
        .bad(1, &["its engine runs only ReLU models"]);
    sandbox
        .run(&words(
            "export llama-bpe.f16 --to gguf llama-bpe.f16.powerinfer/bundle/out.gguf",
        ))
        .bad(1, &["among the bundle's own files"]);
}

#[test]
fn files_of_another_kind_and_the_model_itself_are_kept() {
    let sandbox = Sandbox::new();
    let model = golden_model("llama-silu").to_str().unwrap().to_owned();
    let export = |more: &[&str]| sandbox.run(&[&["export", &model, "--to", "gguf"], more].concat());
    std::fs::write(sandbox.path("notes.txt"), "important").unwrap();
    export(&["notes.txt"]).bad(1, &["`notes.txt` exists and is not a GGUF file"]);
    assert_eq!(
        std::fs::read(sandbox.path("notes.txt")).unwrap(),
        b"important"
    );
    export(&["a.gguf"]).good();
    export(&["a.gguf", "--quant", "q8_0"])
        .good()
        .stderr_contains(&["matrices in q8_0"]);
    sandbox
        .run(&["export", "a.gguf", "--to", "gguf", "./a.gguf"])
        .bad(1, &["is the model itself"]);
    export(&["b.gguf", "--quant", "q4_k"]).bad(1, &["no weights in q4_k", "llama-quantize"]);
    export(&["b.gguf", "--quant", "q3"]).bad(2, &["unknown weight format"]);
    sandbox
        .run(&["export", "a.gguf", "--to", "powerinfer", "b.gguf"])
        .bad(1, &["is a model", "prepare"]);
    let relu = golden_model("llama-relu-gqa").to_str().unwrap().to_owned();
    sandbox
        .run(&["export", &relu, "--to", "gguf", "b.gguf"])
        .bad(
            1,
            &[
                "computes SiLU, the model ReLU",
                "hint: export the bundle",
                "--to powerinfer",
            ],
        );
    assert!(!sandbox.path("b.gguf").exists());
    sandbox
        .run(&[
            "export",
            &relu,
            "--to",
            "gguf",
            "b.gguf",
            "--any-activation",
            "--no-tokenizer",
        ])
        .good();
    assert!(sandbox.path("b.gguf").exists());
}
