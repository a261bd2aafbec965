//! Errors of reading documents, and the reasons for which files and records are skipped.

use std::{io, path::PathBuf};

use powerinfer_text::TextError;

use crate::{Format, record, unpack::MAX_RECORD};

/// Documents that cannot be read at all.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// A folder cannot be listed.
    #[error("cannot read `{path}`")]
    Read {
        /// The folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A token is outside the model's vocabulary.
    #[error(
        "the tokenizer gives token {token}, the model has {vocabulary_size} tokens; they do not belong together"
    )]
    OtherTokenizer {
        /// The token's id.
        token: u32,
        /// Tokens of the model.
        vocabulary_size: usize,
    },
    /// A text cannot be encoded.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Why a file or a record is not used. Messages continue a sentence that names it.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// It has no text.
    #[error("is empty")]
    Empty,
    /// It is text in another encoding, or no text.
    #[error("is not UTF-8 text; convert it")]
    NotUtf8,
    /// It contains NUL characters.
    #[error("is binary, not text")]
    Binary,
    /// It has a format that is not read.
    #[error("is {0}, which is not supported; extract or convert it")]
    Foreign(&'static str),
    /// It stands for a file in Git LFS.
    #[error("is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`")]
    LfsPointer,
    /// A file in a folder has an unknown ending.
    #[error("is of an unknown kind; give it by name if it is text")]
    UnknownKind,
    /// The records have none of the known keys.
    #[error("has the keys {}, but none of {}", record::listed(.0), record::known_keys())]
    Keys(Vec<String>),
    /// The record is no object.
    #[error("is {0}, not an object or a string")]
    Kind(&'static str),
    /// A message lacks its role or its text.
    #[error("has a message without `role` and `content`, or `from` and `value`")]
    Messages,
    /// A conversation needs a chat template.
    #[error("is a conversation, and the model has no chat template")]
    NoTemplate,
    /// The chat template does not render the conversation.
    #[error("is a conversation that the model's chat template does not render: {0}")]
    NotRendered(TextError),
    /// It breaks the rules of its format.
    #[error("is not valid {}: {reason}", format.name())]
    Invalid {
        /// The format.
        format: Format,
        /// The defect.
        reason: String,
    },
    /// A record is longer than memory should hold.
    #[error("has a record of more than {} MiB", MAX_RECORD >> 20)]
    TooLong,
    /// None of its records can be used.
    #[error("has no usable record: record {number} {reason}")]
    NoRecord {
        /// Number of the first record that cannot be used, from 1.
        number: usize,
        /// Why.
        reason: Box<Unusable>,
    },
    /// The system or the decompression fails.
    #[error("cannot be read: {0}")]
    Read(io::Error),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::FileTooLarge => Self::TooLong,
            _ => Self::Read(error),
        }
    }
}

/// A file that was not used, or of which some records were not.
#[derive(Debug)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Records that were skipped; `None` if the whole file was.
    pub records: Option<usize>,
    /// Why, of the first record if some were skipped.
    pub reason: Unusable,
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            path,
            records,
            reason,
        } = self;
        match records {
            None => write!(formatter, "`{}` {reason}", path.display()),
            Some(1) => write!(formatter, "a record of `{}` {reason}", path.display()),
            Some(count) => write!(
                formatter,
                "{count} records of `{}`; the first {reason}",
                path.display()
            ),
        }
    }
}
