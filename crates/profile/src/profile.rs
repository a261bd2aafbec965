//! A profile on disk: `profile.json`, `neurons.parquet`, `traces/`.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use polars::prelude::{
    Column, DataFrame, ParquetCompression, ParquetReader, ParquetWriter, PolarsError, SerReader,
};
use powerinfer_artifact::{
    ArtifactError, Digest, Header, ModelIdentity, document::Document, token_texts,
    write::write_with,
};
use powerinfer_model::Checkpoint;
use serde::{Deserialize, Serialize};

use crate::{
    Calibration, Counts, LayerActivity, ProfileError, Settings, Skew, Traces, activity::Reuse,
    measure,
};

/// Format name in a profile's header.
pub(crate) const FORMAT: &str = "powerinfer-profile";
/// Newest version of profiles read here.
pub(crate) const VERSION: u32 = 2;
/// Name of the text among a header's inputs.
pub(crate) const CALIBRATION: &str = "calibration";
/// Name of a header's setting: samples kept per layer.
pub(crate) const TRACE_TOKENS: &str = "trace_tokens";
/// Name of a header's setting: which part of the text was profiled.
pub(crate) const SHARD: &str = "shard";
pub(crate) const DOCUMENT: &str = "profile.json";
const TABLE: &str = "neurons.parquet";
/// Text that nothing was counted on or learnt from.
const RESERVED_TEXTS: &str = "reserved.safetensors";

/// How few neurons carry most activations.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NeuronsFor {
    /// Smallest share of neurons that carries 50 % of the activations.
    #[serde(rename = "50_percent")]
    pub half: f64,
    /// The same for 80 %.
    #[serde(rename = "80_percent")]
    pub most: f64,
    /// The same for 95 %.
    #[serde(rename = "95_percent")]
    pub nearly_all: f64,
}

impl NeuronsFor {
    fn of(skew: &Skew) -> Self {
        Self {
            half: skew.neurons_for(0.5),
            most: skew.neurons_for(0.8),
            nearly_all: skew.neurons_for(0.95),
        }
    }
}

/// What a person wants to know of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Which layer.
    pub layer: usize,
    /// Share of activations that are exactly zero.
    pub sparsity: f64,
    /// How few neurons carry most activations.
    pub neurons_for: NeuronsFor,
    /// Share of neurons that never fired.
    pub dead: f64,
    /// Jaccard similarity of the hot sets (top 20 %) of two independent halves of the text.
    pub half_overlap: f64,
    /// Activations of neurons that were active in the last 1, 4 and 16 tokens.
    pub locality: [Reuse; 3],
    /// Share of activations carried by the hottest tenth, two tenths, … of the neurons.
    pub cumulative: Vec<f64>,
}

impl LayerSummary {
    /// Summarises the counts of `layer`.
    pub(crate) fn of(layer: usize, activity: &LayerActivity) -> Self {
        let skew = activity.skew();
        Self {
            layer,
            sparsity: activity.sparsity(),
            neurons_for: NeuronsFor::of(&skew),
            dead: activity.dead(),
            half_overlap: activity.half_overlap(),
            locality: activity.locality,
            cumulative: (1..=10)
                .map(|tenth| skew.activations_of(f64::from(tenth) / 10.0))
                .collect(),
        }
    }
}

/// Text that belongs together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSummary {
    /// What a person calls it.
    pub name: String,
    /// Tokens profiled of it.
    pub tokens: u64,
}

