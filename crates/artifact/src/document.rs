//! JSON artifacts: a header and a body in one object.

use std::{ops::RangeInclusive, path::Path};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{ArtifactError, Digest, Header, write::write_file};

/// JSON file with a [`Header`] next to the fields of `Body`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document<Body> {
    /// Origin of the file.
    pub header: Header,
    /// The content.
    #[serde(flatten)]
    pub body: Body,
}

/// The header alone, so that the version is checked before a body that may not parse.
#[derive(Deserialize)]
struct HeaderOnly {
    header: Option<Header>,
}

impl<Body: Serialize + DeserializeOwned> Document<Body> {
    /// Reads the document at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is not the expected JSON, or has another format or version.
    pub fn read(path: &Path, format: &str, supported: u32) -> Result<Self, ArtifactError> {
        Self::read_versions(path, format, supported..=supported)
    }

    /// Like [`read`](Self::read), but accepts a range of versions.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`read`](Self::read).
    pub fn read_versions(
        path: &Path,
        format: &str,
        supported: RangeInclusive<u32>,
    ) -> Result<Self, ArtifactError> {
        let bytes = std::fs::read(path).map_err(ArtifactError::read(path))?;
        Self::parse_versions(&bytes, path, format, supported)
    }

    /// Parses a document from `bytes`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// The bytes are not the expected JSON, or have another format or version.
    pub fn parse(
        bytes: &[u8],
        path: &Path,
        format: &str,
        supported: u32,
    ) -> Result<Self, ArtifactError> {
        Self::parse_versions(bytes, path, format, supported..=supported)
    }

    fn parse_versions(
        bytes: &[u8],
        path: &Path,
        format: &str,
        supported: RangeInclusive<u32>,
    ) -> Result<Self, ArtifactError> {
        let not_json = |source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        };
        let only: HeaderOnly = serde_json::from_slice(bytes).map_err(not_json)?;
        let header = only.header.ok_or_else(|| ArtifactError::WrongFormat {
            path: path.to_owned(),
            expected: format.to_owned(),
            found: "JSON without a PowerInfer header".to_owned(),
        })?;
        header.check_versions(path, format, supported)?;
        serde_json::from_slice(bytes).map_err(not_json)
    }

    /// Serialises the document as indented JSON with a final newline.
    ///
    /// # Panics
    ///
    /// If `Body` cannot be represented in JSON, as with map keys that are not strings.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("the body is plain JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Writes the document to `path` atomically.
    ///
    /// # Errors
    ///
    /// A number is NaN or infinite, which JSON cannot represent, or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), ArtifactError> {
        let bytes = self.to_bytes();
        // Such numbers are written as `null`.
        if let Err(source) = serde_json::from_slice::<Self>(&bytes) {
            let path = path.to_owned();
            return Err(ArtifactError::NotFinite { path, source });
        }
        write_file(path, &bytes)
    }
}

/// Body of a document that has the document's own digest.
pub trait Sealed: Clone + Serialize + DeserializeOwned {
    /// The digest of the document without this entry.
    fn seal(&mut self) -> &mut Option<Digest>;
}

impl<Body: Sealed> Document<Body> {
    /// Sets the document's own digest.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        *self.body.seal() = None;
        let digest = Digest::from_content(&self.to_bytes());
        *self.body.seal() = Some(digest);
        self
    }

    /// Checks the document's own digest; `path` is for messages.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Damaged`] if it is missing or another.
    pub fn check_seal(&self, path: &Path) -> Result<(), ArtifactError> {
        let own = |mut document: Self| *document.body.seal();
        let (found, expected) = (own(self.clone()), own(self.clone().sealed()));
        if found == expected {
            return Ok(());
        }
        let text = |seal: Option<Digest>| {
            seal.map_or_else(|| "missing".to_owned(), |seal| seal.to_string())
        };
        Err(ArtifactError::Damaged {
            path: path.to_owned(),
            expected: text(found),
            found: text(expected),
        })
    }
}
