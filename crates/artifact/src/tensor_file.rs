//! Safetensors files, ours and others': opened by mapping, tensors borrowed, never copied.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

pub use safetensors::Dtype;
use safetensors::{
    SafeTensors,
    tensor::{Metadata, View},
};

use crate::{ArtifactError, Header, mapped_file::FileBytes, write::write_with};

/// Key of our header in the file's `__metadata__`.
const HEADER_KEY: &str = "powerinfer";

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

    /// Gives the memory behind the tensor called `name` back; it can still be read.
    pub fn release(&self, name: &str) {
        if let Some(info) = self.metadata.info(name) {
            let (start, end) = info.data_offsets;
            self.bytes
                .release(self.data_start + start..self.data_start + end);
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

/// A tensor to be written; its bytes are asked for only when their turn comes, so that a file
/// much larger than memory can be written.
pub struct TensorSource<'a, Failure = ArtifactError> {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, slowest dimension first.
    pub shape: Vec<usize>,
    /// Makes the bytes: row-major, little-endian, of exactly the length the shape asks for.
    pub bytes: Box<dyn Fn() -> Result<Cow<'a, [u8]>, Failure> + 'a>,
}

impl<'a, Failure> TensorSource<'a, Failure> {
    /// A tensor whose bytes are already there.
    pub fn borrowed(dtype: Dtype, shape: Vec<usize>, bytes: &'a [u8]) -> Self {
        Self {
            dtype,
            shape,
            bytes: Box::new(move || Ok(Cow::Borrowed(bytes))),
        }
    }

    /// A tensor that owns its bytes.
    pub fn owned(dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Self {
        Self {
            dtype,
            shape,
            bytes: Box::new(move || Ok(Cow::Owned(bytes.clone()))),
        }
    }

    /// Bytes that the shape asks for.
    fn length(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A source on its way into a file. The library's interface cannot fail, so the first failure
/// is kept aside, zeros take the place of the bytes, and the file is thrown away at the end.
struct Outgoing<'s, 'a, Failure> {
    source: &'s TensorSource<'a, Failure>,
    failure: &'s RefCell<Option<Failure>>,
}

impl<Failure> View for Outgoing<'_, '_, Failure> {
    fn dtype(&self) -> Dtype {
        self.source.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.source.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        if self.failure.borrow().is_none() {
            match (self.source.bytes)() {
                Ok(bytes) => return bytes,
                Err(failure) => *self.failure.borrow_mut() = Some(failure),
            }
        }
        Cow::Owned(vec![0; self.source.length()])
    }
    fn data_len(&self) -> usize {
        self.source.length()
    }
}

/// Writes a safetensors file with our header, beside and renamed.
pub fn write_tensors<Failure: From<ArtifactError>>(
    path: &Path,
    header: Option<&Header>,
    tensors: &BTreeMap<String, TensorSource<'_, Failure>>,
) -> Result<(), Failure> {
    let metadata = header.map(|header| {
        let text = serde_json::to_string(header).expect("a header is plain JSON");
        HashMap::from([(HEADER_KEY.to_owned(), text)])
    });
    write_with(path, |temporary| {
        let failure = RefCell::new(None);
        let outgoing = tensors.iter().map(|(name, source)| {
            (
                name,
                Outgoing {
                    source,
                    failure: &failure,
                },
            )
        });
        let written = safetensors::serialize_to_file(outgoing, metadata, temporary);
        if let Some(failure) = failure.into_inner() {
            return Err(failure);
        }
        written.map_err(|error| {
            let source = std::io::Error::other(error.to_string());
            ArtifactError::Write {
                path: path.to_owned(),
                source,
            }
            .into()
        })
    })
}
