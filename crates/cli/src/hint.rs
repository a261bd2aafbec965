//! The sentences of [`Hint`]s, which name this program's commands and flags.

use std::error::Error;

use clap::{
    ArgMatches,
    error::{ContextKind, ContextValue},
};
use powerinfer_artifact::{ArtifactError, Hint, hardware::HardwareError, plan::PlanError};
use powerinfer_bundle::BundleError;
use powerinfer_cluster::ClusterError;
use powerinfer_eval::EvalError;
use powerinfer_export::ExportError;
use powerinfer_hub::HubError;
use powerinfer_import::ImportError;
use powerinfer_model::ModelError;
use powerinfer_pipeline::PipelineError;
use powerinfer_planner::PlannerError;
use powerinfer_predictor::PredictorError;
use powerinfer_profile::ProfileError;
use powerinfer_runtime::RuntimeError;
use powerinfer_server::ServerError;
use powerinfer_solver::SolveError;
use powerinfer_synth::SynthError;

/// An error of a command, and what its user can do.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Advised {
    what: String,
    hint: String,
}

impl Advised {
    /// The error `what`, with the sentence `hint`.
    pub(crate) fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        let (what, hint) = (what.into(), hint.into());
        Self { what, hint }
    }
}

/// The hint of the first error in the chain of causes that has one.
pub(crate) fn of(error: &anyhow::Error) -> Option<&str> {
    error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Advised { hint, .. }) => Some(hint.as_str()),
        None => of_cause(cause).map(sentence),
    })
}

fn of_cause(cause: &(dyn Error + 'static)) -> Option<Hint> {
    fn hint<E: Error + 'static>(
        cause: &(dyn Error + 'static),
        hint: fn(&E) -> Option<Hint>,
    ) -> Option<Hint> {
        cause.downcast_ref().and_then(hint)
    }
    hint(cause, ArtifactError::hint)
        .or_else(|| hint(cause, HardwareError::hint))
        .or_else(|| hint(cause, PlanError::hint))
        .or_else(|| hint(cause, BundleError::hint))
        .or_else(|| hint(cause, ClusterError::hint))
        .or_else(|| hint(cause, EvalError::hint))
        .or_else(|| hint(cause, ExportError::hint))
        .or_else(|| hint(cause, HubError::hint))
        .or_else(|| hint(cause, ImportError::hint))
        .or_else(|| hint(cause, PredictorError::hint))
        .or_else(|| hint(cause, ProfileError::hint))
        .or_else(|| hint(cause, RuntimeError::hint))
        .or_else(|| hint(cause, ServerError::hint))
        .or_else(|| hint(cause, ModelError::hint))
        .or_else(|| hint(cause, SolveError::hint))
        .or_else(|| hint(cause, SynthError::hint))
        .or_else(|| hint(cause, PlannerError::hint))
        .or_else(|| hint(cause, PipelineError::hint))
}

/// The hint for a file that changes while the command in `matches` reads it; names only options that the command has.
pub(crate) fn of_changed_files(matches: &ArgMatches) -> &'static str {
    let mut command = matches;
    while let Some((_, inner)) = command.subcommand() {
        command = inner;
    }
    match command.try_get_one("no_mmap") {
        Ok(Some(false)) => {
            "replace files by renaming, not by overwriting them; `--no-mmap` reads them into memory first"
        }
        _ => "replace files by renaming, not by overwriting them",
    }
}

/// Options of llama.cpp that have another name here, and what to use instead.
const OPTIONS_OF_LLAMA_CPP: [(&[&str], &str); 8] = [
    (
        &["-m", "--model"],
        "give the model without an option: `powerinfer prepare MODEL`, then `powerinfer run MODEL`",
    ),
    (
        &["-hfr", "--hf-repo"],
        "give the name of a model on the hub without an option: `powerinfer prepare org/name`, then `powerinfer run name`",
    ),
    (
        &["-c", "--ctx-size", "--context"],
        "the context is part of the plan: use `--context N` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        "the KV cache is part of the plan: use `--kv-cache FORMAT` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "neurons, not layers, are placed on the GPU: use `--vram SIZE` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-f", "--file"],
        "a prompt in a file comes from stdin: `powerinfer run MODEL < FILE`",
    ),
    (
        &["-cnv", "--conversation"],
        "a chat is `powerinfer run MODEL -i`",
    ),
    (
        &["-sys", "--system-prompt"],
        "a chat (`powerinfer run MODEL -i`) sets a system message with `/system TEXT`",
    ),
];

