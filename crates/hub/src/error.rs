//! Why a model could not be fetched.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, progress::Interrupted};

/// A model that is not to be had, or an answer of the hub that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No name of a model on the hub.
    #[error(
        "`{text}` is not the name of a model on the hub: {reason}; write `organization/name` or `organization/name@revision`"
    )]
    BadName {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An address that is none.
    #[error(
        "`{variable}` is `{value}`, which is not an address ({reason}); write one such as `https://huggingface.co`"
    )]
    BadAddress {
        /// The environment variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A token that cannot be sent.
    #[error(
        "the token for the hub has characters that no token has; set `HF_TOKEN` to the token alone"
    )]
    BadToken,
    /// There is no home folder, and no variable that names the cache.
    #[error("there is no home folder to keep models in; set `HF_HOME` to a folder")]
    NoCacheFolder,
    /// The hub does not know the model, or does not admit to knowing it.
    #[error(
        "`{endpoint}` knows no public model `{model}`, and no file or folder here has that name; {hint}"
    )]
    NoSuchModel {
        /// The hub.
        endpoint: String,
        /// The model.
        model: String,
        /// What to do about it.
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
    /// The model's terms have to be accepted first.
    #[error(
        "access to `{model}` is restricted: {reason}; accept its terms at {address} and set `HF_TOKEN` to a token of that account"
    )]
    Gated {
        /// The model.
        model: String,
        /// What the hub says.
        reason: String,
        /// Where its terms are.
        address: String,
    },
    /// The hub does not let this token do that.
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
        /// What the hub says.
        reason: String,
    },
    /// The hub answers with an error of its own.
    #[error("`{address}` answers HTTP {status}: {reason}; try again later")]
    Status {
        /// What was asked for.
        address: String,
        /// The status.
        status: u16,
        /// What the hub says.
        reason: String,
    },
    /// The hub cannot be reached.
    #[error(
        "cannot reach `{address}`: {reason}; check the connection and `HF_ENDPOINT`, or give a folder on this machine"
    )]
    Unreachable {
        /// What was asked for.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The transfer broke off again and again.
    #[error(
        "`{file}` broke off after {received} of {size} bytes: {reason}; run the same command again to go on where it stopped"
    )]
    BrokeOff {
        /// The file.
        file: String,
        /// Bytes that are here.
        received: u64,
        /// Bytes in all.
        size: u64,
        /// Why.
        reason: String,
    },
    /// An answer that makes no sense.
    #[error("the answer of `{address}` cannot be used: {reason}; check `HF_ENDPOINT`")]
    Protocol {
        /// What was asked for.
        address: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The bytes are not those that the hub promised.
    #[error(
        "`{file}` arrived damaged: its {kind} is {found}, the hub says {expected}; it was removed, run the same command again to fetch it anew"
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
    /// A file name that would leave the folder it belongs to.
    #[error("the hub names a file `{file}`, which is not a path inside a folder; refusing it")]
    HostileName {
        /// The name, harmless to print.
        file: String,
    },
    /// An index that cannot be used.
    #[error("`{model}`: `{index}` {reason}; the model cannot be used as it is on the hub")]
    BadIndex {
        /// The model.
        model: String,
        /// The index.
        index: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The repository holds no weights in a form that is read.
    #[error(
        "`{model}` has no weights that can be read; `model.safetensors`, `pytorch_model.bin` or a GGUF file are"
    )]
    NoWeights {
        /// The model.
        model: String,
    },
    /// Several GGUF files, none of which is meant more than the others.
    #[error("`{model}` holds several GGUF files: {}; name one with `powerinfer pull {model} --file NAME` and give the path it prints", files.join(", "))]
    SeveralGguf {
        /// The model.
        model: String,
        /// The files.
        files: Vec<String>,
    },
    /// The network is not to be used, and the cache does not have it all.
    #[error(
        "`{model}` is not completely in `{cache}`, and `HF_HUB_OFFLINE` forbids the network; unset it, or pull the model where there is one"
    )]
    NotCached {
        /// The model or the file of it.
        model: String,
        /// The cache.
        cache: PathBuf,
    },
    /// A file of the cache cannot be read or written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The user asked to stop.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}
