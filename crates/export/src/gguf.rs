//! GGUF files for llama.cpp and Ollama.

use std::path::Path;

use powerinfer_artifact::Progress;
use powerinfer_model::{
    Weight,
    gguf::{
        Content, DataWriter, Dialect, Elements, Export, ExportOptions, PlannedTensor, TensorEntry,
        write_gguf,
    },
};
use powerinfer_tensor::{Format, pack};

use crate::{ExportError, Source};

/// Settings of an export to GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufOptions {
    /// Format of the matrices.
    pub quant: Format,
    /// Whether the tokenizer is exported.
    pub tokenizer: bool,
    /// Whether the file may mean another activation function, for measurements of speed.
    pub any_activation: bool,
}

/// A written file.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Differences from the source.
    pub notes: Vec<String>,
}

/// Writes `source` to the GGUF file `out` atomically.
///
/// # Errors
///
/// GGUF cannot represent the model, its tokenizer or a weight, a file cannot be read or written, or `progress` stops the
/// work; `out` is unchanged then.
pub fn to_gguf(
    source: Source<'_>,
    options: GgufOptions,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Exported, ExportError> {
    if options.quant == Format::Q4K {
        return Err(ExportError::Format {
            target: "the export to GGUF",
            format: options.quant,
            supported: "f32, f16, bf16, q8_0 and q4_0; for others quantise an f16 file with `llama-quantize`",
        });
    }
    let export = Export::plan(
        source.name(),
        source.config(),
        &source.files(),
        ExportOptions {
            dialect: Dialect::Ggml,
            quant: options.quant,
            tokenizer: options.tokenizer,
            any_activation: options.any_activation,
        },
    )?;
    let mut notes = export.notes.clone();
    if let Source::Bundle(bundle) = source {
        notes.push(format!(
            "the weights are those of the bundle in {}; export the model for the original ones",
            bundle.quant()
        ));
    }
    let bytes = write(source, &export, &[], out, progress, |_, _| {
        unreachable!("there are no other tensors")
    })?;
    Ok(Exported {
        bytes,
        tensors: export.tensors.len(),
        notes,
    })
}

/// Writes the tensors of `export`, and `others` with the values that `value_of` computes.
pub(crate) fn write(
    source: Source<'_>,
    export: &Export,
    others: &[TensorEntry],
    out: &Path,
    progress: &dyn Progress,
    mut value_of: impl FnMut(usize, &dyn Progress) -> Result<Vec<f32>, ExportError>,
) -> Result<u64, ExportError> {
    let planned = export.tensors.iter().map(|tensor| tensor.entry.clone());
    let entries: Vec<TensorEntry> = planned.chain(others.iter().cloned()).collect();
    let total: usize = entries.iter().map(elements).sum();
    progress.begin("exporting", total as u64, "weights");
    let written = write_gguf(
        out,
        export.dialect,
        &export.metadata,
        &entries,
        |index, writer| match export.tensors.get(index) {
            Some(tensor) => write_tensor(source, tensor, writer, progress),
            None => {
                let values = value_of(index - export.tensors.len(), progress)?;
                write_rows(&entries[index], &values, writer)?;
                Ok(progress.advance(values.len() as u64)?)
            }
        },
    )?;
    progress.end();
    Ok(written)
}

/// Number of elements of a tensor.
fn elements(entry: &TensorEntry) -> usize {
    entry.shape.iter().product()
}

/// Elements that are read and written at a time, if rows are independent.
const CHUNK: usize = 1 << 22;

fn write_tensor(
    source: Source<'_>,
    tensor: &PlannedTensor,
    writer: &mut DataWriter<'_>,
    progress: &dyn Progress,
) -> Result<(), ExportError> {
    let entry = &tensor.entry;
    let total = elements(entry);
    match &tensor.content {
        Content::Values(values) => write_rows(entry, values, writer)?,
        Content::Rows(weight) if entry.shape.len() > 1 && is_large(*weight) => {
            let (rows, columns) = (entry.shape[0], total / entry.shape[0]);
            let step = (CHUNK / columns).clamp(1, rows);
            for start in (0..rows).step_by(step) {
                let chunk = start..rows.min(start + step);
                let values = source.read_rows(*weight, chunk)?;
                write_rows(entry, &values, writer)?;
                progress.advance(values.len() as u64)?;
            }
            return Ok(());
        }
        Content::Rows(weight) => {
            write_rows(entry, &source.read_padded(*weight, &entry.shape)?, writer)?;
        }
        Content::Moved(parts) => {
            let mut values = vec![0.0; total];
            for part in parts {
                part.store(&source.read_padded(part.weight, &part.shape)?, &mut values);
            }
            write_rows(entry, &values, writer)?;
        }
    }
    Ok(progress.advance(total as u64)?)
}

/// Whether a matrix may be many times as large as those of a layer.
fn is_large(weight: Weight) -> bool {
    matches!(weight, Weight::Embedding | Weight::Head)
}

/// Packs and writes whole rows of a tensor.
fn write_rows(
    entry: &TensorEntry,
    values: &[f32],
    writer: &mut DataWriter<'_>,
) -> Result<(), ExportError> {
    let Elements::Weights(format) = entry.elements else {
        unreachable!("weights are numbers");
    };
    if let Some(index) = format.first_beyond(values) {
        return Err(ExportError::Beyond {
            tensor: entry.name.clone(),
            value: values[index],
            format,
        });
    }
    let columns = entry.shape.last().copied().unwrap_or(1);
    let packed = pack(format, values.len() / columns, columns, values);
    Ok(writer.rows(&packed.as_view())?)
}
