//! The stage that makes predictors: its options and its report.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize, Shard, counted, numbered,
    predictor_file::{self, PredictorFile, PredictorSummary},
    shell_quoted,
    threshold_curve::ERRORS,
};
use powerinfer_import::{OriginalPredictors, PredictedSizes};
use powerinfer_model::Checkpoint;
use powerinfer_pipeline::{ByteBudget, Stage, Training, default_targets};
use powerinfer_predictor::{
    Import, Method, QUANT_SETTING, Recipe, Settings, Sizing, Targets, is_current,
};
use powerinfer_profile::Profile;
use powerinfer_tensor::{Format, TensorError};

use crate::{
    model_argument::{files, model_elsewhere},
    output::{Output, percent},
};

/// How predictors are made.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TrainingArguments {
    /// Share of active neurons that must be predicted on held-out tokens [default: 0.95, with
    /// `--import` what the predictors' own threshold gives]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    recall: Option<f64>,
    /// Share of the contributions (`|h|·‖down‖`) that predicted neurons must have on held-out tokens [default:
    /// 0.995, with `--method closed-form` 0.998, with `--import` what the predictors' own threshold gives]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    contribution_recall: Option<f64>,
    /// Bytes of all predictors, at most: a size, or a share of the model's bytes
    #[arg(long, value_name = "SIZE|SHARE%", default_value = "3%")]
    max_bytes: ByteBudget,
    /// Method: `closed-form` calculates predictors in seconds per layer; `trained` starts from random weights, as in the
    /// paper; `auto` calculates, then trains a layer's predictor further if that saves bytes [default: auto; with `--sizing paper`:
    /// trained]
    #[arg(long, value_name = "METHOD", value_parser = method)]
    method: Option<Method>,
    /// Time limit for all predictors, after which `auto` stops training
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    max_time: Option<Duration>,
    /// Smallest estimated saving, as a share of a layer's bytes per token, for which `auto` trains the layer's predictor further;
    /// 0 trains every layer [default: 0.03]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, value_parser = saving)]
    min_saving: Option<f64>,
    /// How a predictor's rank is found: `evidence`: the rank at which a token reads the fewest bytes; `paper`: the
    /// paper's rule, ignores contribution recall
    #[arg(long, value_name = "METHOD", default_value = "evidence", value_parser = sizing)]
    sizing: Sizing,
    /// Optimiser steps per network, at most
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub(crate) steps: usize,
    /// Steps without progress after which training stops
    #[arg(long, value_name = "N", default_value_t = 60)]
    patience: usize,
    /// Train nothing, take the original PowerInfer's predictors: a `*.powerinfer.gguf` file, a folder with
    /// `model_0.pt`, `model_1.pt`, …, or a model that contains predictors
    #[arg(long, value_name = "PATH")]
    import: Option<PathBuf>,
    /// Format of the predictors' own weights; `f32` keeps imported ones exactly [default: q4_0, with
    /// `--import` q8_0]
    #[arg(long, value_name = "FORMAT", value_parser = predictor_format)]
    predictor_quant: Option<Format>,
}

/// The format of this name, if predictors can be in it.
fn predictor_format(name: &str) -> Result<Format, String> {
    let format: Format = name
        .parse()
        .map_err(|error: TensorError| error.to_string())?;
    if predictor_file::WEIGHTS.contains(&format) {
        Ok(format)
    } else {
        Err(format!("predictors are not stored in {format}"))
    }
}

/// The method of this name.
fn method(name: &str) -> Result<Method, String> {
    let known = Method::ALL.into_iter().find(|way| way.name() == name);
    known.ok_or_else(|| "give `auto`, `closed-form` or `trained`".to_owned())
}

/// A number of minutes.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes = text.parse::<f64>().ok().filter(|minutes| *minutes > 0.0);
    let time = minutes.and_then(|minutes| Duration::try_from_secs_f64(60.0 * minutes).ok());
    time.ok_or_else(|| "give a number of minutes, such as `20`".to_owned())
}

/// A share from 0 to 1.
fn saving(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok();
    let share = share.filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "give a share from 0 to 1, such as `0.03`".to_owned())
}

/// The sizing method of this name.
fn sizing(name: &str) -> Result<Sizing, String> {
    let known = Sizing::ALL.into_iter().find(|way| way.name() == name);
    known.ok_or_else(|| "give `evidence` or `paper`".to_owned())
}

