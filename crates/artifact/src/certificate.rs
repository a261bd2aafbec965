//! What a bundle's policies were shown to do to the model, on text that nothing was fitted to.

use serde::{Deserialize, Serialize};

use crate::{
    Digest,
    plan::{LayerPlan, Policy},
};

/// Format name of the document.
pub const FORMAT: &str = "powerinfer-certificate";
/// Newest version read here.
pub const VERSION: u32 = 2;
/// The document's name inside a bundle.
pub const FILE: &str = "certificate.json";
/// The file with the text, token ids, inside a bundle.
pub const TEXT_FILE: &str = "certificate-text.safetensors";

/// A figure, and how far from it the truth may be with 95 % confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// The estimate.
    pub value: f64,
    /// Half the width of the interval.
    pub margin: f64,
}

/// A value with its 95 % confidence interval.
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

/// How text was scored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scoring {
    /// Texts, each from its own beginning.
    pub texts: u64,
    /// Tokens scored: all but the first of each text.
    pub tokens: u64,
    /// Tokens that the model sees at once.
    pub window: u64,
    /// Tokens from one window's beginning to the next one's.
    pub stride: u64,
    /// The token that every text begins with, where there is such a one: what the tokenizer puts
    /// first.
    pub begins_with: Option<u32>,
    /// Digest of the token ids.
    pub digest: Digest,
}

/// The body of `certificate.json`: the planned policies beside `dense`, on the same weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// The text.
    pub scoring: Scoring,
    /// What was certified: [`decisions`] of the plan.
    pub decisions: Digest,
    /// The rise of perplexity that was allowed, as a share.
    pub allowed_rise: f64,
    /// Perplexity under `dense`.
    pub dense_perplexity: f64,
    /// Perplexity as planned.
    pub perplexity: f64,
    /// Relative rise of perplexity over `dense`.
    pub perplexity_rise: Interval,
    /// Mean of KL(dense ‖ planned), in nats.
    pub kl_divergence_mean: Estimate,
    /// The divergence that 99 % of the tokens stay below, in nats.
    pub kl_divergence_p99: f64,
    /// Share of tokens for which both hold the same token for the likeliest.
    pub top1_agreement: f64,
    /// Share of texts in which they do so at every token.
    pub texts_without_divergence: f64,
    /// Tokens until they first do not, the median of the other texts.
    pub tokens_to_first_divergence: Option<u64>,
    /// Share of FFN neurons that are computed.
    pub ffn_neurons_computed: f64,
    /// One entry per layer, in order.
    pub layers: Vec<LayerCertificate>,
}

/// What a layer's policy does to its FFN's output. Inputs that are left out are so on both sides: what
/// that does shows in the perplexity alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCertificate {
    /// Which layer.
    pub layer: usize,
    /// Which neurons are computed.
    pub policy: Policy,
    /// Mean over tokens of `‖planned − dense‖ / ‖dense‖`.
    pub relative_error: f64,
    /// What 99 % of the tokens stay below.
    pub relative_error_p99: f64,
    /// The largest mean over 16 consecutive tokens: the band that traffic like this stays in.
    pub error_bound: f64,
    /// Mean share of `Σ|h_i|·‖down_i‖` that comes from neurons that are computed.
    pub contribution_recall: f64,
}

impl Certificate {
    /// Whether the rise is within what was allowed, with 97.5 % confidence.
    pub fn holds(&self) -> bool {
        self.perplexity_rise.high <= self.allowed_rise
    }

    /// About how many tokens it would take to show that the rise is within what is allowed, if it
    /// is what it seems; none where it seems to be more.
    pub fn tokens_needed(&self) -> Option<u64> {
        let Interval { value, high, .. } = self.perplexity_rise;
        let (room, margin) = (self.allowed_rise - value, high - value);
        (room > 0.0).then(|| {
            let times = (margin / room).powi(2).max(1.0);
            (self.scoring.tokens as f64 * times).ceil() as u64
        })
    }
}

/// A digest of what decides what is computed: each layer's policy and threshold, and after them
/// its thresholds of inputs, where any layer has such.
pub fn decisions(layers: &[LayerPlan]) -> Digest {
    let decision = |layer: &LayerPlan| (layer.policy, layer.threshold);
    let decisions: Vec<_> = layers.iter().map(decision).collect();
    let mut text = serde_json::to_vec(&decisions).expect("decisions are plain JSON");
    let inputs: Vec<_> = layers.iter().map(|layer| layer.input_thresholds).collect();
    if inputs.iter().any(Option::is_some) {
        text.extend(serde_json::to_vec(&inputs).expect("thresholds are plain JSON"));
    }
    Digest::of(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{InputThresholds, Plan};

    fn certificate(value: f64, margin: f64) -> Certificate {
        Certificate {
            scoring: Scoring {
                texts: 1,
                tokens: 1000,
                window: 512,
                stride: 512,
                begins_with: None,
                digest: Digest::of(b""),
            },
            decisions: Digest::of(b""),
            allowed_rise: 0.01,
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
    fn a_certificate_holds_where_its_whole_interval_is_allowed() {
        assert!(certificate(0.005, 0.005).holds());
        assert!(!certificate(0.005, 0.006).holds());
        // Half the room, so four times the tokens.
        assert_eq!(certificate(0.005, 0.01).tokens_needed(), Some(4000));
        assert_eq!(certificate(0.011, 0.001).tokens_needed(), None);
        assert!(certificate(0.0, 0.0).holds());
    }

    #[test]
    fn decisions_are_policies_and_thresholds_alone() {
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
        // Bundles that were certified before there were thresholds of inputs stay certified.
        let known = r#"[["exact",null],["exact",null]]"#;
        assert_eq!(decisions(&plan.layers), Digest::of(known.as_bytes()));
    }
}
