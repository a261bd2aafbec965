//! Makes the predictors of all layers; resumable layer by layer.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{
    Header, Progress, TensorFile,
    matrix_planes::insert_matrix,
    predictor_file::{
        FILE, FORMAT, INPUT_SETTING, LAYERS_SETTING, PredictorFile, PredictorInput,
        PredictorSummary, ScoreVectors, SignBitSummary, VERSION, WEIGHTS_SETTING, score_names,
        signs_name, tensor_name,
    },
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_sealed_tensors},
    write::PartialFolder,
};
use powerinfer_kernels::Isa;
use powerinfer_model::Checkpoint;
use powerinfer_profile::Profile;
use powerinfer_tensor::Format;

use crate::{
    Import, PredictorError, Settings, Targets,
    calibrate::Quality,
    import::imported_network,
    network::Network,
    sign_bit::{Signs, sign_bits},
    thresholds::{Thresholds, thresholds},
    train::best_network,
    verdict::Remarks,
};

/// Smallest number of training samples, and of held-out samples.
pub(crate) const FEWEST_SAMPLES: usize = 16;

/// Source of the predictors.
#[derive(Debug)]
pub enum Recipe {
    /// Trained on the samples of a profile.
    Train(Settings),
    /// Imported from the original PowerInfer.
    Import(Import),
}

impl Recipe {
    /// Required recall, if there is one.
    pub fn targets(&self) -> Option<Targets> {
        match self {
            Self::Train(settings) => Some(settings.targets),
            Self::Import(import) => import.targets,
        }
    }

    fn header(&self, profile: &Profile) -> Result<Header, PredictorError> {
        let header = |seed, weights: Format, input: PredictorInput| {
            Header::new(FORMAT, VERSION, profile.header().model.clone(), seed)
                .with_setting(WEIGHTS_SETTING, weights.name())
                .with_setting(INPUT_SETTING, input.name())
        };
        let header = match self {
            Self::Train(settings) => {
                header(settings.seed, settings.weights, PredictorInput::Normed)
                    .with_setting("recall", settings.targets.recall)
                    .with_setting("contribution_recall", settings.targets.contribution_recall)
                    .with_setting("layer_bytes", settings.layer_bytes)
                    .with_setting("sizing", settings.sizing.name())
                    .with_setting("steps", settings.steps)
                    .with_setting("patience", settings.patience)
                    .with_setting("quant", settings.quant.to_string())
            }
            Self::Import(import) => header(import.seed, import.weights, PredictorInput::Residual)
                .with_input("imported", import.predictors.digest()?)
                .with_setting("recall", import.targets.map(|targets| targets.recall))
                .with_setting(
                    "contribution_recall",
                    import.targets.map(|targets| targets.contribution_recall),
                ),
        };
        Ok(header.with_input("profile", profile.digest()?))
    }
}

/// Whether the predictors in `folder` were made from exactly these inputs.
///
/// # Errors
///
/// The profile or the imported predictors cannot be read.
pub fn is_current(
    folder: &Path,
    profile: &Profile,
    recipe: &Recipe,
) -> Result<bool, PredictorError> {
    let expected = recipe.header(profile)?;
    Ok(PredictorFile::open(folder).is_ok_and(|file| *file.header() == expected))
}

/// Makes a predictor per layer into the folder `out`, and evaluates each on the held-out samples of `profile`.
///
/// An interrupted run with the same inputs resumes after its last finished layer.
///
/// # Errors
///
/// A target recall is invalid, the samples are too few or not finite, training diverges, the imported weights exceed their
/// format, a file cannot be read or written, or `progress` interrupts.
pub fn make(
    checkpoint: &Checkpoint,
    profile: &Profile,
    recipe: &Recipe,
    isa: Isa,
    out: &Path,
    progress: &dyn Progress,
) -> Result<PredictorFile, PredictorError> {
    if let Some(targets) = recipe.targets() {
        for recall in [targets.recall, targets.contribution_recall] {
            if !(recall > 0.0 && recall <= 1.0) {
                return Err(PredictorError::Recall(recall));
            }
        }
    }
    let header = recipe.header(profile)?;
    let folder = PartialFolder::open(out, FILE)?;
    let layer_count = profile.document().layers.len();
    let layer_path = |layer: usize| folder.path().join(format!("layer-{layer:03}.safetensors"));
    let mut files = Vec::new();
    while let Some(file) = finished_layer(&layer_path(files.len()), &header) {
        files.push(file);
    }
    if files.is_empty() {
        folder.clear()?;
    } else {
        progress.note(&format!(
            "resuming after layer {} of an interrupted run",
            files.len()
        ));
    }

    let doing = match recipe {
        Recipe::Train(_) => "training predictors",
        Recipe::Import(_) => "importing predictors",
    };
    let mut remarks = Remarks::default();
    progress.begin(doing, layer_count as u64, "layers");
    progress.advance(files.len() as u64)?;
    for layer in files.len()..layer_count {
        let mut made = Made::default();
        match recipe {
            Recipe::Train(settings) if profile.document().has_exact_zeros => {
                match best_network(layer, profile, *settings, isa, progress)? {
                    Ok(best) => {
                        remarks.check(layer, &best.1);
                        made.network = Some(best);
                    }
                    Err(refusal) => remarks.refuse(layer, refusal),
                }
                made.sign_bit = sign_bits(layer, profile, checkpoint, settings.targets, isa)?;
            }
            Recipe::Train(_) => made.thresholds = Some(thresholds(layer, profile, checkpoint)?),
            Recipe::Import(import) => {
                made.network = Some(imported_network(layer, profile, import, isa)?);
            }
        }
        write_layer(&layer_path(layer), &header, layer, &made)?;
        let file = PredictorFile::open_file(&layer_path(layer))?;
        files.push(file);
        progress.advance(1)?;
    }
    progress.end();
    remarks.note(progress);

    write_all(&folder.path().join(FILE), &header, &files)?;
    drop(files);
    for layer in 0..layer_count {
        let path = layer_path(layer);
        std::fs::remove_file(&path).map_err(powerinfer_artifact::ArtifactError::write(&path))?;
    }
    folder.finish()?;
    Ok(PredictorFile::open(out)?)
}

