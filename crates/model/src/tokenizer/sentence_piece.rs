//! Reads `tokenizer.model`: the pieces, scores and normalizer of a SentencePiece model.

use std::{borrow::Cow, collections::HashMap, path::Path};

use serde_json::{Map, Value as Json, json};

use super::{
    Pieces, SpacePrefix, TokenizerFile, added_token, post_processor,
    protobuf::{Fields, Value},
    sentence_piece_decoder,
    settings::Settings,
};
use crate::ModelError;

/// How texts are split into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Unigram: the split with the highest sum of scores.
    Unigram,
    /// BPE: neighbours are merged, the piece with the highest score first.
    Bpe,
}

/// Kind of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceKind {
    /// Normal piece of text.
    Normal,
    /// Represents text that has no piece.
    Unknown,
    /// Control piece such as `<s>`, which text never produces.
    Control,
    /// User-defined piece, which is neither split nor merged.
    UserDefined,
    /// Unused piece, which is split again into the pieces that it was merged from.
    Unused,
    /// One byte, such as `<0x41>`, of a character that has no piece.
    Byte,
}

/// Piece of the vocabulary; its id is its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Text of the piece.
    pub text: String,
    /// Score; higher scores take precedence.
    pub score: f32,
    /// Kind of the piece.
    pub kind: PieceKind,
}

/// Contents of a SentencePiece model.
#[derive(Debug, Clone, PartialEq)]
pub struct SentencePieceModel {
    /// Pieces by id.
    pub pieces: Vec<Piece>,
    /// How texts are split into pieces.
    pub algorithm: Algorithm,
    /// Whether characters without a piece become pieces of bytes.
    pub byte_fallback: bool,
    /// Whether a space is put in front of a text.
    pub add_dummy_prefix: bool,
    /// Whether spaces at the ends are removed and runs of spaces shortened to one.
    pub remove_extra_whitespaces: bool,
    /// Whether spaces are written as [`SPACE`](super::SPACE).
    pub escape_whitespaces: bool,
    /// Rules that replace characters: a double array of prefixes and the replacements; empty if there are none.
    pub characters: Vec<u8>,
    /// Id of the piece that represents unknown text.
    pub unknown: usize,
    /// Id of the piece that starts a text.
    pub bos: Option<usize>,
    /// Id of the piece that ends a text.
    pub eos: Option<usize>,
}

impl SentencePieceModel {
    /// Parses the content of a `tokenizer.model`.
    ///
    /// # Errors
    ///
    /// Describes what is damaged or not supported.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.starts_with(b"version https://git-lfs") {
            return Err("it is a Git LFS pointer, not the file: run `git lfs pull`".to_owned());
        }
        let damaged =
            |reason| format!("it is not a SentencePiece model: {reason}; download it again");
        let mut pieces = Vec::new();
        let mut model = Stored::default();
        let (mut has_trainer, mut has_normalizer) = (false, false);
        for field in Fields::new(bytes) {
            match field.map_err(damaged)? {
                (1, Value::Bytes(piece)) => pieces.push(parse_piece(piece).map_err(damaged)?),
                (2, Value::Bytes(trainer)) => {
                    has_trainer = true;
                    model.read_trainer(trainer).map_err(damaged)?;
                }
                (3, Value::Bytes(normalizer)) => {
                    has_normalizer = true;
                    model.read_normalizer(normalizer).map_err(damaged)?;
                }
                (5, Value::Bytes(denormalizer)) if has_rules(denormalizer).map_err(damaged)? => {
                    return Err(
                        "its rules for decoding (`denormalizer_spec`) are not supported".to_owned(),
                    );
                }
                _ => {}
            }
        }
        if pieces.is_empty() {
            return Err(damaged("it has no pieces".to_owned()));
        }
        // Without this check, a truncated file would be read with the format's defaults.
        if !has_trainer || !has_normalizer {
            return Err(damaged("its settings are missing".to_owned()));
        }
        model.check(pieces)
    }
}

