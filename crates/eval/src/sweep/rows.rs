//! The rows of a sweep: one JSON object per point of the grid.

use powerinfer_artifact::Digest;
use serde::{Deserialize, Serialize};

use crate::statistics::Interval;

/// A point of the grid with everything measured there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SweepRow {
    /// Index of the point in the grid of the run that measured it.
    pub point: usize,
    /// Digest of the run's settings.
    pub run: String,
    /// Coordinates of the point.
    pub axes: Axes,
    /// Parts that the point's placement puts on the GPU; none if the model cannot be placed so.
    pub placement: Option<PlacementSummary>,
    /// Why the model could not be placed, or its placement not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement_error: Option<String>,
    /// Shares of inactive, unpredicted and skipped neurons.
    pub sparsity: Sparsity,
    /// Recall, precision and cost of prediction; none if no neuron is predicted.
    pub predictor: Option<PredictorQuality>,
    /// Measured and predicted latency and throughput.
    pub speed: Speed,
    /// Perplexity, agreement and pass@1 relative to `dense`.
    pub quality: Quality,
    /// Model, bundle, text and machine of the figures.
    pub identity: Identity,
}

/// Coordinates of a point of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Axes {
    /// GPU memory budget in bytes, if that is the axis.
    pub vram_bytes: Option<u64>,
    /// Activation frequency from which on neurons are on the GPU, if that is the axis.
    pub hot_threshold: Option<f64>,
    /// The policy setting as it is written on the command line.
    pub setting: String,
    /// Its policy.
    pub policy: String,
    /// Name of the setting's parameter, such as `relative FFN error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter: Option<String>,
    /// Value of that parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_value: Option<f64>,
    /// Sequences that decode together.
    pub batch: usize,
    /// Tokens of each sequence, decoded ones included.
    pub context_tokens: usize,
}

/// Parts that a placement puts on the GPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlacementSummary {
    /// Neurons on the GPU.
    pub hot_neurons: u64,
    /// Neurons of all layers.
    pub neurons: u64,
    /// Share of the neurons that is on the GPU.
    pub neuron_share: f64,
    /// Share of all activations that falls on neurons on the GPU.
    pub activation_share: f64,
    /// Share of a token's computation that is on the GPU, attention included.
    pub load_share: f64,
    /// Lowest activation frequency of a neuron on the GPU.
    pub coldest_hot_frequency: Option<f64>,
    /// Bytes on the GPU.
    pub gpu_bytes: u64,
    /// Bytes on the CPU.
    pub cpu_bytes: u64,
    /// Layers with attention on the GPU.
    pub attention_layers: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Neurons on the GPU, one count per layer.
    pub hot_per_layer: Vec<usize>,
}

/// Shares of neurons, averaged over the layers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sparsity {
    /// Share of inactive neurons.
    pub true_share: f64,
    /// Share of neurons that were not predicted; none if no neuron is predicted.
    pub predicted_share: Option<f64>,
    /// Share of neurons that were computed to their end.
    pub computed_share: f64,
    /// Mean relative error of the FFNs' outputs.
    pub relative_error: f64,
    /// The same layer by layer.
    pub layers: Vec<LayerSparsity>,
    /// Tokens observed; those in two windows count twice.
    pub tokens: u64,
}

/// Shares of a layer's neurons.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LayerSparsity {
    /// Share of inactive neurons.
    pub true_share: f64,
    /// Share of neurons that were not predicted; none if no neuron is predicted.
    pub predicted_share: Option<f64>,
    /// Share of neurons that were computed to their end.
    pub computed_share: f64,
    /// Mean of `‖sparse − dense‖ / ‖dense‖` of the FFN's output.
    pub relative_error: f64,
    /// Relative rise of perplexity if this layer alone follows the policy setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity_rise_alone: Option<f64>,
}

/// Recall, precision and cost of the prediction of neurons.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PredictorQuality {
    /// Share of the active neurons that was predicted, over all layers.
    pub count_recall: f64,
    /// Share of `Σ|h_i|·‖down_i‖` that falls on predicted neurons, mean over layers and tokens.
    pub contribution_recall: f64,
    /// Share of the predicted neurons that was active, over all layers.
    pub precision: f64,
    /// Bytes that prediction reads per token.
    pub bytes_per_token: f64,
    /// The same as a share of all bytes read per token.
    pub bytes_share: f64,
    /// Share of a token's time.
    pub time_share: f64,
}

/// Latency and throughput, measured here and predicted for the placement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Speed {
    /// On the machine that ran the sweep.
    pub measured: MeasuredSpeed,
    /// On the machine that the placement is for; none if there is no placement.
    pub planned: Option<PlannedSpeed>,
}

/// Latency and throughput on the machine that ran the sweep.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MeasuredSpeed {
    /// `cpu`, or the name of the GPU that ran its part of the placement.
    pub device: String,
    /// Whether the point's placement ran. Otherwise the CPU computed everything, and all placements of a policy setting
    /// share one measurement.
    pub placement_ran: bool,
    /// Whether the GPU is emulated, so that its speed means nothing.
    pub emulated: bool,
    /// CPU threads.
    pub threads: usize,
    /// How often each figure was measured.
    pub repeats: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to first token of one sequence, whatever the batch.
    pub first_token_milliseconds: Range,
    /// Time of a decode step, over all repeats.
    pub decode_microseconds: Latency,
    /// Decode throughput of all sequences together.
    pub tokens_per_second: Range,
    /// Bytes read per token.
    pub bytes_per_token: f64,
    /// Read bandwidth of a stream of vector loads, measured between the repeats.
    pub read_bandwidth_bytes_per_second: f64,
    /// Achieved fraction of that bandwidth.
    pub bandwidth_share: f64,
    /// The cost model's estimate of a step on this machine, of the placement that ran; none on an emulated GPU.
    pub predicted_microseconds: Option<f64>,
    /// Median step over that estimate.
    pub measured_over_predicted: Option<f64>,
    /// Whether other processes were using the CPU.
    pub disturbed: bool,
}