/// The finished file of a layer from a run with the same header.
fn finished_layer(path: &Path, header: &Header) -> Option<PredictorFile> {
    PredictorFile::open_file(path)
        .ok()
        .filter(|file| file.header() == header)
}

/// Result of a layer.
#[derive(Default)]
struct Made {
    network: Option<(Network, Quality)>,
    sign_bit: Option<(Signs, SignBitSummary)>,
    thresholds: Option<Thresholds>,
}

/// An `f32` tensor.
fn f32_tensor(values: &[f32], shape: Vec<usize>) -> TensorSource<'static> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    TensorSource::owned(Dtype::F32, shape, bytes.collect())
}

/// Writes the result of a layer, which may be empty.
fn write_layer(
    path: &Path,
    header: &Header,
    layer: usize,
    made: &Made,
) -> Result<(), PredictorError> {
    let mut tensors = BTreeMap::new();
    if let Some((network, _)) = &made.network {
        insert_matrix(&mut tensors, &tensor_name(layer, "a"), &network.a);
        insert_matrix(&mut tensors, &tensor_name(layer, "b"), &network.b);
        insert_matrix(&mut tensors, &tensor_name(layer, "bias"), &network.bias);
    }
    if let Some((signs, _)) = &made.sign_bit {
        let shape = vec![signs.rows, signs.bytes.len() / signs.rows];
        tensors.insert(
            signs_name(layer),
            TensorSource::borrowed(Dtype::U8, shape, &signs.bytes),
        );
    }
    if let Some(Thresholds {
        vectors,
        curves,
        kept,
    }) = &made.thresholds
    {
        let ScoreVectors {
            gate_scale,
            contribution_scale,
            centre,
            offset,
        } = vectors;
        let all = [gate_scale, contribution_scale, centre, offset];
        for (name, values) in score_names(layer).into_iter().zip(all) {
            tensors.insert(name, f32_tensor(values, vec![values.len()]));
        }
        for (curve, kept) in curves.iter().zip(kept) {
            let shape = vec![curve.levels.len(), centre.len()];
            tensors.insert(curve.frequencies_tensor(layer), f32_tensor(kept, shape));
        }
    }
    let mut summary = match &made.network {
        None => PredictorSummary::none(layer),
        Some((network, quality)) => PredictorSummary {
            layer,
            rank: network.rank,
            threshold: quality.threshold,
            bytes: network.bytes() as u64,
            recall: quality.recall,
            contribution_recall: quality.contribution_recall,
            precision: quality.precision,
            predicted_sparsity: 1.0 - quality.predicted_density,
            sparsity: 1.0 - quality.density,
            held_out_tokens: quality.tokens as u64,
            ..PredictorSummary::none(layer)
        },
    };
    summary.sign_bit = made.sign_bit.as_ref().map(|(_, summary)| summary.clone());
    if let Some(thresholds) = &made.thresholds {
        summary.thresholds.clone_from(&thresholds.curves);
    }
    let layers = serde_json::to_value([summary]).expect("a summary is plain JSON");
    let header = header.clone().with_setting(LAYERS_SETTING, layers);
    Ok(write_sealed_tensors(path, &header, &tensors)?)
}

/// Joins the files of all layers.
fn write_all(path: &Path, header: &Header, files: &[PredictorFile]) -> Result<(), PredictorError> {
    let mut tensors = BTreeMap::new();
    let mut summaries = Vec::new();
    for file in files {
        summaries.extend(file.layers());
        let tensor_file: &TensorFile = file.tensors();
        for name in tensor_file.names() {
            if let Some(view) = tensor_file.find(&name) {
                let (dtype, shape): (Dtype, _) = (view.dtype, view.shape.to_vec());
                tensors.insert(name, TensorSource::borrowed(dtype, shape, view.bytes));
            }
        }
    }
    let layers = serde_json::to_value(summaries).expect("summaries are plain JSON");
    let header = header.clone().with_setting(LAYERS_SETTING, layers);
    Ok(write_sealed_tensors(path, &header, &tensors)?)
}
