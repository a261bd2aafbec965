//! Writing a synthetic checkpoint in chunks of rows.

use std::{collections::BTreeMap, path::Path};

use half::{bf16, f16};
use powerinfer_artifact::{
    Progress, predictor_file,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, TensorWriter, fill_tensors},
    write::{Contents, PartialFolder, write_file},
};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LayerWeight, StoredTensor, Weight};
use rayon::prelude::*;
use serde_json::json;

use crate::{
    Shape, SynthError,
    noise::Noise,
    plan::Plan,
    predictor::{LowRank, write_predictors},
    rates::{of_experts, rates},
    recipe::{POSITIONS, head_deviation, projection_deviation, recipe},
    tokenizer::tokenizer,
};

/// Size of a shard beyond which a new one starts.
const SHARD_BYTES: usize = 4 << 30;
/// Elements that are generated and written at a time.
const CHUNK: usize = 4 << 20;

/// Settings of a synthetic checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Share of FFN activations that are exactly zero.
    pub sparsity: f64,
    /// Share of a layer's neurons that carry 80% of its activations.
    pub skew: f64,
    /// Element type: F32, F16 or BF16.
    pub dtype: Dtype,
    /// Rank of predictors to write along with the model, whose gates are then of low rank.
    pub predictor_rank: Option<usize>,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Files of a checkpoint.
fn contents() -> Contents {
    Contents::never_replaced("config.json").with_names(&[
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "model-#-of-#.safetensors",
        "model.safetensors.index.json",
        &format!("predictors/{}", predictor_file::FILE),
    ])
}

/// Writes a checkpoint of this `shape` into the folder `out` atomically and opens it; predictors, if
/// requested, are in its subfolder `predictors`.
///
/// # Errors
///
/// `out` exists, the shape or the settings are not supported, or a file cannot be written.
pub fn synthesise(
    shape: &Shape,
    settings: Settings,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Checkpoint, SynthError> {
    if out.exists() {
        return Err(SynthError::Exists {
            path: out.to_owned(),
        });
    }
    let config = shape.describe()?;
    let neurons = rates(config.ffn_size, settings.sparsity, settings.skew)?;
    let experts = match &config.experts {
        Some(experts) => of_experts(experts, settings.skew)?,
        None => Vec::new(),
    };
    let layers = recipe(&config, &neurons, &experts)?;
    let plan = Plan {
        config: &config,
        settings,
        layers: &layers,
        isa: Isa::detect()?,
    };
    LowRank::check(&plan)?;
    let tokenizer = tokenizer(config.vocabulary_size)?;

    let folder = PartialFolder::open(out, contents())?;
    folder.clear()?;
    let end_of_text = config.vocabulary_size as u32 - 1;
    let marks = json!({
        "like": shape.name, "sparsity": settings.sparsity, "skew": settings.skew,
        "predictor_rank": settings.predictor_rank, "seed": settings.seed,
    });
    let dtype = match settings.dtype {
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        _ => "float32",
    };
    let file = |name: &str, bytes: &[u8]| write_file(&folder.path().join(name), bytes);
    file("config.json", &shape.file(dtype, end_of_text, marks))?;
    file("tokenizer.json", &tokenizer)?;
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
        "model_max_length": config.context_length, "clean_up_tokenization_spaces": false,
    });
    file(
        "tokenizer_config.json",
        tokenizer_config.to_string().as_bytes(),
    )?;
    write_weights(&plan, folder.path(), progress)?;
    if settings.predictor_rank.is_some() {
        let model = Checkpoint::open(folder.path())?.identity().clone();
        let name = out.file_name().unwrap_or_default();
        let model = powerinfer_artifact::ModelIdentity {
            name: name.to_string_lossy().into_owned(),
            ..model
        };
        write_predictors(&plan, model, &folder.path().join("predictors"), progress)?;
    }
    folder.finish()?;
    Ok(Checkpoint::open(out)?)
}

