//! The sentences of [`Hint`]s, which name this program's commands and flags.

use std::{
    error::Error,
    ffi::OsStr,
    num::{IntErrorKind, ParseFloatError, ParseIntError},
    sync::OnceLock,
};

use clap::{
    ArgMatches,
    error::{ContextKind, ContextValue, ErrorKind},
};
use powerinfer_artifact::{
    ArtifactError, Hint, hardware::HardwareError, plan::PlanError, shell_quoted,
};
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

use crate::model_name::{DEMO, is_model, untagged, work_folder_of};

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
pub(crate) fn of(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Advised { hint, .. }) => Some(hint.clone()),
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

/// The innermost command in `matches`.
pub(crate) fn innermost(mut matches: &ArgMatches) -> &ArgMatches {
    while let Some((_, inner)) = matches.subcommand() {
        matches = inner;
    }
    matches
}

/// MODEL or BUNDLE on the command line, as it was typed.
static TYPED: OnceLock<String> = OnceLock::new();

/// Set if an interrupted command keeps its finished parts for the next run.
static KEEPS_PARTS: OnceLock<()> = OnceLock::new();

/// Remembers what hints need from the command line: the model or bundle, and whether finished parts are kept.
pub(crate) fn remember(matches: &ArgMatches) {
    let command = innermost(matches);
    let given = |id: &str| command.try_get_raw(id).ok()??.next();
    let mut typed = ["model", "bundle", "path"].into_iter().filter_map(given);
    if let Some(typed) = typed.next().and_then(OsStr::to_str) {
        let _ = TYPED.set(untagged(typed).to_owned());
    }
    let keeps = match matches.subcommand_name() {
        Some("pull" | "profile" | "train-predictors" | "place" | "prepare" | "sweep") => true,
        Some("eval") => given("out").is_some(),
        _ => false,
    };
    if keeps {
        let _ = KEEPS_PARTS.set(());
    }
}

/// The hint after an interruption; `None` if the command does not keep finished parts.
pub(crate) fn of_interruption() -> Option<String> {
    let text = "run the same command again: finished parts are kept";
    KEEPS_PARTS.get().map(|()| text.to_owned())
}

/// The hint for a file that changes while the command in `matches` reads it; names only options that the command has.
pub(crate) fn of_changed_files(matches: &ArgMatches) -> &'static str {
    match innermost(matches).try_get_one("no_mmap") {
        Ok(Some(false)) => {
            "replace files by renaming, not by overwriting them; `--no-mmap` reads them into memory first"
        }
        _ => "replace files by renaming, not by overwriting them",
    }
}

/// Options of llama.cpp and Ollama that have another name here, or none, and what to use instead.
const OPTIONS_OF_OTHERS: [(&[&str], &str); 14] = [
    (
        &["-m", "--model"],
        "give the model without an option: `powerinfer prepare MODEL`, then `powerinfer run MODEL`",
    ),
    (
        &["-hf", "-hfr", "-hff", "--hf-repo", "--hf-file"],
        "give the name of a model on the hub without an option: `powerinfer prepare org/name:Q4_K_M --data TEXT`, then `powerinfer run name`",
    ),
    (
        &[
            "-c",
            "--ctx",
            "--ctx-size",
            "--context",
            "--num-ctx",
            "--num_ctx",
            "--n-ctx",
        ],
        "the context is part of the plan: use `--context N` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
        "the KV cache is part of the plan: use `--kv-cache FORMAT` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"],
        "neurons, not layers, are placed on the GPU: use `--vram SIZE` with `powerinfer prepare` and `powerinfer place`",
    ),
    (
        &["-f", "--file", "--prompt-file"],
        "pass a prompt file through stdin: `powerinfer run MODEL < FILE`",
    ),
    (&["-np"], "use `--parallel N` with `powerinfer serve`"),
    (
        &["--num-predict", "--num_predict", "--n_predict"],
        "use `-n N` with `powerinfer run`",
    ),
    (
        &["-cnv", "--conversation"],
        "to chat, use `powerinfer run MODEL -i`",
    ),
    (
        &["-sys", "--system", "--system-prompt"],
        "set a system message with `/system TEXT` in a chat (`powerinfer run MODEL -i`)",
    ),
    (
        &["--format"],
        "`--json` prints the text and its statistics as JSON; for an answer that is itself JSON, use `format` in the API of `powerinfer serve`",
    ),
    (
        &["--stop", "-r", "--reverse-prompt"],
        "`powerinfer run` has no stop strings; use `stop` in the API of `powerinfer serve`",
    ),
    (
        &["--keepalive"],
        "omit it: a model is loaded as long as its `powerinfer run` or `powerinfer serve` runs",
    ),
    (
        &[
            "--modelfile",
            "--template",
            "--nowordwrap",
            "--think",
            "--insecure",
            "-fa",
            "--flash-attn",
            "-b",
            "--batch-size",
            "--color",
            "--jinja",
            "--no-display-prompt",
            "--hidethinking",
            "--license",
            "--parameters",
        ],
        "omit it: PowerInfer has no such setting",
    ),
];

