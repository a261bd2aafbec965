//! Makes the predictors of all layers; resumable layer by layer.

use std::{collections::BTreeMap, path::Path, time::Instant};

use powerinfer_artifact::{
    ByteSize, Header, Progress, Shard, TensorFile, counted,
    matrix_planes::insert_matrix,
    predictor_file::{
        FILE, FORMAT, INPUT_SETTING, LAYERS_SETTING, PredictorFile, PredictorInput,
        PredictorSummary, SHARD_SETTING, ScoreVectors, SignBitSummary, VERSION, WEIGHTS_SETTING,
        score_names, signs_name, tensor_name,
    },
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_sealed_tensors},
    write::{Contents, PartialFolder},
};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LayerWeight, ModelConfig, Weight};
use powerinfer_profile::Profile;
use powerinfer_tensor::Format;

use crate::{
    Import, Method, PredictorError, Settings, Targets,
    calibrate::Quality,
    import::imported_network,
    network::Network,
    sign_bit::{Signs, sign_bits},
    thresholds::{Thresholds, thresholds},
    train::{LADDER, best_network},
    verdict::Remarks,
};

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

    /// Checks the required recall.
    ///
    /// # Errors
    ///
    /// Fails if a target is not above 0 or exceeds 1.
    pub fn check(&self) -> Result<(), PredictorError> {
        let targets = self
            .targets()
            .map(|targets| [targets.recall, targets.contribution_recall]);
        let is_bad = |recall: &f64| !(*recall > 0.0 && *recall <= 1.0);
        match targets.into_iter().flatten().find(is_bad) {
            Some(recall) => Err(PredictorError::Recall(recall)),
            None => Ok(()),
        }
    }

    /// Checks that each layer of a model with this configuration can have a predictor within the byte budget.
    ///
    /// # Errors
    ///
    /// Fails if the smallest predictor exceeds the budget.
    pub fn check_budget(&self, config: &ModelConfig) -> Result<(), PredictorError> {
        let Self::Train(settings) = self else {
            return Ok(());
        };
        let bytes = settings.predictor_bytes(LADDER[0], config.hidden_size, config.ffn_size);
        if bytes <= settings.layer_bytes {
            return Ok(());
        }
        Err(PredictorError::OverBudget {
            bytes: ByteSize(bytes),
            budget: ByteSize(settings.layer_bytes),
            layers: config.layer_count,
        })
    }

    fn header(&self, profile: &Profile, shard: Shard) -> Result<Header, PredictorError> {
        let header = |seed, weights: Format, input: PredictorInput| {
            Header::new(FORMAT, VERSION, profile.header().model.clone(), seed)
                .with_setting(WEIGHTS_SETTING, weights.name())
                .with_setting(INPUT_SETTING, input.name())
        };
        let header = match self {
            Self::Train(settings) => {
                // Without `..`, because predictors depend on all fields.
                let Settings {
                    targets,
                    layer_bytes,
                    method,
                    max_time,
                    min_saving,
                    sizing,
                    steps,
                    patience,
                    quant,
                    matrices_per_neuron: _, // follows from the model
                    weights,
                    seed,
                } = *settings;
                let header = header(seed, weights, PredictorInput::Normed)
                    .with_setting("recall", targets.recall)
                    .with_setting("contribution_recall", targets.contribution_recall)
                    .with_setting("layer_bytes", layer_bytes)
                    .with_setting("method", method.name())
                    .with_setting("max_time", max_time.map(|time| time.as_secs()))
                    .with_setting("sizing", sizing.name())
                    .with_setting("steps", steps)
                    .with_setting("patience", patience)
                    .with_setting(QUANT_SETTING, quant.to_string());
                // The default is left out, so that predictors made by earlier versions stay current.
                if min_saving == Settings::MIN_SAVING {
                    header
                } else {
                    header.with_setting("min_saving", min_saving)
                }
            }
            Self::Import(import) => {
                let Import {
                    predictors,
                    targets,
                    weights,
                    seed,
                } = import;
                let recalls = targets.map(|found| (found.recall, found.contribution_recall));
                header(*seed, *weights, PredictorInput::Residual)
                    .with_input("imported", predictors.digest()?)
                    .with_setting("recall", recalls.map(|recalls| recalls.0))
                    .with_setting("contribution_recall", recalls.map(|recalls| recalls.1))
            }
        };
        let header = header.with_input("profile", profile.digest()?);
        Ok(match shard {
            Shard::WHOLE => header,
            shard => header.with_setting(SHARD_SETTING, shard.to_string()),
        })
    }
}

/// Setting in the header of trained predictors: the format of weights that they were trained for, which sets the cost of a neuron.
pub const QUANT_SETTING: &str = "quant";

/// Files of predictors, and those of unfinished ones.
fn contents() -> Contents {
    Contents::new(FILE, FORMAT).with_work(&["layer-#.safetensors"])
}