/// Commands of Ollama that have another name here, or none, and what to do instead.
const COMMANDS_OF_OLLAMA: [(&str, &str); 5] = [
    ("chat", "a chat is `powerinfer run MODEL -i`"),
    (
        "create",
        "`powerinfer prepare MODEL` makes the bundle that `powerinfer run` runs",
    ),
    (
        "ps",
        "`powerinfer list` lists the prepared models of this folder",
    ),
    (
        "rm",
        "everything about a prepared model is in the folder `NAME.powerinfer`: delete that; `powerinfer list` lists the models of this folder",
    ),
    ("stop", "Ctrl-C stops the server"),
];

/// Advice if `error` is about an option of llama.cpp among `arguments`, or about a command of Ollama.
pub(crate) fn of_usage(
    error: &clap::Error,
    arguments: impl Iterator<Item = String>,
) -> Option<&'static str> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if let Some(command) = context(ContextKind::InvalidSubcommand) {
        let mut known = COMMANDS_OF_OLLAMA.iter();
        let found = known.find(|(name, _)| *name == command);
        return found.map(|(_, hint)| *hint);
    }
    let unknown = context(ContextKind::InvalidArg);
    let value = context(ContextKind::InvalidValue);
    for argument in arguments {
        let option = argument.split('=').next().unwrap_or_default();
        // `-ngl` is parsed as `-n gl`, and `-ctk` as `-c` followed by more letters.
        let is_meant = unknown.is_some_and(|unknown| option.starts_with(unknown))
            || option.get(2..).is_some_and(|rest| value == Some(rest));
        let mut known = OPTIONS_OF_LLAMA_CPP.iter();
        if is_meant && let Some((_, hint)) = known.find(|(names, _)| names.contains(&option)) {
            return Some(hint);
        }
    }
    None
}

