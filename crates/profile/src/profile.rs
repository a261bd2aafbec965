//! A profile on disk: `profile.json`, `neurons.parquet`, `traces/`.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{
    ArtifactError, Digest, Header, ModelIdentity,
    document::{Document, Sealed},
    token_texts,
    write::Contents,
};
use powerinfer_model::Experts;
use serde::{Deserialize, Serialize};

use crate::{
    LayerActivity, ProfileError, Skew, Traces,
    activity::Reuse,
    experts::{self, ExpertSummary, Held},
    resume,
    table::{read_table, write_table},
};

/// Format name in a profile's header.
pub(crate) const FORMAT: &str = "powerinfer-profile";
/// Newest version of profiles that can be read.
pub(crate) const VERSION: u32 = 3;
/// Header input: digest of the calibration text.
pub(crate) const CALIBRATION: &str = "calibration";
/// Header setting: samples kept per layer.
pub(crate) const TRACE_TOKENS: &str = "trace_tokens";
/// Header setting: shard of the text.
pub(crate) const SHARD: &str = "shard";
pub(crate) const DOCUMENT: &str = "profile.json";
const TABLE: &str = "neurons.parquet";
/// File of the reserved texts.
const RESERVED_TEXTS: &str = "reserved.safetensors";

/// Files of a profile, and those of an unfinished one.
pub(crate) fn contents() -> Contents {
    Contents::new(DOCUMENT, FORMAT)
        .with_names(&[
            TABLE,
            RESERVED_TEXTS,
            experts::EXPERTS,
            "traces/layer-#.safetensors",
        ])
        .with_work(&[resume::STATES, "rounds/#/traces/layer-#.safetensors"])
}

/// Skewness of activity: shares of neurons that account for most activations.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NeuronsFor {
    /// Smallest share of neurons with 50% of the activations.
    #[serde(rename = "50_percent")]
    pub half: f64,
    /// Smallest share of neurons with 80% of the activations.
    #[serde(rename = "80_percent")]
    pub most: f64,
    /// Smallest share of neurons with 95% of the activations.
    #[serde(rename = "95_percent")]
    pub nearly_all: f64,
}

impl NeuronsFor {
    pub(crate) fn new(skew: &Skew) -> Self {
        Self {
            half: skew.neurons_for(0.5),
            most: skew.neurons_for(0.8),
            nearly_all: skew.neurons_for(0.95),
        }
    }
}

/// Summary of a layer's activity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Layer index.
    pub layer: usize,
    /// Share of activations that are exactly zero.
    pub sparsity: f64,
    /// Skewness of activity: shares of neurons that account for most activations.
    pub neurons_for: NeuronsFor,
    /// Share of neurons that were never active.
    pub dead: f64,
    /// Jaccard similarity of the hot sets (top 20%) of two independent halves of the text.
    pub half_overlap: f64,
    /// Activations of neurons that were active in the last 1, 4 and 16 tokens.
    pub locality: [Reuse; 3],
    /// Share of activations of the hottest 10%, 20%, … 100% of the neurons.
    pub cumulative: Vec<f64>,
    /// Expert selections; `None` if they were not counted, as in dense models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertSummary>,
}

impl LayerSummary {
    /// Summary of the counts of `layer`.
    pub(crate) fn new(layer: usize, activity: &LayerActivity, experts: Option<&Experts>) -> Self {
        let skew = activity.skew();
        Self {
            layer,
            sparsity: activity.sparsity(),
            neurons_for: NeuronsFor::new(&skew),
            dead: activity.dead(),
            half_overlap: activity.half_overlap(),
            locality: activity.locality,
            cumulative: (1..=10)
                .map(|tenth| skew.activations_of(f64::from(tenth) / 10.0))
                .collect(),
            experts: experts.and_then(|experts| ExpertSummary::new(layer, experts, activity)),
        }
    }
}

/// A source of calibration text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSummary {
    /// Name for reports.
    pub name: String,
    /// Number of documents that were read.
    #[serde(default)]
    pub documents: u64,
    /// Number of documents per file format.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub formats: BTreeMap<String, u64>,
    /// Number of profiled tokens.
    pub tokens: u64,
}

