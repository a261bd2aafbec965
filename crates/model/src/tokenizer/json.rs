//! Builds the parts of a `tokenizer.json`.

use serde_json::{Map, Value as Json, json};

use super::SPACE;

/// Returns an added token, which is matched before the text is split.
pub(crate) fn added_token(id: u32, content: &str, special: bool) -> Json {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special,
    })
}

/// Returns a post-processor that puts `bos` and `eos`, each given by id and text, around a text.
pub(crate) fn post_processor(bos: Option<(u64, &str)>, eos: Option<(u64, &str)>) -> Json {
    let token = |token: &str, kind: u8| json!({ "SpecialToken": { "id": token, "type_id": kind } });
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
        "special_tokens": specials.collect::<Map<_, _>>(),
    })
}

/// Returns the SentencePiece decoder; with `prefix`, it removes the space in front.
pub(crate) fn sentence_piece_decoder(prefix: bool, byte_fallback: bool) -> Json {
    if !byte_fallback {
        let scheme = if prefix { "always" } else { "never" };
        return json!({
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false,
        });
    }
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": decoders })
}

/// Returns byte-level BPE as in GPT-2, applied after the steps in `pre_tokenizer`.
pub(crate) fn byte_level_bpe(parts: ByteLevelBpe) -> Json {
    json!({
        "version": "1.0",
        "added_tokens": parts.added_tokens,
        "normalizer": parts.nfc.then(|| json!({ "type": "NFC" })),
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": parts.post_processor,
        "decoder": super::splitting::bytes(true),
        "model": {
            "type": "BPE", "unk_token": parts.unknown, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": parts.ignore_merges, "vocab": parts.vocabulary, "merges": parts.merges,
        },
    })
}

/// Settings of [`byte_level_bpe`].
pub(crate) struct ByteLevelBpe<'a> {
    pub(crate) added_tokens: Vec<Json>,
    /// Whether texts are normalised to NFC.
    pub(crate) nfc: bool,
    pub(crate) pre_tokenizer: Json,
    pub(crate) post_processor: Json,
    /// Token for characters outside the vocabulary.
    pub(crate) unknown: Option<&'a str>,
    /// Whether whole tokens take precedence over merges.
    pub(crate) ignore_merges: bool,
    pub(crate) vocabulary: Json,
    pub(crate) merges: Vec<Json>,
}
