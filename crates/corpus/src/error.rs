//! Errors of reading documents, and the reasons why files and records are skipped.

use std::{io, path::PathBuf};

use powerinfer_text::TextError;

use crate::{Format, record, unpack::MAX_RECORD};

/// Errors that stop the reading of all documents.
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
        /// Number of tokens in the model's vocabulary.
        vocabulary_size: usize,
    },
    /// A text cannot be encoded.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Reason why a file or a record is not used. The message continues a sentence that names the file or record.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The file or record has no text.
    #[error("is empty")]
    Empty,
    /// The file is text in another encoding, or not text.
    #[error("is not UTF-8 text; convert it")]
    NotUtf8,
    /// The file contains NUL characters, so it is binary.
    #[error("is binary, not text")]
    Binary,
    /// The format is not supported.
    #[error("is {0}, which is not supported; extract or convert it")]
    Foreign(&'static str),
    /// The file is a Git LFS pointer.
    #[error("is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`")]
    LfsPointer,
    /// A file in a folder has an unknown extension.
    #[error("has an unknown extension; give its own path if it is text")]
    UnknownKind,
    /// None of the known keys is present.
    #[error("has the keys {}, but none of {}", record::listed(.0), record::known_keys())]
    Keys(Vec<String>),
    /// The record is neither an object nor a string.
    #[error("is {0}, not an object or a string")]
    Kind(&'static str),
    /// A message lacks its role or its text.
    #[error("has a message without `role` and `content`, or `from` and `value`")]
    Messages,
    /// The record is a conversation, but the model has no chat template.
    #[error("is a conversation, and the model has no chat template")]
    NoTemplate,
    /// The chat template fails to render the conversation.
    #[error("is a conversation that the model's chat template does not render: {0}")]
    NotRendered(TextError),
    /// The file or record is not valid in its format.
    #[error("is not valid {}: {reason}", format.name())]
    Invalid {
        /// The format.
        format: Format,
        /// The defect.
        reason: String,
    },
    /// A record exceeds the size limit.
    #[error("has a record of more than {} MiB", MAX_RECORD >> 20)]
    TooLong,
    /// None of the file's records can be used.
    #[error("has no usable record: record {number} {reason}")]
    NoRecord {
        /// Number of the first record that cannot be used, from 1.
        number: usize,
        /// Why that record cannot be used.
        reason: Box<Unusable>,
    },
    /// Reading or decompression fails.
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

/// A file that was skipped, entirely or in part.
#[derive(Debug)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Number of skipped records; `None` if the whole file was skipped.
    pub records: Option<usize>,
    /// Why the file, or the first of the skipped records, was not used.
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