/// Whether the predictors in `folder` are those of this shard, made from exactly these inputs.
///
/// # Errors
///
/// The profile or the imported predictors cannot be read.
pub fn is_current(
    folder: &Path,
    profile: &Profile,
    recipe: &Recipe,
    shard: Shard,
) -> Result<bool, PredictorError> {
    let expected = recipe.header(profile, shard)?;
    let file = PredictorFile::open_file(&folder.join(FILE));
    Ok(file.is_ok_and(|file| *file.header() == expected))
}

/// Layers of `shard`, in ascending order. Layers are dealt out from the densest to the sparsest, and back at each end, so that
/// shards take about as long: the denser a layer, the larger the predictors that are tried.
fn layers_of(shard: Shard, profile: &Profile) -> Vec<usize> {
    let layers = &profile.document().layers;
    let mut order: Vec<usize> = (0..layers.len()).collect();
    order.sort_by(|a, b| layers[*a].sparsity.total_cmp(&layers[*b].sparsity));
    let mut mine = Vec::new();
    for (round, layers) in order.chunks(shard.count).enumerate() {
        let place = match round % 2 {
            0 => shard.index - 1,
            _ => shard.count - shard.index,
        };
        mine.extend(layers.get(place));
    }
    mine.sort_unstable();
    mine
}

