//! `predictors.safetensors`: how each layer's silent neurons are found: by a small network, by the
//! signs of their gates, or by thresholds.
//!
//! `logits = B · relu(A · x) + b`, with A `[rank, hidden]` and B `[neurons, rank]` in the file's
//! format and b `[neurons]` in F32; x is the FFN's input after its norm or, as the file says,
//! before it. A neuron is computed where its logit is at least the layer's threshold. Layers
//! without a predictor have no such tensors.
//!
//! In a bundle B is turned: unit j of the hidden layer, column j of B, is a row of `units`
//! `[rank, neurons]`, so that units which relu has silenced are not read; and what the numbers of
//! each block of 32 units are to be multiplied by is in `unit_scales` `[blocks, neurons]`.
//!
//! Sign bits predict without training (SparseInfer, arXiv 2411.12692): a neuron is computed where
//! the signs of its gate and of x agree in at least so many places.
//!
//! Models whose neurons are never exactly silent have thresholds, [`ThresholdCurve`].

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use powerinfer_tensor::{BLOCK, Format, SignMatrix};
use serde::{Deserialize, Serialize};

use crate::{
    ArtifactError, Header, TensorFile,
    mapped_file::Residence,
    matrix_planes::StoredMatrix,
    tensor_file::Dtype,
    threshold_curve::{ERRORS, ThresholdCurve},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-predictors";
/// Newest version read here.
pub const VERSION: u32 = 2;
/// The file's name inside its folder.
pub const FILE: &str = "predictors.safetensors";
/// How biases are stored; in float32 they are read too.
pub const BIAS: Format = Format::Bf16;
/// How weights are stored where the header does not say.
pub const DEFAULT_WEIGHTS: Format = Format::Q8_0;

/// How weights may be stored: without minima, which a matrix that was turned could not have.
pub const WEIGHTS: [Format; 5] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Q8_0,
    Format::Q4_0,
];

/// What predictors see of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PredictorInput {
    /// The FFN's input, after its norm.
    #[default]
    Normed,
    /// What goes into that norm: the hidden state itself.
    Residual,
}

impl PredictorInput {
    const ALL: [Self; 2] = [Self::Normed, Self::Residual];

    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normed => "normed",
            Self::Residual => "residual",
        }
    }
}

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
    /// Held-out share of what active neurons add to the hidden state, `|h_i|·‖down_i‖`, that came
    /// from predicted ones; none where that was not sampled.
    #[serde(default)]
    pub contribution_recall: Option<f64>,
    /// Held-out share of predicted neurons that were active.
    pub precision: f64,
    /// Held-out share of neurons that were not predicted.
    pub predicted_sparsity: f64,
    /// Held-out share of neurons that were not active.
    pub sparsity: f64,
    /// Tokens the figures above were counted on.
    pub held_out_tokens: u64,
    /// What sign bits do, where they were calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sign_bit: Option<SignBitSummary>,
    /// What thresholds do, where they were calibrated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<ThresholdCurve>,
}

/// What sign-bit prediction does on tokens it was not calibrated on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SignBitSummary {
    /// A neuron is computed where at least so many signs of its gate and the input agree.
    pub agreements: u32,
    /// The same as SparseInfer's α: a neuron is skipped where `α·agree < disagree`.
    pub alpha: f64,
    /// Bytes of the signs.
    pub bytes: u64,
    /// Share of active neurons that were predicted.
    pub recall: f64,
    /// Share of what active neurons add that came from predicted ones.
    pub contribution_recall: Option<f64>,
    /// Share of predicted neurons that were active.
    pub precision: f64,
    /// Share of neurons that were not predicted.
    pub predicted_sparsity: f64,
}

impl PredictorSummary {
    /// Of a layer without a predictor.
    pub fn none(layer: usize) -> Self {
        Self {
            layer,
            rank: 0,
            threshold: 0.0,
            bytes: 0,
            recall: 0.0,
            contribution_recall: None,
            precision: 0.0,
            predicted_sparsity: 0.0,
            sparsity: 0.0,
            held_out_tokens: 0,
            sign_bit: None,
            thresholds: Vec::new(),
        }
    }
}

