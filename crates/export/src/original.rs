//! Files of the original PowerInfer: `*.powerinfer.gguf` with predictors, and the index of the neurons on the GPU.

use std::path::{Path, PathBuf};

use powerinfer_artifact::Progress;
use powerinfer_bundle::Bundle;
use powerinfer_model::{
    ModelConfig,
    gguf::{Dialect, Elements, Export, ExportOptions, TensorEntry},
};
use powerinfer_tensor::{BLOCK, Format};

use crate::{
    ExportError, Exported, Source,
    gguf::write,
    gpu_index::{GROUP, GpuIndex},
    predictor::{Converted, Predictors},
};

/// Written files.
#[derive(Debug, Clone, PartialEq)]
pub struct OriginalFiles {
    /// The model.
    pub model: Exported,
    /// Format of its matrices.
    pub quant: Format,
    /// Path of the index of neurons on the GPU.
    pub index: PathBuf,
    /// Number of neurons on the GPU.
    pub hot_neurons: usize,
}

/// The original treats FFNs of at most 1000 neurons as attention heads, so smaller FFNs are padded to this size with
/// neurons of zeros.
const SMALLEST_FFN: usize = 1024;

/// The only number of positions of an OPT that the original supports, without the 2 rows before the first position. Smaller
/// tables of positions are padded with zeros.
const OPT_CONTEXT: usize = 2048;

