//! [`StreamDecoder`]: text as soon as no later token can change it.

use tokenizers::DecoderWrapper;

use crate::{SpecialText, TextError, Tokenizer};

/// Decodes ids one at a time; the pieces it gives, joined, are [`Tokenizer::decode`] of them all.
///
/// Tokens are cut at *boundaries*, places where the text of what follows no longer depends on
/// what came before. Everything since the last boundary is decoded again with each token:
///
/// ```text
/// opening │ … given away … │ pending                   opening: what takes the prefix space
///         ▲                ▲      ▲ given so far       pending: a few tokens
///         └── boundaries ──┘
/// ```
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    special: SpecialText,
    boundaries: Boundaries,
    /// The first tokens that have any text, decoded in front of all others: whatever the
    /// decoder does to the beginning of a text, it does to them.
    opening: Vec<u32>,
    opening_text: String,
    pending: Vec<u32>,
    /// Bytes of the text of `pending` that were given away.
    given: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, special: SpecialText) -> Self {
        Self {
            tokenizer,
            special,
            boundaries: Boundaries::of(tokenizer.inner.get_decoder()),
            opening: Vec::new(),
            opening_text: String::new(),
            pending: Vec::new(),
            given: 0,
        }
    }

    /// Takes the next id; gives the text that became final with it, if any did.
    ///
    /// Fails on an id outside the vocabulary, which leaves the stream as it was.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        let token = self.tokenizer.token(id)?;
        let vocabulary = self.tokenizer.inner.get_added_vocabulary();
        if self.special == SpecialText::Skip && vocabulary.is_special_token(&token) {
            return Ok(None);
        }
        self.pending.push(id);
        match self.boundaries {
            Boundaries::BetweenCharacters => self.push_bytes(),
            Boundaries::AfterText if is_byte_token(&token) => Ok(None),
            Boundaries::AfterText | Boundaries::Everywhere => self.push_text(),
            Boundaries::AtTheEnd => Ok(None),
        }
    }

    /// Ends the stream; gives what was held back, an unfinished character as U+FFFD.
    pub fn finish(self) -> Result<Option<String>, TextError> {
        let mut ids = self.opening;
        ids.extend(self.pending);
        let text = self.tokenizer.decode_known(&ids, self.special)?;
        Ok(piece(&text[self.opening_text.len() + self.given..]))
    }

    /// After a token that ends at a boundary.
    fn push_text(&mut self) -> Result<Option<String>, TextError> {
        let opening_length = self.opening.len();
        self.opening.append(&mut self.pending);
        let text = self.tokenizer.decode_known(&self.opening, self.special)?;
        let new = piece(&text[self.opening_text.len()..]);
        if self.opening_text.is_empty() {
            self.opening_text = text;
        } else {
            self.opening.truncate(opening_length);
        }
        Ok(new)
    }

    /// After a token of bytes, which may end inside a character.
    fn push_bytes(&mut self) -> Result<Option<String>, TextError> {
        let decode = |ids: &[u32]| self.tokenizer.decode_known(ids, self.special);
        let text = decode(&self.pending)?;
        let Some(whole) = text.strip_suffix(char::REPLACEMENT_CHARACTER) else {
            let new = piece(&text[self.given..]);
            self.pending.clear();
            self.given = 0;
            return Ok(new);
        };
        // Unfinished bytes show as exactly one U+FFFD, so all before it is final.
        let new = piece(&whole[self.given..]);
        self.given = whole.len();

        // Keeps `pending` short when the bytes never become characters. Cutting a character
        // in two gives more U+FFFD than it had, so equal texts prove a boundary.
        if let [before @ .., last] = self.pending.as_slice()
            && !before.is_empty()
        {
            let before = decode(before)?;
            let after = decode(&[*last])?;
            if text.len() == before.len() + after.len()
                && text.starts_with(&before)
                && text.ends_with(&after)
            {
                self.pending = vec![*last];
                self.given -= before.len();
            }
        }
        Ok(new)
    }
}

/// Where a decoder's text can be cut so that the parts, decoded after the opening, are the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Boundaries {
    /// Tokens are bytes (byte-level BPE): between tokens that do not share a character.
    BetweenCharacters,
    /// Runs of `<0x41>` tokens are decoded together: after any other token.
    AfterText,
    /// Every token is decoded by itself.
    Everywhere,
    /// A decoder that looks further, of no language model we know: only at the end.
    AtTheEnd,
}

impl Boundaries {
    fn of(decoder: Option<&DecoderWrapper>) -> Self {
        let mut steps = Vec::new();
        if let Some(decoder) = decoder {
            flatten(decoder, &mut steps);
        }

        use DecoderWrapper as Step;
        let has = |kind: fn(&Step) -> bool| steps.iter().any(|&step| kind(step));
        if has(|step| matches!(step, Step::ByteLevel(_))) {
            let only_bytes = !has(|step| !matches!(step, Step::ByteLevel(_) | Step::Fuse(_)));
            return if only_bytes {
                Self::BetweenCharacters
            } else {
                Self::AtTheEnd
            };
        }
        // Before the tokens are fused a step sees one token, afterwards all of the text.
        let fuse = steps.iter().position(|step| matches!(step, Step::Fuse(_)));
        let (before, after) = steps.split_at(fuse.unwrap_or(steps.len()));
        let local = before.iter().all(|step| {
            matches!(
                step,
                Step::Replace(_)
                    | Step::ByteFallback(_)
                    | Step::Metaspace(_)
                    | Step::WordPiece(_)
                    | Step::Strip(_)
            )
        }) && after.iter().all(|step| match step {
            Step::Fuse(_) => true,
            Step::Strip(strip) => strip.stop == 0,
            _ => false,
        });
        match (local, has(|step| matches!(step, Step::ByteFallback(_)))) {
            (true, true) => Self::AfterText,
            (true, false) => Self::Everywhere,
            (false, _) => Self::AtTheEnd,
        }
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for step in sequence.get_decoders() {
                flatten(step, steps);
            }
        }
        step => steps.push(step),
    }
}

/// Whether the byte-fallback decoder takes the token for a byte; the test is the library's.
fn is_byte_token(token: &str) -> bool {
    token.len() == 6
        && token.starts_with("<0x")
        && token.ends_with('>')
        && u8::from_str_radix(&token[3..5], 16).is_ok()
}

fn piece(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn bytes_that_never_become_characters_do_not_pile_up() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/tokenizers/tok-bpe-gpt2-512");
        let tokenizer = Tokenizer::from_directory(&directory).unwrap();
        // Bytes F0, 9F and A1 in every order that can begin a character or fail to.
        for pattern in [&["ð"][..], &["¡"], &["ð", "Ł"], &["ð", "Ł", "¡", "ð"]] {
            let mut stream = tokenizer.decode_stream(SpecialText::Keep);
            for token in pattern.iter().cycle().take(100) {
                stream.push(tokenizer.token_id(token).unwrap()).unwrap();
                assert!(stream.pending.len() <= 4, "{pattern:?}");
            }
        }
    }
}
