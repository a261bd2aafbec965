//! Single stages: each makes its artifact unless that is up to date.

use std::{path::Path, sync::Arc};

use powerinfer_artifact::{
    Progress, Shard,
    predictor_file::{FILE, PredictorFile},
};
use powerinfer_kernels::{Isa, cuda::Device};
use powerinfer_model::Checkpoint;
use powerinfer_predictor::{FEWEST_SAMPLES, PredictorError, Recipe, is_current, make};
use powerinfer_profile::{Calibration, Profile, Settings, measure};

use crate::PipelineError;

/// An artifact, and whether a stage has just made it.
#[derive(Debug)]
pub struct Stage<T> {
    /// The artifact.
    pub artifact: T,
    /// Whether it was made now; otherwise it was up to date.
    pub is_new: bool,
}

/// Checks that `profile` was made from the model in `checkpoint`.
pub(crate) fn check_model(profile: &Profile, checkpoint: &Checkpoint) -> Result<(), PipelineError> {
    let model = &profile.header().model;
    if model.fingerprint == checkpoint.identity().fingerprint {
        return Ok(());
    }
    Err(PipelineError::OtherModel {
        folder: profile.folder().to_owned(),
        model: model.to_string(),
    })
}

/// The profile of `checkpoint` in the folder `out`, measured unless it is up to date and `force` is not set. The layers
/// run on `device`, if there is one.
///
/// # Errors
///
/// There is too little text for training and certifying, the folder has a profile of another model, or measuring fails.
pub fn profile(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    settings: Settings,
    device: Option<&Arc<dyn Device>>,
    out: &Path,
    force: bool,
    progress: &dyn Progress,
) -> Result<Stage<Profile>, PipelineError> {
    // Reports too little text before hours of profiling.
    calibration.check_parts(FEWEST_SAMPLES)?;
    let found = Profile::open(out);
    if let Ok(found) = &found {
        check_model(found, checkpoint)?;
    }
    if !force {
        if Profile::is_current(out, checkpoint, calibration, settings) {
            let artifact = found?;
            return Ok(Stage {
                artifact,
                is_new: false,
            });
        }
        if out.exists() {
            progress.note(&format!(
                "profile: `{}` was made from other text or settings; making it again",
                out.display()
            ));
        }
    }
    let activation = checkpoint.config().activation;
    if checkpoint.assumes_activation() && !activation.has_exact_zeros() {
        progress.note(&format!(
            "the GGUF file does not state its activation function: {} is assumed, as in llama.cpp; prepare a ReLU model from its safetensors",
            activation.name()
        ));
    }
    Ok(Stage {
        artifact: measure(checkpoint, calibration, settings, device, out, progress)?,
        is_new: true,
    })
}

/// The predictors of `shard` in the folder `out`, made by `recipe` unless they are up to date and `force` is not set.
///
/// # Errors
///
/// Training or importing fails, or this CPU is not supported.
pub fn train(
    checkpoint: &Checkpoint,
    profile: &Profile,
    recipe: &Recipe,
    shard: Shard,
    out: &Path,
    force: bool,
    progress: &dyn Progress,
) -> Result<Stage<PredictorFile>, PipelineError> {
    if !force && is_current(out, profile, recipe, shard)? {
        let file = PredictorFile::open_file(&out.join(FILE));
        return Ok(Stage {
            artifact: file.map_err(PredictorError::from)?,
            is_new: false,
        });
    }
    if !force && out.join(FILE).exists() {
        progress.note(&format!(
            "predictors: those in `{}` were made from another profile or with other settings; training them again",
            out.display()
        ));
    }
    let isa = Isa::detect()?;
    Ok(Stage {
        artifact: make(checkpoint, profile, recipe, shard, isa, out, progress)?,
        is_new: true,
    })
}
