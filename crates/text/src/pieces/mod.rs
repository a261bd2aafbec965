//! [`PieceEncoder`]: encodes texts as the SentencePiece library does. A `tokenizer.json` cannot express this.
//!
//! ```text
//! part of a text ──normalizer──▶ ▁spaces▁escaped ──merge──▶ pieces ──▶ ids; bytes for pieces without an id
//! ```

mod merge;
mod normalizer;
mod unigram;

use std::{borrow::Cow, collections::HashMap};

use powerinfer_model::tokenizer::{
    Algorithm, PieceKind, Pieces, SPACE, SentencePieceModel, SpacePrefix,
};
use tokenizers::{Encoding, NormalizerWrapper, OffsetReferential, OffsetType, Token};

use crate::{SpecialTokens, Tokenizer};
use normalizer::Normalizer;
use unigram::Scores;

/// Encodes texts by the pieces of a `tokenizer.model`.
#[derive(Debug)]
pub(crate) struct PieceEncoder {
    model: SentencePieceModel,
    prefix: SpacePrefix,
    normalizer: Normalizer,
    ids: HashMap<String, u32>,
    /// Length of the longest piece in bytes.
    longest: usize,
    whole: WholePieces,
    /// Whether no piece contains a space after another character, so that words can be merged one by one.
    words_are_separate: bool,
    /// Scores of a unigram model; `None` for BPE.
    scores: Option<Scores>,
    /// Ids of the byte pieces; empty if the model has no byte fallback.
    bytes: Vec<u32>,
}

impl PieceEncoder {
    /// Prepares the pieces. An error describes how the normalizer's rules are damaged.
    pub(crate) fn new(pieces: Pieces) -> Result<Self, String> {
        let Pieces { model, prefix } = pieces;
        let all = model.pieces.iter().zip(0..);
        let ids: HashMap<String, u32> = all.map(|(piece, id)| (piece.text.clone(), id)).collect();
        let bytes = (0..=u8::MAX).map_while(|byte| ids.get(&format!("<0x{byte:02X}>")).copied());
        let bytes = bytes.filter(|_| model.byte_fallback).collect();
        Ok(Self {
            normalizer: Normalizer::new(&model)?,
            longest: ids.keys().map(String::len).max().unwrap_or(0),
            whole: WholePieces::new(&model),
            words_are_separate: model
                .pieces
                .iter()
                .all(|piece| !piece.text.trim_start_matches(SPACE).contains(SPACE)),
            scores: (model.algorithm == Algorithm::Unigram).then(|| Scores::new(&model.pieces)),
            bytes,
            ids,
            model,
            prefix,
        })
    }

    /// Returns `text`, with a space in front if only the first part of a text gets one.
    pub(crate) fn prefixed<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.prefix {
            SpacePrefix::Text if !text.is_empty() => format!("{SPACE}{text}").into(),
            _ => text.into(),
        }
    }

    /// Returns whether `part`, at the beginning of a text and followed by a special token, is only the space put in front.
    pub(crate) fn is_prefix(&self, part: &str) -> bool {
        self.prefix == SpacePrefix::Text && part == SPACE
    }

    /// Encodes the part of a text between two special tokens. `mark` interrupts user-defined pieces and is removed.
    pub(crate) fn encode(&self, part: &str, mark: Option<char>) -> Vec<u32> {
        let text =
            self.normalizer
                .normalize(part, self.prefix == SpacePrefix::EachPart, &self.whole);
        let (text, marks) = match mark.filter(|mark| text.contains(*mark)) {
            Some(mark) => unmarked(&text, mark),
            None => (text, Vec::new()),
        };
        let mut ids = Vec::new();
        let mut after_unknown = false;
        let pieces = match &self.scores {
            Some(scores) => self.best_split(scores, &text),
            None => self.merge(&text, &marks),
        };
        for piece in pieces {
            let id = self
                .ids
                .get(piece)
                .copied()
                .filter(|id| *id != self.model.unknown as u32);
            match id {
                Some(id) => ids.push(id),
                None if !self.bytes.is_empty() => {
                    ids.extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)]));
                }
                None if after_unknown => {}
                None => ids.push(self.model.unknown as u32),
            }
            after_unknown = id.is_none();
        }
        ids
    }

    /// Texts of the user-defined pieces with their ids.
    pub(crate) fn user_defined(&self) -> impl Iterator<Item = (u32, &str)> {
        let pieces = self.model.pieces.iter().zip(0..);
        pieces
            .filter(|(piece, _)| piece.kind == PieceKind::UserDefined)
            .map(|(piece, id)| (id, &piece.text[..]))
    }
}

