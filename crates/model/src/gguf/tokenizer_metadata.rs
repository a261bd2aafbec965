//! Conversion of `tokenizer.json` and the files next to it to metadata: the inverse of `tokenizer`.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value as Json;

use super::{
    stored_pieces::{self, types},
    tokenizer::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED},
    value::Value,
    writer::Metadata,
};
use crate::{
    Files, ModelConfig, ModelError,
    tokenizer::{self, NAMES, Pieces, SPACE, Splitting},
};

/// Appends the tokenizer of `files` to `metadata`; `config` is the `config.json`, if there is one. Returns notes on
/// differences that remain.
pub(super) fn describe(
    files: &Files,
    model: &ModelConfig,
    config: Option<&Json>,
    metadata: &mut Metadata,
) -> Result<Vec<String>, ModelError> {
    if let Some(gguf) = files.gguf() {
        let entries = gguf.source().entries();
        for (key, value) in entries.filter(|(key, _)| key.starts_with("tokenizer.")) {
            metadata.push(key, value.clone());
        }
        return Ok(Vec::new());
    }
    let path = files.path("tokenizer.json");
    let read = |name: &str| -> Result<Json, ModelError> {
        let bytes = files.read(name)?;
        let json = bytes.and_then(|bytes| powerinfer_artifact::json::from_slice(&bytes).ok());
        Ok(json.unwrap_or(Json::Null))
    };
    let bad = |reason: String| ModelError::TokenizerNotInGguf {
        path: path.clone(),
        reason,
    };
    let read_file = |name: &str| -> Result<_, ModelError> {
        let bytes = files.read(name)?;
        Ok(bytes.map(|bytes| bytes.to_vec().into()))
    };
    let file = tokenizer::read_tokenizer(files.folder(), &read_file)?;
    let file = file.ok_or_else(|| bad("it does not exist".to_owned()))?;
    let path = files.path(file.name);
    let bad = |reason: String| ModelError::TokenizerNotInGguf {
        path: path.clone(),
        reason,
    };
    let json = serde_json::from_slice(&file.json)
        .map_err(|error| bad(format!("it is not JSON: {error}")))?;
    let settings = [
        read("tokenizer_config.json")?,
        read("special_tokens_map.json")?,
    ];
    let tokenizer = Tokenizer {
        json: &json,
        pieces: file.pieces.as_ref(),
        implied: [file.bos, file.eos],
    };
    let (entries, notes) = tokenizer
        .metadata(&settings, config, model.vocabulary_size)
        .map_err(bad)?;
    for (key, value) in entries {
        metadata.push(format!("tokenizer.ggml.{key}"), value);
    }
    let template = match files.read("chat_template.jinja")? {
        Some(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        None => template(&settings[0]["chat_template"]),
    };
    if let Some(template) = template {
        metadata.push("tokenizer.chat_template", template);
    }
    Ok(notes)
}

/// The chat template: the only one, or that called `default`.
fn template(value: &Json) -> Option<String> {
    let text = match value.as_array() {
        Some(named) => {
            let default = named.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str()
        }
        None => value.as_str(),
    };
    text.map(str::to_owned)
}

/// A `tokenizer.json`.
struct Tokenizer<'a> {
    json: &'a Json,
    /// SentencePiece pieces that encode texts, if the tokenizer was made from `tokenizer.model`.
    pieces: Option<&'a Pieces>,
    /// Ids of BOS and EOS if no file names them.
    implied: [Option<u32>; 2],
}

