//! Settings from the files next to `tokenizer.json`: special tokens, chat template, stop ids.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use powerinfer_model::GenerationConfig;
use serde_json::{Map, Value};

use crate::TextError;

/// Special token, as text and id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// Text of the token.
    pub text: String,
    /// Id of the token.
    pub id: u32,
}

/// Reads a file by name; `None` if it does not exist.
pub(crate) type ReadFile<'a> = dyn Fn(&str) -> Result<Option<Cow<'a, [u8]>>, TextError> + 'a;

/// Merged settings of the optional files; absent ones are empty.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    /// `bos_token`, `eos_token`, `pad_token`, …: text of the token and the file that sets it.
    pub(crate) special_tokens: BTreeMap<String, (String, PathBuf)>,
    /// Chat template, if any.
    pub(crate) chat_template: Option<TemplateSource>,
    /// `bos_token_id` of `generation_config.json`.
    pub(crate) bos_id: Option<u32>,
    /// `eos_token_id` of `generation_config.json`: one id or several.
    pub(crate) eos_ids: Vec<u32>,
}

/// Unparsed chat template and its origin, for messages.
#[derive(Debug, Clone)]
pub(crate) struct TemplateSource {
    pub(crate) origin: String,
    pub(crate) source: String,
}

impl Settings {
    /// Reads the optional files; `directory` is for messages.
    pub(crate) fn read(directory: &Path, read: &ReadFile<'_>) -> Result<Self, TextError> {
        let mut settings = Self::default();

        // Later files override: `tokenizer_config.json` is the one that users edit.
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let Some(map) = read_object(directory, name, read)? else {
                continue;
            };
            let path = directory.join(name);
            let template = map
                .get("chat_template")
                .filter(|_| name == "tokenizer_config.json");
            if let Some(template) = template {
                settings.chat_template = template_of(template, &path)?;
            }
            settings.set_special_tokens(&map, &path);
        }
        if let Some(bytes) = read("chat_template.jinja")? {
            let path = directory.join("chat_template.jinja");
            settings.chat_template = Some(TemplateSource {
                source: text_of(&bytes, &path)?.to_owned(),
                origin: path.display().to_string(),
            });
        }
        if let Some(bytes) = read(GenerationConfig::FILE)? {
            let path = directory.join(GenerationConfig::FILE);
            let config = GenerationConfig::parse(&bytes, &path)?;
            settings.bos_id = config.bos_token;
            settings.eos_ids = config.end_of_text.unwrap_or_default();
        }
        Ok(settings)
    }

    fn set_special_tokens(&mut self, map: &Map<String, Value>, path: &Path) {
        for (key, value) in map {
            // Only keys that end in `_token` name a token, as text or as an object with options. An empty text names none.
            let text = value.get("content").unwrap_or(value).as_str();
            if let (true, Some(text)) = (
                key.ends_with("_token"),
                text.filter(|text| !text.is_empty()),
            ) {
                self.special_tokens
                    .insert(key.clone(), (text.to_owned(), path.to_owned()));
            }
        }
    }
}

/// Decodes a file as UTF-8, without a byte order mark.
pub(crate) fn text_of<'a>(bytes: &'a [u8], path: &Path) -> Result<&'a str, TextError> {
    let text = std::str::from_utf8(bytes).map_err(|source| TextError::NotUtf8 {
        path: path.to_owned(),
        source,
    })?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// Reads a JSON object; `None` if the file does not exist.
fn read_object(
    directory: &Path,
    name: &str,
    read: &ReadFile<'_>,
) -> Result<Option<Map<String, Value>>, TextError> {
    let Some(bytes) = read(name)? else {
        return Ok(None);
    };
    let path = directory.join(name);
    let text = text_of(&bytes, &path)?;
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(TextError::NotAnObject { path }),
        Err(source) => Err(TextError::BadJson { path, source }),
    }
}

/// Returns the chat template in `value`. If there are several named ones, `default` is used.
fn template_of(value: &Value, path: &Path) -> Result<Option<TemplateSource>, TextError> {
    let bad = || TextError::BadTemplateEntry {
        path: path.to_owned(),
    };
    let (name, source) = match value {
        Value::Null => return Ok(None),
        Value::String(source) => ("", Some(source.as_str())),
        Value::Object(templates) => ("default", text_in(templates.get("default"), bad)?),
        Value::Array(templates) => {
            let named = |template: &&Value| template["name"] == "default";
            let found = templates.iter().find(named);
            if !templates
                .iter()
                .all(|template| template["name"].is_string())
            {
                return Err(bad());
            }
            (
                "default",
                text_in(found.map(|template| &template["template"]), bad)?,
            )
        }
        _ => return Err(bad()),
    };
    let name = match name {
        "" => String::new(),
        name => format!(" `{name}`"),
    };
    let source = source.filter(|source| !source.is_empty());
    Ok(source.map(|source| TemplateSource {
        origin: format!("{} (chat_template{name})", path.display()),
        source: source.to_owned(),
    }))
}

/// Returns the text of a value that may be absent.
fn text_in(value: Option<&Value>, bad: impl Fn() -> TextError) -> Result<Option<&str>, TextError> {
    value
        .map(|value| value.as_str().ok_or_else(bad))
        .transpose()
}
