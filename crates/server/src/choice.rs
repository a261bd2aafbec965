//! From tokens to text: a choice of a response, with its stop strings and its scores.

use std::{ops::Deref, sync::Arc};

use powerinfer_text::{SpecialText, StreamDecoder, TextError, Tokenizer};

use crate::{
    scheduler::{Finish, Score},
    stops::{StopSearch, StopStrings},
};

/// The text of one choice as its tokens arrive.
pub(crate) struct Choice {
    decoder: Option<StreamDecoder<Arc<Tokenizer>>>,
    stops: StopSearch,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Characters of the text before `held`.
    emitted: usize,
    /// Scores whose text has not been emitted.
    scores: Vec<TokenScore>,
    /// Tokens generated.
    pub(crate) tokens: usize,
    /// Sum of the log probabilities of the tokens.
    pub(crate) total_logprob: f64,
    /// Why the text has ended.
    pub(crate) finish: Option<Finish>,
}

/// A token's score, and where its text begins, in characters of the choice's text.
#[derive(Debug, Clone)]
pub(crate) struct TokenScore {
    pub(crate) score: Score,
    pub(crate) offset: usize,
    /// Whether it is a stop token, which is not part of the text.
    pub(crate) is_stop: bool,
}

/// Text that is final, with the scores of its tokens.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) scores: Vec<TokenScore>,
}

impl Piece {
    /// Appends the piece after it.
    pub(crate) fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.scores.extend(next.scores);
    }
}

impl Choice {
    /// Creates a choice whose text is decoded by `decoder` and ends before the first match of any of `stops`.
    pub(crate) fn new(decoder: StreamDecoder<Arc<Tokenizer>>, stops: Arc<StopStrings>) -> Self {
        Self {
            decoder: Some(decoder),
            stops: StopSearch::new(stops),
            held: String::new(),
            emitted: 0,
            scores: Vec::new(),
            tokens: 0,
            total_logprob: 0.0,
            finish: None,
        }
    }

    /// Appends a token; returns what is final.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer cannot decode it.
    pub(crate) fn push(
        &mut self,
        id: u32,
        is_stop: bool,
        score: Option<Score>,
    ) -> Result<Piece, TextError> {
        self.tokens += 1;
        if let Some(score) = score {
            self.total_logprob += score.logprob;
            let offset = self.emitted + self.held.chars().count();
            self.scores.push(TokenScore {
                score,
                offset,
                is_stop,
            });
        }
        match &mut self.decoder {
            Some(decoder) if !is_stop => {
                let text = decoder.push(id)?;
                Ok(self.release(text.as_deref().unwrap_or_default(), false))
            }
            _ => Ok(Piece::default()),
        }
    }

    /// Ends the text; returns the rest of it.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer cannot decode it.
    pub(crate) fn end(&mut self, finish: Finish) -> Result<Piece, TextError> {
        let rest = match self.decoder.take() {
            Some(decoder) => decoder.finish()?.unwrap_or_default(),
            None => String::new(),
        };
        let piece = self.release(&rest, true);
        // Unless a stop string has ended it before.
        self.finish.get_or_insert(finish);
        Ok(piece)
    }

    /// Appends `text` to what is held, and releases what cannot be the beginning of a stop string.
    fn release(&mut self, text: &str, is_last: bool) -> Piece {
        let before = self.held.len();
        self.held.push_str(text);
        let found = self.stops.push(text);
        let length = match found {
            Some((length, end)) => {
                self.finish = Some(Finish::Stop);
                self.decoder = None;
                before + end - length
            }
            None if is_last => self.held.len(),
            None => self.held.len() - self.stops.pending(),
        };
        let rest = self.held.split_off(length);
        let text = std::mem::replace(&mut self.held, rest);
        self.emitted += text.chars().count();
        let is_over = found.is_some() || is_last;
        if found.is_some() {
            self.held.clear();
            let emitted = self.emitted;
            self.scores.retain(|token| token.offset < emitted);
        }
        // Scores go with the text that they end in, so that a stop string takes those of its tokens along.
        let scores = if self.held.is_empty() || is_over {
            std::mem::take(&mut self.scores)
        } else {
            let emitted = self.emitted;
            let first_held = self.scores.iter().position(|token| token.offset >= emitted);
            self.scores
                .drain(..first_held.unwrap_or(self.scores.len()))
                .collect()
        };
        Piece { text, scores }
    }
}

/// The text of a prompt, `ids`, and where the text of each of its tokens begins, in characters.
///
/// # Errors
///
/// Fails if the tokenizer cannot decode it.
pub(crate) fn prompt_text(
    tokenizer: &impl Deref<Target = Tokenizer>,
    ids: &[u32],
) -> Result<(String, Vec<usize>), TextError> {
    let mut decoder = tokenizer.decode_stream(SpecialText::Skip);
    let (mut text, mut offsets, mut characters) = (String::new(), Vec::new(), 0);
    for id in ids {
        offsets.push(characters);
        if let Some(piece) = decoder.push(*id)? {
            characters += piece.chars().count();
            text.push_str(&piece);
        }
    }
    text.extend(decoder.finish()?);
    Ok((text, offsets))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a choice whose decoder gives `pieces`, and the pieces that it releases.
    fn released(pieces: &[&str], stops: &[&str]) -> (Vec<String>, Option<Finish>) {
        let tokenizer = Tokenizer::from_files(|name| {
            let files = powerinfer_datasets::demo::FILES.iter();
            let mut found = files.filter(|(file, _)| *file == name);
            found.next().map(|(_, bytes)| (*bytes).into())
        })
        .unwrap();
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let stops = Arc::new(StopStrings::new(stops));
        let decoder = StreamDecoder::new(Arc::new(tokenizer), SpecialText::Skip);
        let mut choice = Choice::new(decoder, stops);
        let mut texts = Vec::new();
        for piece in pieces {
            if choice.finish.is_none() {
                texts.push(choice.release(piece, false).text);
            }
        }
        if choice.finish.is_none() {
            texts.push(choice.release("", true).text);
        }
        (texts, choice.finish)
    }

    #[test]
    fn text_that_may_begin_a_stop_string_is_held() {
        let (texts, finish) = released(&["a<", "/", "b>", "<", "/s", ">x"], &["</s>"]);
        assert_eq!(texts, ["a", "", "</b>", "", "", ""]);
        assert_eq!(finish, Some(Finish::Stop));
        let (texts, finish) = released(&["a<", "/s"], &["</s>"]);
        assert_eq!((texts.concat().as_str(), finish), ("a</s", None));
        let (texts, _) = released(&["one two"], &["wo", "e t"]);
        assert_eq!(texts, ["on"], "the first in the text, not in the list");
        assert_eq!(released(&["ü", "öä"], &["äx"]).0.concat(), "üöä");
        let (texts, _) = released(&["a", "abc"], &["aab", "ab", "aabd"]);
        assert_eq!(texts, ["", ""], "the longest that ends there");
    }

    proptest::proptest! {
        #[test]
        fn splitting_does_not_change_the_text(pieces in proptest::collection::vec("[ab\u{e9}]{0,3}", 0..8)) {
            let whole = pieces.concat();
            let stops = ["ab", "\u{e9}a"];
            let end = stops.iter().filter_map(|stop| whole.find(stop)).min();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (texts, finish) = released(&pieces, &stops);
            proptest::prop_assert_eq!(texts.concat(), &whole[..end.unwrap_or(whole.len())]);
            proptest::prop_assert_eq!(finish.is_some(), end.is_some());
        }
    }
}
