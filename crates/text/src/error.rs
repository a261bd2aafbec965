//! What can be wrong with a tokenizer, a chat template, or the ids and text given to them.

use std::path::PathBuf;

/// Why text could not be turned into ids or back; the message names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// There is no `tokenizer.json`, nor anything it could be made from.
    #[error("no tokenizer: `{path}` does not exist; copy it from the original checkpoint")]
    NoTokenizer {
        /// Where `tokenizer.json` was expected.
        path: PathBuf,
    },

    /// There is no `tokenizer.json`, only an older form of it.
    #[error(
        "no tokenizer: `{path}` does not exist; {found} cannot be read in its place, convert it \
         once with transformers: `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
    )]
    UnconvertedTokenizer {
        /// Where `tokenizer.json` was expected.
        path: PathBuf,
        /// The older files that are there.
        found: &'static str,
    },

    /// A file is there but reading it failed.
    #[error("cannot read `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// A file that must be text is not; it is damaged or another kind of file.
    #[error("`{path}` is not UTF-8; fetch it again")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Where the first bad byte is.
        source: std::str::Utf8Error,
    },

    /// A settings file is not the JSON it should be.
    #[error("`{path}` is not valid JSON of its kind; fetch it again")]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: serde_json::Error,
    },

    /// `tokenizer.json` does not describe a tokenizer this version knows.
    #[error("`{path}` does not describe a tokenizer; it is damaged or newer than this program")]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// The reason, from the tokenizers library.
        source: tokenizers::Error,
    },

    /// A settings file names a special token that the vocabulary lacks.
    #[error(
        "`{path}` says `{key}` is `{token}`, which `tokenizer.json` does not contain; take both \
         files from the same checkpoint"
    )]
    UnknownSpecialToken {
        /// The settings file.
        path: PathBuf,
        /// `bos_token` or `eos_token`.
        key: &'static str,
        /// The token it names.
        token: String,
    },

    /// The tokenizer's splitting rules failed on this text.
    #[error("the tokenizer cannot split a text of {bytes} bytes")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// The reason, from the tokenizers library.
        source: tokenizers::Error,
    },

    /// The tokenizer's decoder failed on these ids.
    #[error("the tokenizer cannot decode a sequence of {count} ids")]
    Decode {
        /// How many ids there were.
        count: usize,
        /// The reason, from the tokenizers library.
        source: tokenizers::Error,
    },

    /// An id stands for no token, so model and tokenizer do not belong together.
    #[error(
        "token id {id} is not in the vocabulary of {vocabulary_size} tokens; use the tokenizer \
         that came with the model"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// How many tokens there are.
        vocabulary_size: usize,
    },

    /// The chat template is not valid Jinja, or uses an extension of it.
    #[error("chat template `{origin}` cannot be parsed; repair it, or prompt without a template")]
    TemplateSyntax {
        /// The file (and name) the template came from.
        origin: String,
        /// Line and reason.
        source: minijinja::Error,
    },

    /// The chat template called `raise_exception`.
    #[error("chat template `{origin}` refuses the messages: {reason}")]
    TemplateRefused {
        /// The file (and name) the template came from.
        origin: String,
        /// What the template said.
        reason: String,
    },

    /// The chat template failed while it ran.
    #[error("chat template `{origin}` failed on these messages")]
    TemplateFailed {
        /// The file (and name) the template came from.
        origin: String,
        /// Line and reason.
        source: minijinja::Error,
    },
}
