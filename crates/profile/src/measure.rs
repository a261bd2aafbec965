//! The measurement: the outer loop is over layers, the inner one over text, so that each weight is read once per round.

use std::{
    cell::Cell,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{Header, Progress, Shard, write::PartialFolder};
use powerinfer_gpu::LayerWeights;
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_reference::Embedding;

use crate::{
    Calibration, ExpertActivity, LayerActivity, Part, Profile, ProfileDocument, ProfileError,
    Traces,
    observe::{InstrumentedLayer, Observation},
    profile::{self, Subject},
    resume::{self, HiddenSink, ResumePoint, Sizes, State},
    samples::Sampling,
    times::Times,
    traces,
};

/// Tokens of the first round of [`Amount::UntilSettled`].
pub const FIRST_ROUND: usize = 8192;

/// Tokens of [`Amount::UntilSettled`] for models without exact zeros, whose neurons are always active.
const WITHOUT_ZEROS: usize = 32_768;

/// Amount of text to profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// All text.
    Everything,
    /// Rounds of doubling length, until the hot sets of two independent halves of the text overlap enough (mean over the
    /// layers) and all samples are taken.
    UntilSettled {
        /// Jaccard similarity, from 0 to 1.
        overlap: f64,
    },
}

/// Settings of a profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Samples per layer of the training part; the held-out part has a quarter as many.
    pub trace_tokens: usize,
    /// Amount of text to profile.
    pub amount: Amount,
    /// Shard of the text to profile.
    pub shard: Shard,
    /// Seed recorded in the header.
    pub seed: u64,
}

impl Settings {
    /// Tokens of `calibration` that a profile usually runs, for a model with or without exact zeros. With
    /// [`Amount::UntilSettled`], these are the rounds until all samples are taken; the counts may settle later.
    pub fn usual_tokens(&self, calibration: &Calibration, has_exact_zeros: bool) -> usize {
        // A fifth of the text is held out.
        let sampled = self.trace_tokens + self.trace_tokens / 4;
        let rounds = match self.amount {
            Amount::Everything => usize::MAX,
            Amount::UntilSettled { .. } if !has_exact_zeros => WITHOUT_ZEROS,
            Amount::UntilSettled { .. } => {
                FIRST_ROUND * sampled.div_ceil(FIRST_ROUND).next_power_of_two()
            }
        };
        rounds.min(calibration.tokens())
    }

    /// Samples per layer of each part.
    pub(crate) fn samples(trace_tokens: usize) -> [usize; 2] {
        [trace_tokens, trace_tokens.div_ceil(4)]
    }
}

impl Profile {
    /// Whether `folder` contains a profile of exactly these inputs and settings.
    pub fn is_current(
        folder: &Path,
        checkpoint: &Checkpoint,
        calibration: &Calibration,
        settings: Settings,
    ) -> bool {
        let has_experts = checkpoint.config().experts.is_some();
        Self::open(folder).is_ok_and(|profile| {
            *profile.header() == header(checkpoint, calibration, settings)
                // Earlier versions did not count expert selections.
                && profile.document().experts.is_some() == has_experts
        })
    }
}

/// Header of a profile of `checkpoint` over `calibration`.
fn header(checkpoint: &Checkpoint, calibration: &Calibration, settings: Settings) -> Header {
    // Without `..`, because a profile depends on all fields.
    let Settings {
        trace_tokens,
        amount,
        shard,
        seed,
    } = settings;
    let model = checkpoint.identity().clone();
    let header = Header::new(profile::FORMAT, profile::VERSION, model, seed)
        .with_input(profile::CALIBRATION, calibration.digest())
        .with_setting(profile::TRACE_TOKENS, trace_tokens);
    let header = match amount {
        Amount::Everything => header,
        Amount::UntilSettled { overlap } => header.with_setting("until_overlap", overlap),
    };
    match shard {
        Shard::WHOLE => header,
        shard => header.with_setting(profile::SHARD, shard.to_string()),
    }
}

