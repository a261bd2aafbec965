//! Tokenizers, chat templates and streaming decode, in the formats of Hugging Face.
//!
//! ```text
//! messages ──ChatTemplate::render──▶ text ──Tokenizer::encode──▶ ids
//!                                    text ◀─Tokenizer::decode─── ids
//!                   text, in pieces ◀──StreamDecoder── ids, one at a time
//! ```
//!
//! A rendered conversation already contains the special tokens that its template writes, including BOS:
//! encode it with [`SpecialTokens::Omit`].

mod chat;
mod error;
mod guard;
mod python_json;
mod settings;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, GenerationPrompt, Message, WORK as TEMPLATE_WORK};
pub use error::TextError;
pub use settings::SpecialToken;
pub use stream::StreamDecoder;
pub use tokenizer::{SpecialText, SpecialTokens, Tokenizer};
