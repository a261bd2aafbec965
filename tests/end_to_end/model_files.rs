//! Unusual but valid model files: split, without an index, with renamed tensors, with predictors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    edit_checkpoint::{add_tensor, configure, edit_tensors, remove_tensor},
    sandbox::{Sandbox, copy_folder, golden_model},
    split_gguf::split,
    torch::{self, Element},
};

fn golden_gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

/// Computes the logits of `model` for a short text; returns the bytes of the output file.
fn logits(sandbox: &Sandbox, model: &str) -> Vec<u8> {
    let out = ["--out", "@logits.safetensors"];
    let arguments = ["logits", model, "--ids", "1,2,3,4,5,6,7,8,9"];
    sandbox.run(&[&arguments[..], &out].concat()).good();
    fs::read(sandbox.path("logits.safetensors")).unwrap()
}

#[test]
fn any_part_of_a_split_gguf_file_is_the_whole_model() {
    let sandbox = Sandbox::new();
    let merged = fs::read(golden_gguf("llama-sp.q4_0.gguf")).unwrap();
    fs::write(sandbox.path("merged.gguf"), &merged).unwrap();
    let expected = logits(&sandbox, "merged.gguf");
    fs::create_dir(sandbox.path("m")).unwrap();
    let part = |number: usize| sandbox.path(&format!("m/x-q4-0000{number}-of-00003.gguf"));
    let write = |parts: &[Vec<u8>]| {
        for (index, bytes) in parts.iter().enumerate() {
            fs::write(part(index + 1), bytes).unwrap();
        }
    };
    // The first part may have the metadata alone.
    for tensors in [[7, 7], [0, 20]] {
        write(&split(&merged, &tensors, 0));
        let paths = [1, 2, 3].map(|number| part(number).to_str().unwrap().to_owned());
        for model in paths.iter().map(String::as_str).chain(["m"]) {
            assert!(logits(&sandbox, model) == expected, "{model}");
        }
        for model in [&paths[1], "m"] {
            let about = sandbox.run(&["inspect", model]).good();
            about.stdout_contains(&["model        x-q4\n"]);
            let unprepared =
                ["is a model, and there is no bundle of it in `x-q4.powerinfer/bundle`"];
            sandbox.run(&["run", model]).bad(1, &unprepared);
        }
    }

    let second = part(2);
    let second = second.to_str().unwrap();
    let refused = |model: &str, parts: &[&str]| {
        sandbox.run(&["inspect", model]).bad(1, parts);
    };
    // A folder of several models is ambiguous, an encoder of images is none.
    fs::write(sandbox.path("m/mmproj-x.gguf"), &merged).unwrap();
    assert!(logits(&sandbox, "m") == expected);
    fs::write(sandbox.path("m/y.gguf"), &merged).unwrap();
    let both = [
        "several GGUF models: `x-q4-00001-of-00003.gguf`, `y.gguf`",
        "the path of one",
    ];
    refused("m", &both);
    fs::remove_file(sandbox.path("m/y.gguf")).unwrap();

    write(&split(&merged, &[7, 7], 1));
    refused(
        second,
        &["`split.tensors.count` is 22", "download them again"],
    );
    let parts = split(&merged, &[7, 7], 0);
    write(&[parts[0].clone(), parts[2].clone(), parts[1].clone()]);
    refused(second, &["00002-of-00003", "`split.no` is 2 instead of 1"]);
    write(&[parts[0].clone(), split(&merged, &[7], 0)[1].clone()]);
    refused(second, &["rename it so"]);
    refused("m", &["`split.count` is 2 instead of 3"]);
    let (other, again) = (split(&merged, &[7, 6], 0), split(&merged, &[7, 7], 0));
    write(&[again[0].clone(), again[1].clone(), other[2].clone()]);
    refused("m", &["-00003-of-00003", "is in an earlier part too"]);
    write(&parts);
    fs::remove_file(part(1)).unwrap();
    for model in [second, "m"] {
        refused(
            model,
            &[
                "`x-q4-00001-of-00003.gguf`",
                "is missing",
                "; download it too",
            ],
        );
    }
    fs::remove_file(part(3)).unwrap();
    refused(
        second,
        &[
            "`x-q4-00001-of-00003.gguf`, `x-q4-00003-of-00003.gguf`",
            "are missing",
        ],
    );
    fs::rename(second, sandbox.path("renamed.gguf")).unwrap();
    refused(
        "renamed.gguf",
        &["part 2 of 3", "`NAME-00002-of-00003.gguf`"],
    );
}

#[test]
fn shards_without_an_index_are_a_model_if_all_are_there() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-sharded");
    let expected = logits(&sandbox, "llama-sharded");
    fs::remove_file(model.join("model.safetensors.index.json")).unwrap();
    assert!(logits(&sandbox, "llama-sharded") == expected);
    fs::remove_file(model.join("model-00001-of-00002.safetensors")).unwrap();
    sandbox.run(&["inspect", "llama-sharded"]).bad(
        1,
        &[
            "`model-00001-of-00002.safetensors`",
            "is missing",
            "; download it too",
        ],
    );
}

