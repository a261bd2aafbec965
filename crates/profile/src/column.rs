//! Values of samples, in memory while they are collected, later in a mapped file, so that a layer's samples may exceed memory.

use std::{ops::Deref, ops::Range, sync::Arc};

use bytemuck::Pod;
use powerinfer_artifact::{ArtifactError, TensorFile, mapped_file::FileBytes, tensor_file::Dtype};

/// An array of values, in memory or in a mapped file.
#[derive(Debug, Clone)]
pub struct Column<Value>(Storage<Value>);

#[derive(Debug, Clone)]
enum Storage<Value> {
    Owned(Vec<Value>),
    /// A range of a file, aligned for the values.
    Mapped(FileBytes, Range<usize>),
}

impl<Value: Pod> Column<Value> {
    /// Maps the tensor `name`, which must have this type and shape.
    pub(crate) fn mapped(
        file: &Arc<TensorFile>,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<Self, ArtifactError> {
        let bytes = file.expect(name, dtype, shape)?;
        // Tensors written by other tools may be unaligned.
        if bytemuck::try_cast_slice::<u8, Value>(bytes).is_err() {
            return Ok(Self(Storage::Owned(bytemuck::pod_collect_to_vec(bytes))));
        }
        let (bytes, range) = file.locate(name).expect("the tensor was found above");
        Ok(Self(Storage::Mapped(bytes, range)))
    }

    /// The values in memory, for appending; copies mapped values.
    pub fn to_mut(&mut self) -> &mut Vec<Value> {
        if let Storage::Mapped(..) = self.0 {
            self.0 = Storage::Owned(self.to_vec());
        }
        match &mut self.0 {
            Storage::Owned(values) => values,
            Storage::Mapped(..) => unreachable!("the values were copied above"),
        }
    }

    /// Releases the pages of mapped values; they are read again on access.
    pub(crate) fn release(&self) {
        if let Storage::Mapped(bytes, range) = &self.0 {
            bytes.release(range.clone());
        }
    }

    /// Advises the system of random access.
    pub(crate) fn advise_random_access(&self) {
        if let Storage::Mapped(bytes, _) = &self.0 {
            bytes.advise_random_access();
        }
    }
}

impl<Value> Default for Column<Value> {
    fn default() -> Self {
        Self(Storage::Owned(Vec::new()))
    }
}

impl<Value: Pod> Deref for Column<Value> {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        match &self.0 {
            Storage::Owned(values) => values,
            Storage::Mapped(bytes, range) => bytemuck::cast_slice(&bytes[range.clone()]),
        }
    }
}

impl<Value: Pod + PartialEq> PartialEq for Column<Value> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
