//! Tensors of `weights.safetensors`.
//!
//! Every matrix is packed in the bundle's format. The three FFN matrices have one row per neuron (down is
//! transposed) in one order, hottest first; `neurons` maps each row to the checkpoint's neuron. Matrices
//! with input thresholds are transposed too, one row per input, which their names state. Norms, biases and
//! learned positions are F32.

use std::collections::HashSet;

use powerinfer_artifact::{
    ArtifactError, TensorFile, matrix_planes::StoredMatrix, plan::LayerPlan, tensor_file::Dtype,
};
use powerinfer_model::{LayerWeight, ModelConfig, Weight};
use powerinfer_tensor::Format;

use crate::BundleError;

/// Memory layout of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// One row per output.
    ByOutput,
    /// One row per input: rows of skipped inputs are not read.
    ByInput,
}

impl Layout {
    /// Returns the layout of `weight` without input thresholds.
    fn default_for(weight: Weight) -> Self {
        match weight {
            Weight::Layer(_, LayerWeight::Down) => Self::ByInput,
            _ => Self::ByOutput,
        }
    }

    /// Returns the layout of `weight` under the plans of all layers.
    pub(crate) fn planned(weight: Weight, layers: &[LayerPlan]) -> Self {
        use LayerWeight::{Gate, Key, Output, Query, Up, Value};
        let Weight::Layer(layer, layer_weight) = weight else {
            return Self::default_for(weight);
        };
        let thresholds = layers.get(layer).and_then(|plan| plan.input_thresholds);
        match (layer_weight, thresholds) {
            (Query | Key | Value | Output, Some(_)) => Self::ByInput,
            (Gate | Up, Some(thresholds)) if thresholds.ffn.is_some() => Self::ByInput,
            _ => Self::default_for(weight),
        }
    }
}

/// Name of a weight's tensor.
pub(crate) fn name(weight: Weight, layout: Layout) -> String {
    let mut name = base_name(weight);
    if layout != Layout::default_for(weight) {
        name += ".by_input";
    }
    name
}

fn base_name(weight: Weight) -> String {
    let (layer, weight) = match weight {
        Weight::Embedding => return "embedding".to_owned(),
        Weight::Positions => return "positions".to_owned(),
        Weight::ProjectIn => return "project_in".to_owned(),
        Weight::ProjectOut => return "project_out".to_owned(),
        Weight::FinalNorm => return "final_norm".to_owned(),
        Weight::FinalNormBias => return "final_norm.bias".to_owned(),
        Weight::Head => return "head".to_owned(),
        Weight::HeadBias => return "head.bias".to_owned(),
        Weight::Layer(layer, weight) => (layer, weight),
    };
    let part = match weight {
        LayerWeight::AttentionNorm => "attention_norm",
        LayerWeight::AttentionNormBias => "attention_norm.bias",
        LayerWeight::QueryDown => "query_down",
        LayerWeight::QueryDownNorm => "query_down_norm",
        LayerWeight::LatentNorm => "latent_norm",
        LayerWeight::LatentQuery => "latent_query",
        LayerWeight::Query => "query",
        LayerWeight::QueryBias => "query.bias",
        LayerWeight::Key => "key",
        LayerWeight::KeyBias => "key.bias",
        LayerWeight::Value => "value",
        LayerWeight::ValueBias => "value.bias",
        LayerWeight::QueryNorm => "query_norm",
        LayerWeight::QueryNormBias => "query_norm.bias",
        LayerWeight::KeyNorm => "key_norm",
        LayerWeight::KeyNormBias => "key_norm.bias",
        LayerWeight::Sinks => "sinks",
        LayerWeight::Output => "output",
        LayerWeight::OutputBias => "output.bias",
        LayerWeight::AttentionOutputNorm => "attention_output_norm",
        LayerWeight::FfnOutputNorm => "ffn_output_norm",
        LayerWeight::FfnNorm => "ffn_norm",
        LayerWeight::FfnNormBias => "ffn_norm.bias",
        LayerWeight::Router => "router",
        LayerWeight::RouterBias => "router.bias",
        LayerWeight::SharedGate => "shared_gate",
        LayerWeight::Gate => "gate",
        LayerWeight::GateBias => "gate.bias",
        LayerWeight::Up => "up",
        LayerWeight::UpBias => "up.bias",
        LayerWeight::Down => "down",
        LayerWeight::DownBias => "down.bias",
    };
    format!("layers.{layer}.{part}")
}

/// Name of the tensor with the order of a layer's neurons.
pub(crate) fn order_name(layer: usize) -> String {
    format!("layers.{layer}.neurons")
}

