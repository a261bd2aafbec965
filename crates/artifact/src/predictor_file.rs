//! `predictors.safetensors`: for every layer a small network that foresees which neurons fire.
//!
//! `logits = B · relu(A · x) + b`, with A `[rank, hidden]` and B `[neurons, rank]` in Q8_0 and b
//! `[neurons]` in F32; x is the FFN's input after its norm. A neuron is computed where its logit
//! is at least the layer's threshold. Layers without a predictor have no tensors.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{ArtifactError, Header, TensorFile, matrix_planes::StoredMatrix, tensor_file::Dtype};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-predictors";
/// Newest version read here.
pub const VERSION: u32 = 1;
/// The file's name inside its folder.
pub const FILE: &str = "predictors.safetensors";
/// How the weights of predictors are stored.
pub const WEIGHTS: powerinfer_kernels::Format = powerinfer_kernels::Format::Q8_0;

/// What a predictor is, and what it does on tokens it has not learnt from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictorSummary {
    /// Which layer.
    pub layer: usize,
    /// Width of the hidden layer; 0 where the layer has no predictor.
    pub rank: usize,
    /// A neuron is computed where its logit is at least this.
    pub threshold: f32,
    /// Bytes of A, B and b.
    pub bytes: u64,
    /// Held-out share of active neurons that were predicted.
    pub recall: f64,
    /// Held-out share of predicted neurons that were active.
    pub precision: f64,
    /// Held-out share of neurons that were not predicted.
    pub predicted_sparsity: f64,
    /// Held-out share of neurons that were not active.
    pub sparsity: f64,
    /// Tokens the figures above were counted on.
    pub held_out_tokens: u64,
}

/// An open `predictors.safetensors`.
#[derive(Debug)]
pub struct PredictorFile {
    file: TensorFile,
    header: Header,
    layers: Vec<PredictorSummary>,
}

/// The name of one of a layer's tensors: `a`, `b` or `bias`.
pub fn tensor_name(layer: usize, part: &str) -> String {
    format!("layers.{layer}.predictor.{part}")
}

/// The setting under which the header keeps the summaries.
pub const LAYERS_SETTING: &str = "layers";

/// Where one predictor's tensors lie.
#[derive(Debug, Clone)]
pub struct StoredPredictor {
    /// `[rank, hidden]`.
    pub a: StoredMatrix,
    /// `[neurons, rank]`.
    pub b: StoredMatrix,
    /// `[neurons]`.
    pub bias: StoredMatrix,
}

impl PredictorFile {
    /// Opens the predictors in `folder`.
    pub fn open(folder: &Path) -> Result<Self, ArtifactError> {
        Self::open_file(&folder.join(FILE))
    }

    /// Opens the file at `path`.
    pub fn open_file(path: &Path) -> Result<Self, ArtifactError> {
        let file = TensorFile::open(path)?;
        let mut header = file.header(FORMAT, VERSION)?;
        let layers = header.settings.remove(LAYERS_SETTING).unwrap_or_default();
        let layers = serde_json::from_value(layers).map_err(|source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            file,
            header,
            layers,
        })
    }

    /// The underlying tensors.
    pub fn tensors(&self) -> &TensorFile {
        &self.file
    }

    /// Who made it, from what.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// A summary per layer.
    pub fn layers(&self) -> &[PredictorSummary] {
        &self.layers
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// The predictor of `layer` for a model with these dimensions; `None` where it has none.
    pub fn find(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<StoredPredictor>, ArtifactError> {
        let Some(summary) = self.layers.get(layer).filter(|summary| summary.rank > 0) else {
            return Ok(None);
        };
        find_predictor(&self.file, layer, summary.rank, hidden, neurons).map(Some)
    }
}

/// Finds the predictor of `layer` among the tensors of `file`.
pub fn find_predictor(
    file: &TensorFile,
    layer: usize,
    rank: usize,
    hidden: usize,
    neurons: usize,
) -> Result<StoredPredictor, ArtifactError> {
    let plain = powerinfer_kernels::Format::F32;
    let bias = tensor_name(layer, "bias");
    file.expect(&bias, Dtype::F32, &[neurons, 1])?;
    Ok(StoredPredictor {
        a: StoredMatrix::find(file, &tensor_name(layer, "a"), WEIGHTS, rank, hidden)?,
        b: StoredMatrix::find(file, &tensor_name(layer, "b"), WEIGHTS, neurons, rank)?,
        bias: StoredMatrix::find(file, &bias, plain, neurons, 1)?,
    })
}
