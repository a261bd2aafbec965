//! Makes the predictors of all layers, one after the other, resuming where it stopped.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{
    Header, Progress, TensorFile,
    matrix_planes::insert_matrix,
    predictor_file::{
        FILE, FORMAT, INPUT_SETTING, LAYERS_SETTING, PredictorFile, PredictorInput,
        PredictorSummary, VERSION, WEIGHTS_SETTING, tensor_name,
    },
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
    write::PartialFolder,
};
use powerinfer_kernels::{Format, Isa};
use powerinfer_profile::Profile;

use crate::{
    Import, PredictorError, Settings, Targets, calibrate::Quality, import::imported_network,
    network::Network, train::best_network,
};

/// Fewest samples to learn from, and to judge on.
pub(crate) const FEWEST_SAMPLES: usize = 16;

/// Where predictors come from.
#[derive(Debug)]
pub enum Recipe {
    /// They are trained from the samples of a profile.
    Train(Settings),
    /// They are the original PowerInfer's.
    Import(Import),
}

impl Recipe {
    /// What is to be foreseen, where that was asked for.
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

/// Whether the predictors in `folder` were made from these inputs.
pub fn is_current(
    folder: &Path,
    profile: &Profile,
    recipe: &Recipe,
) -> Result<bool, PredictorError> {
    let expected = recipe.header(profile)?;
    Ok(PredictorFile::open(folder).is_ok_and(|file| *file.header() == expected))
}

/// Makes a predictor per layer into the folder `out`, and judges each on the samples of `profile`.
///
/// An interrupted run with the same inputs goes on after its last finished layer.
pub fn make(
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
            "going on after layer {} of an interrupted run",
            files.len()
        ));
    }

    let doing = match recipe {
        Recipe::Train(_) => "training predictors",
        Recipe::Import(_) => "importing predictors",
    };
    progress.begin(doing, layer_count as u64, "layers");
    progress.advance(files.len() as u64)?;
    for layer in files.len()..layer_count {
        let made = match recipe {
            Recipe::Train(settings) => best_network(layer, profile, *settings, isa, progress)?,
            Recipe::Import(import) => Some(imported_network(layer, profile, import, isa)?),
        };
        write_layer(&layer_path(layer), &header, layer, made.as_ref())?;
        let file = PredictorFile::open_file(&layer_path(layer))?;
        files.push(file);
        progress.advance(1)?;
    }
    progress.end();

    write_all(&folder.path().join(FILE), &header, &files)?;
    drop(files);
    for layer in 0..layer_count {
        let path = layer_path(layer);
        std::fs::remove_file(&path).map_err(powerinfer_artifact::ArtifactError::write(&path))?;
    }
    folder.finish()?;
    Ok(PredictorFile::open(out)?)
}

/// The file of a layer that a run with the same header finished.
fn finished_layer(path: &Path, header: &Header) -> Option<PredictorFile> {
    PredictorFile::open_file(path)
        .ok()
        .filter(|file| file.header() == header)
}

/// Writes the predictor of one layer, or that it has none.
fn write_layer(
    path: &Path,
    header: &Header,
    layer: usize,
    made: Option<&(Network, Quality)>,
) -> Result<(), PredictorError> {
    let mut tensors = BTreeMap::new();
    if let Some((network, _)) = made {
        insert_matrix(&mut tensors, &tensor_name(layer, "a"), &network.a);
        insert_matrix(&mut tensors, &tensor_name(layer, "b"), &network.b);
        insert_matrix(&mut tensors, &tensor_name(layer, "bias"), &network.bias);
    }
    let summary = match made {
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
        },
    };
    let layers = serde_json::to_value([summary]).expect("a summary is plain JSON");
    let header = header.clone().with_setting(LAYERS_SETTING, layers);
    Ok(write_tensors(path, Some(&header), &tensors)?)
}

/// Puts all layers into one file.
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
    Ok(write_tensors(path, Some(&header), &tensors)?)
}
