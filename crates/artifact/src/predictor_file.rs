//! `predictors.safetensors`: how each layer's active neurons are found without computing all of them: by
//! a network, by gate signs, or by thresholds.
//!
//! Network: `logits = B · relu(A · x) + b`, or `B · A · x + b` if the layer's summary says `is_linear`
//! (since version 3), with A `[rank, hidden]` and B `[neurons, rank]` in the file's format and b
//! `[neurons]` in BF16 or F32; x is the FFN input after its norm or, as the header states, before it.
//! A neuron is computed if its logit is at least the layer's threshold. Layers without a
//! predictor have no such tensors.
//!
//! In a bundle B is transposed: its column j, the weights of hidden unit j, is a row of `units`
//! `[rank, neurons]`, so that inactive hidden units are not read; the scales of each block of 32 units
//! are in `unit_scales` `[blocks, neurons]`.
//!
//! Sign bits (SparseInfer, arXiv 2411.12692) predict without training: a neuron is computed if the signs
//! of its gate row and of x agree in at least a given number of elements.
//!
//! Models whose activations are never exactly zero have thresholds, [`ThresholdCurve`].

mod summary;
mod tensors;

use std::path::{Path, PathBuf};

use powerinfer_tensor::{BLOCK, Format, SignMatrix};

pub use self::{
    summary::{PredictorSummary, SignBitSummary},
    tensors::{
        ScoreVectors, StoredPredictor, StoredSigns, StoredUnits, score_names, signs_name,
        tensor_name,
    },
};

use crate::{
    ArtifactError, Header, TensorFile,
    mapped_file::{FileBytes, Residence},
    matrix_planes::StoredMatrix,
    tensor_file::Dtype,
    threshold_curve::{ERRORS, ThresholdCurve},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-predictors";
/// Version that this program writes.
pub const VERSION: u32 = 3;
/// Oldest version that this program reads; it has no linear predictors.
const OLDEST: u32 = 2;
/// File name.
pub const FILE: &str = "predictors.safetensors";
/// Format of the biases in new files; F32 is read too.
pub const BIAS: Format = Format::Bf16;
/// Format of the weights if the header does not state it.
pub const DEFAULT_WEIGHTS: Format = Format::Q8_0;

/// Formats of the weights; formats with block minima are excluded, since they do not survive transposing.
pub const WEIGHTS: [Format; 5] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Q8_0,
    Format::Q4_0,
];

/// Input of the predictors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PredictorInput {
    /// FFN input after its norm.
    #[default]
    Normed,
    /// Hidden state before that norm.
    Residual,
}

impl PredictorInput {
    const ALL: [Self; 2] = [Self::Normed, Self::Residual];

    /// Returns the name used in headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normed => "normed",
            Self::Residual => "residual",
        }
    }
}

/// Open `predictors.safetensors`.
#[derive(Debug)]
pub struct PredictorFile {
    file: TensorFile,
    header: Header,
    weights: Format,
    input: PredictorInput,
    layers: Vec<PredictorSummary>,
}

/// Header setting with the [`PredictorSummary`] of all layers.
pub const LAYERS_SETTING: &str = "layers";
/// Header setting with the shard, as `2/3`, of a file with some of the layers.
pub const SHARD_SETTING: &str = "shard";
/// Header setting with the format of the weights; q8_0 if absent.
pub const WEIGHTS_SETTING: &str = "weights";
/// Header setting with the [`PredictorInput`]; `normed` if absent.
pub const INPUT_SETTING: &str = "input";

impl PredictorFile {
    /// Opens the predictor file in `folder`, which has all layers.
    ///
    /// # Errors
    ///
    /// As [`open_file`](Self::open_file), and if it is a shard.
    pub fn open(folder: &Path) -> Result<Self, ArtifactError> {
        Self::open_file(&folder.join(FILE))?.refuse_shard()
    }