/// Makes a predictor for each layer of `shard` into the folder `out`, and evaluates each on the held-out samples of `profile`.
///
/// An interrupted run with the same inputs resumes after its last finished layer.
///
/// # Errors
///
/// A target recall is invalid, the shard has no layers, the samples are too few or not finite, training diverges, the imported
/// weights exceed their format, a file cannot be read or written, or `progress` interrupts.
pub fn make(
    checkpoint: &Checkpoint,
    profile: &Profile,
    recipe: &Recipe,
    shard: Shard,
    isa: Isa,
    out: &Path,
    progress: &dyn Progress,
) -> Result<PredictorFile, PredictorError> {
    recipe.check()?;
    let layers = layers_of(shard, profile);
    if layers.is_empty() {
        return Err(PredictorError::EmptyShard {
            shard,
            layers: profile.document().layers.len(),
        });
    }
    let header = recipe.header(profile, shard)?;
    let folder = PartialFolder::open(out, contents())?;
    let layer_path = |layer: usize| folder.path().join(format!("layer-{layer:03}.safetensors"));
    let mut files: Vec<PredictorFile> = Vec::new();
    let finished = |layer: &usize| finished_layer(&layer_path(*layer), &header);
    files.extend(layers.iter().map_while(finished));
    if files.is_empty() {
        folder.clear()?;
    } else {
        progress.note(&format!(
            "resuming after {} of an interrupted run",
            counted(files.len(), "layer")
        ));
    }

    let doing = match recipe {
        Recipe::Train(settings) if settings.method == Method::ClosedForm => {
            "calculating predictors"
        }
        Recipe::Train(_) => "training predictors",
        Recipe::Import(_) => "importing predictors",
    };
    let mut remarks = Remarks::default();
    let started = Instant::now();
    progress.begin(doing, layers.len() as u64, "layers");
    progress.skip(files.len() as u64)?;
    for layer in layers[files.len()..].iter().copied() {
        let mut made = Made::default();
        match recipe {
            Recipe::Train(settings) if profile.document().has_exact_zeros => {
                let gate = checkpoint.read(Weight::Layer(layer, LayerWeight::Gate))?;
                let deadline = settings.max_time.and_then(|time| started.checked_add(time));
                match best_network(layer, profile, &gate, *settings, deadline, isa, progress)? {
                    Ok(best) => {
                        remarks.check(layer, &best.1);
                        made.network = Some(best);
                    }
                    Err(refusal) => remarks.refuse(layer, refusal),
                }
                made.sign_bit = sign_bits(layer, profile, &gate, settings.targets, isa)?;
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
    folder.finish()?;
    Ok(PredictorFile::open_file(&out.join(FILE))?)
}

/// Merges `files`, all shards of one run, into the folder `out`: the bytes of a run without shards.
///
/// # Errors
///
/// A shard is missing or doubled, is of another model, profile, seed, version or setting than the others, or a file cannot be read
/// or written.
pub fn merge(files: &[PredictorFile], out: &Path) -> Result<PredictorFile, PredictorError> {
    let first = files.first().ok_or(PredictorError::NothingToMerge)?;
    let unfit = |file: &PredictorFile, reason: String| PredictorError::NotMergeable {
        path: file.path(),
        reason,
    };
    let whole = |file: &PredictorFile| {
        let mut header = file.header().clone();
        header.settings.remove(SHARD_SETTING);
        header
    };
    let expected = whole(first);
    let paths: Vec<_> = files.iter().map(PredictorFile::path).collect();
    let mut shards = Vec::new();
    for (file, path) in files.iter().zip(&paths) {
        file.header().check_model(path, &expected.model)?;
        if let Some(what) = difference(&whole(file), &expected) {
            let first = paths[0].display();
            let reason = format!("its {what} is not that of `{first}`; merge shards of one run");
            return Err(unfit(file, reason));
        }
        let shard = file.header().settings.get(SHARD_SETTING);
        let shard = shard.map_or(Ok(Shard::WHOLE), |shard| {
            shard.as_str().unwrap_or_default().parse()
        });
        let shard = shard.map_err(|reason| unfit(file, reason))?;
        shards.push((shard, path.as_path()));
    }
    Shard::order(&shards, "layers", "train")
        .map_err(|(place, reason)| unfit(&files[place], reason))?;
    let summaries = files.iter().flat_map(PredictorFile::layers);
    let mut layers: Vec<usize> = summaries.map(|summary| summary.layer).collect();
    layers.sort_unstable();
    if !layers.iter().copied().eq(0..layers.len()) {
        let reason = "its shards do not have each layer once; train them again".to_owned();
        return Err(unfit(first, reason));
    }
    let folder = PartialFolder::open(out, contents())?;
    folder.clear()?;
    write_all(&folder.path().join(FILE), &expected, files)?;
    folder.finish()?;
    Ok(PredictorFile::open(out)?)
}

/// Differences between two headers of predictors of one model.
fn difference(found: &Header, expected: &Header) -> Option<String> {
    let differs = |name: &str, is: bool| is.then(|| name.to_owned());
    let settings = found.settings.keys().chain(expected.settings.keys());
    let mut settings =
        settings.filter(|name| found.settings.get(*name) != expected.settings.get(*name));
    differs("seed", found.seed != expected.seed)
        .or_else(|| differs("profile", found.inputs != expected.inputs))
        .or_else(|| settings.next().map(|name| format!("setting `{name}`")))
        .or_else(|| differs("program version", found.tool != expected.tool))
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
            is_linear: network.is_linear,
            steps: network.steps as u64,
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

/// Joins files with different layers.
fn write_all(path: &Path, header: &Header, files: &[PredictorFile]) -> Result<(), PredictorError> {
    let mut tensors = BTreeMap::new();
    let mut summaries: Vec<&PredictorSummary> = Vec::new();
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
    summaries.sort_by_key(|summary| summary.layer);
    let layers = serde_json::to_value(summaries).expect("summaries are plain JSON");
    let header = header.clone().with_setting(LAYERS_SETTING, layers);
    Ok(write_sealed_tensors(path, &header, &tensors)?)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{Digest, ModelIdentity};

    use super::*;

    #[test]
    fn shards_of_another_run_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let model = ModelIdentity {
            name: "m".to_owned(),
            fingerprint: Digest::from_content(b"m"),
        };
        let whole = Header::new(FORMAT, VERSION, model, 7)
            .with_input("profile", Digest::from_content(b"p"))
            .with_setting("steps", 100);
        // Layers of a shard, without predictors.
        let shard = |header: &Header, index: usize| {
            let path = folder.path().join(format!("{index}.safetensors"));
            let header = header
                .clone()
                .with_setting(SHARD_SETTING, format!("{index}/2"));
            write_layer(&path, &header, index - 1, &Made::default()).unwrap();
            PredictorFile::open_file(&path).unwrap()
        };
        let out = folder.path().join("out");
        let merged = merge(&[shard(&whole, 2), shard(&whole, 1)], &out).unwrap();
        let of_layers = |file: &PredictorFile| {
            file.layers()
                .iter()
                .map(|summary| summary.layer)
                .collect::<Vec<_>>()
        };
        assert_eq!(of_layers(&merged), [0, 1]);
        assert!(!merged.header().settings.contains_key(SHARD_SETTING));
        let bytes = std::fs::read(merged.path()).unwrap();

        let older = Header {
            tool: "powerinfer 0.0.1".to_owned(),
            ..whole.clone()
        };
        let seeded = Header {
            seed: 8,
            ..whole.clone()
        };
        let others = [
            (older, "program version"),
            (seeded, "seed"),
            (
                whole
                    .clone()
                    .with_input("profile", Digest::from_content(b"q")),
                "profile",
            ),
            (whole.clone().with_setting("steps", 99), "setting `steps`"),
        ];
        for (other, what) in others {
            let error = merge(&[shard(&whole, 1), shard(&other, 2)], &out).unwrap_err();
            let message = error.to_string();
            assert!(message.contains("2.safetensors"), "{message}");
            assert!(message.contains(&format!("its {what} is not")), "{message}");
        }
        assert_eq!(std::fs::read(merged.path()).unwrap(), bytes);
    }
}
