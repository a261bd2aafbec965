//! Copies a layer to a device, from a bundle or from a checkpoint.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use powerinfer_artifact::TensorFile;
use powerinfer_bundle::{StoredLayer, StoredLinear, StoredNorm};
use powerinfer_kernels::cuda::{
    Buffer, Device, Ffn, GpuActivation, GpuFfnKind, GpuLinear, GpuNorm, GpuNormKind, HeadNorms,
};
use powerinfer_model::{
    Activation, Block, Checkpoint, FfnKind, LayerWeight, ModelConfig, ModelError, NormKind,
    Positions, Weight,
};
use powerinfer_tensor::{Format, OwnedMatrix, bf16, f16, pack};

use super::DeviceAttention;
use crate::RuntimeError;

/// Source of a layer's weights.
pub(super) trait LayerSource {
    /// The first `rows` rows of a matrix, or all, with their biases; rows of down are neurons.
    fn linear(
        &self,
        device: &Arc<dyn Device>,
        weight: LayerWeight,
        bias: LayerWeight,
        rows: Option<usize>,
    ) -> Result<GpuLinear, RuntimeError>;

    /// The values of a vector; none where the layer has none.
    fn vector(&self, weight: LayerWeight) -> Result<Option<Vec<f32>>, RuntimeError>;
}

/// Copies parts of layers to one device.
pub(super) struct Upload<'a> {
    pub(super) device: &'a Arc<dyn Device>,
    pub(super) config: &'a ModelConfig,
}

impl Upload<'_> {
    pub(super) fn floats(&self, numbers: &[f32]) -> Result<Buffer<f32>, RuntimeError> {
        Ok(Buffer::from_slice(self.device, numbers)?)
    }

    pub(super) fn norm(
        &self,
        weight: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<GpuNorm, RuntimeError> {
        let kind = match self.config.norm {
            NormKind::RootMeanSquare => GpuNormKind::RootMeanSquare,
            NormKind::Layer => GpuNormKind::Layer,
        };
        let epsilon = self.config.norm_epsilon;
        Ok(GpuNorm::upload(self.device, kind, epsilon, weight, bias)?)
    }

    /// A norm of the layer, where it has one.
    fn norm_of(
        &self,
        source: &impl LayerSource,
        weight: LayerWeight,
        bias: LayerWeight,
    ) -> Result<Option<GpuNorm>, RuntimeError> {
        let bias = source.vector(bias)?;
        let weight = source.vector(weight)?;
        weight
            .map(|weight| self.norm(&weight, bias.as_deref()))
            .transpose()
    }

    fn attention_norm(&self, source: &impl LayerSource) -> Result<Option<GpuNorm>, RuntimeError> {
        use LayerWeight::{AttentionNorm, AttentionNormBias};
        self.norm_of(source, AttentionNorm, AttentionNormBias)
    }

    fn own_ffn_norm(&self, source: &impl LayerSource) -> Result<Option<GpuNorm>, RuntimeError> {
        self.norm_of(source, LayerWeight::FfnNorm, LayerWeight::FfnNormBias)
    }

    /// ALiBi slopes, where the model uses them.
    pub(super) fn slopes(&self) -> Result<Option<Arc<Buffer<f32>>>, RuntimeError> {
        match &self.config.positions {
            Positions::Alibi { slopes } => Ok(Some(Arc::new(self.floats(slopes)?))),
            _ => Ok(None),
        }
    }

    /// Attention of layer `layer`.
    pub(super) fn attention(
        &self,
        source: &impl LayerSource,
        layer: usize,
        slopes: Option<&Arc<Buffer<f32>>>,
    ) -> Result<DeviceAttention, RuntimeError> {
        use LayerWeight::{
            Key, KeyBias, KeyNorm, KeyNormBias, Output, OutputBias, Query, QueryBias, QueryNorm,
            QueryNormBias, Value, ValueBias,
        };
        let linear = |weight, bias| source.linear(self.device, weight, bias, None);
        let query_norm = self.norm_of(source, QueryNorm, QueryNormBias)?;
        let key_norm = self.norm_of(source, KeyNorm, KeyNormBias)?;
        Ok(DeviceAttention {
            norm: match self.config.block {
                Block::PostNorm => None,
                _ => self.attention_norm(source)?,
            },
            query: linear(Query, QueryBias)?,
            key: linear(Key, KeyBias)?,
            value: linear(Value, ValueBias)?,
            head_norms: query_norm
                .zip(key_norm)
                .map(|(query, key)| HeadNorms { query, key }),
            slopes: slopes.cloned(),
            window: self.config.attention_windows[layer],
            output: linear(Output, OutputBias)?,
        })
    }

    /// The norm of the FFN's input; none in post-norm models.
    pub(super) fn ffn_norm(
        &self,
        source: &impl LayerSource,
    ) -> Result<Option<GpuNorm>, RuntimeError> {
        match self.config.block {
            Block::PostNorm => Ok(None),
            Block::ParallelSharedNorm => self.attention_norm(source),
            Block::PreNorm | Block::Parallel => self.own_ffn_norm(source),
        }
    }

    /// The norms after attention and after the FFN of post-norm models.
    pub(super) fn norms_after(
        &self,
        source: &impl LayerSource,
    ) -> Result<Option<[GpuNorm; 2]>, RuntimeError> {
        if self.config.block != Block::PostNorm {
            return Ok(None);
        }
        let behind = self.attention_norm(source)?.zip(self.own_ffn_norm(source)?);
        Ok(behind.map(|(attention, ffn)| [attention, ffn]))
    }

    /// The first `hot` neurons.
    pub(super) fn ffn(&self, source: &impl LayerSource, hot: usize) -> Result<Ffn, RuntimeError> {
        use LayerWeight::{Down, DownBias, Gate, GateBias, Up, UpBias};
        let linear = |weight, bias| source.linear(self.device, weight, bias, Some(hot));
        let down = linear(Down, DownBias)?;
        Ok(Ffn {
            gate: linear(Gate, GateBias)?,
            up: match self.config.is_gated() {
                true => Some(linear(Up, UpBias)?),
                false => None,
            },
            down: down.matrix,
            bias: down.bias,
            kind: match self.config.ffn {
                FfnKind::Plain => GpuFfnKind::Plain,
                FfnKind::Gated => GpuFfnKind::Gated,
                FfnKind::DoublyGated => GpuFfnKind::DoublyGated,
            },
            activation: match self.config.activation {
                Activation::Relu => GpuActivation::Relu,
                Activation::SquaredRelu => GpuActivation::SquaredRelu,
                Activation::FatRelu { threshold } => GpuActivation::FatRelu(threshold),
                Activation::Silu => GpuActivation::Silu,
                Activation::GeluErf => GpuActivation::GeluErf,
                Activation::GeluTanh => GpuActivation::GeluTanh,
            },
        })
    }
}

