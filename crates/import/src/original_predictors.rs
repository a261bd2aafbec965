//! Predictors of the original PowerInfer: two matrices per layer, in a `*.powerinfer.gguf` file, in a folder of
//! `model_0.pt`, `model_1.pt`, …, or inside a checkpoint, as TurboSparse's are.
//!
//! A neuron is predicted active if `fc2 · relu(fc1 · x)` is at least a threshold; x is the hidden state before
//! the FFN's norm.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{ArtifactError, Digest, json, mapped_file::FileBytes};
use powerinfer_model::{Files, ModelError, container::Container, gguf::GgufFile, gguf_files};
use serde_json::Value as Json;

use crate::{ImportError, pickle::Pickles};

/// Threshold if none is stated.
const DEFAULT_THRESHOLD: f32 = 0.0;

/// Predictors of a model, located and checked but not read.
#[derive(Debug)]
pub struct OriginalPredictors {
    path: PathBuf,
    threshold: f32,
    layers: Vec<Location>,
}

/// Location of a layer's predictor.
#[derive(Debug)]
struct Location {
    container: Arc<dyn Container>,
    fc1: String,
    fc2: String,
    rank: usize,
}

/// Predictor of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct OriginalPredictor {
    /// Number of hidden units.
    pub rank: usize,
    /// `[rank, hidden]`, row-major.
    pub fc1: Vec<f32>,
    /// `[neurons, rank]`, row-major.
    pub fc2: Vec<f32>,
}

/// Sizes of the model that predictors must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedSizes {
    /// Number of layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Neurons per layer.
    pub neurons: usize,
}

impl OriginalPredictors {
    /// Locates a predictor for every layer of a model of these `sizes` at `path`.
    ///
    /// # Errors
    ///
    /// There are no predictors, layers are missing, or matrices do not fit the model.
    pub fn open(path: &Path, sizes: PredictedSizes) -> Result<Self, ImportError> {
        if !path.exists() {
            return Err(ImportError::NoPredictors {
                path: path.to_owned(),
                reason: "it does not exist".to_owned(),
            });
        }
        let numbers = numbered_files(path);
        if !numbers.is_empty() {
            return Self::open_folder(path, &numbers, sizes);
        }
        if path.join(CONFIG).exists()
            && let Some(predictors) = Self::open_checkpoint(path, sizes)?
        {
            return Ok(predictors);
        }
        let files = gguf_files(path);
        match &files[..] {
            _ if path.is_file() => Self::open_gguf(path, sizes),
            [file] => Self::open_gguf(file, sizes),
            _ => Err(ImportError::NoPredictors {
                path: path.to_owned(),
                reason: format!(
                    "it has no `{}`, no tensor `model.layers.0.mlp.predictor.fc1.weight`, and {} GGUF files",
                    file_name(0),
                    files.len()
                ),
            }),
        }
    }