fn parse_piece(bytes: &[u8]) -> Result<Piece, String> {
    let mut piece = Piece {
        text: String::new(),
        score: 0.0,
        kind: PieceKind::Normal,
    };
    for field in Fields::new(bytes) {
        match field? {
            (1, Value::Bytes(text)) => {
                let text = str::from_utf8(text).map_err(|_| "a piece is not UTF-8".to_owned())?;
                piece.text = text.to_owned();
            }
            // Adding 0 turns −0 into 0, because scores are compared by their total order.
            (2, Value::Fixed32(score)) => piece.score = f32::from_le_bytes(score) + 0.0,
            (3, Value::Integer(kind)) => {
                piece.kind = match kind {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    other => return Err(format!("a piece has the unknown type {other}")),
                };
            }
            _ => {}
        }
    }
    match &piece {
        Piece { text, .. } if text.is_empty() || text.contains('\0') => Err(format!(
            "a piece is empty or contains a zero byte: {text:?}"
        )),
        Piece { text, score, .. } if score.is_nan() => Err(format!("the score of {text:?} is NaN")),
        _ => Ok(piece),
    }
}

/// Returns whether a normalizer replaces characters.
fn has_rules(normalizer: &[u8]) -> Result<bool, String> {
    let mut found = false;
    for field in Fields::new(normalizer) {
        found |= matches!(field?, (2, Value::Bytes(rules)) if !rules.is_empty());
    }
    Ok(found)
}

/// Settings as stored, with the defaults of the format.
struct Stored {
    algorithm: u64,
    byte_fallback: bool,
    whitespace_as_suffix: bool,
    bos: u64,
    eos: u64,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    escape_whitespaces: bool,
    characters: Vec<u8>,
}

impl Default for Stored {
    fn default() -> Self {
        Self {
            algorithm: 1,
            byte_fallback: false,
            whitespace_as_suffix: false,
            bos: 1,
            eos: 2,
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
            characters: Vec::new(),
        }
    }
}

