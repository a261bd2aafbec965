//! Errors of checkpoints and models.

use std::path::PathBuf;

use powerinfer_artifact::ArtifactError;

/// Error of opening a checkpoint or running a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The folder or file does not exist.
    #[error(
        "there is no model at `{path}`; a model is a folder with `config.json`, weights and a tokenizer, a GGUF file, `org/name` on the hub, or `demo`"
    )]
    NoSuchFolder {
        /// The path given.
        path: PathBuf,
    },
    /// Logits are NaN or infinite.
    #[error(
        "the logits are not finite: weights, activations or settings of the model exceed the number formats"
    )]
    LogitsNotFinite,
    /// A required file is missing.
    #[error(
        "`{folder}` is not a checkpoint: it has no `{file}`; point to a Hugging Face model folder"
    )]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// The file.
        file: String,
    },
    /// A shard listed in the index is missing.
    #[error("`{folder}` has no shard `{shard}`, which `{index}` lists; download it again")]
    MissingShard {
        /// The folder.
        folder: PathBuf,
        /// The index file.
        index: String,
        /// The shard.
        shard: String,
    },
    /// A shard name in the index is a path outside the folder.
    #[error(
        "`{path}` places tensor `{tensor}` in `{shard}`, which is not a file name inside the folder; refusing to open it"
    )]
    ShardOutside {
        /// The index file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name given.
        shard: String,
    },
    /// A value in the configuration is not supported.
    #[error("`{path}`: {key} is {value}, which is not supported; {supported}")]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// Supported values.
        supported: String,
    },
    /// A key in the configuration is unknown and may change the result.
    #[error(
        "`{path}`: the key `{key}` ({value}) is unknown and may change what the model computes; remove it if it does not"
    )]
    UnknownKey {
        /// The configuration.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// The model does not use a tensor.
    #[error(
        "tensor `{tensor}` in `{path}` is not used by a model of the family {family} with this `config.json`; the files do not belong together"
    )]
    UnusedTensor {
        /// The file.
        path: PathBuf,
        /// The family.
        family: String,
        /// The tensor.
        tensor: String,
    },
    /// The configuration contradicts itself.
    #[error("`{path}`: {reason}")]
    BadConfig {
        /// The configuration.
        path: PathBuf,
        /// The contradiction.
        reason: String,
    },
    /// A required tensor is in none of the files.
    #[error("`{path}` has no tensor `{tensor}`; the checkpoint is incomplete, download it again")]
    MissingTensor {
        /// The folder or file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The shape of a tensor contradicts the configuration.
    #[error(
        "tensor `{tensor}` in `{path}` has shape {found:?}, `config.json` requires {expected:?}; the files do not belong together"
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Shape required by the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// The element type of a tensor is not supported.
    #[error("tensor `{tensor}` in `{path}` is stored as {found}; supported are F32, F16 and BF16")]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Element type.
        found: String,
    },
    /// The GGUF file is damaged or of an unsupported kind.
    #[error("`{path}` cannot be read as GGUF: {reason}")]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// Description and location of the problem.
        reason: String,
    },
    /// A GGUF file cannot state a setting of the model.
    #[error("`{path}` cannot be exported as {architecture}: {reason}")]
    NotInGguf {
        /// The configuration.
        path: PathBuf,
        /// Architecture and variant of the format.
        architecture: String,
        /// What cannot be stated, and what to do.
        reason: String,
    },
    /// A GGUF file cannot represent the tokenizer.
    #[error(
        "`{path}` cannot be exported to GGUF: {reason}; `--no-tokenizer` exports the weights without it"
    )]
    TokenizerNotInGguf {
        /// The tokenizer.
        path: PathBuf,
        /// What cannot be represented.
        reason: String,
    },
    /// A file of the tokenizer is damaged, or of an unsupported kind.
    #[error("the tokenizer in `{path}` cannot be used: {reason}")]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// Description of the problem, and what to do.
        reason: String,
    },
    /// A weight is NaN or infinite.
    #[error(
        "tensor `{tensor}` in `{path}` has the value {value} at index {index}; the checkpoint is damaged, download or train it again"
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index in the tensor.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A token id is outside the vocabulary.
    #[error(
        "token id {token} is not in the vocabulary of {vocabulary} tokens; the tokenizer belongs to another model"
    )]
    TokenOutside {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// The sequence would exceed the context.
    #[error(
        "{tokens} tokens do not fit the context of {limit}; shorten the prompt or generate fewer tokens"
    )]
    ContextFull {
        /// Length of the sequence in tokens.
        tokens: usize,
        /// Size of the context in tokens.
        limit: usize,
    },
    /// The tensor library of the reference engine failed.
    #[error("the reference engine failed: {0}")]
    Reference(String),
    /// A device failed.
    #[error("{0}")]
    Device(String),
    /// A file of the checkpoint cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl ModelError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<powerinfer_artifact::Hint> {
        match self {
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
