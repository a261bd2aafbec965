//! What people have in place of a model that can be run, recognised by name: adapters, weights in other formats,
//! kinds of models that are not supported, and quantised weights.

use std::path::Path;

use serde_json::Value;

use crate::{
    Files, ModelError,
    container::Container,
    gguf::{self, Gguf, GgufFile},
    keys::Keys,
};

/// Advice about a LoRA adapter.
pub(crate) const MERGE_ADAPTER: &str =
    "merge it into its base model with the program that made it, and give the merged model";

/// Returns the error about `files` that have no `missing` file.
pub(crate) fn without(files: &Files, missing: &str) -> ModelError {
    let folder = files.folder().to_owned();
    let names = files.names();
    let not_a_model = |what: String, remedy| ModelError::NotAModel {
        path: folder.clone(),
        what,
        remedy,
    };
    let has = |name: &str| names.iter().any(|known| known == name);
    if names.is_empty() {
        return not_a_model(
            "an empty folder".to_owned(),
            "give a folder with `config.json`, weights and a tokenizer, or a GGUF file",
        );
    }
    if [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
    ]
    .iter()
    .any(|name| has(name))
    {
        return not_a_model("a LoRA adapter".to_owned(), MERGE_ADAPTER);
    }
    if has("model_index.json") {
        return not_a_model(
            "a pipeline that makes images".to_owned(),
            "give a decoder that generates text",
        );
    }
    if has("snapshots") && has("refs") {
        return not_a_model(
            "a folder of the hub's cache".to_owned(),
            "give the name `org/name`, or a folder in its `snapshots`",
        );
    }
    let is_archive = |name: &&String| {
        let ends = [".zip", ".tar", ".gz", ".tgz", ".zst", ".7z", ".rar"];
        ends.iter().any(|end| name.ends_with(end))
    };
    if let Some(archive) = names.iter().find(is_archive) {
        return not_a_model(
            format!("a folder with an archive, `{archive}`"),
            "unpack it, and give the folder with the model's files",
        );
    }
    let found = names.iter().find_map(|name| Some((name, format_of(name)?)));
    match found {
        Some((file, format)) => ModelError::OtherFormat {
            folder,
            file: file.clone(),
            format,
        },
        None => ModelError::MissingFile {
            folder,
            file: missing.to_owned(),
        },
    }
}

/// Format of a file of weights that cannot be read, by its name.
fn format_of(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let (stem, extension) = lower.rsplit_once('.').unwrap_or((&lower, ""));
    Some(match extension {
        "pth" => "Meta's own programs",
        "safetensors" if stem.starts_with("consolidated") => "Mistral's own programs",
        "onnx" | "onnx_data" => "ONNX",
        "mlmodel" | "mlpackage" | "mlmodelc" => "Core ML",
        "h5" | "tflite" | "pb" => "TensorFlow",
        "msgpack" => "Flax",
        "ot" => "rust-bert",
        "npz" => "NumPy or MLX",
        "nemo" => "NeMo",
        "llamafile" => "llamafile",
        "engine" | "plan" => "TensorRT",
        "xml" if stem.starts_with("openvino") => "OpenVINO",
        "bin" if stem.starts_with("ggml") => "ggml before GGUF",
        _ => return None,
    })
}

/// Kind of the file that starts with `head`, if it is known and not GGUF.
pub(crate) fn kind_of_file(head: &[u8]) -> Option<&'static str> {
    let starts = |start: &[u8]| head.starts_with(start);
    if head.get(8) == Some(&b'{') {
        return Some("a safetensors file; give the folder that contains it");
    }
    Some(match head {
        _ if starts(b"PK\x03\x04") => {
            "a zip file, as PyTorch writes: give the folder that contains it, or unpack an archive"
        }
        _ if starts(b"\x80\x02") => "a Python pickle; give the folder that contains it",
        _ if starts(b"\x1f\x8b") || starts(b"\x28\xb5\x2f\xfd") || starts(b"7z\xbc\xaf") => {
            "a compressed file; unpack it"
        }
        _ if starts(b"{") => "a JSON file; give the folder that contains it",
        _ if starts(b"\x89HDF") => "a file of TensorFlow or Keras",
        _ if starts(b"\x7fELF") || starts(b"MZ") => "a program",
        _ => return None,
    })
}

/// Decoders are run; these are not.
const GIVE_DECODER: &str = "give a dense decoder that generates text";

