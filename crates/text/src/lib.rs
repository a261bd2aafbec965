//! Tokenizers, chat templates and streaming decode, in the formats of Hugging Face.
//!
//! ```text
//! messages ──Tokenizer::render_chat──▶ Conversation ──Tokenizer::encode_chat──▶ ids
//!                                      text ──Tokenizer::encode──▶ ids
//!                                      text ◀─Tokenizer::decode─── ids
//!                     text, in pieces ◀──StreamDecoder── ids, one at a time
//! ```
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod chat;
mod conversation;
mod error;
mod guard;
mod pieces;
mod python_filters;
mod python_json;
mod python_methods;
mod python_syntax;
mod settings;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, GenerationPrompt, Message, WORK as TEMPLATE_WORK};
pub use conversation::{Conversation, MessageTokens};
pub use error::TextError;
pub use settings::SpecialToken;
pub use stream::StreamDecoder;
pub use tokenizer::{SpecialText, SpecialTokens, Tokenizer};
