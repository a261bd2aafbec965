//! Token texts to score: their size, and their beginnings.

use powerinfer_text::{SpecialText, Tokenizer};

use crate::EvalError;

/// Size of scored text in units that tokenizers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextSize {
    /// Words: runs of characters without white space.
    pub words: u64,
    /// Bytes of UTF-8.
    pub bytes: u64,
}

impl TextSize {
    /// Size of the scored tokens of `texts`: all but each text's first.
    ///
    /// # Errors
    ///
    /// Fails if tokens cannot be decoded.
    pub fn new(texts: &[Vec<u32>], tokenizer: &Tokenizer) -> Result<Self, EvalError> {
        let mut size = Self { words: 0, bytes: 0 };
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let text = tokenizer.decode(&text[1..], SpecialText::Skip)?;
            size.words += text.split_whitespace().count() as u64;
            size.bytes += text.len() as u64;
        }
        Ok(size)
    }
}

/// Scored tokens of `texts`: all but each text's first.
pub fn scored_tokens(texts: &[Vec<u32>]) -> u64 {
    let counts = texts.iter().map(|text| text.len().saturating_sub(1) as u64);
    counts.sum()
}

/// The first `tokens` tokens of `texts` together, without texts that would have a single token.
pub fn leading_tokens(texts: &[Vec<u32>], tokens: usize) -> Vec<Vec<u32>> {
    let mut left = tokens;
    let mut taken = Vec::new();
    for text in texts {
        let count = text.len().min(left);
        if left < 2 {
            break;
        }
        if count < 2 {
            continue;
        }
        taken.push(text[..count].to_vec());
        left -= count;
    }
    taken
}
