//! Recognises files and folders that are mistaken for a model: adapters, weights in other formats, and files that
//! accompany a model.

use crate::{
    Files, ModelError,
    container::Container,
    gguf::{Gguf, GgufFile, Value},
    kinds::mixture,
};

/// Advice about a LoRA adapter.
const MERGE_ADAPTER: &str =
    "merge it into its base model with the program that made it, and give the merged model";

/// Returns the error for `files` that lack the file called `missing`.
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
            "an image generation pipeline".to_owned(),
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

/// Recognises by its name the format of a weight file that cannot be read.
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

/// Recognises the kind of the file that starts with `head`, unless it is GGUF or unknown.
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

/// Checks that a GGUF file of the architecture `name` is a dense model, not an adapter or a component of a model.
pub(crate) fn check_gguf(file: &GgufFile, name: &str) -> Result<(), ModelError> {
    let path = file.path();
    let not_a_model = |what: &str, remedy| {
        Err(ModelError::NotAModel {
            path: path.to_owned(),
            what: what.to_owned(),
            remedy,
        })
    };
    match file.value("general.type").and_then(Value::as_text) {
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
    match file.value(&key).and_then(Value::as_u64) {
        None | Some(0) => {}
        Some(experts) => return Err(mixture(path, format!("`{key}` is {experts}"))),
    }
    Ok(())
}

/// Checks that a GGUF file has tensors; one without them is a tokenizer.
pub(crate) fn check_has_tensors(gguf: &Gguf) -> Result<(), ModelError> {
    if gguf.names().is_empty() {
        Err(ModelError::NotAModel {
            path: gguf.path().to_owned(),
            what: "a vocabulary without weights".to_owned(),
            remedy: GIVE_MODEL,
        })
    } else {
        Ok(())
    }
}

const PROJECTOR: &str = "the part of a model that encodes images or sound (`mmproj`)";
const GIVE_MODEL: &str = "give the GGUF file of the model that it belongs to";
