//! What a sweep finds at a point, as it is kept: a JSON object a line.

use powerinfer_artifact::Digest;
use serde::{Deserialize, Serialize};

/// A point of the grid, and what was found there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The point's number in the grid of the run that measured it.
    pub(crate) point: usize,
    /// The settings, digested.
    pub(crate) run: String,
    /// Where in the grid it is.
    pub(crate) axes: Axes,
    /// What is where; none where there is no such placement.
    pub(crate) placement: Option<Placement>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trouble: Option<String>,
    /// How few neurons fire, are predicted and are computed.
    pub(crate) sparsity: Sparsity,
    /// How well neurons are predicted; none where nothing predicts them.
    pub(crate) predictor: Option<Predictor>,
    /// How fast.
    pub(crate) speed: Speed,
    /// How good.
    pub(crate) quality: Quality,
    /// What all of it is of.
    pub(crate) identity: Identity,
}

/// A place in the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Axes {
    /// Budget on the GPU, where that is the axis.
    pub(crate) vram_bytes: Option<u64>,
    /// Share of tokens from which on a neuron that fires so often is on the GPU, where that is the axis.
    pub(crate) hot_threshold: Option<f64>,
    /// Policy and level, as they are given.
    pub(crate) level: String,
    pub(crate) policy: String,
    /// What the level is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) level_of: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) level_value: Option<f64>,
    /// Sequences that decode together.
    pub(crate) batch: usize,
    /// Tokens of each sequence, with those that are decoded.
    pub(crate) context_tokens: usize,
}

/// What is on the GPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Placement {
    pub(crate) hot_neurons: u64,
    pub(crate) neurons: u64,
    /// Share of the neurons on the GPU.
    pub(crate) neuron_share: f64,
    /// Share of the activations that they carry.
    pub(crate) activation_share: f64,
    /// Share of what a token computes with that is on the GPU, attention included.
    pub(crate) load_share: f64,
    /// How often the rarest neuron on the GPU fires.
    pub(crate) coldest_hot_frequency: Option<f64>,
    pub(crate) gpu_bytes: u64,
    pub(crate) cpu_bytes: u64,
    /// Layers with attention on the GPU.
    pub(crate) attention_layers: usize,
    pub(crate) layers: usize,
    /// Hot neurons, layer by layer.
    pub(crate) hot_per_layer: Vec<usize>,
}

/// Shares of neurons.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sparsity {
    /// That did not fire.
    pub(crate) true_share: f64,
    /// That were not predicted; none where nothing predicts.
    pub(crate) predicted_share: Option<f64>,
    /// That were computed to their end.
    pub(crate) computed_share: f64,
    /// Mean relative error of the FFNs' outputs.
    pub(crate) relative_error: f64,
    pub(crate) layers: Vec<LayerSparsity>,
    /// Tokens it is of; those of two windows count twice.
    pub(crate) tokens: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LayerSparsity {
    pub(crate) true_share: f64,
    pub(crate) predicted_share: Option<f64>,
    pub(crate) computed_share: f64,
    pub(crate) relative_error: f64,
    /// By how much of itself perplexity rises where this layer alone follows the level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) perplexity_rise_alone: Option<f64>,
}

/// How well neurons are predicted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Predictor {
    /// Share of the neurons that fire that are predicted, of all layers together.
    pub(crate) count_recall: f64,
    /// Share of `Σ|h_i|·‖down_i‖` that is predicted, the mean of layers and tokens.
    pub(crate) contribution_recall: f64,
    /// Share of the predicted neurons that fire, of all layers together.
    pub(crate) precision: f64,
    /// Bytes that prediction reads for a token.
    pub(crate) bytes_per_token: f64,
    /// The same of all that a token reads.
    pub(crate) bytes_share: f64,
    /// Share of a token's time.
    pub(crate) time_share: f64,
}

/// How fast.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Speed {
    /// On the machine that the sweep ran on.
    pub(crate) measured: Measured,
    /// On the machine that the placement is for; none where there is no placement.
    pub(crate) planned: Option<Planned>,
}

/// Measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// `cpu`, or what ran what is placed on a GPU.
    pub(crate) device: String,
    /// Whether the placement is what ran; else the CPU computed all of it, and speeds of other placements are the same
    /// measurement.
    pub(crate) placement_ran: bool,
    /// Whether the device is an imitation, whose speed says nothing.
    pub(crate) emulated: bool,
    pub(crate) threads: usize,
    pub(crate) repeats: usize,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
    /// From a prompt to its first token; of one sequence, whatever the batch.
    pub(crate) first_token_milliseconds: Spread,
    /// Times of single steps of decoding, of all repeats.
    pub(crate) decode_microseconds: Latency,
    /// Tokens of all sequences.
    pub(crate) tokens_per_second: Spread,
    pub(crate) bytes_per_token: f64,
    pub(crate) read_bandwidth_bytes_per_second: f64,
    pub(crate) bandwidth_share: f64,
    /// What the cost model says a step takes on this machine, of the placement that ran; none where an imitation of a
    /// device ran it.
    pub(crate) predicted_microseconds: Option<f64>,
    /// The median step over that.
    pub(crate) measured_over_predicted: Option<f64>,
    /// Whether others used the machine.
    pub(crate) disturbed: bool,
}

