//! Policies which need predictors, signs or thresholds, against the CPU alone.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use powerinfer_artifact::{
    plan::{Policy, Score, Threshold},
    predictor_file::{PredictorFile, PredictorInput, score_names},
    random::Random,
    tensor_file::Dtype,
    tensor_writer::TensorSource,
};
use powerinfer_emulator::{GraphCapture, Order, test_emulator};
use powerinfer_model::{Checkpoint, LanguageModel};
use powerinfer_runtime::{ActivationFormat, SingleSession};
use powerinfer_tensor::Format;

use crate::{
    assert_alike, assert_near,
    case::Case,
    placement::{ALL, PLACEMENTS},
    predictor_files::{Network, insert_signs, summary, write_networks, write_predictors},
};

/// Writes random networks, whose predictions depend on their input.
pub(crate) fn write_random_networks(
    checkpoint: &Checkpoint,
    input: PredictorInput,
    format: Format,
    folder: &Path,
) -> PredictorFile {
    let config = checkpoint.config();
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let mut random = Random::new(7);
    let mut normal =
        |count: usize| -> Vec<f32> { (0..count).map(|_| random.normal() as f32).collect() };
    let networks: Vec<Network> = (0..config.layer_count)
        .map(|layer| {
            let rank = [33, 40][layer % 2];
            Network {
                rank,
                a: normal(rank * hidden),
                b: normal(neurons * rank),
                bias: normal(neurons),
            }
        })
        .collect();
    write_networks(checkpoint, &networks, format, input, folder)
}

#[test]
fn predictors_on_either_device_serve_both() {
    // One model of each kind of block.
    for name in [
        "llama-relu-gqa",
        "opt-preln",
        "falcon-new-relu",
        "falcon-old-7b",
        "opt-postln-proj",
    ] {
        let mut case = Case::open(name);
        case.policy = Policy::Predicted;
        // Only the CPU rounds the inputs of products, which would change predictions near the threshold.
        case.activations = ActivationFormat::F32;
        for (input, format) in [
            (PredictorInput::Normed, Format::F32),
            (PredictorInput::Residual, Format::F32),
            (PredictorInput::Normed, Format::Q8_0),
        ] {
            let folder = case.folder.path();
            let predictors = write_random_networks(&case.checkpoint, input, format, folder);
            case.predictors = Some(predictors);
            let mut host = case.on_host(&[ALL]);
            // The last copies cold neurons, also of a layer without a hot one.
            for (placements, copies) in [
                (&PLACEMENTS[1..2], false),
                (&PLACEMENTS[4..6], false),
                (&PLACEMENTS[1..6], true),
            ] {
                case.copies_cold_neurons = copies;
                let Some(mut device) = case.on_device(Order::Shuffled(9), placements) else {
                    return;
                };
                let what = format!("{name} {input:?} {format} {placements:?}");
                assert_alike(&mut host, &mut device, &case.prompt, 1e-2, &what);
            }
        }
    }
}

/// Writes random scores and centres, and the signs of the gates, more than half of which must agree.
pub(crate) fn write_scores_and_signs(checkpoint: &Checkpoint, folder: &Path) -> PredictorFile {
    let config = checkpoint.config();
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let mut random = Random::new(12);
    let mut tensors = BTreeMap::new();
    let mut summaries = Vec::new();
    for layer in 0..config.layer_count {
        let lengths = [neurons, neurons, neurons, hidden];
        for (name, length) in score_names(layer).into_iter().zip(lengths) {
            let numbers = (0..length).map(|_| 0.05 + random.normal().abs() as f32);
            let bytes = numbers.flat_map(f32::to_le_bytes).collect();
            tensors.insert(name, TensorSource::owned(Dtype::F32, vec![length], bytes));
        }
        insert_signs(&mut tensors, checkpoint, layer);
        let agreements = hidden as u32 / 2 + 1;
        summaries.push(summary(layer, agreements, Score::Gate, false));
    }
    write_predictors(checkpoint, &[], &summaries, &tensors, folder)
}

#[test]
fn signs_and_thresholds_choose_the_same_neurons_on_device_and_host() {
    let scores = [
        (Score::Gate, false),
        (Score::WeightedGate, false),
        (Score::Contribution, false),
        (Score::Contribution, true),
    ];
    let rules = scores.map(|(score, centred)| Threshold {
        score,
        centred,
        value: 0.02,
        error: 0.0,
    });
    let rules = rules.map(|threshold| (Policy::Threshold, Some(threshold)));
    let rules = [&[(Policy::SignBit, None)][..], &rules].concat();
    for name in ["llama-silu", "gemma", "falcon-rw-alibi"] {
        let mut case = Case::open(name);
        let predictors = write_scores_and_signs(&case.checkpoint, case.folder.path());
        case.predictors = Some(predictors);
        let long = case.prompt.iter().copied().cycle().take(70).collect();
        for (copies, placements, prompt) in [
            (false, &PLACEMENTS[1..2], &case.prompt.clone()),
            (true, &PLACEMENTS[1..3], &case.prompt.clone()),
            // The parts that the device lacks are copied to it.
            (true, &PLACEMENTS[4..], &long),
        ] {
            case.copies_cold_neurons = copies;
            for &(policy, threshold) in &rules {
                (case.policy, case.threshold) = (policy, threshold);
                let Some(mut device) = case.on_device(Order::Forward, placements) else {
                    return;
                };
                let mut host = case.on_host(placements);
                let what = format!("{name} {policy} {threshold:?}, copies: {copies}");
                assert_alike(&mut host, &mut device, prompt, 1e-2, &what);
            }
        }
    }
}

#[test]
fn active_neurons_are_those_of_the_host_alone() {
    let mut case = Case::open("llama-relu-gqa");
    let (normed, folder) = (PredictorInput::Normed, tempfile::tempdir().unwrap());
    let networks = write_random_networks(&case.checkpoint, normed, Format::F32, folder.path());
    case.predictors = Some(networks);
    for policy in [Policy::Exact, Policy::Predicted] {
        case.policy = policy;
        for placement in PLACEMENTS {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let device = Arc::new(device.with_capture(GraphCapture::Works));
            let mut device = case.with(device, &[placement]);
            let observed = |model: &mut SingleSession| {
                model.forward(&case.prompt[..4]).unwrap();
                // Tokens that are recorded, observed and replayed.
                let mut logits = model.forward(&case.prompt[4..5]).unwrap();
                model.observers_mut().list_active(true);
                logits.extend(model.forward(&case.prompt[5..6]).unwrap());
                let mut activity = model.observers_mut().take_active();
                model.observers_mut().list_active(false);
                logits.extend(model.forward(&case.prompt[6..7]).unwrap());
                for token in activity.iter_mut().flatten() {
                    token.sort_unstable();
                }
                (activity, logits)
            };
            let (found, logits) = observed(&mut device);
            let (want, host_logits) = observed(&mut case.on_host(&[placement]));
            assert!(want.iter().all(|layer| !layer[0].is_empty()), "{policy:?}");
            assert_eq!(found, want, "{policy:?}, {placement:?}");
            assert_near(&logits, &host_logits, 1e-4, "observing changes nothing");
        }
    }
}
