//! Trains the predictor of a layer, as wide as pays.

use powerinfer_artifact::{ByteSize, Digest, Progress, predictor_file::BIAS};
use powerinfer_kernels::Isa;
use powerinfer_profile::{Profile, Traces};
use powerinfer_tensor::Format;

use crate::{
    PredictorError, Targets,
    calibrate::{Quality, calibrate},
    learn::{Schedule, learn},
    loss::MissCost,
    network::{Network, Weights},
    verdict::{Refusal, check_samples, is_far_short, note_unsure},
};

/// Share of the bytes that another rank must save to be worth the training.
const WORTHWHILE: f64 = 0.01;
/// Ranks that are tried, each about half as much again as the one before. Rows of B are stored in
/// blocks of 32, so below that only A gets smaller.
const LADDER: [usize; 16] = [
    16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
];

/// How the rank of a layer's predictor is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sizing {
    /// The rank at which predictor and predicted neurons together are cheapest to read.
    #[default]
    Evidence,
    /// As the paper does it: begun at the layer's sparsity, adjusted by its skewness, until the
    /// neurons' recall is what is asked for.
    Paper,
}

impl Sizing {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Evidence, Self::Paper];

    /// The name in headers and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Evidence => "evidence",
            Self::Paper => "paper",
        }
    }
}

/// What shapes trained predictors, beside the profile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// What must be predicted on held-out tokens.
    pub targets: Targets,
    /// Most bytes of a layer's predictor.
    pub layer_bytes: u64,
    /// How the rank is found.
    pub sizing: Sizing,
    /// Most optimiser steps per network.
    pub steps: usize,
    /// Steps without progress after which training comes to its end.
    pub patience: usize,
    /// Format the weights of the neurons will have, which says what a neuron costs.
    pub quant: Format,
    /// Matrices that each neuron has a row of.
    pub matrices_per_neuron: usize,
    /// Format of the predictors' own weights.
    pub weights: Format,
    /// Seed of initialisation and batches.
    pub seed: u64,
}

/// What the profile knows of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer {
    pub(crate) layer: usize,
    /// Share of the neurons that fire on a token.
    pub(crate) density: f64,
    /// Share of the neurons that carry 80 % of the activations.
    pub(crate) most: f64,
}

