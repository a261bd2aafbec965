//! `powerinfer profile`: which neurons fire.

use std::path::PathBuf;

use anyhow::Result;
use powerinfer_model::Checkpoint;
use powerinfer_profile::{LayerSummary, Profile, Settings, measure};
use serde_json::json;

use crate::{
    calibration_text::{CalibrationArguments, calibration, check_paths},
    model_argument,
    output::{Output, Table, percent, print, print_json, sparkline},
    progress::Bar,
};

/// What to profile, on what, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  powerinfer profile ./my-model --data articles/ --tokens 100000"
)]
pub(crate) struct ProfileArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    #[command(flatten)]
    calibration: CalibrationArguments,
    #[command(flatten)]
    tracing: TraceArguments,
    /// Folder to write the profile to [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// How much to keep for training predictors.
#[derive(Debug, clap::Args)]
pub(crate) struct TraceArguments {
    /// Tokens per layer to keep samples of, for training predictors
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    trace_tokens: usize,
}

impl TraceArguments {
    /// The settings of the stage.
    pub(crate) fn settings(&self, seed: u64) -> Settings {
        Settings {
            trace_tokens: self.trace_tokens,
            seed,
        }
    }
}

pub(crate) fn run(arguments: &ProfileArguments, output: Output) -> Result<()> {
    check_paths(&arguments.calibration.data)?;
    let checkpoint = model_argument::open_checkpoint(&arguments.model, output)?;
    let out = arguments.out.clone().unwrap_or_else(|| {
        model_argument::work_folder(&checkpoint.identity().name).join("profile")
    });
    let tokenizer = model_argument::tokenizer(checkpoint.files())?;
    let calibration = calibration(
        &arguments.calibration,
        checkpoint.files(),
        checkpoint.config(),
        &tokenizer,
        arguments.seed,
    )?;
    let settings = arguments.tracing.settings(arguments.seed);
    let profile = measure(&checkpoint, &calibration, settings, &out, &Bar::new(output))?;
    if arguments.json {
        return print_json(&json!({ "header": profile.header(), "profile": profile.document() }));
    }
    print(table(&profile.document().layers))?;
    say_result(&checkpoint, &profile, output);
    Ok(())
}

/// A row per layer.
pub(crate) fn table(layers: &[LayerSummary]) -> String {
    let mut table = Table::new(&[
        "layer",
        "zeros",
        "neurons for 80 %",
        "never fired",
        "activations by tenths",
    ]);
    for layer in layers {
        table.row(vec![
            layer.layer.to_string(),
            percent(layer.sparsity),
            percent(layer.neurons_for_80_percent),
            percent(layer.dead),
            sparkline(&layer.cumulative),
        ]);
    }
    table.to_string()
}

/// Says what was measured, where it is, and what comes next.
pub(crate) fn say_result(checkpoint: &Checkpoint, profile: &Profile, output: Output) {
    let document = profile.document();
    let mean = |of: fn(&LayerSummary) -> f64| {
        document.layers.iter().map(of).sum::<f64>() / document.layers.len().max(1) as f64
    };
    output.say(format!(
        "profiled `{}` on {} tokens: {} of FFN activations are zero, {} of the neurons carry 80 % of the others; written to `{}`",
        checkpoint.identity().name,
        document.tokens,
        percent(mean(|layer| layer.sparsity)),
        percent(mean(|layer| layer.neurons_for_80_percent)),
        profile.folder().display(),
    ));
    if !document.has_exact_zeros {
        output.say("this model's activation is never exactly zero, so no neuron can be skipped without loss; it will run dense");
    }
}
