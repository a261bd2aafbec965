//! How the weights of a bundle lie in `weights.safetensors`.
//!
//! Every matrix is packed in the bundle's format. The FFN's three matrices have one row a
//! neuron (down is transposed), in one order, hottest first; `neurons` says which neuron of the
//! checkpoint each row is. Matrices whose inputs the plan skips are transposed too, one row an
//! input, and say so in their names. Norms, biases and learned positions are float32.

use std::collections::HashSet;

use powerinfer_artifact::{
    ArtifactError, TensorFile, matrix_planes::StoredMatrix, plan::LayerPlan, tensor_file::Dtype,
};
use powerinfer_model::{LayerWeight, ModelConfig, Weight};
use powerinfer_tensor::Format;

use crate::BundleError;

/// How a matrix lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A row an output.
    ByOutput,
    /// A row an input: one that is not multiplied need not be read.
    ByInput,
}

impl Layout {
    /// How `weight` lies where nothing asks for another layout.
    fn usual(weight: Weight) -> Self {
        match weight {
            Weight::Layer(_, LayerWeight::Down) => Self::ByInput,
            _ => Self::ByOutput,
        }
    }

    /// How `weight` lies where layers are run as `layers` say.
    pub(crate) fn planned(weight: Weight, layers: &[LayerPlan]) -> Self {
        use LayerWeight::{Gate, Key, Output, Query, Up, Value};
        let Weight::Layer(layer, part) = weight else {
            return Self::usual(weight);
        };
        let thresholds = layers.get(layer).and_then(|plan| plan.input_thresholds);
        match (part, thresholds) {
            (Query | Key | Value | Output, Some(_)) => Self::ByInput,
            (Gate | Up, Some(thresholds)) if thresholds.ffn.is_some() => Self::ByInput,
            _ => Self::usual(weight),
        }
    }
}

/// A weight's name in the bundle.
pub(crate) fn name(weight: Weight, layout: Layout) -> String {
    let mut name = usual_name(weight);
    if layout != Layout::usual(weight) {
        name += ".by_input";
    }
    name
}

fn usual_name(weight: Weight) -> String {
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
        LayerWeight::Output => "output",
        LayerWeight::OutputBias => "output.bias",
        LayerWeight::FfnNorm => "ffn_norm",
        LayerWeight::FfnNormBias => "ffn_norm.bias",
        LayerWeight::Gate => "gate",
        LayerWeight::GateBias => "gate.bias",
        LayerWeight::Up => "up",
        LayerWeight::UpBias => "up.bias",
        LayerWeight::Down => "down",
        LayerWeight::DownBias => "down.bias",
    };
    format!("layers.{layer}.{part}")
}

/// Name of the order of a layer's neurons.
pub(crate) fn order_name(layer: usize) -> String {
    format!("layers.{layer}.neurons")
}

/// Rows and columns of a weight as the bundle stores it.
pub(crate) fn stored_shape(config: &ModelConfig, weight: Weight, layout: Layout) -> (usize, usize) {
    match (layout, &config.shape(weight)[..]) {
        (Layout::ByInput, [outputs, inputs]) => (*inputs, *outputs),
        (Layout::ByOutput, [outputs, inputs]) => (*outputs, *inputs),
        (_, shape) => (1, shape.iter().product()),
    }
}

/// Format a weight is stored in: norms, biases and positions, small as they are, stay in float32.
pub(crate) fn stored_format(config: &ModelConfig, weight: Weight, quant: Format) -> Format {
    if config.shape(weight).len() == 1 || weight == Weight::Positions {
        Format::F32
    } else {
        quant
    }
}

/// Bytes of a weight in a bundle whose matrices are in the format `quant`.
pub fn weight_bytes(config: &ModelConfig, weight: Weight, quant: Format) -> u64 {
    bytes_as(config, weight, Layout::usual(weight), quant)
}

/// The same where it has a row an input.
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

/// Whether `order` names each of 0, 1, 2, … once.
pub fn is_permutation(order: &[u32]) -> bool {
    let mut seen = vec![false; order.len()];
    order.iter().all(|index| {
        seen.get_mut(*index as usize)
            .is_some_and(|seen| !std::mem::replace(seen, true))
    })
}

/// Weight and bias of a norm.
#[derive(Debug, Clone)]
pub struct StoredNorm {
    /// The weight.
    pub weight: Vec<f32>,
    /// The bias, where the kind of norm has one.
    pub bias: Option<Vec<f32>>,
}

/// A matrix and its bias.
#[derive(Debug, Clone)]
pub struct StoredLinear {
    /// Where the matrix lies.
    pub matrix: StoredMatrix,
    /// What its rows are.
    pub layout: Layout,
    /// One number an output, where there is one.
    pub bias: Option<Vec<f32>>,
}

