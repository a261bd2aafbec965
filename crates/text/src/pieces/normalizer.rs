//! Normalizer of a SentencePiece model: applies rules that replace characters, and removes or escapes spaces.

use powerinfer_model::tokenizer::{SPACE, SentencePieceModel};

use super::WholePieces;

/// Transformation of a text before it is split into pieces.
#[derive(Debug)]
pub(super) struct Normalizer {
    rules: Option<Rules>,
    remove_extra_whitespaces: bool,
    escape_whitespaces: bool,
}

impl Normalizer {
    pub(super) fn new(model: &SentencePieceModel) -> Result<Self, String> {
        let rules = match &model.characters[..] {
            [] => None,
            stored => Some(Rules::parse(stored)?),
        };
        Ok(Self {
            rules,
            remove_extra_whitespaces: model.remove_extra_whitespaces,
            escape_whitespaces: model.escape_whitespaces,
        })
    }

    /// Normalises `text`; `prefix` puts a space in front. User-defined pieces are not replaced.
    pub(super) fn normalize(&self, text: &str, prefix: bool, whole: &WholePieces) -> String {
        let mut rest = text;
        if self.remove_extra_whitespaces {
            while let (" ", length) = &self.first(rest, whole) {
                rest = &rest[*length..];
            }
        }
        if rest.is_empty() {
            return String::new();
        }
        let space = if self.escape_whitespaces { SPACE } else { " " };
        let mut normalized = if prefix {
            space.to_owned()
        } else {
            String::new()
        };
        let mut after_space = self.remove_extra_whitespaces;
        while !rest.is_empty() {
            let (mut part, length) = self.first(rest, whole);
            if after_space {
                part = part.trim_start_matches(' ');
            }
            if part.contains(' ') {
                normalized.push_str(&part.replace(' ', space))
            } else {
                normalized.push_str(part)
            }
            if !part.is_empty() {
                after_space = self.remove_extra_whitespaces && part.ends_with(' ');
            }
            rest = &rest[length..];
        }
        if self.remove_extra_whitespaces {
            let length = normalized.trim_end_matches(space).len();
            normalized.truncate(length);
        }
        normalized
    }

    /// Returns the replacement of the beginning of `text`, and the length that it replaces; empty for an empty text.
    fn first<'a>(&'a self, text: &'a str, whole: &WholePieces) -> (&'a str, usize) {
        if let Some(length) = whole.prefix_of(text) {
            return (&text[..length], length);
        }
        if let Some(replaced) = self.rules.as_ref().and_then(|rules| rules.longest(text)) {
            return replaced;
        }
        let length = text.chars().next().map_or(0, char::len_utf8);
        (&text[..length], length)
    }
}

/// Rules, keyed by the text that they replace, in a double array (format of darts-clone).
#[derive(Debug)]
struct Rules {
    units: Vec<u32>,
    /// Replacements, each followed by a zero byte.
    replacements: String,
}

impl Rules {
    fn parse(stored: &[u8]) -> Result<Self, String> {
        let damaged = || "its rules of characters (`precompiled_charsmap`) are damaged".to_owned();
        let (length, rest) = stored.split_first_chunk().ok_or_else(damaged)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (units, replacements) = rest.split_at_checked(length).ok_or_else(damaged)?;
        let units = units.chunks_exact(4);
        if !units.remainder().is_empty() {
            return Err(damaged());
        }
        let units = units.map(|unit| u32::from_le_bytes(unit.try_into().expect("four bytes")));
        let replacements = String::from_utf8(replacements.to_vec()).map_err(|_| damaged())?;
        Ok(Self {
            units: units.collect(),
            replacements,
        })
    }

    /// Returns the replacement of the longest prefix of `text` that has one, and the prefix's length.
    fn longest(&self, text: &str) -> Option<(&str, usize)> {
        let mut found = None;
        let root = *self.units.first()?;
        let mut place = offset(root);
        for (index, byte) in text.bytes().enumerate() {
            place ^= usize::from(byte);
            let Some(unit) = self.units.get(place) else {
                break;
            };
            if unit & (1 << 31 | 0xff) != u32::from(byte) {
                break;
            }
            place ^= offset(*unit);
            let has_rule = unit >> 8 & 1 == 1;
            if let Some(rule) = self.units.get(place).filter(|_| has_rule) {
                found = Some(((rule & !(1 << 31)) as usize, index + 1));
            }
        }
        let (start, length) = found.filter(|(_, length)| text.is_char_boundary(*length))?;
        let replacement = self.replacements.get(start..)?;
        Some((replacement.split('\0').next()?, length))
    }
}

/// Returns the offset from a unit to its children in the double array.
fn offset(unit: u32) -> usize {
    (unit >> 10 << (unit >> 6 & 8)) as usize
}
