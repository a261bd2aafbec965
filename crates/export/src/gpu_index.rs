//! `*.generated.gpuidx` of the original PowerInfer: which neurons of each layer the GPU computes.
//!
//! Two tensors per layer, in this order: `gpu_idx` `[neurons]`, 1 for a neuron on the GPU, and `gpu_bucket`, the ids of
//! those neurons, ascending.

use std::path::Path;

use powerinfer_model::gguf::{
    Dialect, Elements, GgufFile, Metadata, TensorEntry, Value, write_gguf,
};

use crate::ExportError;

/// Neurons that the original's GPU kernels process together; they skip the neurons beyond the last whole multiple.
pub(crate) const GROUP: usize = 256;

const BLOCK_COUNT: &str = "generic.gpu_index.block_count";
const CAPACITY: &str = "split.vram_capacity";

/// Which neurons of each layer the GPU computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuIndex {
    /// Neurons per layer.
    pub neurons: usize,
    /// Ids of each layer's neurons on the GPU, ascending.
    pub hot: Vec<Vec<u32>>,
    /// Bytes of the neurons on the GPU.
    pub capacity: u64,
}

impl GpuIndex {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, a tensor is missing, or two disagree.
    pub fn read(path: &Path) -> Result<Self, ExportError> {
        let file = GgufFile::open(path)?;
        let number = |key: &str| {
            let found = file.value(key).and_then(Value::as_f64);
            found.ok_or_else(|| ExportError::Index {
                path: path.to_owned(),
                reason: format!("`{key}` is missing or not a number"),
            })
        };
        let (layers, capacity) = (number(BLOCK_COUNT)? as usize, number(CAPACITY)? as u64);
        let (mut neurons, mut hot) = (0, Vec::new());
        for layer in 0..layers {
            let flags = file.integers(&format!("blk.{layer}.gpu_idx"))?;
            let mut ids = file.integers(&format!("blk.{layer}.gpu_bucket"))?;
            ids.sort_unstable();
            let flagged = (0..).zip(&flags).filter(|(_, flag)| **flag == 1);
            let flagged: Vec<i32> = flagged.map(|(id, _)| id).collect();
            if ids != flagged || (layer > 0 && flags.len() != neurons) {
                return Err(ExportError::Index {
                    path: path.to_owned(),
                    reason: format!("`gpu_idx` and `gpu_bucket` of layer {layer} disagree"),
                });
            }
            neurons = flags.len();
            hot.push(ids.into_iter().map(i32::cast_unsigned).collect());
        }
        Ok(Self {
            neurons,
            hot,
            capacity,
        })
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), ExportError> {
        let mut metadata = Metadata::default();
        metadata.push("general.architecture", "generic.gpu_index");
        metadata.push(BLOCK_COUNT, self.hot.len());
        metadata.push_u64(CAPACITY, self.capacity);
        let entry = |layer: usize, name: &str, length: usize| TensorEntry {
            name: format!("blk.{layer}.{name}"),
            shape: vec![length],
            elements: Elements::I32,
        };
        let entries: Vec<TensorEntry> = (self.hot.iter().enumerate())
            .flat_map(|(layer, hot)| {
                [
                    entry(layer, "gpu_idx", self.neurons),
                    entry(layer, "gpu_bucket", hot.len()),
                ]
            })
            .collect();
        let dialect = Dialect::PowerInfer;
        write_gguf(path, dialect, &metadata, &entries, |index, writer| {
            let hot = &self.hot[index / 2];
            if index % 2 == 1 {
                let ids: Vec<i32> = hot.iter().map(|id| id.cast_signed()).collect();
                return Ok::<_, ExportError>(writer.integers(&ids)?);
            }
            let mut flags = vec![0; self.neurons];
            hot.iter().for_each(|id| flags[*id as usize] = 1);
            Ok(writer.integers(&flags)?)
        })?;
        Ok(())
    }
}