/// Trains the predictor of `layer` within the byte budget; none, and a word why, where it is better
/// off without.
pub(crate) fn best_network(
    layer: usize,
    profile: &Profile,
    settings: Settings,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<Option<(Network, Quality)>, PredictorError> {
    let traces = profile.traces(layer)?;
    let summary = &profile.document().layers[layer];
    let known = Layer {
        layer,
        density: 1.0 - summary.sparsity,
        most: summary.neurons_for.most,
    };
    match best_of_samples(known, &traces, settings, isa, progress)? {
        Ok(best) => Ok(Some(best)),
        Err(refusal) => {
            progress.note(&format!(
                "layer {layer} gets no predictor and will run `exact`: {refusal}"
            ));
            Ok(None)
        }
    }
}

/// The same from samples, which are checked.
pub(crate) fn best_of_samples(
    known: Layer,
    traces: &Traces,
    settings: Settings,
    isa: Isa,
    progress: &dyn Progress,
) -> Result<Result<(Network, Quality), Refusal>, PredictorError> {
    let layer = known.layer;
    check_samples(layer, traces)?;
    let (training, held_out) = (traces.training.tokens(), traces.held_out.tokens());
    let counts = traces.training.counts();
    let fired: u64 = counts.iter().sum();
    if fired == 0 || traces.held_out.counts().iter().all(|count| *count == 0) {
        return Ok(Err(Refusal::NeverFires { training, held_out }));
    }
    let (hidden, neurons) = (traces.training.hidden_size, counts.len());
    let density = fired as f64 / (training * neurons) as f64;
    let bytes = |rank: usize| {
        let row = settings.weights.row_bytes(rank) + BIAS.row_bytes(1);
        (rank * settings.weights.row_bytes(hidden) + neurons * row) as u64
    };
    // What is saved at the very best: the gates of those that do not fire.
    let all_gates = (neurons * settings.quant.row_bytes(hidden)) as f64;
    if bytes(LADDER[0]) as f64 >= (1.0 - density) * all_gates {
        return Ok(Err(Refusal::AlwaysFires { density }));
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
        settings,
        isa,
        progress,
        ladder,
        log_odds: log_odds(&counts, training),
        cost: miss_cost(settings.sizing, density),
    };
    let best = match settings.sizing {
        Sizing::Evidence => search.cheapest()?,
        Sizing::Paper => search.as_the_paper_does()?,
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
    note_unsure(layer, &quality, progress);
    Ok(Ok((best.network, quality)))
}

/// Log-odds of each neuron's firing, with one imagined firing and one silence.
fn log_odds(counts: &[u64], tokens: usize) -> Vec<f32> {
    let odds = counts.iter().map(|count| {
        let (fired, silent) = (*count as f64 + 1.0, (tokens as u64 - count) as f64 + 1.0);
        (fired / silent).ln() as f32
    });
    odds.collect()
}

/// What missing a neuron costs where this share of them fires.
fn miss_cost(sizing: Sizing, density: f64) -> MissCost {
    let equal_shares = (1.0 - density) / density.max(1e-4);
    match sizing {
        // Between equal weights (1) and equal shares of the loss: their geometric mean.
        Sizing::Evidence => MissCost::ByContribution(equal_shares.sqrt().clamp(1.0, 30.0) as f32),
        Sizing::Paper => MissCost::Even(equal_shares.clamp(1.0, 100.0) as f32),
    }
}

/// A network that was tried.
pub(crate) struct Tried {
    weights: Weights,
    pub(crate) network: Network,
    quality: Quality,
    /// Bytes a token reads.
    cost: f64,
}

/// The search for one layer's predictor.
pub(crate) struct Search<'a> {
    pub(crate) known: Layer,
    pub(crate) traces: &'a Traces,
    pub(crate) settings: Settings,
    pub(crate) isa: Isa,
    pub(crate) progress: &'a dyn Progress,
    /// Ranks within the byte budget, at least one, upwards.
    pub(crate) ladder: Vec<usize>,
    log_odds: Vec<f32>,
    cost: MissCost,
}

impl Search<'_> {
    /// Where on the ladder to begin: the more neurons fire, the more there is to predict.
    pub(crate) fn guess(&self) -> usize {
        let rank = self.known.density * self.traces.training.hidden_size as f64;
        let guess = self.ladder.partition_point(|tried| (*tried as f64) < rank);
        guess.min(self.ladder.len() - 1)
    }

    /// Looks for the rank at which a token reads least, predictor and neurons together: from a
    /// first guess upwards for as long as that pays, else downwards.
    fn cheapest(&mut self) -> Result<Tried, PredictorError> {
        let start = self.guess();
        let mut best = self.try_rank(self.ladder[start], None)?;
        for direction in [1isize, -1] {
            let mut place = start;
            let began_at = best.cost;
            while let Some(next) = place
                .checked_add_signed(direction)
                .filter(|n| *n < self.ladder.len())
            {
                let tried = self.try_rank(self.ladder[next], Some(&best))?;
                if tried.cost >= (1.0 - WORTHWHILE) * best.cost {
                    break;
                }
                (best, place) = (tried, next);
            }
            if best.cost < began_at {
                break; // wider paid, so narrower does not
            }
        }
        Ok(best)
    }

    /// Bytes of a layer's neurons that a token reads: the gate of those predicted, and the rest of
    /// those that the gate leaves alive.
    fn bytes_read(&self, predicted: f64, alive: f64) -> f64 {
        let samples = &self.traces.training;
        let row = self.settings.quant.row_bytes(samples.hidden_size) as f64;
        let others = (self.settings.matrices_per_neuron - 1) as f64;
        samples.active.neurons() as f64 * (predicted + others * alive) * row
    }

    /// Trains and judges a network of `rank`, from a trained one of another rank where there is
    /// one, which takes half the steps.
    pub(crate) fn try_rank(
        &mut self,
        rank: usize,
        from: Option<&Tried>,
    ) -> Result<Tried, PredictorError> {
        let (settings, layer) = (self.settings, self.known.layer);
        let numbers = [settings.seed, layer as u64, rank as u64].map(u64::to_le_bytes);
        let seed = Digest::of_parts(numbers.iter().map(|bytes| &bytes[..])).leading_bits();
        let samples = &self.traces.training;
        let (start, steps) = match from {
            None => {
                let bias = self.log_odds.clone();
                let start = Weights::random(samples.hidden_size, bias, rank, seed);
                (start, settings.steps)
            }
            Some(tried) => {
                let start = tried.weights.at_rank(rank, seed);
                (start, settings.steps.div_ceil(2))
            }
        };
        let schedule = Schedule {
            steps,
            patience: settings.patience,
            seed,
            layer,
            cost: self.cost,
        };
        let learnt = learn(&start, samples, schedule, || {
            Ok(self.progress.advance(0)?)
        })?;
        let network = learnt.weights.pack(settings.weights);
        let quality = calibrate(&network, &self.traces.held_out, settings.targets, self.isa);
        let predicted = quality.predicted_density;
        let cost =
            network.bytes() as f64 + self.bytes_read(predicted, quality.density * quality.recall);
        self.progress.detail(&format!(
            "layer {layer} rank {rank}: {} steps, loss {:.4}; {} bytes, predicts {:.1} % of the neurons, a token reads {cost:.0} bytes",
            learnt.steps,
            learnt.loss,
            network.bytes(),
            100.0 * predicted,
        ));
        Ok(Tried {
            weights: learnt.weights,
            network,
            quality,
            cost,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use half::bf16;
    use powerinfer_artifact::{progress::Interrupted, random::Random};

    use super::*;
    use crate::planted::{EASY, Planted, planted};

    const SETTINGS: Settings = Settings {
        targets: Targets {
            recall: 0.95,
            contribution_recall: 0.99,
        },
        layer_bytes: 100_000,
        sizing: Sizing::Evidence,
        steps: 300,
        patience: 60,
        quant: Format::F32,
        matrices_per_neuron: 3,
        weights: Format::Q8_0,
        seed: 0,
    };
    const KNOWN: Layer = Layer {
        layer: 7,
        density: 0.1,
        most: 0.2,
    };

    /// Keeps the notes.
    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Progress for Notes {
        fn begin(&self, _title: &str, _total: u64, _unit: &'static str) {}
        fn advance(&self, _count: u64) -> Result<(), Interrupted> {
            Ok(())
        }
        fn note(&self, line: &str) {
            self.0.lock().unwrap().push(line.to_owned());
        }
        fn end(&self) {}
    }

    type Made = Result<Result<(Network, Quality), Refusal>, PredictorError>;

    fn make(traces: &Traces, settings: Settings) -> (Made, Vec<String>) {
        let notes = Notes::default();
        let made = best_of_samples(KNOWN, traces, settings, Isa::SCALAR, &notes);
        (made, notes.0.into_inner().unwrap())
    }

    #[track_caller]
    fn refusal(traces: &Traces, settings: Settings) -> Refusal {
        match make(traces, settings).0.unwrap() {
            Ok((_, quality)) => panic!("{quality:?}"),
            Err(refusal) => refusal,
        }
    }

    #[test]
    fn an_easy_layer_gets_what_was_asked_for() {
        let (made, notes) = make(&planted(EASY, 1), SETTINGS);
        let (network, quality) = made.unwrap().unwrap();
        assert!(!quality.falls_short(SETTINGS.targets), "{quality:?}");
        assert!(quality.predicted_density < 0.2, "{quality:?}");
        assert!(network.bytes() as u64 <= SETTINGS.layer_bytes);
        assert_eq!(notes, [""; 0]);
    }

    #[test]
    fn the_papers_way_is_accurate_too() {
        let settings = Settings {
            sizing: Sizing::Paper,
            ..SETTINGS
        };
        let (_, quality) = make(&planted(EASY, 1), settings).0.unwrap().unwrap();
        assert!(quality.recall >= 0.95, "{quality:?}");
    }

    #[test]
    fn a_layer_in_which_nobody_fires_gets_none() {
        let silent = Planted {
            threshold: 1e9,
            ..EASY
        };
        let refusal = refusal(&planted(silent, 1), SETTINGS);
        let expected = Refusal::NeverFires {
            training: 2000,
            held_out: 1000,
        };
        assert_eq!(refusal, expected);
        assert!(refusal.to_string().contains("no neuron fires"));
    }

    #[test]
    fn a_layer_in_which_all_fire_gets_none() {
        let lively = Planted {
            threshold: -1e9,
            ..EASY
        };
        let refusal = refusal(&planted(lively, 1), SETTINGS);
        assert_eq!(refusal, Refusal::AlwaysFires { density: 1.0 });
        assert!(refusal.to_string().contains("100.0 %"), "{refusal}");
    }

    #[test]
    fn numbers_that_are_none_are_an_error_that_says_where() {
        for part in powerinfer_profile::Part::ALL {
            let mut traces = planted(EASY, 1);
            let inputs = traces.part_mut(part).inputs.to_mut();
            inputs[17 * EASY.hidden + 5] = bf16::NAN;
            let error = make(&traces, SETTINGS).0.err().unwrap().to_string();
            for told in ["layer 7", "sample 17", part.name(), "NaN"] {
                assert!(error.contains(told), "{error}");
            }
        }
    }

    #[test]
    fn too_small_a_budget_is_told() {
        let settings = Settings {
            layer_bytes: 1000,
            ..SETTINGS
        };
        let refusal = refusal(&planted(EASY, 1), settings).to_string();
        for told in ["rank 16", "1000 B"] {
            assert!(refusal.contains(told), "{refusal}");
        }
    }

    #[test]
    fn what_cannot_be_predicted_gets_none() {
        // Who fires has to do with nothing.
        let mut random = Random::new(1);
        let mut traces = Traces::new(64, 512);
        for part in powerinfer_profile::Part::ALL {
            let samples = traces.part_mut(part);
            for _ in 0..500 {
                let input = (0..64).map(|_| bf16::from_f64(random.normal()));
                samples.inputs.to_mut().extend(input);
                let fired: Vec<f32> = (0..512).map(|_| f32::from(random.chance(10))).collect();
                samples.active.push(&fired);
            }
        }
        let refusal = refusal(&traces, SETTINGS);
        let told = refusal.to_string();
        assert!(matches!(refusal, Refusal::DoesNotPay { .. }), "{told}");
        assert!(told.contains("rank") && told.contains("predict"), "{told}");
    }

    #[test]
    fn what_misses_far_too_much_is_refused() {
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
    fn few_held_out_tokens_are_said_to_tell_little() {
        let few = Planted {
            tokens: [2000, 40],
            ..EASY
        };
        let (made, notes) = make(&planted(few, 1), SETTINGS);
        let (_, quality) = made.unwrap().unwrap();
        assert!(quality.recall_error > 0.02, "{quality:?}");
        assert_eq!(notes.len(), 1);
        for told in [
            "layer 7: 20 held-out tokens",
            "95 % confidence",
            "must be held out",
        ] {
            assert!(notes[0].contains(told), "{}", notes[0]);
        }
        let none = Planted {
            tokens: [2000, 10],
            ..EASY
        };
        let error = make(&planted(none, 1), SETTINGS).0.err().unwrap();
        assert!(error.to_string().contains("10 held-out"), "{error}");
    }
}