pub(crate) fn sentence(hint: Hint) -> &'static str {
    match hint {
        Hint::OtherFolder => "name another folder with `--out`, or remove it",
        Hint::MoveForeign => "move that elsewhere, or name another folder with `--out`",
        Hint::OtherJobsFolder => "move that elsewhere, or name another folder with `--jobs`",
        Hint::WaitOrOtherFolder => "wait until it is done, or name another folder with `--out`",
        Hint::OtherFile => "name another file with `--out`",
        Hint::WaitOrOtherFile => "wait until it is done, or name another file with `--out`",
        Hint::NoMemoryLock => "omit `--mlock` and `--no-mmap`, or raise the limit (`ulimit -l`)",
        Hint::MeasureHardware => "measure it with `powerinfer doctor` or correct the file",
        Hint::MeasureWhenIdle => "run `powerinfer doctor` when nothing else runs",
        Hint::WriteHardwareFile => "`powerinfer doctor --write FILE` writes such a file",
        Hint::MakeBundle => "make one with `powerinfer place` or `powerinfer prepare`",
        Hint::MakeBundleAgain => "make the bundle again from its model with `powerinfer place`",
        Hint::PlaceAgain => {
            "run `powerinfer place` again; the plan was made by another version of the program, or edited"
        }
        Hint::LargerBudget => "run `powerinfer place` with a larger `--vram` or `--ram`",
        Hint::LessSkipping => {
            "a smaller `--max-ppl-increase` skips fewer neurons, `--policy dense` none"
        }
        Hint::AllowRam => {
            "raise `--ram` to that, shorten `--context`, or use fewer bits with `--quant`"
        }
        Hint::AllowVram => "raise `--vram` to that, or keep less on the GPU with `--pin`",
        Hint::NoInputSparsity => "place it without `--input-sparsity`",
        Hint::LongerContext => "place it with a longer `--context`",
        Hint::OtherContext => "give another `--context`, or fewer `--decode-tokens`",
        Hint::ShorterContext => "run `powerinfer place` on the bundle with a shorter `--context`",
        Hint::MoreVramOrShorterContext => {
            "run `powerinfer place` on the bundle with a larger `--vram` or a shorter `--context`"
        }
        Hint::LessVram => "lower `--vram`, the context or the budget of the plan",
        Hint::PlaceOnGpu => {
            "run `powerinfer place` on the bundle with `--vram`, or omit `--device`"
        }
        Hint::SmallerVram => "run `powerinfer place` on the bundle with a smaller `--vram`",
        Hint::RunOnCpu => "run it with `--device cpu`",
        Hint::ResumeOnCpu => "`--device cpu` resumes without it, after the last finished layer",
        Hint::OtherPolicy => "omit `--policy`",
        Hint::LargerPerplexityBudget => "`--max-ppl-increase` allows more",
        Hint::NameHardware => "`--hardware` names another machine",
        Hint::GiveVramOrHardware => {
            "give a size instead of `--vram auto`, or name a machine with `--hardware`"
        }
        Hint::ProfileOfPredictors => {
            "name their profile with `--profile`, or run `powerinfer train-predictors` with this one"
        }
        Hint::NoDryRun => "omit `--input-sparsity` or `--dry-run`",
        Hint::MoreHeldOutText => "profile more text, or raise `--certify`",
        Hint::FewerHotNeurons => "lower `--hot`, or raise `--vram`",
        Hint::ZerosPolicy => "use `exact` or `predicted`",
        Hint::TrainPredictorsAndPlace => {
            "run `powerinfer train-predictors`, then `powerinfer place`"
        }
        Hint::TrainPredictors => "run `powerinfer train-predictors`",
        Hint::TrainLargerPredictors => {
            "run `powerinfer train-predictors`, if necessary with a larger `--max-bytes`"
        }
        Hint::TrainWithLowerRecall => {
            "run `powerinfer train-predictors`, if necessary with a lower `--recall`"
        }
        Hint::SmallerFormat => "use a `--quant` with fewer bits at `place`",
        Hint::WiderFormat => "place it with `--quant bf16` or `--quant f32`",
        Hint::ThresholdPolicy => {
            "the model's activation is never exactly zero: use `threshold` or `dense`; a sweep also accepts `error:10%`"
        }
        Hint::LosslessPolicyOrTrain => {
            "use `exact` or `dense`, or run `powerinfer train-predictors`, then `powerinfer place`"
        }
        Hint::DensePolicyOrTrain => {
            "use `dense`, or run `powerinfer train-predictors`, then `powerinfer place`"
        }
        Hint::OtherPromptCache => "delete it, or name another file with `--prompt-cache`",
        Hint::PullOneFile => {
            "download one with `powerinfer pull MODEL --file NAME` and give the path it prints"
        }
        Hint::Profile => "make one with `powerinfer profile`",
        Hint::ProfileAgain => "remove the profile and run `powerinfer profile` again",
        Hint::GiveText => "give text with `--data FILE`",
        Hint::GivePath => "`--data` takes files, folders, or `-` for stdin",
        Hint::ListAll => "`-v` lists all",
        Hint::MoreText => "give more text with `--data` or a larger `--tokens`",
        Hint::MoreTokens => "profile more tokens with `--tokens`",
        Hint::OtherSeed => "try another `--seed`",
        Hint::ImportAsF32 => "import it with `--predictor-quant f32`",
        Hint::InstallPython => {
            "they run in a sandbox of Linux: install Python 3 and util-linux (`apt install python3 util-linux`) and permit user namespaces"
        }
        Hint::AllowVramOrUnpin => "allow VRAM, or omit `--pin`",
        Hint::LatencyObjective => "use `--objective latency`",
        Hint::NoPredictorRank => "omit `--predictor-rank`",
        Hint::NoTokenizer => "`--no-tokenizer` exports the weights without it",
        Hint::OtherActivation => {
            "export the bundle of a ReLU model with `--to powerinfer`; `--any-activation` exports a file that measures only speed"
        }
        Hint::OtherFormat => "choose another format with `--quant`",
        Hint::ExportGguf => "`--to gguf` writes a file for llama.cpp",
        Hint::PlaceWithoutPredictors => {
            "run `powerinfer place` with `--policy exact` or `--policy dense` to export without predictors"
        }
        Hint::PlaceWithPredictors => "place the model with `--policy predicted`",
        Hint::PlaceOnOneGpu => {
            "run `powerinfer place` on the bundle with the `--vram` of one GPU, or run it with `--device cpu`"
        }
        Hint::MergeShards => "merge all shards with `powerinfer merge`",
        Hint::SmallerProbe => "give a smaller `--probe`",
        Hint::OtherPort => "choose another with `--port`",
        Hint::FewerRequests => "use a smaller `--parallel`, or a shorter `--context`",
        Hint::CheckConnection => {
            "check the connection and `HF_ENDPOINT`, or give a folder on this machine"
        }
        Hint::TryLater => "try again later",
    }
}
