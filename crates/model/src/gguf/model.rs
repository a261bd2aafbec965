//! A GGUF file as a model: its tensors, and the files of a Hugging Face folder generated from its metadata.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::Digest;

use super::{architectures, configuration, file::GgufFile, foreign, names::Layout, tokenizer};
use crate::{ModelError, container::Container};

/// Name suffixes of tensors that are not weights of the model: rotary divisors, which are read with
/// the configuration, and the predictors of the original PowerInfer.
pub(crate) const IGNORED: &[&str] = &[
    configuration::ROPE_DIVISORS,
    configuration::SHORT_DIVISORS,
    configuration::LONG_DIVISORS,
    ".fc1.weight",
    ".fc2.weight",
];

/// Open GGUF file, and the Hugging Face files generated from its metadata.
#[derive(Debug)]
pub struct Gguf {
    file: GgufFile,
    layout: Layout,
    generated: BTreeMap<&'static str, Arc<[u8]>>,
    assumes_activation: bool,
}

impl Gguf {
    /// Opens the GGUF file at `path`, or all parts of one, and converts its metadata.
    ///
    /// # Errors
    ///
    /// The file cannot be read or is damaged, or its architecture or tokenizer is not supported.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = GgufFile::open(path)?;
        let architecture = architectures::architecture(&file)?;
        let mut generated = BTreeMap::new();
        let mut add = |name, json: &serde_json::Value| {
            generated.insert(name, Arc::from(json.to_string().into_bytes()));
        };
        add(
            "config.json",
            &configuration::configuration(&file, architecture)?,
        );
        if let Some((tokenizer, config)) = tokenizer::tokenizer(&file)? {
            add("tokenizer.json", &tokenizer);
            add("tokenizer_config.json", &config);
        }
        let layout = Layout::new(architecture, |name| file.shape(name).is_some());
        Ok(Self {
            file,
            layout,
            generated,
            assumes_activation: architecture.assumes_activation(),
        })
    }

    /// Returns the path of the file, or of its first part.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns whether the activation function is the usual one of the architecture, since the file states none.
    pub(crate) fn assumes_activation(&self) -> bool {
        self.assumes_activation
    }

    /// Checks that the file has tensors; one without them is a tokenizer.
    pub(crate) fn check_has_tensors(&self) -> Result<(), ModelError> {
        foreign::check_has_tensors(&self.file)
    }

    /// Returns the generated file called `name`.
    pub(crate) fn file(&self, name: &str) -> Option<Arc<[u8]>> {
        self.generated.get(name).cloned()
    }

    /// Returns the file itself.
    pub(super) fn source(&self) -> &GgufFile {
        &self.file
    }

    /// Returns the naming scheme of its tensors.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }
}

impl Container for Gguf {
    fn names(&self) -> Vec<String> {
        self.file.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.file.shape(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        Container::path(&self.file, name)
    }

    fn check_type(&self, name: &str) -> Result<(), ModelError> {
        self.file.check_type(name)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.file.read(name)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        Container::read_rows(&self.file, name, rows)
    }

    fn q4_k(&self, name: &str) -> Option<&[u8]> {
        self.file.q4_k(name)
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        self.file.digest(name)
    }
}
