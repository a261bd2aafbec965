//! Recognises weights quantised in formats other than GGUF, by keys of the configuration or names of tensors.

use std::path::Path;

use serde_json::Value;

use crate::{Files, ModelError, keys::Keys};

/// Checks that, according to the configuration, the weights are not quantised.
pub(crate) fn check(keys: &Keys<'_>, path: &Path) -> Result<(), ModelError> {
    match stated(keys) {
        None => Ok(()),
        // gpt-oss: reading its experts in MXFP4 is supported.
        Some(method) if method == "MXFP4" && keys.has("swiglu_limit") => Ok(()),
        Some(method) => Err(ModelError::QuantisedWeights {
            path: path.to_owned(),
            method,
        }),
    }
}

/// Returns the quantisation method that the configuration states.
fn stated(keys: &Keys<'_>) -> Option<String> {
    // The first key is that of transformers, the others are those of compressed-tensors and MLX.
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

/// Returns the name of a `quant_method` as its authors write it.
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

/// Returns the quantisation method that the `names` of accompanying tensors reveal.
pub(crate) fn of_tensors(names: &[String], files: &Files) -> Option<&'static str> {
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
        (".scales", "a method with separate scales"),
    ];
    let (_, method) = methods.into_iter().find(|(end, _)| any(end))?;
    Some(match method {
        "GPTQ or AWQ" if is_there("quantize_config.json") => "GPTQ",
        "GPTQ or AWQ" if is_there("quant_config.json") => "AWQ",
        method => method,
    })
}
