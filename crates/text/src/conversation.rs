//! Conversations in which messages stay plain text: `</s>` in a message is four characters, not the end of a text.
//!
//! ```text
//! messages ── a mark within each special token ──▶ template ──▶ special tokens of the template are found,
//!                                                               the marks removed, the rest is encoded ──▶ ids
//! ```
//!
//! The mark is a character that occurs in no message. It interrupts special tokens before the tokenizer searches for them, and is
//! removed before the tokenizer searches for words, so all other text has the same ids as without marks.

use std::{borrow::Cow, collections::HashSet};

use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizer, normalizers::NormalizerWrapper,
};

use crate::{
    ChatTemplate, GenerationPrompt, Message, SpecialTokens, TextError, Tokenizer, guard::guarded,
    pieces::PieceEncoder,
};

/// How special tokens in messages are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageTokens {
    /// Treated as plain text.
    Plain,
    /// Treated as special tokens: the author of a message can end it and write the next one.
    Trusted,
}

/// A rendered conversation, to be encoded by the tokenizer that rendered it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// Text with the marks.
    text: String,
    mark: Option<char>,
}

impl Conversation {
    /// Returns the text.
    pub fn text(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => self.text.replace(mark, "").into(),
            None => Cow::Borrowed(&self.text),
        }
    }

    /// Returns an upper bound of the text's length in bytes.
    pub fn size(&self) -> usize {
        self.text.len()
    }
}

/// A token that must not be recognised in a message.
#[derive(Debug)]
pub(crate) struct ControlToken {
    text: String,
    /// Whether it is listed only because the template writes it: the tokenizer does not call it special.
    is_of_template: bool,
}

/// Lists the tokens that structure a conversation: special ones, those that end a text, and added ones that the template
/// writes. The others are abbreviations, such as runs of spaces.
pub(crate) fn control_tokens(
    tokenizer: &tokenizers::Tokenizer,
    pieces: Option<&PieceEncoder>,
    stop_ids: &[u32],
    template: Option<&ChatTemplate>,
) -> Vec<ControlToken> {
    let added = tokenizer
        .get_added_vocabulary()
        .get_added_tokens_decoder()
        .iter();
    let added = added.map(|(id, token)| (*id, &token.content[..], token.special));
    let user_defined = pieces.into_iter().flat_map(PieceEncoder::user_defined);
    let all = added.chain(user_defined.map(|(id, text)| (id, text, false)));
    let tokens = all.filter_map(|(id, text, special)| {
        let is_special = special || stop_ids.contains(&id);
        let is_of_template = !is_special
            && !text.trim().is_empty()
            && template.is_some_and(|template| template.source().contains(text));
        (is_special || is_of_template).then(|| ControlToken {
            text: text.to_owned(),
            is_of_template,
        })
    });
    tokens.filter(|token| !token.text.is_empty()).collect()
}

impl Tokenizer {
    /// Renders a conversation by the model's chat template, for [`encode_chat`](Self::encode_chat).
    ///
    /// # Errors
    ///
    /// There is no template, or it fails as in [`ChatTemplate::render`].
    pub fn render_chat(
        &self,
        messages: &[Message],
        prompt: GenerationPrompt,
        tokens: MessageTokens,
    ) -> Result<Conversation, TextError> {
        let template = self.chat_template().ok_or(TextError::NoTemplate)?;
        let plain = |text| Conversation { text, mark: None };
        let all: Vec<&str> = self
            .control_tokens
            .iter()
            .map(|token| &*token.text)
            .collect();
        if tokens == MessageTokens::Trusted
            || !messages.iter().any(|message| has_marks(message, &all))
        {
            return template.render(messages, prompt).map(plain);
        }
        let mark = unused_character(messages, template)?;
        let unmarked = template.render(messages, prompt)?;
        if let Ok(text) = template.render(&marked(messages, &all, mark), prompt)
            && text.replace(mark, "") == unmarked
        {
            let mark = Some(mark);
            return Ok(Conversation { text, mark });
        }
        // The template searches messages for tokens, such as `</think>`: those that are not special must stay in one piece.
        let special = self.control_tokens.iter();
        let special: Vec<&str> = special
            .filter(|token| !token.is_of_template)
            .map(|token| &*token.text)
            .collect();
        if !messages.iter().any(|message| has_marks(message, &special)) {
            return Ok(plain(unmarked));
        }
        let text = template.render(&marked(messages, &special, mark), prompt)?;
        let mark = Some(mark);
        Ok(Conversation { text, mark })
    }

