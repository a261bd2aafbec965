//! Which files of a repository make up the model.

use std::collections::{BTreeMap, BTreeSet};

use powerinfer_artifact::{PartName, listed};
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
    /// One file, or all its shards if they are numbered but have no index.
    Files(Vec<FileName>),
    /// The files in this index.
    Sharded(FileName),
    /// A GGUF file, which holds configuration and tokenizer too, or all its parts in order.
    Gguf(Vec<FileName>),
}

/// The files to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SelectedFiles {
    /// Small files.
    pub(crate) companions: Vec<FileName>,
    /// The weights.
    pub(crate) weights: Weights,
}

impl SelectedFiles {
    /// Chooses among the files called `names`: safetensors first, then pickles, then a single GGUF model. If `model` names a
    /// quantization, chooses the single GGUF model with it.
    pub(crate) fn new(model: &ModelName, names: &BTreeSet<String>) -> Result<Self, HubError> {
        let present = |name: &str| {
            let is_there = names.contains(name);
            is_there.then(|| FileName::parse(name)).transpose()
        };
        let companions = COMPANIONS.iter().map(|name| present(name));
        let companions: Vec<Option<FileName>> = companions.collect::<Result<_, _>>()?;
        let companions = companions.into_iter().flatten().collect();
        let formats = match model.quantization() {
            None => &WEIGHTS[..],
            Some(_) => &[],
        };
        for single in formats {
            let index = format!("{single}.index.json");
            let numbered = names.iter().find(|name| {
                let part = PartName::parse(name);
                part.is_some_and(|part| format!("{}.{}", part.stem, part.extension) == *single)
            });
            let weights = match (present(single)?, present(&index)?, numbered) {
                (Some(single), ..) => Weights::Files(vec![single]),
                (None, Some(index), _) => Weights::Sharded(index),
                (None, None, Some(shard)) => {
                    Weights::Files(parts(model, &FileName::parse(shard)?, names)?)
                }
                (None, None, None) => continue,
            };
            return Ok(Self {
                companions,
                weights,
            });
        }
        let mut gguf = gguf_models(names)?;
        let mut all: Vec<String> = gguf.iter().map(ToString::to_string).collect();
        if all.is_empty() {
            all.push("none".to_owned());
        }
        if let Some(quantization) = model.quantization() {
            gguf.retain(|file| names_quantization(file.as_str(), quantization));
        }
        match &gguf[..] {
            [] if model.quantization().is_some() => Err(HubError::NoQuantization {
                model: model.to_string(),
                files: all,
            }),
            [] => Err(HubError::NoWeights {
                model: model.to_string(),
                found: what_there_is(names),
            }),
            [file] => Ok(Self {
                companions: Vec::new(),
                weights: Weights::Gguf(parts(model, file, names)?),
            }),
            files => Err(HubError::SeveralGguf {
                model: model.to_string(),
                files: files.iter().map(ToString::to_string).collect(),
            }),
        }
    }
}

/// Returns the GGUF models among `names`: for a split file, its first existing part. Image encoders are left out if there are
/// other models.
fn gguf_models(names: &BTreeSet<String>) -> Result<Vec<FileName>, HubError> {
    let mut models = BTreeSet::new();
    let gguf = names.iter().filter(|name| name.ends_with(".gguf"));
    let mut gguf: Vec<&String> = gguf
        .filter(|name| {
            let part = PartName::parse(name);
            models.insert(part.map_or((&name[..], 1), |part| (part.stem, part.count)))
        })
        .collect();
    let is_encoder = |name: &&String| {
        let file = name.rsplit('/').next().unwrap_or_default();
        file.starts_with("mmproj")
    };
    if !gguf.iter().all(is_encoder) {
        gguf.retain(|name| !is_encoder(name));
    }
    gguf.into_iter().map(|name| FileName::parse(name)).collect()
}

/// Whether the path `file` contains `quantization` as a whole word, as `model-Q4_K_M.gguf` and `q4_k_m/model.gguf` do.
fn names_quantization(file: &str, quantization: &str) -> bool {
    let (file, quantization) = (file.to_ascii_lowercase(), quantization.to_ascii_lowercase());
    let is_end = |c: Option<char>| c.is_none_or(|c| "-./".contains(c));
    file.match_indices(&quantization).any(|(start, found)| {
        let (before, after) = (&file[..start], &file[start + found.len()..]);
        is_end(before.chars().next_back()) && is_end(after.chars().next())
    })
}

/// Returns the file called `name`, or all parts if it belongs to a split GGUF file.
pub(crate) fn gguf_parts(
    model: &ModelName,
    name: &FileName,
    names: &BTreeSet<String>,
) -> Result<Vec<FileName>, HubError> {
    if name.as_str().ends_with(".gguf") {
        parts(model, name, names)
    } else {
        Ok(vec![name.clone()])
    }
}

/// Returns `name`, or all parts of the split file to which it belongs.
fn parts(
    model: &ModelName,
    name: &FileName,
    names: &BTreeSet<String>,
) -> Result<Vec<FileName>, HubError> {
    let Some(part) = PartName::parse(name.as_str()) else {
        return Ok(vec![name.clone()]);
    };
    let (parts, missing): (Vec<String>, Vec<String>) =
        part.all().partition(|part| names.contains(part));
    if !missing.is_empty() {
        return Err(HubError::MissingParts {
            model: model.to_string(),
            file: name.to_string(),
            missing,
        });
    }
    parts.iter().map(|part| FileName::parse(part)).collect()
}