/// What a layer's scores are made with; one number per neuron but for `offset`.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreVectors {
    /// `‖down_i‖·rms(up_i·x)`.
    pub gate_scale: Vec<f32>,
    /// `‖down_i‖`.
    pub contribution_scale: Vec<f32>,
    /// `c_i`, what the neuron's activation usually is.
    pub centre: Vec<f32>,
    /// `Σ c_i·down_i`, `[hidden]`: what the layer usually adds.
    pub offset: Vec<f32>,
}

/// An open `predictors.safetensors`.
#[derive(Debug)]
pub struct PredictorFile {
    file: TensorFile,
    header: Header,
    weights: Format,
    input: PredictorInput,
    layers: Vec<PredictorSummary>,
}

/// The name of one of a layer's tensors: `a`, `b` or `bias`.
pub fn tensor_name(layer: usize, part: &str) -> String {
    format!("layers.{layer}.predictor.{part}")
}

/// The setting under which the header keeps the summaries.
pub const LAYERS_SETTING: &str = "layers";
/// The setting that names the format of the weights; q8_0 where it is absent.
pub const WEIGHTS_SETTING: &str = "weights";
/// The setting that names what predictors see; `normed` where it is absent.
pub const INPUT_SETTING: &str = "input";

/// The name of the tensor with the signs of a layer's gate.
pub fn signs_name(layer: usize) -> String {
    format!("layers.{layer}.sign_bit.signs")
}

/// The names of the tensors of a layer's [`ScoreVectors`], in their order.
pub fn score_names(layer: usize) -> [String; 4] {
    ["gate_scale", "contribution_scale", "centre", "offset"]
        .map(|part| format!("layers.{layer}.threshold.{part}"))
}

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

/// Where the tensors of a predictor lie in a bundle.
#[derive(Debug, Clone)]
pub struct StoredUnits {
    /// `[rank, hidden]`.
    pub a: StoredMatrix,
    /// `[rank, neurons]`.
    pub units: StoredMatrix,
    /// `[blocks, neurons]`; empty for plain formats.
    pub scales: Vec<f32>,
    /// `[neurons]`.
    pub bias: Vec<f32>,
}

/// Where the signs of a layer's gate lie.
#[derive(Debug, Clone)]
pub struct StoredSigns {
    /// Within the bytes of the file.
    place: Range<usize>,
    rows: usize,
    columns: usize,
}

impl StoredSigns {
    /// The signs in `file`, in which they were found.
    pub fn view<'a>(&self, file: &'a TensorFile) -> SignMatrix<'a> {
        let bytes = &file.bytes()[self.place.clone()];
        SignMatrix::new(bytes, self.rows, self.columns).expect("the shape was checked")
    }

    /// Bytes of all signs.
    pub fn bytes(&self) -> usize {
        self.place.len()
    }
}

impl PredictorFile {
    /// Opens the predictors in `folder`.
    pub fn open(folder: &Path) -> Result<Self, ArtifactError> {
        Self::open_file(&folder.join(FILE))
    }

    /// Holds the file as `residence` says.
    pub fn hold(&mut self, residence: Residence) -> Result<(), ArtifactError> {
        self.file.hold(residence)
    }

    /// Opens the file at `path`.
    pub fn open_file(path: &Path) -> Result<Self, ArtifactError> {
        let file = TensorFile::open(path)?;
        let mut header = file.header(FORMAT, VERSION)?;
        let layers = header.settings.remove(LAYERS_SETTING).unwrap_or_default();
        let layers: Vec<PredictorSummary> =
            serde_json::from_value(layers).map_err(|source| ArtifactError::NotJson {
                path: path.to_owned(),
                source,
            })?;
        for summary in &layers {
            if let Some(curve) = summary.thresholds.iter().find(|curve| !curve.is_sound()) {
                return Err(ArtifactError::WrongFormat {
                    path: path.to_owned(),
                    expected: format!(
                        "predictor file with thresholds of 0 or more at {} errors",
                        ERRORS.len()
                    ),
                    found: format!(
                        "one whose layer {} has others for the score `{}`",
                        summary.layer, curve.score
                    ),
                });
            }
        }
        let weights = choice(
            &mut header,
            path,
            WEIGHTS_SETTING,
            DEFAULT_WEIGHTS.name(),
            &WEIGHTS.map(|format| (format.name(), format)),
        )?;
        let input = choice(
            &mut header,
            path,
            INPUT_SETTING,
            PredictorInput::default().name(),
            &PredictorInput::ALL.map(|input| (input.name(), input)),
        )?;
        Ok(Self {
            file,
            header,
            weights,
            input,
            layers,
        })
    }