/// Checks that a configuration has no mixture of experts, and no quantised weights.
pub(crate) fn check(keys: &Keys<'_>, path: &Path) -> Result<(), ModelError> {
    if let Some(method) = quantisation(keys) {
        return Err(ModelError::QuantisedWeights {
            path: path.to_owned(),
            method,
        });
    }
    for key in [
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
    ] {
        match keys.value(key) {
            Some(experts) if experts.as_u64() != Some(0) => {
                return Err(mixture(path, format!("`{key}` is {experts}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the error about a mixture of experts, which `cause` reveals.
pub(crate) fn mixture(path: &Path, cause: String) -> ModelError {
    ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause,
        kind: "mixture-of-experts models",
        remedy: GIVE_DECODER,
    }
}

/// Method by which the weights are quantised according to a configuration.
fn quantisation(keys: &Keys<'_>) -> Option<String> {
    // The first is that of transformers, the others those of compressed-tensors and MLX.
    let methods = [
        ("quantization_config", "a method without a name"),
        ("compression_config", "compressed-tensors"),
        ("quantization", "MLX"),
    ];
    methods.into_iter().find_map(|(key, method)| {
        let settings = keys.value(key).and_then(Value::as_object)?;
        let is_set = |key: &str| settings.get(key) == Some(&Value::Bool(true));
        match settings.get("quant_method").and_then(Value::as_str) {
            Some(stated) => Some(in_words(stated)),
            None if settings.is_empty() => None,
            None if is_set("load_in_4bit") || is_set("load_in_8bit") => {
                Some("bitsandbytes".to_owned())
            }
            None => Some(method.to_owned()),
        }
    })
}

/// Name of a `quant_method` as its authors write it.
fn in_words(method: &str) -> String {
    let written_large = [
        "aqlm", "awq", "eetq", "exl2", "exl3", "fp8", "gptq", "hqq", "mxfp4", "spqr", "vptq",
    ];
    match method {
        _ if written_large.contains(&method) => method.to_ascii_uppercase(),
        "fbgemm_fp8" | "finegrained_fp8" => "FP8".to_owned(),
        _ => method.escape_debug().take(40).collect(),
    }
}

/// Method by which weights are quantised according to the `names` of the tensors next to them.
pub(crate) fn quantisation_of_tensors(names: &[String], files: &Files) -> Option<&'static str> {
    let is_there = |file: &str| files.read(file).is_ok_and(|bytes| bytes.is_some());
    let any = |end: &str| names.iter().any(|name| name.ends_with(end));
    let methods = [
        (".qweight", "GPTQ or AWQ"),
        (".q_weight", "EXL2"),
        (".trellis", "EXL3"),
        (".weight_packed", "compressed-tensors"),
        (".weight_scale_inv", "FP8"),
        (".weight_scale", "FP8 or INT8"),
        (".SCB", "bitsandbytes"),
        (".weight.absmax", "bitsandbytes"),
        (".W_q", "HQQ"),
        (".weight._data", "quanto"),
        (".weight_scales", "EETQ"),
        (".codebooks", "AQLM"),
        ("_proj_blocks", "MXFP4"),
        (".scales", "a method with scales beside the weights"),
    ];
    let (_, method) = methods.into_iter().find(|(end, _)| any(end))?;
    Some(match method {
        "GPTQ or AWQ" if is_there("quantize_config.json") => "GPTQ",
        "GPTQ or AWQ" if is_there("quant_config.json") => "AWQ",
        method => method,
    })
}

/// Returns the error about the class `name` in `architectures`, if it is known for another kind of models.
pub(crate) fn class(name: &str, path: &Path) -> Option<ModelError> {
    let kind = kind_of_class(name)?;
    Some(ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause: format!("`architectures` is `{name}`"),
        kind,
        remedy: GIVE_DECODER,
    })
}

/// Checks that a GGUF file of the architecture `name` is a dense decoder of text, as far as that is known.
pub(crate) fn check_gguf(file: &GgufFile, name: &str) -> Result<(), ModelError> {
    let path = file.path();
    let not_a_model = |what: &str, remedy| {
        Err(ModelError::NotAModel {
            path: path.to_owned(),
            what: what.to_owned(),
            remedy,
        })
    };
    match file.value("general.type").and_then(gguf::Value::as_text) {
        Some("adapter") => return not_a_model("a LoRA adapter", MERGE_ADAPTER),
        Some("imatrix") => {
            return not_a_model("statistics for quantising (`imatrix`)", GIVE_MODEL);
        }
        Some("mmproj") => return not_a_model(PROJECTOR, GIVE_MODEL),
        _ => {}
    }
    if name == "clip" {
        return not_a_model(PROJECTOR, GIVE_MODEL);
    }
    let key = format!("{name}.expert_count");
    match file.value(&key).and_then(gguf::Value::as_u64) {
        None | Some(0) => {}
        Some(experts) => return Err(mixture(path, format!("`{key}` is {experts}"))),
    }
    Ok(())
}

/// Checks that a GGUF file has tensors; one without them is a tokenizer.
pub(crate) fn check_has_tensors(gguf: &Gguf) -> Result<(), ModelError> {
    match gguf.names().is_empty() {
        true => Err(ModelError::NotAModel {
            path: gguf.path().to_owned(),
            what: "a vocabulary without weights".to_owned(),
            remedy: GIVE_MODEL,
        }),
        false => Ok(()),
    }
}

const PROJECTOR: &str = "the part of a model that encodes images or sound (`mmproj`)";
const GIVE_MODEL: &str = "give the GGUF file of the model that it belongs to";

/// Returns the error about the `general.architecture` called `name`, if it is known for another kind of models.
pub(crate) fn architecture(name: &str, path: &Path) -> Option<ModelError> {
    let starts = |known: &[&str]| known.iter().any(|known| name.starts_with(known));
    let kind = match name {
        _ if name.contains("moe")
            || starts(&[
                "deepseek",
                "dbrx",
                "grok",
                "arctic",
                "gpt-oss",
                "llama4",
                "dots1",
                "smallthinker",
                "qwen3next",
                "minimax",
            ]) =>
        {
            MIXTURES
        }
        _ if name.contains("bert") || starts(&["neo-bert", "gemma-embedding"]) => ENCODERS,
        _ if name.starts_with("t5") => ENCODER_DECODERS,
        _ if starts(&[
            "mamba",
            "rwkv",
            "jamba",
            "nemotron_h",
            "falcon-h1",
            "plamo2",
            "lfm2",
            "granitehybrid",
            "kimi-linear",
        ]) =>
        {
            RECURRENT
        }
        _ if starts(&["llada", "dream", "diffusion"]) => DIFFUSION,
        _ if name.ends_with("vl") || name.contains("vision") => OF_IMAGES,
        "whisper" | "wavtokenizer-dec" => OF_SOUND,
        "flux" | "sd1" | "sd3" | "sdxl" | "wan" | "hunyuan_video" => "models that make images",
        _ => return None,
    };
    Some(ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause: format!("`general.architecture` is `{name}`"),
        kind,
        remedy: GIVE_DECODER,
    })
}

const MIXTURES: &str = "mixture-of-experts models";
const ENCODERS: &str = "encoders and embedding models";
const ENCODER_DECODERS: &str = "models of an encoder and a decoder";
const OF_IMAGES: &str = "models of images and text";
const OF_SOUND: &str = "models of sound";
const RECURRENT: &str = "recurrent and state-space models";
const DIFFUSION: &str = "diffusion models";
const CLASSIFIERS: &str = "classifiers and reward models";

/// Kind of the models of a class of transformers that is no dense decoder of text, by its name.
fn kind_of_class(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let contains = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    let starts = |parts: &[&str]| parts.iter().any(|part| lower.starts_with(part));
    let ends = |parts: &[&str]| parts.iter().any(|part| name.ends_with(part));
    Some(match () {
        () if contains(&[
            "mamba",
            "rwkv",
            "recurrentgemma",
            "jamba",
            "zamba",
            "bamba",
            "falconh1",
            "nemotronh",
            "hybrid",
            "lfm2",
        ]) =>
        {
            RECURRENT
        }
        () if contains(&[
            "moe",
            "mixtral",
            "dbrx",
            "grok",
            "deepseekv",
            "arctic",
            "gptoss",
            "llama4",
            "dots1",
            "smallthinker",
            "qwen3next",
            "minimaxm",
            "kimi",
            "switchtransformers",
        ]) =>
        {
            MIXTURES
        }
        () if contains(&[
            "clip",
            "llava",
            "vision",
            "vl",
            "idefics",
            "paligemma",
            "mllama",
            "fuyu",
            "phi3v",
            "phi4mm",
            "minicpmv",
            "minicpmo",
            "molmo",
            "florence",
            "pixtral",
            "cogvlm",
            "siglip",
            "vit",
        ]) =>
        {
            OF_IMAGES
        }
        () if contains(&["whisper", "wav2vec", "speech", "audio", "musicgen", "bark"]) => OF_SOUND,
        () if contains(&["llada", "dream", "diffusion"]) => DIFFUSION,
        () if starts(&[
            "t5",
            "mt5",
            "umt5",
            "bart",
            "mbart",
            "pegasus",
            "longt5",
            "led",
            "m2m100",
            "marian",
            "blenderbot",
            "prophetnet",
            "encoderdecoder",
        ]) =>
        {
            ENCODER_DECODERS
        }
        () if contains(&["bert", "electra", "deberta", "xlm"])
            || ends(&["ForMaskedLM", "ForPreTraining"]) =>
        {
            ENCODERS
        }
        () if ends(&[
            "Classification",
            "QuestionAnswering",
            "RewardModel",
            "ScoreModel",
        ]) =>
        {
            CLASSIFIERS
        }
        () if ends(&["ForConditionalGeneration"]) => OF_IMAGES,
        () if ends(&["Model"]) && !ends(&["LMHeadModel"]) => {
            "models without an output head, such as embedding models,"
        }
        () => return None,
    })
}
