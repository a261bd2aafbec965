//! Pieces of a `tokenizer.model` as GGUF metadata.

use std::collections::{BTreeMap, HashMap};

use super::{
    tokenizer::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED},
    value::Value,
};
use crate::tokenizer::{Algorithm, Piece, PieceKind, Pieces, SpacePrefix};

/// Returns the pieces of a `tokenizer.model` with their scores and types.
pub(super) fn describe(
    pieces: &Pieces,
    tokens: &BTreeMap<usize, String>,
    added: &HashMap<usize, u64>,
    notes: &mut Vec<String>,
) -> Result<Vec<(&'static str, Value)>, String> {
    let Pieces { model, prefix } = pieces;
    if model.algorithm != Algorithm::Bpe {
        return Err("it is a unigram model instead of BPE".to_owned());
    }
    if !model.escape_whitespaces || model.remove_extra_whitespaces || !model.characters.is_empty() {
        return Err("its normalizer changes more than spaces in front".to_owned());
    }
    if *prefix == SpacePrefix::Text {
        notes.push(
            "texts after a special token get one more space in front than in the source".to_owned(),
        );
    }
    let is_whole = |piece: &Piece| piece.kind == PieceKind::UserDefined;
    if model.pieces.iter().any(is_whole) {
        notes.push("llama.cpp puts a space in front of text after a user-defined piece".to_owned());
    }
    let piece_at = |id: usize| {
        let piece = model.pieces.get(id);
        piece.filter(|piece| piece.text == tokens[&id])
    };
    let kinds = tokens.iter().map(|(id, text)| {
        let kind = piece_at(*id).map_or(PieceKind::Normal, |piece| piece.kind);
        match (kind, added.get(id)) {
            (PieceKind::Unknown, _) => UNKNOWN,
            (_, Some(kind)) => *kind,
            (PieceKind::Control, _) => CONTROL,
            // Spaces are escaped before user-defined pieces are searched for.
            (PieceKind::UserDefined, _) if text.contains(' ') => UNUSED,
            (PieceKind::UserDefined, _) => USER_DEFINED,
            (PieceKind::Unused, _) => UNUSED,
            (PieceKind::Byte, _) => BYTE,
            (PieceKind::Normal, _) => NORMAL,
        }
    });
    let scores = model.pieces.iter().map(|piece| piece.score);
    let lowest = scores.fold(0.0, f32::min);
    let scores = tokens
        .keys()
        .map(|id| piece_at(*id).map_or(lowest - 1.0, |piece| piece.score));
    let texts = tokens.values().cloned().collect::<Vec<_>>();
    Ok(vec![
        ("add_space_prefix", (*prefix != SpacePrefix::None).into()),
        ("model", "llama".into()),
        ("pre", "default".into()),
        ("tokens", texts.into()),
        ("scores", scores.collect::<Vec<_>>().into()),
        ("token_type", types(kinds)),
    ])
}

/// Token types as 32-bit signed integers.
pub(super) fn types(kinds: impl Iterator<Item = u64>) -> Value {
    Value::Array(kinds.map(|kind| Value::Signed(kind as i64)).collect())
}
