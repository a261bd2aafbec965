//! Predicted speed of a plan and of other placements.

use serde::{Deserialize, Serialize};

/// Predicted speed of a plan, with other placements for comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forecast {
    /// Decode throughput by batch size.
    pub decode: Vec<BatchSpeed>,
    /// Prefill throughput for a prompt of [`PROMPT_TOKENS`] tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_per_second: Option<f64>,
    /// Shadow price of VRAM: microseconds per token saved by one more GiB. `None` if the objective is not
    /// time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microseconds_per_gibibyte: Option<f64>,
    /// Other placements under the same cost model.
    pub baselines: Vec<Baseline>,
}

/// Length of the prompt in [`Forecast::prompt_tokens_per_second`].
pub const PROMPT_TOKENS: usize = 512;

/// Decode throughput of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSpeed {
    /// Number of sequences.
    pub batch: usize,
    /// Throughput of all sequences together.
    pub tokens_per_second: f64,
}

/// Another placement of the same model within the same budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Short description.
    pub name: String,
    /// Predicted time per decoded token.
    pub microseconds_per_token: f64,
    /// Whether it fits the RAM budget too.
    pub fits_ram: bool,
}