/// The body of `profile.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileDocument {
    /// Calibration tokens.
    pub tokens: u64,
    /// Tokens of the first of two independent halves.
    pub first_half_tokens: u64,
    /// Tokens that predictors learn from.
    pub training_tokens: u64,
    /// Tokens that predictors are judged on.
    pub held_out_tokens: u64,
    /// Where the text came from.
    pub sources: Vec<SourceSummary>,
    /// Jaccard similarity of the hot sets (top 20 %) of each source and each other, on average
    /// over the layers.
    pub source_overlap: Vec<Vec<f64>>,
    /// Numbers per token.
    pub hidden_size: usize,
    /// Neurons per layer.
    pub ffn_size: usize,
    /// Whether a silent neuron contributes exactly nothing.
    pub has_exact_zeros: bool,
    /// How few neurons of all layers together carry most activations.
    pub neurons_for: NeuronsFor,
    /// A summary per layer.
    pub layers: Vec<LayerSummary>,
    /// Digests of the other files, by path.
    pub files: BTreeMap<String, Digest>,
}

/// What a profile is of, beside the counts.
pub(crate) struct Subject<'a> {
    pub(crate) hidden_size: usize,
    pub(crate) has_exact_zeros: bool,
    /// Tokens for training and tokens held out.
    pub(crate) part_tokens: [u64; 2],
    pub(crate) sources: &'a [String],
}

impl ProfileDocument {
    /// Summarises the counts of all layers.
    pub(crate) fn of(subject: Subject<'_>, activities: &[LayerActivity]) -> Self {
        let sources = subject.sources;
        let all = activities.iter().flat_map(|activity| &activity.active);
        let tokens = |of: &dyn Fn(&LayerActivity) -> u64| activities.first().map_or(0, of);
        Self {
            tokens: tokens(&|activity| activity.tokens),
            first_half_tokens: tokens(&|activity| activity.first_half.tokens),
            training_tokens: subject.part_tokens[0],
            held_out_tokens: subject.part_tokens[1],
            sources: sources
                .iter()
                .enumerate()
                .map(|(source, name)| SourceSummary {
                    name: name.clone(),
                    tokens: tokens(&|activity| activity.sources[source].tokens),
                })
                .collect(),
            source_overlap: source_overlap(sources.len(), activities),
            hidden_size: subject.hidden_size,
            ffn_size: activities.first().map_or(0, |first| first.active.len()),
            has_exact_zeros: subject.has_exact_zeros,
            neurons_for: NeuronsFor::of(&Skew::of(all.copied().collect())),
            layers: activities
                .iter()
                .enumerate()
                .map(|(layer, activity)| LayerSummary::of(layer, activity))
                .collect(),
            files: BTreeMap::new(),
        }
    }

