//! The measurement: layers outside, text inside, so that each weight is read once a round.

use std::{
    cell::Cell,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use powerinfer_artifact::{Header, Progress, write::PartialFolder};
use powerinfer_gpu::LayerWeights;
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_reference::Embedding;

use crate::{
    Calibration, LayerActivity, Part, Profile, ProfileDocument, ProfileError, Traces,
    calibration::Shard,
    observe::{Watch, WatchedLayer},
    profile::{self, Subject},
    resume::{self, HiddenSink, Place, Sizes, State},
    samples::Sampling,
    traces,
};

/// Tokens of the first round where the amount is not given.
pub const FIRST_ROUND: usize = 8192;

/// Tokens for models without exact zeros, whose counts have no ranking that could settle.
const WITHOUT_ZEROS: usize = 32_768;

/// How much of the text is profiled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// All of it.
    Everything,
    /// Rounds of doubling length, until the hot sets of two independent halves overlap by this
    /// much on average over the layers, and there are as many samples as were asked for.
    UntilSettled {
        /// Jaccard similarity, from 0 to 1.
        overlap: f64,
    },
}

/// What shapes a profile, beside model and text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Tokens per layer to keep samples of, for training; a quarter as many are kept for judging.
    pub trace_tokens: usize,
    /// How much of the text is profiled.
    pub amount: Amount,
    /// Which part of it.
    pub shard: Shard,
    /// Seed recorded in the header.
    pub seed: u64,
}

impl Settings {
    /// Samples kept per layer and part.
    pub(crate) fn samples(trace_tokens: usize) -> [usize; 2] {
        [trace_tokens, trace_tokens.div_ceil(4)]
    }
}

/// The header of a profile of `checkpoint` over `calibration`.
pub(crate) fn header(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
) -> Header {
    let header = Header::new(
        profile::FORMAT,
        profile::VERSION,
        checkpoint.identity().clone(),
        settings.seed,
    )
    .with_input(profile::CALIBRATION, calibration.digest())
    .with_setting(profile::TRACE_TOKENS, settings.trace_tokens);
    let header = match settings.amount {
        Amount::Everything => header,
        Amount::UntilSettled { overlap } => header.with_setting("until_overlap", overlap),
    };
    match settings.shard {
        Shard::WHOLE => header,
        shard => header.with_setting(profile::SHARD, shard.to_string()),
    }
}

/// Profiles `checkpoint` over `calibration` into the folder `out`; on `device`, where there is one.
///
/// An interrupted run with the same inputs goes on after its last finished layer, on whichever device: the counts
/// are the same up to the rounding of sums. In memory are one layer (beside a device two), one sequence, and the samples of
/// one layer; hidden states are on disk.
pub fn measure(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
    device: Option<&Arc<dyn Device>>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Profile, ProfileError> {
    let header = header(checkpoint, calibration, settings);
    let folder = PartialFolder::open(out, profile::DOCUMENT)?;
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
        },
        folder: folder.path(),
        header: &header,
        progress,
        rounds: Vec::new(),
        ahead: Cell::new(None),
    };
    // A run that was killed at the very end has left a whole profile.
    if Profile::open(folder.path()).is_ok_and(|done| *done.header() == header) {
        run.remove_work()?;
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
        part_tokens,
        sources: calibration.sources(),
    };
    let body = ProfileDocument::of(subject, &activities);
    Profile::write(
        folder.path(),
        header.clone(),
        body,
        &activities,
        calibration.reserved(),
    )?;
    // What cannot be read does not replace what can.
    Profile::open(folder.path())?;
    run.remove_work()?;
    folder.finish()?;
    Profile::open(out)
}

/// Where the time of a layer goes.
#[derive(Debug, Default)]
struct Times {
    loading: Duration,
    forward: Duration,
    moving: Duration,
}

