//! Settings from the files next to `tokenizer.json`: special tokens, chat template, stop ids.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

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
        if let Some(map) = read_json::<TokenMap>(directory, "special_tokens_map.json", read)? {
            settings.set_special_tokens(map, &directory.join("special_tokens_map.json"));
        }
        if let Some(config) =
            read_json::<TokenizerConfig>(directory, "tokenizer_config.json", read)?
        {
            let path = directory.join("tokenizer_config.json");
            settings.chat_template = config
                .chat_template
                .and_then(|template| template.into_default(&path));
            settings.set_special_tokens(config.tokens, &path);
        }
        if let Some(bytes) = read("chat_template.jinja")? {
            let path = directory.join("chat_template.jinja");
            settings.chat_template = Some(TemplateSource {
                source: text_of(&bytes, &path)?.to_owned(),
                origin: path.display().to_string(),
            });
        }
        if let Some(config) =
            read_json::<GenerationConfig>(directory, "generation_config.json", read)?
        {
            settings.bos_id = config.bos_token_id;
            settings.eos_ids = config.eos_token_id.map(Ids::into_vec).unwrap_or_default();
        }
        Ok(settings)
    }

    fn set_special_tokens(&mut self, tokens: TokenMap, path: &Path) {
        for (key, entry) in tokens {
            // Only keys that end in `_token` name a token.
            if let (true, Some(text)) = (key.ends_with("_token"), entry.into_text()) {
                self.special_tokens.insert(key, (text, path.to_owned()));
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

fn read_json<T: DeserializeOwned>(
    directory: &Path,
    name: &str,
    read: &ReadFile<'_>,
) -> Result<Option<T>, TextError> {
    let Some(bytes) = read(name)? else {
        return Ok(None);
    };
    let path = directory.join(name);
    let text = text_of(&bytes, &path)?;
    serde_json::from_str(text)
        .map(Some)
        .map_err(|source| TextError::BadJson { path, source })
}

type TokenMap = BTreeMap<String, TokenEntry>;

/// A token is a string, or an object with matching options; other values are not tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenEntry {
    Text(String),
    Added { content: String },
    Other(serde::de::IgnoredAny),
}

impl TokenEntry {
    fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) | Self::Added { content: text } => Some(text),
            Self::Other(_) => None,
        }
    }
}

#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<TemplateEntry>,
    #[serde(flatten)]
    tokens: TokenMap,
}

/// One template, or several by name; `default` is used for plain conversations.
#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateEntry {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TemplateEntry {
    fn into_default(self, path: &Path) -> Option<TemplateSource> {
        let path = path.display();
        match self {
            Self::One(source) => Some(TemplateSource {
                origin: format!("{path} (chat_template)"),
                source,
            }),
            Self::Named(templates) => templates
                .into_iter()
                .find(|template| template.name == "default")
                .map(|template| TemplateSource {
                    origin: format!("{path} (chat_template `default`)"),
                    source: template.template,
                }),
        }
    }
}

#[derive(Deserialize)]
struct GenerationConfig {
    #[serde(default)]
    bos_token_id: Option<u32>,
    #[serde(default)]
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}