/// Writes all tensors, into one file or into shards with an index.
fn write_weights(
    plan: &Plan<'_>,
    folder: &Path,
    progress: &dyn Progress,
) -> Result<(), SynthError> {
    let element = plan.settings.dtype.bitsize() / 8;
    let bytes = |tensor: &StoredTensor| tensor.shape.iter().product::<usize>() * element;
    let mut shards: Vec<Vec<StoredTensor>> = vec![Vec::new()];
    let (mut total, mut filled) = (0, 0);
    for tensor in plan.config.stored_tensors() {
        let size = bytes(&tensor);
        if filled > 0 && filled + size > SHARD_BYTES {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        total += size;
        shards
            .last_mut()
            .expect("there is always a shard")
            .push(tensor);
    }
    progress.begin("writing weights", total as u64, "bytes");
    let count = shards.len();
    let mut index = BTreeMap::new();
    for (number, tensors) in shards.iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let shapes: TensorShapes = tensors
            .iter()
            .map(|tensor| {
                let shape = (plan.settings.dtype, tensor.shape.clone());
                (tensor.name.clone(), shape)
            })
            .collect();
        fill_tensors(&folder.join(&name), None, &shapes, |writer| {
            tensors
                .iter()
                .try_for_each(|tensor| write_tensor(plan, tensor, writer, progress))
        })?;
        index.extend(
            tensors
                .iter()
                .map(|tensor| (tensor.name.clone(), name.clone())),
        );
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": index });
        let bytes = serde_json::to_vec_pretty(&index).expect("a map of JSON is JSON");
        write_file(&folder.join("model.safetensors.index.json"), &bytes)?;
    }
    progress.end();
    Ok(())
}

/// Generates and writes the rows of a tensor.
fn write_tensor(
    plan: &Plan<'_>,
    tensor: &StoredTensor,
    writer: &mut TensorWriter,
    progress: &dyn Progress,
) -> Result<(), SynthError> {
    let columns = tensor.shape.last().copied().unwrap_or(1);
    let rows = tensor.shape.iter().product::<usize>() / columns.max(1);
    let generator = RowGenerator::new(plan, tensor);
    let rows_per_chunk = (CHUNK / columns.max(1)).clamp(1, rows);
    for start in (0..rows).step_by(rows_per_chunk) {
        let count = rows_per_chunk.min(rows - start);
        let mut values = vec![0.0f32; count * columns];
        generator.fill(start, columns, &mut values);
        let bytes = encode(plan.settings.dtype, &values);
        writer.append(&tensor.name, &bytes)?;
        progress.advance(bytes.len() as u64)?;
    }
    Ok(())
}

/// Converts values to `dtype`, little-endian.
fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    fn with<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
        let mut out = vec![0; values.len() * N];
        out.par_chunks_mut(N << 16)
            .zip(values.par_chunks(1 << 16))
            .for_each(|(out, values)| {
                for (out, value) in out.as_chunks_mut::<N>().0.iter_mut().zip(values) {
                    *out = bytes(*value);
                }
            });
        out
    }
    match dtype {
        Dtype::F16 => with(values, |value| f16::from_f32(value).to_le_bytes()),
        Dtype::BF16 => with(values, |value| bf16::from_f32(value).to_le_bytes()),
        _ => with(values, f32::to_le_bytes),
    }
}

/// Generator of one tensor's rows.
struct RowGenerator<'a> {
    noise: Noise,
    distribution: Distribution,
    low_rank: Option<LowRank<'a>>,
}

/// Distribution of a tensor.
enum Distribution {
    /// Constant.
    Constant(f32),
    /// One row of `one` with random signs, and zero for channel 0, which must not contribute.
    Signs { one: f32 },
    /// Noise with given values in column 0.
    Noise { deviation: f32, first: Column0 },
    /// Noise with row 0 zero, for projections that add to the hidden state and must not modify channel 0.
    Update { deviation: f32 },
}

/// Values of column 0.
enum Column0 {
    Same(f32),
    PerRow(Vec<f32>),
}

