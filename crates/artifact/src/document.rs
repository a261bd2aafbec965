//! JSON artifacts: a header beside a body.

use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{ArtifactError, Header, write::write_file};

/// A JSON file with our header and what it is about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document<Body> {
    /// Who made it, from what.
    pub header: Header,
    /// The content.
    #[serde(flatten)]
    pub body: Body,
}

/// Just the header, so that a version is judged before a body it may not understand.
#[derive(Deserialize)]
struct HeaderOnly {
    header: Option<Header>,
}

impl<Body: Serialize + DeserializeOwned> Document<Body> {
    /// Reads the document at `path`, refusing other formats and other versions.
    pub fn read(path: &Path, format: &str, supported: u32) -> Result<Self, ArtifactError> {
        let bytes = std::fs::read(path).map_err(ArtifactError::read(path))?;
        Self::parse(&bytes, path, format, supported)
    }

    /// Reads a document from `bytes`; `path` is for messages.
    pub fn parse(
        bytes: &[u8],
        path: &Path,
        format: &str,
        supported: u32,
    ) -> Result<Self, ArtifactError> {
        let not_json = |source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        };
        let only: HeaderOnly = serde_json::from_slice(bytes).map_err(not_json)?;
        let header = only.header.ok_or_else(|| ArtifactError::WrongFormat {
            path: path.to_owned(),
            expected: format.to_owned(),
            found: "JSON without a header of ours".to_owned(),
        })?;
        header.check_format(path, format, supported)?;
        serde_json::from_slice(bytes).map_err(not_json)
    }

    /// The file's bytes: indented JSON with a final newline.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("our structures are plain JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Writes the document, beside and renamed.
    pub fn write(&self, path: &Path) -> Result<(), ArtifactError> {
        write_file(path, &self.to_bytes())
    }
}
