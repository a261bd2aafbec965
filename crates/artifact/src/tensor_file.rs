//! Safetensors files, of PowerInfer and others: memory-mapped, tensors borrowed without copying.

use std::{
    ops::Range,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

pub use safetensors::Dtype;
use safetensors::{SafeTensors, tensor::Metadata};

use crate::{
    ArtifactError, Digest, Header,
    digest::DigestBuilder,
    mapped_file::{FileBytes, Residence},
    progress::{Interrupted, Progress},
};

/// Key of the header in the file's `__metadata__`.
pub(crate) const HEADER_KEY: &str = "powerinfer";

/// Open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: FileBytes,
    metadata: Metadata,
    data_start: usize,
}

/// Tensor in an open file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Elements, row-major and little-endian.
    pub bytes: &'a [u8],
}

impl TensorFile {
    /// Maps the file at `path` and checks its tensor table against its length.
    ///
    /// # Errors
    ///
    /// The file cannot be read or is not a valid safetensors file.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        Self::from_bytes(path, FileBytes::open(path)?)
    }

    /// Parses `bytes`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::NotSafetensors`].
    pub fn from_bytes(path: &Path, bytes: FileBytes) -> Result<Self, ArtifactError> {
        let invalid = |reason: String| ArtifactError::NotSafetensors {
            path: path.to_owned(),
            reason,
        };
        let (header_length, metadata) =
            SafeTensors::read_metadata(&bytes).map_err(|error| invalid(error.to_string()))?;
        let data_start = header_length + 8;
        let expected = metadata.data_len();
        let found = bytes.len() - data_start;
        if expected != found {
            return Err(invalid(format!(
                "its tensor table describes {expected} bytes of data, the file has {found}"
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            bytes,
            metadata,
            data_start,
        })
    }

    /// Sets where the file resides, see [`FileBytes::set_residence`].
    ///
    /// # Errors
    ///
    /// [`ArtifactError::KeepInMemory`].
    pub fn set_residence(&mut self, residence: Residence) -> Result<(), ArtifactError> {
        self.bytes.set_residence(residence)
    }

    /// Reads the file into memory, see [`FileBytes::read_ahead`].
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if `progress` stops the work.
    pub fn read_ahead(&self, progress: &dyn Progress) -> Result<(), Interrupted> {
        self.bytes.read_ahead(progress)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns a shared handle of the file's bytes.
    pub fn file_bytes(&self) -> FileBytes {
        self.bytes.clone()
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// Finds the tensor called `name`.
    pub fn find(&self, name: &str) -> Option<TensorView<'_>> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        let bytes = &self.bytes[self.data_start + start..self.data_start + end];
        Some(TensorView {
            dtype: info.dtype,
            shape: &info.shape,
            bytes,
        })
    }

    /// Returns a shared handle of the file's bytes, and the range of the tensor called `name` in them.
    pub fn locate(&self, name: &str) -> Option<(FileBytes, Range<usize>)> {
        let (start, end) = self.metadata.info(name)?.data_offsets;
        let range = self.data_start + start..self.data_start + end;
        Some((self.bytes.clone(), range))
    }

    /// Releases the memory of the tensor called `name`; it can still be read.
    pub fn release(&self, name: &str) {
        if let Some((bytes, range)) = self.locate(name) {
            bytes.release(range);
        }
    }

    /// Returns the bytes of the tensor called `name`.
    ///
    /// # Errors
    ///
    /// The tensor is missing or has another type or shape.
    pub fn expect(
        &self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<&[u8], ArtifactError> {
        let view = self
            .find(name)
            .ok_or_else(|| ArtifactError::MissingTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
            })?;
        if view.dtype != dtype || view.shape != shape {
            return Err(ArtifactError::WrongTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                expected: format!("{dtype:?} {shape:?}"),
                found: format!("{:?} {:?}", view.dtype, view.shape),
            });
        }
        Ok(view.bytes)
    }

    /// Returns the `__metadata__` entry called `key`.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// Parses the PowerInfer header and checks format and version.
    ///
    /// # Errors
    ///
    /// There is no header, or it has another format or version.
    pub fn header(&self, format: &str, supported: u32) -> Result<Header, ArtifactError> {
        self.header_since(format, supported..=supported)
    }

    /// Like [`header`](Self::header), but for a range of supported versions.
    pub(crate) fn header_since(
        &self,
        format: &str,
        versions: RangeInclusive<u32>,
    ) -> Result<Header, ArtifactError> {
        let text = self
            .text(HEADER_KEY)
            .ok_or_else(|| ArtifactError::WrongFormat {
                path: self.path.clone(),
                expected: format.to_owned(),
                found: "a safetensors file without a PowerInfer header".to_owned(),
            })?;
        let header: Header =
            serde_json::from_str(text).map_err(|source| ArtifactError::NotJson {
                path: self.path.clone(),
                source,
            })?;
        header.check_versions(&self.path, format, versions)?;
        Ok(header)
    }

    /// Removes the digest of the content from the file's `header`, and compares it with the file; returns whether there is
    /// one.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::DamagedContent`].
    pub fn check_content(&self, header: &mut Header) -> Result<bool, ArtifactError> {
        let Some(expected) = header.settings.remove(CONTENT_SETTING) else {
            return Ok(false);
        };
        let names = self.names();
        let tensors = names.iter().filter_map(|name| {
            let view = self.find(name)?;
            Some((&name[..], view.dtype, view.shape, vec![view.bytes]))
        });
        if expected == content_digest(header, tensors).to_string() {
            Ok(true)
        } else {
            Err(ArtifactError::DamagedContent {
                path: self.path.clone(),
            })
        }
    }
}

/// Setting of a header with the digest of the file's content.
pub const CONTENT_SETTING: &str = "content";

/// Digest of `header`, without [`CONTENT_SETTING`], and of all tensors: name, type, shape and pieces.
pub(crate) fn content_digest<'a>(
    header: &Header,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], Vec<&'a [u8]>)>,
) -> Digest {
    let mut digest = DigestBuilder::default();
    digest.add(&serde_json::to_vec(header).expect("a header is plain JSON"));
    for (name, dtype, shape, pieces) in tensors {
        digest.add(format!("\n{name} {dtype:?} {shape:?}\n").as_bytes());
        pieces.into_iter().for_each(|bytes| digest.add(bytes));
    }
    digest.finish()
}
