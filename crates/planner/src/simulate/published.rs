//! Published activity of models, each value with its source. Models without published values have those of the most
//! similar model.

use powerinfer_model::Experts;
use powerinfer_synth::{SynthError, rates};
use serde::Serialize;

use crate::PlannerError;

/// Default size of all predictors as a share of the model's parameters: the mean in section 8.3.4 of the paper.
const MEAN_PREDICTOR_SHARE: f64 = 0.0709;

const TABLE_3: &str = "PowerInfer (arXiv 2312.12456v2), table 3";
const TABLE_6: &str = "PowerInfer (arXiv 2312.12456v2), table 6";
const FIGURE_4: &str = "PowerInfer (arXiv 2312.12456v2), figure 4a";

/// A value and its source.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SourcedValue {
    /// Value.
    pub value: f64,
    /// Source.
    pub source: String,
}

impl SourcedValue {
    /// A value with its source.
    pub fn new(value: f64, source: &str) -> Self {
        Self {
            value,
            source: source.to_owned(),
        }
    }

    /// The value `given`, or else this value.
    fn or_given(self, given: Option<f64>) -> Self {
        given.map_or(self, |value| Self::new(value, "given"))
    }
}

/// Activity of a model's neurons, and size of its predictors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Activity {
    /// Share of FFN activations that are zero, over all layers.
    pub sparsity: SourcedValue,
    /// Smallest share of a layer's neurons with 80% of its activations.
    pub skew: SourcedValue,
    /// Size of all predictors as a share of the model's parameters.
    pub predictor_share: SourcedValue,
    /// Share of active neurons in each layer of the first half, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_half_density: Option<SourcedValue>,
}

/// Values that replace the published ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActivityOverrides {
    /// Share of FFN activations that are zero.
    pub sparsity: Option<f64>,
    /// Smallest share of a layer's neurons with 80% of its activations.
    pub skew: Option<f64>,
    /// Size of all predictors as a share of the model's parameters.
    pub predictor_share: Option<f64>,
}

impl Activity {
    /// Values of the model shape `name`; those in `said` take precedence.
    pub fn new(name: &str, said: ActivityOverrides) -> Self {
        let sparsity = match name {
            "opt-1.3b" | "opt-6.7b" | "opt-13b" | "opt-30b" | "opt-66b" | "opt-175b" => {
                SourcedValue::new(
                    0.97,
                    &format!("{TABLE_3}: 96 to 98% for OPT, 97% in table 1"),
                )
            }
            "falcon-40b" => SourcedValue::new(0.95, TABLE_3),
            "falcon-7b" => {
                SourcedValue::new(0.95, &format!("assumed: as Falcon(ReLU)-40B, {TABLE_3}"))
            }
            "bamboo-7b" => SourcedValue::new(
                0.83,
                "PowerInfer (arXiv 2312.12456v2), section 8.3.2: 80 to 86% on the tokens that were timed; table 3 has 90%",
            ),
            "llama-7b" => SourcedValue::new(0.70, &format!("{TABLE_3}, LLaMA2(ReGLU)-7B")),
            "llama-13b" => SourcedValue::new(0.78, &format!("{TABLE_3}, LLaMA2(ReGLU)-13B")),
            "llama-70b" => SourcedValue::new(0.82, &format!("{TABLE_3}, LLaMA2(ReGLU)-70B")),
            "llama-30b" => SourcedValue::new(
                0.80,
                &format!("assumed: between LLaMA2(ReGLU)-13B and 70B, {TABLE_3}"),
            ),
            _ => SourcedValue::new(0.80, &format!("assumed: as a ReGLU model, {TABLE_3}")),
        };
        let is_plain = name.starts_with("opt-") || name.starts_with("falcon-");
        let skew = match name {
            "opt-30b" => SourcedValue::new(0.26, FIGURE_4),
            "llama-70b" => SourcedValue::new(0.43, &format!("{FIGURE_4}, LLaMA2(ReGLU)-70B")),
            _ if is_plain => SourcedValue::new(0.26, &format!("assumed: as OPT-30B, {FIGURE_4}")),
            _ => SourcedValue::new(0.43, &format!("assumed: as LLaMA2(ReGLU)-70B, {FIGURE_4}")),
        };
        let predictor_share = match name {
            "opt-13b" => SourcedValue::new(0.0671, TABLE_6),
            "opt-66b" => SourcedValue::new(0.0488, TABLE_6),
            "opt-30b" => SourcedValue::new(
                0.058,
                &format!("assumed: between OPT-13B and OPT-66B, {TABLE_6}"),
            ),
            "opt-175b" => SourcedValue::new(0.0488, &format!("assumed: as OPT-66B, {TABLE_6}")),
            "falcon-40b" => SourcedValue::new(0.0868, TABLE_6),
            "llama-70b" => SourcedValue::new(0.0808, &format!("{TABLE_6}, LLaMA(ReGLU)-70B")),
            _ => SourcedValue::new(
                MEAN_PREDICTOR_SHARE,
                "assumed: the mean in PowerInfer (arXiv 2312.12456v2), section 8.3.4",
            ),
        };
        let first_half_density = (name == "opt-30b" && said.sparsity.is_none()).then(|| {
            SourcedValue::new(
                0.01,
                "PowerInfer (arXiv 2312.12456v2), section 3.1: less than 1% in the first 24 layers",
            )
        });
        Self {
            sparsity: sparsity.or_given(said.sparsity),
            skew: skew.or_given(said.skew),
            predictor_share: predictor_share.or_given(said.predictor_share),
            first_half_density,
        }
    }

