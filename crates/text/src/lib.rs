//! Text in, token ids out, and back: Hugging Face tokenizers, chat templates, streaming decode.
//!
//! ```text
//! messages ──ChatTemplate::render──▶ text ──Tokenizer::encode──▶ ids
//!                                    text ◀─Tokenizer::decode─── ids
//!                          text, piece by piece ◀─StreamDecoder── ids, one by one
//! ```
//!
//! A rendered conversation already contains the special tokens its template writes, the
//! beginning-of-text token among them: encode it with [`SpecialTokens::Omit`].

mod chat;
mod error;
mod python_json;
mod settings;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, GenerationPrompt, Message};
pub use error::TextError;
pub use settings::SpecialToken;
pub use stream::StreamDecoder;
pub use tokenizer::{SpecialText, SpecialTokens, Tokenizer};