/// Profiles `checkpoint` over `calibration` into the folder `out`, on `device` if there is one, else on the CPU.
///
/// An interrupted run with the same inputs resumes after its last finished layer, on either device: counts agree up to the
/// rounding of sums. Memory holds one layer (two with a device), one sequence and one layer's samples; hidden states are on
/// disk.
///
/// # Errors
///
/// The model cannot be read or run, the device fails, an activation is not finite, the shard is empty, a file cannot be
/// written, or `progress` interrupts.
pub fn measure(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
    device: Option<&Arc<dyn Device>>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Profile, ProfileError> {
    let header = header(checkpoint, calibration, settings);
    let folder = PartialFolder::open(out, profile::contents())?;
    let config = checkpoint.config();
    let mut run = Run {
        checkpoint,
        calibration,
        settings,
        device,
        sequences: calibration.shard(settings.shard)?,
        sizes: Sizes {
            layers: config.layer_count,
            neurons: config.ffn_size,
            sources: calibration.sources().len(),
            hidden: config.hidden_size,
            experts: config.experts.as_ref().map(|experts| experts.count),
        },
        folder: folder.path(),
        header: &header,
        progress,
        rounds: Vec::new(),
        ahead: Cell::new(None),
    };
    // A run that was killed at the very end left a complete profile.
    if Profile::open(folder.path()).is_ok_and(|done| *done.header() == header) {
        folder.finish()?;
        return Profile::open(out);
    }
    let activities = run.measure(&folder)?;
    run.join_traces()?;
    let sequences = run.rounds.first().map_or(0, |first| first.start)
        ..run.rounds.last().map_or(0, |last| last.end);
    let part_tokens = Part::ALL.map(|part| calibration.part_tokens(part, sequences.clone()) as u64);
    let subject = Subject {
        hidden_size: config.hidden_size,
        has_exact_zeros: config.activation.has_exact_zeros(),
        experts: config.experts.as_ref(),
        part_tokens,
        sources: calibration.sources(),
    };
    let body = ProfileDocument::new(subject, &activities);
    Profile::write(
        folder.path(),
        header.clone(),
        body,
        &activities,
        calibration.reserved(),
    )?;
    // Check it before it replaces an existing profile.
    Profile::open(folder.path())?;
    folder.finish()?;
    Profile::open(out)
}

/// A measurement in progress.
struct Run<'a> {
    checkpoint: &'a Checkpoint,
    calibration: &'a Calibration,
    settings: Settings,
    device: Option<&'a Arc<dyn Device>>,
    sequences: Range<usize>,
    sizes: Sizes,
    folder: &'a Path,
    header: &'a Header,
    progress: &'a dyn Progress,
    /// Rounds that are finished or running.
    rounds: Vec<Range<usize>>,
    /// Weights of a layer that were read ahead.
    ahead: Cell<Option<(usize, LayerWeights)>>,
}