    /// Activation frequencies per layer, hottest first. A skew that was not given and is impossible at this sparsity is
    /// replaced by the nearest possible one.
    ///
    /// # Errors
    ///
    /// No power law has this sparsity and skew.
    pub fn frequencies(
        &mut self,
        layers: usize,
        neurons: usize,
        is_skew_given: bool,
    ) -> Result<Vec<Vec<f64>>, PlannerError> {
        let mean = 1.0 - self.sparsity.value;
        let early = self
            .first_half_density
            .as_ref()
            .map_or(mean, |found| found.value);
        let first = layers / 2;
        // Density of the second half, so that the mean holds.
        let late = (mean * layers as f64 - early * first as f64) / (layers - first) as f64;
        let late = self.law(neurons, late, is_skew_given)?;
        let early = match self.first_half_density {
            None => late.clone(),
            Some(_) => self.law(neurons, early, is_skew_given)?,
        };
        Ok((0..layers)
            .map(|layer| if layer < first { &early } else { &late }.clone())
            .collect())
    }

    /// Returns the selection frequency of each neuron's expert in a layer, highest first; shared experts come first. If no skew was
    /// given, all experts are selected equally often, and `self.skew` is replaced accordingly.
    ///
    /// # Errors
    ///
    /// No power law has this number of selections per token and this skew.
    pub fn selections(
        &mut self,
        experts: &Experts,
        is_skew_given: bool,
    ) -> Result<Vec<f64>, PlannerError> {
        let share = experts.per_token as f64 / experts.count as f64;
        let rates = if is_skew_given {
            rates(experts.count, 1.0 - share, self.skew.value)?
        } else {
            self.skew = SourcedValue::new(
                0.8,
                "assumed: all experts are selected equally often; `profile` measures it on your text",
            );
            vec![share; experts.count]
        };
        let routed = rates
            .into_iter()
            .flat_map(|rate| std::iter::repeat_n(rate, experts.size));
        Ok(std::iter::repeat_n(1.0, experts.shared_size)
            .chain(routed)
            .collect())
    }

    fn law(
        &mut self,
        neurons: usize,
        density: f64,
        is_skew_given: bool,
    ) -> Result<Vec<f64>, PlannerError> {
        // A power law's most frequent neurons reach at most this frequency.
        const MOST: f64 = 0.98;
        if density > MOST && !is_skew_given {
            self.skew = SourcedValue::new(0.8, "all neurons are equally active");
            return Ok(vec![density.min(1.0); neurons]);
        }
        match rates(neurons, 1.0 - density, self.skew.value) {
            Err(SynthError::NoPowerLaw {
                lowest, highest, ..
            }) if !is_skew_given && lowest < highest => {
                let nearest = self.skew.value.clamp(lowest / 100.0, highest / 100.0);
                // Slightly inside the limits, where the law degenerates.
                let inside = if nearest > self.skew.value {
                    1.02
                } else {
                    0.98
                };
                self.skew = SourcedValue::new(
                    (nearest * inside).min(0.8),
                    "the nearest to the usual one that this sparsity allows",
                );
                Ok(rates(neurons, 1.0 - density, self.skew.value)?)
            }
            other => Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_model::RouterScores;

    use super::*;

    #[test]
    fn every_shape_has_figures_that_can_be() {
        for (name, _) in powerinfer_synth::SHAPES {
            let mut activity = Activity::new(name, ActivityOverrides::default());
            let found = activity.frequencies(4, 4096, true).unwrap();
            let sum: f64 = found.iter().flatten().sum();
            let density = sum / (4.0 * 4096.0);
            assert!(
                (1.0 - density - activity.sparsity.value).abs() < 1e-3,
                "{name}"
            );
        }
    }

    #[test]
    fn a_token_selects_its_experts() {
        let experts = Experts {
            count: 16,
            per_token: 4,
            size: 3,
            shared_size: 5,
            has_router_bias: false,
            has_shared_gate: true,
            scores: RouterScores::Softmax,
            reads_layer_input: false,
            scale: 1.0,
            dense: None,
        };
        for skew in [None, Some(0.4)] {
            let said = ActivityOverrides {
                skew,
                ..ActivityOverrides::default()
            };
            let mut activity = Activity::new("qwen3-30b-a3b", said);
            let found = activity.selections(&experts, skew.is_some()).unwrap();
            assert!(found.is_sorted_by(|a, b| a >= b));
            let sum: f64 = found.iter().sum();
            assert!((sum - experts.neurons_per_token() as f64).abs() < 1e-3);
        }
    }

    #[test]
    fn where_the_usual_skew_cannot_be_the_nearest_is_taken() {
        let said = ActivityOverrides {
            sparsity: Some(0.5),
            ..ActivityOverrides::default()
        };
        let mut activity = Activity::new("opt-30b", said);
        assert!(activity.frequencies(2, 2048, true).is_err());
        activity.frequencies(2, 2048, false).unwrap();
        assert!(activity.skew.value > 0.26 && activity.skew.source.contains("nearest"));
    }
}
