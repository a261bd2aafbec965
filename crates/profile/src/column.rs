//! Numbers of many samples: gathered in memory while they are made, afterwards read where they lie
//! in a mapped file, so that a layer's samples may be larger than memory.

use std::{ops::Deref, ops::Range, sync::Arc};

use bytemuck::Pod;
use powerinfer_artifact::{ArtifactError, TensorFile, mapped_file::FileBytes, tensor_file::Dtype};

/// Numbers that are read as one slice, wherever they are.
#[derive(Debug, Clone)]
pub struct Column<Value>(Numbers<Value>);

#[derive(Debug, Clone)]
enum Numbers<Value> {
    Gathered(Vec<Value>),
    /// A part of a file, aligned for the numbers.
    Mapped(FileBytes, Range<usize>),
}

impl<Value: Pod> Column<Value> {
    /// The tensor called `name`, which must be there with this type and shape.
    pub(crate) fn mapped(
        file: &Arc<TensorFile>,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
    ) -> Result<Self, ArtifactError> {
        let bytes = file.expect(name, dtype, shape)?;
        // What we wrote is aligned; what others wrote need not be.
        if bytemuck::try_cast_slice::<u8, Value>(bytes).is_err() {
            return Ok(Self(Numbers::Gathered(bytemuck::pod_collect_to_vec(bytes))));
        }
        let (bytes, range) = file.locate(name).expect("it was found above");
        Ok(Self(Numbers::Mapped(bytes, range)))
    }

    /// The numbers in memory, to be added to.
    pub fn to_mut(&mut self) -> &mut Vec<Value> {
        if let Numbers::Mapped(..) = self.0 {
            self.0 = Numbers::Gathered(self.to_vec());
        }
        match &mut self.0 {
            Numbers::Gathered(values) => values,
            Numbers::Mapped(..) => unreachable!("it was gathered above"),
        }
    }

    /// Gives the memory of what was read from a file back; it can be read again.
    pub(crate) fn release(&self) {
        if let Numbers::Mapped(bytes, range) = &self.0 {
            bytes.release(range.clone());
        }
    }

    /// Says that what is read next lies here and there.
    pub(crate) fn advise_random_access(&self) {
        if let Numbers::Mapped(bytes, _) = &self.0 {
            bytes.advise_random_access();
        }
    }
}

impl<Value> Default for Column<Value> {
    fn default() -> Self {
        Self(Numbers::Gathered(Vec::new()))
    }
}

impl<Value: Pod> Deref for Column<Value> {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        match &self.0 {
            Numbers::Gathered(values) => values,
            Numbers::Mapped(bytes, range) => bytemuck::cast_slice(&bytes[range.clone()]),
        }
    }
}

impl<Value: Pod + PartialEq> PartialEq for Column<Value> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