/// Rows and columns of a weight in its stored layout.
pub(crate) fn stored_shape(config: &ModelConfig, weight: Weight, layout: Layout) -> (usize, usize) {
    match (layout, &config.shape(weight)[..]) {
        (Layout::ByInput, [outputs, inputs]) => (*inputs, *outputs),
        (Layout::ByOutput, [outputs, inputs]) => (*outputs, *inputs),
        (_, shape) => (1, shape.iter().product()),
    }
}

/// Format of a stored weight: F32 for norms, biases, positions and routers, `quant` for other matrices.
pub(crate) fn stored_format(config: &ModelConfig, weight: Weight, quant: Format) -> Format {
    match weight {
        Weight::Positions
        | Weight::Layer(_, LayerWeight::Router | LayerWeight::SharedGate | LayerWeight::DownBias) => {
            Format::F32
        }
        _ if config.shape(weight).len() == 1 => Format::F32,
        _ => quant,
    }
}

/// Bytes of a weight in a bundle with matrices in `quant`, in its default layout.
pub fn weight_bytes(config: &ModelConfig, weight: Weight, quant: Format) -> u64 {
    bytes_as(config, weight, Layout::default_for(weight), quant)
}

/// Bytes of a weight in a bundle with matrices in `quant`, in the layout by input.
pub fn weight_bytes_by_input(config: &ModelConfig, weight: Weight, quant: Format) -> u64 {
    bytes_as(config, weight, Layout::ByInput, quant)
}

fn bytes_as(config: &ModelConfig, weight: Weight, layout: Layout, quant: Format) -> u64 {
    let (rows, columns) = stored_shape(config, weight, layout);
    (rows * stored_format(config, weight, quant).row_bytes(columns)) as u64
}

/// Bytes of one neuron: its rows of gate, up and (transposed) down, and its biases.
pub fn neuron_bytes(config: &ModelConfig, quant: Format) -> u64 {
    let biases = [LayerWeight::GateBias, LayerWeight::UpBias]
        .into_iter()
        .filter(|bias| config.has(*bias))
        .count();
    let rows = config.matrices_per_neuron() * quant.row_bytes(config.hidden_size);
    (rows + biases * size_of::<f32>()) as u64
}

/// Returns whether `order` contains each of 0, 1, 2, … exactly once.
pub fn is_permutation(order: &[u32]) -> bool {
    let mut seen = vec![false; order.len()];
    order.iter().all(|index| {
        seen.get_mut(*index as usize)
            .is_some_and(|seen| !std::mem::replace(seen, true))
    })
}

/// Reads the checkpoint's index of each neuron of `layer`.
pub(crate) fn neuron_order(
    file: &TensorFile,
    config: &ModelConfig,
    layer: usize,
) -> Result<Vec<u32>, BundleError> {
    let order = file.expect(&order_name(layer), Dtype::U32, &[config.ffn_size])?;
    let neurons: Vec<u32> = order
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    if is_permutation(&neurons) {
        Ok(neurons)
    } else {
        Err(BundleError::NotAPermutation {
            path: file.path().to_owned(),
            layer,
        })
    }
}

/// Weight and bias of a norm.
#[derive(Debug, Clone)]
pub struct StoredNorm {
    /// Scale, `[hidden]` or `[head_size]`.
    pub weight: Vec<f32>,
    /// Bias of the same shape, if the norm has one.
    pub bias: Option<Vec<f32>>,
}

/// A matrix and its bias.
#[derive(Debug, Clone)]
pub struct StoredLinear {
    /// Location of the matrix.
    pub matrix: StoredMatrix,
    /// Layout of the matrix.
    pub layout: Layout,
    /// Bias `[outputs]`, if any.
    pub bias: Option<Vec<f32>>,
}

/// Weights that only latent attention has.
#[derive(Debug, Clone)]
pub struct StoredLatent {
    /// Down-projection of the queries, `[query_rank, hidden]`, and the norm after it; `None` if queries are not compressed.
    pub query_down: Option<(StoredLinear, StoredNorm)>,
    /// Norm of the latent vector.
    pub norm: StoredNorm,
    /// Projection of the queries into the latent space, `[heads·rank, key_size]`.
    pub query: StoredLinear,
}