impl Stored {
    fn read_trainer(&mut self, bytes: &[u8]) -> Result<(), String> {
        for field in Fields::new(bytes) {
            match field? {
                (3, Value::Integer(value)) => self.algorithm = value,
                (24, Value::Integer(value)) => self.whitespace_as_suffix = value != 0,
                (35, Value::Integer(value)) => self.byte_fallback = value != 0,
                (41, Value::Integer(value)) => self.bos = value,
                (42, Value::Integer(value)) => self.eos = value,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, bytes: &[u8]) -> Result<(), String> {
        for field in Fields::new(bytes) {
            match field? {
                (2, Value::Bytes(rules)) => self.characters = rules.to_vec(),
                (3, Value::Integer(value)) => self.add_dummy_prefix = value != 0,
                (4, Value::Integer(value)) => self.remove_extra_whitespaces = value != 0,
                (5, Value::Integer(value)) => self.escape_whitespaces = value != 0,
                _ => {}
            }
        }
        Ok(())
    }

    fn check(self, pieces: Vec<Piece>) -> Result<SentencePieceModel, String> {
        let unsupported = |what: &str| {
            Err(format!(
                "{what}; only SentencePiece models of the types BPE and unigram are supported"
            ))
        };
        let algorithm = match self.algorithm {
            1 => Algorithm::Unigram,
            2 => Algorithm::Bpe,
            3 => return unsupported("it is a model of words, which is not supported"),
            4 => return unsupported("it is a model of characters, which is not supported"),
            other => return unsupported(&format!("its type {other} is unknown")),
        };
        if self.whitespace_as_suffix {
            return unsupported("it puts spaces at the end of words, which is not supported");
        }
        let mut bytes = [false; 256];
        let mut unknown = None;
        let mut ids = HashMap::new();
        for (id, piece) in pieces.iter().enumerate() {
            let text = &piece.text;
            if let Some(other) = ids.insert(text, id) {
                return Err(format!("the pieces {other} and {id} are both {text:?}"));
            }
            match piece.kind {
                PieceKind::Unknown if unknown.is_some() => {
                    return Err("it has two pieces for unknown text".to_owned());
                }
                PieceKind::Unknown => unknown = Some(id),
                PieceKind::Byte => match byte_of(text) {
                    Some(byte) => bytes[usize::from(byte)] = true,
                    None => return Err(format!("the byte piece {text:?} is invalid")),
                },
                _ => {}
            }
        }
        if self.byte_fallback && bytes.contains(&false) {
            return Err("it has `byte_fallback`, but not a piece for every byte".to_owned());
        }
        let unknown = unknown.ok_or("it has no piece for unknown text")?;
        let has_whole = pieces
            .iter()
            .any(|piece| piece.kind == PieceKind::UserDefined);
        if algorithm == Algorithm::Unigram && has_whole {
            return unsupported("it is a unigram model with user-defined pieces");
        }
        let known = |id: u64| usize::try_from(id).ok().filter(|id| *id < pieces.len());
        Ok(SentencePieceModel {
            bos: known(self.bos),
            eos: known(self.eos),
            pieces,
            algorithm,
            byte_fallback: self.byte_fallback,
            add_dummy_prefix: self.add_dummy_prefix,
            remove_extra_whitespaces: self.remove_extra_whitespaces,
            escape_whitespaces: self.escape_whitespaces,
            characters: self.characters,
            unknown,
        })
    }
}

/// Returns the byte that a piece such as `<0x0A>` represents.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let byte = u8::from_str_radix(digits, 16).ok()?;
    (digits == format!("{byte:02X}")).then_some(byte)
}

/// Describes the model in `bytes`, read from `path`, as a `tokenizer.json` without merges, with the added tokens of `settings`.
pub(super) fn convert<'a>(
    bytes: &[u8],
    settings: &Settings,
    path: &Path,
) -> Result<TokenizerFile<'a>, ModelError> {
    let bad = |reason| ModelError::BadTokenizer {
        path: path.to_owned(),
        reason,
    };
    let model = SentencePieceModel::parse(bytes).map_err(bad)?;
    let pieces = model.pieces.iter().enumerate();
    let vocabulary = pieces.map(|(id, piece)| (piece.text.clone(), id as u32));
    let (mut vocabulary, mut added) = settings.vocabulary(vocabulary.collect()).map_err(bad)?;
    for (id, piece) in model.pieces.iter().enumerate() {
        let is_special = matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
        let id = id as u32;
        if is_special && vocabulary.get(&piece.text) == Some(&id) {
            added
                .entry(id)
                .or_insert_with(|| added_token(id, &piece.text, true));
        }
    }
    let of_model = |id: Option<usize>| {
        let id = id?;
        let piece = &model.pieces[id];
        (piece.kind == PieceKind::Control).then_some(id as u32)
    };
    let named =
        |name: &Option<String>| name.as_ref().and_then(|name| vocabulary.get(name).copied());
    let bos = named(&settings.bos).or(of_model(model.bos));
    let eos = named(&settings.eos).or(of_model(model.eos));
    let text_of = |id: u32| {
        let of_added = added.get(&id).and_then(|token| token["content"].as_str());
        of_added.unwrap_or_else(|| &model.pieces[id as usize].text)
    };
    let around = |id: Option<u32>, wanted: bool| {
        id.filter(|_| wanted).map(|id| (u64::from(id), text_of(id)))
    };
    let post_processor = post_processor(
        around(bos, settings.add_bos.unwrap_or(true)),
        around(eos, settings.add_eos.unwrap_or(false)),
    );
    let prefix = match settings.legacy {
        Some(false) if settings.add_prefix_space.unwrap_or(true) => SpacePrefix::Text,
        Some(false) => SpacePrefix::None,
        _ if model.add_dummy_prefix => SpacePrefix::EachPart,
        _ => SpacePrefix::None,
    };
    let unknown = &model.pieces[model.unknown].text;
    vocabulary
        .entry(unknown.clone())
        .or_insert(model.unknown as u32);
    let vocabulary: Map<String, Json> = vocabulary
        .into_iter()
        .map(|(text, id)| (text, json!(id)))
        .collect();
    let json = json!({
        "version": "1.0",
        "added_tokens": added.values().collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": post_processor,
        "decoder": sentence_piece_decoder(prefix != SpacePrefix::None, model.byte_fallback),
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": true,
            "byte_fallback": model.byte_fallback, "vocab": vocabulary, "merges": [],
        },
    });
    Ok(TokenizerFile {
        json: Cow::Owned(json.to_string().into_bytes()),
        name: "tokenizer.model",
        pieces: Some(Pieces { model, prefix }),
        bos,
        eos,
    })
}
