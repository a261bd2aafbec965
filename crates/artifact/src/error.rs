//! What can be wrong with a file of ours, or with a tensor file of anybody's.

use std::path::{Path, PathBuf};

use crate::{ByteSize, Hint, ModelIdentity, progress::Interrupted};

/// A file that cannot be read, written, or used here.
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
    /// There is no room for the bytes of a file, or the system does not let them be locked.
    #[error("cannot keep the {bytes} of `{path}` in memory: {source}")]
    Hold {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: ByteSize,
        /// The reason.
        source: std::io::Error,
    },
    /// The file is no tensor file, or a damaged one.
    #[error(
        "`{path}` is not a valid safetensors file: {reason}; it may be truncated, fetch or make it again"
    )]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What the reader tripped over.
        reason: String,
    },
    /// The file is no JSON of the expected shape.
    #[error("`{path}` is not the JSON expected here: {source}")]
    NotJson {
        /// The file.
        path: PathBuf,
        /// Line, column and field.
        source: serde_json::Error,
    },
    /// A tensor that must be there is not.
    #[error("`{path}` has no tensor `{tensor}`")]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another type or shape than it must have.
    #[error("tensor `{tensor}` in `{path}` is {found}, expected {expected}")]
    WrongTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Type and shape needed.
        expected: String,
        /// Type and shape there.
        found: String,
    },
    /// A tensor that does not lie on a boundary of its element type.
    #[error("tensor `{tensor}` in `{path}` is not aligned; write the file again with powerinfer")]
    Unaligned {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The file carries no header of ours, or one for another kind of artifact.
    #[error("`{path}` is {found}, not a {expected}")]
    WrongFormat {
        /// The file.
        path: PathBuf,
        /// The format needed.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The file was written by a newer program.
    #[error(
        "`{path}` is {format} version {found}, this program reads up to version {supported}; update powerinfer (the file was written by {tool})"
    )]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: String,
        /// Its version.
        found: u32,
        /// The newest version known here.
        supported: u32,
        /// The program that wrote it.
        tool: String,
    },
    /// The file was written by an older program in a form no longer read.
    #[error(
        "`{path}` is {format} version {found}, this program reads version {supported}; make it again"
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: String,
        /// Its version.
        found: u32,
        /// The version known here.
        supported: u32,
    },
    /// The file was made for another model.
    #[error(
        "`{path}` was made for another model: it belongs to {found}, the model here is {expected}; make it again for this model"
    )]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The model in use.
        expected: Box<ModelIdentity>,
        /// The model in the header.
        found: Box<ModelIdentity>,
    },
    /// A folder that would be replaced has something else in it.
    #[error(
        "`{path}` exists and was not made by this command (it has no `{manifest}` written by powerinfer)"
    )]
    Foreign {
        /// What is there.
        path: PathBuf,
        /// The file that would tell that it is ours.
        manifest: String,
    },
    /// Another run works in the same place.
    #[error("another run is writing `{path}`")]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// The bytes are not those that the manifest promises.
    #[error(
        "`{path}` is damaged: its digest is {found}, the manifest says {expected}; make it again"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The digest promised.
        expected: String,
        /// The digest found.
        found: String,
    },
    /// The bytes are not those that the file's own header promises.
    #[error(
        "`{path}` is damaged: its content is not what its header promises; delete it and make it again"
    )]
    DamagedContent {
        /// The file.
        path: PathBuf,
    },
    /// The user asked to stop.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl ArtifactError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Hold { .. } => Some(Hint::NoMemoryLock),
            Self::Foreign { .. } => Some(Hint::OtherFolder),
            Self::Busy { .. } => Some(Hint::WaitOrOtherFolder),
            _ => None,
        }
    }

    /// For `map_err` on a failed read of `path`.
    pub fn read(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Read {
            path: path.to_owned(),
            source,
        }
    }

    /// For `map_err` on a failed write of `path`.
    pub fn write(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source,
        }
    }
}
