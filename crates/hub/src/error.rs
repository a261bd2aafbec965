//! [`HubError`].

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, listed, progress::Interrupted};

/// Why a model could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A text that is not the name of a model on the hub.
    #[error(
        "`{text}` is not the name of a model on the hub: {reason}; write `organization/name` or `organization/name@revision`"
    )]
    BadName {
        /// The text.
        text: String,
        /// Reason.
        reason: &'static str,
    },
    /// An invalid address.
    #[error(
        "`{variable}` is `{value}`, which is not an address ({reason}); write one such as `https://huggingface.co`"
    )]
    BadAddress {
        /// The environment variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Reason.
        reason: String,
    },
    /// A token with characters that HTTP headers cannot hold.
    #[error(
        "the token for the hub has characters that no token has; set `HF_TOKEN` to the token alone"
    )]
    BadToken,
    /// No variable leads to a cache folder.
    #[error("there is no home folder to keep models in; set `HF_HOME` to a folder")]
    NoCacheFolder,
    /// The model does not exist or is hidden from this account.
    #[error(
        "`{endpoint}` knows no public model `{model}`, and no file or folder here has that name; {hint}"
    )]
    NoSuchModel {
        /// The hub.
        endpoint: String,
        /// The model.
        model: String,
        /// The remedy.
        hint: &'static str,
    },
    /// The model has no such revision.
    #[error(
        "`{model}` has no revision `{revision}`; leave out `@{revision}` for its current state"
    )]
    NoSuchRevision {
        /// The model, without the revision.
        model: String,
        /// The revision.
        revision: String,
    },
    /// The revision has no such file.
    #[error("`{model}` has no file `{file}`; it has {known}")]
    NoSuchFile {
        /// The model.
        model: String,
        /// The file.
        file: String,
        /// Files that it has.
        known: String,
    },
    /// The model's terms must be accepted first.
    #[error(
        "access to `{model}` is restricted: {reason}; accept its terms at {address} and set `HF_TOKEN` to a token of that account"
    )]
    Gated {
        /// The model.
        model: String,
        /// The hub's message.
        reason: String,
        /// Address of the terms.
        address: String,
    },
    /// The token may not read the model.
    #[error(
        "`{endpoint}` refuses access to `{model}` (HTTP {status}): {reason}; set `HF_TOKEN` to a token that may read it"
    )]
    Refused {
        /// The hub.
        endpoint: String,
        /// The model.
        model: String,
        /// 401 or 403.
        status: u16,
        /// The hub's message.
        reason: String,
    },
    /// Another error status.
    #[error("`{address}` answers HTTP {status}: {reason}")]
    Status {
        /// The requested address.
        address: String,
        /// The status.
        status: u16,
        /// The hub's message.
        reason: String,
    },
    /// The hub cannot be reached.
    #[error("cannot reach `{address}`: {reason}")]
    Unreachable {
        /// The requested address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// The transfer broke off repeatedly.
    #[error(
        "`{file}` broke off after {received} of {size} bytes: {reason}; run the same command again to resume"
    )]
    BrokeOff {
        /// The file.
        file: String,
        /// Bytes received.
        received: u64,
        /// Bytes in all.
        size: u64,
        /// The reason.
        reason: String,
    },
    /// An invalid response.
    #[error("the response of `{address}` cannot be used: {reason}; check `HF_ENDPOINT`")]
    Protocol {
        /// The requested address.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The content has another length or digest than the hub promised.
    #[error(
        "`{file}` arrived damaged: its {kind} is {found} instead of {expected}; it was removed; run the same command again to download it"
    )]
    Damaged {
        /// The file.
        file: String,
        /// The kind of digest.
        kind: &'static str,
        /// The digest promised.
        expected: String,
        /// The digest found.
        found: String,
    },
    /// A file name that would leave its folder.
    #[error("the hub names a file `{file}`, which is not a path inside a folder; refusing it")]
    HostileName {
        /// The name, without control characters.
        file: String,
    },
    /// An invalid index of shards.
    #[error("`{model}`: `{index}` {reason}; the model cannot be used as it is on the hub")]
    BadIndex {
        /// The model.
        model: String,
        /// The index.
        index: String,
        /// Reason.
        reason: String,
    },
    /// The repository has no weights in a supported format.
    #[error(
        "`{model}` has no weights that can be read: {found}; `model.safetensors`, `pytorch_model.bin` and GGUF files can"
    )]
    NoWeights {
        /// The model.
        model: String,
        /// Description of what the repository has instead.
        found: String,
    },
    /// The repository has several GGUF models and no other weights.
    #[error("`{model}` holds several GGUF models: {}", files.join(", "))]
    SeveralGguf {
        /// The model.
        model: String,
        /// The files; for a split file, the first part.
        files: Vec<String>,
    },
    /// No GGUF model of the repository has the requested quantization in its name.
    #[error("`{model}`: no GGUF file has this quantization in its name; GGUF files there: {}", files.join(", "))]
    NoQuantization {
        /// The model's name, with the quantization.
        model: String,
        /// The GGUF models, or `none`.
        files: Vec<String>,
    },
    /// The repository lacks parts of a split file.
    #[error(
        "`{model}` has `{file}` without {}; the model cannot be used as it is on the hub",
        listed(missing)
    )]
    MissingParts {
        /// The model.
        model: String,
        /// A part that exists.
        file: String,
        /// The missing parts.
        missing: Vec<String>,
    },
    /// The model was refused by the check that precedes the download of weights.
    #[error("{0}")]
    OfNoUse(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The network is forbidden and the cache is incomplete.
    #[error(
        "`{model}` is not completely in `{cache}`, and `HF_HUB_OFFLINE` forbids the network; unset it, or pull the model on a machine with a network"
    )]
    NotCached {
        /// The model, or a file of it.
        model: String,
        /// The cache.
        cache: PathBuf,
    },
    /// A file of the cache that cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The user asked to stop.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl HubError {
    /// Remedy that a command or a flag gives.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::SeveralGguf { .. } => Some(Hint::PullOneFile),
            Self::Status { .. } => Some(Hint::TryLater),
            Self::Unreachable { .. } => Some(Hint::CheckConnection),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
