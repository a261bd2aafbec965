//! Makes the predictor of a layer, at the rank that reads the fewest bytes per token.

use std::time::Instant;

use powerinfer_artifact::{ByteSize, Progress};
use powerinfer_kernels::Isa;
use powerinfer_profile::{Profile, Traces};

use crate::{
    PredictorError, Settings, Sizing,
    calibrate::Quality,
    loss::MissCost,
    network::Network,
    search::{LayerStatistics, Search},
    verdict::{Refusal, check_samples, is_far_short},
};

/// Candidate ranks, each about 1.5 times the previous one. Rows of B are stored in blocks of 32, so that below 32 only A
/// shrinks.
pub(crate) const LADDER: [usize; 16] = [
    16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
];

/// Makes the predictor of `layer`, whose gate is `gate [neurons, hidden]`, within the byte budget; the reason if the layer
/// is better off without one.
pub(crate) fn best_network(
    layer: usize,
    profile: &Profile,
    gate: &[f32],
    settings: Settings,
    deadline: Option<Instant>,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<Result<(Network, Quality), Refusal>, PredictorError> {
    let traces = profile.traces(layer)?;
    let summary = &profile.document().layers[layer];
    let known = LayerStatistics {
        layer,
        density: 1.0 - summary.sparsity,
        most: summary.neurons_for.most,
    };
    best_of_samples(known, &traces, gate, settings, deadline, isa, progress)
}

/// [`best_network`] from given samples, which are checked.
pub(crate) fn best_of_samples(
    known: LayerStatistics,
    traces: &Traces,
    gate: &[f32],
    settings: Settings,
    deadline: Option<Instant>,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<Result<(Network, Quality), Refusal>, PredictorError> {
    let layer = known.layer;
    check_samples(layer, traces)?;
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    let counts = traces.training.counts();
    let activations: u64 = counts.iter().sum();
    if activations == 0 || traces.held_out.counts().iter().all(|count| *count == 0) {
        return Ok(Err(Refusal::NoActivity { training, held_out }));
    }
    let (hidden, neurons) = (traces.training.hidden_size, counts.len());
    let density = activations as f64 / (training * neurons) as f64;
    let bytes = |rank| settings.predictor_bytes(rank, hidden, neurons);
    // At best a predictor saves the gate rows of the inactive neurons.
    let all_gates = (neurons * settings.quant.row_bytes(hidden)) as f64;
    if bytes(LADDER[0]) as f64 >= (1.0 - density) * all_gates {
        return Ok(Err(Refusal::AlwaysActive { density }));
    }
    let fits = |rank: &usize| *rank <= hidden && bytes(*rank) <= settings.layer_bytes;
    let ladder: Vec<usize> = LADDER.into_iter().filter(fits).collect();
    let budget = ByteSize(settings.layer_bytes);
    if ladder.is_empty() {
        return Ok(Err(Refusal::OverBudget {
            rank: LADDER[0],
            bytes: ByteSize(bytes(LADDER[0])),
            budget,
        }));
    }
    traces.training.advise_random_access();
    let mut search = Search {
        known,
        traces,
        gate,
        closed_form: None,
        settings,
        deadline,
        isa,
        progress,
        ladder,
        log_odds: log_odds(&counts, training),
        cost: miss_cost(settings.sizing, density),
    };
    let best = match settings.sizing {
        Sizing::Evidence => search.cheapest()?,
        Sizing::Paper => search.as_in_the_paper()?,
    };
    let (rank, quality) = (best.network.rank, best.quality);
    let exact = search.bytes_read(1.0, quality.density);
    if settings.sizing == Sizing::Evidence && best.cost >= exact {
        return Ok(Err(Refusal::DoesNotPay {
            rank,
            budget,
            predicted: quality.predicted_density,
            recall: quality.recall,
        }));
    }
    if is_far_short(&quality, settings.targets) {
        return Ok(Err(Refusal::FarShort {
            rank,
            budget,
            recall: quality.recall,
            contribution: quality.contribution_recall,
            targets: settings.targets,
        }));
    }
    Ok(Ok((best.network, quality)))
}

/// Log-odds of each neuron's activity, with add-one smoothing.
fn log_odds(counts: &[u64], tokens: usize) -> Vec<f32> {
    let odds = counts.iter().map(|count| {
        let (active, inactive) = (*count as f64 + 1.0, (tokens as u64 - count) as f64 + 1.0);
        (active / inactive).ln() as f32
    });
    odds.collect()
}

/// Weight of false negatives in a layer with this density.
fn miss_cost(sizing: Sizing, density: f64) -> MissCost {
    let equal_shares = (1.0 - density) / density.max(1e-4);
    match sizing {
        // The geometric mean of equal weights (1) and equal shares of the loss.
        Sizing::Evidence => MissCost::ByContribution(equal_shares.sqrt().clamp(1.0, 30.0) as f32),
        Sizing::Paper => MissCost::Even(equal_shares.clamp(1.0, 100.0) as f32),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use powerinfer_artifact::{progress::Silent, random::Random};
    use powerinfer_tensor::Format;

    use super::*;
    use crate::{
        Method, Targets,
        planted::{EASY, Planted, planted, planted_gate},
    };

    const SETTINGS: Settings = Settings {
        targets: Targets {
            recall: 0.95,
            contribution_recall: 0.99,
        },
        layer_bytes: 100_000,
        method: Method::Trained,
        max_time: None,
        min_saving: Settings::MIN_SAVING,
        sizing: Sizing::Evidence,
        steps: 300,
        patience: 60,
        quant: Format::F32,
        matrices_per_neuron: 3,
        weights: Format::Q8_0,
        seed: 0,
    };
    const KNOWN: LayerStatistics = LayerStatistics {
        layer: 7,
        density: 0.1,
        most: 0.2,
    };

    type Made = Result<Result<(Network, Quality), Refusal>, PredictorError>;

    /// Without a gate, which training does not need.
    fn make(traces: &Traces, settings: Settings) -> Made {
        make_with(traces, &[], settings, None)
    }

    fn make_with(
        traces: &Traces,
        gate: &[f32],
        settings: Settings,
        deadline: Option<Instant>,
    ) -> Made {
        let isa = Isa::SCALAR;
        best_of_samples(KNOWN, traces, gate, settings, deadline, isa, &Silent)
    }

    /// The network for samples that depend on several directions.
    fn make_by(method: Method) -> (Network, Quality) {
        let shape = Planted { rank: 12, ..EASY };
        let (traces, gate) = (planted(shape, 1), planted_gate(shape, 1));
        let settings = Settings { method, ..SETTINGS };
        make_with(&traces, &gate, settings, None).unwrap().unwrap()
    }

    #[track_caller]
    fn refusal(traces: &Traces, settings: Settings) -> Refusal {
        match make(traces, settings).unwrap() {
            Ok((_, quality)) => panic!("{quality:?}"),
            Err(refusal) => refusal,
        }
    }

    #[test]
    fn an_easy_layer_meets_its_targets() {
        let (network, quality) = make(&planted(EASY, 1), SETTINGS).unwrap().unwrap();
        assert!(!quality.falls_short(SETTINGS.targets), "{quality:?}");
        assert!(quality.predicted_density < 0.2, "{quality:?}");
        assert!(network.bytes() as u64 <= SETTINGS.layer_bytes);
    }

    #[test]
    fn calculated_networks_predict_what_depends_on_few_directions() {
        let (network, quality) = make_by(Method::ClosedForm);
        assert_eq!((network.is_linear, network.steps), (true, 0));
        assert!(!quality.falls_short(SETTINGS.targets), "{quality:?}");
        let (trained, with_relu) = make_by(Method::Trained);
        assert!(!trained.is_linear && trained.steps > 0);
        assert!(
            quality.predicted_density < with_relu.predicted_density,
            "{quality:?} {with_relu:?}"
        );
    }

    #[test]
    fn auto_trains_from_the_calculated_network_only_if_that_promises_savings() {
        let (network, _) = make_by(Method::Auto);
        assert_eq!((network.is_linear, network.steps), (true, 0));
        // A few neurons with large gate rows take all sixteen directions, although they are active as rarely as
        // the others.
        let hard = Planted { rank: 60, ..EASY };
        let (traces, mut gate) = (planted(hard, 1), planted_gate(hard, 1));
        let rows = gate.chunks_exact_mut(hard.hidden).step_by(16);
        rows.flatten().for_each(|value| *value *= 30.0);
        let make = |method, min_saving, deadline| {
            let settings = Settings {
                method,
                min_saving,
                layer_bytes: 40_000,
                ..SETTINGS
            };
            make_with(&traces, &gate, settings, deadline)
                .unwrap()
                .unwrap()
        };
        let usual = Settings::MIN_SAVING;
        let (calculated, before) = make(Method::ClosedForm, usual, None);
        let (trained, after) = make(Method::Auto, usual, None);
        assert!(trained.is_linear && trained.steps > 0);
        assert_eq!(trained.rank, calculated.rank);
        assert!(
            after.predicted_density < 0.95 * before.predicted_density,
            "{before:?} {after:?}"
        );
        let (late, _) = make(Method::Auto, usual, Some(Instant::now()));
        assert_eq!(late.steps, 0, "no time is left");
        let (frugal, _) = make(Method::Auto, 0.9, None);
        assert_eq!(frugal.steps, 0, "training does not save so much");
    }

    #[test]
    fn sizing_as_in_the_paper_is_accurate() {
        let settings = Settings {
            sizing: Sizing::Paper,
            ..SETTINGS
        };
        let (_, quality) = make(&planted(EASY, 1), settings).unwrap().unwrap();
        assert!(quality.recall >= 0.95, "{quality:?}");
    }

    #[test]
    fn a_layer_without_active_neurons_gets_no_predictor() {
        let inactive = Planted {
            threshold: 1e9,
            ..EASY
        };
        let refusal = refusal(&planted(inactive, 1), SETTINGS);
        let expected = Refusal::NoActivity {
            training: 2000,
            held_out: 1000,
        };
        assert_eq!(refusal, expected);
        assert!(refusal.to_string().contains("no neuron is active"));
    }

    #[test]
    fn a_layer_with_only_active_neurons_gets_no_predictor() {
        let active = Planted {
            threshold: -1e9,
            ..EASY
        };
        let refusal = refusal(&planted(active, 1), SETTINGS);
        assert_eq!(refusal, Refusal::AlwaysActive { density: 1.0 });
        assert!(refusal.to_string().contains("100.0%"), "{refusal}");
    }

    #[test]
    fn samples_with_nan_are_an_error_with_their_place() {
        for part in powerinfer_profile::Part::ALL {
            let mut traces = planted(EASY, 1);
            let inputs = traces.part_mut(part).inputs.to_mut();
            inputs[17 * EASY.hidden + 5] = bf16::NAN;
            let error = make(&traces, SETTINGS).err().unwrap().to_string();
            for expected in ["layer 7", "sample 17", part.name(), "NaN"] {
                assert!(error.contains(expected), "{error}");
            }
        }
    }

    #[test]
    fn a_too_small_budget_is_reported() {
        let settings = Settings {
            layer_bytes: 1000,
            ..SETTINGS
        };
        let refusal = refusal(&planted(EASY, 1), settings).to_string();
        for expected in ["rank 16", "1000 B"] {
            assert!(refusal.contains(expected), "{refusal}");
        }
    }

    #[test]
    fn unpredictable_neurons_get_no_predictor() {
        // Activity is independent of the inputs.
        let mut random = Random::new(1);
        let mut traces = Traces::new(64, 512);
        for part in powerinfer_profile::Part::ALL {
            let samples = traces.part_mut(part);
            for _ in 0..500 {
                let input = (0..64).map(|_| bf16::from_f64(random.normal()));
                samples.inputs.to_mut().extend(input);
                let values: Vec<f32> = (0..512).map(|_| f32::from(random.chance(10))).collect();
                samples.active.push(&values);
            }
        }
        let refusal = refusal(&traces, SETTINGS);
        let message = refusal.to_string();
        assert!(matches!(refusal, Refusal::DoesNotPay { .. }), "{message}");
        assert!(
            message.contains("rank") && message.contains("predict"),
            "{message}"
        );
    }

    #[test]
    fn a_predictor_far_below_its_targets_is_refused() {
        let quality = Quality {
            threshold: 0.0,
            recall: 0.93,
            recall_error: 0.01,
            contribution_recall: Some(0.985),
            precision: 0.5,
            predicted_density: 0.2,
            density: 0.1,
            tokens: 500,
        };
        assert!(quality.falls_short(SETTINGS.targets));
        assert!(!is_far_short(&quality, SETTINGS.targets));
        let far = |recall: f64, contribution: f64| Quality {
            recall,
            contribution_recall: Some(contribution),
            ..quality
        };
        assert!(is_far_short(&far(0.88, 0.985), SETTINGS.targets));
        assert!(is_far_short(&far(0.93, 0.96), SETTINGS.targets));
    }

    #[test]
    fn a_recall_from_few_held_out_tokens_is_uncertain() {
        let few = Planted {
            tokens: [2000, 40],
            ..EASY
        };
        let (_, quality) = make(&planted(few, 1), SETTINGS).unwrap().unwrap();
        assert!(quality.recall_error > 0.02, "{quality:?}");
        let none = Planted {
            tokens: [2000, 10],
            ..EASY
        };
        let error = make(&planted(none, 1), SETTINGS).err().unwrap();
        assert!(error.to_string().contains("10 held-out"), "{error}");
    }
}
