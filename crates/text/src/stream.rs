//! [`StreamDecoder`]: emits text as soon as no later token can change it.

use std::ops::Deref;

use tokenizers::DecoderWrapper;

use crate::{SpecialText, TextError, Tokenizer};

/// Streaming decoder of token ids; the pieces it emits, concatenated, equal [`Tokenizer::decode`] of all ids.
///
/// The ids are split at *boundaries*, positions where the text of later ids does not depend on earlier ones.
/// Only the ids since the last boundary are decoded again with each new id:
///
/// ```text
/// opening │ … emitted … │ pending                   opening: tokens whose prefix space is stripped
///         ▲             ▲      ▲ emitted so far      pending: a few tokens
///         └─ boundaries ┘
/// ```
#[derive(Debug)]
pub struct StreamDecoder<T> {
    tokenizer: T,
    special: SpecialText,
    boundaries: Boundaries,
    /// Ids decoded ahead of all others: the first ids that produce text, or the end of the prompt. They absorb what the decoder
    /// does at the start of a text.
    opening: Vec<u32>,
    opening_text: String,
    pending: Vec<u32>,
    /// Bytes of the text of `pending` that were emitted.
    emitted: usize,
}

impl<T: Deref<Target = Tokenizer>> StreamDecoder<T> {
    /// Creates a streaming decoder that borrows or shares `tokenizer`.
    pub fn new(tokenizer: T, special: SpecialText) -> Self {
        Self {
            boundaries: Boundaries::new(tokenizer.inner.get_decoder()),
            tokenizer,
            special,
            opening: Vec::new(),
            opening_text: String::new(),
            pending: Vec::new(),
            emitted: 0,
        }
    }

    /// Creates a streaming decoder for ids that continue `prompt`. Start-of-text handling, such as stripping a space, does not
    /// apply to them. Trailing prompt ids that decode to no text are ignored.
    ///
    /// # Errors
    ///
    /// [`TextError::UnknownId`], or a failure of the decoder.
    pub fn after(tokenizer: T, prompt: &[u32], special: SpecialText) -> Result<Self, TextError> {
        let mut stream = Self::new(tokenizer, special);
        // Byte-level decoders do nothing at the start.
        if stream.boundaries == Boundaries::BetweenCharacters {
            return Ok(stream);
        }
        stream.opening_text = stream.tokenizer.decode(prompt, special)?;
        stream.opening = prompt.to_vec();
        if stream.boundaries != Boundaries::AtTheEnd {
            // One token with text is enough, and is decoded faster.
            for id in prompt.iter().rev() {
                let text = stream.tokenizer.decode_known(&[*id], special)?;
                if !text.is_empty() && byte_of_fallback(&stream.tokenizer.token(*id)?).is_none() {
                    (stream.opening, stream.opening_text) = (vec![*id], text);
                    break;
                }
            }
        }
        Ok(stream)
    }

    /// Appends an id and returns the text that became final, if any.
    ///
    /// # Errors
    ///
    /// [`TextError::UnknownId`], which leaves the stream unchanged, or a failure of the decoder.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        let token = self.tokenizer.token(id)?;
        let vocabulary = self.tokenizer.inner.get_added_vocabulary();
        if self.special == SpecialText::Skip && vocabulary.is_special_token(&token) {
            return Ok(None);
        }
        self.pending.push(id);
        match self.boundaries {
            Boundaries::BetweenCharacters => self.push_bytes(),
            Boundaries::AfterText if byte_of_fallback(&token).is_some() => Ok(None),
            Boundaries::AfterText | Boundaries::Everywhere => self.push_text(),
            Boundaries::AtTheEnd => Ok(None),
        }
    }

    /// Ends the stream and returns the remaining text; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    ///
    /// The decoder failed.
    pub fn finish(self) -> Result<Option<String>, TextError> {
        Ok(non_empty(&self.pending_text()?[self.emitted..]))
    }

    /// Text of the pending ids, decoded after the opening ids.
    fn pending_text(&self) -> Result<String, TextError> {
        let ids = [&self.opening[..], &self.pending].concat();
        let text = self.tokenizer.decode_known(&ids, self.special)?;
        match text.strip_prefix(&self.opening_text) {
            Some(own) => Ok(own.to_owned()),
            // The opening text changes if the following ids complete or invalidate its last character.
            None => self.tokenizer.decode_known(&self.pending, self.special),
        }
    }

    /// Emits text after a token that ends at a boundary.
    fn push_text(&mut self) -> Result<Option<String>, TextError> {
        let text = self.pending_text()?;
        if self.opening_text.is_empty() {
            self.opening.append(&mut self.pending);
            self.opening_text.clone_from(&text);
        }
        self.pending.clear();
        Ok(non_empty(&text))
    }

    /// Emits text after a token of bytes, which may end within a character.
    fn push_bytes(&mut self) -> Result<Option<String>, TextError> {
        let decode = |ids: &[u32]| self.tokenizer.decode_known(ids, self.special);
        let text = decode(&self.pending)?;
        let Some(whole) = text.strip_suffix(char::REPLACEMENT_CHARACTER) else {
            let new = non_empty(&text[self.emitted..]);
            self.pending.clear();
            self.emitted = 0;
            return Ok(new);
        };
        // An incomplete character decodes to exactly one U+FFFD, so all text before it is final.
        let new = non_empty(&whole[self.emitted..]);
        self.emitted = whole.len();

        // Bound `pending` if the bytes never form a character. Splitting within a character gives more U+FFFD
        // than before, so equal texts prove a boundary.
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
                self.emitted -= before.len();
            }
        }
        Ok(new)
    }
}

/// Boundaries of a decoder: where ids can be split such that the parts, decoded after `opening`, concatenate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Boundaries {
    /// Byte-level BPE: between tokens that do not share a character.
    BetweenCharacters,
    /// Byte fallback: after any token other than `<0x41>`, since runs of those are decoded together.
    AfterText,
    /// Every token is decoded independently.
    Everywhere,
    /// Other decoders: only at the end.
    AtTheEnd,
}

impl Boundaries {
    fn new(decoder: Option<&DecoderWrapper>) -> Self {
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
        // Steps before fusing see one token, later ones the whole text.
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

/// Lists the steps of a decoder.
pub(crate) fn flatten<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for step in sequence.get_decoders() {
                flatten(step, steps);
            }
        }
        step => steps.push(step),
    }
}

/// Returns the byte that the byte-fallback decoder takes the token for, like the library.
pub(crate) fn byte_of_fallback(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16)
        .ok()
        .filter(|_| digits.len() == 2)
}

fn non_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn pending_ids_are_bounded_if_bytes_never_form_characters() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/tokenizers/tok-bpe-gpt2-512");
        let tokenizer = Tokenizer::from_directory(&directory).unwrap();
        // Bytes F0, 9F and A1 in orders that start a character or fail to.
        for pattern in [&["ð"][..], &["¡"], &["ð", "Ł"], &["ð", "Ł", "¡", "ð"]] {
            let mut stream = tokenizer.decode_stream(SpecialText::Keep);
            for token in pattern.iter().cycle().take(100) {
                stream.push(tokenizer.token_id(token).unwrap()).unwrap();
                assert!(stream.pending.len() <= 4, "{pattern:?}");
            }
        }
    }
}
