//! `powerinfer train-predictors`: learn, or import, what foresees which neurons fire.

use std::path::PathBuf;

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    predictor_file::{DEFAULT_WEIGHTS, PredictorFile, PredictorSummary},
};
use powerinfer_kernels::{Format, Isa};
use powerinfer_model::{Checkpoint, OriginalPredictors, PredictedSizes};
use powerinfer_predictor::{Import, Recipe, Settings, make};
use powerinfer_profile::Profile;
use serde_json::json;

use crate::{
    model_argument,
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Which predictors to train, from what, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer train-predictors demo --recall 0.98\n  powerinfer train-predictors model.powerinfer.gguf --import model.powerinfer.gguf"
)]
pub(crate) struct TrainPredictorsArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Folder of the profile [default: ./<model>.powerinfer/profile]
    #[arg(long, value_name = "DIR")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    training: TrainingArguments,
    /// Folder to write the predictors to [default: ./<model>.powerinfer/predictors]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Format the weights will have, which says what computing a neuron costs
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Q8_0)]
    quant: Format,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Recall of trained predictors unless told otherwise.
const DEFAULT_RECALL: f64 = 0.99;

/// How to come by predictors.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainingArguments {
    /// Share of active neurons that must be predicted on held-out tokens [default: 0.99, with
    /// `--import` what the predictors' own threshold gives]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    recall: Option<f64>,
    /// Optimiser steps per network
    #[arg(long, value_name = "N", default_value_t = 400)]
    steps: usize,
    /// Train nothing, take the original PowerInfer's predictors: a `*.powerinfer.gguf` file, or a
    /// folder with `model_0.pt`, `model_1.pt`, …
    #[arg(long, value_name = "PATH")]
    import: Option<PathBuf>,
    /// Format of the predictors' own weights; `f32` keeps imported ones exactly
    #[arg(long, value_name = "FORMAT", default_value_t = DEFAULT_WEIGHTS)]
    predictor_quant: Format,
}

impl TrainingArguments {
    /// Where the predictors of `checkpoint` come from; those to be imported are looked for now.
    pub(crate) fn recipe(
        &self,
        checkpoint: &Checkpoint,
        quant: Format,
        seed: u64,
    ) -> Result<Recipe> {
        let config = checkpoint.config();
        let sizes = PredictedSizes {
            layers: config.layer_count,
            hidden: config.hidden_size,
            neurons: config.ffn_size,
        };
        Ok(match &self.import {
            Some(path) => Recipe::Import(Import {
                predictors: OriginalPredictors::open(path, sizes)?,
                recall: self.recall,
                weights: self.predictor_quant,
                seed,
            }),
            None => Recipe::Train(Settings {
                recall: self.recall.unwrap_or(DEFAULT_RECALL),
                steps: self.steps,
                quant,
                weights: self.predictor_quant,
                seed,
            }),
        })
    }
}

pub(crate) fn run(arguments: &TrainPredictorsArguments, output: Output) -> Result<()> {
    let checkpoint = model_argument::open_checkpoint(&arguments.model, output)?;
    let folder = model_argument::work_folder(&checkpoint.identity().name);
    let profile = Profile::open(
        &arguments
            .profile
            .clone()
            .unwrap_or_else(|| folder.join("profile")),
    )?;
    profile.check_model(checkpoint.identity())?;
    if !profile.document().has_exact_zeros {
        bail!(
            "the activation of `{}` is never exactly zero, so there is nothing to foresee; go on with `powerinfer place`, which runs it dense",
            checkpoint.identity().name
        );
    }
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| folder.join("predictors"));
    let recipe = arguments
        .training
        .recipe(&checkpoint, arguments.quant, arguments.seed)?;
    let predictors = make(&profile, &recipe, Isa::detect()?, &out, &Bar::new(output))?;
    if arguments.json {
        return print_json(
            &json!({ "header": predictors.header(), "layers": predictors.layers() }),
        );
    }
    print(table(predictors.layers()))?;
    say_result(&predictors, &recipe, output);
    Ok(())
}

/// A row per layer.
pub(crate) fn table(layers: &[PredictorSummary]) -> String {
    let mut table = Table::new(&[
        "layer",
        "rank",
        "bytes",
        "recall",
        "precision",
        "predicted zeros",
        "true zeros",
    ]);
    for layer in layers {
        table.row(vec![
            layer.layer.to_string(),
            layer.rank.to_string(),
            ByteSize(layer.bytes).to_string(),
            percent(layer.recall),
            percent(layer.precision),
            percent(layer.predicted_sparsity),
            percent(layer.sparsity),
        ]);
    }
    table.to_string()
}

/// Says how good the predictors are, and where they are.
pub(crate) fn say_result(predictors: &PredictorFile, recipe: &Recipe, output: Output) {
    let layers = predictors.layers();
    let bytes = layers.iter().map(|layer| layer.bytes).sum();
    let (made, advice) = match recipe {
        Recipe::Train(_) => ("trained", "profile more tokens or train more steps"),
        Recipe::Import(_) => ("imported", "profile more tokens"),
    };
    output.say(format!(
        "{made} {} predictors, {} in all; written to `{}`",
        layers.len(),
        ByteSize(bytes),
        predictors.path().display()
    ));
    let Some(target) = recipe.recall() else {
        output.say("the predictors keep their threshold; `--recall` sets it anew in every layer");
        return;
    };
    let short: Vec<String> = layers
        .iter()
        .filter(|layer| layer.recall < target)
        .map(|layer| layer.layer.to_string())
        .collect();
    if !short.is_empty() {
        output.say(format!(
            "held-out recall is below the target of {target} in layer(s) {}; {advice}",
            short.join(", ")
        ));
    }
}