/// Writes `bundle` to the file `out`, and its placement next to it, for the original PowerInfer. Without `quant`, the format is
/// q4_0 if the bundle's is, and f16 otherwise.
///
/// # Errors
///
/// The original cannot run the model or its predictors, a file cannot be read or written, or `progress` stops the work;
/// `out` is unchanged then.
#[expect(clippy::missing_panics_doc, reason = "each fc1 is followed by its fc2")]
pub fn to_original(
    bundle: &Bundle,
    quant: Option<Format>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<OriginalFiles, ExportError> {
    let own = bundle.config();
    let is_opt = own.family.starts_with("opt");
    let config = &ModelConfig {
        ffn_size: own.ffn_size.max(SMALLEST_FFN).next_multiple_of(BLOCK),
        context_length: if is_opt {
            OPT_CONTEXT
        } else {
            own.context_length
        },
        ..own.clone()
    };
    let quant = match (quant, bundle.quant()) {
        (Some(quant), _) => quant,
        (None, Format::Q4_0) => Format::Q4_0,
        (None, _) => Format::F16,
    };
    if !matches!(quant, Format::F16 | Format::Q4_0) {
        return Err(ExportError::Format {
            target: "the original PowerInfer",
            format: quant,
            supported: "f16 and q4_0",
        });
    }
    check(bundle)?;
    let source = Source::Bundle(bundle);
    let mut export = Export::plan(
        source.name(),
        config,
        &source.files(),
        ExportOptions {
            dialect: Dialect::PowerInfer,
            quant,
            tokenizer: true,
            any_activation: false,
        },
    )?;
    let has = |name: &str| {
        export
            .tensors
            .iter()
            .any(|tensor| tensor.entry.name == name)
    };
    if has("rope_freqs.weight") {
        return Err(refuse(
            bundle,
            "its engine does not support this RoPE scaling",
        ));
    }
    let predictors = Predictors::new(bundle, config.ffn_size)?;
    export
        .metadata
        .push("powerinfer.sparse_threshold", predictors.threshold);
    let mut notes = std::mem::take(&mut export.notes);
    let padding = config.ffn_size - bundle.config().ffn_size;
    if padding > 0 {
        notes.push(format!(
            "each layer is padded with {padding} neurons of zeros: the original treats FFNs of up to 1000 neurons as attention heads, and reads neurons in blocks of {BLOCK}"
        ));
    }
    if is_opt && own.context_length < OPT_CONTEXT {
        notes.push(format!(
            "the table of positions is padded with zeros to the original's {OPT_CONTEXT} tokens; the model has {}",
            own.context_length
        ));
    }
    notes.extend(
        export
            .metadata
            .text("tokenizer.ggml.model")
            .and_then(tokenizer_note),
    );
    notes.extend(predictors.notes(progress)?);
    if bundle
        .plan()
        .layers
        .iter()
        .any(|layer| layer.input_thresholds.is_some())
    {
        notes.push(
            "thresholds on the inputs of projections are left out: the original reads all inputs"
                .to_owned(),
        );
    }
    let entries: Vec<TensorEntry> = (0..config.layer_count)
        .flat_map(|layer| {
            let rank = predictors.rank(layer);
            let format = predictors.format(layer, quant);
            let entry = |name: &str, rows: usize, columns: usize| TensorEntry {
                name: format!("blk.{layer}.{name}.weight"),
                shape: vec![rows, columns],
                elements: Elements::Weights(if columns.is_multiple_of(BLOCK) {
                    format
                } else {
                    Format::F16
                }),
            };
            [
                entry("fc1", rank, config.hidden_size),
                entry("fc2", config.ffn_size, rank),
            ]
        })
        .collect();
    let mut converted: Option<Converted> = None;
    let bytes = write(source, &export, &entries, out, progress, |index, _| {
        if index % 2 == 1 {
            // The other matrix of the same predictor.
            let found = converted.take().expect("fc2 follows fc1");
            return Ok(found.fc2);
        }
        let mut found = predictors.convert(index / 2)?;
        let fc1 = std::mem::take(&mut found.fc1);
        converted = Some(found);
        Ok(fc1)
    })?;
    let (hot, dropped) = hot_neurons(bundle)?;
    if dropped > 0 {
        notes.push(format!(
            "{dropped} neurons of the plan's GPU part stay on the CPU: the original's kernels need multiples of {GROUP} per layer"
        ));
    }
    let hot_count: usize = hot.iter().map(Vec::len).sum();
    let per_neuron = config.matrices_per_neuron() * quant.row_bytes(config.hidden_size);
    let index = index_path(out);
    GpuIndex {
        neurons: config.ffn_size,
        hot,
        capacity: (hot_count * per_neuron) as u64,
    }
    .write(&index)?;
    Ok(OriginalFiles {
        model: Exported {
            bytes,
            tensors: export.tensors.len() + entries.len(),
            notes,
        },
        quant,
        index,
        hot_neurons: hot_count,
    })
}

/// Path of the index next to a model file, as the original expects it.
pub fn index_path(model: &Path) -> PathBuf {
    let mut path = model.as_os_str().to_owned();
    path.push(".generated.gpuidx");
    path.into()
}

/// How the original's engine splits texts differently, for a tokenizer of the kind `model`.
fn tokenizer_note(model: &str) -> Option<String> {
    let difference = match model {
        "llama" => "puts no space before a text, as SentencePiece does: begin prompts with one",
        "gpt2" => {
            "puts no BOS token before a text, and splits texts as GPT-2 does, whatever `tokenizer.ggml.pre` says"
        }
        _ => return None,
    };
    Some(format!("the original {difference}"))
}

/// Ids of each layer's neurons on the GPU, ascending, in whole groups; and how many of the plan's are left out.
fn hot_neurons(bundle: &Bundle) -> Result<(Vec<Vec<u32>>, usize), ExportError> {
    let mut dropped = 0;
    let mut all = Vec::new();
    for (layer, plan) in bundle.plan().layers.iter().enumerate() {
        let count = plan.hot_count / GROUP * GROUP;
        dropped += plan.hot_count - count;
        let mut hot = bundle.neuron_order(layer)?;
        hot.truncate(count);
        hot.sort_unstable();
        all.push(hot);
    }
    Ok((all, dropped))
}

/// Refuses models that the original's engine would compute differently or could not load.
fn check(bundle: &Bundle) -> Result<(), ExportError> {
    let config = bundle.config();
    let is_llama = match &config.family[..] {
        "llama" | "sparse_llama" | "mistral" | "bamboo" => true,
        "falcon" | "opt" | "opt_plain_norm" => false,
        other => {
            return Err(refuse(
                bundle,
                &format!("its engine supports Llama, Bamboo, Falcon and OPT, not {other}"),
            ));
        }
    };
    if config.family.starts_with("opt") && config.context_length > OPT_CONTEXT {
        return Err(refuse(
            bundle,
            &format!(
                "its engine supports {OPT_CONTEXT} positions for an OPT, but the model has {}",
                config.context_length
            ),
        ));
    }
    if config.head_size * config.head_count != config.hidden_size {
        return Err(refuse(
            bundle,
            "its engine needs heads that divide the hidden state",
        ));
    }
    let biases = config.biases;
    if is_llama && (biases.query_key_value || biases.attention_output || biases.ffn) {
        return Err(refuse(
            bundle,
            "its engine does not support biases in this architecture",
        ));
    }
    if !is_llama && !config.tied_embeddings && config.family.starts_with("opt") {
        return Err(refuse(
            bundle,
            "its engine uses the embeddings of an OPT as its head",
        ));
    }
    Ok(())
}

fn refuse(bundle: &Bundle, reason: &str) -> ExportError {
    ExportError::NotForOriginal {
        path: bundle.folder().to_owned(),
        reason: reason.to_owned(),
    }
}