#[test]
fn tied_embeddings_may_be_stored_under_the_heads_name() {
    let sandbox = Sandbox::new();
    for (name, embedding, head) in [
        (
            "llama-tied-headdim",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ),
        (
            "qwen2-bias-tied",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ),
        ("gemma", "model.embed_tokens.weight", "lm_head.weight"),
        (
            "opt-preln",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        ),
        ("gptneox", "gpt_neox.embed_in.weight", "embed_out.weight"),
    ] {
        let model = sandbox.copy_model(name);
        let weights = model.join("model.safetensors");
        if name == "gptneox" {
            configure(&model, &json!({ "tie_word_embeddings": true }));
            remove_tensor(&weights, head);
        }
        let expected = logits(&sandbox, name);
        edit_tensors(&weights, |table, _| {
            let about = table.remove(embedding).unwrap();
            table.insert(head.to_owned(), about);
        });
        assert!(logits(&sandbox, name) == expected, "{name}");
        // A model that is not tied needs both.
        configure(&model, &json!({ "tie_word_embeddings": false }));
        sandbox
            .run(&["inspect", name])
            .bad(1, &[embedding, "incomplete"]);
    }
}

#[test]
fn leftovers_of_older_checkpoints_are_ignored() {
    let sandbox = Sandbox::new();
    for (name, tensor) in [
        ("opt-preln", "decoder.version"),
        ("opt-preln", "model.decoder.version"),
        (
            "qwen2-bias-tied",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        ),
        ("phi", "model.layers.1.self_attn.rotary_emb.cos_cached"),
        ("gptneox", "gpt_neox.layers.0.attention.masked_bias"),
    ] {
        let expected = logits(&sandbox, golden_model(name).to_str().unwrap());
        let model = sandbox.copy_model(name);
        add_tensor(&model.join("model.safetensors"), tensor, &[1], &[3.0]);
        assert!(logits(&sandbox, name) == expected, "{name} {tensor}");
    }
}

#[test]
fn predictors_inside_a_checkpoint_are_those_of_a_folder() {
    const RANK: usize = 16;
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("mistral-swa-relu");
    configure(
        &model,
        &json!({ "architectures": ["BambooForCausalLM"], "model_type": "bamboo" }),
    );
    let config: Value =
        serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, neurons) = (size("hidden_size"), size("intermediate_size"));
    let expected = logits(&sandbox, "mistral-swa-relu");
    fs::create_dir(sandbox.path("pickles")).unwrap();
    for layer in 0..size("num_hidden_layers") {
        let matrix = |rows: usize, columns: usize| -> Vec<f32> {
            let values = (0..rows * columns).map(|index| (index * 7 + layer) % 13);
            values.map(|value| value as f32 - 6.0).collect()
        };
        let matrices = [
            ("fc1.weight", [RANK, hidden], &matrix(RANK, hidden)[..]),
            ("fc2.weight", [neurons, RANK], &matrix(neurons, RANK)[..]),
        ];
        for (name, shape, values) in &matrices {
            let name = format!("model.layers.{layer}.mlp.predictor.{name}");
            add_tensor(&model.join("model.safetensors"), &name, shape, values);
        }
        let path = sandbox.path(&format!("pickles/model_{layer}.pt"));
        fs::write(path, torch::save(&matrices, Element::F32)).unwrap();
    }
    // They change nothing that is computed.
    assert!(logits(&sandbox, "mistral-swa-relu") == expected);
    fs::write(
        sandbox.path("text.txt"),
        "def area(r):\n    return r\n".repeat(60),
    )
    .unwrap();
    let train = ["train-predictors", "mistral-swa-relu", "--json"];
    sandbox
        .run(&["profile", "mistral-swa-relu", "--data", "text.txt"])
        .good();
    let import = |from: &str| {
        let run = sandbox
            .run(&[&train[..], &["--import", from]].concat())
            .good();
        let mut made = run.json();
        made["header"]["inputs"]["imported"].take();
        let folder = sandbox.path("mistral-swa-relu.powerinfer/predictors");
        let file = fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path());
        let bytes: Vec<usize> = file.map(|file| fs::read(file).unwrap().len()).collect();
        (made["layers"].clone(), bytes, run.stderr)
    };
    let (inside, beside) = (import("mistral-swa-relu"), import("pickles"));
    assert_eq!(inside.0, beside.0);
    assert_eq!(inside.1, beside.1);
    assert_eq!(inside.0[0]["rank"], RANK);
    assert!(!inside.2.contains("contains predictors"));
    let note = "`mistral-swa-relu` contains predictors; `--import mistral-swa-relu` uses them";
    let quick = ["--steps", "1", "--reset"];
    sandbox
        .run(&[&train[..], &quick].concat())
        .good()
        .stderr_contains(&[note]);

    // Part of a predictor, or more than one, is refused.
    let other = sandbox.path("other");
    copy_folder(&model, &other);
    let weights = other.join("model.safetensors");
    add_tensor(
        &weights,
        "model.layers.0.mlp.predictor.fc2.bias",
        &[1],
        &[1.0],
    );
    let import = [&train[..], &["--import", "other"]].concat();
    sandbox
        .run(&import)
        .bad(1, &["fc2.bias", "is not part of a predictor"]);
    for tensor in ["fc2.bias", "fc1.weight"] {
        remove_tensor(&weights, &format!("model.layers.0.mlp.predictor.{tensor}"));
    }
    sandbox.run(&import).bad(1, &["no predictor of layer 0"]);
}

#[test]
fn types_that_cannot_be_read_are_found_when_a_model_is_opened() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-silu");
    edit_tensors(&model.join("model.safetensors"), |table, _| {
        let last = table
            .get_mut("model.layers.1.mlp.down_proj.weight")
            .unwrap();
        last["dtype"] = "U32".into();
    });
    sandbox.run(&["inspect", "llama-silu"]).bad(
        1,
        &[
            "`model.layers.1.mlp.down_proj.weight`",
            "stored as U32",
            "; use the original",
        ],
    );
}