/// Median, least and most of the repeats.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Range {
    /// Median.
    pub median: f64,
    /// Smallest figure.
    pub least: f64,
    /// Largest figure.
    pub most: f64,
}

/// Percentiles of the time of single steps.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Latency {
    /// 50th percentile.
    pub median: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Steps measured.
    pub steps: usize,
}

/// The cost model's estimate for a placement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlannedSpeed {
    /// Name of the machine.
    pub hardware: String,
    /// Always true: an estimate, not a measurement.
    pub simulated: bool,
    /// Time to first token.
    pub first_token_milliseconds: f64,
    /// Time of a decode step.
    pub decode_microseconds: f64,
    /// Part of it on the GPU.
    pub gpu_microseconds: f64,
    /// Part of it on the CPU.
    pub cpu_microseconds: f64,
    /// Part of it for host–device synchronisation.
    pub sync_microseconds: f64,
    /// Decode throughput of all sequences together.
    pub tokens_per_second: f64,
}

/// Quality relative to `dense` on the CPU, on the same items.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Quality {
    /// Tokens scored.
    pub tokens: u64,
    /// Perplexity per token.
    pub perplexity: f64,
    /// Perplexity per word; none if it overflows.
    pub word_perplexity: Option<f64>,
    /// Bits per byte of text.
    pub bits_per_byte: f64,
    /// Relative rise of perplexity over `dense`, with its paired interval.
    pub perplexity_rise: Interval,
    /// Minimum detectable effect on perplexity: the smallest relative rise that the sample would have shown.
    pub minimum_detectable_rise: f64,
    /// Mean of KL(dense ‖ sparse) over tokens, in nats.
    pub kl_divergence_mean: f64,
    /// 99th percentile of the same.
    pub kl_divergence_p99: f64,
    /// Share of tokens whose arg max equals dense's.
    pub top1_agreement: f64,
    /// Tokens of a text before the first other arg max, median of the texts that have one.
    pub tokens_to_first_divergence: Option<u64>,
    /// Share of texts without another arg max.
    pub texts_without_divergence: f64,
    /// Largest absolute difference of two logits.
    pub largest_logit_difference: f32,
    /// Results of generated functions, one entry per kind.
    pub functions: Vec<FunctionResults>,
}

/// Results of functions of one kind, generated greedily.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FunctionResults {
    /// `held-out tasks` or `HumanEval`.
    pub name: String,
    /// Functions that could be judged.
    pub items: u64,
    /// Functions that passed.
    pub passed: u64,
    /// Functions that could not be judged.
    pub unjudged: u64,
    /// Share that passed, with Wilson's interval; none if none could be judged.
    pub pass_at_1: Option<Interval>,
    /// Items that could be judged for both this policy setting and `dense`: what the fields below count.
    pub pairs: u64,
    /// Difference of pass@1 to `dense`.
    pub difference: f64,
    /// Items that `dense` alone gets right.
    pub lost: u64,
    /// Items that this policy setting alone gets right.
    pub won: u64,
    /// p-value of McNemar's exact test.
    pub p_value: f64,
    /// Minimum detectable effect: the smallest difference that the sample would have shown.
    pub minimum_detectable_effect: f64,
    /// Digest of all completions: equal if every token is.
    pub completions: Digest,
}

/// Model, bundle, text and machine of a row's figures.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Identity {
    /// Name of the model.
    pub model: String,
    /// Fingerprint of the model.
    pub fingerprint: Digest,
    /// Digest of the bundle's manifest.
    pub bundle: Digest,
    /// Format of the bundle's weights.
    pub quant: String,
    /// Digest of the tokens scored.
    pub text: Digest,
    /// Seed of tasks and intervals.
    pub seed: u64,
    /// Name and version of the program.
    pub tool: String,
    /// Name of the processor.
    pub processor: String,
    /// Instruction set of the CPU kernels.
    pub instruction_set: String,
}

impl Range {
    /// Median, least and most of `figures`.
    ///
    /// # Panics
    ///
    /// Panics if `figures` is empty.
    pub fn from_values(mut figures: Vec<f64>) -> Self {
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
    /// Nearest-rank percentiles of `steps`, in microseconds.
    ///
    /// # Panics
    ///
    /// Panics if `steps` is empty.
    pub fn from_steps(mut steps: Vec<f64>) -> Self {
        steps.sort_unstable_by(f64::total_cmp);
        let percentile = |share: f64| {
            let rank = (steps.len() as f64 * share).ceil() as usize;
            steps[rank.clamp(1, steps.len()) - 1]
        };
        Self {
            median: percentile(0.5),
            p95: percentile(0.95),
            p99: percentile(0.99),
            steps: steps.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let found = Latency::from_steps((1..=200).rev().map(f64::from).collect());
        assert_eq!((found.median, found.p95, found.p99), (100.0, 190.0, 198.0));
        let one = Latency::from_steps(vec![3.0]);
        assert_eq!((one.median, one.p99, one.steps), (3.0, 3.0, 1));
        let spread = Range::from_values(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((spread.least, spread.median, spread.most), (1.0, 2.5, 4.0));
    }
}
