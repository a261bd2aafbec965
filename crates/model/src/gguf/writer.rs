//! Writing of GGUF files: metadata, tensor table, data in the table's order.

use std::{
    fs::{File, OpenOptions},
    io::{BufWriter, Write},
    path::Path,
};

use powerinfer_artifact::{ArtifactError, write::write_with};
use powerinfer_tensor::{Format, Matrix, MatrixData};

use super::{
    contents::bytes_of,
    dequantise::{Encoding, ORIGINAL_I32, type_of},
    value::{Value, write_text},
};

/// Variant of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// GGUF as llama.cpp reads it.
    Ggml,
    /// The original PowerInfer's: another magic, down transposed, ReLU.
    PowerInfer,
}

/// Metadata in the order in which a file lists them.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Keys of integers that are written in 64 bits even if they are small.
    wide: Vec<String>,
}

impl Metadata {
    /// Appends the value of `key`.
    pub fn push(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.entries.push((key.into(), value.into()));
    }

    /// Appends a 64-bit integer; other integers are written in 32 bits if they fit.
    pub fn push_u64(&mut self, key: &str, number: u64) {
        self.wide.push(key.to_owned());
        self.push(key, Value::Unsigned(number));
    }

    /// Appends the entries of `other`.
    pub(super) fn append(&mut self, other: Self) {
        self.entries.extend(other.entries);
        self.wide.extend(other.wide);
    }

    /// The text of `key`.
    pub fn text(&self, key: &str) -> Option<&str> {
        let found = self.entries.iter().find(|(own, _)| own == key);
        found.and_then(|(_, value)| value.as_text())
    }

    /// Returns all entries.
    pub(super) fn entries(&self) -> &[(String, Value)] {
        &self.entries
    }
}

/// Entry of the tensor table.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// Name, at most 64 bytes.
    pub name: String,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub elements: Elements,
}

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Elements {
    /// Numbers of weights, in any format but `q4_k`.
    Weights(Format),
    /// Signed integers of 32 bits, in a file of the original PowerInfer.
    I32,
}

impl TensorEntry {
    /// The number of the type, and the size of the data in bytes.
    fn encoding(&self) -> (u32, u64) {
        let id = match self.elements {
            Elements::Weights(format) => type_of(format).expect("q4_k is not written"),
            Elements::I32 => ORIGINAL_I32,
        };
        let encoding = Encoding::from_original_id(id).expect("the types are known");
        let bytes = bytes_of(&self.shape, encoding).expect("the tensor fits in memory");
        (id, bytes as u64)
    }
}

/// Alignment of the data of every tensor.
const ALIGNMENT: u64 = 32;

/// Writes a GGUF file of version 3 atomically; `fill` writes the data of the entry at an index. Returns the size of the
/// file in bytes.
///
/// # Errors
///
/// [`ArtifactError::Write`], or the error of `fill`; then no file is written.
///
/// # Panics
///
/// If `fill` does not write exactly the bytes that the table declares, or an entry is in `q4_k`.
pub fn write_gguf<Failure: From<ArtifactError>>(
    path: &Path,
    dialect: Dialect,
    metadata: &Metadata,
    tensors: &[TensorEntry],
    mut fill: impl FnMut(usize, &mut DataWriter<'_>) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let mut size = 0;
    write_with(path, |temporary| {
        let file = OpenOptions::new().write(true).open(temporary);
        let mut writer = DataWriter {
            path,
            file: BufWriter::new(file.map_err(ArtifactError::write(path))?),
            position: 0,
        };
        writer.write(&head(dialect, metadata, tensors))?;
        for (index, tensor) in tensors.iter().enumerate() {
            writer.align()?;
            let start = writer.position;
            fill(index, &mut writer)?;
            let written = writer.position - start;
            assert_eq!(written, tensor.encoding().1, "`{}` is filled", tensor.name);
        }
        // Readers expect whole units of the alignment at the end too.
        writer.align()?;
        size = writer.position;
        writer.file.flush().map_err(ArtifactError::write(path))?;
        Ok::<_, Failure>(())
    })?;
    Ok(size)
}

/// Everything before the data.
fn head(dialect: Dialect, metadata: &Metadata, tensors: &[TensorEntry]) -> Vec<u8> {
    let mut out = match dialect {
        Dialect::Ggml => b"GGUF".to_vec(),
        Dialect::PowerInfer => b"PWRI".to_vec(),
    };
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.entries.len() as u64).to_le_bytes());
    for (key, value) in &metadata.entries {
        write_text(key, &mut out);
        value.write(metadata.wide.contains(key), &mut out);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        let (id, bytes) = tensor.encoding();
        write_text(&tensor.name, &mut out);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in tensor.shape.iter().rev() {
            out.extend((*size as u64).to_le_bytes());
        }
        out.extend(id.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + bytes).next_multiple_of(ALIGNMENT);
    }
    out
}

/// Writer of tensor data.
#[derive(Debug)]
pub struct DataWriter<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    position: u64,
}

impl DataWriter<'_> {
    /// Appends the rows of `matrix`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    ///
    /// # Panics
    ///
    /// If the matrix is in `q4_k`, or in another quantised format with rows of partial blocks.
    pub fn rows(&mut self, matrix: &Matrix<'_>) -> Result<(), ArtifactError> {
        let whole = !matrix.format().is_quantised() || matrix.columns().is_multiple_of(32);
        assert!(whole, "rows are whole blocks");
        let bytes: Vec<u8> = match matrix.data() {
            MatrixData::F32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            MatrixData::F16(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            MatrixData::Bf16(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            // ggml stores each scale in front of its block.
            MatrixData::Q8_0 { quants, scales } => (quants.as_chunks::<32>().0.iter().zip(scales))
                .flat_map(|(block, scale)| {
                    let quants = block.iter().map(|quant| quant.cast_unsigned());
                    scale.to_le_bytes().into_iter().chain(quants)
                })
                .collect(),
            MatrixData::Q4_0 { quants, scales } => (quants.as_chunks::<16>().0.iter().zip(scales))
                .flat_map(|(block, scale)| scale.to_le_bytes().into_iter().chain(*block))
                .collect(),
            MatrixData::Q4K { .. } => unreachable!("q4_k is not written"),
        };
        self.write(&bytes)
    }

    /// Appends integers.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn integers(&mut self, numbers: &[i32]) -> Result<(), ArtifactError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.position += bytes.len() as u64;
        let written = self.file.write_all(bytes);
        written.map_err(ArtifactError::write(self.path))
    }

    fn align(&mut self) -> Result<(), ArtifactError> {
        let end = self.position.next_multiple_of(ALIGNMENT);
        self.write(&vec![0; (end - self.position) as usize])
    }
}
