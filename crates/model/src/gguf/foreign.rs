//! Recognises GGUF files that are mistaken for a model.

use super::{file::GgufFile, value::Value};
use crate::{ModelError, container::Container, foreign::MERGE_ADAPTER};

const PROJECTOR: &str = "the part of a model that encodes images or sound (`mmproj`)";
const GIVE_MODEL: &str = "give the GGUF file of the model that it belongs to";

/// Checks that a GGUF file of the architecture `name` is a model, not an adapter or a component of a model.
pub(super) fn check(file: &GgufFile, name: &str) -> Result<(), ModelError> {
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
    Ok(())
}

/// Checks that a GGUF file has tensors; one without them is a tokenizer.
pub(super) fn check_has_tensors(gguf: &GgufFile) -> Result<(), ModelError> {
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