/// A figure of every repeat.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

/// Times of steps.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) median: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) steps: usize,
}

/// Prediction by the cost model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Planned {
    /// The machine.
    pub(crate) hardware: String,
    /// Always: it is a prediction of the cost model, not a measurement.
    pub(crate) simulated: bool,
    pub(crate) first_token_milliseconds: f64,
    /// A step of decoding.
    pub(crate) decode_microseconds: f64,
    pub(crate) gpu_microseconds: f64,
    pub(crate) cpu_microseconds: f64,
    pub(crate) sync_microseconds: f64,
    /// Tokens of all sequences.
    pub(crate) tokens_per_second: f64,
}

/// How good, beside `dense` on the CPU on the same items.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Quality {
    /// Tokens that were scored.
    pub(crate) tokens: u64,
    pub(crate) perplexity: f64,
    /// None where words are so long that it is more than numbers can say.
    pub(crate) word_perplexity: Option<f64>,
    pub(crate) bits_per_byte: f64,
    /// Over `dense`, paired.
    pub(crate) perplexity_rise: Interval,
    /// The smallest rise that the sample could have told from none.
    pub(crate) smallest_visible_rise: f64,
    pub(crate) kl_divergence_mean: f64,
    pub(crate) kl_divergence_p99: f64,
    pub(crate) top1_agreement: f64,
    pub(crate) tokens_to_first_divergence: Option<u64>,
    pub(crate) texts_without_divergence: f64,
    pub(crate) largest_logit_difference: f32,
    /// Functions that were written and judged.
    pub(crate) functions: Vec<Functions>,
}

/// A figure with its interval of 95 %.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Interval {
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Functions of one kind that were written, greedily, and judged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Functions {
    /// `held-out tasks` or `HumanEval`.
    pub(crate) name: String,
    /// Those that could be judged.
    pub(crate) items: u64,
    pub(crate) passed: u64,
    pub(crate) unjudged: u64,
    /// None where none could be judged.
    pub(crate) pass_at_1: Option<Interval>,
    /// Items that could be judged of both this and `dense`; the rest is of these.
    pub(crate) pairs: u64,
    pub(crate) difference: f64,
    /// Items that only `dense`, or only this, gets right.
    pub(crate) lost: u64,
    pub(crate) won: u64,
    pub(crate) p_value: f64,
    pub(crate) smallest_visible: f64,
    /// Of all completions: equal where every token is.
    pub(crate) completions: Digest,
}

/// What the figures are of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) model: String,
    pub(crate) fingerprint: Digest,
    /// Of the bundle's manifest.
    pub(crate) bundle: Digest,
    pub(crate) quant: String,
    /// Of the tokens that were scored.
    pub(crate) text: Digest,
    pub(crate) seed: u64,
    pub(crate) tool: String,
    pub(crate) processor: String,
    pub(crate) instruction_set: String,
}

impl From<powerinfer_eval::statistics::Interval> for Interval {
    fn from(found: powerinfer_eval::statistics::Interval) -> Self {
        let powerinfer_eval::statistics::Interval { value, low, high } = found;
        Self { value, low, high }
    }
}

impl Spread {
    /// Of at least one figure.
    pub(crate) fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_unstable_by(f64::total_cmp);
        let middle = [(figures.len() - 1) / 2, figures.len() / 2].map(|place| figures[place]);
        Self {
            median: (middle[0] + middle[1]) / 2.0,
            least: figures[0],
            most: figures[figures.len() - 1],
        }
    }
}

impl Latency {
    /// Of at least one step: the time that so many of a hundred stay below.
    pub(crate) fn of(mut steps: Vec<f64>) -> Self {
        steps.sort_unstable_by(f64::total_cmp);
        let below = |share: f64| {
            let rank = (steps.len() as f64 * share).ceil() as usize;
            steps[rank.clamp(1, steps.len()) - 1]
        };
        Self {
            median: below(0.5),
            p95: below(0.95),
            p99: below(0.99),
            steps: steps.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_ranks() {
        let found = Latency::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((found.median, found.p95, found.p99), (100.0, 190.0, 198.0));
        let one = Latency::of(vec![3.0]);
        assert_eq!((one.median, one.p99, one.steps), (3.0, 3.0, 1));
        let spread = Spread::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((spread.least, spread.median, spread.most), (1.0, 2.5, 4.0));
    }
}
