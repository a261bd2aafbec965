//! Conversion of a GGUF file's tokenizer to `tokenizer.json` and `tokenizer_config.json`.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use crate::{
    ModelError,
    gguf::{GgufFile, Value, bad, tokenizer_metadata::NONE},
};

/// Token types of ggml.
pub(super) const NORMAL: u64 = 1;
pub(super) const UNKNOWN: u64 = 2;
pub(super) const CONTROL: u64 = 3;
pub(super) const USER_DEFINED: u64 = 4;
pub(super) const UNUSED: u64 = 5;
pub(super) const BYTE: u64 = 6;

/// Marks a preceding space in SentencePiece vocabularies.
pub(super) const SPACE: &str = "\u{2581}";

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
            .map(|(id, (kind, token))| {
                json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": *kind != USER_DEFINED,
                })
            })
            .collect()
    }

    /// Post-processor that adds BOS and EOS as the file states; `adds_bos` is the default for BOS.
    fn post_processor(&self, adds_bos: bool) -> Json {
        let token_if = |wanted: bool, key: &str| self.special(key).filter(|_| wanted);
        let bos = token_if(
            flag(self.file, "add_bos_token").unwrap_or(adds_bos),
            "bos_token_id",
        );
        let eos = token_if(
            flag(self.file, "add_eos_token").unwrap_or(false),
            "eos_token_id",
        );
        let token =
            |token: &str, kind: u8| json!({ "SpecialToken": { "id": token, "type_id": kind } });
        let around = |name: &str, kind: u8| {
            let bos = bos.iter().map(|(_, text)| token(text, kind));
            let eos = eos.iter().map(|(_, text)| token(text, kind));
            let sequence = json!({ "Sequence": { "id": name, "type_id": kind } });
            bos.chain([sequence]).chain(eos).collect::<Vec<_>>()
        };
        let specials = bos.iter().chain(&eos).map(|(id, text)| {
            let entry = json!({ "id": text, "ids": [id], "tokens": [text] });
            ((*text).to_owned(), entry)
        });
        let pair = [around("A", 0), around("B", 1)].concat();
        json!({
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": pair,
            "special_tokens": specials.collect::<serde_json::Map<_, _>>(),
        })
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
        let mut decoders = vec![
            replace(SPACE, " "),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
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
            "decoder": { "type": "Sequence", "decoders": decoders },
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
        for (piece, score) in self.tokens.iter().zip(scores) {
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
        let splitting = splitting(name).ok_or_else(|| ModelError::Unsupported {
            path: self.file.path().to_owned(),
            key: "`tokenizer.ggml.pre`".to_owned(),
            value: format!("`{name}`"),
            supported: format!("supported: {}", SPLITTINGS.join(", ")),
        })?;
        let adds_bos = is_llama_3(name);
        let merges: Vec<Json> = merges
            .iter()
            .filter_map(|merge| merge.split_once(' '))
            .map(|(left, right)| json!([left, right]))
            .collect();
        Ok(json!({
            "version": "1.0",
            "added_tokens": self.added_tokens(),
            // Qwen's tokenizer applies NFC, which the file does not state.
            "normalizer": normalises_to_nfc(name).then(|| json!({ "type": "NFC" })),
            "pre_tokenizer": splitting,
            "post_processor": self.post_processor(adds_bos),
            "decoder": bytes(true),
            "model": {
                "type": "BPE", "unk_token": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": is_llama_3(name), "vocab": self.vocab(), "merges": merges,
            },
        }))
    }
}

/// Pre-tokenizers, by the names under which they are written.
pub(super) const SPLITTINGS: [&str; 6] =
    ["gpt-2", "qwen2", "llama-bpe", "smollm", "falcon", "default"];

/// Whether a pre-tokenizer's name is one of Llama 3's, whose merges yield to whole tokens.
pub(super) fn is_llama_3(name: &str) -> bool {
    matches!(name, "llama-bpe" | "llama3" | "llama-v3")
}

/// Whether the tokenizers with a pre-tokenizer apply NFC.
pub(super) fn normalises_to_nfc(name: &str) -> bool {
    name == "qwen2"
}

/// Mapping of bytes to characters; with `regex` after splitting as in GPT-2.
fn bytes(regex: bool) -> Json {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": regex,
    })
}

/// The pre-tokenizer that `tokenizer.ggml.pre` names; `None` if it is unknown.
pub(super) fn splitting(name: &str) -> Option<Json> {
    let cut = |regex: &str| {
        json!({
            "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated",
            "invert": false,
        })
    };
    let sequence = |steps: &[Json]| json!({ "type": "Sequence", "pretokenizers": steps });
    let split = |digits: &str| {
        let words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
        let rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        sequence(&[cut(&format!("{words}{digits}{rest}")), bytes(false)])
    };
    Some(match name {
        "gpt-2" | "olmo" | "phi-2" | "jina-es" | "jina-de" => bytes(true),
        "qwen2" => split(r"\p{N}"),
        "starcoder" | "smollm" | "refact" | "command-r" | "codeshell" => {
            sequence(&[cut(r"\p{N}"), bytes(true)])
        }
        _ if is_llama_3(name) => split(r"\p{N}{1,3}"),
        // Written by converters for unknown models; this is llama.cpp's default.
        "default" => sequence(&[
            cut(r"[\p{P}$+<=>^~|]+"),
            cut(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
            cut(r"\p{N}+"),
            cut("[0-9][0-9][0-9]"),
            bytes(false),
        ]),
        "falcon" => sequence(&[
            json!({ "type": "Punctuation", "behavior": "Contiguous" }),
            bytes(true),
            json!({ "type": "Digits", "individual_digits": false }),
            cut("[0-9][0-9][0-9]"),
        ]),
        _ => return None,
    })
}
