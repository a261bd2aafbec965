//! Certificate of a bundle: measured quality of its policies, on text that nothing was fitted to.

use powerinfer_tensor::CacheFormat;
use serde::{Deserialize, Serialize};

use crate::{
    Digest,
    plan::{LayerPlan, Plan, Policy},
};

/// Format name of the document.
pub const FORMAT: &str = "powerinfer-certificate";
/// Version that this program reads and writes.
pub const VERSION: u32 = 2;
/// File name inside a bundle.
pub const FILE: &str = "certificate.json";
/// Name of the file with the text's token ids inside a bundle.
pub const TEXT_FILE: &str = "certificate-text.safetensors";

/// Estimate of a mean with its 95% confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// Point estimate.
    pub value: f64,
    /// Half the width of the interval.
    pub margin: f64,
}

/// A value with its 95% confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Distance from the value to the farther end: the minimum detectable effect of the sample.
    pub fn half_width(self) -> f64 {
        (self.high - self.value).max(self.value - self.low)
    }
}

/// Text that was scored, and the windows it was scored in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scoring {
    /// Number of texts; each is scored on its own.
    pub texts: u64,
    /// Number of tokens scored: all but the first of each text.
    pub tokens: u64,
    /// Tokens per window: the context that the model is given.
    pub window: u64,
    /// Distance between the starts of consecutive windows, in tokens.
    pub stride: u64,
    /// Token that the tokenizer puts first in every text (BOS), if any.
    pub bos_token: Option<u32>,
    /// Digest of the token ids.
    pub digest: Digest,
}

/// Body of `certificate.json`: the planned policies compared with `dense`, on the same weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// Text of the comparison.
    pub scoring: Scoring,
    /// Digest of the certified policies, thresholds and KV cache format, see [`certified_settings`].
    pub decisions: Digest,
    /// Perplexity budget: allowed increase of perplexity over `dense`, as a share of it.
    pub perplexity_budget: f64,
    /// Perplexity under `dense`.
    pub dense_perplexity: f64,
    /// Perplexity under the planned policies.
    pub perplexity: f64,
    /// Increase of perplexity over `dense`, as a share of it.
    pub perplexity_rise: Interval,
    /// Mean over tokens of KL(dense ‖ planned), in nats.
    pub kl_divergence_mean: Estimate,
    /// 99th percentile over tokens of KL(dense ‖ planned), in nats.
    pub kl_divergence_p99: f64,
    /// Share of tokens on which both have the same arg max.
    pub top1_agreement: f64,
    /// Share of texts with the same arg max on every token.
    pub texts_without_divergence: f64,
    /// Median number of tokens before the first differing arg max, over the other texts.
    pub tokens_to_first_divergence: Option<u64>,
    /// Share of FFN neurons that are computed.
    pub ffn_neurons_computed: f64,
    /// One entry per layer, in order.
    pub layers: Vec<LayerCertificate>,
}

/// Measured effect of a layer's policy on its FFN output. Input thresholds apply to both sides of this
/// comparison: their effect shows in the perplexity alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCertificate {
    /// Index of the layer.
    pub layer: usize,
    /// Certified policy.
    pub policy: Policy,
    /// Mean over tokens of `‖planned − dense‖ / ‖dense‖`.
    pub relative_error: f64,
    /// 99th percentile over tokens of the same ratio.
    pub relative_error_p99: f64,
    /// Largest mean over 16 consecutive tokens: the error bound for text of this kind.
    pub error_bound: f64,
    /// Mean share of `Σ|h_i|·‖down_i‖` contributed by the computed neurons.
    pub contribution_recall: f64,
}

impl Certificate {
    /// Returns whether the increase of perplexity is within the budget, with 97.5% confidence.
    pub fn holds(&self) -> bool {
        self.perplexity_rise.high <= self.perplexity_budget
    }

    /// Estimates the number of tokens needed to show that the increase is within the budget. `None` if the
    /// point estimate exceeds the budget.
    pub fn tokens_needed(&self) -> Option<u64> {
        let Interval { value, high, .. } = self.perplexity_rise;
        let (slack, margin) = (self.perplexity_budget - value, high - value);
        (slack > 0.0).then(|| {
            let times = (margin / slack).powi(2).max(1.0);
            (self.scoring.tokens as f64 * times).ceil() as u64
        })
    }
}

