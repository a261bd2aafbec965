//! Files and folders that are not models, and unsupported models: the error names them and says what to do.

use std::{
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::ArtifactError;
use powerinfer_model::gguf::{Dialect, Metadata, write_gguf};
use serde_json::json;

use crate::{
    edit_checkpoint::{add_tensor, configure, remove_tensor},
    sandbox::{Sandbox, golden_model},
    split_gguf::{entry, with_entries},
};

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:abababababababababababababababababababababababababababababababab\nsize 482344\n";
const PAGE: &str = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n";

fn golden_gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

#[test]
fn pointers_and_pages_in_place_of_files_are_named() {
    let sandbox = Sandbox::new();
    let stand_ins = [
        (POINTER, ["is a Git LFS pointer", "; run `git lfs pull`"]),
        (PAGE, ["is a web page", "; download the file again"]),
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
        (&["model_index.json"], &["image generation"]),
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
            .bad(1, &[parts, &["; "]].concat());
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

/// Writes a GGUF file with these metadata texts and no tensors.
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
            &[architecture("grok")],
            &[
                "mixture-of-experts models of this architecture are not supported",
                "`grok`",
                "Mixtral",
            ],
        ),
        (
            &[architecture("deepseek2")],
            &["mixture-of-experts models of this architecture are not supported"],
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
    // A Mixtral without experts.
    fs::write(&file, with_entries(&dense, &experts(8))).unwrap();
    sandbox
        .run(&["profile", "x.gguf"])
        .bad(1, &["x.gguf", "`blk.0.ffn_gate_inp.weight`"]);
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
    ] {
        let model = sandbox.copy_model("llama-silu");
        configure(&model, &keys);
        let words = format!("{kind} are not supported");
        sandbox
            .run(&["profile", "llama-silu"])
            .bad(1, &["config.json", &words, "; give a dense decoder"]);
    }
    for keys in [
        json!({ "num_local_experts": 8 }),
        json!({ "num_experts": 64 }),
        json!({ "n_routed_experts": 160 }),
    ] {
        let model = sandbox.copy_model("llama-silu");
        configure(&model, &keys);
        sandbox.run(&["profile", "llama-silu"]).bad(
            1,
            &[
                "config.json",
                "mixture-of-experts models of this architecture are not supported",
                "; give a Mixtral, ",
            ],
        );
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
        sandbox
            .run(&["profile", "llama-silu"])
            .bad(1, &[&words, "; use the original checkpoint", "a GGUF file"]);
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
