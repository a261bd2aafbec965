//! Errors of artifacts and tensor files.

use std::path::{Path, PathBuf};

use crate::{ByteSize, Hint, ModelIdentity, progress::Interrupted};

/// Error of reading, writing or checking a file.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The operating system refused to read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The operating system refused to write.
    #[error("cannot write `{path}`: {source}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The bytes of a file cannot be loaded into memory, or locked there.
    #[error("cannot keep the {bytes} of `{path}` in memory: {source}")]
    KeepInMemory {
        /// The file.
        path: PathBuf,
        /// Length of the file.
        bytes: ByteSize,
        /// The reason.
        source: std::io::Error,
    },
    /// The length or modification time of a mapped file has changed since it was opened.
    #[error(
        "`{path}` changed while it was in use; run the command again, and replace files by renaming, not by overwriting them"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file is a Git LFS pointer, which git keeps in place of a large file.
    #[error("`{path}` is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// The file is a web page or an error message that a server sent instead of the file.
    #[error("`{path}` is a web page or an error message of a server; download the file again")]
    WebPage {
        /// The file.
        path: PathBuf,
    },
    /// The file is not in the safetensors format, or is damaged.
    #[error(
        "`{path}` is not a valid safetensors file: {reason}; it may be truncated, fetch or make it again"
    )]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// Message of the parser.
        reason: String,
    },
    /// The file does not contain JSON of the expected structure.
    #[error("`{path}` is not the expected JSON: {source}")]
    NotJson {
        /// The file.
        path: PathBuf,
        /// Parse error with line, column and field.
        source: serde_json::Error,
    },
    /// A value that JSON cannot represent, so that the file would not open again.
    #[error("`{path}` was not written: a figure in it is not finite ({source})")]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Error of reading it again, with the field.
        source: serde_json::Error,
    },
    /// A required tensor is missing.
    #[error("`{path}` has no tensor `{tensor}`")]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another element type or shape than expected.
    #[error("tensor `{tensor}` in `{path}` is {found}, expected {expected}")]
    WrongTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Expected type and shape.
        expected: String,
        /// Type and shape in the file.
        found: String,
    },
    /// The data of a tensor is not aligned to its element type.
    #[error("tensor `{tensor}` in `{path}` is not aligned; write the file again with powerinfer")]
    Unaligned {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The file has no PowerInfer header, or one of another kind of artifact.
    #[error("`{path}` is {found}, not a {expected}")]
    WrongFormat {
        /// The file.
        path: PathBuf,
        /// Expected format.
        expected: String,
        /// Description of what the file is.
        found: String,
    },
    /// The predictors are those of some layers.
    #[error("`{path}` has the predictors of shard {shard} alone")]
    UnmergedShard {
        /// The file.
        path: PathBuf,
        /// The shard.
        shard: String,
    },
    /// The file has a newer format version than this program reads.
    #[error(
        "`{path}` is {format} version {found}, this program reads up to version {supported}; update powerinfer (the file was written by {tool})"
    )]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Format of the file.
        format: String,
        /// Version of the file.
        found: u32,
        /// Newest version that this program reads.
        supported: u32,
        /// Program that wrote the file.
        tool: String,
    },
    /// The file has an older format version, which is no longer read.
    #[error(
        "`{path}` is {format} version {found}, this program reads version {supported}; make it again"
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Format of the file.
        format: String,
        /// Version of the file.
        found: u32,
        /// Version that this program reads.
        supported: u32,
    },
    /// The file was made for another model.
    #[error(
        "`{path}` was made for another model: it belongs to {found}, expected {expected}; make it again for this model"
    )]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The model in use.
        expected: Box<ModelIdentity>,
        /// The model in the file's header.
        found: Box<ModelIdentity>,
    },
    /// The folder to replace, or one next to it, has entries but not the file that identifies it.
    #[error(
        "`{path}` exists and was not made by this command: it has no `{manifest}` of powerinfer, but {found}"
    )]
    NotAnArtifact {
        /// The folder.
        path: PathBuf,
        /// File that identifies a folder of this kind.
        manifest: &'static str,
        /// List of the folder's entries.
        found: String,
    },
    /// The folder to replace, or one next to it, also has entries that are not part of it.
    #[error("`{path}` contains {found}, which powerinfer did not write")]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// List of these entries.
        found: String,
    },
    /// The path of a folder is taken by something that a folder cannot replace.
    #[error("`{path}` is {kind}")]
    NotAFolder {
        /// The path.
        path: PathBuf,
        /// Kind of the entry that was found, such as `a file, not a folder`.
        kind: &'static str,
    },
    /// Another run is writing the same folder.
    #[error("another run is writing `{path}`")]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// The digest of a file differs from the one in the manifest.
    #[error(
        "`{path}` is damaged: its digest is {found}, the manifest says {expected}; make it again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Digest in the manifest.
        expected: String,
        /// Digest of the file.
        found: String,
    },
    /// The content of a file does not match the digest in its own header.
    #[error(
        "`{path}` is damaged: its content does not match the digest in its header; delete it and make it again"
    )]
    DamagedContent {
        /// The file.
        path: PathBuf,
    },
    /// The user interrupted the work.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl ArtifactError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::UnmergedShard { .. } => Some(Hint::MergeShards),
            Self::KeepInMemory { .. } => Some(Hint::NoMemoryLock),
            Self::NotAnArtifact { .. } | Self::NotAFolder { .. } => Some(Hint::OtherFolder),
            Self::Foreign { .. } => Some(Hint::MoveForeign),
            Self::Busy { .. } => Some(Hint::WaitOrOtherFolder),
            _ => None,
        }
    }

    /// Converts the error of reading `path`, for use with `map_err`.
    pub fn read(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Read {
            path: path.to_owned(),
            source,
        }
    }

    /// Converts the error of writing `path`, for use with `map_err`.
    pub fn write(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source,
        }
    }
}
