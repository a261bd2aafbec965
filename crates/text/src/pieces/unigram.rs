//! Splits a text into the pieces with the highest sum of scores.

use powerinfer_model::tokenizer::PieceKind;

use super::PieceEncoder;

/// How much lower a character without a piece scores than the worst piece.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Last piece of the best split of the text up to a given position.
#[derive(Clone, Copy)]
struct Best {
    /// Start of the piece; `None` if no split ends here.
    start: Option<usize>,
    score: f32,
}

/// Score of a character without a piece, and the lengths of all pieces.
#[derive(Debug)]
pub(super) struct Scores {
    unknown: f32,
    /// Lengths of pieces in bytes, ascending.
    lengths: Vec<usize>,
}

impl Scores {
    pub(super) fn new(pieces: &[powerinfer_model::tokenizer::Piece]) -> Self {
        let normal = pieces
            .iter()
            .filter(|piece| piece.kind == PieceKind::Normal);
        let scores: Vec<f32> = normal.map(|piece| piece.score).collect();
        let mut lengths: Vec<usize> = pieces.iter().map(|piece| piece.text.len()).collect();
        lengths.sort_unstable();
        lengths.dedup();
        Self {
            unknown: scores.iter().copied().fold(f32::MAX, f32::min) - UNKNOWN_PENALTY,
            lengths,
        }
    }
}

impl PieceEncoder {
    /// Splits a normalised text.
    pub(super) fn best_split<'t>(&self, scores: &Scores, text: &'t str) -> Vec<&'t str> {
        let mut best = vec![
            Best {
                start: None,
                score: 0.0
            };
            text.len() + 1
        ];
        for (start, character) in text.char_indices() {
            let so_far = best[start].score;
            let mut improve = |end: usize, score: f32| {
                let place: &mut Best = &mut best[end];
                if place.start.is_none() || score > place.score {
                    *place = Best {
                        start: Some(start),
                        score,
                    };
                }
            };
            let mut has_single = false;
            for length in &scores.lengths {
                let Some(piece) = text.get(start..start + length) else {
                    continue;
                };
                let Some(id) = self.ids.get(piece) else {
                    continue;
                };
                let stored = &self.model.pieces[*id as usize];
                if stored.kind != PieceKind::Normal {
                    continue;
                }
                improve(start + length, stored.score + so_far);
                has_single |= *length == character.len_utf8();
            }
            if !has_single {
                improve(start + character.len_utf8(), scores.unknown + so_far);
            }
        }
        let mut pieces = Vec::new();
        let mut end = text.len();
        while let Some(start) = best[end].start {
            pieces.push(&text[start..end]);
            end = start;
        }
        pieces.reverse();
        pieces
    }
}