    /// Opens a folder with one pickle per layer.
    fn open_folder(
        path: &Path,
        numbers: &[usize],
        sizes: PredictedSizes,
    ) -> Result<Self, ImportError> {
        check_layers(path, numbers, sizes.layers)?;
        let layers = (0..sizes.layers).map(|layer| {
            let file = path.join(file_name(layer));
            let container: Arc<dyn Container> = Arc::new(Pickles::open_file(&file)?);
            let names = container.names();
            let [fc1, fc2] = ["fc1.weight", "fc2.weight"].map(|name| only(&file, &names, name));
            let (fc1, fc2) = (fc1?, fc2?);
            check_unused(&file, &names, &[&fc1, &fc2])?;
            Location::check(container, fc1, fc2, sizes)
        });
        Ok(Self {
            path: path.to_owned(),
            threshold: threshold_of_folder(path)?,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    /// Opens the checkpoint in the folder `path`; `None` if it has no predictors.
    fn open_checkpoint(path: &Path, sizes: PredictedSizes) -> Result<Option<Self>, ImportError> {
        let files = Files::Folder(path.to_owned());
        let container: Option<Arc<dyn Container>> = match files.safetensors()? {
            Some(container) => Some(Arc::from(container)),
            None => Pickles::open(&files)?.map(|pickles| Arc::new(pickles) as Arc<dyn Container>),
        };
        let Some(container) = container else {
            return Ok(None);
        };
        let of_predictors = |name: &String| name.contains(".predictor.");
        let names: Vec<String> = container
            .names()
            .into_iter()
            .filter(of_predictors)
            .collect();
        if names.is_empty() {
            return Ok(None);
        }
        let mut fc1_of_layers = BTreeMap::new();
        for name in &names {
            let (_, layer) = name.split_once("layers.").unwrap_or_default();
            let layer = layer.split_once('.').and_then(|(layer, rest)| {
                (rest == "mlp.predictor.fc1.weight").then_some(layer.parse::<usize>().ok()?)
            });
            fc1_of_layers.extend(layer.map(|layer| (layer, name.clone())));
        }
        let numbers: Vec<usize> = fc1_of_layers.keys().copied().collect();
        check_layers(path, &numbers, sizes.layers)?;
        let layers = fc1_of_layers
            .into_values()
            .map(|fc1| {
                let fc2 = fc1.replace(".fc1.", ".fc2.");
                Location::check(Arc::clone(&container), fc1, fc2, sizes)
            })
            .collect::<Result<Vec<_>, _>>()?;
        check_unused(path, &names, &used(&layers))?;
        Ok(Some(Self {
            path: path.to_owned(),
            threshold: threshold_of_folder(path)?,
            layers,
        }))
    }

    /// Opens a GGUF file with predictors next to the weights.
    fn open_gguf(path: &Path, sizes: PredictedSizes) -> Result<Self, ImportError> {
        let file = Arc::new(GgufFile::open(path)?);
        let bad = |reason: String| ModelError::BadGguf {
            path: path.to_owned(),
            reason,
        };
        const KEY: &str = "powerinfer.sparse_threshold";
        let threshold = match file.value(KEY) {
            None => DEFAULT_THRESHOLD,
            Some(value) => finite(value.as_f64())
                .ok_or_else(|| bad(format!("`{KEY}` is not a finite number")))?,
        };
        let names = file.names();
        let of_predictors = |name: &&String| name.contains(".fc1.") || name.contains(".fc2.");
        let names: Vec<String> = names.iter().filter(of_predictors).cloned().collect();
        let mut numbers: Vec<usize> = names
            .iter()
            .filter_map(|name| name.strip_prefix("blk.")?.strip_suffix(".fc1.weight"))
            .filter_map(|number| number.parse().ok())
            .collect();
        numbers.sort_unstable();
        if numbers.is_empty() {
            return Err(ImportError::NoPredictors {
                path: path.to_owned(),
                reason: "it has no tensor `blk.0.fc1.weight`".to_owned(),
            });
        }
        check_layers(path, &numbers, sizes.layers)?;
        let layers = (0..sizes.layers)
            .map(|layer| {
                let [fc1, fc2] =
                    ["fc1", "fc2"].map(|matrix| format!("blk.{layer}.{matrix}.weight"));
                Location::check(Arc::clone(&file) as Arc<dyn Container>, fc1, fc2, sizes)
            })
            .collect::<Result<Vec<_>, _>>()?;
        check_unused(path, &names, &used(&layers))?;
        Ok(Self {
            path: path.to_owned(),
            threshold,
            layers,
        })
    }

    /// Returns the path given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the threshold on logits, common to all layers.
    pub fn threshold(&self) -> f32 {
        self.threshold
    }

    /// Returns the number of layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Reads the predictor of `layer`.
    ///
    /// # Errors
    ///
    /// The matrices cannot be read, or have NaN or infinite values.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn read(&self, layer: usize) -> Result<OriginalPredictor, ImportError> {
        let found = &self.layers[layer];
        let read = |name: &str| {
            let values = found.container.read(name)?;
            match values.iter().position(|value| !value.is_finite()) {
                None => Ok(values),
                Some(index) => Err(ModelError::NotFinite {
                    path: found.container.path(name),
                    tensor: name.to_owned(),
                    index,
                    value: values[index],
                }),
            }
        };
        Ok(OriginalPredictor {
            rank: found.rank,
            fc1: read(&found.fc1)?,
            fc2: read(&found.fc2)?,
        })
    }

    /// Digest of the threshold and of samples of every matrix, as in model fingerprints.
    ///
    /// # Errors
    ///
    /// A matrix cannot be read.
    pub fn digest(&self) -> Result<Digest, ImportError> {
        let mut parts = vec![self.threshold.to_le_bytes().to_vec()];
        for found in &self.layers {
            for name in [&found.fc1, &found.fc2] {
                let digest = found.container.digest(name)?;
                parts.push(digest.to_string().into_bytes());
            }
        }
        Ok(Digest::of_parts(parts.iter().map(|part| &part[..])))
    }
}

impl Location {
    /// Checks that the matrices exist and that their shapes fit each other and the model.
    fn check(
        container: Arc<dyn Container>,
        fc1: String,
        fc2: String,
        sizes: PredictedSizes,
    ) -> Result<Self, ImportError> {
        let shape = |name: &str| {
            container
                .shape(name)
                .ok_or_else(|| ModelError::MissingTensor {
                    path: container.path(name),
                    tensor: name.to_owned(),
                })
        };
        let wrong = |name: &str, expected: String, found: Vec<usize>| ImportError::PredictorShape {
            path: container.path(name),
            tensor: name.to_owned(),
            expected,
            found,
        };
        let PredictedSizes {
            hidden, neurons, ..
        } = sizes;
        let rank = match shape(&fc1)?[..] {
            // A predictor wider than the layer saves nothing and is a mistake.
            [rank, columns] if columns == hidden && (1..=neurons).contains(&rank) => rank,
            ref other => {
                let expected = format!("[1 to {neurons}, {hidden}]");
                return Err(wrong(&fc1, expected, other.to_vec()));
            }
        };
        let found = shape(&fc2)?;
        if found != [neurons, rank] {
            return Err(wrong(&fc2, format!("[{neurons}, {rank}]"), found));
        }
        Ok(Self {
            container,
            fc1,
            fc2,
            rank,
        })
    }
}

const CONFIG: &str = "config.json";

/// Returns the names of the predictor matrices in `layers`.
fn used(layers: &[Location]) -> Vec<&str> {
    let layers = layers.iter();
    layers
        .flat_map(|found| [&found.fc1[..], &found.fc2[..]])
        .collect()
}

/// File name of a layer's predictor.
fn file_name(layer: usize) -> String {
    format!("model_{layer}.pt")
}

/// Lists the numbers of the files `model_<number>.pt` in `folder`, sorted; empty if it is not a folder.
fn numbered_files(folder: &Path) -> Vec<usize> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut numbers: Vec<usize> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let number = name.strip_prefix("model_")?.strip_suffix(".pt")?;
            // Sorted by number, not by name: `model_10.pt` comes after `model_9.pt`.
            number.parse().ok().filter(|it| file_name(*it) == name)
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Checks that the sorted `numbers` are exactly the layers 0 to `layers` - 1.
fn check_layers(path: &Path, numbers: &[usize], layers: usize) -> Result<(), ImportError> {
    let missing: Vec<usize> = (0..layers)
        .filter(|layer| numbers.binary_search(layer).is_err())
        .collect();
    if !missing.is_empty() {
        return Err(ImportError::MissingPredictors {
            path: path.to_owned(),
            missing,
        });
    }
    match numbers.last() {
        Some(last) if *last >= layers => Err(ImportError::PredictorsOfMoreLayers {
            path: path.to_owned(),
            layer: *last,
            layers,
        }),
        _ => Ok(()),
    }
}

/// Finds the only name among `names` that is `wanted`, after any module prefix.
fn only(path: &Path, names: &[String], wanted: &str) -> Result<String, ImportError> {
    let is_wanted = |name: &&String| {
        let before = name.strip_suffix(wanted);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let found: Vec<&String> = names.iter().filter(is_wanted).collect();
    match found[..] {
        [name] => Ok(name.clone()),
        [] => Err(ModelError::MissingTensor {
            path: path.to_owned(),
            tensor: wanted.to_owned(),
        }
        .into()),
        [_, second, ..] => Err(unused_tensor(path, second)),
    }
}

/// Checks that every tensor is used: others, such as biases, would change the predictions.
fn check_unused(path: &Path, names: &[String], used: &[&str]) -> Result<(), ImportError> {
    match names.iter().find(|name| !used.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(unused_tensor(path, name)),
    }
}

fn unused_tensor(path: &Path, tensor: &str) -> ImportError {
    ImportError::UnusedPredictorTensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
    }
}

fn finite(number: Option<f64>) -> Option<f32> {
    let number = number? as f32;
    number.is_finite().then_some(number)
}

/// Returns the threshold that the `config.json` in `folder` states; the default if it states none.
fn threshold_of_folder(folder: &Path) -> Result<f32, ImportError> {
    let path = folder.join(CONFIG);
    match FileBytes::open(&path) {
        Ok(bytes) => stated_threshold(&path, &bytes),
        Err(_) if !path.exists() => Ok(DEFAULT_THRESHOLD),
        Err(error) => Err(error.into()),
    }
}

/// Reads the threshold from a predictor folder's `config.json`.
fn stated_threshold(path: &Path, bytes: &[u8]) -> Result<f32, ImportError> {
    const KEY: &str = "sparse_threshold";
    let config: Json = json::from_slice(bytes).map_err(|source| ArtifactError::NotJson {
        path: path.to_owned(),
        source,
    })?;
    match config.get(KEY) {
        None => Ok(DEFAULT_THRESHOLD),
        Some(value) => finite(value.as_f64()).ok_or_else(|| {
            let reason = format!("`{KEY}` is not a finite number");
            let path = path.to_owned();
            ModelError::BadConfig { path, reason }.into()
        }),
    }
}