/// Commands of Ollama and llama.cpp that have another name here, or none, and what to do instead.
const COMMANDS_OF_OTHERS: [(&str, &str); 10] = [
    ("chat", "to chat, use `powerinfer run MODEL -i`"),
    (
        "create",
        "Modelfiles are not supported: `powerinfer prepare MODEL` makes the bundle that `powerinfer run` runs",
    ),
    (
        "cp",
        "to copy a prepared model, copy its folder `NAME.powerinfer`",
    ),
    (
        "ps",
        "a model is loaded as long as its `powerinfer run` or `powerinfer serve` runs; `powerinfer list` lists the prepared models in this folder",
    ),
    (
        "push",
        "uploads are not supported: to share a prepared model, copy its folder `NAME.powerinfer`",
    ),
    (
        "rm",
        "to remove a prepared model, delete its folder: `rm -r NAME.powerinfer`; `powerinfer list` lists the models in this folder",
    ),
    (
        "perplexity",
        "use `powerinfer eval perplexity MODEL --data TEXT`",
    ),
    (
        "quantize",
        "use `--quant FORMAT` with `powerinfer prepare` and `powerinfer place`",
    ),
    ("version", "use `powerinfer --version`"),
    (
        "stop",
        "Ctrl-C stops `powerinfer serve`; if it runs in the background, use `kill PID`",
    ),
];

/// Advice if `command` is one of Ollama's or llama.cpp's; it names the folder of `model` if that is given.
pub(crate) fn of_command(command: &str, model: Option<&str>) -> Option<String> {
    let mut known = COMMANDS_OF_OTHERS.iter();
    let (_, hint) = known.find(|(name, _)| *name == command)?;
    Some(match model {
        None => (*hint).to_owned(),
        Some(model) => {
            let folder = work_folder_of(model);
            hint.replace("NAME.powerinfer", &shell_quoted(&folder.to_string_lossy()))
        }
    })
}

/// Advice if `error` is about an option or a command of llama.cpp or Ollama among `arguments`.
pub(crate) fn of_usage(error: &clap::Error, arguments: &[String]) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if let Some(command) = context(ContextKind::InvalidSubcommand) {
        let mut rest = arguments.iter().skip_while(|word| *word != command).skip(1);
        let model = rest.find(|word| !word.starts_with('-'));
        return of_command(command, model.map(String::as_str));
    }
    if arguments.iter().any(|word| word.ends_with("Modelfile")) {
        return of_command("create", None);
    }
    let unknown = context(ContextKind::InvalidArg);
    let value = context(ContextKind::InvalidValue);
    for argument in arguments {
        let option = argument.split('=').next().unwrap_or_default();
        // `-ngl` is parsed as `-n gl`, and `-ctk` as `-c` followed by more letters.
        let is_meant = unknown.is_some_and(|unknown| option.starts_with(unknown))
            || option.get(2..).is_some_and(|rest| value == Some(rest))
            // `-hf` is parsed as `-h`.
            || error.kind() == ErrorKind::DisplayHelp && option.starts_with("-hf");
        let mut known = OPTIONS_OF_OTHERS.iter();
        if is_meant && let Some((_, hint)) = known.find(|(names, _)| names.contains(&option)) {
            return Some((*hint).to_owned());
        }
    }
    None
}