impl Tokenizer {
    /// Encodes the parts between special tokens with `pieces`. `mark` interrupts tokens and is removed.
    pub(crate) fn encode_parts(
        &self,
        pieces: &PieceEncoder,
        text: &str,
        mark: Option<char>,
        special: SpecialTokens,
    ) -> tokenizers::Result<Encoding> {
        let vocabulary = self.inner.get_added_vocabulary();
        let text = pieces.prefixed(text);
        let mut parts = vocabulary.extract_and_normalize(None::<&NormalizerWrapper>, &text);
        // A special token at the beginning gets no space in front.
        let splits = parts.get_splits(OffsetReferential::Original, OffsetType::None);
        let drops_first = match &splits[..] {
            [(first, _, None), (_, _, Some(tokens)), ..] => {
                pieces.is_prefix(first) && tokens.iter().all(|token| self.is_special(token.id))
            }
            _ => false,
        };
        parts.split(|index, part| {
            let ids = if index == 0 && drops_first {
                Vec::new()
            } else {
                pieces.encode(part.get(), mark)
            };
            let tokens = ids
                .into_iter()
                .map(|id| Token::new(id, String::new(), (0, 0)));
            let tokens: Vec<Token> = tokens.collect();
            Ok([(part, Some(tokens))])
        })?;
        let encoding = parts.into_encoding(None, 0, OffsetType::None)?;
        self.inner
            .post_process(encoding, None, special == SpecialTokens::Add)
    }
}

/// Returns whether one of `marks` is within the `length` bytes at `start`.
fn crosses(marks: &[usize], start: usize, length: usize) -> bool {
    let within = marks.partition_point(|mark| *mark <= start);
    marks.get(within).is_some_and(|mark| *mark < start + length)
}

/// Returns `text` without `mark`, and the positions where `mark` was.
fn unmarked(text: &str, mark: char) -> (String, Vec<usize>) {
    let mut places = Vec::new();
    let mut whole = String::with_capacity(text.len());
    for part in text.split(mark) {
        whole.push_str(part);
        places.push(whole.len());
    }
    (whole, places)
}

/// User-defined pieces, which are neither split nor merged, by their first character, the longest first.
#[derive(Debug)]
pub(crate) struct WholePieces {
    by_start: HashMap<char, Vec<String>>,
}

impl WholePieces {
    fn new(model: &SentencePieceModel) -> Self {
        let mut by_start: HashMap<char, Vec<String>> = HashMap::new();
        for piece in &model.pieces {
            if let (PieceKind::UserDefined, Some(start)) = (piece.kind, piece.text.chars().next()) {
                by_start.entry(start).or_default().push(piece.text.clone());
            }
        }
        for pieces in by_start.values_mut() {
            pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len()));
        }
        Self { by_start }
    }

    /// Returns the length of the longest piece that `text` begins with.
    fn prefix_of(&self, text: &str) -> Option<usize> {
        if self.by_start.is_empty() {
            return None;
        }
        let pieces = self.by_start.get(&text.chars().next()?)?;
        let found = pieces.iter().find(|piece| text.starts_with(&piece[..]));
        found.map(String::len)
    }
}