    /// Encodes a conversation, with the special tokens that its template writes.
    ///
    /// # Errors
    ///
    /// [`TextError::Encode`].
    pub fn encode_chat(&self, conversation: &Conversation) -> Result<Vec<u32>, TextError> {
        let Conversation { text, mark } = conversation;
        let Some(mark) = *mark else {
            return self.encode(text, SpecialTokens::Omit);
        };
        let inner = &self.inner;
        let failed = |source| TextError::Encode {
            bytes: text.len(),
            source,
        };
        if let Some(pieces) = &self.pieces {
            let encode = || self.encode_parts(pieces, text, Some(mark), SpecialTokens::Omit);
            return Ok(guarded(encode).map_err(failed)?.get_ids().to_vec());
        }
        if !keeps(inner.get_normalizer(), mark) {
            // The pieces are encoded separately.
            let pieces = text
                .split(mark)
                .map(|piece| self.encode(piece, SpecialTokens::Omit));
            return Ok(pieces.collect::<Result<Vec<_>, _>>()?.concat());
        }
        // As `encode`, except for the second step.
        let encode = || {
            let vocabulary = inner.get_added_vocabulary();
            let mut pieces = vocabulary.extract_and_normalize(inner.get_normalizer(), text);
            pieces.split(|_, mut piece| {
                piece.replace(mark, "")?;
                Ok([piece])
            })?;
            if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            inner
                .get_model()
                .tokenize_in_pretokenized(&mut pieces, None)?;
            let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
            inner.post_process(encoding, None, false)
        };
        Ok(guarded(encode).map_err(failed)?.get_ids().to_vec())
    }
}

/// Whether the normalizer leaves `mark` as it is.
fn keeps(normalizer: Option<&NormalizerWrapper>, mark: char) -> bool {
    let mut text = NormalizedString::from(format!("a{mark}b"));
    let normalized = normalizer.map_or(Ok(()), |normalizer| normalizer.normalize(&mut text));
    normalized.is_ok() && text.get().contains(mark)
}

/// A character for private use that neither a message nor the template contains.
fn unused_character(messages: &[Message], template: &ChatTemplate) -> Result<char, TextError> {
    let is_private = |character: &char| *character >= '\u{f0000}';
    let texts = messages.iter().map(|message| &*message.content);
    let used: HashSet<char> = texts
        .chain([template.source()])
        .flat_map(str::chars)
        .filter(is_private)
        .collect();
    let unused = ('\u{f0000}'..='\u{ffffd}').find(|character| !used.contains(character));
    unused.ok_or_else(|| TextError::TemplateRefused {
        origin: template.origin().to_owned(),
        reason: "the messages contain all characters for private use".to_owned(),
    })
}

/// The messages with `mark` within each of `tokens`.
fn marked(messages: &[Message], tokens: &[&str], mark: char) -> Vec<Message> {
    let marked = messages.iter().map(|message| {
        let mut content = String::new();
        let mut start = 0;
        for end in places(&message.content, tokens) {
            content.push_str(&message.content[start..end]);
            content.push(mark);
            start = end;
        }
        content.push_str(&message.content[start..]);
        Message {
            role: message.role.clone(),
            content,
        }
    });
    marked.collect()
}

fn has_marks(message: &Message, tokens: &[&str]) -> bool {
    !places(&message.content, tokens).is_empty()
}

/// The positions in `content` where marks go: after the first character of each of `tokens`, and next to the first and last word
/// if a token might begin or end there, in what the template or another message adds. Templates may trim contents, so marks go
/// inside any spaces at the ends.
fn places(content: &str, tokens: &[&str]) -> Vec<usize> {
    let text = content.trim();
    let start = content.len() - content.trim_start().len();
    let end = start + text.len();
    let mut places = Vec::new();
    for token in tokens {
        let first = token.chars().next().map_or(0, char::len_utf8);
        let mut from = 0;
        while let Some(found) = content[from..].find(token) {
            from += found + first;
            places.push(from);
        }
        let splits = token.char_indices().skip(1);
        for (head, tail) in splits.map(|(index, _)| token.split_at(index)) {
            places.extend(text.ends_with(head).then_some(end));
            places.extend(text.starts_with(tail).then_some(start));
        }
        if !text.is_empty() && token.contains(text) {
            places.extend([start, end]);
        }
    }
    places.sort_unstable();
    places.dedup();
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where marks go, written as `|`.
    fn marks(content: &str, tokens: &[&str]) -> String {
        let message = Message {
            role: String::new(),
            content: content.to_owned(),
        };
        marked(&[message], tokens, '|').remove(0).content
    }

    #[test]
    fn marks_interrupt_tokens_and_what_may_become_one() {
        assert_eq!(marks(" a </s>b</s> ", &["</s>"]), " a <|/s>b<|/s> ");
        assert_eq!(marks("aaa", &["aa"]), "|a|a|a|", "tokens that overlap");
        assert_eq!(marks("x </ ", &["</s>"]), "x </| ", "it may go on");
        assert_eq!(marks(" s> x", &["</s>"]), " |s> x", "it may have begun");
        assert_eq!(marks("/s", &["</s>"]), "|/s|", "both");
        assert_eq!(marks("a < b", &["</s>"]), "a < b");
        assert_eq!(marks("", &["</s>"]), "");
        assert_eq!(marks("é<ü>", &["<ü>"]), "é<|ü>");
    }
}
