//! The measurement: layers outside, text inside, so that each weight is read once.

use std::path::Path;

use powerinfer_artifact::{Header, Progress, write::PartialFolder};
use powerinfer_model::Checkpoint;
use powerinfer_reference::{Beginning, Layer};

use crate::{
    Calibration, LayerSummary, Part, Profile, ProfileDocument, ProfileError, Traces,
    observe::{Observer, Sampling},
    profile,
    resume::{self, State},
    traces,
};

/// What shapes a profile, beside model and text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Tokens per layer to keep samples of, for training; a quarter as many are kept for judging.
    pub trace_tokens: usize,
    /// Seed recorded in the header.
    pub seed: u64,
}

/// The header of a profile of `checkpoint` over `calibration`.
pub(crate) fn header(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
) -> Header {
    Header::new(
        profile::FORMAT,
        profile::VERSION,
        checkpoint.identity().clone(),
        settings.seed,
    )
    .with_input("calibration", calibration.digest())
    .with_setting("trace_tokens", settings.trace_tokens)
}

/// Profiles `checkpoint` over `calibration` into the folder `out`.
///
/// An interrupted run with the same inputs goes on after its last finished layer.
pub fn measure(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Profile, ProfileError> {
    let config = checkpoint.config();
    let header = header(checkpoint, calibration, settings);
    let folder = PartialFolder::open(out)?;
    let lengths: Vec<usize> = calibration
        .sequences()
        .map(|(sequence, _)| sequence.len())
        .collect();
    let tokens: usize = lengths.iter().sum();

    let mut state = match resume::load(folder.path(), &header, &lengths, config.hidden_size) {
        Some(state) => {
            progress.note(&format!(
                "going on after layer {} of an interrupted run",
                state.activities.len()
            ));
            state
        }
        None => {
            folder.clear()?;
            let tokens = calibration.sequences().flat_map(|(sequence, _)| sequence);
            let beginning = Beginning::load_for(checkpoint, tokens)?;
            let hidden = calibration
                .sequences()
                .map(|(sequence, _)| beginning.embed(sequence))
                .collect::<Result<_, _>>()?;
            State {
                activities: Vec::new(),
                hidden,
            }
        }
    };
    let sampling = |part, wanted| Sampling {
        wanted,
        total: calibration.tokens(part),
    };
    let sampling = [
        sampling(Part::Training, settings.trace_tokens),
        sampling(Part::HeldOut, settings.trace_tokens.div_ceil(4)),
    ];

    progress.begin("profiling", (tokens * config.layer_count) as u64, "tokens");
    progress.advance((tokens * state.activities.len()) as u64)?;
    let mut summaries: Vec<LayerSummary> = state
        .activities
        .iter()
        .enumerate()
        .map(|(layer, activity)| LayerSummary::of(layer, activity))
        .collect();
    for index in state.activities.len()..config.layer_count {
        let layer = Layer::load(checkpoint, index)?;
        let norms = layer.contribution_norms()?;
        let mut observer = Observer::new(&norms, config.hidden_size, sampling);
        for (hidden, (sequence, part)) in state.hidden.iter_mut().zip(calibration.sequences()) {
            observer.part = part;
            *hidden = layer.forward(hidden, &mut observer)?;
            progress.advance(sequence.len() as u64)?;
        }
        let (activity, samples) = observer
            .finish()
            .ok_or(ProfileError::NotFinite { layer: index })?;
        let trace_header = Header {
            format: traces::FORMAT.to_owned(),
            version: traces::VERSION,
            ..header.clone()
        };
        samples.write(&Traces::path(folder.path(), index), &trace_header)?;
        let summary = LayerSummary::of(index, &activity);
        summaries.push(summary);
        state.activities.push(activity);
        if index + 1 < config.layer_count {
            resume::save(folder.path(), &header, &state)?;
        }
    }
    progress.end();
    resume::remove(folder.path());
    let document = ProfileDocument {
        tokens: tokens as u64,
        sequences: lengths.len() as u64,
        training_tokens: calibration.tokens(Part::Training) as u64,
        held_out_tokens: calibration.tokens(Part::HeldOut) as u64,
        hidden_size: config.hidden_size,
        ffn_size: config.ffn_size,
        has_exact_zeros: config.activation.has_exact_zeros(),
        layers: summaries,
        files: Default::default(),
    };
    Profile::write(folder.path(), header, document, &state.activities)?;
    folder.finish()?;
    Profile::open(out)
}
