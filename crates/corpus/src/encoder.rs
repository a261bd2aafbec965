//! [`Encoder`]: converts documents to token ids.

use powerinfer_text::{GenerationPrompt, Message, MessageTokens, SpecialTokens, Tokenizer};

use crate::{CorpusError, Unusable};

/// Document to encode: a text or a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Text.
    Text(String),
    /// Messages of a conversation.
    Chat(Vec<Message>),
}

/// Whether the end-of-text token follows a text. The end of a conversation is up to the chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOfText {
    /// Add the end-of-text token if the tokenizer has one.
    Add,
    /// Leave the end-of-text token out.
    Omit,
}

/// Encodes documents for a model.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    /// Tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Number of tokens in the model's vocabulary.
    pub vocabulary_size: usize,
    /// Whether texts end with the end-of-text token.
    pub end: EndOfText,
}

impl Encoder<'_> {
    /// Returns the token ids of `text`, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    ///
    /// The text cannot be encoded, or a token is outside the vocabulary.
    pub fn text(&self, text: &str) -> Result<Vec<u32>, CorpusError> {
        let mut ids = self.tokenizer.encode(text, SpecialTokens::Add)?;
        if self.end == EndOfText::Add {
            ids.extend(self.tokenizer.eos().map(|end| end.id));
        }
        self.checked(ids)
    }

    /// Returns the token ids of a conversation, rendered by the model's chat template. The inner error concerns only this
    /// conversation.
    pub(crate) fn chat(
        &self,
        messages: &[Message],
    ) -> Result<Result<Vec<u32>, Unusable>, CorpusError> {
        if self.tokenizer.chat_template().is_none() {
            return Ok(Err(Unusable::NoTemplate));
        }
        let (prompt, tokens) = (GenerationPrompt::Omit, MessageTokens::Plain);
        match self.tokenizer.render_chat(messages, prompt, tokens) {
            Ok(conversation) => {
                let ids = self.tokenizer.encode_chat(&conversation)?;
                self.checked(ids).map(Ok)
            }
            Err(reason) => Ok(Err(Unusable::NotRendered(reason))),
        }
    }

    fn checked(&self, ids: Vec<u32>) -> Result<Vec<u32>, CorpusError> {
        let outside = |token: &&u32| **token as usize >= self.vocabulary_size;
        match ids.iter().find(outside) {
            Some(token) => Err(CorpusError::OtherTokenizer {
                token: *token,
                vocabulary_size: self.vocabulary_size,
            }),
            None => Ok(ids),
        }
    }
}