    /// The underlying tensors.
    pub fn tensors(&self) -> &TensorFile {
        &self.file
    }

    /// Who made it, from what; settings that it leaves out are filled in.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Format of A and B.
    pub fn weights(&self) -> Format {
        self.weights
    }

    /// What the predictors see.
    pub fn input(&self) -> PredictorInput {
        self.input
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
        let matrix = |part: &str, format: Format, rows: usize, columns: usize| {
            StoredMatrix::find(&self.file, &tensor_name(layer, part), format, rows, columns)
        };
        Ok(Some(StoredPredictor {
            a: matrix("a", self.weights, summary.rank, hidden)?,
            b: matrix("b", self.weights, neurons, summary.rank)?,
            bias: self.bias(layer, neurons)?,
        }))
    }

    /// The predictor of `layer` as bundles have it; `None` where it has none.
    pub fn find_units(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<StoredUnits>, ArtifactError> {
        let Some(summary) = self.layers.get(layer).filter(|summary| summary.rank > 0) else {
            return Ok(None);
        };
        let matrix = |part: &str, rows: usize, columns: usize| {
            let name = tensor_name(layer, part);
            StoredMatrix::find(&self.file, &name, self.weights, rows, columns)
        };
        let scales = match self.weights {
            Format::F32 | Format::F16 | Format::Bf16 => Vec::new(),
            Format::Q8_0 | Format::Q4K | Format::Q4_0 => {
                let shape = [summary.rank.div_ceil(BLOCK), neurons];
                self.numbers(&tensor_name(layer, "unit_scales"), &shape)?
            }
        };
        let view = self.bias(layer, neurons)?;
        let view = view.view(&self.file);
        let mut bias = vec![0.0; neurons];
        for (row, bias) in bias.iter_mut().enumerate() {
            view.dequantise_row(row, std::slice::from_mut(bias));
        }
        Ok(Some(StoredUnits {
            a: matrix("a", summary.rank, hidden)?,
            units: matrix("units", summary.rank, neurons)?,
            scales,
            bias,
        }))
    }

    /// The bias of the predictor of `layer`.
    fn bias(&self, layer: usize, neurons: usize) -> Result<StoredMatrix, ArtifactError> {
        let name = tensor_name(layer, "bias");
        let format = match self.file.find(&name).map(|bias| bias.dtype) {
            Some(Dtype::BF16) => BIAS,
            _ => Format::F32,
        };
        StoredMatrix::find(&self.file, &name, format, neurons, 1)
    }

    /// The signs of the gate of `layer`; `None` where there are none.
    pub fn signs(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<StoredSigns>, ArtifactError> {
        if self.layers.get(layer).is_none_or(|l| l.sign_bit.is_none()) {
            return Ok(None);
        }
        let shape = [neurons, SignMatrix::row_bytes(hidden)];
        let bytes = self.file.expect(&signs_name(layer), Dtype::U8, &shape)?;
        let start = bytes.as_ptr().addr() - self.file.bytes().as_ptr().addr();
        Ok(Some(StoredSigns {
            place: start..start + bytes.len(),
            rows: neurons,
            columns: hidden,
        }))
    }

    /// What the scores of `layer` are made with; `None` where it has no thresholds.
    pub fn scores(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<ScoreVectors>, ArtifactError> {
        let summary = self.layers.get(layer);
        if summary.is_none_or(|summary| summary.thresholds.is_empty()) {
            return Ok(None);
        }
        let [gate, contribution, centre, offset] = score_names(layer);
        Ok(Some(ScoreVectors {
            gate_scale: self.numbers(&gate, &[neurons])?,
            contribution_scale: self.numbers(&contribution, &[neurons])?,
            centre: self.numbers(&centre, &[neurons])?,
            offset: self.numbers(&offset, &[hidden])?,
        }))
    }

    /// On which share of tokens each neuron of `layer` is computed at `level` of `curve`.
    pub fn kept(
        &self,
        layer: usize,
        curve: &ThresholdCurve,
        level: usize,
        neurons: usize,
    ) -> Result<Vec<f32>, ArtifactError> {
        let all = self.numbers(&curve.kept_tensor(layer), &[ERRORS.len(), neurons])?;
        Ok(all[level * neurons..][..neurons].to_vec())
    }

    /// The tensor `name` of float32.
    fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ArtifactError> {
        let view = self.file.expect(name, Dtype::F32, shape)?;
        let (numbers, _) = view.as_chunks::<4>();
        Ok(numbers.iter().map(|n| f32::from_le_bytes(*n)).collect())
    }
}

/// What the header's setting `key` names among `known`; where it is absent, it becomes `default`.
fn choice<Known: Copy>(
    header: &mut Header,
    path: &Path,
    key: &str,
    default: &str,
    known: &[(&str, Known)],
) -> Result<Known, ArtifactError> {
    let settings = &mut header.settings;
    let setting = settings.entry(key.to_owned());
    let setting = setting.or_insert_with(|| default.into());
    let named = known
        .iter()
        .find(|(name, _)| setting.as_str() == Some(*name));
    named
        .map(|(_, known)| *known)
        .ok_or_else(|| ArtifactError::WrongFormat {
            path: path.to_owned(),
            expected: format!(
                "predictor file whose `{key}` this program knows ({})",
                known
                    .iter()
                    .map(|(name, _)| *name)
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
            found: format!("a predictor file whose `{key}` is {setting}"),
        })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        Digest, ModelIdentity,
        matrix_planes::insert_matrix,
        tensor_writer::{TensorSource, write_tensors},
    };

    /// Writes predictors of one layer, 40 numbers in, 64 neurons out, in `format`.
    fn write(path: &Path, format: Format, settings: &[(&str, &str)]) {
        let [a, b] = [(32, 40), (64, 32)].map(|(rows, columns)| {
            powerinfer_tensor::pack(format, rows, columns, &vec![0.5; rows * columns])
        });
        let bias = powerinfer_tensor::pack(Format::F32, 64, 1, &[0.0; 64]);
        let mut tensors: BTreeMap<String, TensorSource<'_>> = BTreeMap::new();
        insert_matrix(&mut tensors, &tensor_name(0, "a"), &a);
        insert_matrix(&mut tensors, &tensor_name(0, "b"), &b);
        insert_matrix(&mut tensors, &tensor_name(0, "bias"), &bias);
        let model = ModelIdentity {
            name: "m".to_owned(),
            fingerprint: Digest::of(b"m"),
        };
        let summary = serde_json::json!([{
            "layer": 0, "rank": 32, "threshold": 0.0, "bytes": 0, "recall": 1.0, "precision": 1.0,
            "predicted_sparsity": 0.0, "sparsity": 0.0, "held_out_tokens": 0
        }]);
        let mut header = Header::new(FORMAT, VERSION, model, 0);
        for (key, value) in settings {
            header = header.with_setting(key, *value);
        }
        let header = header.with_setting(LAYERS_SETTING, summary);
        write_tensors(path, Some(&header), &tensors).unwrap();
    }

    #[test]
    fn a_file_is_read_in_the_format_it_states() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        for format in WEIGHTS {
            let settings = [
                (WEIGHTS_SETTING, format.name()),
                (INPUT_SETTING, "residual"),
            ];
            write(&path, format, &settings);
            let file = PredictorFile::open(folder.path()).unwrap();
            let read = (file.weights(), file.input());
            assert_eq!(read, (format, PredictorInput::Residual));
            assert!(file.find(0, 40, 64).unwrap().is_some());
            assert!(file.find(0, 40, 65).is_err());
        }
    }

    #[test]
    fn a_file_that_states_nothing_is_one_of_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        write(&path, Format::Q8_0, &[]);
        let file = PredictorFile::open_file(&path).unwrap();
        let read = (file.weights(), file.input());
        assert_eq!(read, (Format::Q8_0, PredictorInput::Normed));
        assert!(file.find(0, 40, 64).unwrap().is_some());
        assert_eq!(file.header().settings[WEIGHTS_SETTING], "q8_0");
    }

    #[test]
    fn what_it_states_must_be_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        for (setting, value) in [
            (WEIGHTS_SETTING, "q5_1"),
            (WEIGHTS_SETTING, "q4_k"),
            (INPUT_SETTING, "token"),
        ] {
            write(&path, Format::Q8_0, &[(setting, value)]);
            let message = PredictorFile::open_file(&path).unwrap_err().to_string();
            assert!(message.contains(setting), "{message}");
            assert!(message.contains(value), "{message}");
        }
    }
}
