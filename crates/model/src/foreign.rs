//! Recognises files and folders that are mistaken for a model: adapters, weights in other formats, and files that
//! accompany a model.

use crate::{Files, ModelError};

/// Advice about a LoRA adapter.
pub(crate) const MERGE_ADAPTER: &str =
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
