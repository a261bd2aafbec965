//! Thresholds and sign bits against the reference engine, whose neurons are masked by the
//! definitions; and the fall back of layers that leave their band.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::{collections::BTreeMap, path::Path};

use candle_core::{Device, Tensor};
use golden::Golden;
use packing::pack_bundle;
use powerinfer_artifact::{
    plan::{Plan, Policy, Score, Threshold},
    predictor_file::{PredictorFile, ScoreVectors, score_names},
    random::Random,
    tensor_file::Dtype,
    tensor_writer::TensorSource,
};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LanguageModel, LayerWeight, Weight};
use powerinfer_reference::{FeedForward, FfnObservation, FfnObserver, ReferenceModel};
use powerinfer_runtime::{DRIFT_WINDOW, Engine, Options, SingleSession, Threads, Verification};
use powerinfer_tensor::Format;
use predictor_files::{insert_signs, summary, write_predictors};

/// Gated and plain FFNs, with and without zeros and biases.
const MODELS: [&str; 5] = [
    "llama-silu",
    "gemma",
    "phi",
    "llama-relu-gqa",
    "falcon-rw-alibi",
];

/// The policy of a layer, and its parameters.
struct Layer {
    vectors: ScoreVectors,
    /// Signs of the gate, row after row.
    negative: Vec<bool>,
    agreements: u32,
}

/// Something to choose with, at random but with the true constant.
fn layers(checkpoint: &Checkpoint) -> Vec<Layer> {
    let config = checkpoint.config();
    let mut random = Random::new(11);
    let layer = |layer| {
        let neurons = config.ffn_size;
        let positive = |random: &mut Random| -> Vec<f32> {
            (0..neurons)
                .map(|_| 0.5 + random.normal().abs() as f32)
                .collect()
        };
        let gate_scale = positive(&mut random);
        let contribution_scale = positive(&mut random);
        let centre: Vec<f32> = (0..neurons).map(|_| 0.1 * random.normal() as f32).collect();
        let ffn = FeedForward::load(checkpoint, layer).unwrap();
        let centres = Tensor::from_slice(&centre, (1, neurons), &Device::Cpu).unwrap();
        let offset = ffn.down_unbiased(&centres).unwrap();
        let gate = checkpoint
            .read(Weight::Layer(layer, LayerWeight::Gate))
            .unwrap();
        Layer {
            vectors: ScoreVectors {
                gate_scale,
                contribution_scale,
                centre,
                offset: offset.flatten_all().unwrap().to_vec1().unwrap(),
            },
            negative: gate.iter().map(|value| value.is_sign_negative()).collect(),
            agreements: config.hidden_size as u32 / 2 + 1,
        }
    };
    (0..config.layer_count).map(layer).collect()
}

/// Writes what `layers` say.
fn write(checkpoint: &Checkpoint, layers: &[Layer], folder: &Path) -> PredictorFile {
    let numbers = |values: &[f32]| {
        let bytes = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        TensorSource::owned(Dtype::F32, vec![values.len()], bytes)
    };
    let mut tensors = BTreeMap::new();
    let mut summaries = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let vectors = &layer.vectors;
        let all = [
            &vectors.gate_scale,
            &vectors.contribution_scale,
            &vectors.centre,
            &vectors.offset,
        ];
        for (name, values) in score_names(index).into_iter().zip(all) {
            tensors.insert(name, numbers(values));
        }
        insert_signs(&mut tensors, checkpoint, index);
        summaries.push(summary(index, layer.agreements, Score::Gate, false));
    }
    write_predictors(checkpoint, &[], &summaries, &tensors, folder)
}

/// A runtime whose every layer follows `policy`, neurons in reverse order and half of them hot.
fn runtime(
    checkpoint: &Checkpoint,
    layers: &[Layer],
    policy: Policy,
    threshold: Option<Threshold>,
    folder: &Path,
) -> SingleSession {
    let config = checkpoint.config();
    let predictors = write(checkpoint, layers, folder);
    let (count, neurons) = (config.layer_count, config.ffn_size);
    let mut plan = Plan::unplaced(count, neurons, policy, config.context_length);
    for layer in &mut plan.layers {
        layer.threshold = threshold;
        layer.hot_count = neurons / 2;
    }
    plan.totals.hot_count = (count * (neurons / 2)) as u64;
    let order = (0..neurons as u32).rev();
    let out = folder.join("bundle");
    let bundle = pack_bundle(
        checkpoint,
        order,
        Some(&predictors),
        plan,
        Format::F32,
        &out,
    );
    let options = Options {
        threads: Threads::new(Isa::detect().unwrap(), 2).unwrap(),
        policy: None,
    };
    SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap()
}

/// Masks each FFN of the reference engine by the definitions.
struct Masking<'a> {
    layers: &'a [Layer],
    threshold: Option<Threshold>,
    /// Neurons seen, and those computed.
    counts: (usize, usize),
}

