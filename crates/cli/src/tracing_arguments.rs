//! Arguments of profiling, for `profile` and `prepare`.

use std::path::Path;

use anyhow::{Result, bail};
use powerinfer_model::Checkpoint;
use powerinfer_profile::{Amount, Calibration, Profile, Settings, Shard, measure};

use crate::{engine::DeviceArgument, output::Output, progress::Bar};

/// Device that profiles, and number of tokens kept for training predictors.
#[derive(Debug, clap::Args)]
pub(crate) struct TracingArguments {
    /// What the text goes through the layers on
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceArgument,
    /// Tokens per layer to keep samples of, for training predictors
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    trace_tokens: usize,
}

impl TracingArguments {
    /// Profiles on the device of the arguments.
    ///
    /// # Errors
    ///
    /// Fails if a GPU is asked for and there is none, or if profiling fails.
    pub(crate) fn measure(
        &self,
        checkpoint: &Checkpoint,
        calibration: &Calibration,
        settings: Settings,
        out: &Path,
        output: Output,
    ) -> Result<Profile> {
        let card = self.device.open("the CPU profiles", output)?;
        if let Some(card) = &card {
            let name = &card.info().name;
            output.say(format!("{name}: layers run there, one after the other"));
        }
        let bar = Bar::new(output);
        Ok(measure(
            checkpoint,
            calibration,
            settings,
            card.as_ref(),
            out,
            &bar,
        )?)
    }

    /// Settings of the stage.
    pub(crate) fn settings(&self, amount: Amount, shard: Shard, seed: u64) -> Settings {
        Settings {
            trace_tokens: self.trace_tokens,
            amount,
            shard,
            seed,
        }
    }
}

/// Refuses to replace a profile of another model: folders of the same name share a work folder.
///
/// # Errors
///
/// Fails if the profile in `out` is of another model than `checkpoint`.
pub(crate) fn refuse_other_model(out: &Path, checkpoint: &Checkpoint) -> Result<()> {
    match Profile::open(out) {
        Ok(there) if there.header().model.fingerprint != checkpoint.identity().fingerprint => {
            bail!(
                "`{}` is a profile of another model ({}); name another folder by `--out`, or remove it",
                out.display(),
                there.header().model
            )
        }
        _ => Ok(()),
    }
}