/// Entries of the metadata, and notes.
type Described = (Vec<(&'static str, Value)>, Vec<String>);

impl Tokenizer<'_> {
    fn metadata(
        &self,
        settings: &[Json],
        config: Option<&Json>,
        vocabulary_size: usize,
    ) -> Result<Described, String> {
        let model = &self.json["model"];
        // Older files do not state the type.
        if model["type"].as_str().is_some_and(|kind| kind != "BPE") || model["merges"].is_null() {
            return Err(format!("its model is {} instead of BPE", model["type"]));
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[key].as_str().is_some_and(|affix| !affix.is_empty()) {
                return Err(format!("it has a `{key}`"));
            }
        }
        let (tokens, added) = self.tokens(vocabulary_size)?;
        let merges = self.merges()?;
        let steps = steps(&self.json["pre_tokenizer"]);
        let mut notes = Vec::new();
        let mut entries = match self.pieces {
            Some(pieces) => stored_pieces::describe(pieces, &tokens, &added, &mut notes)?,
            None if steps.iter().any(|step| step["type"] == "ByteLevel") => {
                self.byte_level(&tokens, &added, &merges, &mut notes)?
            }
            None => self.sentence_pieces(&tokens, &added, &merges, &steps, &mut notes)?,
        };
        let ids: HashMap<&str, usize> = tokens.iter().map(|(id, text)| (&text[..], *id)).collect();
        let [bos, eos] = self.around()?;
        for (name, key, first) in [
            ("bos", "bos_token_id", bos),
            ("eos", "eos_token_id", eos),
            ("unk", "unknown_token_id", None),
            ("pad", "padding_token_id", None),
        ] {
            let named = settings.iter().find_map(|settings| {
                let token = &settings[format!("{name}_token")];
                let text = token.as_str().or(token["content"].as_str())?;
                ids.get(text).copied()
            });
            let stated = || config?.get(format!("{name}_token_id"))?.as_u64();
            let stated = || {
                stated()
                    .map(|id| id as usize)
                    .filter(|id| *id < vocabulary_size)
            };
            let implied = || match name {
                "bos" => self.implied[0].map(|id| id as usize),
                "eos" => self.implied[1].map(|id| id as usize),
                _ => None,
            };
            if let Some(id) = first.or(named).or_else(stated).or_else(implied) {
                entries.push((key, id.into()));
            }
        }
        entries.push(("add_bos_token", bos.is_some().into()));
        entries.push(("add_eos_token", eos.is_some().into()));
        Ok((entries, notes))
    }

    /// Tokens by id, and the types of added ones.
    #[expect(clippy::type_complexity, reason = "two maps by id")]
    fn tokens(
        &self,
        vocabulary_size: usize,
    ) -> Result<(BTreeMap<usize, String>, HashMap<usize, u64>), String> {
        let mut tokens = BTreeMap::new();
        let mut added = HashMap::new();
        let vocabulary = self.json["model"]["vocab"].as_object();
        for (text, id) in vocabulary.ok_or("its vocabulary is not an object")? {
            let id = id.as_u64().ok_or("an id is not a number")?;
            tokens.insert(id as usize, text.clone());
        }
        for token in self.json["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) else {
                return Err("an added token has no id or content".to_owned());
            };
            for rule in ["single_word", "lstrip", "rstrip"] {
                if token[rule] == true {
                    return Err(format!("the added token `{text}` has the rule `{rule}`"));
                }
            }
            let kind = match token["special"].as_bool() {
                Some(false) => USER_DEFINED,
                _ => CONTROL,
            };
            tokens.insert(id as usize, text.to_owned());
            added.insert(id as usize, kind);
        }
        if let Some((id, text)) = tokens.range(vocabulary_size..).next() {
            return Err(format!(
                "the token `{text}` has the id {id}, beyond the {vocabulary_size} embeddings"
            ));
        }
        // Embeddings are often padded to a round number.
        for id in 0..vocabulary_size {
            tokens.entry(id).or_insert_with(|| {
                added.insert(id, UNUSED);
                format!("[PAD{id}]")
            });
        }
        Ok((tokens, added))
    }

    /// Merges by descending priority.
    fn merges(&self) -> Result<Vec<[&str; 2]>, String> {
        let merges = self.json["model"]["merges"].as_array();
        let merges = merges.into_iter().flatten().map(|merge| match merge {
            Json::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
            pair => Some([pair[0].as_str()?, pair[1].as_str()?]),
        });
        let merges: Option<Vec<_>> = merges.collect();
        merges.ok_or_else(|| "a merge is not a pair of tokens".to_owned())
    }

    /// Byte-level BPE, whose pre-tokenizer must be one of those with a name.
    fn byte_level(
        &self,
        tokens: &BTreeMap<usize, String>,
        added: &HashMap<usize, u64>,
        merges: &[[&str; 2]],
        notes: &mut Vec<String>,
    ) -> Result<Vec<(&'static str, Value)>, String> {
        let own = steps(&self.json["pre_tokenizer"]);
        let named = NAMES.into_iter().find_map(|name| {
            let splitting = Splitting::named(name).ok()?;
            (steps(&splitting.steps) == own).then_some((name, splitting))
        });
        let (name, splitting) = named.ok_or_else(|| {
            let kinds: Vec<&str> = own
                .iter()
                .filter_map(|step| step["type"].as_str())
                .collect();
            format!(
                "its pre-tokenizer ({}) is not one of {}",
                kinds.join(", "),
                NAMES.join(", ")
            )
        })?;
        let ignores = self.json["model"]["ignore_merges"] == true;
        if ignores != splitting.ignores_merges {
            return Err(format!(
                "`ignore_merges` is {ignores}, which `{name}` does not mean"
            ));
        }
        let normalizer = &self.json["normalizer"];
        match normalizer["type"].as_str() {
            None => {}
            Some("NFC") if splitting.nfc => {}
            Some("NFC") => notes.push(
                "texts are not normalised to NFC, as with files of llama.cpp's converter; few have other characters".to_owned(),
            ),
            Some(other) => return Err(format!("its normalizer `{other}` has no counterpart")),
        }
        if merges.iter().flatten().any(|token| token.contains(' ')) {
            return Err("a merge has a token with a space".to_owned());
        }
        let kinds = tokens.keys().map(|id| *added.get(id).unwrap_or(&NORMAL));
        let merges = merges.iter().map(|[left, right]| format!("{left} {right}"));
        Ok(vec![
            ("model", "gpt2".into()),
            ("pre", name.into()),
            (
                "tokens",
                tokens.values().cloned().collect::<Vec<_>>().into(),
            ),
            ("token_type", types(kinds)),
            ("merges", merges.collect::<Vec<_>>().into()),
        ])
    }

    /// SentencePiece BPE: merges become scores of the pieces that they make.
    fn sentence_pieces(
        &self,
        tokens: &BTreeMap<usize, String>,
        added: &HashMap<usize, u64>,
        merges: &[[&str; 2]],
        steps: &[Json],
        notes: &mut Vec<String>,
    ) -> Result<Vec<(&'static str, Value)>, String> {
        let prefix = self.adds_space_prefix(steps, notes)?;
        let ranks = piece_ranks(tokens, merges)?;
        let model = &self.json["model"];
        let has_bytes = model["byte_fallback"] == true;
        let is_byte =
            |text: &str| text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        if !has_bytes || !tokens.values().any(|text| is_byte(text)) {
            notes.push("the vocabulary has no tokens of bytes: llama.cpp fails on texts with characters outside it".to_owned());
        }
        let kinds = tokens.iter().map(|(id, text)| match added.get(id) {
            _ if model["unk_token"] == text[..] => UNKNOWN,
            Some(kind) => *kind,
            None if has_bytes && is_byte(text) => BYTE,
            None => NORMAL,
        });
        // llama.cpp and the original program merge the neighbours whose piece has the highest score.
        let scores = tokens.values().map(|text| match ranks.get(&text[..]) {
            Some(rank) => 0.0 - *rank as f32,
            None => 0.0 - ranks.len() as f32, // no merge makes it, so none compares it
        });
        Ok(vec![
            ("add_space_prefix", prefix.into()),
            ("model", "llama".into()),
            ("pre", "default".into()),
            (
                "tokens",
                tokens.values().cloned().collect::<Vec<_>>().into(),
            ),
            ("scores", scores.collect::<Vec<_>>().into()),
            ("token_type", types(kinds)),
        ])
    }

    /// Whether a space is put in front of a text; an error if texts are changed in other ways.
    fn adds_space_prefix(&self, steps: &[Json], notes: &mut Vec<String>) -> Result<bool, String> {
        let normalizer = &self.json["normalizer"];
        let normalizers = match normalizer["normalizers"].as_array() {
            Some(all) => all.clone(),
            None if normalizer.is_null() => Vec::new(),
            None => vec![normalizer.clone()],
        };
        let kinds: Vec<&str> = normalizers
            .iter()
            .filter_map(|it| it["type"].as_str())
            .collect();
        let replaces = |it: &Json| it["pattern"]["String"] == " " && it["content"] == SPACE;
        let prepends = |it: &Json| it["prepend"] == SPACE;
        // Spaces are replaced already, so nothing is left to split at.
        let splits_nothing = steps.iter().all(|step| step["pattern"]["String"] == " ");
        match (&kinds[..], steps) {
            (["Prepend", "Replace"], _)
                if prepends(&normalizers[0]) && replaces(&normalizers[1]) && splits_nothing =>
            {
                Ok(true)
            }
            (["Replace"], _) if replaces(&normalizers[0]) && splits_nothing => Ok(false),
            ([], [step]) if step["type"] == "Metaspace" && step["split"] != true => {
                if step["prepend_scheme"] == "never" {
                    return Ok(false);
                }
                notes.push("texts that begin with a space, and texts after a special token, get one more space in front than in the source".to_owned());
                Ok(true)
            }
            _ => Err(format!(
                "its normalizer ({}) or pre-tokenizer is not that of SentencePiece",
                kinds.join(", ")
            )),
        }
    }

    /// Ids of the tokens that the post-processor adds before and after a text.
    fn around(&self) -> Result<[Option<usize>; 2], String> {
        let processor = &self.json["post_processor"];
        let all = processor["processors"].as_array();
        let all = all.map_or(std::slice::from_ref(processor), |all| &all[..]);
        let mut ends = [None, None];
        for processor in all {
            match processor["type"].as_str() {
                None | Some("ByteLevel") => {}
                Some("TemplateProcessing") => {
                    let mut place = 0;
                    for item in processor["single"].as_array().into_iter().flatten() {
                        let Some(name) = item["SpecialToken"]["id"].as_str() else {
                            place = 1;
                            continue;
                        };
                        let ids = &processor["special_tokens"][name]["ids"];
                        match (ids.as_array().map(|ids| &ids[..]), ends[place]) {
                            (Some([id]), None) => ends[place] = id.as_u64().map(|id| id as usize),
                            _ => return Err("it adds more than one token at an end".to_owned()),
                        }
                    }
                }
                Some(other) => {
                    return Err(format!("its post-processor `{other}` has no counterpart"));
                }
            }
        }
        Ok(ends)
    }
}

