//! Errors of tokenizers and chat templates.

use std::path::PathBuf;

use powerinfer_guard::worker::WorkerError;
use powerinfer_model::ModelError;

/// Error of reading a tokenizer, encoding, decoding or rendering.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// There is no tokenizer.
    #[error(
        "no tokenizer: `{path}` does not exist, nor `tokenizer.model`, nor `vocab.json` with `merges.txt`; copy it from the original checkpoint"
    )]
    NoTokenizer {
        /// Expected path of `tokenizer.json`.
        path: PathBuf,
    },

    /// A file of the tokenizer or of its settings is damaged or not supported.
    #[error(transparent)]
    File(#[from] ModelError),

    /// A file cannot be read.
    #[error("cannot read `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },

    /// A text file is not UTF-8.
    #[error("`{path}` is not UTF-8; fetch it again")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Position of the first invalid byte.
        source: std::str::Utf8Error,
    },

    /// A settings file is not JSON.
    #[error("`{path}` is not valid JSON; fetch it again")]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Parse error with line and column.
        source: serde_json::Error,
    },

    /// A settings file contains a JSON value that is not an object.
    #[error("`{path}` is not a JSON object; fetch it again")]
    NotAnObject {
        /// The file.
        path: PathBuf,
    },

    /// `chat_template` is neither a text nor a list of named templates.
    #[error(
        "`{path}` sets `chat_template` to neither a template nor a list of templates with `name` and `template`; fetch the file again"
    )]
    BadTemplateEntry {
        /// The settings file.
        path: PathBuf,
    },

    /// `tokenizer.json` is invalid or uses unsupported features.
    #[error("`{path}` does not describe a tokenizer; it is damaged or newer than this program")]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// Error of the tokenizers library.
        source: tokenizers::Error,
    },

    /// A settings file names a special token that is not in the vocabulary.
    #[error(
        "`{path}` sets `{key}` to `{token}`, which is not in the vocabulary; take all \
         files from the same checkpoint"
    )]
    UnknownSpecialToken {
        /// The settings file.
        path: PathBuf,
        /// `bos_token` or `eos_token`.
        key: &'static str,
        /// The token.
        token: String,
    },

    /// The tokenizer failed to encode a text.
    #[error("the tokenizer failed to encode a text of {bytes} bytes")]
    Encode {
        /// Length of the text in bytes.
        bytes: usize,
        /// Error of the tokenizers library.
        source: tokenizers::Error,
    },

    /// The tokenizer failed to decode a sequence of ids.
    #[error("the tokenizer failed to decode a sequence of {count} ids")]
    Decode {
        /// Number of ids.
        count: usize,
        /// Error of the tokenizers library.
        source: tokenizers::Error,
    },

    /// An id is not in the vocabulary: model and tokenizer do not match.
    #[error(
        "token id {id} is not in the vocabulary of {vocabulary_size} tokens; use the tokenizer \
         that came with the model"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocabulary_size: usize,
    },

    /// The chat template is not valid Jinja, or uses unsupported extensions.
    #[error(
        "chat template `{origin}` cannot be parsed; repair it, or remove it to prompt without one: {reason}"
    )]
    TemplateSyntax {
        /// File (and name) of the template.
        origin: String,
        /// Error with line number.
        reason: String,
    },

    /// The chat template called `raise_exception`.
    #[error("chat template `{origin}` refuses the messages: {reason}")]
    TemplateRefused {
        /// File (and name) of the template.
        origin: String,
        /// Message of the template.
        reason: String,
    },

    /// The chat template failed to render.
    #[error("chat template `{origin}` failed on these messages: {reason}")]
    TemplateFailed {
        /// File (and name) of the template.
        origin: String,
        /// Error with line number.
        reason: String,
    },

    /// A conversation needs a chat template.
    #[error("the model has no chat template; prompt without one")]
    NoTemplate,

    /// The process that renders chat templates gave no answer.
    #[error("the process that renders chat template `{origin}` failed: {reason}")]
    TemplateWorker {
        /// File (and name) of the template.
        origin: String,
        /// The cause.
        reason: WorkerError,
    },
}
