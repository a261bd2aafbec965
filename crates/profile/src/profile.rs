//! A profile on disk: `profile.json`, `neurons.parquet`, `traces/`.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use polars::prelude::{
    Column, DataFrame, ParquetCompression, ParquetReader, ParquetWriter, PolarsError, SerReader,
};
use powerinfer_artifact::{
    ArtifactError, Digest, Header, ModelIdentity, document::Document, write::write_with,
};
use powerinfer_model::Checkpoint;
use serde::{Deserialize, Serialize};

use crate::{Calibration, LayerActivity, ProfileError, Settings, Traces, measure};

/// Format name in a profile's header.
pub(crate) const FORMAT: &str = "powerinfer-profile";
/// Newest version of profiles read here.
pub(crate) const VERSION: u32 = 1;
const DOCUMENT: &str = "profile.json";
const TABLE: &str = "neurons.parquet";

/// What a person wants to know of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Which layer.
    pub layer: usize,
    /// Share of activations that are exactly zero.
    pub sparsity: f64,
    /// Smallest share of neurons that carries 80 % of the activations.
    pub neurons_for_80_percent: f64,
    /// Share of neurons that never fired.
    pub dead: f64,
    /// Share of activations carried by the hottest tenth, two tenths, … of the neurons.
    pub cumulative: Vec<f64>,
}

impl LayerSummary {
    /// Summarises the counts of `layer`.
    pub(crate) fn of(layer: usize, activity: &LayerActivity) -> Self {
        let neurons = activity.active.len();
        Self {
            layer,
            sparsity: activity.sparsity(),
            neurons_for_80_percent: activity.neurons_for(0.8),
            dead: activity.dead(),
            cumulative: (1..=10)
                .map(|tenth| activity.share_of_hottest(neurons * tenth / 10))
                .collect(),
        }
    }
}

/// The body of `profile.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileDocument {
    /// Calibration tokens.
    pub tokens: u64,
    /// Calibration sequences.
    pub sequences: u64,
    /// Tokens of the training part.
    pub training_tokens: u64,
    /// Tokens of the held-out part.
    pub held_out_tokens: u64,
    /// Numbers per token.
    pub hidden_size: usize,
    /// Neurons per layer.
    pub ffn_size: usize,
    /// Whether a silent neuron contributes exactly nothing.
    pub has_exact_zeros: bool,
    /// A summary per layer.
    pub layers: Vec<LayerSummary>,
    /// Digests of the other files, by path.
    pub files: BTreeMap<String, Digest>,
}

/// An open profile.
#[derive(Debug)]
pub struct Profile {
    folder: PathBuf,
    document: Document<ProfileDocument>,
    activities: Vec<LayerActivity>,
}

impl Profile {
    /// Opens the profile in `folder` and checks that its table fits.
    pub fn open(folder: &Path) -> Result<Self, ProfileError> {
        let path = folder.join(DOCUMENT);
        if !path.exists() {
            return Err(ProfileError::Missing {
                path: folder.to_owned(),
            });
        }
        let document = Document::<ProfileDocument>::read(&path, FORMAT, VERSION)?;
        let table = folder.join(TABLE);
        let body = &document.body;
        check_digest(folder, TABLE, body)?;
        let activities = read_table(&table, body.layers.len(), body.ffn_size)?;
        Ok(Self {
            folder: folder.to_owned(),
            document,
            activities,
        })
    }

    /// Whether the profile in `folder` was made from these inputs.
    pub fn is_current(
        folder: &Path,
        checkpoint: &Checkpoint,
        calibration: &Calibration,
        settings: Settings,
    ) -> bool {
        Self::open(folder).is_ok_and(|profile| {
            *profile.header() == measure::header(checkpoint, calibration, settings)
        })
    }

    /// Writes document and table into `folder`, beside the traces that are there.
    pub(crate) fn write(
        folder: &Path,
        header: Header,
        mut document: ProfileDocument,
        activities: &[LayerActivity],
    ) -> Result<(), ProfileError> {
        write_table(&folder.join(TABLE), activities)?;
        let traces = (0..activities.len()).map(|layer| Traces::path(Path::new(""), layer));
        for file in std::iter::once(PathBuf::from(TABLE)).chain(traces) {
            let digest = Digest::of_file(&folder.join(&file))?;
            document
                .files
                .insert(file.to_string_lossy().into_owned(), digest);
        }
        Ok(Document {
            header,
            body: document,
        }
        .write(&folder.join(DOCUMENT))?)
    }

    /// Refuses a profile of another model.
    pub fn check_model(&self, model: &ModelIdentity) -> Result<(), ProfileError> {
        Ok(self
            .header()
            .check_model(&self.folder.join(DOCUMENT), model)?)
    }

