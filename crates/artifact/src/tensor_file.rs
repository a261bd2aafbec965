//! Safetensors files, ours and others': opened by mapping, tensors borrowed, never copied.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

pub use safetensors::Dtype;
use safetensors::{SafeTensors, tensor::Metadata};

use crate::{
    ArtifactError, Header,
    mapped_file::{FileBytes, Residence},
    progress::{Interrupted, Progress},
};

/// Key of our header in the file's `__metadata__`.
pub(crate) const HEADER_KEY: &str = "powerinfer";

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    bytes: FileBytes,
    metadata: Metadata,
    data_start: usize,
}

/// A tensor inside an open file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, slowest dimension first.
    pub shape: &'a [usize],
    /// Row-major, little-endian.
    pub bytes: &'a [u8],
}

impl TensorFile {
    /// Opens the file at `path` and checks its table of contents against its length.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        Self::from_bytes(path, FileBytes::open(path)?)
    }

    /// The same over bytes that are already there; `path` is for messages.
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
                "its table of contents speaks of {expected} bytes of data, there are {found}"
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            bytes,
            metadata,
            data_start,
        })
    }

    /// Holds the file as `residence` says; see [`FileBytes::hold`].
    pub fn hold(&mut self, residence: Residence) -> Result<(), ArtifactError> {
        self.bytes.hold(&self.path, residence)
    }

    /// Reads the file into memory; see [`FileBytes::read_ahead`].
    pub fn read_ahead(&self, progress: &dyn Progress) -> Result<(), Interrupted> {
        self.bytes.read_ahead(progress)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// The tensor called `name`, if there is one.
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

    /// The bytes of the file, to be held on to, and where in them the tensor called `name` lies.
    pub fn place(&self, name: &str) -> Option<(FileBytes, Range<usize>)> {
        let (start, end) = self.metadata.info(name)?.data_offsets;
        let range = self.data_start + start..self.data_start + end;
        Some((self.bytes.clone(), range))
    }

    /// Gives the memory behind the tensor called `name` back; it can still be read.
    pub fn release(&self, name: &str) {
        if let Some((bytes, range)) = self.place(name) {
            bytes.release(range);
        }
    }

    /// The tensor called `name`, which must be there with this type and shape.
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

    /// The `__metadata__` entry called `key`.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// Our header, which must be there and say `format` in a version up to `supported`.
    pub fn header(&self, format: &str, supported: u32) -> Result<Header, ArtifactError> {
        let text = self
            .text(HEADER_KEY)
            .ok_or_else(|| ArtifactError::WrongFormat {
                path: self.path.clone(),
                expected: format.to_owned(),
                found: "a safetensors file without a header of ours".to_owned(),
            })?;
        let header: Header =
            serde_json::from_str(text).map_err(|source| ArtifactError::NotJson {
                path: self.path.clone(),
                source,
            })?;
        header.check_format(&self.path, format, supported)?;
        Ok(header)
    }
}