/// Where a layer's weights lie. Shapes are `[outputs, inputs]`, and turned round where the matrix is
/// [by input](Layout::ByInput).
#[derive(Debug, Clone)]
pub struct StoredLayer {
    /// Norm of attention.
    pub attention_norm: StoredNorm,
    /// `[heads·head_size, hidden]`.
    pub query: StoredLinear,
    /// `[kv_heads·head_size, hidden]`.
    pub key: StoredLinear,
    /// `[kv_heads·head_size, hidden]`.
    pub value: StoredLinear,
    /// Norms of each query and each key head.
    pub head_norms: Option<[StoredNorm; 2]>,
    /// `[hidden, heads·head_size]`.
    pub output: StoredLinear,
    /// Norm of the FFN, where it has its own.
    pub ffn_norm: Option<StoredNorm>,
    /// `[neurons, hidden]`, hottest first.
    pub gate: StoredLinear,
    /// `[neurons, hidden]`, hottest first, where the FFN is gated.
    pub up: Option<StoredLinear>,
    /// `[hidden, neurons]`, always by input, hottest first.
    pub down: StoredLinear,
}

/// Where all weights lie.
#[derive(Debug, Clone)]
pub struct StoredWeights {
    /// `[vocabulary, embedding]`.
    pub embedding: StoredMatrix,
    /// `[hidden, embedding]`, where they differ.
    pub project_in: Option<StoredLinear>,
    /// `[positions, hidden]`, where they are learned.
    pub positions: Option<StoredMatrix>,
    /// One entry a layer.
    pub layers: Vec<StoredLayer>,
    /// Norm before the head.
    pub final_norm: Option<StoredNorm>,
    /// `[embedding, hidden]`, where they differ.
    pub project_out: Option<StoredLinear>,
    /// `[vocabulary, embedding]`; the embedding where they are tied.
    pub head: StoredLinear,
}

/// Finds weights of one model in one file.
struct Finder<'a> {
    file: &'a TensorFile,
    config: &'a ModelConfig,
    quant: Format,
    present: HashSet<Weight>,
}

impl Finder<'_> {
    fn matrix(&self, weight: Weight) -> Result<StoredMatrix, ArtifactError> {
        self.matrix_as(weight, Layout::usual(weight))
    }

    fn matrix_as(&self, weight: Weight, layout: Layout) -> Result<StoredMatrix, ArtifactError> {
        let (rows, columns) = stored_shape(self.config, weight, layout);
        let format = stored_format(self.config, weight, self.quant);
        StoredMatrix::find(self.file, &name(weight, layout), format, rows, columns)
    }

    /// The layout that `weight` is there in.
    fn layout(&self, weight: Weight) -> Layout {
        let by_input = name(weight, Layout::ByInput);
        let has = |tensor: &str| self.file.find(tensor).is_some();
        match has(&by_input) || has(&format!("{by_input}.quants")) {
            true => Layout::ByInput,
            false => Layout::usual(weight),
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
        let mut values = vec![0.0; view.columns()];
        view.dequantise_row(0, &mut values);
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

    /// A matrix without bias, where the model has it.
    fn plain(&self, weight: Weight) -> Result<Option<StoredLinear>, ArtifactError> {
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
        let shape = [self.config.ffn_size];
        let order = self.file.expect(&order_name(layer), Dtype::U32, &shape)?;
        let neurons: Vec<u32> = order
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        if !is_permutation(&neurons) {
            return Err(BundleError::NotAPermutation {
                path: self.file.path().to_owned(),
                layer,
            });
        }
        let up = self.config.is_gated();
        Ok(StoredLayer {
            attention_norm: norm(LayerWeight::AttentionNorm, LayerWeight::AttentionNormBias)?
                .expect("every layer has a norm of attention"),
            query: linear(LayerWeight::Query, LayerWeight::QueryBias)?,
            key: linear(LayerWeight::Key, LayerWeight::KeyBias)?,
            value: linear(LayerWeight::Value, LayerWeight::ValueBias)?,
            head_norms: norm(LayerWeight::QueryNorm, LayerWeight::QueryNormBias)?
                .zip(norm(LayerWeight::KeyNorm, LayerWeight::KeyNormBias)?)
                .map(|(query, key)| [query, key]),
            output: linear(LayerWeight::Output, LayerWeight::OutputBias)?,
            ffn_norm: norm(LayerWeight::FfnNorm, LayerWeight::FfnNormBias)?,
            gate: linear(LayerWeight::Gate, LayerWeight::GateBias)?,
            up: up
                .then(|| linear(LayerWeight::Up, LayerWeight::UpBias))
                .transpose()?,
            down: linear(LayerWeight::Down, LayerWeight::DownBias)?,
        })
    }
}

impl StoredWeights {
    /// Finds every weight of a model like `config` in `file`.
    pub fn find(
        file: &TensorFile,
        config: &ModelConfig,
        quant: Format,
    ) -> Result<Self, BundleError> {
        let finder = Finder {
            file,
            config,
            quant,
            present: config.weights().into_iter().collect(),
        };
        let embedding = finder.matrix(Weight::Embedding)?;
        Ok(Self {
            project_in: finder.plain(Weight::ProjectIn)?,
            positions: finder.matrix_if(Weight::Positions)?,
            layers: (0..config.layer_count)
                .map(|layer| finder.layer(layer))
                .collect::<Result<_, _>>()?,
            final_norm: finder.norm(Weight::FinalNorm, Weight::FinalNormBias)?,
            project_out: finder.plain(Weight::ProjectOut)?,
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
    fn a_permutation_names_each_index_once() {
        assert!(is_permutation(&[2, 0, 1]));
        assert!(is_permutation(&[]));
        assert!(!is_permutation(&[0, 0, 1]));
        assert!(!is_permutation(&[0, 3, 1]));
    }
}
