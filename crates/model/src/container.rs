//! Containers of tensors, independent of the file format.

use std::{ops::Range, path::PathBuf, sync::Arc};

use powerinfer_artifact::{Digest, TensorFile, tensor_file::Dtype};
use powerinfer_tensor::f16;
use rayon::prelude::*;

use crate::{Files, ModelError, mxfp4, source::transposed};

/// Elements of a part that one thread converts.
pub(crate) const PART: usize = 1 << 16;

/// Named tensors that can be read as f32.
///
/// Safetensors and GGUF implement it in this crate; other formats implement it elsewhere.
pub trait Container: std::fmt::Debug + Send + Sync {
    /// Returns the names of all tensors, in no particular order.
    fn names(&self) -> Vec<String>;

    /// Returns the shape of the tensor called `name`, rows first; `None` if it does not exist.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Returns the file that contains the tensor called `name`.
    fn path(&self, name: &str) -> PathBuf;

    /// Checks that the elements of the tensor called `name` can be read.
    ///
    /// # Errors
    ///
    /// The tensor does not exist, or its type is not supported.
    fn check_type(&self, name: &str) -> Result<(), ModelError>;

    /// Reads the tensor called `name`, row-major.
    ///
    /// # Errors
    ///
    /// The tensor does not exist, or its type is not supported.
    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError>;

    /// Reads a range of rows of the two-dimensional tensor called `name`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let width = self.shape(name).and_then(|shape| shape.last().copied());
        let width = width.unwrap_or(0);
        Ok(self.read(name)?[rows.start * width..rows.end * width].to_vec())
    }

    /// Returns the ggml super-blocks of the tensor called `name` if it is stored as Q4_K.
    fn q4_k(&self, _name: &str) -> Option<&[u8]> {
        None
    }

    /// Returns a digest of the tensor's name, type, shape and samples of its data, for fingerprints.
    ///
    /// # Errors
    ///
    /// The tensor does not exist.
    fn digest(&self, name: &str) -> Result<Digest, ModelError>;
}

impl<Inner: Container + ?Sized> Container for Arc<Inner> {
    fn names(&self) -> Vec<String> {
        (**self).names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        (**self).shape(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        (**self).path(name)
    }

    fn check_type(&self, name: &str) -> Result<(), ModelError> {
        (**self).check_type(name)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        (**self).read(name)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        (**self).read_rows(name, rows)
    }

    fn q4_k(&self, name: &str) -> Option<&[u8]> {
        (**self).q4_k(name)
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        (**self).digest(name)
    }
}

/// Digest of `kind` (name, type, shape) and of sixteen evenly spaced samples of 4 KiB of `bytes`, or of all
/// bytes if there are fewer.
pub fn sampled_digest(kind: &str, bytes: &[u8]) -> Digest {
    const SAMPLE: usize = 4096;
    const SAMPLES: usize = 16;
    let mut parts = vec![kind.as_bytes()];
    if bytes.len() <= SAMPLE * SAMPLES {
        parts.push(bytes);
    } else {
        let step = (bytes.len() - SAMPLE) / (SAMPLES - 1);
        parts.extend((0..SAMPLES).map(|index| &bytes[index * step..index * step + SAMPLE]));
    }
    Digest::of_parts(parts)
}

/// One or more safetensors files.
#[derive(Debug)]
struct Safetensors {
    shards: Vec<TensorFile>,
}

impl Files {
    /// Opens `model.safetensors` or its shards; `None` if neither exists.
    ///
    /// # Errors
    ///
    /// A file is missing or damaged.
    pub fn safetensors(&self) -> Result<Option<Box<dyn Container>>, ModelError> {
        let Some(shards) = self.shards("model.safetensors")? else {
            return Ok(None);
        };
        let shards = shards
            .into_iter()
            .map(|(path, bytes)| Ok(TensorFile::from_bytes(&path, bytes)?))
            .collect::<Result<_, ModelError>>()?;
        Ok(Some(Box::new(Safetensors { shards })))
    }
}

/// An MXFP4 tensor of gpt-oss, stored as two byte tensors: `{name}_blocks [experts, rows, blocks, 16]` and `{name}_scales
/// [experts, rows, blocks]`. Like transformers, the container presents it as one tensor `[experts, columns, rows]`.
struct Mxfp4<'a> {
    blocks: &'a TensorFile,
    scales: &'a TensorFile,
    names: [String; 2],
    /// Number of experts, rows, and blocks per row.
    shape: [usize; 3],
}

/// Suffixes of the names under which the two parts of an MXFP4 tensor are stored.
const MXFP4_PARTS: [&str; 2] = ["_blocks", "_scales"];

impl Mxfp4<'_> {
    /// Dequantises the matrices of `experts` and transposes each.
    fn read(&self, experts: Range<usize>) -> Vec<f32> {
        let [_, rows, blocks] = self.shape;
        let bytes = |file: &TensorFile, name: &str, size: usize| {
            let view = file.find(name).expect("the tensor was found");
            let size = rows * blocks * size;
            let bytes = view.bytes[experts.start * size..experts.end * size].to_vec();
            file.release(name);
            bytes
        };
        let [of_blocks, of_scales] = &self.names;
        let packed = bytes(self.blocks, of_blocks, mxfp4::BLOCK_LENGTH / 2);
        let exponents = bytes(self.scales, of_scales, 1);
        let columns = blocks * mxfp4::BLOCK_LENGTH;
        let values = mxfp4::dequantise(&packed, &exponents);
        let matrices = values.chunks_exact(rows * columns);
        matrices
            .flat_map(|matrix| transposed(matrix, columns))
            .collect()
    }
}

