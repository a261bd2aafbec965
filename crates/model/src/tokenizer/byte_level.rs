//! Reads `vocab.json` with `merges.txt`: byte-level BPE as in GPT-2.

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use serde_json::{Value as Json, json};

use super::{
    ByteLevelBpe, Splitting, TokenizerFile, byte_level_bpe, post_processor,
    settings::{Settings, parse_object},
};
use crate::ModelError;

/// Converts `vocab.json` and `merges.txt` to a `tokenizer.json`.
pub(super) fn convert<'a>(
    vocabulary: &[u8],
    merges: &[u8],
    settings: &Settings,
    folder: &Path,
) -> Result<TokenizerFile<'a>, ModelError> {
    let bad = |name: &str, reason| ModelError::BadTokenizer {
        path: folder.join(name),
        reason,
    };
    let splitting = match settings.class.as_deref() {
        None => "gpt-2",
        Some(class) => match class.strip_suffix("Fast").unwrap_or(class) {
            "GPT2Tokenizer" | "CodeGenTokenizer" | "PreTrainedTokenizer" => "gpt-2",
            "Qwen2Tokenizer" => "qwen2",
            _ => {
                return Err(bad(
                    "tokenizer_config.json",
                    format!(
                        "how the `{class}` splits texts is unknown without `tokenizer.json`; known are GPT2Tokenizer, CodeGenTokenizer and Qwen2Tokenizer"
                    ),
                ));
            }
        },
    };
    let mut pre_tokenizer = Splitting::named(splitting)
        .expect("the name is in the table")
        .steps;
    if settings.add_prefix_space == Some(true) {
        pre_tokenizer["add_prefix_space"] = true.into();
    }
    let stored = ids(vocabulary).map_err(|reason| bad("vocab.json", reason))?;
    let merges = pairs(merges, &stored).map_err(|reason| bad("merges.txt", reason))?;
    let (ids, added) = settings
        .vocabulary(stored)
        .map_err(|reason| bad("vocab.json", reason))?;
    let around = |name: &Option<String>, wanted: Option<bool>| {
        let (name, id) = ids.get_key_value(name.as_ref()?)?;
        (wanted == Some(true)).then_some((u64::from(*id), &name[..]))
    };
    let json = byte_level_bpe(ByteLevelBpe {
        added_tokens: added.into_values().collect(),
        nfc: splitting == "qwen2",
        pre_tokenizer,
        post_processor: post_processor(
            around(&settings.bos, settings.add_bos),
            around(&settings.eos, settings.add_eos),
        ),
        unknown: settings
            .unknown
            .as_deref()
            .filter(|token| ids.contains_key(*token)),
        ignore_merges: false,
        vocabulary: json!(ids),
        merges,
    });
    Ok(TokenizerFile {
        json: Cow::Owned(json.to_string().into_bytes()),
        name: "vocab.json",
        pieces: None,
        bos: None,
        eos: None,
    })
}

/// Parses `vocab.json`.
fn ids(vocabulary: &[u8]) -> Result<BTreeMap<String, u32>, String> {
    let mut ids = BTreeMap::new();
    let mut tokens: BTreeMap<u32, String> = BTreeMap::new();
    for (token, id) in parse_object(vocabulary)? {
        let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let number = number
            .ok_or_else(|| format!("the id of `{token}` is {id}, which is not a token id"))?;
        if let Some(other) = tokens.insert(number, token.clone()) {
            return Err(format!("`{other}` and `{token}` have the same id {number}"));
        }
        ids.insert(token, number);
    }
    if ids.is_empty() {
        Err("it has no tokens".to_owned())
    } else {
        Ok(ids)
    }
}

/// Parses `merges.txt`: a header, then a pair of tokens per line.
fn pairs(merges: &[u8], ids: &BTreeMap<String, u32>) -> Result<Vec<Json>, String> {
    let text = str::from_utf8(merges).map_err(|error| format!("it is not UTF-8: {error}"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(index, line)| {
        let is_header = *index == 0 && line.starts_with("#version");
        !is_header && !line.trim_end().is_empty()
    });
    let pairs = lines.map(|(index, line)| {
        let number = index + 1;
        let tokens: Vec<&str> = line.split_ascii_whitespace().collect();
        let [left, right] = tokens[..] else {
            return Err(format!("line {number} is not a pair of tokens: {line:?}"));
        };
        let merged = format!("{left}{right}");
        for token in [left, right, &merged] {
            if !ids.contains_key(token) {
                return Err(format!("line {number}: `{token}` is not in `vocab.json`; take both files from the same checkpoint"));
            }
        }
        Ok(json!([left, right]))
    });
    pairs.collect()
}
