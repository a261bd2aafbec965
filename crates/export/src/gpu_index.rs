//! `*.generated.gpuidx` of the original PowerInfer: which neurons of each layer the GPU computes.
//!
//! Two tensors per layer, in this order: `gpu_idx` `[neurons]`, 1 for a neuron on the GPU, and `gpu_bucket`, the ids of
//! those neurons, ascending.

use std::path::Path;

use powerinfer_model::gguf::{Dialect, Elements, Metadata, TensorEntry, write_gguf};

use crate::ExportError;

/// Neurons that the original's GPU kernels process together; of a count that is no multiple they skip the rest.
pub(crate) const GROUP: usize = 256;

/// Writes the file; `hot` has the ids of each layer's neurons on the GPU, and `capacity` is their size in bytes.
pub(crate) fn write(
    path: &Path,
    neurons: usize,
    hot: &[Vec<u32>],
    capacity: u64,
) -> Result<(), ExportError> {
    let mut metadata = Metadata::default();
    metadata.push("general.architecture", "generic.gpu_index");
    metadata.push("generic.gpu_index.block_count", hot.len());
    metadata.push_u64("split.vram_capacity", capacity);
    let entry = |layer: usize, name: &str, length: usize| TensorEntry {
        name: format!("blk.{layer}.{name}"),
        shape: vec![length],
        elements: Elements::I32,
    };
    let entries: Vec<TensorEntry> = (hot.iter().enumerate())
        .flat_map(|(layer, hot)| {
            [
                entry(layer, "gpu_idx", neurons),
                entry(layer, "gpu_bucket", hot.len()),
            ]
        })
        .collect();
    write_gguf(
        path,
        Dialect::PowerInfer,
        &metadata,
        &entries,
        |index, writer| {
            let hot = &hot[index / 2];
            if index % 2 == 1 {
                let ids: Vec<i32> = hot.iter().map(|id| id.cast_signed()).collect();
                return Ok::<_, ExportError>(writer.integers(&ids)?);
            }
            let mut flags = vec![0; neurons];
            hot.iter().for_each(|id| flags[*id as usize] = 1);
            Ok(writer.integers(&flags)?)
        },
    )?;
    Ok(())
}