/// Converts elements of `SIZE` bytes in parallel. Tensors are read one after another, so at most one at a time is in memory twice.
fn converted<const SIZE: usize>(
    bytes: &[u8],
    convert: impl Fn([u8; SIZE]) -> f32 + Sync,
) -> Vec<f32> {
    let (elements, _) = bytes.as_chunks();
    let mut values = vec![0.0; elements.len()];
    let parts = values.par_chunks_mut(PART).zip(elements.par_chunks(PART));
    parts.for_each(|(values, elements)| {
        let pairs = values.iter_mut().zip(elements);
        pairs.for_each(|(value, element)| *value = convert(*element));
    });
    values
}

impl Safetensors {
    /// Returns the shard with the tensor called `name`.
    fn shard(&self, name: &str) -> Option<&TensorFile> {
        self.shards.iter().find(|shard| shard.find(name).is_some())
    }

    /// Converts stored elements to f32.
    fn values(&self, name: &str, dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>, ModelError> {
        Ok(match dtype {
            Dtype::F32 => converted(bytes, f32::from_le_bytes),
            Dtype::F16 => converted(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            // Skips the NaN check of `half`, because `checkpoint` checks the values.
            Dtype::BF16 => converted(bytes, |bytes| {
                f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
            }),
            other => {
                return Err(ModelError::WrongType {
                    path: self.path(name),
                    tensor: name.to_owned(),
                    found: format!("{other:?}"),
                });
            }
        })
    }

    /// Finds the MXFP4 tensor called `name`.
    fn mxfp4(&self, name: &str) -> Option<Mxfp4<'_>> {
        let names = MXFP4_PARTS.map(|end| format!("{name}{end}"));
        let [blocks, scales] = [self.shard(&names[0])?, self.shard(&names[1])?];
        let [of_blocks, of_scales] = [blocks.find(&names[0])?, scales.find(&names[1])?];
        let [experts, rows, columns] = *of_scales.shape else {
            return None;
        };
        let is_one = of_blocks.shape == [experts, rows, columns, mxfp4::BLOCK_LENGTH / 2]
            && [of_blocks.dtype, of_scales.dtype] == [Dtype::U8; 2];
        let columns_fit = columns.checked_mul(mxfp4::BLOCK_LENGTH).is_some();
        let is_one = is_one && columns_fit && ![experts, rows, columns].contains(&0);
        is_one.then_some(Mxfp4 {
            blocks,
            scales,
            names,
            shape: [experts, rows, columns],
        })
    }

    fn missing(&self, name: &str) -> ModelError {
        ModelError::MissingTensor {
            path: self.path(name),
            tensor: name.to_owned(),
        }
    }
}

impl Container for Safetensors {
    fn names(&self) -> Vec<String> {
        let names = self.shards.iter().flat_map(TensorFile::names);
        // The second part of an MXFP4 tensor is left out, the first stands for both.
        let shown = names.filter_map(|name| {
            let mut ends = MXFP4_PARTS.iter();
            let stem = ends.find_map(|end| name.strip_suffix(end));
            match stem.filter(|stem| self.mxfp4(stem).is_some()) {
                Some(stem) if name.ends_with(MXFP4_PARTS[0]) => Some(stem.to_owned()),
                Some(_) => None,
                None => Some(name),
            }
        });
        shown.collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(Mxfp4 { shape, .. }) = self.mxfp4(name) {
            let [experts, rows, blocks] = shape;
            return Some(vec![experts, blocks * mxfp4::BLOCK_LENGTH, rows]);
        }
        let view = self.shard(name)?.find(name)?;
        Some(view.shape.to_vec())
    }

    fn path(&self, name: &str) -> PathBuf {
        let packed = self.mxfp4(name).map(|found| found.blocks);
        let shard = packed.or_else(|| self.shard(name)).or(self.shards.first());
        shard.map_or_else(PathBuf::new, |shard| shard.path().to_owned())
    }

    fn check_type(&self, name: &str) -> Result<(), ModelError> {
        if self.mxfp4(name).is_some() {
            return Ok(());
        }
        let view = self.shard(name).and_then(|shard| shard.find(name));
        let view = view.ok_or_else(|| self.missing(name))?;
        self.values(name, view.dtype, &[]).map(drop)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        if let Some(found) = self.mxfp4(name) {
            return Ok(found.read(0..found.shape[0]));
        }
        let shard = self.shard(name).ok_or_else(|| self.missing(name))?;
        let view = shard.find(name).ok_or_else(|| self.missing(name))?;
        let values = self.values(name, view.dtype, view.bytes);
        shard.release(name); // models may be larger than memory and are read once
        values
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        if let Some(found) = self.mxfp4(name) {
            return Ok(found.read(rows));
        }
        let shard = self.shard(name).ok_or_else(|| self.missing(name))?;
        let view = shard.find(name).ok_or_else(|| self.missing(name))?;
        let count = match view.shape {
            [] | [_] => 1, // a row stored as a vector
            [count, ..] => (*count).max(1),
        };
        let row = view.bytes.len() / count;
        let bytes = &view.bytes[rows.start * row..rows.end * row];
        let values = self.values(name, view.dtype, bytes);
        shard.release(name);
        values
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        if let Some(found) = self.mxfp4(name) {
            let [blocks, scales] = found.names;
            let digests = [self.digest(&blocks)?, self.digest(&scales)?];
            let digests = digests.map(|digest| digest.to_string());
            return Ok(Digest::of_parts(digests.iter().map(String::as_bytes)));
        }
        let shard = self.shard(name).ok_or_else(|| self.missing(name))?;
        let view = shard.find(name).ok_or_else(|| self.missing(name))?;
        let kind = format!("{name} {:?} {:?}", view.dtype, view.shape);
        let digest = sampled_digest(&kind, view.bytes);
        shard.release(name); // a page fault may map far more than was read
        Ok(digest)
    }
}
