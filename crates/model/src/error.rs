//! Errors of checkpoints and models.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, listed};

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
    /// The path is a known kind of file or folder, but not a model.
    #[error("`{path}` is {what}, not a model; {remedy}")]
    NotAModel {
        /// The file or folder.
        path: PathBuf,
        /// Description of what the path is instead.
        what: String,
        /// Advice for the user.
        remedy: &'static str,
    },
    /// The folder's weights are in a format that only other programs read.
    #[error(
        "the weights in `{folder}` are in a format of {format}: `{file}`; get the model's safetensors, PyTorch or GGUF files"
    )]
    OtherFormat {
        /// The folder.
        folder: PathBuf,
        /// The weight file.
        file: String,
        /// Program or library that uses the format.
        format: &'static str,
    },
    /// The folder has several GGUF models.
    #[error(
        "`{folder}` has several GGUF models: {}; give the path of one",
        listed(files)
    )]
    SeveralGguf {
        /// The folder.
        folder: PathBuf,
        /// Names of the files; for a split file, of its first part.
        files: Vec<String>,
    },
    /// The model is of a known kind that is not supported.
    #[error("`{path}`: {kind} are not supported ({cause}); {remedy}")]
    UnsupportedKind {
        /// The configuration or GGUF file.
        path: PathBuf,
        /// The setting or name that reveals the kind.
        cause: String,
        /// The kind, in the plural.
        kind: &'static str,
        /// Advice for the user.
        remedy: &'static str,
    },
    /// The weights are quantised by a method that is not supported.
    #[error(
        "`{path}`: the weights are quantised by {method}, which is not supported; use the original checkpoint in bfloat16, float16 or float32, or a GGUF file of the model"
    )]
    QuantisedWeights {
        /// The configuration or folder.
        path: PathBuf,
        /// The method.
        method: String,
    },
    /// Shards listed in the index are missing.
    #[error(
        "`{folder}` has no {}, which `{index}` lists; download {} again",
        listed(shards),
        pronoun(shards)
    )]
    MissingShards {
        /// The folder.
        folder: PathBuf,
        /// The index file.
        index: String,
        /// The shards.
        shards: Vec<String>,
    },
    /// Parts of a split file are missing.
    #[error("{} of the split file `{path}` {} missing in its folder; download {} too", listed(parts), if parts.len() == 1 { "is" } else { "are" }, pronoun(parts))]
    MissingParts {
        /// A part that exists.
        path: PathBuf,
        /// Names of the missing parts.
        parts: Vec<String>,
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
        "`{path}`: the key `{key}` ({value}) is not supported and may change what the model computes"
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
    #[error(
        "tensor `{tensor}` in `{path}` is stored as {found}, but only F32, F16 and BF16 are supported; use the original checkpoint, or a GGUF file of the model"
    )]
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
    #[error("`{model}` cannot be exported as {architecture}: {reason}")]
    NotInGguf {
        /// The model's name.
        model: String,
        /// Architecture and variant of the format.
        architecture: String,
        /// Feature that the format cannot state.
        reason: String,
        /// The remedy, if it takes an option.
        hint: Option<Hint>,
    },
    /// A GGUF file cannot represent the tokenizer.
    #[error("`{path}` cannot be exported to GGUF: {reason}")]
    TokenizerNotInGguf {
        /// The tokenizer.
        path: PathBuf,
        /// Feature that the format cannot represent.
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

fn pronoun(names: &[String]) -> &'static str {
    if names.len() == 1 { "it" } else { "them" }
}

impl ModelError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Artifact(error) => error.hint(),
            Self::TokenizerNotInGguf { .. } => Some(Hint::NoTokenizer),
            Self::NotInGguf { hint, .. } => *hint,
            _ => None,
        }
    }
}
