//! Trains the predictors of all layers, one after the other, resuming where it stopped.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{
    Digest, Header, Progress, TensorFile,
    matrix_planes::insert_matrix,
    predictor_file::{
        FILE, FORMAT, LAYERS_SETTING, PredictorFile, PredictorSummary, VERSION, tensor_name,
    },
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
    write::PartialFolder,
};
use powerinfer_kernels::{Format, Isa, pack};
use powerinfer_profile::{Profile, Traces};

use crate::{
    PredictorError,
    calibrate::{Quality, calibrate},
    network::{Network, Schedule},
};

/// Fewest samples of each part to learn and judge from.
const FEWEST_SAMPLES: usize = 16;
/// Share of the bytes that a wider predictor must save to be worth training the next.
const WORTHWHILE: f64 = 0.02;
/// Narrowest predictor; ranks grow from here by half.
const FIRST_RANK: usize = 32;

/// What shapes the predictors, beside the profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Share of active neurons that must be predicted on held-out tokens.
    pub recall: f64,
    /// Optimiser steps per network.
    pub steps: usize,
    /// Format the weights of the neurons will have, which says what a neuron costs.
    pub quant: Format,
    /// Seed of initialisation and batches.
    pub seed: u64,
}

fn header(profile: &Profile, settings: Settings) -> Result<Header, PredictorError> {
    Ok(Header::new(
        FORMAT,
        VERSION,
        profile.header().model.clone(),
        settings.seed,
    )
    .with_input("profile", profile.digest()?)
    .with_setting("recall", settings.recall)
    .with_setting("steps", settings.steps)
    .with_setting("quant", settings.quant.to_string()))
}

/// Whether the predictors in `folder` were made from these inputs.
pub fn is_current(
    folder: &Path,
    profile: &Profile,
    settings: Settings,
) -> Result<bool, PredictorError> {
    let expected = header(profile, settings)?;
    Ok(PredictorFile::open(folder).is_ok_and(|file| *file.header() == expected))
}

/// Trains a predictor per layer from the traces of `profile` into the folder `out`.
///
/// An interrupted run with the same inputs goes on after its last finished layer.
pub fn train(
    profile: &Profile,
    settings: Settings,
    isa: Isa,
    out: &Path,
    progress: &dyn Progress,
) -> Result<PredictorFile, PredictorError> {
    if !(settings.recall > 0.0 && settings.recall <= 1.0) {
        return Err(PredictorError::Recall(settings.recall));
    }
    let header = header(profile, settings)?;
    let folder = PartialFolder::open(out)?;
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

    progress.begin("training predictors", layer_count as u64, "layers");
    progress.advance(files.len() as u64)?;
    for layer in files.len()..layer_count {
        let traces = profile.traces(layer)?;
        let (network, quality) = best_network(layer, &traces, settings, isa, progress)?;
        write_layer(&layer_path(layer), &header, layer, &network, quality)?;
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

/// Grows the rank while predictor and predicted neurons together get cheaper to read.
fn best_network(
    layer: usize,
    traces: &Traces,
    settings: Settings,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<(Network, Quality), PredictorError> {
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    if training < FEWEST_SAMPLES || held_out < FEWEST_SAMPLES {
        return Err(PredictorError::TooFewSamples {
            layer,
            training,
            held_out,
            needed: FEWEST_SAMPLES,
        });
    }
    let (hidden, neurons) = (
        traces.training.hidden_size,
        traces.training.active.neurons(),
    );
    let neuron_bytes = 3 * settings.quant.row_bytes(hidden);
    let mut best: Option<(f64, Network, Quality)> = None;
    let mut rank = FIRST_RANK;
    while rank <= hidden.max(FIRST_RANK) {
        let seed = Digest::of_parts(
            [settings.seed, layer as u64, rank as u64]
                .map(u64::to_le_bytes)
                .iter()
                .map(|b| &b[..]),
        )
        .leading_bits();
        let schedule = Schedule {
            steps: settings.steps,
            seed,
            layer,
        };
        let network = Network::train(
            &traces.training,
            rank,
            schedule,
            || Ok(progress.advance(0)?),
        )?;
        let quality = calibrate(&network, &traces.held_out, settings.recall, isa);
        let cost = Network::bytes(rank, hidden, neurons) as f64
            + quality.predicted_density * (neurons * neuron_bytes) as f64;
        match &best {
            Some((lowest, ..)) if cost >= (1.0 - WORTHWHILE) * lowest => break,
            _ => best = Some((cost, network, quality)),
        }
        rank += (rank / 2).next_multiple_of(32);
    }
    let (_, network, quality) = best.expect("the first rank is always tried");
    Ok((network, quality))
}

/// Writes the predictor of one layer.
fn write_layer(
    path: &Path,
    header: &Header,
    layer: usize,
    network: &Network,
    quality: Quality,
) -> Result<(), PredictorError> {
    let bias = pack(Format::F32, network.bias.len(), 1, &network.bias);
    let mut tensors = BTreeMap::new();
    insert_matrix(&mut tensors, &tensor_name(layer, "a"), &network.a);
    insert_matrix(&mut tensors, &tensor_name(layer, "b"), &network.b);
    insert_matrix(&mut tensors, &tensor_name(layer, "bias"), &bias);
    let bytes = Network::bytes(
        network.rank,
        network.a.as_view().columns(),
        network.bias.len(),
    );
    let summary = PredictorSummary {
        layer,
        rank: network.rank,
        threshold: quality.threshold,
        bytes: bytes as u64,
        recall: quality.recall,
        precision: quality.precision,
        predicted_sparsity: 1.0 - quality.predicted_density,
        sparsity: 1.0 - quality.density,
        held_out_tokens: quality.tokens as u64,
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
