//! Keys of a `config.json`, read such that unknown ones are detected.
//!
//! A key that no family reads may change what the model computes; ignoring it would give wrong results
//! silently. So every key is either read, known to be harmless, neutral in value, or an error. There is one exception: if
//! users run the model with a class of transformers, keys that this class does not read are ignored.

use std::{cell::RefCell, collections::BTreeSet, path::Path};

use serde_json::{Map, Value};

use crate::ModelError;

/// Keys that do not affect the forward pass: provenance, training, and generation settings of older files.
const HARMLESS: &[&str] = &[
    "architectures",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "custom_pipelines",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "init_device",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "layerdrop",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_type",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_logits_to_keep",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
];

/// Elements of a head, at most: tables of rotary angles are made before there are weights to compare shapes with.
pub(crate) const MAX_HEAD_SIZE: usize = 1 << 16;

/// Largest accepted size. Products of larger ones could overflow; layers and tokens have lower limits since
/// they are iterated over.
fn largest(key: &str) -> u64 {
    if key.contains("layer") {
        1 << 14
    } else if key == "vocab_size" {
        1 << 24
    } else if key == "head_dim" {
        MAX_HEAD_SIZE as u64
    } else {
        1 << 30
    }
}

/// Returns whether a key is harmless in every family.
fn is_harmless(key: &str) -> bool {
    HARMLESS.contains(&key)
        || key.starts_with('_')
        || key.ends_with("_token_id")
        || key.ends_with("dropout")
        || key.ends_with("_pdrop")
        || key.ends_with("drop_prob")
        || key.starts_with("powerinfer")
        || key.starts_with("unsloth")
}

/// Returns whether a value means the same as an absent key.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::Bool(true) => false,
    }
}

/// JSON object of a configuration, and the keys read so far.
#[derive(Debug)]
pub(crate) struct Keys<'a> {
    pub(crate) path: &'a Path,
    map: &'a Map<String, Value>,
    used: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self {
            path,
            map,
            used: RefCell::default(),
        }
    }

    /// Returns the nested object under `key`, whose keys are tracked separately.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys::new(self.path, map))),
            Some(other) => Err(self.wrong_type(key, other, "an object")),
        }
    }

    /// Returns the value of `key`; null counts as absent.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.used.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Ignores all keys that begin with `prefix`.
    pub(crate) fn ignore_prefix(&self, prefix: &str) {
        let ignored = self.map.keys().filter(|key| key.starts_with(prefix));
        self.used.borrow_mut().extend(ignored.cloned());
    }

    /// Returns whether the key exists, even as null, which means "none" where an absent key means the default.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns the size under `key`: an integer from 1 to the largest accepted.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(0) => Err(self.bad(format!("`{key}` is 0"))),
            Some(size) if size > largest(key) => {
                Err(self.bad(format!("`{key}` is {size}, which is larger than supported")))
            }
            Some(size) => Ok(Some(size as usize)),
            None => Err(self.wrong_type(key, value, "an integer")),
        }
    }

    /// Returns the size under the first of `names` that exists, else `default`.
    pub(crate) fn size_or(&self, names: &[&str], default: usize) -> Result<usize, ModelError> {
        for name in names {
            if let Some(size) = self.size(name)? {
                return Ok(size);
            }
        }
        Ok(default)
    }

    /// Returns the Boolean under `key`, else `default`.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong_type(key, other, "true or false")),
        }
    }

    /// Returns the finite number under `key`.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong_type(key, value, "a number")),
            },
        }
    }

    /// Returns the array under `key`.
    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.wrong_type(key, other, "a list")),
        }
    }

    /// Returns the numbers under `key`; an absent key is an empty list.
    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f64>, ModelError> {
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .and_then(|items| items.iter().map(Value::as_f64).collect())
                .ok_or_else(|| self.wrong_type(key, value, "a list of numbers")),
        }
    }

    /// Returns the number under `key`, which must be positive and an `f32`.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.number(key)? {
            Some(number) if number <= 0.0 => {
                Err(self.bad(format!("`{key}` is {number}, it must be greater than 0")))
            }
            Some(number) if !(number as f32).is_normal() => Err(self.bad(format!(
                "`{key}` is {number:e}, beyond the numbers of 32 bits"
            ))),
            number => Ok(number),
        }
    }

    /// Returns the string under `key`.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, other, "a string")),
        }
    }

    /// Returns the token ids under `key`: one, or a list.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| self.wrong_type(key, value, "a token id, or a list of them"))
        };
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }

    /// Checks that every key was read, is harmless or has a neutral value.
    pub(crate) fn finish(&self) -> Result<(), ModelError> {
        self.finish_as(None).map(drop)
    }

    /// Like [`finish`](Self::finish), but ignores keys that are not among `read`, the keys that the model's class in
    /// transformers reads. Returns the ignored keys.
    pub(crate) fn finish_as(&self, read: Option<&[&str]>) -> Result<Vec<String>, ModelError> {
        let used = self.used.borrow();
        let mut ignored = Vec::new();
        for (key, value) in self.map {
            if used.contains(key) || is_harmless(key) || is_neutral(value) {
                continue;
            }
            match read {
                Some(read) if !read.contains(&&key[..]) => ignored.push(key.clone()),
                _ => {
                    return Err(ModelError::UnknownKey {
                        path: self.path.to_owned(),
                        key: key.clone(),
                        value: truncated(value),
                    });
                }
            }
        }
        Ok(ignored)
    }

    /// Creates the error of a configuration that contradicts itself.
    pub(crate) fn bad(&self, reason: String) -> ModelError {
        ModelError::BadConfig {
            path: self.path.to_owned(),
            reason,
        }
    }

    /// Creates the error of an unsupported value.
    pub(crate) fn unsupported(&self, key: &str, value: &str, supported: &str) -> ModelError {
        ModelError::Unsupported {
            path: self.path.to_owned(),
            key: format!("`{key}`"),
            value: format!("`{value}`"),
            supported: format!("supported: {supported}"),
        }
    }

    fn wrong_type(&self, key: &str, value: &Value, expected: &str) -> ModelError {
        self.bad(format!(
            "`{key}` is {}, expected {expected}",
            truncated(value)
        ))
    }
}

