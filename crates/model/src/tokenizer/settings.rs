//! Added tokens and flags from the files next to the vocabulary.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Map, Value as Json};

use super::{ReadFile, added_token};
use crate::ModelError;

/// Flags and added tokens from the files next to the vocabulary.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Value of `tokenizer_class`.
    pub(super) class: Option<String>,
    pub(super) legacy: Option<bool>,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    pub(super) bos: Option<String>,
    pub(super) eos: Option<String>,
    pub(super) unknown: Option<String>,
    added: Vec<AddedToken>,
}

/// Token that is matched before the text is split; its rules have the form that `tokenizer.json` uses.
#[derive(Debug, Default)]
struct AddedToken {
    /// Id; `None` if the vocabulary gives it.
    id: Option<u32>,
    content: String,
    special: bool,
    rules: Map<String, Json>,
}

/// Ids by text, and by id the added tokens as in `tokenizer.json`.
type Vocabulary = (BTreeMap<String, u32>, BTreeMap<u32, Json>);

impl Settings {
    /// Reads `added_tokens.json`, `special_tokens_map.json` and `tokenizer_config.json`, whichever exist.
    pub(super) fn read<E: From<ModelError>>(
        folder: &Path,
        read: &ReadFile<'_, '_, E>,
    ) -> Result<Self, E> {
        let object = |name: &str| -> Result<Map<String, Json>, E> {
            let Some(bytes) = read(name)? else {
                return Ok(Map::new());
            };
            parse_object(&bytes).map_err(|reason| {
                let path = folder.join(name);
                E::from(ModelError::BadTokenizer { path, reason })
            })
        };
        let mut settings = Self::default();
        for (content, id) in object("added_tokens.json")? {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| ModelError::BadTokenizer {
                path: folder.join("added_tokens.json"),
                reason: format!("the id of `{content}` is not a token id"),
            })?;
            settings.add(AddedToken {
                id: Some(id),
                content,
                ..AddedToken::default()
            });
        }
        let map = object("special_tokens_map.json")?;
        let config = object("tokenizer_config.json")?;
        settings
            .read_config(&config)
            .map_err(|reason| ModelError::BadTokenizer {
                path: folder.join("tokenizer_config.json"),
                reason,
            })?;
        for file in [&map, &config] {
            settings.read_special_tokens(file);
        }
        Ok(settings)
    }

    fn read_config(&mut self, config: &Map<String, Json>) -> Result<(), String> {
        let flag = |key: &str| match config.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(format!("`{key}` is {other} instead of true or false")),
        };
        self.class = config
            .get("tokenizer_class")
            .and_then(Json::as_str)
            .map(str::to_owned);
        self.legacy = flag("legacy")?;
        self.add_bos = flag("add_bos_token")?;
        self.add_eos = flag("add_eos_token")?;
        self.add_prefix_space = flag("add_prefix_space")?;
        for (key, token) in config
            .get("added_tokens_decoder")
            .and_then(Json::as_object)
            .into_iter()
            .flatten()
        {
            let id = key.parse().map_err(|_| {
                format!("`added_tokens_decoder` has the key `{key}`, which is not a token id")
            })?;
            let content = token["content"].as_str();
            let content =
                content.ok_or_else(|| format!("the added token {id} has no `content`"))?;
            self.add(AddedToken {
                id: Some(id),
                content: content.to_owned(),
                special: token["special"] == true,
                rules: rules(token),
            });
        }
        Ok(())
    }

    /// Reads the tokens under keys that end in `_token`, and lists of additional ones.
    fn read_special_tokens(&mut self, file: &Map<String, Json>) {
        for (key, value) in file {
            if !key.ends_with("_token") && key != "additional_special_tokens" {
                continue;
            }
            let tokens = value
                .as_array()
                .map_or(std::slice::from_ref(value), Vec::as_slice);
            for token in tokens {
                let content = token.as_str().or(token["content"].as_str());
                let Some(content) = content.filter(|content| !content.is_empty()) else {
                    continue;
                };
                match &key[..] {
                    "bos_token" => self.bos = Some(content.to_owned()),
                    "eos_token" => self.eos = Some(content.to_owned()),
                    "unk_token" => self.unknown = Some(content.to_owned()),
                    _ => {}
                }
                self.add(AddedToken {
                    id: None,
                    content: content.to_owned(),
                    special: true,
                    rules: rules(token),
                });
            }
        }
    }

    /// Adds a token, or merges it into a known token with the same text.
    fn add(&mut self, token: AddedToken) {
        match self
            .added
            .iter_mut()
            .find(|added| added.content == token.content)
        {
            Some(added) => {
                added.id = token.id.or(added.id);
                added.special |= token.special;
                added.rules.extend(token.rules);
            }
            None => self.added.push(token),
        }
    }

    /// Adds the tokens to a vocabulary; those without an id are left out.
    ///
    /// # Errors
    ///
    /// A token has two ids.
    pub(super) fn vocabulary(&self, mut ids: BTreeMap<String, u32>) -> Result<Vocabulary, String> {
        let mut added = BTreeMap::new();
        for token in &self.added {
            let AddedToken {
                id,
                content,
                special,
                rules,
            } = token;
            let id = match (*id, ids.get(content).copied()) {
                (Some(id), Some(other)) if id != other => {
                    return Err(format!(
                        "`{content}` has the id {other}, but {id} in the files of added tokens; take all files from the same checkpoint"
                    ));
                }
                (Some(id), _) | (None, Some(id)) => id,
                (None, None) => continue,
            };
            let mut json = added_token(id, content, *special);
            json.as_object_mut()
                .expect("a token is an object")
                .extend(rules.clone());
            if let Some(other) = added.insert(id, json) {
                let other = &other["content"];
                return Err(format!(
                    "the added tokens `{content}` and {other} have the same id {id}"
                ));
            }
            ids.insert(content.clone(), id);
        }
        // An added token takes the place of a piece.
        ids.retain(|text, id| {
            added
                .get(id)
                .is_none_or(|token| token["content"] == text[..])
        });
        Ok((ids, added))
    }
}

/// Parses an object, with or without a byte order mark in front.
pub(super) fn parse_object(bytes: &[u8]) -> Result<Map<String, Json>, String> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    serde_json::from_slice(bytes).map_err(|error| format!("it is not a JSON object: {error}"))
}

/// Returns the rules that an added token sets.
fn rules(token: &Json) -> Map<String, Json> {
    let rules = ["single_word", "lstrip", "rstrip"].into_iter();
    let set = rules.filter(|rule| token[rule] == true);
    set.map(|rule| (rule.to_owned(), Json::Bool(true)))
        .collect()
}