    /// The mean of something over the layers.
    pub fn mean(&self, of: impl Fn(&LayerSummary) -> f64) -> f64 {
        self.layers.iter().map(of).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// Share of activations whose neuron was active in the last 1, 4 and 16 tokens, over all
    /// layers; none where sequences were too short to tell.
    pub fn locality(&self) -> [Option<f64>; 3] {
        [0, 1, 2].map(|window| {
            let mut sum = Reuse::default();
            for layer in &self.layers {
                sum.reused += layer.locality[window].reused;
                sum.active += layer.locality[window].active;
            }
            sum.share()
        })
    }
}

/// Overlap of the hot sets of each source and each other, on average over the layers.
fn source_overlap(sources: usize, activities: &[LayerActivity]) -> Vec<Vec<f64>> {
    let mean = |a: usize, b: usize| {
        let overlaps = activities
            .iter()
            .map(|activity| activity.sources[a].overlap(&activity.sources[b]));
        overlaps.sum::<f64>() / activities.len().max(1) as f64
    };
    let row = |a: usize| {
        let cell = |b: usize| match a.cmp(&b) {
            Ordering::Less => mean(a, b),
            Ordering::Equal => 1.0,
            Ordering::Greater => mean(b, a),
        };
        (0..sources).map(cell).collect()
    };
    (0..sources).map(row).collect()
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
        let activities = read_table(&table, body)?;
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
        mut body: ProfileDocument,
        activities: &[LayerActivity],
        texts: &[Vec<u32>],
    ) -> Result<(), ProfileError> {
        token_texts::write(&folder.join(RESERVED_TEXTS), texts)?;
        write_table(&folder.join(TABLE), activities)?;
        let traces = (0..activities.len()).map(|layer| Traces::path(Path::new(""), layer));
        let first = [TABLE, RESERVED_TEXTS].map(PathBuf::from);
        for file in first.into_iter().chain(traces) {
            let digest = Digest::of_file(&folder.join(&file))?;
            body.files
                .insert(file.to_string_lossy().into_owned(), digest);
        }
        Ok(Document { header, body }.write(&folder.join(DOCUMENT))?)
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

    /// The whole of `profile.json`, with its header.
    pub fn json(&self) -> serde_json::Value {
        serde_json::to_value(&self.document).expect("our structures are plain JSON")
    }

    /// Cumulative activation curves: one per layer, and a last one of all layers together.
    ///
    /// Element `p` of the `points + 1` of a curve is the share of activations carried by the hottest `p / points` of the
    /// neurons.
    pub fn cumulative_curves(&self, points: usize) -> Vec<Vec<f64>> {
        let all = self.activities.iter().flat_map(|activity| &activity.active);
        let all = Skew::of(all.copied().collect());
        let layers = self.activities.iter().map(LayerActivity::skew);
        let curve = |skew: Skew| {
            let shares = (0..=points).map(|point| point as f64 / points as f64);
            shares.map(|share| skew.activations_of(share)).collect()
        };
        layers.chain([all]).map(curve).collect()
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
        let file = Traces::path(Path::new(""), layer);
        check_digest(&self.folder, &file.to_string_lossy(), body)?;
        let (traces, header) = Traces::read(&path, body.hidden_size, body.ffn_size)?;
        header.check_model(&path, &self.header().model)?;
        Ok(traces)
    }

    /// Token ids of texts that were held back: nothing here was counted on or learnt from them. None
    /// where the text was too short, or was profiled before any was held back.
    pub fn reserved(&self) -> Result<Vec<Vec<u32>>, ProfileError> {
        if !self.document().files.contains_key(RESERVED_TEXTS) {
            return Ok(Vec::new());
        }
        check_digest(&self.folder, RESERVED_TEXTS, self.document())?;
        Ok(token_texts::read(&self.folder.join(RESERVED_TEXTS))?)
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

/// A column of counts.
fn source_column(source: usize) -> String {
    format!("active_source_{source}")
}

/// Writes a row per neuron. Text from one source needs no counts by source.
fn write_table(path: &Path, activities: &[LayerActivity]) -> Result<(), ProfileError> {
    let failed = |error: PolarsError| ProfileError::Table {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let integers = |name: String, of: &dyn Fn(&LayerActivity) -> &[u64]| {
        let values: Vec<u64> = activities.iter().flat_map(of).copied().collect();
        Column::new(name.into(), values)
    };
    let floats = |name: &str, of: &dyn Fn(&LayerActivity) -> &[f32]| {
        let values: Vec<f32> = activities.iter().flat_map(of).copied().collect();
        Column::new(name.into(), values)
    };
    let places = |name: &str, of: fn(usize, usize) -> usize| {
        let rows = activities.iter().enumerate().flat_map(|(layer, activity)| {
            (0..activity.active.len()).map(move |neuron| of(layer, neuron) as u32)
        });
        Column::new(name.into(), rows.collect::<Vec<_>>())
    };
    let tokens = activities
        .iter()
        .flat_map(|activity| std::iter::repeat_n(activity.tokens, activity.active.len()));
    let mut columns = vec![
        places("layer", |layer, _| layer),
        places("neuron", |_, neuron| neuron),
        Column::new("tokens".into(), tokens.collect::<Vec<_>>()),
        integers("active".to_owned(), &|activity| &activity.active),
        integers("active_first_half".to_owned(), &|activity| {
            &activity.first_half.active
        }),
        floats("mean_magnitude", &|activity| &activity.magnitude),
        floats("mean_contribution", &|activity| &activity.contribution),
    ];
    let sources = activities.first().map_or(0, |first| first.sources.len());
    if sources > 1 {
        columns.extend((0..sources).map(|source| {
            integers(source_column(source), &|activity| {
                &activity.sources[source].active
            })
        }));
    }
    let rows = activities.iter().map(|activity| activity.active.len());
    let mut frame = DataFrame::new(rows.sum(), columns).map_err(failed)?;
    write_with(path, |temporary| {
        let file = File::create(temporary).map_err(ArtifactError::write(path))?;
        ParquetWriter::new(file)
            .with_compression(ParquetCompression::Uncompressed)
            .finish(&mut frame)
            .map_err(failed)?;
        Ok(())
    })
}

/// Reads the table that belongs to `body`.
fn read_table(path: &Path, body: &ProfileDocument) -> Result<Vec<LayerActivity>, ProfileError> {
    let wrong = |reason: String| ProfileError::Table {
        path: path.to_owned(),
        reason,
    };
    let failed = |error: PolarsError| wrong(error.to_string());
    let file = File::open(path).map_err(ArtifactError::read(path))?;
    let frame = ParquetReader::new(file).finish().map_err(failed)?;
    let (layers, neurons) = (body.layers.len(), body.ffn_size);
    let rows = layers.checked_mul(neurons).filter(|rows| *rows > 0);
    let expected = |found: usize| {
        if Some(found) == rows {
            return Ok(());
        }
        Err(wrong(format!(
            "it should have {layers} layers of {neurons} neurons and no gaps, it has {found} rows"
        )))
    };
    let integers = |name: &str| -> Result<Vec<u64>, ProfileError> {
        let column = frame.column(name).and_then(|column| column.u64().cloned());
        let values: Vec<u64> = column.map_err(failed)?.into_no_null_iter().collect();
        expected(values.len())?;
        Ok(values)
    };
    let floats = |name: &str| -> Result<Vec<f32>, ProfileError> {
        let column = frame.column(name).and_then(|column| column.f32().cloned());
        let values: Vec<f32> = column.map_err(failed)?.into_no_null_iter().collect();
        expected(values.len())?;
        Ok(values)
    };
    let (active, first_half) = (integers("active")?, integers("active_first_half")?);
    let (magnitude, contribution) = (floats("mean_magnitude")?, floats("mean_contribution")?);
    let sources = match body.sources.len() {
        0 => return Err(wrong("its document names no source".to_owned())),
        1 => vec![active.clone()],
        several => (0..several)
            .map(|source| integers(&source_column(source)))
            .collect::<Result<_, _>>()?,
    };
    let activity = |layer: usize| {
        let range = layer * neurons..(layer + 1) * neurons;
        let counts = |tokens: u64, active: &[u64]| Counts {
            tokens,
            active: active[range.clone()].to_vec(),
        };
        LayerActivity {
            tokens: body.tokens,
            active: active[range.clone()].to_vec(),
            magnitude: magnitude[range.clone()].to_vec(),
            contribution: contribution[range.clone()].to_vec(),
            first_half: counts(body.first_half_tokens, &first_half),
            sources: sources
                .iter()
                .zip(&body.sources)
                .map(|(active, source)| counts(source.tokens, active))
                .collect(),
            locality: body.layers[layer].locality,
        }
    };
    let activities: Vec<LayerActivity> = (0..layers).map(activity).collect();
    for activity in &activities {
        let parts = [&activity.first_half].into_iter().chain(&activity.sources);
        let over = |counts: &Counts, tokens: u64, limit: &[u64]| {
            counts.tokens > tokens
                || counts.active.iter().any(|active| *active > counts.tokens)
                || counts
                    .active
                    .iter()
                    .zip(limit)
                    .any(|(part, all)| part > all)
        };
        if over(&activity.counts(), body.tokens, &activity.active)
            || parts
                .into_iter()
                .any(|part| over(part, body.tokens, &activity.active))
        {
            return Err(wrong(
                "a neuron is active on more tokens than there were".to_owned(),
            ));
        }
    }
    Ok(activities)
}