/// Formats a value for a message, truncated to 60 characters.
pub(crate) fn truncated(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn unread_keys_are_errors_unless_harmless_or_neutral() {
        let path = Path::new("config.json");
        let harmless = map(
            r#"{"model_type":"x","resid_pdrop":0.1,"bos_token_id":4,"scale":null,"softcap":0.0,"experts":false,"_x":3}"#,
        );
        Keys::new(path, &harmless).finish().unwrap();
        let matters = map(r#"{"attn_logit_softcapping":50.0}"#);
        let keys = Keys::new(path, &matters);
        let message = keys.finish().unwrap_err().to_string();
        assert!(message.contains("attn_logit_softcapping"), "{message}");
        keys.number("attn_logit_softcapping").unwrap();
        keys.finish().unwrap();
    }

    #[test]
    fn keys_that_the_class_does_not_read_are_ignored_and_named() {
        let map = map(r#"{"leftover":1,"softcap":2,"hidden_dropout":0.1}"#);
        let keys = Keys::new(Path::new("config.json"), &map);
        let message = keys.finish_as(Some(&["softcap"])).unwrap_err().to_string();
        assert!(message.contains("`softcap` (2)"), "{message}");
        keys.number("softcap").unwrap();
        assert_eq!(keys.finish_as(Some(&["softcap"])).unwrap(), ["leftover"]);
        assert!(keys.finish_as(None).is_err());
    }

    #[test]
    fn values_of_the_wrong_type_are_reported_by_key() {
        let map = map(r#"{"a":"x","b":0,"c":99999999999,"d":-1,"e":1.5,"f":[1,"x"],"g":-2.0}"#);
        let keys = Keys::new(Path::new("config.json"), &map);
        for key in ["a", "b", "c", "d", "e"] {
            let message = keys.size(key).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")), "{message}");
        }
        assert!(keys.flag("a", true).is_err() && keys.number("a").is_err());
        assert!(keys.text("b").is_err() && keys.object("a").is_err());
        assert!(keys.token_ids("f").is_err() && keys.positive("g").is_err());
        assert_eq!(keys.token_ids("none").unwrap(), Vec::<u32>::new());
    }
}
