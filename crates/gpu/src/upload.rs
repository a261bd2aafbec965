//! Upload of a layer's weights to a device, from a bundle or from a checkpoint.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Ffn, GpuLinear, GpuNorm, HeadNorms};
use powerinfer_model::{
    Block, Checkpoint, LayerWeight, ModelConfig, ModelError, Positions, Weight,
};
use powerinfer_tensor::{Format, OwnedMatrix, bf16, f16, pack};

use crate::DeviceAttention;

/// Weights of a layer.
pub trait LayerSource {
    /// Uploads the first `rows` rows of a matrix, all if `None`, with the entries of `bias` for them; rows of down are
    /// neurons.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for them.
    fn linear(
        &self,
        device: &Arc<dyn Device>,
        weight: LayerWeight,
        bias: LayerWeight,
        rows: Option<usize>,
    ) -> Result<GpuLinear, DeviceError>;

    /// A vector; `None` if the layer does not have it.
    fn vector(&self, weight: LayerWeight) -> Option<Vec<f32>>;
}

/// Uploads parts of layers to one device.
///
/// # Errors
///
/// All methods return an error if the device has no room for the weights.
pub struct Upload<'a> {
    /// Device that the weights are copied to.
    pub device: &'a Arc<dyn Device>,
    /// Configuration of the model.
    pub config: &'a ModelConfig,
}

#[expect(clippy::missing_errors_doc, reason = "stated once for all methods")]
impl Upload<'_> {
    /// Uploads a vector.
    pub fn floats(&self, numbers: &[f32]) -> Result<Buffer<f32>, DeviceError> {
        Buffer::from_slice(self.device, numbers)
    }

    /// Uploads a norm.
    pub fn norm(&self, weight: &[f32], bias: Option<&[f32]>) -> Result<GpuNorm, DeviceError> {
        let epsilon = self.config.norm_epsilon;
        GpuNorm::upload(self.device, self.config.norm, epsilon, weight, bias)
    }

    /// Uploads a norm of a layer; `None` if the layer does not have it.
    fn norm_of(
        &self,
        source: &impl LayerSource,
        weight: LayerWeight,
        bias: LayerWeight,
    ) -> Result<Option<GpuNorm>, DeviceError> {
        let bias = source.vector(bias);
        let weight = source.vector(weight);
        weight
            .map(|weight| self.norm(&weight, bias.as_deref()))
            .transpose()
    }

    fn attention_norm(&self, source: &impl LayerSource) -> Result<Option<GpuNorm>, DeviceError> {
        use LayerWeight::{AttentionNorm, AttentionNormBias};
        self.norm_of(source, AttentionNorm, AttentionNormBias)
    }

    fn own_ffn_norm(&self, source: &impl LayerSource) -> Result<Option<GpuNorm>, DeviceError> {
        self.norm_of(source, LayerWeight::FfnNorm, LayerWeight::FfnNormBias)
    }

    /// Uploads the slopes of ALiBi; `None` for other positions.
    pub fn slopes(&self) -> Result<Option<Arc<Buffer<f32>>>, DeviceError> {
        match &self.config.positions {
            Positions::Alibi { slopes } => Ok(Some(Arc::new(self.floats(slopes)?))),
            _ => Ok(None),
        }
    }

    /// Uploads attention of layer `layer`.
    pub fn attention(
        &self,
        source: &impl LayerSource,
        layer: usize,
        slopes: Option<&Arc<Buffer<f32>>>,
    ) -> Result<DeviceAttention, DeviceError> {
        use LayerWeight::{
            Key, KeyBias, KeyNorm, KeyNormBias, Output, OutputBias, Query, QueryBias, QueryNorm,
            QueryNormBias, Value, ValueBias,
        };
        let linear = |weight, bias| source.linear(self.device, weight, bias, None);
        let query_norm = self.norm_of(source, QueryNorm, QueryNormBias)?;
        let key_norm = self.norm_of(source, KeyNorm, KeyNormBias)?;
        Ok(DeviceAttention {
            norm: if self.config.block.norms_input() {
                self.attention_norm(source)?
            } else {
                None
            },
            query: linear(Query, QueryBias)?,
            key: linear(Key, KeyBias)?,
            value: linear(Value, ValueBias)?,
            head_norms: query_norm
                .zip(key_norm)
                .map(|(query, key)| HeadNorms { query, key }),
            slopes: slopes.cloned(),
            sinks: (source.vector(LayerWeight::Sinks))
                .map(|sinks| self.floats(&sinks))
                .transpose()?,
            window: self.config.attention_windows[layer],
            output: linear(Output, OutputBias)?,
        })
    }

    /// Uploads the norm before the FFN; `None` in post-norm blocks.
    pub fn ffn_norm(&self, source: &impl LayerSource) -> Result<Option<GpuNorm>, DeviceError> {
        match self.config.block {
            Block::PostNorm | Block::OutputNorm => Ok(None),
            Block::ParallelSharedNorm => self.attention_norm(source),
            Block::PreNorm | Block::Parallel | Block::Sandwich => self.own_ffn_norm(source),
        }
    }

    /// Uploads the norms after attention and after the FFN; `None` in other than post-norm blocks.
    pub fn norms_after(
        &self,
        source: &impl LayerSource,
    ) -> Result<Option<[GpuNorm; 2]>, DeviceError> {
        if !self.config.block.is_post_norm() {
            return Ok(None);
        }
        let norms = self.attention_norm(source)?.zip(self.own_ffn_norm(source)?);
        Ok(norms.map(|(attention, ffn)| [attention, ffn]))
    }

    /// Uploads the first `hot` neurons.
    pub fn ffn(&self, source: &impl LayerSource, hot: usize) -> Result<Ffn, DeviceError> {
        use LayerWeight::{Down, DownBias, Gate, GateBias, Up, UpBias};
        let linear = |weight, bias| source.linear(self.device, weight, bias, Some(hot));
        let down = linear(Down, DownBias)?;
        Ok(Ffn {
            gate: linear(Gate, GateBias)?,
            up: if self.config.is_gated() {
                Some(linear(Up, UpBias)?)
            } else {
                None
            },
            down: down.matrix,
            bias: down.bias,
            kind: self.config.ffn,
            activation: self.config.activation,
        })
    }
}