impl<'a> RowGenerator<'a> {
    fn new(plan: &'a Plan<'a>, tensor: &StoredTensor) -> Self {
        let config = plan.config;
        let hidden = config.hidden_size as f64;
        let scale = f64::from(config.embedding_scale);
        let noise = |deviation: f64, first: f64| Distribution::Noise {
            deviation: deviation as f32,
            first: Column0::Same(first as f32),
        };
        let projection = projection_deviation(config);
        // A tensor may contain only the neurons of one expert.
        let own = |offsets: Vec<f32>| {
            let rows = tensor.shape[0];
            offsets[tensor.first..][..rows].to_vec()
        };
        let mut low_rank = None;
        let distribution = match tensor.weight {
            Weight::Embedding => noise(1.0 / scale, hidden.sqrt() / scale),
            Weight::Positions => noise(POSITIONS, 0.0),
            Weight::Head => noise(1.0 / hidden.sqrt(), 0.0),
            Weight::FinalNorm => Distribution::Signs { one: tensor.one },
            Weight::ProjectIn | Weight::ProjectOut => {
                unreachable!("embeddings are as wide as the hidden state")
            }
            Weight::FinalNormBias | Weight::HeadBias => Distribution::Constant(0.0),
            Weight::Layer(layer, weight) => {
                let recipe = &plan.layers[layer];
                match weight {
                    LayerWeight::AttentionNorm
                    | LayerWeight::AttentionOutputNorm
                    | LayerWeight::FfnNorm
                    | LayerWeight::FfnOutputNorm
                    | LayerWeight::QueryDownNorm
                    | LayerWeight::LatentNorm
                    | LayerWeight::QueryNorm
                    | LayerWeight::KeyNorm => Distribution::Constant(tensor.one),
                    LayerWeight::Router => Distribution::Noise {
                        deviation: projection as f32,
                        first: Column0::PerRow(plan.router_offsets(layer)),
                    },
                    LayerWeight::SharedGate => noise(projection, 0.0),
                    LayerWeight::QueryDown | LayerWeight::LatentQuery => noise(projection, 0.0),
                    LayerWeight::Query | LayerWeight::Key | LayerWeight::Value => {
                        noise(head_deviation(config), 0.0)
                    }
                    LayerWeight::Output => Distribution::Update {
                        deviation: recipe.output as f32,
                    },
                    LayerWeight::Gate => {
                        low_rank = LowRank::new(plan, layer);
                        Distribution::Noise {
                            deviation: projection as f32,
                            first: Column0::PerRow(own(plan.gate_offsets(layer))),
                        }
                    }
                    LayerWeight::Up => match &recipe.up_offsets {
                        None => noise(projection, 0.0),
                        Some(offsets) => {
                            let ranks = plan.ranks(layer).into_iter();
                            let offsets = ranks.map(|rank| offsets[rank as usize] as f32);
                            Distribution::Noise {
                                deviation: projection as f32,
                                first: Column0::PerRow(own(offsets.collect())),
                            }
                        }
                    },
                    LayerWeight::Down => Distribution::Update {
                        deviation: recipe.down as f32,
                    },
                    LayerWeight::AttentionNormBias
                    | LayerWeight::QueryBias
                    | LayerWeight::KeyBias
                    | LayerWeight::ValueBias
                    | LayerWeight::QueryNormBias
                    | LayerWeight::KeyNormBias
                    | LayerWeight::OutputBias
                    | LayerWeight::FfnNormBias
                    | LayerWeight::GateBias
                    | LayerWeight::UpBias
                    | LayerWeight::Sinks
                    | LayerWeight::RouterBias
                    | LayerWeight::DownBias => Distribution::Constant(0.0),
                }
            }
        };
        Self {
            noise: plan.noise(&tensor.name),
            distribution,
            low_rank,
        }
    }

    /// Generates rows from row `start`.
    fn fill(&self, start: usize, columns: usize, out: &mut [f32]) {
        let rows =
            |out: &mut [f32], deviation: f32, modify: &(dyn Fn(usize, &mut [f32]) + Sync)| {
                out.par_chunks_mut(columns)
                    .enumerate()
                    .for_each(|(index, row)| {
                        self.noise.fill(start + index, deviation, row);
                        modify(start + index, row);
                    });
            };
        match &self.distribution {
            Distribution::Constant(value) => out.fill(*value),
            Distribution::Signs { one } => {
                self.noise.fill(start, 1.0, out);
                for value in out.iter_mut() {
                    *value = value.signum() - 1.0 + one;
                }
                out[0] = one - 1.0;
            }
            Distribution::Update { deviation } => rows(out, *deviation, &|row, values| {
                if row == 0 {
                    values.fill(0.0);
                }
            }),
            Distribution::Noise { deviation, first } => {
                match &self.low_rank {
                    Some(low_rank) => low_rank.fill(start, columns, out),
                    None => rows(out, *deviation, &|_, _| {}),
                }
                for (index, row) in out.chunks_mut(columns).enumerate() {
                    row[0] = match first {
                        Column0::Same(value) => *value,
                        Column0::PerRow(values) => values[start + index],
                    };
                }
            }
        }
    }
}