/// Body of `profile.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileDocument {
    /// Number of profiled tokens.
    pub tokens: u64,
    /// Tokens of the first of two independent halves.
    pub first_half_tokens: u64,
    /// Tokens of the training part.
    pub training_tokens: u64,
    /// Tokens of the held-out part.
    pub held_out_tokens: u64,
    /// Sources of the text.
    pub sources: Vec<SourceSummary>,
    /// `[source, source]`: mean over the layers of the Jaccard similarity of the hot sets (top 20%).
    pub source_overlap: Vec<Vec<f64>>,
    /// Hidden size of the model.
    pub hidden_size: usize,
    /// Neurons per layer.
    pub ffn_size: usize,
    /// Whether inactive neurons contribute exactly 0.
    pub has_exact_zeros: bool,
    /// Experts of every layer; `None` in dense models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Skewness of activity over the neurons of all layers.
    pub neurons_for: NeuronsFor,
    /// Summary of each layer.
    pub layers: Vec<LayerSummary>,
    /// Digests of the other files, by path.
    pub files: BTreeMap<String, Digest>,
    /// Digest of this file without this entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Digest>,
}

impl Sealed for ProfileDocument {
    fn seal(&mut self) -> &mut Option<Digest> {
        &mut self.seal
    }
}

/// Facts of a profile that do not follow from its counts.
pub(crate) struct Subject<'a> {
    pub(crate) hidden_size: usize,
    pub(crate) has_exact_zeros: bool,
    pub(crate) experts: Option<&'a Experts>,
    /// Tokens of the training and of the held-out part.
    pub(crate) part_tokens: [u64; 2],
    pub(crate) sources: &'a [SourceSummary],
}

