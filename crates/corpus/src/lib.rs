//! Reads documents from text, source code, Markdown, JSON, JSON Lines, CSV and Parquet files, plain or compressed, single
//! or in folders.
//!
//! ```text
//! path ──▶ files ──unpack──▶ bytes ──Format──▶ records ──▶ documents ──Encoder──▶ token ids
//!            └──────────────────┴────────────────┴──▶ skipped, with the reason
//! ```
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod corpus;
mod csv;
mod encoder;
mod error;
mod files;
mod format;
mod json;
mod parquet;
mod record;
mod sink;
mod unpack;

pub use corpus::{Corpus, STDIN};
pub use encoder::{Document, Encoder, EndOfText};
pub use error::{CorpusError, Skipped, Unusable};
pub use format::Format;
pub use parquet::WORK as PARQUET_WORK;
pub use unpack::unpacked;