/// If `error` is about a number: its reason in the standard library's words, and in plain words.
pub(crate) fn of_number(error: &clap::Error) -> Option<(String, &'static str)> {
    let source = error.source()?;
    let plain = match source.downcast_ref().map(ParseIntError::kind) {
        Some(IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => "the number is out of range",
        Some(_) => "give a whole number",
        None if source.is::<ParseFloatError>() => "give a number",
        None => return None,
    };
    Some((source.to_string(), plain))
}

/// The sentence of `hint`. Its placeholders are replaced with the model or bundle of this command line, if it has one of that kind.
pub(crate) fn sentence(hint: Hint) -> String {
    let text = template(hint);
    let Some(typed) = TYPED.get() else {
        return text.to_owned();
    };
    let quoted = shell_quoted(typed);
    let text = text.replace("BUNDLE", &quoted);
    if is_model(typed) {
        let text = text.replace("MODEL", &quoted);
        text.replace("demo --data TEXT", DEMO)
    } else {
        text
    }
}

/// The sentence of `hint`, with MODEL and BUNDLE as placeholders.
fn template(hint: Hint) -> &'static str {
    match hint {
        Hint::OtherFolder => "name another folder with `--out`, or remove what is there",
        Hint::MoveForeign => "move that elsewhere, or name another folder with `--out`",
        Hint::OtherJobsFolder => "move that elsewhere, or name another folder with `--jobs`",
        Hint::WaitOrOtherFolder => "wait until it is done, or name another folder with `--out`",
        Hint::OtherFile => "name another file with `--out`",
        Hint::WaitOrOtherFile => "wait until it is done, or name another file with `--out`",
        Hint::NoMemoryLock => "omit `--mlock` and `--no-mmap`, or raise the limit (`ulimit -l`)",
        Hint::MeasureHardware => "measure it with `powerinfer doctor` or correct the file",
        Hint::MeasureWhenIdle => "measure again when nothing else is running",
        Hint::WriteHardwareFile => "`powerinfer doctor --write FILE` writes such a file",
        Hint::MakeBundle => "make one with `powerinfer prepare MODEL --data TEXT`",
        Hint::MakeBundleAgain => {
            "make the bundle again from its model with `powerinfer place MODEL`"
        }
        Hint::PlaceAgain => {
            "run `powerinfer place MODEL` again; the plan was made by another version of the program, or edited"
        }
        Hint::LargerBudget => "run `powerinfer place MODEL` with a larger `--vram` or `--ram`",
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
        Hint::ShorterContext => "run `powerinfer place BUNDLE` with a shorter `--context`",
        Hint::MoreVramOrShorterContext => {
            "run `powerinfer place BUNDLE` with a larger `--vram` or a shorter `--context`"
        }
        Hint::LessVram => "lower `--vram`, the context or the budget of the plan",
        Hint::PlaceOnGpu => "run `powerinfer place BUNDLE` with `--vram`, or omit `--device`",
        Hint::SmallerVram => "run `powerinfer place BUNDLE` with a smaller `--vram`",
        Hint::RunOnCpu => "run it with `--device cpu`",
        Hint::ResumeOnCpu => {
            "add `--device cpu` to resume on the CPU after the last finished layer"
        }
        Hint::OtherPolicy => "give another `--policy`, or omit it",
        Hint::LargerPerplexityBudget => "raise `--max-ppl-increase` to allow more",
        Hint::NameHardware => "name another machine with `--hardware`",
        Hint::GiveVramOrHardware => {
            "give a size instead of `--vram auto`, or name a machine with `--hardware`"
        }
        Hint::ProfileOfPredictors => {
            "name their profile with `--profile`, or run `powerinfer train-predictors MODEL` with this one"
        }
        Hint::NoDryRun => "omit `--input-sparsity` or `--dry-run`",
        Hint::MoreHeldOutText => "profile more text, or raise `--certify`",
        Hint::Certify => "use `--certify quick` or `--certify full`",
        Hint::ProfileMoreText => {
            "profile more text: give it to `powerinfer prepare` or `powerinfer profile` with `--data`"
        }
        Hint::FewerHotNeurons => "lower `--hot`, or raise `--vram`",
        Hint::ZerosPolicy => "use `exact` or `predicted`",
        Hint::TrainPredictorsAndPlace => {
            "run `powerinfer train-predictors MODEL`, then `powerinfer place MODEL`"
        }
        Hint::TrainPredictors => "run `powerinfer train-predictors MODEL`",
        Hint::TrainOtherPredictors => {
            "`powerinfer train-predictors MODEL` trains predictors and reports why a layer gets none; a larger `--max-bytes` or a lower `--recall` covers more layers"
        }
        Hint::LargerPredictors => {
            "raise `--max-bytes` above that; if the budget is a percentage, a `--quant` with more bits also raises it"
        }
        Hint::SmallerFormat => "use a `--quant` with fewer bits at `place`",
        Hint::WiderFormat => "place it with `--quant bf16` or `--quant f32`",
        Hint::ThresholdPolicy => {
            "use `threshold` or `dense`: the model's activation is never exactly zero; a sweep also accepts `error:10%`"
        }
        Hint::LosslessPolicyOrTrain => {
            "use `exact` or `dense`, or pack what the policy needs with `powerinfer place MODEL --policy NAME`; for `predicted`, first run `powerinfer train-predictors MODEL --max-bytes 10%`"
        }
        Hint::LosslessPolicyOrSigns => {
            "use `exact` or `dense`, or pack the signs with `powerinfer place MODEL --policy sign-bit`"
        }
        Hint::DensePolicyOrTrain => {
            "use `dense`, or pack what `threshold` needs with `powerinfer place MODEL --policy threshold`"
        }
        Hint::OtherPromptCache => "delete it, or name another file with `--prompt-cache`",
        Hint::PullOneFile => {
            "add a quantization that occurs in only one file's name, as in `MODEL:Q4_K_M`, or give the path that `powerinfer pull MODEL --file NAME` prints"
        }
        Hint::Profile => {
            "`powerinfer profile MODEL --data TEXT` makes one; `powerinfer prepare MODEL --data TEXT` makes all that `run` needs"
        }
        Hint::ProfileAgain => {
            "remove the profile and run `powerinfer profile MODEL --data TEXT` again"
        }
        Hint::GiveText => "give text with `--data FILE`",
        Hint::GivePath => "`--data` takes files, folders, or `-` for stdin",
        Hint::ListAll => "`-v` lists all",
        Hint::MoreText => "give more text with `--data` or a larger `--tokens`",
        Hint::MoreTokens => "profile more tokens with `--tokens`",
        Hint::OtherSeed => "try another `--seed`",
        Hint::ImportAsF32 => "import it with `--predictor-quant f32`",
        Hint::InstallPython => {
            "generated functions run in a Linux sandbox: install Python 3 and util-linux (`apt install python3 util-linux`) and allow user namespaces"
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
            "run `powerinfer place MODEL` with `--policy exact` or `--policy dense` to export without predictors"
        }
        Hint::PlaceWithPredictors => "place the model with `--policy predicted`",
        Hint::PlaceOnOneGpu => {
            "run `powerinfer place BUNDLE` with the `--vram` of one GPU, or run the bundle with `--device cpu`"
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