    /// Who made it, from what.
    pub fn header(&self) -> &Header {
        &self.document.header
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The body of `profile.json`.
    pub fn document(&self) -> &ProfileDocument {
        &self.document.body
    }

    /// Counts per layer.
    pub fn activities(&self) -> &[LayerActivity] {
        &self.activities
    }

    /// The digest of `profile.json`, which holds the digests of everything else.
    pub fn digest(&self) -> Result<Digest, ProfileError> {
        Ok(Digest::of_file(&self.folder.join(DOCUMENT))?)
    }

    /// The samples of `layer`.
    pub fn traces(&self, layer: usize) -> Result<Traces, ProfileError> {
        let path = Traces::path(&self.folder, layer);
        let body = self.document();
        let (traces, header) = Traces::read(&path, body.hidden_size, body.ffn_size)?;
        header.check_model(&path, &self.header().model)?;
        Ok(traces)
    }

    /// Recomputes the digest of every file.
    pub fn verify(&self) -> Result<usize, ProfileError> {
        for file in self.document().files.keys() {
            check_digest(&self.folder, file, self.document())?;
        }
        Ok(self.document().files.len())
    }
}

/// Compares a file's digest with the document's.
fn check_digest(folder: &Path, file: &str, document: &ProfileDocument) -> Result<(), ProfileError> {
    let path = folder.join(file);
    let found = Digest::of_file(&path)?;
    let expected = document
        .files
        .get(file)
        .map_or_else(|| "missing".to_owned(), ToString::to_string);
    if expected == found.to_string() {
        return Ok(());
    }
    Err(ArtifactError::Damaged {
        path,
        expected,
        found: found.to_string(),
    }
    .into())
}

/// Writes a row per neuron.
fn write_table(path: &Path, activities: &[LayerActivity]) -> Result<(), ProfileError> {
    let failed = |error: PolarsError| ProfileError::Table {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let rows = || {
        activities.iter().enumerate().flat_map(|(layer, activity)| {
            (0..activity.active.len()).map(move |neuron| (layer, neuron, activity))
        })
    };
    let count = rows().count();
    let mut frame = DataFrame::new(
        count,
        vec![
            Column::new(
                "layer".into(),
                rows().map(|(layer, ..)| layer as u32).collect::<Vec<_>>(),
            ),
            Column::new(
                "neuron".into(),
                rows()
                    .map(|(_, neuron, _)| neuron as u32)
                    .collect::<Vec<_>>(),
            ),
            Column::new(
                "tokens".into(),
                rows()
                    .map(|(.., activity)| activity.tokens)
                    .collect::<Vec<_>>(),
            ),
            Column::new(
                "active".into(),
                rows()
                    .map(|(_, neuron, a)| a.active[neuron])
                    .collect::<Vec<_>>(),
            ),
            Column::new(
                "mean_magnitude".into(),
                rows()
                    .map(|(_, neuron, a)| a.magnitude[neuron])
                    .collect::<Vec<_>>(),
            ),
            Column::new(
                "mean_contribution".into(),
                rows()
                    .map(|(_, neuron, a)| a.contribution[neuron])
                    .collect::<Vec<_>>(),
            ),
        ],
    )
    .map_err(failed)?;
    write_with(path, |temporary| {
        let file = File::create(temporary).map_err(ArtifactError::write(path))?;
        ParquetWriter::new(file)
            .with_compression(ParquetCompression::Uncompressed)
            .finish(&mut frame)
            .map_err(failed)?;
        Ok(())
    })
}

/// Reads the table of a model with these dimensions.
fn read_table(
    path: &Path,
    layers: usize,
    neurons: usize,
) -> Result<Vec<LayerActivity>, ProfileError> {
    let wrong = |reason: String| ProfileError::Table {
        path: path.to_owned(),
        reason,
    };
    let failed = |error: PolarsError| wrong(error.to_string());
    let file = File::open(path).map_err(ArtifactError::read(path))?;
    let frame = ParquetReader::new(file).finish().map_err(failed)?;
    let integers = |name: &str| -> Result<Vec<u64>, ProfileError> {
        Ok(frame
            .column(name)
            .and_then(|column| column.u64().cloned())
            .map_err(failed)?
            .into_no_null_iter()
            .collect())
    };
    let floats = |name: &str| -> Result<Vec<f32>, ProfileError> {
        Ok(frame
            .column(name)
            .and_then(|column| column.f32().cloned())
            .map_err(failed)?
            .into_no_null_iter()
            .collect())
    };
    let (tokens, active) = (integers("tokens")?, integers("active")?);
    let (magnitude, contribution) = (floats("mean_magnitude")?, floats("mean_contribution")?);
    let rows = layers * neurons;
    if neurons == 0
        || [
            tokens.len(),
            active.len(),
            magnitude.len(),
            contribution.len(),
        ] != [rows; 4]
    {
        return Err(wrong(format!(
            "it should have {rows} rows without gaps ({layers} layers of {neurons} neurons)"
        )));
    }
    if active
        .iter()
        .zip(&tokens)
        .any(|(active, tokens)| active > tokens)
    {
        return Err(wrong(
            "a neuron is active on more tokens than there were".to_owned(),
        ));
    }
    Ok((0..layers)
        .map(|layer| {
            let range = layer * neurons..(layer + 1) * neurons;
            LayerActivity {
                tokens: tokens[range.start],
                active: active[range.clone()].to_vec(),
                magnitude: magnitude[range.clone()].to_vec(),
                contribution: contribution[range].to_vec(),
            }
        })
        .collect())
}
