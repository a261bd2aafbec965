//! [`GenerationConfig`]: a model's `generation_config.json`.

use std::path::Path;

use powerinfer_artifact::{ArtifactError, json};
use serde_json::{Map, Value};

use crate::{Files, ModelError, keys::truncated};

/// Supported keys of `generation_config.json`; absent keys and nulls are `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Token that starts a text (BOS).
    pub bos_token: Option<u32>,
    /// Tokens that end a text (EOS); empty if the file says that there are none.
    pub end_of_text: Option<Vec<u32>>,
    /// Whether to sample.
    pub samples: Option<bool>,
    /// Temperature, by which the logits are divided.
    pub temperature: Option<f32>,
    /// Number of most probable tokens to sample from; 0 for all.
    pub top_k: Option<usize>,
    /// Total probability of the tokens to sample from.
    pub top_p: Option<f32>,
    /// Minimum probability of a sampled token, relative to the most probable one.
    pub min_p: Option<f32>,
    /// Factor on the logits of recent tokens.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Name of the file.
    pub const FILE: &str = "generation_config.json";

    /// Reads the file among `files`; all keys are absent if it does not exist.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or [`parse`](Self::parse) fails.
    pub fn read(files: &Files) -> Result<Self, ModelError> {
        match files.read(Self::FILE)? {
            Some(bytes) => Self::parse(&bytes, &files.path(Self::FILE)),
            None => Ok(Self::default()),
        }
    }

    /// Parses the file; `path` is used in messages. A whole number may be written as `50.0`, a token id as a list of one, and
    /// −1 means no token or no limit.
    ///
    /// # Errors
    ///
    /// The file is not JSON, or the value of a key has no clear meaning.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ModelError> {
        let value = json::from_slice(bytes).map_err(|source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        })?;
        let bad = |reason| ModelError::BadConfig {
            path: path.to_owned(),
            reason,
        };
        match value {
            Value::Object(map) => Self::new(&map).map_err(bad),
            _ => Err(bad("it is not a JSON object".to_owned())),
        }
    }

    fn new(map: &Map<String, Value>) -> Result<Self, String> {
        let bos = tokens(map, "bos_token_id")?.unwrap_or_default();
        let bos_token = match bos[..] {
            [] => None,
            [token] => Some(token),
            _ => return Err(wrong(map, "bos_token_id", "one token id")),
        };
        Ok(Self {
            bos_token,
            end_of_text: tokens(map, "eos_token_id")?,
            samples: read(map, "do_sample", "true or false", Value::as_bool)?,
            temperature: number(map, "temperature")?,
            top_k: read(map, "top_k", "a whole number", |value| {
                usize::try_from(whole(value)?.max(0)).ok()
            })?,
            top_p: number(map, "top_p")?,
            min_p: number(map, "min_p")?,
            repetition_penalty: number(map, "repetition_penalty")?,
        })
    }
}

/// Reads a key with `convert`, which returns `None` for a value that is not of the `expected` kind.
fn read<T>(
    map: &Map<String, Value>,
    key: &str,
    expected: &str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, String> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match convert(value) {
            Some(value) => Ok(Some(value)),
            None => Err(wrong(map, key, expected)),
        },
    }
}

fn wrong(map: &Map<String, Value>, key: &str, expected: &str) -> String {
    let found = map.get(key).unwrap_or(&Value::Null);
    format!("`{key}` is {}, expected {expected}", truncated(found))
}

fn number(map: &Map<String, Value>, key: &str) -> Result<Option<f32>, String> {
    let finite = |value: &Value| {
        let number = value.as_f64()? as f32;
        number.is_finite().then_some(number)
    };
    read(map, key, "a number", finite)
}

/// Parses a whole number that is at least −1.
fn whole(value: &Value) -> Option<i64> {
    let whole = value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        let is_exact = number.fract() == 0.0 && number.abs() < 2f64.powi(53);
        is_exact.then_some(number as i64)
    });
    whole.filter(|whole| *whole >= -1)
}

/// Parses token ids: one, a list, or −1 for none.
fn tokens(map: &Map<String, Value>, key: &str) -> Result<Option<Vec<u32>>, String> {
    read(map, key, "a token id or a list of them", |value| {
        let values = match value {
            Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        let mut tokens = Vec::new();
        for value in values {
            match whole(value)? {
                -1 => {}
                id => tokens.push(u32::try_from(id).ok()?),
            }
        }
        Some(tokens)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<GenerationConfig, String> {
        let parsed = GenerationConfig::parse(json.as_bytes(), Path::new("g.json"));
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn values_with_a_clear_meaning_are_read() {
        let config = parse(
            "\u{feff}{\"bos_token_id\": [1], \"eos_token_id\": [2.0, -1, 3], \"do_sample\": true, \"temperature\": 1,
              \"top_k\": 50.0, \"top_p\": 1, \"min_p\": null, \"repetition_penalty\": 1.5, \"other\": [{}]}",
        );
        let expected = GenerationConfig {
            bos_token: Some(1),
            end_of_text: Some(vec![2, 3]),
            samples: Some(true),
            temperature: Some(1.0),
            top_k: Some(50),
            top_p: Some(1.0),
            min_p: None,
            repetition_penalty: Some(1.5),
        };
        assert_eq!(config, Ok(expected));
        let nulls = r#"{"bos_token_id": null, "eos_token_id": null, "do_sample": null, "temperature": null, "top_k": null}"#;
        assert_eq!(parse(nulls), Ok(GenerationConfig::default()));
        let none = parse(r#"{"bos_token_id": -1, "eos_token_id": -1, "top_k": -1}"#).unwrap();
        assert_eq!(
            (none.bos_token, none.end_of_text, none.top_k),
            (None, Some(vec![]), Some(0))
        );
        assert_eq!(
            parse(r#"{"eos_token_id": 7}"#).unwrap().end_of_text,
            Some(vec![7])
        );
        assert_eq!(parse(r#"{"bos_token_id": []}"#).unwrap().bos_token, None);
    }

    #[test]
    fn other_values_are_refused_by_key_in_plain_words() {
        for (key, values, expected) in [
            (
                "bos_token_id",
                &["\"<s>\"", "-2", "1.5", "4294967296", "true", "[[1]]"][..],
                "a token id or a list of them",
            ),
            ("bos_token_id", &["[1, 2]"], "one token id"),
            (
                "eos_token_id",
                &["\"2\"", "-7", "[2, null]", "{}", "1e300"],
                "a token id or a list of them",
            ),
            ("do_sample", &["1", "\"true\"", "[]"], "true or false"),
            ("temperature", &["\"1\"", "[1]", "true", "1e39"], "a number"),
            (
                "top_k",
                &["1.5", "\"50\"", "-2", "1e300", "{}"],
                "a whole number",
            ),
            ("top_p", &["\"\"", "false"], "a number"),
            ("min_p", &["{}"], "a number"),
            ("repetition_penalty", &["\"x\""], "a number"),
        ] {
            for value in values {
                let error = parse(&format!("{{\"{key}\": {value}}}")).unwrap_err();
                assert!(
                    error.starts_with(&format!("`g.json`: `{key}` is ")),
                    "{error}"
                );
                assert!(
                    error.ends_with(&format!(", expected {expected}")),
                    "{error}"
                );
            }
        }
        assert_eq!(
            parse("[]").unwrap_err(),
            "`g.json`: it is not a JSON object"
        );
        assert!(parse("{").is_err());
    }
}
