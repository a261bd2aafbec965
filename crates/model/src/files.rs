//! Files of a checkpoint: in a folder, in a GGUF file, or embedded in the program.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{ArtifactError, mapped_file::FileBytes};

use crate::{ModelError, gguf::Gguf};

/// Set of named files.
#[derive(Debug, Clone)]
pub enum Files {
    /// The files of a folder.
    Folder(PathBuf),
    /// Files embedded in the program.
    Embedded {
        /// Name of the set.
        name: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
    /// Files of a folder that are already open; the folder is not read again.
    Opened {
        /// The folder, for messages.
        folder: PathBuf,
        /// Contents by name.
        files: Arc<BTreeMap<String, FileBytes>>,
    },
    /// GGUF file, whose metadata are converted to the files of a Hugging Face folder.
    Gguf(Arc<Gguf>),
    /// Another set under a name given by the user.
    Named {
        /// Name of the set.
        name: String,
        /// The files.
        files: Box<Files>,
    },
}

impl Files {
    /// Opens the files at `path`: a folder, a GGUF file, or a folder that contains only a GGUF file.
    ///
    /// # Errors
    ///
    /// `path` does not exist, or the GGUF file is damaged.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if path.is_file() {
            return Ok(Self::Gguf(Arc::new(Gguf::open(path)?)));
        }
        if !path.is_dir() {
            return Err(ModelError::NoSuchFolder {
                path: path.to_owned(),
            });
        }
        let is_plain = ["config.json", "tokenizer.json", "tokenizer_config.json"]
            .iter()
            .any(|file| path.join(file).exists());
        match &gguf_files(path)[..] {
            [file] if !is_plain => Ok(Self::Gguf(Arc::new(Gguf::open(file)?))),
            _ => Ok(Self::Folder(path.to_owned())),
        }
    }

    /// Renames the set to the name given by the user.
    pub fn named(self, name: &str) -> Self {
        Self::Named {
            name: name.to_owned(),
            files: Box::new(self),
        }
    }

    /// Returns the GGUF file, if the set is one.
    pub(crate) fn gguf(&self) -> Option<&Arc<Gguf>> {
        match self {
            Self::Gguf(gguf) => Some(gguf),
            Self::Named { files, .. } => files.gguf(),
            Self::Folder(_) | Self::Embedded { .. } | Self::Opened { .. } => None,
        }
    }

    /// Returns the folder if the files of the set are read by path.
    pub fn as_folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(folder) => Some(folder),
            Self::Named { files, .. } => files.as_folder(),
            Self::Embedded { .. } | Self::Opened { .. } | Self::Gguf(_) => None,
        }
    }

    /// Reads the file called `name`; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
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
            Self::Opened { files, .. } => Ok(files.get(name).cloned()),
            Self::Gguf(gguf) => Ok(gguf.file(name).map(FileBytes::Owned)),
            Self::Named { files, .. } => files.read(name),
        }
    }

    /// Returns the path of the file called `name`, for messages.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Gguf(gguf) => gguf.path().to_owned(),
            Self::Named { files, .. } => files.path(name),
            _ => self.folder().join(name),
        }
    }

    /// Returns the folder of the files, for messages.
    pub fn folder(&self) -> &Path {
        match self {
            Self::Folder(folder) | Self::Opened { folder, .. } => folder,
            Self::Embedded { name, .. } => Path::new(name),
            Self::Gguf(gguf) => gguf.path(),
            Self::Named { files, .. } => files.folder(),
        }
    }

    /// Returns the display name of the set: the given name, or that of the folder or file.
    pub fn name(&self) -> String {
        match self {
            Self::Embedded { name, .. } => (*name).to_owned(),
            Self::Named { name, .. } => name.clone(),
            Self::Gguf(gguf) => gguf.path().file_stem().map_or_else(
                || "model".to_owned(),
                |name| name.to_string_lossy().into_owned(),
            ),
            Self::Folder(folder) | Self::Opened { folder, .. } => {
                let full = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                full.file_name().map_or_else(
                    || "model".to_owned(),
                    |name| name.to_string_lossy().into_owned(),
                )
            }
        }
    }
}

/// Paths of the `.gguf` files in `folder`, sorted; none if it is no folder.
pub fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        })
        .collect();
    files.sort();
    files
}
