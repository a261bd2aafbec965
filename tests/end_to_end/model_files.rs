//! Models as people have them: split, incomplete, with tensors under other names, with predictors; and files that are
//! no models, which are refused by name.

use std::{
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::ArtifactError;
use powerinfer_model::gguf::{Dialect, Metadata, write_gguf};
use serde_json::{Map, Value, json};

use crate::{
    sandbox::{Sandbox, copy_folder, golden_model},
    split_gguf::{entry, split, with_entries},
    torch::{self, Element},
};

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:abababababababababababababababababababababababababababababababab\nsize 482344\n";
const PAGE: &str = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n";

fn golden_gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

/// The logits of `model` for a short text, as the bytes of the file they are written to.
fn logits(sandbox: &Sandbox, model: &str) -> Vec<u8> {
    let out = ["--out", "@logits.safetensors"];
    let arguments = ["logits", model, "--ids", "1,2,3,4,5,6,7,8,9"];
    sandbox.run(&[&arguments[..], &out].concat()).good();
    fs::read(sandbox.path("logits.safetensors")).unwrap()
}

/// Changes the tensor table and the data of a safetensors file.
fn edit_tensors(path: &Path, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut table: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    change(&mut table, &mut data);
    let table = serde_json::to_vec(&table).unwrap();
    let length = (table.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], &table, &data].concat()).unwrap();
}

/// Removes a tensor and its data.
fn remove_tensor(path: &Path, name: &str) {
    edit_tensors(path, |table, data| {
        let entry = table.remove(name).unwrap();
        let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap();
        let (start, end) = (offset(0), offset(1));
        data.drain(start as usize..end as usize);
        for (_, other) in table.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            for place in other["data_offsets"].as_array_mut().unwrap() {
                let old = place.as_u64().unwrap();
                *place = if old > start {
                    old - (end - start)
                } else {
                    old
                }
                .into();
            }
        }
    });
}

/// Adds an f32 tensor.
fn add_tensor(path: &Path, name: &str, shape: &[usize], values: &[f32]) {
    edit_tensors(path, |table, data| {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let about = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        table.insert(name.to_owned(), about);
    });
}