    /// Refuses a file that has only some of the layers.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::UnmergedShard`].
    pub fn refuse_shard(self) -> Result<Self, ArtifactError> {
        match self.header.settings.get(SHARD_SETTING) {
            Some(shard) => Err(ArtifactError::UnmergedShard {
                path: self.path(),
                shard: shard.as_str().unwrap_or_default().to_owned(),
            }),
            None => Ok(self),
        }
    }

    /// Sets where the file resides, see [`FileBytes::set_residence`](crate::mapped_file::FileBytes::set_residence).
    ///
    /// # Errors
    ///
    /// [`ArtifactError::KeepInMemory`].
    pub fn set_residence(&mut self, residence: Residence) -> Result<(), ArtifactError> {
        self.file.set_residence(residence)
    }

    /// Opens the predictor file at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is damaged, has another format or version, or a header with unknown or invalid values.
    pub fn open_file(path: &Path) -> Result<Self, ArtifactError> {
        Self::from_bytes(path, FileBytes::open(path)?)
    }

    /// Parses `bytes`; `path` is for messages.
    ///
    /// # Errors
    ///
    /// The file cannot be read, has another format or version, or is damaged.
    pub fn from_bytes(path: &Path, bytes: FileBytes) -> Result<Self, ArtifactError> {
        let file = TensorFile::from_bytes(path, bytes)?;
        let mut header = file.header_since(FORMAT, OLDEST..=VERSION)?;
        // Those in a bundle have none: the manifest has their digest.
        file.check_content(&mut header)?;
        let layers = header.settings.remove(LAYERS_SETTING).unwrap_or_default();
        let layers: Vec<PredictorSummary> =
            serde_json::from_value(layers).map_err(|source| ArtifactError::NotJson {
                path: path.to_owned(),
                source,
            })?;
        for summary in &layers {
            if !summary.threshold.is_finite() {
                return Err(ArtifactError::WrongFormat {
                    path: path.to_owned(),
                    expected: "predictor file with finite thresholds".to_owned(),
                    found: format!(
                        "one whose layer {} has {}",
                        summary.layer, summary.threshold
                    ),
                });
            }
            if let Some(curve) = summary.thresholds.iter().find(|curve| !curve.is_valid()) {
                return Err(ArtifactError::WrongFormat {
                    path: path.to_owned(),
                    expected: format!(
                        "predictor file with non-negative thresholds for {} error levels",
                        ERRORS.len()
                    ),
                    found: format!(
                        "one whose layer {} has others for the score `{}`",
                        summary.layer, curve.score
                    ),
                });
            }
        }
        let weights = named_setting(
            &mut header,
            path,
            WEIGHTS_SETTING,
            DEFAULT_WEIGHTS.name(),
            &WEIGHTS.map(|format| (format.name(), format)),
        )?;
        let input = named_setting(
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

    /// Returns the underlying safetensors file.
    pub fn tensors(&self) -> &TensorFile {
        &self.file
    }

    /// Returns the header; absent settings have their default values.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the format of A and B.
    pub fn weights(&self) -> Format {
        self.weights
    }

    /// Returns the input of the predictors.
    pub fn input(&self) -> PredictorInput {
        self.input
    }

    /// Returns the summary of each layer.
    pub fn layers(&self) -> &[PredictorSummary] {
        &self.layers
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// Finds the predictor of `layer` in a model with these dimensions; `None` if the layer has none.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape.
    pub fn find(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<StoredPredictor>, ArtifactError> {
        let Some(summary) = self.layers.get(layer).filter(|summary| summary.rank > 0) else {
            return Ok(None);
        };
        let matrix = |tensor: &str, format: Format, rows: usize, columns: usize| {
            StoredMatrix::find(
                &self.file,
                &tensor_name(layer, tensor),
                format,
                rows,
                columns,
            )
        };
        Ok(Some(StoredPredictor {
            a: matrix("a", self.weights, summary.rank, hidden)?,
            b: matrix("b", self.weights, neurons, summary.rank)?,
            bias: self.bias(layer, neurons)?,
        }))
    }

    /// Finds the predictor of `layer` with B transposed, as bundles store it; `None` if the layer has none.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape.
    pub fn find_units(
        &self,
        layer: usize,
        hidden: usize,
        neurons: usize,
    ) -> Result<Option<StoredUnits>, ArtifactError> {
        let Some(summary) = self.layers.get(layer).filter(|summary| summary.rank > 0) else {
            return Ok(None);
        };
        let matrix = |tensor: &str, rows: usize, columns: usize| {
            let name = tensor_name(layer, tensor);
            StoredMatrix::find(&self.file, &name, self.weights, rows, columns)
        };
        let scales = match self.weights {
            Format::F32 | Format::F16 | Format::Bf16 => Vec::new(),
            Format::Q8_0 | Format::Q4K | Format::Q4_0 => {
                let shape = [summary.rank.div_ceil(BLOCK), neurons];
                self.f32_tensor(&tensor_name(layer, "unit_scales"), &shape)?
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

    /// Finds the bias of the predictor of `layer`.
    fn bias(&self, layer: usize, neurons: usize) -> Result<StoredMatrix, ArtifactError> {
        let name = tensor_name(layer, "bias");
        let format = match self.file.find(&name).map(|bias| bias.dtype) {
            Some(Dtype::BF16) => BIAS,
            _ => Format::F32,
        };
        StoredMatrix::find(&self.file, &name, format, neurons, 1)
    }

    /// Finds the gate signs of `layer`; `None` if sign bits were not calibrated.
    ///
    /// # Errors
    ///
    /// The tensor is missing or has another type or shape.
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
            range: start..start + bytes.len(),
            rows: neurons,
            columns: hidden,
        }))
    }

    /// Reads the score vectors of `layer`; `None` if it has no thresholds.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape.
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
            gate_scale: self.f32_tensor(&gate, &[neurons])?,
            contribution_scale: self.f32_tensor(&contribution, &[neurons])?,
            centre: self.f32_tensor(&centre, &[neurons])?,
            offset: self.f32_tensor(&offset, &[hidden])?,
        }))
    }

    /// Reads the share of tokens on which each neuron of `layer` is computed at `level` of `curve`.
    ///
    /// # Errors
    ///
    /// The tensor is missing or has another type or shape.
    pub fn computed_frequencies(
        &self,
        layer: usize,
        curve: &ThresholdCurve,
        level: usize,
        neurons: usize,
    ) -> Result<Vec<f32>, ArtifactError> {
        let all = self.f32_tensor(&curve.frequencies_tensor(layer), &[ERRORS.len(), neurons])?;
        Ok(all[level * neurons..][..neurons].to_vec())
    }

    /// Reads the F32 tensor called `name`.
    fn f32_tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ArtifactError> {
        let view = self.file.expect(name, Dtype::F32, shape)?;
        let (values, _) = view.as_chunks::<4>();
        Ok(values.iter().map(|n| f32::from_le_bytes(*n)).collect())
    }
}

/// Looks up the header setting `key` among the `known` names, inserting `default` if it is absent.
fn named_setting<Known: Copy>(
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

    /// Writes predictors of one layer with hidden size 40 and 64 neurons in `format`.
    fn write(path: &Path, format: Format, settings: &[(&str, &str)]) {
        write_with_threshold(path, format, settings, 0.0);
    }

    fn write_with_threshold(
        path: &Path,
        format: Format,
        settings: &[(&str, &str)],
        threshold: f64,
    ) {
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
            fingerprint: Digest::from_content(b"m"),
        };
        let summary = serde_json::json!([{
            "layer": 0, "rank": 32, "threshold": threshold, "bytes": 0, "recall": 1.0, "precision": 1.0,
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
    fn weights_and_input_are_read_as_stated() {
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
    fn absent_settings_have_defaults() {
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
    fn a_threshold_that_is_not_finite_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        // A number in `f64` that is infinite in `f32`.
        write_with_threshold(&path, Format::Q8_0, &[], 1e39);
        let message = PredictorFile::open_file(&path).unwrap_err().to_string();
        assert!(message.contains("layer 0 has inf"), "{message}");
    }

    #[test]
    fn unknown_settings_are_refused() {
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
