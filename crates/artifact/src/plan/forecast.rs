//! What a plan is expected to do, beside what other placements would.

use serde::{Deserialize, Serialize};

/// What a plan is expected to do, and what other ways of placing would.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forecast {
    /// Decoding so many sequences at once.
    pub decode: Vec<BatchSpeed>,
    /// A prompt of [`PROMPT_TOKENS`] tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_per_second: Option<f64>,
    /// Microseconds that a token would take less with 1 GiB more VRAM, at the budget's margin; none
    /// where the objective does not count time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microseconds_per_gibibyte: Option<f64>,
    /// Other placements, by the same arithmetic.
    pub baselines: Vec<Baseline>,
}

/// Tokens of the prompt whose speed an [`Forecast`] gives.
pub const PROMPT_TOKENS: usize = 512;

/// How quickly so many sequences are decoded at once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSpeed {
    /// Sequences.
    pub batch: usize,
    /// Of all of them together.
    pub tokens_per_second: f64,
}

/// Another way of placing the same model within the same budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// What it does, in a few words.
    pub name: String,
    /// Predicted time of one decoded token.
    pub microseconds_per_token: f64,
    /// Whether it keeps the budget of RAM too.
    pub fits_ram: bool,
}
