//! How the weights of a bundle lie in `weights.safetensors`.
//!
//! Every matrix is packed in the bundle's format. The FFN's three matrices have one row a
//! neuron (down is transposed), in one order, hottest first; `neurons` says which neuron of the
//! checkpoint each row is. Norms are float32.

use powerinfer_artifact::{
    ArtifactError, TensorFile, matrix_planes::StoredMatrix, tensor_file::Dtype,
};
use powerinfer_kernels::Format;
use powerinfer_model::{LayerWeight, ModelConfig, Weight};

use crate::BundleError;

/// A weight's name in the bundle.
pub(crate) fn name(weight: Weight) -> String {
    let (layer, weight) = match weight {
        Weight::Embedding => return "embedding".to_owned(),
        Weight::FinalNorm => return "final_norm".to_owned(),
        Weight::Head => return "head".to_owned(),
        Weight::Layer(layer, weight) => (layer, weight),
    };
    let part = match weight {
        LayerWeight::AttentionNorm => "attention_norm",
        LayerWeight::Query => "query",
        LayerWeight::Key => "key",
        LayerWeight::Value => "value",
        LayerWeight::Output => "output",
        LayerWeight::FfnNorm => "ffn_norm",
        LayerWeight::Gate => "gate",
        LayerWeight::Up => "up",
        LayerWeight::Down => "down",
    };
    format!("layers.{layer}.{part}")
}

/// Name of the order of a layer's neurons.
pub(crate) fn order_name(layer: usize) -> String {
    format!("layers.{layer}.neurons")
}

/// Rows and columns of a weight as the bundle stores it: down is transposed.
pub(crate) fn stored_shape(config: &ModelConfig, weight: Weight) -> (usize, usize) {
    match (weight, &config.shape(weight)[..]) {
        (Weight::Layer(_, LayerWeight::Down), [rows, columns]) => (*columns, *rows),
        (_, [rows, columns]) => (*rows, *columns),
        (_, shape) => (1, shape.iter().product()),
    }
}

/// Format a weight is stored in: norms stay in float32.
pub(crate) fn stored_format(config: &ModelConfig, weight: Weight, quant: Format) -> Format {
    if config.shape(weight).len() == 1 {
        Format::F32
    } else {
        quant
    }
}

/// Bytes of one neuron: its rows of gate, up and (transposed) down.
pub fn neuron_bytes(config: &ModelConfig, quant: Format) -> u64 {
    3 * quant.row_bytes(config.hidden_size) as u64
}

/// Whether `order` names each of 0, 1, 2, … once.
pub fn is_permutation(order: &[u32]) -> bool {
    let mut seen = vec![false; order.len()];
    order.iter().all(|index| {
        seen.get_mut(*index as usize)
            .is_some_and(|seen| !std::mem::replace(seen, true))
    })
}

/// Where a layer's weights lie.
#[derive(Debug, Clone)]
pub struct StoredLayer {
    /// Norm before attention.
    pub attention_norm: Vec<f32>,
    /// `[heads·head_size, hidden]`.
    pub query: StoredMatrix,
    /// `[kv_heads·head_size, hidden]`.
    pub key: StoredMatrix,
    /// `[kv_heads·head_size, hidden]`.
    pub value: StoredMatrix,
    /// `[hidden, heads·head_size]`.
    pub output: StoredMatrix,
    /// Norm before the FFN.
    pub ffn_norm: Vec<f32>,
    /// `[neurons, hidden]`, hottest first.
    pub gate: StoredMatrix,
    /// `[neurons, hidden]`, hottest first.
    pub up: StoredMatrix,
    /// `[neurons, hidden]`, hottest first.
    pub down: StoredMatrix,
    /// Which neuron of the checkpoint each row is.
    pub neurons: Vec<u32>,
}

/// Where all weights lie.
#[derive(Debug, Clone)]
pub struct StoredWeights {
    /// `[vocabulary, hidden]`.
    pub embedding: StoredMatrix,
    /// One entry a layer.
    pub layers: Vec<StoredLayer>,
    /// Norm before the head.
    pub final_norm: Vec<f32>,
    /// `[vocabulary, hidden]`; the embedding where they are tied.
    pub head: StoredMatrix,
}

impl StoredWeights {
    /// Finds every weight of a model like `config` in `file`.
    pub fn find(
        file: &TensorFile,
        config: &ModelConfig,
        quant: Format,
    ) -> Result<Self, BundleError> {
        let matrix = |weight| -> Result<StoredMatrix, ArtifactError> {
            let (rows, columns) = stored_shape(config, weight);
            StoredMatrix::find(
                file,
                &name(weight),
                stored_format(config, weight, quant),
                rows,
                columns,
            )
        };
        let norm = |weight| -> Result<Vec<f32>, ArtifactError> {
            let mut values = vec![0.0; config.hidden_size];
            matrix(weight)?.view(file).dequantise_row(0, &mut values);
            Ok(values)
        };
        let layers = (0..config.layer_count)
            .map(|layer| {
                let matrix = |weight| matrix(Weight::Layer(layer, weight));
                let norm = |weight| norm(Weight::Layer(layer, weight));
                let order = file.expect(&order_name(layer), Dtype::U32, &[config.ffn_size])?;
                let neurons: Vec<u32> = order
                    .chunks_exact(4)
                    .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                    .collect();
                if !is_permutation(&neurons) {
                    return Err(BundleError::NotAPermutation {
                        path: file.path().to_owned(),
                        layer,
                    });
                }
                Ok(StoredLayer {
                    attention_norm: norm(LayerWeight::AttentionNorm)?,
                    query: matrix(LayerWeight::Query)?,
                    key: matrix(LayerWeight::Key)?,
                    value: matrix(LayerWeight::Value)?,
                    output: matrix(LayerWeight::Output)?,
                    ffn_norm: norm(LayerWeight::FfnNorm)?,
                    gate: matrix(LayerWeight::Gate)?,
                    up: matrix(LayerWeight::Up)?,
                    down: matrix(LayerWeight::Down)?,
                    neurons,
                })
            })
            .collect::<Result<_, BundleError>>()?;
        let embedding = matrix(Weight::Embedding)?;
        Ok(Self {
            head: if config.tied_embeddings {
                embedding.clone()
            } else {
                matrix(Weight::Head)?
            },
            embedding,
            layers,
            final_norm: norm(Weight::FinalNorm)?,
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
