//! What can be wrong with a checkpoint.

use std::path::PathBuf;

use powerinfer_artifact::ArtifactError;

/// A checkpoint that cannot be used, or a request to a model that it cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is no such folder or file.
    #[error(
        "there is no model at `{path}`; a model is a folder with `config.json`, weights and `tokenizer.json`, a GGUF file, `org/name` on the hub, or the word `demo`"
    )]
    NoSuchFolder {
        /// What was asked for.
        path: PathBuf,
    },
    /// A file that every checkpoint has is missing.
    #[error(
        "`{folder}` is not a checkpoint: it has no `{file}`; point to a Hugging Face model folder"
    )]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// The file.
        file: String,
    },
    /// A shard named by the index is missing.
    #[error("`{folder}` lacks the shard `{shard}` that `{index}` names; download it again")]
    MissingShard {
        /// The folder.
        folder: PathBuf,
        /// The index file.
        index: String,
        /// The shard.
        shard: String,
    },
    /// A shard name that leaves the folder.
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
    /// A configuration this program cannot run.
    #[error("`{path}`: {key} is {value}, which is not supported; {supported}")]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What would be.
        supported: String,
    },
    /// A key that no family description reads and that may change what is computed.
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
    /// A tensor that the model has no use for.
    #[error(
        "tensor `{tensor}` in `{path}` is left over: a model of the family {family} with this `config.json` does not have it; the files do not belong together"
    )]
    LeftOver {
        /// The file.
        path: PathBuf,
        /// The family.
        family: String,
        /// The tensor.
        tensor: String,
    },
    /// A configuration that contradicts itself.
    #[error("`{path}`: {reason}")]
    BadConfig {
        /// The configuration.
        path: PathBuf,
        /// The contradiction.
        reason: String,
    },
    /// A tensor that must be there is in none of the files.
    #[error("`{path}` has no tensor `{tensor}`; the checkpoint is incomplete, download it again")]
    MissingTensor {
        /// The folder or file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that contradicts the configuration.
    #[error(
        "tensor `{tensor}` in `{path}` has shape {found:?}, `config.json` asks for {expected:?}; the files do not belong together"
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
        /// The shape there.
        found: Vec<usize>,
    },
    /// A tensor in an element type we cannot read.
    #[error(
        "tensor `{tensor}` in `{path}` is stored as {found}; only F32, F16 and BF16 weights can be read"
    )]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The element type.
        found: String,
    },
    /// A GGUF file that is damaged or of a kind that is not read.
    #[error("`{path}` cannot be read as GGUF: {reason}")]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A weight that is no number.
    #[error(
        "tensor `{tensor}` in `{path}` has the value {value} at index {index}; the checkpoint is damaged, download or train it again"
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where in the tensor.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A token id past the vocabulary.
    #[error(
        "token id {token} is not in the vocabulary of {vocabulary} tokens; the tokenizer belongs to another model"
    )]
    TokenOutside {
        /// The id.
        token: u32,
        /// How many there are.
        vocabulary: usize,
    },
    /// More tokens than the context holds.
    #[error(
        "{asked} tokens do not fit the context of {limit}; shorten the prompt or generate fewer tokens"
    )]
    ContextFull {
        /// Tokens in all.
        asked: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// The forward pass failed inside the tensor library.
    #[error("the reference engine failed: {0}")]
    Reference(String),
    /// The forward pass failed on a device.
    #[error("{0}")]
    Device(String),
    /// A file of the checkpoint cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl ModelError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<powerinfer_artifact::Hint> {
        match self {
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