impl Times {
    fn add<Output>(sum: &mut Duration, work: impl FnOnce() -> Output) -> Output {
        let started = Instant::now();
        let output = work();
        *sum += started.elapsed();
        output
    }

    /// Reads weights.
    fn loading<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.loading, work)
    }

    /// Computes, and is watched doing so.
    fn forward<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.forward, work)
    }

    /// Brings hidden states from disk or back.
    fn moving<Output>(&mut self, work: impl FnOnce() -> Output) -> Output {
        Self::add(&mut self.moving, work)
    }

    /// The times of a layer in words; `watching` is within the forward.
    fn told(&self, layer: usize, tokens: usize, watching: Duration) -> String {
        let all = self.loading + self.forward + self.moving;
        let unwatched = (all - watching).as_secs_f64().max(1e-9);
        format!(
            "layer {layer}: {:.0} tokens/s; weights {:.2} s, forward {:.2} s, hidden states {:.2} s, watching {:.2} s ({:.1} % more than without)",
            tokens as f64 / all.as_secs_f64().max(1e-9),
            self.loading.as_secs_f64(),
            (self.forward - watching).as_secs_f64(),
            self.moving.as_secs_f64(),
            watching.as_secs_f64(),
            100.0 * watching.as_secs_f64() / unwatched,
        )
    }
}

/// A measurement on its way.
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
    /// Rounds that are done or under way.
    rounds: Vec<Range<usize>>,
    /// The weights of a layer that has been read while another was computed.
    ahead: Cell<Option<(usize, LayerWeights)>>,
}

