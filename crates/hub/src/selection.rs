//! Which files of a repository make up the model.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::{HubError, ModelName, file_name::FileName};

/// Files that are read in addition to the weights, if the repository has them.
const COMPANIONS: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Files of weights, the preferred one first; `<file>.index.json` lists shards.
const WEIGHTS: [&str; 2] = ["model.safetensors", "pytorch_model.bin"];

/// Where the weights of a repository are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Weights {
    /// One file.
    Single(FileName),
    /// The files in this index.
    Sharded(FileName),
    /// A GGUF file, which holds configuration and tokenizer too.
    Gguf(FileName),
}

/// The files to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Small files.
    pub(crate) companions: Vec<FileName>,
    /// The weights.
    pub(crate) weights: Weights,
}

impl Selection {
    /// Chooses among the files called `names`: safetensors before pickles before a single GGUF file.
    pub(crate) fn of(model: &ModelName, names: &BTreeSet<String>) -> Result<Self, HubError> {
        let present = |name: &str| {
            let is_there = names.contains(name);
            is_there.then(|| FileName::parse(name)).transpose()
        };
        let companions = COMPANIONS.iter().map(|name| present(name));
        let companions: Vec<Option<FileName>> = companions.collect::<Result<_, _>>()?;
        let companions = companions.into_iter().flatten().collect();
        for single in WEIGHTS {
            let index = format!("{single}.index.json");
            let weights = match (present(single)?, present(&index)?) {
                (Some(single), _) => Weights::Single(single),
                (None, Some(index)) => Weights::Sharded(index),
                (None, None) => continue,
            };
            return Ok(Self {
                companions,
                weights,
            });
        }
        let gguf = names.iter().filter(|name| name.ends_with(".gguf"));
        let gguf: Vec<FileName> = gguf
            .map(|name| FileName::parse(name))
            .collect::<Result<_, _>>()?;
        match &gguf[..] {
            [] => Err(HubError::NoWeights {
                model: model.to_string(),
            }),
            [file] => Ok(Self {
                companions: Vec::new(),
                weights: Weights::Gguf(file.clone()),
            }),
            files => Err(HubError::SeveralGguf {
                model: model.to_string(),
                files: files.iter().map(ToString::to_string).collect(),
            }),
        }
    }
}

/// `<weights>.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Names of the shards in an index file with the content `bytes`, sorted.
pub(crate) fn shards(
    model: &ModelName,
    index: &FileName,
    bytes: &[u8],
) -> Result<Vec<FileName>, HubError> {
    let bad = |reason: String| HubError::BadIndex {
        model: model.to_string(),
        index: index.to_string(),
        reason,
    };
    let parsed: ShardIndex =
        serde_json::from_slice(bytes).map_err(|error| bad(format!("is no index: {error}")))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if names.is_empty() {
        return Err(bad("lists no shards".to_owned()));
    }
    let mut shards = Vec::new();
    for name in names {
        let shard = FileName::parse(&name)?;
        if shard.components().count() > 1 {
            return Err(HubError::HostileName { file: name });
        }
        shards.push(shard);
    }
    Ok(shards)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(names: &[&str]) -> Result<Selection, HubError> {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Selection::of(&ModelName::parse("org/name").unwrap(), &names)
    }

    fn file(name: &str) -> FileName {
        FileName::parse(name).unwrap()
    }

    #[test]
    fn weights_are_fetched_in_one_format_only() {
        let all = [
            "README.md",
            "config.json",
            "merges.txt",
            "model.safetensors",
            "model.safetensors.index.json",
            "model-00001-of-00001.safetensors",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "model.gguf",
            "../evil.gguf",
        ];
        let selection = select(&all).unwrap();
        assert_eq!(
            selection.companions,
            [file("config.json"), file("merges.txt")]
        );
        assert_eq!(
            selection.weights,
            Weights::Single(file("model.safetensors"))
        );
        let weights = |names: &[&str]| select(names).unwrap().weights;
        let index = file("model.safetensors.index.json");
        assert_eq!(weights(&all[4..]), Weights::Sharded(index));
        let pickle = file("pytorch_model.bin");
        assert_eq!(weights(&all[5..]), Weights::Single(pickle));
        let index = file("pytorch_model.bin.index.json");
        assert_eq!(weights(&all[7..]), Weights::Sharded(index));
        let gguf = select(&["README.md", "config.json", "a/model.gguf"]).unwrap();
        assert_eq!(gguf.weights, Weights::Gguf(file("a/model.gguf")));
        assert_eq!(gguf.companions, [], "a GGUF file is a whole model");
    }

    #[test]
    fn tokenizers_in_older_files_are_fetched() {
        // As PowerInfer/Bamboo-base-v0_1 and facebook/opt-6.7b have them.
        let bamboo = [
            "config.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "special_tokens_map.json",
            "added_tokens.json",
        ];
        let opt = [
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "vocab.json",
            "merges.txt",
        ];
        for names in [&bamboo[..], &opt] {
            let all = [names, &["pytorch_model.bin", "README.md"]].concat();
            let mut expected: Vec<FileName> = names.iter().map(|name| file(name)).collect();
            let mut companions = select(&all).unwrap().companions;
            companions.sort_by_key(ToString::to_string);
            expected.sort_by_key(ToString::to_string);
            assert_eq!(companions, expected);
        }
    }

    #[test]
    fn nothing_ambiguous_or_hostile_is_fetched() {
        let error = select(&["config.json", "flax_model.msgpack"]).unwrap_err();
        assert!(matches!(error, HubError::NoWeights { .. }), "{error}");
        let error = select(&["a.gguf", "b.gguf"]).unwrap_err().to_string();
        assert!(
            error.contains("several GGUF files: a.gguf, b.gguf"),
            "{error}"
        );
        let error = select(&["a.gguf", "../b.gguf"]).unwrap_err();
        assert!(matches!(error, HubError::HostileName { .. }), "{error}");
    }

    #[test]
    fn an_index_names_files_in_its_own_folder() {
        let read = |text: &str| {
            let model = ModelName::parse("org/name").unwrap();
            shards(
                &model,
                &file("model.safetensors.index.json"),
                text.as_bytes(),
            )
        };
        let index = r#"{"metadata": {}, "weight_map": {"a": "2", "b": "1", "c": "2"}}"#;
        assert_eq!(read(index).unwrap(), [file("1"), file("2")]);
        for hostile in ["../x", "/etc/x", "a/b", "a\\\\b", ""] {
            let index = format!(r#"{{"weight_map": {{"a": "{hostile}"}}}}"#);
            let error = read(&index).unwrap_err();
            assert!(matches!(error, HubError::HostileName { .. }), "{error}");
        }
        for bad in ["", "[]", "{}", r#"{"weight_map": {}}"#] {
            let error = read(bad).unwrap_err();
            assert!(matches!(error, HubError::BadIndex { .. }), "{error}");
        }
    }
}
