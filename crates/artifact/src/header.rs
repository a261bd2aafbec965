//! Header of every artifact.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive, path::Path};

use serde::{Deserialize, Serialize};

use crate::{ArtifactError, Digest};

/// Name and fingerprint of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Name of the checkpoint's folder, for display only.
    pub name: String,
    /// Digest over configuration and weights; models are compared by it.
    pub fingerprint: Digest,
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fingerprint = self.fingerprint.to_string();
        write!(formatter, "{} @ {}…", self.name, &fingerprint[..15])
    }
}

/// Origin of an artifact: tool, model, inputs, seed and settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Kind of artifact, such as `powerinfer-profile`.
    pub format: String,
    /// Version of that format.
    pub version: u32,
    /// Name and version of the program that wrote the artifact.
    pub tool: String,
    /// Model that the artifact was made for.
    pub model: ModelIdentity,
    /// Digests of the other inputs, by the role of each input.
    pub inputs: BTreeMap<String, Digest>,
    /// Seed of all random choices.
    pub seed: u64,
    /// Settings that the artifact was made with, by name.
    pub settings: BTreeMap<String, serde_json::Value>,
}

impl Header {
    /// Returns the name and version of this program in the form that headers use.
    pub fn tool() -> &'static str {
        concat!("powerinfer ", env!("CARGO_PKG_VERSION"))
    }

    /// Creates a header of this program for `model`, without inputs and settings.
    pub fn new(format: &str, version: u32, model: ModelIdentity, seed: u64) -> Self {
        Self {
            format: format.to_owned(),
            version,
            tool: Self::tool().to_owned(),
            model,
            inputs: BTreeMap::new(),
            seed,
            settings: BTreeMap::new(),
        }
    }

    /// Adds the digest of the input called `name`.
    #[must_use]
    pub fn with_input(mut self, name: &str, digest: Digest) -> Self {
        self.inputs.insert(name.to_owned(), digest);
        self
    }

    /// Adds the setting called `name`.
    #[must_use]
    pub fn with_setting(mut self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.settings.insert(name.to_owned(), value.into());
        self
    }

    /// Checks that the artifact at `path` has this format and version.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::WrongFormat`], [`ArtifactError::TooNew`] or [`ArtifactError::TooOld`].
    pub fn check_format(
        &self,
        path: &Path,
        format: &str,
        supported: u32,
    ) -> Result<(), ArtifactError> {
        self.check_versions(path, format, supported..=supported)
    }

    /// Like [`check_format`](Self::check_format), but for a range of supported versions.
    pub(crate) fn check_versions(
        &self,
        path: &Path,
        format: &str,
        versions: RangeInclusive<u32>,
    ) -> Result<(), ArtifactError> {
        let supported = *versions.end();
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
        if self.version < *versions.start() {
            return Err(ArtifactError::TooOld {
                path: path.to_owned(),
                format: format.to_owned(),
                found: self.version,
                supported,
            });
        }
        Ok(())
    }

    /// Checks that the artifact at `path` belongs to `model`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::OtherModel`] if the fingerprints differ.
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