impl Run<'_> {
    /// Runs rounds until the amount of text is reached.
    fn measure(&mut self, folder: &PartialFolder) -> Result<Vec<LayerActivity>, ProfileError> {
        let tokens = |range: Range<usize>| {
            (range.end <= self.sequences.end).then(|| self.calibration.tokens_in(range))
        };
        let found = resume::load(self.folder, self.header, self.sizes, tokens);
        let found = found.filter(|state| self.has_samples(state.place));
        let mut state = match found {
            Some(state) => {
                self.progress.note(&format!(
                    "resuming after layer {} of an interrupted run",
                    state.place.layer
                ));
                self.rounds = self.rounds_before(state.place);
                state
            }
            None => {
                folder.clear()?;
                let mut empty = LayerActivity::new(self.sizes.neurons, self.sizes.sources);
                empty.experts = self.sizes.experts.map(ExpertActivity::new);
                State {
                    place: ResumePoint {
                        start: self.sequences.start,
                        end: self.round_after(self.sequences.start).end,
                        layer: 0,
                    },
                    activities: vec![empty; self.sizes.layers],
                    hidden: None,
                }
            }
        };
        loop {
            let round = state.place.start..state.place.end;
            self.rounds.push(round.clone());
            state = self.round(state)?;
            let next = self.round_after(round.end);
            if next.is_empty() || self.is_settled(&state.activities) {
                return Ok(state.activities);
            }
            state.place = ResumePoint {
                start: next.start,
                end: next.end,
                layer: 0,
            };
        }
    }

    /// The round that starts at sequence `start`; empty at the end of the text.
    fn round_after(&self, start: usize) -> Range<usize> {
        let done = self.calibration.tokens_in(self.sequences.start..start);
        let wanted = match self.settings.amount {
            Amount::Everything => usize::MAX,
            Amount::UntilSettled { .. } if !self.has_exact_zeros() => {
                WITHOUT_ZEROS.saturating_sub(done)
            }
            Amount::UntilSettled { .. } => done.max(FIRST_ROUND),
        };
        let round = self.calibration.first(start, wanted);
        round.start..round.end.min(self.sequences.end)
    }

    /// The rounds that are finished at `place`.
    fn rounds_before(&self, place: ResumePoint) -> Vec<Range<usize>> {
        let mut rounds = Vec::new();
        let mut round = self.round_after(self.sequences.start);
        while round.start < place.start && !round.is_empty() {
            rounds.push(round.clone());
            round = self.round_after(round.end);
        }
        rounds
    }

    fn has_exact_zeros(&self) -> bool {
        self.checkpoint.config().activation.has_exact_zeros()
    }

    /// Whether the hot sets have converged and all samples are taken.
    fn is_settled(&self, activities: &[LayerActivity]) -> bool {
        let Amount::UntilSettled { overlap: bound } = self.settings.amount else {
            return false;
        };
        let overlaps: Vec<f64> = activities.iter().map(LayerActivity::half_overlap).collect();
        let mean = overlaps.iter().sum::<f64>() / overlaps.len().max(1) as f64;
        let settled = mean >= bound;
        let sampled = self.calibration.part_tokens(
            Part::Training,
            self.sequences.start..self.rounds.last().map_or(0, |last| last.end),
        );
        let enough = sampled >= self.settings.trace_tokens;
        if !settled || !enough {
            let overlap = format!("{:.1}% overlap", 100.0 * mean);
            let text = if settled {
                format!(
                    "hot neurons are stable ({overlap}); reading on to collect training samples"
                )
            } else {
                format!(
                    "hot neurons are not stable yet ({overlap}); reading on until {:.0}%",
                    100.0 * bound
                )
            };
            self.progress
                .note(&format!("{} tokens: {text}", activities[0].tokens));
        }
        settled && enough
    }

    /// Runs the remaining layers of a round.
    fn round(&self, mut state: State) -> Result<State, ProfileError> {
        let range = state.place.start..state.place.end;
        let tokens = self.calibration.tokens_in(range.clone());
        let work = (tokens * self.sizes.layers) as u64;
        let title = match self.rounds.len() {
            0 | 1 => "profiling".to_owned(),
            round => format!("profiling, round {round}"),
        };
        self.progress.begin(&title, work, "tokens in layers");
        self.progress.skip((tokens * state.place.layer) as u64)?;
        while state.place.layer < self.sizes.layers {
            state = self.layer(state, &range, tokens)?;
        }
        self.progress.end();
        Ok(state)
    }

    /// Runs the next layer of a round.
    fn layer(
        &self,
        state: State,
        range: &Range<usize>,
        tokens: usize,
    ) -> Result<State, ProfileError> {
        let index = state.place.layer;
        let place = ResumePoint {
            layer: index + 1,
            ..state.place
        };
        // The output of the last layer is not needed.
        let is_last = place.layer == self.sizes.layers;
        let kept = if is_last { 0 } else { tokens };
        let run = |sink: &mut HiddenSink<'_>| {
            let State {
                mut activities,
                hidden,
                ..
            } = state;
            let sequences = &self.calibration.sequences()[range.clone()];
            let embedding = match &hidden {
                Some(_) => None,
                None => {
                    let tokens = sequences.iter().flat_map(|sequence| &sequence.tokens);
                    Some(Embedding::load_for(self.checkpoint, tokens)?)
                }
            };
            let observation = Observation {
                sources: self.sizes.sources,
                longest: sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0),
                sampling: self.sampling(range),
            };
            let mut times = Times::default();
            let mut layer = times.loading(|| {
                let device = match self.device {
                    Some(device) => Some((device, self.weights(index)?)),
                    None => None,
                };
                InstrumentedLayer::load(self.checkpoint, index, device, observation)
            })?;
            let mut first = 0;
            self.reading_ahead(index + 1, || {
                for sequence in sequences {
                    let count = sequence.tokens.len();
                    let input = times.moving(|| match (&hidden, &embedding) {
                        (Some(hidden), _) => Ok::<_, ProfileError>(hidden.read(first, count)),
                        (None, Some(embedding)) => {
                            let embedded = embedding.embed(&sequence.tokens)?;
                            Ok(embedded.flatten_all()?.to_vec1()?)
                        }
                        (None, None) => {
                            unreachable!("the first layer has embeddings")
                        }
                    })?;
                    first += count;
                    let output = times.forward(|| layer.forward(sequence, input))?;
                    if !is_last {
                        times.moving(|| sink(&output))?;
                    }
                    self.progress.advance(count as u64)?;
                }
                Ok::<_, ProfileError>(())
            })?;
            self.progress
                .detail(&times.describe(index, tokens, layer.observing()));
            let (activity, samples) = layer.finish(index)?;
            samples.write(&self.round_traces(range, index), &self.trace_header())?;
            activities[index].add(&activity);
            Ok(activities)
        };
        resume::save(self.folder, self.header, self.sizes, place, kept, run)
    }

    /// Weights of layer `index`, read now or ahead.
    fn weights(&self, index: usize) -> Result<LayerWeights, ProfileError> {
        match self.ahead.take() {
            Some((layer, weights)) if layer == index => Ok(weights),
            _ => Ok(LayerWeights::read(self.checkpoint, index)?),
        }
    }

    /// Runs `work`; with a device, reads the weights of layer `next` in parallel.
    fn reading_ahead<Output>(&self, next: usize, work: impl FnOnce() -> Output) -> Output {
        if self.device.is_none() || next >= self.sizes.layers {
            return work();
        }
        let checkpoint = self.checkpoint;
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || LayerWeights::read(checkpoint, next));
            let output = work();
            // A failure is reported when the layer is read again.
            if let Ok(Ok(weights)) = reading.join() {
                self.ahead.set(Some((next, weights)));
            }
            output
        })
    }

    /// Sampling of each part in a round.
    fn sampling(&self, round: &Range<usize>) -> [Sampling; 2] {
        let samples = Settings::samples(self.settings.trace_tokens);
        Part::ALL.map(|part| {
            let tokens = |range| self.calibration.part_tokens(part, range);
            // If all text is profiled, a shard takes the samples that a single run would take from it; a round cannot know
            // how many will follow and takes all.
            let (total, first) = match self.settings.amount {
                Amount::Everything => (
                    tokens(0..self.calibration.sequences().len()),
                    tokens(0..round.start),
                ),
                Amount::UntilSettled { .. } => (tokens(round.clone()), 0),
            };
            Sampling {
                wanted: samples[part as usize],
                total,
                first,
            }
        })
    }

    fn trace_header(&self) -> Header {
        Header {
            format: traces::FORMAT.to_owned(),
            version: traces::VERSION,
            ..self.header.clone()
        }
    }

    /// Temporary path of the samples of a round.
    fn round_traces(&self, round: &Range<usize>, layer: usize) -> PathBuf {
        let folder = self.folder.join(format!("rounds/{:08}", round.end));
        Traces::path(&folder, layer)
    }

    /// Joins the samples of all rounds.
    fn join_traces(&self) -> Result<(), ProfileError> {
        for layer in 0..self.sizes.layers {
            let Sizes {
                hidden, neurons, ..
            } = self.sizes;
            let mut texts = Vec::new();
            for round in &self.rounds {
                let path = self.round_traces(round, layer);
                let (traces, _) = Traces::read(&path, hidden, neurons)?;
                let tokens =
                    Part::ALL.map(|part| self.calibration.part_tokens(part, round.clone()));
                texts.push((traces, tokens));
            }
            let wanted = Settings::samples(self.settings.trace_tokens);
            let joined = Traces::join(hidden, neurons, &texts, wanted);
            joined.write(&Traces::path(self.folder, layer), &self.trace_header())?;
        }
        Ok(())
    }

    /// Whether the samples of everything before `place` exist.
    fn has_samples(&self, place: ResumePoint) -> bool {
        let current = place.start..place.end;
        let layers = |round: &Range<usize>| {
            if *round == current {
                place.layer
            } else {
                self.sizes.layers
            }
        };
        let expected = self.trace_header();
        let rounds = self
            .rounds_before(place)
            .into_iter()
            .chain([current.clone()]);
        rounds
            .flat_map(|round| (0..layers(&round)).map(move |layer| (round.clone(), layer)))
            .all(|(round, layer)| {
                let Sizes {
                    hidden, neurons, ..
                } = self.sizes;
                let samples = Traces::read(&self.round_traces(&round, layer), hidden, neurons);
                samples.is_ok_and(|(_, header)| header == expected)
            })
    }
}