/// Locations of a layer's weights. Shapes are `[outputs, inputs]`; they are transposed in the layout
/// [by input](Layout::ByInput).
#[derive(Debug, Clone)]
pub struct StoredLayer {
    /// Norm before attention, or after it in post-norm blocks; `None` if only its output is normalised.
    pub attention_norm: Option<StoredNorm>,
    /// `[heads·head_size, hidden]`.
    pub query: StoredLinear,
    /// `[kv_heads·head_size, hidden]`.
    pub key: StoredLinear,
    /// `[kv_heads·head_size, hidden]`.
    pub value: StoredLinear,
    /// Additional weights of latent attention, if any; query, value and output projections then have [other shapes](LayerWeight).
    pub latent: Option<StoredLatent>,
    /// Norms of queries and keys, if any.
    pub head_norms: Option<[StoredNorm; 2]>,
    /// Attention sinks, `[heads]`, if any.
    pub sinks: Option<Vec<f32>>,
    /// `[hidden, heads·head_size]`.
    pub output: StoredLinear,
    /// Norm of the attention output, if any.
    pub attention_output_norm: Option<StoredNorm>,
    /// Norm before the FFN, if separate.
    pub ffn_norm: Option<StoredNorm>,
    /// Router of a mixture of experts, `[experts, hidden]`.
    pub router: Option<StoredLinear>,
    /// Projection to the logit of the shared expert's weight, `[1, hidden]`, if any.
    pub shared_gate: Option<StoredLinear>,
    /// `[neurons, hidden]`, hottest first.
    pub gate: StoredLinear,
    /// `[neurons, hidden]`, hottest first; `None` if the FFN is not gated.
    pub up: Option<StoredLinear>,
    /// `[hidden, neurons]`, always by input, hottest first; in a mixture of experts, its bias is `[blocks, hidden]`.
    pub down: StoredLinear,
    /// Norm of the FFN's output, if any.
    pub ffn_output_norm: Option<StoredNorm>,
}

/// Locations of all weights.
#[derive(Debug, Clone)]
pub struct StoredWeights {
    /// `[vocabulary, embedding]`.
    pub embedding: StoredMatrix,
    /// `[hidden, embedding]`, if the sizes differ.
    pub project_in: Option<StoredLinear>,
    /// `[positions, hidden]`, if positions are learned.
    pub positions: Option<StoredMatrix>,
    /// One entry per layer.
    pub layers: Vec<StoredLayer>,
    /// Final norm, before the head.
    pub final_norm: Option<StoredNorm>,
    /// `[embedding, hidden]`, if the sizes differ.
    pub project_out: Option<StoredLinear>,
    /// `[vocabulary, embedding]`; the embedding itself if tied.
    pub head: StoredLinear,
}

/// Lookup of a model's weights in a file.
pub(crate) struct Finder<'a> {
    file: &'a TensorFile,
    config: &'a ModelConfig,
    quant: Format,
    present: HashSet<Weight>,
}

impl<'a> Finder<'a> {
    pub(crate) fn new(file: &'a TensorFile, config: &'a ModelConfig, quant: Format) -> Self {
        Self {
            file,
            config,
            quant,
            present: config.weights().into_iter().collect(),
        }
    }

    fn matrix(&self, weight: Weight) -> Result<StoredMatrix, ArtifactError> {
        self.matrix_as(weight, Layout::default_for(weight))
    }

    pub(crate) fn matrix_as(
        &self,
        weight: Weight,
        layout: Layout,
    ) -> Result<StoredMatrix, ArtifactError> {
        let (rows, columns) = stored_shape(self.config, weight, layout);
        let format = stored_format(self.config, weight, self.quant);
        StoredMatrix::find(self.file, &name(weight, layout), format, rows, columns)
    }

    /// Returns the layout in which the file has `weight`.
    pub(crate) fn layout(&self, weight: Weight) -> Layout {
        if self.config.latent.is_some() {
            return Layout::default_for(weight); // thresholds of inputs are not supported
        }
        let by_input = name(weight, Layout::ByInput);
        let has = |tensor: &str| self.file.find(tensor).is_some();
        match has(&by_input) || has(&format!("{by_input}.quants")) {
            true => Layout::ByInput,
            false => Layout::default_for(weight),
        }
    }

    fn matrix_if(&self, weight: Weight) -> Result<Option<StoredMatrix>, ArtifactError> {
        let present = self.present.contains(&weight);
        present.then(|| self.matrix(weight)).transpose()
    }

    fn vector(&self, weight: Weight) -> Result<Option<Vec<f32>>, ArtifactError> {
        let Some(stored) = self.matrix_if(weight)? else {
            return Ok(None);
        };
        let view = stored.view(self.file);
        // In a mixture of experts, the bias of down has one row per block.
        let mut values = vec![0.0; view.rows() * view.columns()];
        for (row, values) in values.chunks_exact_mut(view.columns()).enumerate() {
            view.dequantise_row(row, values);
        }
        Ok(Some(values))
    }

    fn norm(&self, weight: Weight, bias: Weight) -> Result<Option<StoredNorm>, ArtifactError> {
        let bias = self.vector(bias)?;
        Ok(self
            .vector(weight)?
            .map(|weight| StoredNorm { weight, bias }))
    }