/// The steps of a pre-tokenizer that matter, in one form.
fn steps(pre_tokenizer: &Json) -> Vec<Json> {
    let all = match pre_tokenizer["pretokenizers"].as_array() {
        Some(all) => all.clone(),
        None if pre_tokenizer.is_null() => Vec::new(),
        None => vec![pre_tokenizer.clone()],
    };
    let mut all: Vec<Json> = all;
    for step in &mut all {
        // Individual digits are what this expression matches.
        if step["type"] == "Digits" && step["individual_digits"] == true {
            *step = serde_json::json!({
                "type": "Split", "pattern": { "Regex": r"\p{N}" }, "behavior": "Isolated", "invert": false,
            });
        }
        if let Some(step) = step.as_object_mut() {
            step.remove("trim_offsets"); // concerns offsets alone
            if step.get("use_regex") == Some(&Json::Bool(true)) {
                step.remove("use_regex"); // the default
            }
            step.sort_keys();
        }
    }
    all
}

/// Ranks of the pieces that merges make. They take the place of the merges if pieces are merged one after the other, and if
/// every split of such a piece into two others is a merge, as where merges come from SentencePiece's scores. Runs of one
/// character, such as spaces, may share a rank: they grow from the left in either case.
fn piece_ranks(
    tokens: &BTreeMap<usize, String>,
    merges: &[[&str; 2]],
) -> Result<HashMap<String, usize>, String> {
    // First and last place of each piece.
    let mut places: HashMap<String, (usize, usize)> = HashMap::new();
    for (place, [left, right]) in merges.iter().enumerate() {
        let entry = places.entry(format!("{left}{right}"));
        entry.or_insert((place, place)).1 = place;
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_by_key(|(_, (first, _))| *first);
    let is_run = |piece: &str| piece.chars().all(|character| piece.starts_with(character));
    let mut ranks: HashMap<String, usize> = HashMap::new();
    let (mut rank, mut end, mut in_runs) = (0, None, false);
    for (piece, (first, last)) in places {
        let is_tied = end.is_some_and(|end| first < end);
        if is_tied && !(in_runs && is_run(&piece)) {
            return Err(format!(
                "the merges into `{piece}` and other pieces have no common order"
            ));
        }
        if !is_tied {
            rank = ranks.len();
            in_runs = is_run(&piece);
        }
        end = end.max(Some(last));
        ranks.insert(piece, rank);
    }
    let merges: HashSet<&[&str; 2]> = merges.iter().collect();
    let pieces: HashSet<&str> = tokens.values().map(String::as_str).collect();
    for piece in tokens.values() {
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            let could = pieces.contains(left) && pieces.contains(right);
            if could && !merges.contains(&[left, right]) {
                return Err(format!("`{left}` and `{right}` are tokens, but no merge"));
            }
        }
    }
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn merges_that_no_scores_give_are_refused() {
        let tokens = |texts: &[&str]| -> BTreeMap<usize, String> {
            texts
                .iter()
                .map(|text| (*text).to_owned())
                .enumerate()
                .collect()
        };
        let all = tokens(&["a", "b", "c", "ab", "bc", "abc"]);
        let merges = [["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]];
        let ranks = piece_ranks(&all, &merges).unwrap();
        assert_eq!((ranks["bc"], ranks["ab"], ranks["abc"]), (0, 1, 2));
        let split = [["a", "bc"], ["b", "c"], ["a", "b"], ["ab", "c"]];
        assert!(
            piece_ranks(&all, &split)
                .unwrap_err()
                .contains("no common order")
        );
        let missing = piece_ranks(&all, &merges[..3]).unwrap_err();
        assert!(missing.contains("`ab` and `c`"), "{missing}");
        let runs = tokens(&["a", "aa", "aaa", "aaaa"]);
        let merges = [
            ["aaa", "a"],
            ["aa", "aa"],
            ["aa", "a"],
            ["a", "aaa"],
            ["a", "aa"],
            ["a", "a"],
        ];
        let ranks = piece_ranks(&runs, &merges).unwrap();
        assert_eq!((ranks["aaaa"], ranks["aaa"], ranks["aa"]), (0, 0, 2));
    }

    #[test]
    fn pre_tokenizers_are_recognised_in_every_form() {
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let bytes =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false });
        let smollm = json!({ "type": "Sequence", "pretokenizers": [digits, bytes] });
        assert_eq!(
            steps(&smollm),
            steps(&Splitting::named("smollm").unwrap().steps)
        );
        let named = |name: &str| steps(&Splitting::named(name).unwrap().steps);
        for name in NAMES {
            let same = NAMES.iter().filter(|other| named(name) == named(other));
            assert_eq!(same.count(), 1, "{name}");
        }
    }
}