/// Weights of a layer of a checkpoint in memory: each matrix in the smallest plain format that represents all its weights
/// exactly, down with a row per neuron.
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
    /// Reads layer `layer` of `checkpoint`, its matrices in parallel.
    ///
    /// # Errors
    ///
    /// Returns an error if a weight cannot be read.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer.
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

    /// L2 norm of every neuron's row of down, `[ffn]`: the contribution of an activation of one.
    pub fn contribution_norms(&self) -> &[f32] {
        &self.contribution_norms
    }
}

/// L2 norm.
fn norm_of(row: &[f32]) -> f32 {
    row.iter().map(|weight| weight * weight).sum::<f32>().sqrt()
}

/// Packs `values` in 16 bits if all of them are exact in one of the formats, else in 32.
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
    // Square tiles, so that neither side is accessed across pages for every number.
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
    ) -> Result<GpuLinear, DeviceError> {
        let Some(Part::Matrix(matrix)) = self.parts.get(&weight) else {
            unreachable!("{weight:?} is a matrix of every such layer")
        };
        let bias = self.vector(bias);
        let (matrix, bias) = (matrix.as_view(), bias.as_deref());
        GpuLinear::upload(device, &matrix, bias)
    }

    fn vector(&self, weight: LayerWeight) -> Option<Vec<f32>> {
        match self.parts.get(&weight) {
            Some(Part::Vector(values)) => Some(values.clone()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_exact() {
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
    fn transposition_swaps_rows_and_columns() {
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