impl ProfileDocument {
    /// Document with the summaries of all layers.
    pub(crate) fn new(subject: Subject<'_>, activities: &[LayerActivity]) -> Self {
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
                .map(|(source, summary)| SourceSummary {
                    tokens: tokens(&|activity| activity.sources[source].tokens),
                    ..summary.clone()
                })
                .collect(),
            source_overlap: source_overlap(sources.len(), activities),
            hidden_size: subject.hidden_size,
            ffn_size: activities.first().map_or(0, |first| first.active.len()),
            has_exact_zeros: subject.has_exact_zeros,
            experts: subject
                .experts
                .filter(|_| activities.iter().all(|activity| activity.experts.is_some()))
                .cloned(),
            neurons_for: NeuronsFor::new(&Skew::new(all.copied().collect())),
            layers: activities
                .iter()
                .enumerate()
                .map(|(layer, activity)| LayerSummary::new(layer, activity, subject.experts))
                .collect(),
            files: BTreeMap::new(),
            seal: None,
        }
    }

    /// Mean of `metric` over all layers.
    pub fn mean(&self, metric: impl Fn(&LayerSummary) -> f64) -> f64 {
        self.layers.iter().map(metric).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// Share of activations of neurons that were also active within the last 1, 4 and 16 tokens, over all layers; `None`
    /// if no sequence is longer than the window.
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

/// Pairwise overlap of the sources' hot sets, mean over the layers.
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

/// A profile that was opened and checked.
#[derive(Debug)]
pub struct Profile {
    folder: PathBuf,
    document: Document<ProfileDocument>,
    activities: Vec<LayerActivity>,
}

impl Profile {
    /// Opens the profile in `folder` and checks its table.
    ///
    /// # Errors
    ///
    /// There is no profile, or its document or table is invalid, damaged or of another version.
    pub fn open(folder: &Path) -> Result<Self, ProfileError> {
        let path = folder.join(DOCUMENT);
        if !path.exists() {
            return Err(ProfileError::Missing {
                path: folder.to_owned(),
            });
        }
        let mut document = Document::<ProfileDocument>::read(&path, FORMAT, VERSION)?;
        document.check_seal(&path)?;
        let table = folder.join(TABLE);
        let body = &mut document.body;
        check_digest(folder, TABLE, body)?;
        let mut activities = read_table(&table, body)?;
        if let Some(experts) = &body.experts {
            check_digest(folder, experts::EXPERTS, body)?;
            let path = folder.join(experts::EXPERTS);
            experts::read(&path, experts, body.ffn_size, &mut activities)?;
            for (layer, activity) in body.layers.iter_mut().zip(&activities) {
                layer.experts = ExpertSummary::new(layer.layer, experts, activity);
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            document,
            activities,
        })
    }

    /// Writes document, table and reserved texts into `folder`, which contains the traces.
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
        let mut first = vec![TABLE, RESERVED_TEXTS];
        if body.experts.is_some() {
            experts::write(&folder.join(experts::EXPERTS), &header, activities)?;
            first.push(experts::EXPERTS);
        }
        for file in first.into_iter().map(PathBuf::from).chain(traces) {
            let digest = Digest::of_file(&folder.join(&file))?;
            body.files
                .insert(file.to_string_lossy().into_owned(), digest);
        }
        let document = Document { header, body };
        Ok(document.sealed().write(&folder.join(DOCUMENT))?)
    }

    /// Checks that this is a profile of `model`.
    ///
    /// # Errors
    ///
    /// It is a profile of another model.
    pub fn check_model(&self, model: &ModelIdentity) -> Result<(), ProfileError> {
        Ok(self
            .header()
            .check_model(&self.folder.join(DOCUMENT), model)?)
    }

    /// Header: tool, model, inputs and settings.
    pub fn header(&self) -> &Header {
        &self.document.header
    }

    /// Folder of the profile.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Body of `profile.json`.
    pub fn document(&self) -> &ProfileDocument {
        &self.document.body
    }

    /// All of `profile.json`, including the header.
    #[expect(
        clippy::missing_panics_doc,
        reason = "profile documents always serialise"
    )]
    pub fn json(&self) -> serde_json::Value {
        serde_json::to_value(&self.document).expect("profile documents serialise to JSON")
    }

    /// Cumulative activation curves, `[layers + 1, points + 1]`; the last curve is over the neurons of all layers.
    ///
    /// Element `p` of a curve is the share of activations of the hottest `p / points` of the neurons.
    pub fn cumulative_curves(&self, points: usize) -> Vec<Vec<f64>> {
        let all = self.activities.iter().flat_map(|activity| &activity.active);
        let all = Skew::new(all.copied().collect());
        let layers = self.activities.iter().map(LayerActivity::skew);
        let curve = |skew: Skew| {
            let shares = (0..=points).map(|point| point as f64 / points as f64);
            shares.map(|share| skew.activations_of(share)).collect()
        };
        layers.chain([all]).map(curve).collect()
    }

    /// Share of the tokens that selected each expert, `[layers, experts]`; empty if expert selections were not counted.
    pub fn expert_frequencies(&self) -> Vec<Vec<f64>> {
        let layers = self.activities.iter();
        let frequencies = |activity: &LayerActivity| {
            let selections = activity.experts.as_ref()?.selections().into_iter();
            let tokens = activity.tokens.max(1) as f64;
            Some(selections.map(|count| count as f64 / tokens).collect())
        };
        layers.filter_map(frequencies).collect()
    }

    /// Mean hit rates over all layers of a fixed set and of a cache, as in [`Held`], if 0, 1, … all experts of every layer are kept in
    /// fast memory. Each list is empty if its hit rates are unknown.
    pub fn expert_hit_rates(&self) -> [Vec<f64>; 2] {
        let layers = self.activities.iter();
        let layers: Option<Vec<Vec<Held>>> = layers
            .map(|activity| Some(activity.experts.as_ref()?.held()))
            .collect();
        let layers = layers.unwrap_or_default();
        let sizes = layers.first().map_or(0, Vec::len);
        let mean = |rate: &dyn Fn(&Held) -> Option<f64>| -> Vec<f64> {
            let of_size = |size: usize| {
                let rates = layers.iter().map(|layer| rate(&layer[size]));
                Some(rates.sum::<Option<f64>>()? / layers.len() as f64)
            };
            (0..sizes).map_while(of_size).collect()
        };
        [mean(&|held| held.fixed), mean(&|held| Some(held.cached))]
    }

    /// Activity of each layer.
    pub fn activities(&self) -> &[LayerActivity] {
        &self.activities
    }

    /// Digest of `profile.json`, which contains the digests of all other files.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn digest(&self) -> Result<Digest, ProfileError> {
        Ok(Digest::of_file(&self.folder.join(DOCUMENT))?)
    }

    /// Samples of `layer`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is damaged, or belongs to another model.
    pub fn traces(&self, layer: usize) -> Result<Traces, ProfileError> {
        let path = Traces::path(&self.folder, layer);
        let body = self.document();
        let file = Traces::path(Path::new(""), layer);
        check_digest(&self.folder, &file.to_string_lossy(), body)?;
        let (traces, header) = Traces::read(&path, body.hidden_size, body.ffn_size)?;
        header.check_model(&path, &self.header().model)?;
        Ok(traces)
    }

    /// Token ids of the reserved texts, which were neither counted nor sampled. Empty if the calibration text was too short.
    ///
    /// # Errors
    ///
    /// The file cannot be read or is damaged.
    pub fn reserved(&self) -> Result<Vec<Vec<u32>>, ProfileError> {
        if !self.document().files.contains_key(RESERVED_TEXTS) {
            return Ok(Vec::new());
        }
        check_digest(&self.folder, RESERVED_TEXTS, self.document())?;
        Ok(token_texts::read(&self.folder.join(RESERVED_TEXTS))?)
    }

    /// Recomputes and compares the digests of all files; returns their number.
    ///
    /// # Errors
    ///
    /// A file cannot be read or is damaged.
    pub fn verify(&self) -> Result<usize, ProfileError> {
        for file in self.document().files.keys() {
            check_digest(&self.folder, file, self.document())?;
        }
        Ok(self.document().files.len())
    }
}

/// Checks a file against its digest in the document.
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
