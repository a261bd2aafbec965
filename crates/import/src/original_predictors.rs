//! The predictors of the original PowerInfer: two matrices a layer, in a `*.powerinfer.gguf` or in
//! a folder of `model_0.pt`, `model_1.pt`, ….
//!
//! A neuron is active where `fc2 · relu(fc1 · x)` is at least a threshold; x is the hidden state
//! that goes into the FFN's norm.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{ArtifactError, Digest, mapped_file::FileBytes};
use powerinfer_model::{ModelError, container::Container, gguf::GgufFile, gguf_files};
use serde_json::Value as Json;

use crate::{ImportError, pickle::Pickles};

/// The threshold where nothing states one.
const DEFAULT_THRESHOLD: f32 = 0.0;

/// The predictors of a model, found and checked but not read.
#[derive(Debug)]
pub struct OriginalPredictors {
    path: PathBuf,
    threshold: f32,
    layers: Vec<Found>,
}

/// Where a layer's predictor is.
#[derive(Debug)]
struct Found {
    container: Arc<dyn Container>,
    fc1: String,
    fc2: String,
    rank: usize,
}

/// A layer's predictor.
#[derive(Debug, Clone, PartialEq)]
pub struct OriginalPredictor {
    /// Width of the hidden layer.
    pub rank: usize,
    /// `[rank, hidden]`, row-major.
    pub fc1: Vec<f32>,
    /// `[neurons, rank]`, row-major.
    pub fc2: Vec<f32>,
}

/// Sizes of the model that predictors must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedSizes {
    /// Layers.
    pub layers: usize,
    /// Numbers of the hidden state.
    pub hidden: usize,
    /// Neurons of a layer.
    pub neurons: usize,
}

impl OriginalPredictors {
    /// Finds at `path` a predictor for every layer of a model of these `sizes`.
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
        let files = gguf_files(path);
        match &files[..] {
            _ if path.is_file() => Self::open_gguf(path, sizes),
            [file] => Self::open_gguf(file, sizes),
            _ => Err(ImportError::NoPredictors {
                path: path.to_owned(),
                reason: format!(
                    "it has no `{}`, and {} GGUF files",
                    file_name(0),
                    files.len()
                ),
            }),
        }
    }

    /// A folder of one pickle a layer.
    fn open_folder(
        path: &Path,
        numbers: &[usize],
        sizes: PredictedSizes,
    ) -> Result<Self, ImportError> {
        check_layers(path, numbers, sizes.layers)?;
        let threshold = match FileBytes::open(&path.join(CONFIG)) {
            Ok(bytes) => stated_threshold(&path.join(CONFIG), &bytes)?,
            Err(_) if !path.join(CONFIG).exists() => DEFAULT_THRESHOLD,
            Err(error) => return Err(error.into()),
        };
        let layers = (0..sizes.layers).map(|layer| {
            let file = path.join(file_name(layer));
            let container: Arc<dyn Container> = Arc::new(Pickles::open_file(&file)?);
            let names = container.names();
            let [fc1, fc2] = ["fc1.weight", "fc2.weight"].map(|name| only(&file, &names, name));
            let (fc1, fc2) = (fc1?, fc2?);
            check_left_over(&file, &names, &[&fc1, &fc2])?;
            Found::check(container, fc1, fc2, sizes)
        });
        Ok(Self {
            path: path.to_owned(),
            threshold,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    /// A GGUF file with predictors beside the weights.
    fn open_gguf(path: &Path, sizes: PredictedSizes) -> Result<Self, ImportError> {
        let file = Arc::new(GgufFile::open(path)?);
        let bad = |reason: String| ModelError::BadGguf {
            path: path.to_owned(),
            reason,
        };
        const KEY: &str = "powerinfer.sparse_threshold";
        let threshold = match file.value(KEY) {
            None => DEFAULT_THRESHOLD,
            Some(value) => {
                finite(value.as_f64()).ok_or_else(|| bad(format!("`{KEY}` is no finite number")))?
            }
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
                let [fc1, fc2] = ["fc1", "fc2"].map(|part| format!("blk.{layer}.{part}.weight"));
                Found::check(Arc::clone(&file) as Arc<dyn Container>, fc1, fc2, sizes)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let used: Vec<&str> = layers
            .iter()
            .flat_map(|found| [&found.fc1[..], &found.fc2[..]])
            .collect();
        check_left_over(path, &names, &used)?;
        Ok(Self {
            path: path.to_owned(),
            threshold,
            layers,
        })
    }

    /// Where they are.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A neuron is active where its logit is at least this, in all layers.
    pub fn threshold(&self) -> f32 {
        self.threshold
    }

    /// How many layers there are, each with a predictor.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Reads the predictor of `layer`; a NaN or infinite weight is an error.
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

    /// A digest of threshold and, as for fingerprints, of samples of every matrix.
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

impl Found {
    /// Checks that the matrices are there in shapes that fit each other and a model of `sizes`.
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
            // A predictor wider than what it predicts is a mistake, and would save nothing.
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

/// The file of a layer in a folder of predictors.
fn file_name(layer: usize) -> String {
    format!("model_{layer}.pt")
}

/// Numbers of the files `model_<number>.pt` in `folder`, in order; none where it is no folder.
fn numbered_files(folder: &Path) -> Vec<usize> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut numbers: Vec<usize> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let number = name.strip_prefix("model_")?.strip_suffix(".pt")?;
            // By number, not by name: `model_10.pt` comes after `model_9.pt`.
            number.parse().ok().filter(|it| file_name(*it) == name)
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Refuses sorted `numbers` of layers that are not 0 to `layers` - 1.
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

/// The one name among `names` that is `wanted`, whatever modules stand before it.
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
        [_, second, ..] => Err(left_over(path, second)),
    }
}

/// Refuses what would change the predictions and is not read, such as a bias.
fn check_left_over(path: &Path, names: &[String], used: &[&str]) -> Result<(), ImportError> {
    match names.iter().find(|name| !used.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(left_over(path, name)),
    }
}

fn left_over(path: &Path, tensor: &str) -> ImportError {
    ImportError::PredictorLeftOver {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
    }
}

fn finite(number: Option<f64>) -> Option<f32> {
    let number = number? as f32;
    number.is_finite().then_some(number)
}

/// The threshold that a predictor folder's `config.json` states.
fn stated_threshold(path: &Path, bytes: &[u8]) -> Result<f32, ImportError> {
    const KEY: &str = "sparse_threshold";
    let config: Json = serde_json::from_slice(bytes).map_err(|source| ArtifactError::NotJson {
        path: path.to_owned(),
        source,
    })?;
    match config.get(KEY) {
        None => Ok(DEFAULT_THRESHOLD),
        Some(value) => finite(value.as_f64()).ok_or_else(|| {
            let reason = format!("`{KEY}` is no finite number");
            let path = path.to_owned();
            ModelError::BadConfig { path, reason }.into()
        }),
    }
}