/// Digest of everything that selects neurons and inputs: each layer's policy and threshold, then the
/// input thresholds if any layer has them.
///
#[expect(
    clippy::missing_panics_doc,
    reason = "policies and thresholds are plain JSON"
)]
pub fn decisions(layers: &[LayerPlan]) -> Digest {
    let decision = |layer: &LayerPlan| (layer.policy, layer.threshold);
    let decisions: Vec<_> = layers.iter().map(decision).collect();
    let mut text = serde_json::to_vec(&decisions).expect("decisions are plain JSON");
    let inputs: Vec<_> = layers.iter().map(|layer| layer.input_thresholds).collect();
    if inputs.iter().any(Option::is_some) {
        text.extend(serde_json::to_vec(&inputs).expect("thresholds are plain JSON"));
    }
    Digest::from_content(&text)
}

/// Digest of everything in `plan` that a certificate's values depend on: the [`decisions`], and the format of the KV cache
/// unless it is f16.
pub fn certified_settings(plan: &Plan) -> Digest {
    let decisions = decisions(&plan.layers);
    match plan.budget.kv_cache {
        CacheFormat::F16 => decisions,
        format => Digest::from_content(format!("{decisions} {}", format.name()).as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::InputThresholds;

    fn certificate(value: f64, margin: f64) -> Certificate {
        Certificate {
            scoring: Scoring {
                texts: 1,
                tokens: 1000,
                window: 512,
                stride: 512,
                bos_token: None,
                digest: Digest::from_content(b""),
            },
            decisions: Digest::from_content(b""),
            perplexity_budget: 0.01,
            dense_perplexity: 2.0,
            perplexity: 2.0 * (1.0 + value),
            perplexity_rise: Interval {
                value,
                low: value - margin,
                high: value + margin,
            },
            kl_divergence_mean: Estimate {
                value: 0.0,
                margin: 0.0,
            },
            kl_divergence_p99: 0.0,
            top1_agreement: 1.0,
            texts_without_divergence: 1.0,
            tokens_to_first_divergence: None,
            ffn_neurons_computed: 1.0,
            layers: Vec::new(),
        }
    }

    #[test]
    fn a_certificate_holds_if_its_whole_interval_is_within_the_budget() {
        assert!(certificate(0.005, 0.005).holds());
        assert!(!certificate(0.005, 0.006).holds());
        // Twice the slack in the margin, so four times the tokens.
        assert_eq!(certificate(0.005, 0.01).tokens_needed(), Some(4000));
        assert_eq!(certificate(0.011, 0.001).tokens_needed(), None);
        assert!(certificate(0.0, 0.0).holds());
    }

    #[test]
    fn decisions_depend_on_policies_and_thresholds_alone() {
        let plan = Plan::unplaced(2, 8, Policy::Exact, 16);
        let mut other = plan.clone();
        other.layers[0].hot_count = 4;
        assert_eq!(decisions(&plan.layers), decisions(&other.layers));
        other.layers[1].policy = Policy::Dense;
        assert_ne!(decisions(&plan.layers), decisions(&other.layers));
        let mut other = plan.clone();
        other.layers[1].input_thresholds = Some(InputThresholds {
            share: 0.25,
            attention: 0.5,
            output: 0.5,
            ffn: None,
        });
        assert_ne!(decisions(&plan.layers), decisions(&other.layers));
        // Without input thresholds the digest covers policies and thresholds only.
        let known = r#"[["exact",null],["exact",null]]"#;
        assert_eq!(
            decisions(&plan.layers),
            Digest::from_content(known.as_bytes())
        );
    }

    #[test]
    fn certificates_depend_on_the_format_of_the_kv_cache() {
        let mut plan = Plan::unplaced(2, 8, Policy::Exact, 16);
        plan.budget.kv_cache = CacheFormat::F16;
        assert_eq!(certified_settings(&plan), decisions(&plan.layers));
        plan.budget.kv_cache = CacheFormat::Q8_0;
        assert_ne!(certified_settings(&plan), decisions(&plan.layers));
    }
}