impl FfnObserver for Masking<'_> {
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        let Layer {
            vectors,
            negative,
            agreements,
        } = &self.layers[observation.layer];
        let (_, neurons) = observation.product.dims2()?;
        let rows = |tensor: &Tensor| tensor.to_vec2::<f32>();
        let (inputs, activations) = (rows(observation.input)?, rows(observation.activation)?);
        let mut out = Vec::new();
        for ((x, activation), product) in inputs
            .iter()
            .zip(&activations)
            .zip(rows(observation.product)?)
        {
            for neuron in 0..neurons {
                let (gate, h) = (activation[neuron].abs(), product[neuron]);
                let kept = match self.threshold {
                    Some(threshold) => {
                        let centre = if threshold.centred {
                            vectors.centre[neuron]
                        } else {
                            0.0
                        };
                        let score = match threshold.score {
                            Score::Gate => gate,
                            Score::WeightedGate => gate * vectors.gate_scale[neuron],
                            Score::Contribution => {
                                (h - centre).abs() * vectors.contribution_scale[neuron]
                            }
                        };
                        score >= threshold.value
                    }
                    None => {
                        let row = &negative[neuron * x.len()..][..x.len()];
                        let agree = row.iter().zip(x);
                        let agree = agree.filter(|(row, x)| **row == x.is_sign_negative());
                        agree.count() >= *agreements as usize
                    }
                };
                self.counts.0 += 1;
                self.counts.1 += usize::from(kept);
                let centred = self.threshold.is_some_and(|threshold| threshold.centred);
                out.push(match kept {
                    true => h,
                    false if centred => vectors.centre[neuron],
                    false => 0.0,
                });
            }
        }
        Tensor::from_vec(out, observation.product.dims2()?, &Device::Cpu).map(Some)
    }
}

#[test]
fn policies_are_what_their_definitions_say() {
    for name in MODELS {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let layers = layers(&checkpoint);
        let reference = ReferenceModel::load(&checkpoint).unwrap();
        let prompt = golden.ids("p17.input_ids");
        let threshold = |score, centred, value| {
            Some(Threshold {
                score,
                centred,
                value,
                error: 0.1,
            })
        };
        let cases = [
            (Policy::Threshold, threshold(Score::Gate, false, 0.03)),
            (
                Policy::Threshold,
                threshold(Score::WeightedGate, false, 0.04),
            ),
            (
                Policy::Threshold,
                threshold(Score::Contribution, false, 0.02),
            ),
            (Policy::Threshold, threshold(Score::Contribution, true, 0.1)),
            (Policy::SignBit, None),
        ];
        for (policy, threshold) in cases {
            let mut observer = Masking {
                layers: &layers,
                threshold,
                counts: (0, 0),
            };
            let want = reference.run(&prompt, &mut observer).unwrap();
            let want: Vec<f32> = want.flatten_all().unwrap().to_vec1().unwrap();
            let share = observer.counts.1 as f64 / observer.counts.0 as f64;
            let what = format!("{name} {policy} {threshold:?} {share:.2}");
            assert!(
                (0.02..0.98).contains(&share),
                "something is left out: {what}"
            );
            let folder = tempfile::tempdir().unwrap();
            let mut model = runtime(&checkpoint, &layers, policy, threshold, folder.path());
            let together = model.forward(&prompt).unwrap();
            golden.assert_close(&together, &want, &what);
            // A prompt's tokens have the bits of one at a time.
            model.reset();
            let mut alone = Vec::new();
            for token in &prompt {
                alone.extend(model.forward(std::slice::from_ref(token)).unwrap());
            }
            assert_eq!(alone, together, "{what}");
        }
    }
}

#[test]
fn a_layer_outside_its_band_is_computed_in_full_from_then_on() {
    let golden = Golden::open("llama-silu");
    let checkpoint = golden.checkpoint();
    let layers = layers(&checkpoint);
    let threshold = Some(Threshold {
        score: Score::Gate,
        centred: false,
        value: 0.03,
        error: 0.1,
    });
    let folder = tempfile::tempdir().unwrap();
    let count = checkpoint.config().layer_count;
    let mut model = runtime(
        &checkpoint,
        &layers,
        Policy::Threshold,
        threshold,
        folder.path(),
    );
    // Layer 0 may be as far off as it likes.
    let mut bands = vec![1e-6; count];
    bands[0] = f64::INFINITY;
    model.verify(Verification::of_decoded(2, count).within(bands, Policy::Dense));
    let tokens = 2 * DRIFT_WINDOW + 5;
    for token in 0..tokens as u32 {
        model.forward_last(&[token % 7]).unwrap();
    }
    let found = model.observers().verification().unwrap();
    assert_eq!(found.tokens(), tokens.div_ceil(2));
    let mut alarmed: Vec<usize> = found.alarms().iter().map(|alarm| alarm.layer).collect();
    alarmed.sort_unstable();
    assert_eq!(alarmed, (1..count).collect::<Vec<_>>());
    assert!(
        found
            .alarms()
            .iter()
            .all(|alarm| alarm.position == 2 * (DRIFT_WINDOW - 1))
    );
    let recall = found.layers()[0].contribution_recall();
    assert!((0.1..1.0).contains(&recall), "{recall}");
    let last = found.layers()[1].errors()[DRIFT_WINDOW..].iter();
    assert!(last.clone().count() > 0 && last.clone().all(|error| *error == 0.0));
    assert_eq!(model.policies()[0], Policy::Threshold);
    assert!(
        model.policies()[1..]
            .iter()
            .all(|policy| *policy == Policy::Dense)
    );
}
