//! Arguments of training or importing predictors, for `train-predictors` and `prepare`.

use std::{path::PathBuf, str::FromStr};

use anyhow::Result;
use powerinfer_artifact::{ByteSize, predictor_file};
use powerinfer_bundle::weight_bytes;
use powerinfer_import::{OriginalPredictors, PredictedSizes};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_predictor::{Import, Recipe, Settings, Sizing, Targets};
use powerinfer_tensor::{Format, TensorError};

use crate::output::parse_percent;

/// Targets of trained predictors unless others are given.
const DEFAULT_TARGETS: Targets = Targets {
    recall: 0.95,
    contribution_recall: 0.99,
};

/// Contribution recall that any predictor reaches.
const NOTHING_ASKED: f64 = 0.01;

/// How predictors are trained or imported.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainingArguments {
    /// Share of active neurons that must be predicted on held-out tokens [default: 0.95, with
    /// `--import` what the predictors' own threshold gives]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    recall: Option<f64>,
    /// Share of what active neurons add to the hidden state that must come from predicted ones
    /// [default: 0.99, with `--import` what the predictors' own threshold gives]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    contribution_recall: Option<f64>,
    /// Most bytes of all predictors: a size, or a share of the model's bytes
    #[arg(long, value_name = "SIZE|SHARE%", default_value = "3%")]
    max_bytes: ByteBudget,
    /// How a predictor's rank is found: `evidence` takes the one at which a token reads least,
    /// `paper` does as the paper describes, to compare with, and asks nothing of contributions
    #[arg(long, value_name = "WAY", default_value = "evidence", value_parser = sizing)]
    sizing: Sizing,
    /// Most optimiser steps per network
    #[arg(long, value_name = "N", default_value_t = 2000)]
    steps: usize,
    /// Steps without progress after which the training of a network stops
    #[arg(long, value_name = "N", default_value_t = 60)]
    patience: usize,
    /// Train nothing, take the original PowerInfer's predictors: a `*.powerinfer.gguf` file, or a
    /// folder with `model_0.pt`, `model_1.pt`, …
    #[arg(long, value_name = "PATH")]
    import: Option<PathBuf>,
    /// Format of the predictors' own weights; `f32` keeps imported ones exactly [default: q4_0, with
    /// `--import` q8_0]
    #[arg(long, value_name = "FORMAT", value_parser = predictor_format)]
    predictor_quant: Option<Format>,
}

/// Parses a format that predictors can be stored in.
fn predictor_format(name: &str) -> Result<Format, String> {
    let format: Format = name
        .parse()
        .map_err(|error: TensorError| error.to_string())?;
    match predictor_file::WEIGHTS.contains(&format) {
        true => Ok(format),
        false => Err(format!("predictors are not stored in {format}")),
    }
}

/// Parses the name of a sizing.
fn sizing(name: &str) -> Result<Sizing, String> {
    let known = Sizing::ALL.into_iter().find(|sizing| sizing.name() == name);
    known.ok_or_else(|| "give `evidence` or `paper`".to_owned())
}

/// A number of bytes, or a share of the model's bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ByteBudget {
    Bytes(ByteSize),
    Share(f64),
}

impl FromStr for ByteBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.ends_with('%') {
            let size = text.parse().map(Self::Bytes);
            return size.map_err(|error: <ByteSize as FromStr>::Err| error.to_string());
        }
        match parse_percent(text) {
            Some(share) if share > 0.0 && share <= 1.0 => Ok(Self::Share(share)),
            _ => Err("give a size such as `200M`, or a share such as `3%`".to_owned()),
        }
    }
}

impl ByteBudget {
    /// Share of a layer in bytes, all layers alike.
    fn of_layer(self, config: &ModelConfig, quant: Format) -> u64 {
        let all = match self {
            Self::Bytes(size) => size.0,
            Self::Share(share) => {
                let weights = config.weights().into_iter();
                let bytes = weights.map(|weight| weight_bytes(config, weight, quant));
                (share * bytes.sum::<u64>() as f64) as u64
            }
        };
        all / config.layer_count.max(1) as u64
    }
}

impl TrainingArguments {
    /// Targets; `None` if none is given.
    fn targets(&self) -> Option<Targets> {
        if self.recall.is_none() && self.contribution_recall.is_none() {
            return None;
        }
        let usual = DEFAULT_TARGETS;
        Some(Targets {
            recall: self.recall.unwrap_or(usual.recall),
            contribution_recall: self
                .contribution_recall
                .unwrap_or(usual.contribution_recall),
        })
    }

    /// Recipe of the predictors of `checkpoint`; predictors to import are opened and checked.
    ///
    /// # Errors
    ///
    /// Fails if predictors to import do not fit the model.
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
                targets: self.targets(),
                weights: self.predictor_quant.unwrap_or(Format::Q8_0),
                seed,
            }),
            None => Recipe::Train(Settings {
                targets: match (self.sizing, self.targets().unwrap_or(DEFAULT_TARGETS)) {
                    (Sizing::Evidence, targets) => targets,
                    (Sizing::Paper, targets) => Targets {
                        contribution_recall: NOTHING_ASKED,
                        ..targets
                    },
                },
                layer_bytes: self.max_bytes.of_layer(config, quant),
                sizing: self.sizing,
                steps: self.steps,
                patience: self.patience,
                quant,
                matrices_per_neuron: config.matrices_per_neuron(),
                weights: self.predictor_quant.unwrap_or(Format::Q4_0),
                seed,
            }),
        })
    }
}