impl Run<'_> {
    /// Runs round after round until there is enough.
    fn measure(&mut self, folder: &PartialFolder) -> Result<Vec<LayerActivity>, ProfileError> {
        let tokens = |range: Range<usize>| {
            (range.end <= self.sequences.end).then(|| self.calibration.tokens_in(range))
        };
        let found = resume::load(self.folder, self.header, self.sizes, tokens);
        let found = found.filter(|state| self.has_samples(state.place));
        let mut state = match found {
            Some(state) => {
                self.progress.note(&format!(
                    "going on after layer {} of an interrupted run",
                    state.place.layer
                ));
                self.rounds = self.rounds_before(state.place);
                state
            }
            None => {
                folder.clear()?;
                let empty = LayerActivity::new(self.sizes.neurons, self.sizes.sources);
                State {
                    place: Place {
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
            state.place = Place {
                start: next.start,
                end: next.end,
                layer: 0,
            };
        }
    }

    /// The round that begins with the sequence `start`; empty where there is no more.
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

    /// The rounds that are over at `place`.
    fn rounds_before(&self, place: Place) -> Vec<Range<usize>> {
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

    /// Whether more text would hardly change who is hot.
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
            self.progress.note(&format!(
                "{} tokens: the hot sets of two halves of the text overlap by {:.1} %; going on {}",
                activities[0].tokens,
                100.0 * mean,
                if settled {
                    "for the samples that predictors learn from".to_owned()
                } else {
                    format!("until it is {:.0} %", 100.0 * bound)
                }
            ));
        }
        settled && enough
    }

    /// Takes a round from wherever it is through its remaining layers.
    fn round(&self, mut state: State) -> Result<State, ProfileError> {
        let range = state.place.start..state.place.end;
        let tokens = self.calibration.tokens_in(range.clone());
        let work = (tokens * self.sizes.layers) as u64;
        self.progress.begin("profiling", work, "tokens");
        self.progress.advance((tokens * state.place.layer) as u64)?;
        while state.place.layer < self.sizes.layers {
            state = self.layer(state, &range, tokens)?;
        }
        self.progress.end();
        Ok(state)
    }

    /// Takes a round through its next layer.
    fn layer(
        &self,
        state: State,
        range: &Range<usize>,
        tokens: usize,
    ) -> Result<State, ProfileError> {
        let index = state.place.layer;
        let place = Place {
            layer: index + 1,
            ..state.place
        };
        // What comes out of the last layer is of no use.
        let is_last = place.layer == self.sizes.layers;
        let kept = if is_last { 0 } else { tokens };
        let run = |sink: &mut HiddenSink<'_>| {
            let State {
                mut activities,
                hidden,
                ..
            } = state;
            let sequences = &self.calibration.sequences()[range.clone()];
            let beginning = match &hidden {
                Some(_) => None,
                None => {
                    let tokens = sequences.iter().flat_map(|sequence| &sequence.tokens);
                    Some(Embedding::load_for(self.checkpoint, tokens)?)
                }
            };
            let watch = Watch {
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
                WatchedLayer::load(self.checkpoint, index, device, watch)
            })?;
            let mut first = 0;
            self.reading_ahead(index + 1, || {
                for sequence in sequences {
                    let count = sequence.tokens.len();
                    let input = times.moving(|| match (&hidden, &beginning) {
                        (Some(hidden), _) => Ok::<_, ProfileError>(hidden.read(first, count)),
                        (None, Some(beginning)) => {
                            let embedded = beginning.embed(&sequence.tokens)?;
                            Ok(embedded.flatten_all()?.to_vec1()?)
                        }
                        (None, None) => {
                            unreachable!("there is a beginning where nothing is hidden")
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
                .detail(&times.told(index, tokens, layer.watching()));
            let (activity, samples) = layer.finish(index)?;
            samples.write(&self.round_traces(range, index), &self.trace_header())?;
            activities[index].add(&activity);
            Ok(activities)
        };
        resume::save(self.folder, self.header, self.sizes, place, kept, run)
    }

    /// The weights of layer `index`, which may have been read already.
    fn weights(&self, index: usize) -> Result<LayerWeights, ProfileError> {
        match self.ahead.take() {
            Some((layer, weights)) if layer == index => Ok(weights),
            _ => Ok(LayerWeights::read(self.checkpoint, index)?),
        }
    }

    /// Does `work`; where a device does most of it, layer `next` is read meanwhile, where there is one.
    fn reading_ahead<Output>(&self, next: usize, work: impl FnOnce() -> Output) -> Output {
        if self.device.is_none() || next >= self.sizes.layers {
            return work();
        }
        let checkpoint = self.checkpoint;
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || LayerWeights::read(checkpoint, next));
            let output = work();
            // What cannot be read is told when it is asked for.
            if let Ok(Ok(weights)) = reading.join() {
                self.ahead.set(Some((next, weights)));
            }
            output
        })
    }

    /// Which tokens of a round are sampled, per part.
    fn sampling(&self, round: &Range<usize>) -> [Sampling; 2] {
        let samples = Settings::samples(self.settings.trace_tokens);
        Part::ALL.map(|part| {
            let tokens = |range| self.calibration.part_tokens(part, range);
            // Where all text is profiled, a shard takes the samples that one run would take of
            // it; a round cannot know how many will follow and takes its fill.
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

    /// Where the samples of a round wait.
    fn round_traces(&self, round: &Range<usize>, layer: usize) -> PathBuf {
        let folder = self.folder.join(format!("rounds/{:08}", round.end));
        Traces::path(&folder, layer)
    }

    /// Makes one set of samples of those of all rounds.
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

    /// Whether the samples of all that was done before `place` are there.
    fn has_samples(&self, place: Place) -> bool {
        let current = place.start..place.end;
        let layers = |round: &Range<usize>| match *round == current {
            true => place.layer,
            false => self.sizes.layers,
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

    /// Removes what only an interrupted run needs.
    fn remove_work(&self) -> Result<(), ProfileError> {
        resume::remove(self.folder);
        let rounds = self.folder.join("rounds");
        if rounds.exists() {
            std::fs::remove_dir_all(&rounds)
                .map_err(powerinfer_artifact::ArtifactError::write(&rounds))?;
        }
        Ok(())
    }
}