/// A layer of a bundle.
pub(super) struct OfBundle<'a> {
    pub(super) file: &'a TensorFile,
    pub(super) layer: &'a StoredLayer,
}

/// Copies a bundle's matrix and its bias.
pub(super) fn upload_stored(
    device: &Arc<dyn Device>,
    file: &TensorFile,
    stored: &StoredLinear,
) -> Result<GpuLinear, RuntimeError> {
    let matrix = stored.matrix.view(file);
    Ok(GpuLinear::upload(device, &matrix, stored.bias.as_deref())?)
}

impl LayerSource for OfBundle<'_> {
    fn linear(
        &self,
        device: &Arc<dyn Device>,
        weight: LayerWeight,
        _bias: LayerWeight,
        rows: Option<usize>,
    ) -> Result<GpuLinear, RuntimeError> {
        let layer = self.layer;
        let stored = match weight {
            LayerWeight::Query => &layer.query,
            LayerWeight::Key => &layer.key,
            LayerWeight::Value => &layer.value,
            LayerWeight::Output => &layer.output,
            LayerWeight::Gate => &layer.gate,
            LayerWeight::Up => layer.up.as_ref().expect("a gated layer has it"),
            LayerWeight::Down => &layer.down,
            other => unreachable!("{other:?} is no matrix"),
        };
        let Some(rows) = rows else {
            return upload_stored(device, self.file, stored);
        };
        let matrix = stored.matrix.view(self.file).rows_range(0..rows);
        let bias = stored.bias.as_deref().map(|bias| match weight {
            LayerWeight::Down => bias, // of sums, not of neurons
            _ => &bias[..rows],
        });
        Ok(GpuLinear::upload(device, &matrix, bias)?)
    }

    fn vector(&self, weight: LayerWeight) -> Result<Option<Vec<f32>>, RuntimeError> {
        let layer = self.layer;
        let head = |index: usize| layer.head_norms.as_ref().map(|norms| &norms[index]);
        let (norm, is_bias): (Option<&StoredNorm>, bool) = match weight {
            LayerWeight::AttentionNorm => (Some(&layer.attention_norm), false),
            LayerWeight::AttentionNormBias => (Some(&layer.attention_norm), true),
            LayerWeight::FfnNorm => (layer.ffn_norm.as_ref(), false),
            LayerWeight::FfnNormBias => (layer.ffn_norm.as_ref(), true),
            LayerWeight::QueryNorm => (head(0), false),
            LayerWeight::QueryNormBias => (head(0), true),
            LayerWeight::KeyNorm => (head(1), false),
            LayerWeight::KeyNormBias => (head(1), true),
            other => unreachable!("{other:?} is no part of a norm"),
        };
        Ok(match is_bias {
            true => norm.and_then(|norm| norm.bias.clone()),
            false => norm.map(|norm| norm.weight.clone()),
        })
    }
}

/// The weights of a layer of a checkpoint in memory: each matrix in the smallest float format that represents it
/// exactly, down stored by neurons.
#[derive(Debug)]
pub struct LayerWeights {
    parts: HashMap<LayerWeight, Part>,
    contribution_norms: Vec<f32>,
}

