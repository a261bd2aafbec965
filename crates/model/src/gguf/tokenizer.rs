//! Conversion of a GGUF file's tokenizer to `tokenizer.json` and `tokenizer_config.json`.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use crate::{
    ModelError,
    gguf::{
        file::{GgufFile, bad},
        value::Value,
    },
    tokenizer::{
        ByteLevelBpe, SPACE, Splitting, added_token, byte_level_bpe, post_processor,
        sentence_piece_decoder,
    },
};

/// `tokenizer.ggml.model` of a file without tokenizer.
pub(super) const NONE: &str = "no_vocab";
/// Token types of ggml.
pub(super) const NORMAL: u64 = 1;
pub(super) const UNKNOWN: u64 = 2;
pub(super) const CONTROL: u64 = 3;
pub(super) const USER_DEFINED: u64 = 4;
pub(super) const UNUSED: u64 = 5;
pub(super) const BYTE: u64 = 6;

/// Vocabulary from the metadata.
struct Vocabulary<'a> {
    file: &'a GgufFile,
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
}

/// Converts the tokenizer; `None` if the file has none.
pub(super) fn tokenizer(file: &GgufFile) -> Result<Option<(Json, Json)>, ModelError> {
    let Some(model) = text(file, "model").filter(|model| *model != NONE) else {
        return Ok(None);
    };
    let vocabulary = Vocabulary::read(file)?;
    let tokenizer = match model {
        "llama" => vocabulary.sentence_pieces()?,
        "gpt2" => vocabulary.byte_level()?,
        other => {
            return Err(ModelError::Unsupported {
                path: file.path().to_owned(),
                key: "`tokenizer.ggml.model`".to_owned(),
                value: format!("`{other}`"),
                supported: "supported: llama, gpt2".to_owned(),
            });
        }
    };
    let special = |key: &str| vocabulary.special(key).map(|(_, token)| token);
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos_token_id"),
        "eos_token": special("eos_token_id"),
        "unk_token": special("unknown_token_id"),
        "pad_token": special("padding_token_id"),
        "chat_template": file.value("tokenizer.chat_template").and_then(Value::as_text),
        "clean_up_tokenization_spaces": false,
    });
    Ok(Some((tokenizer, config)))
}

/// Returns the string under `tokenizer.ggml.{key}`.
fn text<'a>(file: &'a GgufFile, key: &str) -> Option<&'a str> {
    file.value(&format!("tokenizer.ggml.{key}"))?.as_text()
}

/// Returns the Boolean under `tokenizer.ggml.{key}`.
fn flag(file: &GgufFile, key: &str) -> Option<bool> {
    file.value(&format!("tokenizer.ggml.{key}"))?.as_bool()
}

