//! Where a checkpoint's files come from: a folder, or the program itself.

use std::path::{Path, PathBuf};

use powerinfer_artifact::{ArtifactError, mapped_file::FileBytes};

/// A set of named files.
#[derive(Debug, Clone)]
pub enum Files {
    /// The files of a folder.
    Folder(PathBuf),
    /// Files embedded in the program, under a name for messages.
    Embedded {
        /// What the set is called.
        name: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl Files {
    /// The file called `name`, or `None` where there is none.
    pub fn read(&self, name: &str) -> Result<Option<FileBytes>, ArtifactError> {
        match self {
            Self::Folder(folder) => {
                let path = folder.join(name);
                if path.exists() {
                    FileBytes::open(&path).map(Some)
                } else {
                    Ok(None)
                }
            }
            Self::Embedded { files, .. } => Ok(files
                .iter()
                .find(|(file, _)| *file == name)
                .map(|(_, bytes)| FileBytes::Embedded(bytes))),
        }
    }

    /// Folder of the files, for messages.
    pub fn folder(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder,
            Self::Embedded { name, .. } => Path::new(name),
        }
    }

    /// What a person calls the set: the folder's own name.
    pub fn name(&self) -> String {
        match self {
            Self::Embedded { name, .. } => (*name).to_owned(),
            Self::Folder(folder) => {
                let full = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                full.file_name().map_or_else(
                    || "model".to_owned(),
                    |name| name.to_string_lossy().into_owned(),
                )
            }
        }
    }
}
