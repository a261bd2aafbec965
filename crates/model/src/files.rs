//! Files of a checkpoint: in a folder, in a GGUF file or its parts, or embedded in the program.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{ArtifactError, PartName, mapped_file::FileBytes};

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
    /// Opens the files at `path`: a folder, a GGUF file or a part of one, or a folder with one GGUF model and no other
    /// weights.
    ///
    /// # Errors
    ///
    /// `path` does not exist, the GGUF file is damaged or lacks parts, or the folder has several GGUF models.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if path.is_file() {
            return Ok(Self::Gguf(Arc::new(Gguf::open(path)?)));
        }
        if !path.is_dir() {
            return Err(ModelError::NoSuchFolder {
                path: path.to_owned(),
            });
        }
        Ok(match gguf_model(path)? {
            Some(file) => Self::Gguf(Arc::new(Gguf::open(&file)?)),
            None => Self::Folder(path.to_owned()),
        })
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

    /// Returns the names of all files, sorted; none for a GGUF file.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = match self {
            Self::Folder(folder) => folder
                .read_dir()
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect(),
            Self::Embedded { files, .. } => {
                files.iter().map(|(name, _)| (*name).to_owned()).collect()
            }
            Self::Opened { files, .. } => files.keys().cloned().collect(),
            Self::Gguf(_) => Vec::new(),
            Self::Named { files, .. } => files.names(),
        };
        names.sort();
        names
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
            Self::Gguf(gguf) => gguf_name(&file_name(gguf.path())).to_owned(),
            Self::Folder(folder) | Self::Opened { folder, .. } => {
                let full = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                file_name(&full)
            }
        }
    }
}

/// Returns the sorted paths of the GGUF models in `folder`; none if it is not a folder. A split file is listed by its first
/// part; image encoders next to a model are left out.
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
    let mut models = BTreeSet::new();
    files.retain(|file| {
        let name = file_name(file);
        let part = PartName::parse(&name);
        models.insert(part.map_or((name.clone(), 1), |part| (part.stem.to_owned(), part.count)))
    });
    let is_encoder = |file: &PathBuf| file_name(file).starts_with("mmproj");
    if !files.iter().all(is_encoder) {
        files.retain(|file| !is_encoder(file));
    }
    files
}

/// Returns the path of the GGUF model in `folder` if the folder has no other weights.
///
/// # Errors
///
/// The folder has several GGUF models.
pub fn gguf_model(folder: &Path) -> Result<Option<PathBuf>, ModelError> {
    let is_weights = |name: &String| {
        name.starts_with("model") && name.ends_with(".safetensors")
            || name.starts_with("pytorch_model")
    };
    match &gguf_files(folder)[..] {
        [] => Ok(None),
        _ if Files::Folder(folder.to_owned())
            .names()
            .iter()
            .any(is_weights) =>
        {
            Ok(None)
        }
        [file] => Ok(Some(file.clone())),
        several => Err(ModelError::SeveralGguf {
            folder: folder.to_owned(),
            files: several.iter().map(|file| file_name(file)).collect(),
        }),
    }
}

/// Returns the model's name, given the name of its GGUF file or of a part.
pub fn gguf_name(name: &str) -> &str {
    match PartName::parse(name) {
        Some(part) if part.extension == "gguf" => part.stem,
        _ => name.strip_suffix(".gguf").unwrap_or(name),
    }
}

fn file_name(path: &Path) -> String {
    let name = path.file_name();
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
