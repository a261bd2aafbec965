//! Inputs of projections that are left out: nothing left out is the dense model, and what is left
//! out is neither read nor seen.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;

use golden::Golden;
use packing::pack_bundle;
use powerinfer_artifact::plan::{InputThresholds, Plan, Policy};
use powerinfer_bundle::weight_bytes;
use powerinfer_kernels::Isa;
use powerinfer_model::{LanguageModel, LayerWeight, Weight};
use powerinfer_runtime::{Engine, Options, SingleSession, Threads};
use powerinfer_tensor::Format;

/// Gated and plain FFNs, blocks one after the other and side by side, with and without biases.
const MODELS: [&str; 5] = ["llama-silu", "gemma", "phi", "qwen3-qknorm", "opt-preln"];

const NOTHING: InputThresholds = InputThresholds {
    share: 0.0,
    attention: 0.0,
    output: 0.0,
    ffn: Some(0.0),
};

/// A dense model, neurons in reverse order and some of them hot, stored as `thresholds` have it.
fn runtime(
    golden: &Golden,
    quant: Format,
    thresholds: Option<InputThresholds>,
    policy: Option<Policy>,
) -> SingleSession {
    let checkpoint = golden.checkpoint();
    let config = checkpoint.config();
    let (count, neurons) = (config.layer_count, config.ffn_size);
    let mut plan = Plan::unplaced(count, neurons, Policy::Dense, config.context_length);
    for layer in &mut plan.layers {
        layer.input_thresholds = thresholds;
        layer.hot_count = 50;
    }
    plan.totals.hot_count = count as u64 * 50;
    let folder = tempfile::tempdir().unwrap();
    let order = (0..neurons as u32).rev();
    let out = folder.path().join("bundle");
    let bundle = pack_bundle(&checkpoint, order, None, plan, quant, &out);
    let threads = Threads::new(Isa::detect().unwrap(), 2).unwrap();
    // The files stay mapped after the folder is gone.
    SingleSession::new(Engine::new(bundle, Options { threads, policy }).unwrap()).unwrap()
}

/// Thresholds that `share` of the inputs of each layer stay below on `prompt`.
fn calibrated(golden: &Golden, share: f64, prompt: &[u32]) -> Vec<InputThresholds> {
    let forced = Some(Policy::Dense);
    let mut model = runtime(golden, Format::F32, None, forced);
    model.observers_mut().count_inputs();
    model.forward_last(prompt).unwrap();
    let found = model.observers_mut().take_input_magnitudes();
    found.iter().map(|layer| layer.thresholds(share)).collect()
}

/// The model that follows `thresholds`, layer by layer, its matrices by input or by output.
fn skipping(
    golden: &Golden,
    quant: Format,
    thresholds: &[InputThresholds],
    by_input: bool,
) -> SingleSession {
    let stored = by_input.then_some(NOTHING);
    let mut model = runtime(golden, quant, stored, None);
    for (layer, thresholds) in thresholds.iter().enumerate() {
        model
            .experiments()
            .set_input_thresholds(layer, Some(*thresholds));
    }
    model
}

#[test]
fn nothing_left_out_is_the_standard_implementation() {
    for name in MODELS {
        let golden = Golden::open(name);
        let planned = None;
        for policy in [planned, Some(Policy::Dense)] {
            let mut model = runtime(&golden, Format::F32, Some(NOTHING), policy);
            for prompt in ["p17", "p70"] {
                model.reset();
                let ids = golden.ids(&format!("{prompt}.input_ids"));
                let logits = model.forward(&ids).unwrap();
                golden.assert_logits(&logits, prompt, &format!("{name} {prompt} {policy:?}"));
            }
        }
    }
}

#[test]
fn a_forced_policy_leaves_no_input_out() {
    for (name, policy) in [
        ("llama-silu", Policy::Dense),
        ("llama-relu-gqa", Policy::Exact),
        ("opt-preln", Policy::Exact),
    ] {
        let golden = Golden::open(name);
        let thresholds = InputThresholds {
            share: 0.9,
            attention: 1.0,
            output: 1.0,
            ffn: Some(1.0),
        };
        let forced = Some(policy);
        let mut model = runtime(&golden, Format::F32, Some(thresholds), forced);
        let logits = model.forward(&golden.ids("p17.input_ids")).unwrap();
        golden.assert_close(&logits, &golden.floats("p17.logits"), name);
        let mut model = runtime(&golden, Format::F32, Some(thresholds), None);
        assert_ne!(model.forward(&golden.ids("p17.input_ids")).unwrap(), logits);
    }
}

#[test]
fn what_is_left_out_counts_as_nothing_in_either_layout() {
    for name in MODELS {
        let golden = Golden::open(name);
        let prompt = golden.ids("p17.input_ids");
        let thresholds = calibrated(&golden, 0.3, &prompt);
        let [by_input, by_output] = [true, false].map(|by_input| {
            let mut model = skipping(&golden, Format::F32, &thresholds, by_input);
            model.forward(&prompt).unwrap()
        });
        golden.assert_close(&by_input, &by_output, name);
        assert_ne!(by_input, golden.floats("p17.logits"));
    }
}

#[test]
fn tokens_of_a_prompt_have_the_bits_of_one_at_a_time() {
    for name in MODELS {
        let golden = Golden::open(name);
        let prompt = golden.ids("p70.input_ids");
        let thresholds = calibrated(&golden, 0.4, &prompt);
        for (quant, by_input) in [
            (Format::F32, true),
            (Format::Q8_0, true),
            (Format::Q4_0, true),
            (Format::Q8_0, false),
        ] {
            let mut model = skipping(&golden, quant, &thresholds, by_input);
            let together = model.forward(&prompt).unwrap();
            model.reset();
            let mut alone = Vec::new();
            for token in &prompt {
                alone.extend(model.forward(std::slice::from_ref(token)).unwrap());
            }
            assert_eq!(alone, together, "{name} {quant}");
        }
    }
}

#[test]
fn channels_that_are_left_out_are_not_read() {
    for (name, quant) in [("llama-silu", Format::Q8_0), ("opt-preln", Format::F32)] {
        let golden = Golden::open(name);
        let prompt = golden.ids("p70.input_ids");
        let checkpoint = golden.checkpoint();
        let config = checkpoint.config();
        let read = |share: f64| {
            let thresholds = calibrated(&golden, share, &prompt);
            let mut model = skipping(&golden, quant, &thresholds, true);
            for token in &prompt {
                model.forward_last(&[*token]).unwrap();
            }
            model.observers_mut().take_statistics().bytes_per_token()
        };
        use LayerWeight::{Gate, Key, Output, Query, Up, Value};
        let skipped: u64 = config
            .weights()
            .into_iter()
            .filter(|weight| {
                matches!(
                    weight,
                    Weight::Layer(_, Query | Key | Value | Output | Gate | Up)
                )
            })
            .map(|weight| weight_bytes(config, weight, quant))
            .sum();
        let all = read(1e-9);
        for share in [0.1, 0.4, 0.8] {
            let saved = (all - read(share)) / skipped as f64;
            // What is left out changes the inputs of later layers a little, and their share with it.
            assert!((saved - share).abs() < 0.1, "{name}: {saved} of {share}");
        }
    }
}