/// A matrix or a vector.
#[derive(Debug)]
enum Part {
    Matrix(OwnedMatrix),
    Vector(Vec<f32>),
}

impl LayerWeights {
    /// Reads layer `layer` of `checkpoint`, its matrices on all cores.
    pub fn read(checkpoint: &Checkpoint, layer: usize) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let read = |weight: LayerWeight| -> Result<(LayerWeight, Part, Vec<f32>), ModelError> {
            let values = checkpoint.read(Weight::Layer(layer, weight))?;
            let shape = config.shape(Weight::Layer(layer, weight));
            let mut norms = Vec::new();
            let part = match (&shape[..], weight) {
                (&[outputs, inputs], LayerWeight::Down) => {
                    let rows = transposed(&values, outputs, inputs);
                    norms = rows.chunks_exact(outputs).map(norm_of).collect();
                    Part::Matrix(pack_exactly(inputs, outputs, &rows))
                }
                (&[outputs, inputs], _) => Part::Matrix(pack_exactly(outputs, inputs, &values)),
                _ => Part::Vector(values),
            };
            Ok((weight, part, norms))
        };
        let (next, weights) = (AtomicUsize::new(0), config.layer_weights());
        let take = || {
            let mut taken = Vec::new();
            while let Some(weight) = weights.get(next.fetch_add(1, Ordering::Relaxed)) {
                taken.push(read(*weight)?);
            }
            Ok::<_, ModelError>(taken)
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let all = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads.min(weights.len()))
                .map(|_| scope.spawn(take))
                .collect();
            let mut all = vec![take()];
            for other in others {
                match other.join() {
                    Ok(taken) => all.push(taken),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        });
        let mut found = Self {
            parts: HashMap::new(),
            contribution_norms: Vec::new(),
        };
        for taken in all {
            for (weight, part, norms) in taken? {
                if weight == LayerWeight::Down {
                    found.contribution_norms = norms;
                }
                found.parts.insert(weight, part);
            }
        }
        Ok(found)
    }

    /// L2 norm of every neuron's row of down, `[ffn]`.
    pub(super) fn contribution_norms(&self) -> &[f32] {
        &self.contribution_norms
    }
}

fn norm_of(row: &[f32]) -> f32 {
    row.iter().map(|weight| weight * weight).sum::<f32>().sqrt()
}

/// `values` in f16 or bf16 where that is exact, else in f32.
fn pack_exactly(rows: usize, columns: usize, values: &[f32]) -> OwnedMatrix {
    let is_exact = |format: Format| {
        values.iter().all(|value| {
            let back = match format {
                Format::F16 => f32::from(f16::from_f32(*value)),
                _ => f32::from(bf16::from_f32(*value)),
            };
            back == *value
        })
    };
    let plain = [Format::F16, Format::Bf16].into_iter();
    let format = plain.into_iter().find(|format| is_exact(*format));
    pack(format.unwrap_or(Format::F32), rows, columns, values)
}

/// Transposes `[rows, columns]` to `[columns, rows]`.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    // Square tiles, so that neither side is accessed across pages all the time.
    const TILE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for column in first_column..columns.min(first_column + TILE) {
                    out[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    out
}

impl LayerSource for LayerWeights {
    fn linear(
        &self,
        device: &Arc<dyn Device>,
        weight: LayerWeight,
        bias: LayerWeight,
        _rows: Option<usize>,
    ) -> Result<GpuLinear, RuntimeError> {
        let Some(Part::Matrix(matrix)) = self.parts.get(&weight) else {
            unreachable!("{weight:?} is a matrix that every such layer has")
        };
        let bias = self.vector(bias)?;
        let (matrix, bias) = (matrix.as_view(), bias.as_deref());
        Ok(GpuLinear::upload(device, &matrix, bias)?)
    }

    fn vector(&self, weight: LayerWeight) -> Result<Option<Vec<f32>>, RuntimeError> {
        Ok(match self.parts.get(&weight) {
            Some(Part::Vector(values)) => Some(values.clone()),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_stay_what_they_are() {
        let halves = [1.0, -0.333_251_95, 65504.0, 2.0];
        assert_eq!(pack_exactly(2, 2, &halves).as_view().format(), Format::F16);
        let brains = [1.0, 2.0f32.powi(100), -3.0, 2.0];
        assert_eq!(pack_exactly(2, 2, &brains).as_view().format(), Format::Bf16);
        let neither = [1.0, 1e30, 1.000_001, 2.0];
        let packed = pack_exactly(2, 2, &neither);
        assert_eq!(packed.as_view().format(), Format::F32);
        let mut row = [0.0; 2];
        packed.as_view().dequantise_row(1, &mut row);
        assert_eq!(row, neither[2..]);
    }

    #[test]
    fn rows_become_columns() {
        let (rows, columns) = (37, 70);
        let values: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        let turned = transposed(&values, rows, columns);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(turned[column * rows + row], values[row * columns + column]);
            }
        }
    }
}