/// Returns the array under `tokenizer.ggml.{key}`, with items converted by `item`.
fn list<'a, Item>(
    file: &'a GgufFile,
    key: &str,
    item: impl Fn(&'a Value) -> Option<Item>,
) -> Result<Option<Vec<Item>>, ModelError> {
    let key = format!("tokenizer.ggml.{key}");
    let Some(value) = file.value(&key) else {
        return Ok(None);
    };
    value
        .as_array()
        .and_then(|items| items.iter().map(item).collect())
        .map(Some)
        .ok_or_else(|| {
            bad(
                file,
                format!("`{key}` is not an array of the expected type"),
            )
        })
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, ModelError> {
        let tokens = list(file, "tokens", Value::as_text)?.ok_or_else(|| {
            bad(
                file,
                "the key `tokenizer.ggml.tokens` is missing".to_owned(),
            )
        })?;
        let kinds = list(file, "token_type", Value::as_u64)?.unwrap_or(vec![NORMAL; tokens.len()]);
        if kinds.len() != tokens.len() {
            let (tokens, kinds) = (tokens.len(), kinds.len());
            return Err(bad(
                file,
                format!("{tokens} tokens have {kinds} `token_type`s"),
            ));
        }
        Ok(Self {
            file,
            tokens,
            kinds,
        })
    }

    /// Returns the token whose id is under `key`.
    fn special(&self, key: &str) -> Option<(u64, &'a str)> {
        let id = self
            .file
            .value(&format!("tokenizer.ggml.{key}"))?
            .as_u64()?;
        let token = self.tokens.get(usize::try_from(id).ok()?)?;
        Some((id, token))
    }

    fn ids(&self) -> HashMap<&'a str, usize> {
        let pairs = self.tokens.iter().enumerate();
        pairs.map(|(id, token)| (*token, id)).collect()
    }

    /// The `vocab` of `tokenizer.json`: ids by token.
    fn vocab(&self) -> Json {
        let pairs = self.tokens.iter().enumerate();
        Json::Object(
            pairs
                .map(|(id, token)| ((*token).to_owned(), json!(id)))
                .collect(),
        )
    }

    /// Tokens that are matched before the text is split.
    fn added_tokens(&self) -> Vec<Json> {
        let kinds = self.kinds.iter().zip(&self.tokens).enumerate();
        kinds
            .filter(|(_, (kind, _))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind))
            .map(|(id, (kind, token))| added_token(id as u32, token, *kind != USER_DEFINED))
            .collect()
    }

    /// Post-processor that adds BOS and EOS as the file states; `adds_bos` is the default for BOS.
    fn post_processor(&self, adds_bos: bool) -> Json {
        let token_if = |wanted: bool, key: &str| self.special(key).filter(|_| wanted);
        post_processor(
            token_if(
                flag(self.file, "add_bos_token").unwrap_or(adds_bos),
                "bos_token_id",
            ),
            token_if(
                flag(self.file, "add_eos_token").unwrap_or(false),
                "eos_token_id",
            ),
        )
    }

    /// SentencePiece BPE: pieces with scores, `▁` for a space, byte tokens for characters without a piece.
    fn sentence_pieces(&self) -> Result<Json, ModelError> {
        let scores = list(self.file, "scores", Value::as_f64)?
            .filter(|scores| scores.len() == self.tokens.len())
            .ok_or_else(|| {
                bad(
                    self.file,
                    "`tokenizer.ggml.scores` does not give each token a score".to_owned(),
                )
            })?;
        let prefix = flag(self.file, "add_space_prefix").unwrap_or(true);
        let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
        let mut normalizers = vec![replace(" ", SPACE)];
        if prefix {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
        }
        let unknown = self.special("unknown_token_id").map(|(_, token)| token);
        let unknown = unknown.or_else(|| {
            let id = self.kinds.iter().position(|kind| *kind == UNKNOWN)?;
            Some(self.tokens[id])
        });
        Ok(json!({
            "version": "1.0",
            "added_tokens": self.added_tokens(),
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null,
            "post_processor": self.post_processor(true),
            "decoder": sentence_piece_decoder(prefix, true),
            "model": {
                "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
                "vocab": self.vocab(), "merges": self.merges(&scores),
            },
        }))
    }

    /// Derives the merges from scores: every split of a piece into two pieces, by descending score.
    fn merges(&self, scores: &[f64]) -> Vec<Json> {
        let ids = self.ids();
        let mut merges = Vec::new();
        // Merges never produce special tokens or byte tokens.
        let pieces = self.tokens.iter().zip(scores).zip(&self.kinds);
        let pieces = pieces.filter(|(_, kind)| [NORMAL, USER_DEFINED, UNUSED].contains(kind));
        for ((piece, score), _) in pieces {
            for (cut, _) in piece.char_indices().skip(1) {
                let (left, right) = piece.split_at(cut);
                if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                    merges.push((*score, *left_id, *right_id, left, right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let pairs = merges.into_iter();
        pairs
            .map(|(_, _, _, left, right)| json!([left, right]))
            .collect()
    }

    /// Byte-level BPE of GPT-2, with the pre-tokenizer named by `tokenizer.ggml.pre`.
    fn byte_level(&self) -> Result<Json, ModelError> {
        let merges = list(self.file, "merges", Value::as_text)?.ok_or_else(|| {
            bad(
                self.file,
                "the key `tokenizer.ggml.merges` is missing".to_owned(),
            )
        })?;
        let name = text(self.file, "pre").unwrap_or("gpt-2");
        let splitting = Splitting::named(name).map_err(|reason| ModelError::Unsupported {
            path: self.file.path().to_owned(),
            key: "`tokenizer.ggml.pre`".to_owned(),
            value: format!("`{name}`"),
            supported: format!("{reason}; supported are the names of llama.cpp for byte-level BPE"),
        })?;
        let merges = merges.iter().filter_map(|merge| merge.split_once(' '));
        Ok(byte_level_bpe(ByteLevelBpe {
            added_tokens: self.added_tokens(),
            nfc: splitting.nfc,
            pre_tokenizer: splitting.steps,
            post_processor: self.post_processor(splitting.adds_bos),
            unknown: None,
            ignore_merges: splitting.ignores_merges,
            vocabulary: self.vocab(),
            merges: merges.map(|(left, right)| json!([left, right])).collect(),
        }))
    }
}