/// Sets keys of the `config.json` in `model`.
fn configure(model: &Path, keys: &Value) {
    let path = model.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.extend(keys.as_object().unwrap().clone());
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
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
                "hint: download it too",
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
            "hint: download it too",
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
    let quick = ["--steps", "1"];
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
fn pointers_and_pages_in_place_of_files_are_named() {
    let sandbox = Sandbox::new();
    let stand_ins = [
        (
            POINTER,
            ["is a Git LFS pointer", "hint: run `git lfs pull`"],
        ),
        (PAGE, ["is a web page", "hint: download the file again"]),
    ];
    for (content, words) in stand_ins {
        for (name, file) in [
            ("llama-silu", "config.json"),
            ("llama-silu", "generation_config.json"),
            ("llama-silu", "tokenizer.json"),
            ("llama-silu", "tokenizer_config.json"),
            ("llama-silu", "model.safetensors"),
            ("llama-sharded", "model.safetensors.index.json"),
            ("llama-sharded", "model-00002-of-00002.safetensors"),
            ("llama-bin-only", "pytorch_model.bin"),
        ] {
            let model = sandbox.copy_model(name);
            fs::write(model.join(file), content).unwrap();
            fs::write(sandbox.path("text.txt"), "some text ".repeat(900)).unwrap();
            sandbox
                .run(&["profile", name, "--data", "text.txt"])
                .bad(1, &[&[file][..], &words].concat());
            fs::copy(golden_model(name).join(file), model.join(file)).unwrap();
        }
        fs::write(sandbox.path("m.gguf"), content).unwrap();
        sandbox
            .run(&["inspect", "m.gguf"])
            .bad(1, &[&["m.gguf"][..], &words].concat());
    }
}

#[test]
fn folders_without_a_model_are_named() {
    let sandbox = Sandbox::new();
    for (files, parts) in [
        (
            &["adapter_config.json", "adapter_model.safetensors"][..],
            &["a LoRA adapter, not a model", "merge it"][..],
        ),
        (&["config.json", "adapter_model.bin"], &["a LoRA adapter"]),
        (
            &["consolidated.00.pth", "params.json", "tokenizer.model"],
            &["Meta", "`consolidated.00.pth`", "safetensors"],
        ),
        (&["config.json", "model.onnx"], &["ONNX", "`model.onnx`"]),
        (&["config.json", "tf_model.h5"], &["TensorFlow"]),
        (&["config.json", "flax_model.msgpack"], &["Flax"]),
        (&["config.json", "model.mlpackage"], &["Core ML"]),
        (&["config.json", "consolidated.safetensors"], &["Mistral"]),
        (&["model_index.json"], &["makes images"]),
        (&["model.zip"], &["archive, `model.zip`", "unpack it"]),
        (
            &["snapshots", "refs", "blobs"],
            &["the hub's cache", "`org/name`"],
        ),
        (&["README.md"], &["no `config.json`"]),
        (&["config.json"], &["no `model.safetensors`"]),
        (&[], &["an empty folder"]),
    ] {
        let folder = sandbox.path("x");
        fs::create_dir(&folder).unwrap();
        for file in files {
            fs::write(folder.join(file), "x").unwrap();
        }
        if files.contains(&"config.json") {
            fs::copy(
                golden_model("llama-silu").join("config.json"),
                folder.join("config.json"),
            )
            .unwrap();
        }
        sandbox
            .run(&["profile", "x"])
            .bad(1, &[parts, &["hint: "]].concat());
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn files_that_are_no_models_are_named() {
    let sandbox = Sandbox::new();
    let weights = golden_model("llama-silu").join("model.safetensors");
    let pickle = golden_model("llama-bin-only").join("pytorch_model.bin");
    for (content, parts) in [
        (
            fs::read(weights).unwrap(),
            &["is a safetensors file", "give the folder"][..],
        ),
        (
            fs::read(pickle).unwrap(),
            &["is a zip file", "give the folder"],
        ),
        (b"\x80\x02}q\x00.".to_vec(), &["is a Python pickle"]),
        (
            b"\x1f\x8b\x08\x00\x00".to_vec(),
            &["is a compressed file", "unpack it"],
        ),
        (
            b"{\"a\": 1}".to_vec(),
            &["is a JSON file", "give the folder"],
        ),
        (
            b"hello, world".to_vec(),
            &["starts with `hell` instead of `GGUF`"],
        ),
        (Vec::new(), &["x.gguf"]),
    ] {
        fs::write(sandbox.path("x.gguf"), content).unwrap();
        sandbox.run(&["profile", "x.gguf"]).bad(1, parts);
    }
}

/// Writes a GGUF file with these texts as metadata, and no tensors.
fn write_metadata(path: &Path, entries: &[(&str, &str)]) {
    let mut metadata = Metadata::default();
    for (key, value) in entries {
        metadata.push(*key, *value);
    }
    write_gguf(path, Dialect::Ggml, &metadata, &[], |_, _| {
        Ok::<(), ArtifactError>(())
    })
    .unwrap();
}

#[test]
fn gguf_files_of_other_kinds_are_named() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("x.gguf");
    let architecture = |name| ("general.architecture", name);
    for (entries, parts) in [
        (
            &[architecture("llama"), ("general.type", "adapter")][..],
            &["a LoRA adapter, not a model", "merge it"][..],
        ),
        (
            &[architecture("clip"), ("general.type", "mmproj")],
            &["(`mmproj`), not a model"],
        ),
        (&[architecture("clip")], &["(`mmproj`), not a model"]),
        (
            &[architecture("llama"), ("general.type", "imatrix")],
            &["(`imatrix`), not a model"],
        ),
        (&[architecture("llama")], &["x.gguf"]),
        (
            &[architecture("qwen3moe")],
            &["mixture-of-experts models are not supported", "`qwen3moe`"],
        ),
        (
            &[architecture("deepseek2")],
            &["mixture-of-experts models are not supported"],
        ),
        (
            &[architecture("nomic-bert")],
            &["encoders and embedding models are not supported"],
        ),
        (
            &[architecture("t5")],
            &["models of an encoder and a decoder are not supported"],
        ),
        (
            &[architecture("mamba")],
            &["recurrent and state-space models are not supported"],
        ),
        (
            &[architecture("qwen2vl")],
            &["models of images and text are not supported"],
        ),
        (&[architecture("novel")], &["`novel`", "supported: llama"]),
    ] {
        write_metadata(&file, entries);
        sandbox.run(&["profile", "x.gguf"]).bad(1, parts);
    }
    let dense = fs::read(golden_gguf("llama-sp.q4_0.gguf")).unwrap();
    let experts = |count| [entry("llama.expert_count", 4, count)];
    fs::write(&file, with_entries(&dense, &experts(8))).unwrap();
    sandbox.run(&["profile", "x.gguf"]).bad(
        1,
        &[
            "mixture-of-experts models are not supported (`llama.expert_count` is 8)",
            "dense",
        ],
    );
    fs::write(&file, with_entries(&dense, &experts(0))).unwrap();
    sandbox.run(&["inspect", "x.gguf"]).good();
}

#[test]
fn other_kinds_of_models_are_named() {
    let sandbox = Sandbox::new();
    let class = |name: &str| json!({ "architectures": [name] });
    for (keys, kind) in [
        (class("BertModel"), "encoders and embedding models"),
        (
            class("XLMRobertaForMaskedLM"),
            "encoders and embedding models",
        ),
        (
            class("MistralModel"),
            "models without an output head, such as embedding models,",
        ),
        (
            class("T5ForConditionalGeneration"),
            "models of an encoder and a decoder",
        ),
        (
            class("LlavaForConditionalGeneration"),
            "models of images and text",
        ),
        (
            class("Qwen2_5_VLForConditionalGeneration"),
            "models of images and text",
        ),
        (class("CLIPModel"), "models of images and text"),
        (class("WhisperForConditionalGeneration"), "models of sound"),
        (
            class("LlamaForSequenceClassification"),
            "classifiers and reward models",
        ),
        (
            class("MambaForCausalLM"),
            "recurrent and state-space models",
        ),
        (
            json!({ "num_local_experts": 8 }),
            "mixture-of-experts models",
        ),
        (json!({ "num_experts": 64 }), "mixture-of-experts models"),
        (
            json!({ "n_routed_experts": 160 }),
            "mixture-of-experts models",
        ),
    ] {
        let model = sandbox.copy_model("llama-silu");
        configure(&model, &keys);
        let words = format!("{kind} are not supported");
        sandbox
            .run(&["profile", "llama-silu"])
            .bad(1, &["config.json", &words, "hint: give a dense decoder"]);
    }
    let model = sandbox.copy_model("llama-silu");
    configure(
        &model,
        &json!({ "num_experts": 0, "num_local_experts": null }),
    );
    sandbox.run(&["inspect", "llama-silu"]).good();
}

#[test]
fn quantised_checkpoints_are_refused_by_the_name_of_the_method() {
    let sandbox = Sandbox::new();
    let refused = |method: &str| {
        let words = format!("quantised by {method}, which is not supported");
        sandbox.run(&["profile", "llama-silu"]).bad(
            1,
            &[&words, "hint: use the original checkpoint", "a GGUF file"],
        );
    };
    let method = |name: &str| json!({ "quantization_config": { "quant_method": name } });
    for (keys, name) in [
        (method("gptq"), "GPTQ"),
        (method("awq"), "AWQ"),
        (method("fp8"), "FP8"),
        (method("fbgemm_fp8"), "FP8"),
        (method("compressed-tensors"), "compressed-tensors"),
        (method("eetq"), "EETQ"),
        (method("hqq"), "HQQ"),
        (method("quanto"), "quanto"),
        (method("aqlm"), "AQLM"),
        (method("mxfp4"), "MXFP4"),
        (
            json!({ "quantization_config": { "load_in_4bit": true } }),
            "bitsandbytes",
        ),
        (
            json!({ "quantization": { "group_size": 64, "bits": 4 } }),
            "MLX",
        ),
    ] {
        configure(&sandbox.copy_model("llama-silu"), &keys);
        refused(name);
    }
    // Without a configuration the tensors tell.
    for (suffixes, file, name) in [
        (
            &["qweight", "qzeros", "scales"][..],
            "quantize_config.json",
            "GPTQ",
        ),
        (&["qweight", "qzeros", "scales"], "quant_config.json", "AWQ"),
        (&["qweight", "scales"], "README.md", "GPTQ or AWQ"),
        (
            &["weight_packed", "weight_scale"],
            "README.md",
            "compressed-tensors",
        ),
        (&["weight", "weight_scale_inv"], "README.md", "FP8"),
        (&["weight", "weight.absmax"], "README.md", "bitsandbytes"),
    ] {
        fs::remove_dir_all(sandbox.path("llama-silu")).unwrap();
        let model = sandbox.copy_model("llama-silu");
        fs::write(model.join(file), "{}").unwrap();
        let weights = model.join("model.safetensors");
        remove_tensor(&weights, "model.layers.0.mlp.up_proj.weight");
        for suffix in suffixes {
            let tensor = format!("model.layers.0.mlp.up_proj.{suffix}");
            add_tensor(&weights, &tensor, &[1], &[1.0]);
        }
        refused(name);
    }
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
            "hint: use the original",
        ],
    );
}