impl TrainingArguments {
    /// The method; an error if the options contradict each other.
    pub(crate) fn method(&self) -> Result<Method> {
        let method = match (self.method, self.sizing) {
            (None, Sizing::Paper) => Method::Trained,
            (Some(other), Sizing::Paper) if other != Method::Trained => bail!(
                "`--sizing paper` trains every network; omit `--method {}`",
                other.name()
            ),
            (method, _) => method.unwrap_or_default(),
        };
        let limits = [
            ("--max-time", self.max_time.is_some()),
            ("--min-saving", self.min_saving.is_some()),
        ];
        if let Some((option, _)) = limits.iter().find(|(_, is_given)| *is_given)
            && method != Method::Auto
        {
            bail!(
                "`{option}` applies only to `--method auto`, not to `{}`; omit `{option}`",
                method.name()
            );
        }
        Ok(method)
    }

    /// These options with the method of `prepare --quick`, unless they already choose how predictors are made.
    pub(crate) fn quick(&self) -> Self {
        let trains =
            self.sizing == Sizing::Paper || self.max_time.is_some() || self.min_saving.is_some();
        let usual = (!trains).then_some(Method::ClosedForm);
        Self {
            method: self.method.or(usual),
            ..self.clone()
        }
    }

    /// Targets of predictors made by `method`: the values given as options, and defaults for the rest.
    pub(crate) fn targets(&self, method: Method) -> Targets {
        let usual = default_targets(method);
        Targets {
            recall: self.recall.unwrap_or(usual.recall),
            contribution_recall: self
                .contribution_recall
                .unwrap_or(usual.contribution_recall),
        }
    }

    /// Like [`Self::recipe`], but keeps the weight format of the predictors in the work `folder` if only `quant` differs.
    /// Predictors work with weights in any format.
    pub(crate) fn recipe_or_kept(
        &self,
        model: &str,
        checkpoint: &Checkpoint,
        quant: Format,
        seed: u64,
        folder: &Path,
        output: Output,
    ) -> Result<Recipe> {
        let found = PredictorFile::open(&folder.join("predictors")).ok();
        let quant_of = |file: &PredictorFile| -> Option<Format> {
            let quant = file.header().settings.get(QUANT_SETTING)?;
            quant.as_str()?.parse().ok()
        };
        let other = found.as_ref().and_then(quant_of);
        if let Some(other) = other.filter(|other| *other != quant)
            && let Ok(profile) = Profile::open(&folder.join("profile"))
        {
            let kept = self.recipe(model, checkpoint, other, seed, output.silent())?;
            if is_current(&folder.join("predictors"), &profile, &kept, Shard::WHOLE)? {
                output.say(format!(
                    "predictors: those trained for weights in {other} are kept; to train new ones, run `powerinfer train-predictors {} --quant {quant}`",
                    shell_quoted(model)
                ));
                return Ok(kept);
            }
        }
        self.recipe(model, checkpoint, quant, seed, output)
    }

    /// Returns how to obtain the predictors of `checkpoint`, which was opened as `model`. Predictors to import are opened now.
    pub(crate) fn recipe(
        &self,
        model: &str,
        checkpoint: &Checkpoint,
        quant: Format,
        seed: u64,
        output: Output,
    ) -> Result<Recipe> {
        let config = checkpoint.config();
        let sizes = PredictedSizes {
            layers: config.layer_count,
            hidden: config.hidden_size,
            neurons: config.ffn_size,
        };
        if self.import.is_none() && checkpoint.has_predictors() {
            output.say(format!(
                "`{model}` contains predictors; `--import {model}` uses them instead of training others"
            ));
        }
        Ok(match &self.import {
            Some(path) => Recipe::Import(Import {
                predictors: match model_elsewhere(path) {
                    Some(model) => OriginalPredictors::open(files(model, output)?.folder(), sizes)?,
                    None => OriginalPredictors::open(path, sizes)?,
                },
                targets: (self.recall.or(self.contribution_recall))
                    .map(|_| self.targets(Method::Auto)),
                weights: self.predictor_quant.unwrap_or(Format::Q8_0),
                seed,
            }),
            None => {
                let method = self.method()?;
                let training = Training {
                    targets: Some(self.targets(method)),
                    max_bytes: self.max_bytes,
                    method,
                    max_time: self.max_time,
                    min_saving: self.min_saving.unwrap_or(Settings::MIN_SAVING),
                    sizing: self.sizing,
                    steps: self.steps,
                    patience: self.patience,
                    weights: self.predictor_quant.unwrap_or(Training::default().weights),
                };
                Recipe::Train(training.settings(checkpoint, quant, seed))
            }
        })
    }
}

