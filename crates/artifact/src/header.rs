//! The header that every artifact carries.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::{Deserialize, Serialize};

use crate::{ArtifactError, Digest};

/// What a model is called, and what tells it from others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// For people: the name of the checkpoint's folder.
    pub name: String,
    /// For programs: a digest over configuration and weights.
    pub fingerprint: Digest,
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fingerprint = self.fingerprint.to_string();
        write!(formatter, "{} @ {}…", self.name, &fingerprint[..15])
    }
}

/// Who made this artifact, from what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Kind of artifact, such as `powerinfer-profile`.
    pub format: String,
    /// Version of that format; a reader refuses newer ones.
    pub version: u32,
    /// Program and version that wrote it.
    pub tool: String,
    /// The model it belongs to.
    pub model: ModelIdentity,
    /// Digests of the other inputs, by what they are.
    pub inputs: BTreeMap<String, Digest>,
    /// The seed of every random choice.
    pub seed: u64,
    /// The settings that shaped it, by name.
    pub settings: BTreeMap<String, serde_json::Value>,
}

impl Header {
    /// A header of this program for `model`, without inputs and settings.
    pub fn new(format: &str, version: u32, model: ModelIdentity, seed: u64) -> Self {
        Self {
            format: format.to_owned(),
            version,
            tool: concat!("powerinfer ", env!("CARGO_PKG_VERSION")).to_owned(),
            model,
            inputs: BTreeMap::new(),
            seed,
            settings: BTreeMap::new(),
        }
    }

    /// Adds the digest of an input.
    #[must_use]
    pub fn with_input(mut self, name: &str, digest: Digest) -> Self {
        self.inputs.insert(name.to_owned(), digest);
        self
    }

    /// Adds a setting.
    #[must_use]
    pub fn with_setting(mut self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.settings.insert(name.to_owned(), value.into());
        self
    }

    /// Refuses another format than `format` and other versions than `supported`.
    pub fn check_format(
        &self,
        path: &Path,
        format: &str,
        supported: u32,
    ) -> Result<(), ArtifactError> {
        if self.format != format {
            return Err(ArtifactError::WrongFormat {
                path: path.to_owned(),
                expected: format.to_owned(),
                found: format!("a {}", self.format),
            });
        }
        if self.version > supported {
            return Err(ArtifactError::TooNew {
                path: path.to_owned(),
                format: format.to_owned(),
                found: self.version,
                supported,
                tool: self.tool.clone(),
            });
        }
        if self.version < supported {
            return Err(ArtifactError::TooOld {
                path: path.to_owned(),
                format: format.to_owned(),
                found: self.version,
                supported,
            });
        }
        Ok(())
    }

    /// Refuses an artifact of another model than `model`.
    pub fn check_model(&self, path: &Path, model: &ModelIdentity) -> Result<(), ArtifactError> {
        if self.model.fingerprint == model.fingerprint {
            return Ok(());
        }
        Err(ArtifactError::OtherModel {
            path: path.to_owned(),
            expected: Box::new(model.clone()),
            found: Box::new(self.model.clone()),
        })
    }
}