    fn linear(&self, weight: Weight, bias: Weight) -> Result<StoredLinear, ArtifactError> {
        let layout = self.layout(weight);
        Ok(StoredLinear {
            matrix: self.matrix_as(weight, layout)?,
            layout,
            bias: self.vector(bias)?,
        })
    }

    /// Finds a matrix by output without bias, if the model has it.
    fn linear_without_bias(&self, weight: Weight) -> Result<Option<StoredLinear>, ArtifactError> {
        let matrix = self.matrix_if(weight)?;
        Ok(matrix.map(|matrix| StoredLinear {
            matrix,
            layout: Layout::ByOutput,
            bias: None,
        }))
    }

    fn layer(&self, layer: usize) -> Result<StoredLayer, BundleError> {
        let at = |weight| Weight::Layer(layer, weight);
        let linear = |weight, bias| self.linear(at(weight), at(bias));
        let norm = |weight, bias| self.norm(at(weight), at(bias));
        let scale = |weight| -> Result<_, ArtifactError> {
            let weight = self.vector(at(weight))?;
            Ok(weight.map(|weight| StoredNorm { weight, bias: None }))
        };
        neuron_order(self.file, self.config, layer)?;
        let down = self.linear_without_bias(at(LayerWeight::QueryDown))?;
        let down_norm = scale(LayerWeight::QueryDownNorm)?;
        let latent_query = self.linear_without_bias(at(LayerWeight::LatentQuery))?;
        let latent = scale(LayerWeight::LatentNorm)?.zip(latent_query);
        let latent = latent.map(|(norm, query)| StoredLatent {
            query_down: down.zip(down_norm),
            norm,
            query,
        });
        let up = self.config.is_gated();
        let router = self.config.experts.as_ref();
        let router = router.map(|_| linear(LayerWeight::Router, LayerWeight::RouterBias));
        Ok(StoredLayer {
            attention_norm: norm(LayerWeight::AttentionNorm, LayerWeight::AttentionNormBias)?,
            attention_output_norm: scale(LayerWeight::AttentionOutputNorm)?,
            ffn_output_norm: scale(LayerWeight::FfnOutputNorm)?,
            query: linear(LayerWeight::Query, LayerWeight::QueryBias)?,
            key: linear(LayerWeight::Key, LayerWeight::KeyBias)?,
            value: linear(LayerWeight::Value, LayerWeight::ValueBias)?,
            latent,
            head_norms: norm(LayerWeight::QueryNorm, LayerWeight::QueryNormBias)?
                .zip(norm(LayerWeight::KeyNorm, LayerWeight::KeyNormBias)?)
                .map(|(query, key)| [query, key]),
            sinks: self.vector(at(LayerWeight::Sinks))?,
            output: linear(LayerWeight::Output, LayerWeight::OutputBias)?,
            ffn_norm: norm(LayerWeight::FfnNorm, LayerWeight::FfnNormBias)?,
            router: router.transpose()?,
            shared_gate: self.linear_without_bias(at(LayerWeight::SharedGate))?,
            gate: linear(LayerWeight::Gate, LayerWeight::GateBias)?,
            up: up
                .then(|| linear(LayerWeight::Up, LayerWeight::UpBias))
                .transpose()?,
            down: linear(LayerWeight::Down, LayerWeight::DownBias)?,
        })
    }
}

impl StoredWeights {
    /// Finds all weights of a model with `config` in `file`; matrices are in `quant`.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape, or a neuron order is not a permutation.
    ///
    /// # Panics
    ///
    /// If `config` has a layer without a norm before attention.
    pub fn find(
        file: &TensorFile,
        config: &ModelConfig,
        quant: Format,
    ) -> Result<Self, BundleError> {
        let finder = Finder::new(file, config, quant);
        let embedding = finder.matrix(Weight::Embedding)?;
        Ok(Self {
            project_in: finder.linear_without_bias(Weight::ProjectIn)?,
            positions: finder.matrix_if(Weight::Positions)?,
            layers: (0..config.layer_count)
                .map(|layer| finder.layer(layer))
                .collect::<Result<_, _>>()?,
            final_norm: finder.norm(Weight::FinalNorm, Weight::FinalNormBias)?,
            project_out: finder.linear_without_bias(Weight::ProjectOut)?,
            head: StoredLinear {
                matrix: finder
                    .matrix_if(Weight::Head)?
                    .unwrap_or_else(|| embedding.clone()),
                layout: Layout::ByOutput,
                bias: finder.vector(Weight::HeadBias)?,
            },
            embedding,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_contains_each_index_once() {
        assert!(is_permutation(&[2, 0, 1]));
        assert!(is_permutation(&[]));
        assert!(!is_permutation(&[0, 0, 1]));
        assert!(!is_permutation(&[0, 3, 1]));
    }
}