/// Says how good the predictors are, or that they were up to date.
pub(crate) fn say_stage(made: &Stage<PredictorFile>, recipe: &Recipe, output: Output) {
    if made.is_new {
        say_result(&made.artifact, recipe, output);
    } else {
        let file = made.artifact.path();
        let folder = file.parent().unwrap_or(Path::new("."));
        output.say(format!("predictors: `{}` is up to date", folder.display()));
    }
}

/// Says how good the predictors are, and where they are.
fn say_result(predictors: &PredictorFile, recipe: &Recipe, output: Output) {
    let layers = predictors.layers();
    let bytes = layers.iter().map(|layer| layer.bytes).sum();
    let is_calculated = |layer: &PredictorSummary| layer.is_linear && layer.steps == 0;
    let networks = || layers.iter().filter(|layer| layer.rank > 0);
    let (made, advice) = match recipe {
        Recipe::Import(_) => ("imported", "profile more tokens"),
        Recipe::Train(_) if networks().any(is_calculated) && networks().all(is_calculated) => (
            "calculated",
            "profile more tokens, or use `--method auto` or `trained`",
        ),
        Recipe::Train(_) => ("trained", "profile more tokens or train more steps"),
    };
    if layers.iter().any(|layer| !layer.thresholds.is_empty()) {
        output.say(format!(
            "calibrated thresholds for {}, at errors of the FFN's output from {} to {}; written to `{}`",
            counted(layers.len(), "layer"),
            percent(ERRORS[0]),
            percent(ERRORS[ERRORS.len() - 1]),
            predictors.path().display()
        ));
        return;
    }
    output.say(format!(
        "{made} {}, {} in all; written to `{}`",
        counted(networks().count(), "predictor"),
        ByteSize(bytes),
        predictors.path().display()
    ));
    let numbers = |of: &dyn Fn(&PredictorSummary) -> bool| -> Vec<usize> {
        let layers = layers.iter().filter(|layer| of(layer));
        layers.map(|layer| layer.layer).collect()
    };
    let without = numbers(&|layer| layer.rank == 0);
    if !without.is_empty() {
        output.say(format!(
            "no predictor for {}, so the policy `predicted` is not available there; a larger `--max-bytes` may allow one",
            numbered("layer", &without)
        ));
    }
    let calculated = numbers(&|layer| layer.rank > 0 && is_calculated(layer));
    if let Recipe::Train(settings) = recipe
        && settings.method == Method::Auto
        && !calculated.is_empty()
    {
        output.say(format!(
            "{}: kept as calculated, because training saves too little{}; `-v` shows how much",
            numbered("layer", &calculated),
            if settings.max_time.is_some() {
                ", or `--max-time` was reached"
            } else {
                ""
            }
        ));
    }
    let Some(targets) = recipe.targets() else {
        output.say("the predictors keep their threshold; `--recall` sets a new one in every layer");
        return;
    };
    let missed = |layer: &PredictorSummary| {
        let contribution = layer.contribution_recall.unwrap_or(1.0);
        let recall = targets.recall - layer.recall;
        recall.max(targets.contribution_recall - contribution)
    };
    let short = numbers(&|layer| layer.rank > 0 && missed(layer) > 0.0);
    let worst = layers.iter().filter(|layer| short.contains(&layer.layer));
    if let Some(worst) = worst.max_by(|a, b| missed(a).total_cmp(&missed(b))) {
        let contribution = worst
            .contribution_recall
            .map_or_else(String::new, |reached| {
                format!(" (contribution recall {})", percent(reached))
            });
        output.say(format!(
            "targets are missed on held-out tokens in {}, by most in layer {}: recall {}{contribution}, asked for {} ({}); {advice}",
            numbered("layer", &short),
            worst.layer,
            percent(worst.recall),
            percent(targets.recall),
            percent(targets.contribution_recall),
        ));
    }
}
