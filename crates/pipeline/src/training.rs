//! How predictors are trained unless something else is asked for.

use std::{str::FromStr, time::Duration};

use powerinfer_artifact::ByteSize;
use powerinfer_bundle::weight_bytes;
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_predictor::{Method, Settings, Sizing, Targets};
use powerinfer_tensor::Format;

/// Targets of trained predictors. With a contribution recall of 0.99 instead, linear ones read 10% less, but 2% of
/// the demo's outputs differ from those of `dense`.
pub const DEFAULT_TARGETS: Targets = Targets {
    recall: 0.95,
    contribution_recall: 0.995,
};

/// Targets of predictors made by `method`: [`DEFAULT_TARGETS`], but with a contribution recall of 0.998 for [`Method::ClosedForm`]. At
/// equal contribution recall, a calculated network's misses change the outputs more than a trained one's.
pub fn default_targets(method: Method) -> Targets {
    match method {
        Method::ClosedForm => Targets {
            contribution_recall: 0.998,
            ..DEFAULT_TARGETS
        },
        Method::Auto | Method::Trained => DEFAULT_TARGETS,
    }
}

/// Contribution recall that every predictor has.
const LOWEST_CONTRIBUTION_RECALL: f64 = 0.01;

/// Options of training.
#[derive(Debug, Clone)]
pub struct Training {
    /// Recalls on held-out tokens; `None` means [`default_targets`].
    pub targets: Option<Targets>,
    /// Bytes of all predictors, at most.
    pub max_bytes: ByteBudget,
    /// How predictors are made.
    pub method: Method,
    /// Time limit for all predictors, after which calculated ones are not trained further.
    pub max_time: Option<Duration>,
    /// Smallest estimated saving, as a share of a layer's bytes per token, for which calculated predictors are trained further.
    pub min_saving: f64,
    /// How a predictor's rank is found.
    pub sizing: Sizing,
    /// Optimiser steps per network, at most.
    pub steps: usize,
    /// Steps without progress after which training stops.
    pub patience: usize,
    /// Format of the predictors' own weights.
    pub weights: Format,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            targets: None,
            max_bytes: ByteBudget::Share(0.03),
            method: Method::Auto,
            max_time: None,
            min_saving: Settings::MIN_SAVING,
            sizing: Sizing::Evidence,
            steps: 2000,
            patience: 60,
            weights: Format::Q4_0,
        }
    }
}

impl Training {
    /// Settings for the model in `checkpoint`. The bundle's weights will be in the format `quant`, which sets the cost of a
    /// neuron.
    pub fn settings(&self, checkpoint: &Checkpoint, quant: Format, seed: u64) -> Settings {
        let config = checkpoint.config();
        let targets = self.targets.unwrap_or(default_targets(self.method));
        Settings {
            targets: match self.sizing {
                Sizing::Evidence => targets,
                // The paper's rule uses only recall.
                Sizing::Paper => Targets {
                    contribution_recall: LOWEST_CONTRIBUTION_RECALL,
                    ..targets
                },
            },
            layer_bytes: self.max_bytes.per_layer(config, quant),
            method: match self.sizing {
                Sizing::Evidence => self.method,
                Sizing::Paper => Method::Trained,
            },
            max_time: self.max_time,
            min_saving: self.min_saving,
            sizing: self.sizing,
            steps: self.steps,
            patience: self.patience,
            quant,
            matrices_per_neuron: config.matrices_per_neuron(),
            weights: self.weights,
            seed,
        }
    }
}

/// A number of bytes, or a share of a model's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ByteBudget {
    /// Bytes.
    Bytes(ByteSize),
    /// Share of the model's bytes.
    Share(f64),
}

impl FromStr for ByteBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.strip_suffix('%') else {
            let size = text.parse().map(Self::Bytes);
            return size.map_err(|error: <ByteSize as FromStr>::Err| error.to_string());
        };
        match percent.trim_end().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Self::Share(percent / 100.0)),
            _ => Err("give a size such as `200M`, or a share such as `3%`".to_owned()),
        }
    }
}

impl ByteBudget {
    /// Bytes for each layer of a model with this configuration.
    fn per_layer(self, config: &ModelConfig, quant: Format) -> u64 {
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
