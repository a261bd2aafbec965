//! Merges neighbours into pieces: the piece with the highest score first, the leftmost one among equals.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
    ops::Range,
};

use powerinfer_model::tokenizer::{PieceKind, SPACE};

use super::PieceEncoder;

/// Part of the text that is one piece so far; empty after it was merged into its left neighbour.
struct Symbol {
    range: Range<usize>,
    previous: Option<usize>,
    next: Option<usize>,
    /// Whether the symbol is a user-defined piece, which is not merged.
    whole: bool,
}

/// Two neighbours that make a piece.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the piece. If it differs from that of both symbols together, one of them has changed since.
    length: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

impl PieceEncoder {
    /// Splits a normalised text into pieces. User-defined ones do not extend across `marks`, ascending positions in the text.
    pub(super) fn merge<'t>(&self, text: &'t str, marks: &[usize]) -> Vec<&'t str> {
        if !self.words_are_separate {
            return self.merge_word(text, 0, marks);
        }
        let mut pieces = Vec::new();
        let mut start = 0;
        for (index, _) in text.match_indices(SPACE) {
            if index > start && !text[..index].ends_with(SPACE) {
                pieces.extend(self.merge_word(&text[start..index], start, marks));
                start = index;
            }
        }
        pieces.extend(self.merge_word(&text[start..], start, marks));
        pieces
    }

    /// Splits the part of a text that begins at `offset`.
    fn merge_word<'t>(&self, text: &'t str, offset: usize, marks: &[usize]) -> Vec<&'t str> {
        let mut symbols = self.symbols(text, offset, marks);
        let mut pairs = BinaryHeap::new();
        // Positions at which unused pieces are split again.
        let mut splits: HashMap<&str, usize> = HashMap::new();
        for right in 1..symbols.len() {
            pairs.extend(self.pair(text, &symbols, right - 1, right, &mut splits));
        }
        while let Some(Pair {
            left,
            right,
            length,
            ..
        }) = pairs.pop()
        {
            let [a, b] = [left, right].map(|index| symbols[index].range.clone());
            if a.is_empty() || b.is_empty() || a.len() + b.len() != length {
                continue;
            }
            let next = symbols[right].next;
            symbols[left].range = a.start..b.end;
            symbols[left].next = next;
            symbols[right].range = b.end..b.end;
            if let Some(next) = next {
                symbols[next].previous = Some(left);
                pairs.extend(self.pair(text, &symbols, left, next, &mut splits));
            }
            if let Some(previous) = symbols[left].previous {
                pairs.extend(self.pair(text, &symbols, previous, left, &mut splits));
            }
        }
        let mut pieces = Vec::new();
        for symbol in symbols.iter().filter(|symbol| !symbol.range.is_empty()) {
            let mut rest = vec![&text[symbol.range.clone()]];
            while let Some(piece) = rest.pop() {
                match splits.get(piece) {
                    Some(cut) => rest.extend([&piece[*cut..], &piece[..*cut]]),
                    None => pieces.push(piece),
                }
            }
        }
        pieces
    }

    /// Returns the initial symbols of a text: its characters and user-defined pieces.
    fn symbols(&self, text: &str, offset: usize, marks: &[usize]) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut start = 0;
        while let Some(character) = text[start..].chars().next() {
            let whole = self.whole.prefix_of(&text[start..]);
            let whole = whole.filter(|length| !super::crosses(marks, offset + start, *length));
            let end = start + whole.unwrap_or(character.len_utf8());
            let index = symbols.len();
            symbols.push(Symbol {
                range: start..end,
                previous: index.checked_sub(1),
                next: (end < text.len()).then_some(index + 1),
                whole: whole.is_some(),
            });
            start = end;
        }
        symbols
    }

    /// Returns the pair of two symbols if together they make a piece.
    fn pair<'t>(
        &self,
        text: &'t str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        splits: &mut HashMap<&'t str, usize>,
    ) -> Option<Pair> {
        let [a, b] = [&symbols[left], &symbols[right]];
        let length = a.range.len() + b.range.len();
        if a.whole || b.whole || length > self.longest {
            return None;
        }
        let merged = &text[a.range.start..b.range.end];
        let piece = &self.model.pieces[*self.ids.get(merged)? as usize];
        match piece.kind {
            PieceKind::Normal | PieceKind::UserDefined => {}
            PieceKind::Unused => {
                splits.insert(merged, a.range.len());
            }
            PieceKind::Unknown | PieceKind::Control | PieceKind::Byte => return None,
        }
        Some(Pair {
            score: piece.score,
            left,
            right,
            length,
        })
    }
}