/// Describes, for an error, what a repository without readable weights has instead.
fn what_there_is(names: &BTreeSet<String>) -> String {
    if names.contains("adapter_config.json") {
        return "it is a LoRA adapter, which must be merged into its base model first".to_owned();
    }
    const FORMATS: [&str; 12] = [
        ".safetensors",
        ".bin",
        ".pth",
        ".pt",
        ".onnx",
        ".h5",
        ".msgpack",
        ".ot",
        ".npz",
        ".nemo",
        ".tflite",
        ".mlmodel",
    ];
    let is_weights = |name: &&String| {
        FORMATS.iter().any(|format| name.ends_with(format)) && FileName::parse(name).is_ok()
    };
    let found: Vec<String> = names.iter().filter(is_weights).cloned().collect();
    if found.is_empty() {
        "it has no file of weights".to_owned()
    } else {
        format!("it has {}", listed(&found))
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
    let parsed: ShardIndex = powerinfer_artifact::json::from_slice(bytes)
        .map_err(|error| bad(format!("is not an index: {error}")))?;
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

    fn select(names: &[&str]) -> Result<SelectedFiles, HubError> {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        SelectedFiles::new(&ModelName::parse("org/name").unwrap(), &names)
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
            Weights::Files(vec![file("model.safetensors")])
        );
        let weights = |names: &[&str]| select(names).unwrap().weights;
        let index = file("model.safetensors.index.json");
        assert_eq!(weights(&all[4..]), Weights::Sharded(index));
        let pickle = file("pytorch_model.bin");
        assert_eq!(weights(&all[6..]), Weights::Files(vec![pickle]));
        let shard = vec![file(all[5])];
        assert_eq!(weights(&all[5..]), Weights::Files(shard));
        let index = file("pytorch_model.bin.index.json");
        assert_eq!(weights(&all[7..]), Weights::Sharded(index));
        let gguf = select(&["README.md", "config.json", "a/model.gguf"]).unwrap();
        assert_eq!(gguf.weights, Weights::Gguf(vec![file("a/model.gguf")]));
        assert_eq!(gguf.companions, [], "a GGUF file is a whole model");
    }

    #[test]
    fn parts_are_fetched_together() {
        let parts = ["q8/m-00001-of-00002.gguf", "q8/m-00002-of-00002.gguf"];
        let both = Weights::Gguf(parts.map(file).to_vec());
        let with = |name| select(&[parts[0], parts[1], name]);
        assert_eq!(with("mmproj-m.gguf").unwrap().weights, both);
        let error = with("m-q4.gguf").unwrap_err().to_string();
        let each = "several GGUF models: m-q4.gguf, q8/m-00001-of-00002.gguf";
        assert!(error.contains(each), "{error}");
        let shards = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let both = Weights::Files(shards.map(file).to_vec());
        assert_eq!(select(&shards).unwrap().weights, both);
        for names in [parts, shards] {
            let error = select(&names[1..]).unwrap_err().to_string();
            assert!(error.contains(&format!("`{}`", names[0])), "{error}");
        }
    }

    #[test]
    fn a_quantization_chooses_a_gguf_file() {
        let names = [
            "model.safetensors",
            "m-Q4_K_M.gguf",
            "m-IQ4_K_M.gguf",
            "m.q8_0.gguf",
            "Q6_K/m-00001-of-00002.gguf",
            "Q6_K/m-00002-of-00002.gguf",
            "mmproj-m-Q8_0.gguf",
        ];
        let select = |quantization: &str| {
            let model = ModelName::parse(&format!("org/name:{quantization}")).unwrap();
            SelectedFiles::new(&model, &names.map(str::to_owned).into())
        };
        for (quantization, files) in [
            ("Q4_K_M", &names[1..2]),
            ("Q8_0", &names[3..4]),
            ("q6_k", &names[4..6]),
        ] {
            let files = files.iter().map(|name| file(name)).collect();
            assert_eq!(select(quantization).unwrap().weights, Weights::Gguf(files));
        }
        for unknown in ["Q4", "Q2_K"] {
            let error = select(unknown).unwrap_err().to_string();
            assert!(
                error.contains("there: Q6_K/m-00001-of-00002.gguf, m-"),
                "{error}"
            );
        }
        let error = select("gguf").unwrap_err();
        assert!(matches!(error, HubError::SeveralGguf { .. }), "{error}");
    }

    #[test]
    fn tokenizers_in_older_files_are_fetched() {
        // Files as in PowerInfer/Bamboo-base-v0_1 and facebook/opt-6.7b.
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
        for (file, found) in [
            ("flax_model.msgpack", "it has `flax_model.msgpack`"),
            ("adapter_config.json", "LoRA adapter"),
            ("README.md", "no file of weights"),
        ] {
            let error = select(&["config.json", file]).unwrap_err();
            assert!(matches!(error, HubError::NoWeights { .. }), "{error}");
            assert!(error.to_string().contains(found), "{error}");
        }
        let error = select(&["a.gguf", "b.gguf"]).unwrap_err().to_string();
        assert!(
            error.contains("several GGUF models: a.gguf, b.gguf"),
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
