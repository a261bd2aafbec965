//! A GPU and the CPU together against the goldens and against the CPU alone, whatever lives where.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use golden::{Golden, MODELS};
use packing::pack_bundle;
use powerinfer_artifact::{
    Hint,
    plan::{Device as Side, Plan, Policy, Score, Threshold},
    predictor_file::{PredictorFile, PredictorInput, score_names},
    random::Random,
    tensor_file::Dtype,
    tensor_writer::TensorSource,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_emulator::{GraphCapture, Order, test_device, test_emulator};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LanguageModel, greedy_token};
use powerinfer_runtime::{
    ActivationFormat, Options, Runtime, Sampler, SamplingSettings, SideTimes, Threads,
};
use powerinfer_tensor::{CacheFormat, Format};
use predictor_files::{Network, insert_signs, summary, write_networks, write_predictors};

/// What of a layer is on the GPU.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Share of the neurons, in quarters.
    quarters: usize,
    attention: Side,
    kv: Side,
    predictor: Side,
    head: Side,
}

const ALL: Place = Place {
    quarters: 4,
    attention: Side::Gpu,
    kv: Side::Gpu,
    predictor: Side::Gpu,
    head: Side::Gpu,
};

/// Every part on either side.
const PLACES: [Place; 6] = [
    ALL,
    Place { quarters: 2, ..ALL },
    Place {
        quarters: 0,
        head: Side::Cpu,
        ..ALL
    },
    Place {
        quarters: 4,
        kv: Side::Cpu,
        ..ALL
    },
    Place {
        quarters: 1,
        predictor: Side::Cpu,
        ..ALL
    },
    Place {
        quarters: 3,
        attention: Side::Cpu,
        kv: Side::Cpu,
        predictor: Side::Cpu,
        head: Side::Cpu,
    },
];

/// A plan with `places` for the layers in turn.
fn plan(
    checkpoint: &Checkpoint,
    places: &[Place],
    policy: Policy,
    threshold: Option<Threshold>,
) -> Plan {
    let config = checkpoint.config();
    let neurons = config.ffn_size;
    let mut plan = Plan::unplaced(config.layer_count, neurons, policy, config.context_length);
    for (layer, place) in plan.layers.iter_mut().zip(places.iter().cycle()) {
        // Not at the end of a word.
        layer.hot_count = (neurons * place.quarters / 4).min(neurons);
        layer.attention = place.attention;
        layer.kv = place.kv;
        layer.threshold = threshold;
        layer.predictor = Some(place.predictor);
    }
    plan.head = places[0].head;
    plan.budget.kv_cache = CacheFormat::F32;
    plan.totals.hot_count = plan.layers.iter().map(|layer| layer.hot_count as u64).sum();
    plan
}

fn options() -> Options {
    Options {
        threads: Threads::new(Isa::detect().unwrap(), 2).unwrap(),
        policy: None,
    }
}

fn bundle(
    checkpoint: &Checkpoint,
    plan: Plan,
    quant: Format,
    predictors: Option<&PredictorFile>,
    out: &Path,
) -> Bundle {
    let order = (0..checkpoint.config().ffn_size as u32).rev();
    pack_bundle(checkpoint, order, predictors, plan, quant, out)
}

/// Greedy tokens after `prompt`, with the logits they were taken from.
fn greedy(model: &mut Runtime, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<f32>) {
    model.reset();
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    let mut logits = model.forward_last(prompt).unwrap();
    for _ in 0..count {
        let token = greedy_token(&logits);
        tokens.push(token);
        all.extend(&logits);
        logits = model.forward_last(&[token]).unwrap();
    }
    (tokens, all)
}

/// Logits of all tokens, each run by itself.
fn one_by_one(model: &mut Runtime, tokens: &[u32]) -> Vec<f32> {
    let each = tokens.chunks(1);
    each.flat_map(|token| model.forward(token).unwrap())
        .collect()
}

#[test]
fn logits_are_those_of_the_standard_implementation() {
    for (index, name) in MODELS.iter().enumerate() {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let folder = tempfile::tempdir().unwrap();
        let prompt = golden.ids("p17.input_ids");
        // Each family in two places, all of them in turn; layers differ in the second.
        let places = [
            &[PLACES[index % 6]][..],
            &[PLACES[(index + 1) % 6], PLACES[(index + 3) % 6]],
        ];
        for (round, places) in places.into_iter().enumerate() {
            let Some(device) = test_device(Order::Shuffled(index as u16)) else {
                return;
            };
            let plan = plan(&checkpoint, places, Policy::Exact, None);
            let out = folder.path().join(format!("bundle-{round}"));
            let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
            let mut model = Runtime::with_device(bundle, options(), device).unwrap();
            let what = format!("{name} {places:?}");
            let want = golden.floats("p17.logits");
            if round == 0 {
                let (tokens, _) = greedy(&mut model, &prompt, 3);
                assert_eq!(tokens, golden.ids("p17.greedy_ids")[..3], "{what}");
            }
            model.reset();
            let first = &prompt[..8];
            let logits = model.forward(first).unwrap();
            golden.assert_close(&logits, &want[..logits.len()], &what);
        }
    }
}

#[test]
fn every_order_of_threads_gives_the_same_bits() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let mut first: Option<Vec<f32>> = None;
    for order in Order::SAMPLES {
        let Some(device) = test_device(order) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let plan = plan(&checkpoint, &PLACES[..2], Policy::Exact, None);
        let bundle = bundle(
            &checkpoint,
            plan,
            Format::Q4_0,
            None,
            &folder.path().join("bundle"),
        );
        let mut model = Runtime::with_device(bundle, options(), device).unwrap();
        let mut logits = model.forward(&prompt[..9]).unwrap();
        logits.extend(one_by_one(&mut model, &prompt[9..12]));
        match &first {
            None => first = Some(logits),
            Some(first) => assert_eq!(*first, logits, "{order:?}"),
        }
    }
}

#[test]
fn recorded_launches_give_the_bits_of_launches_one_by_one() {
    // Attention before the FFN, beside it, and norms behind; with synchronisations between recordings, and with one
    // recording for a whole token.
    for (name, places, is_whole) in [
        ("llama-relu-gqa", &PLACES[2..4], false),
        ("falcon-new-relu", &PLACES[1..4], false),
        ("llama-relu-gqa", &PLACES[..2], true),
        ("falcon-new-relu", &PLACES[1..2], true),
        ("opt-postln-proj", &PLACES[1..2], true),
    ] {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let prompt = golden.ids("p17.input_ids");
        let folder = tempfile::tempdir().unwrap();
        let mut first: Option<Vec<f32>> = None;
        for records in [
            GraphCapture::Unsupported,
            GraphCapture::Works,
            GraphCapture::Fails,
        ] {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let device = Arc::new(device.with_capture(records));
            let plan = plan(&checkpoint, places, Policy::Exact, None);
            let out = folder.path().join(format!("{records:?}"));
            let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
            let mut model =
                Runtime::with_device(bundle, options(), Arc::clone(&device) as _).unwrap();
            // Two sequences in turn, one of which goes back.
            let mut logits = one_by_one(&mut model, &prompt[..3]);
            let other = model.new_sequence().unwrap();
            let one = model.replace_sequence(other);
            logits.extend(one_by_one(&mut model, &prompt[1..4]));
            // What comes at once is not recorded, and leaves what is.
            logits.extend(model.forward(&prompt[4..6]).unwrap());
            let _other = model.replace_sequence(one);
            model.truncate(1);
            logits.extend(one_by_one(&mut model, &prompt[4..7]));
            match (records, is_whole) {
                (GraphCapture::Works, true) => {
                    assert_eq!(device.graph_launches(), 9, "one a token")
                }
                (GraphCapture::Works, false) => {
                    assert!(device.graph_launches() > 9, "several a token")
                }
                _ => assert_eq!(device.graph_launches(), 0),
            }
            match &first {
                None => first = Some(logits),
                Some(first) => assert!(*first == logits, "{name}, {records:?}"),
            }
        }
    }
}

/// Whether both give the same tokens, and nearly the same logits.
#[track_caller]
fn assert_alike(
    alone: &mut Runtime,
    both: &mut Runtime,
    prompt: &[u32],
    tolerance: f32,
    what: &str,
) {
    // A few tokens say as much as many, and are emulated sooner.
    let (tokens, want) = greedy(alone, &prompt[..6], 3);
    let (found_tokens, found) = greedy(both, &prompt[..6], 3);
    assert_near(&found, &want, tolerance, what);
    assert_eq!(found_tokens, tokens, "{what}");
}

/// Whether logits are nearly the same, as a share of the largest.
#[track_caller]
fn assert_near(found: &[f32], want: &[f32], tolerance: f32, what: &str) {
    let spread = want
        .iter()
        .fold(0.0f32, |most, logit| most.max(logit.abs()));
    for (index, (found, want)) in found.iter().zip(want).enumerate() {
        assert!(
            (found - want).abs() <= tolerance * spread,
            "{what}: logit {index} is {found}, expected {want}"
        );
    }
}

#[test]
fn every_format_gives_the_tokens_of_the_cpu() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    // Bytes are added up in whole numbers on the CPU alone, with factors that are rounded too.
    let activations = [
        (ActivationFormat::F32, 1e-4),
        (ActivationFormat::Int8, 0.05),
    ];
    let each = Format::ALL
        .into_iter()
        .flat_map(|format| activations.map(|how| (format, how)));
    for (format, (activations, tolerance)) in each {
        let Some(device) = test_device(Order::Reverse) else {
            return;
        };
        let options = || {
            let Options { threads, policy } = options();
            let threads = threads.with_activations(activations);
            Options { threads, policy }
        };
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut plan = plan(&checkpoint, &PLACES[1..2], Policy::Exact, None);
        plan.budget.kv_cache = CacheFormat::F16;
        let mut alone = Runtime::new(
            bundle(&checkpoint, plan.clone(), format, None, &at("one")),
            options(),
        )
        .unwrap();
        let bundle = bundle(&checkpoint, plan, format, None, &at("two"));
        let mut both = Runtime::with_device(bundle, options(), device).unwrap();
        let what = format!("{format} {activations:?}");
        match activations {
            ActivationFormat::F32 => assert_alike(&mut alone, &mut both, &prompt, tolerance, &what),
            // Random weights make near ties of tokens, which rounding may turn.
            ActivationFormat::Int8 => {
                let [found, want] =
                    [&mut both, &mut alone].map(|model| model.forward(&prompt[..8]).unwrap());
                assert_near(&found, &want, tolerance, &what);
            }
        }
        let (alone, both) = (alone.take_statistics(), both.take_statistics());
        assert_eq!(both.tokens, alone.tokens);
        assert_eq!(both.neurons, alone.neurons);
        let (alone, both) = (alone.computed_share(), both.computed_share());
        assert!(
            (both - alone).abs() < 0.01,
            "{format}: {both} of the neurons, {alone} on the CPU alone"
        );
    }
}

/// Networks that see their input, signs and scores for every layer.
fn prediction(
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
        .map(|_| Network {
            rank: 40,
            a: normal(40 * hidden),
            b: normal(neurons * 40),
            bias: normal(neurons),
        })
        .collect();
    write_networks(checkpoint, &networks, format, input, folder)
}

#[test]
fn predictors_serve_both_sides_from_either() {
    // One of each kind of block.
    for name in [
        "llama-relu-gqa",
        "opt-preln",
        "falcon-new-relu",
        "falcon-old-7b",
        "opt-postln-proj",
    ] {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let prompt = golden.ids("p17.input_ids");
        for (input, format) in [
            (PredictorInput::Normed, Format::F32),
            (PredictorInput::Residual, Format::F32),
            (PredictorInput::Normed, Format::Q8_0),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let predictors = prediction(&checkpoint, input, format, folder.path());
            let at = |name: &str| folder.path().join(name);
            let dense = plan(&checkpoint, &[ALL], Policy::Predicted, None);
            let alone = bundle(
                &checkpoint,
                dense,
                Format::F32,
                Some(&predictors),
                &at("alone"),
            );
            let mut alone = Runtime::new(alone, options()).unwrap();
            // A layer without a neuron on the device has them copied for a prompt, too.
            let places = [&PLACES[1..2], &PLACES[4..6], &PLACES[1..6]];
            for (index, places) in places.into_iter().enumerate() {
                let Some(device) = test_device(Order::Shuffled(9)) else {
                    return;
                };
                let mut plan = plan(&checkpoint, places, Policy::Predicted, None);
                if index == 2 {
                    let_cold_neurons_stream(&mut plan);
                }
                let both = bundle(
                    &checkpoint,
                    plan,
                    Format::F32,
                    Some(&predictors),
                    &at(&format!("both-{index}")),
                );
                let mut both = Runtime::with_device(both, options(), device).unwrap();
                assert_alike(
                    &mut alone,
                    &mut both,
                    &prompt,
                    1e-2,
                    &format!("{name} {input:?} {format} {places:?}"),
                );
            }
        }
    }
}

#[test]
fn signs_and_thresholds_choose_the_same_neurons() {
    for name in ["llama-silu", "gemma", "falcon-rw-alibi"] {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let config = checkpoint.config();
        let prompt = golden.ids("p17.input_ids");
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(12);
        let mut tensors = BTreeMap::new();
        let mut summaries = Vec::new();
        for layer in 0..config.layer_count {
            let lengths = [
                config.ffn_size,
                config.ffn_size,
                config.ffn_size,
                config.hidden_size,
            ];
            for (name, length) in score_names(layer).into_iter().zip(lengths) {
                let numbers = (0..length).map(|_| 0.05 + random.normal().abs() as f32);
                let bytes = numbers.flat_map(f32::to_le_bytes).collect();
                tensors.insert(name, TensorSource::owned(Dtype::F32, vec![length], bytes));
            }
            insert_signs(&mut tensors, &checkpoint, layer);
            summaries.push(summary(
                layer,
                config.hidden_size as u32 / 2 + 1,
                Score::Gate,
                false,
            ));
        }
        let predictors = write_predictors(&checkpoint, &[], &summaries, &tensors, folder.path());
        let threshold = |score, centred| Threshold {
            score,
            centred,
            value: 0.02,
            error: 0.0,
        };
        let rules = [
            (Policy::SignBit, None),
            (Policy::Threshold, Some(threshold(Score::Gate, false))),
            (
                Policy::Threshold,
                Some(threshold(Score::WeightedGate, false)),
            ),
            (
                Policy::Threshold,
                Some(threshold(Score::Contribution, false)),
            ),
            (
                Policy::Threshold,
                Some(threshold(Score::Contribution, true)),
            ),
        ];
        for (index, (policy, threshold)) in rules.into_iter().chain(rules).enumerate() {
            let Some(device) = test_device(Order::Forward) else {
                return;
            };
            let streams = index >= rules.len();
            let places = match streams {
                true => &PLACES[1..3],
                false => &PLACES[1..2],
            };
            let mut plan = plan(&checkpoint, places, policy, threshold);
            if streams {
                let_cold_neurons_stream(&mut plan);
            }
            let at = |name: &str| folder.path().join(format!("{name}-{index}"));
            let alone = bundle(
                &checkpoint,
                plan.clone(),
                Format::F32,
                Some(&predictors),
                &at("alone"),
            );
            let mut alone = Runtime::new(alone, options()).unwrap();
            let both = bundle(
                &checkpoint,
                plan,
                Format::F32,
                Some(&predictors),
                &at("both"),
            );
            let mut both = Runtime::with_device(both, options(), device).unwrap();
            assert_alike(
                &mut alone,
                &mut both,
                &prompt,
                1e-2,
                &format!("{name} {policy} {threshold:?}, streams: {streams}"),
            );
        }
    }
}

#[test]
fn the_demo_says_the_same_wherever_its_parts_are() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let demo = own.ancestors().map(|folder| folder.join("datasets/demo"));
    let demo = demo.into_iter().find(|folder| folder.is_dir()).unwrap();
    let checkpoint = Checkpoint::open(&demo).unwrap();
    let prompt: Vec<u32> = (0..12).map(|index| 40 + 7 * index).collect();
    let folder = tempfile::tempdir().unwrap();
    let everywhere = plan(&checkpoint, &[ALL], Policy::Exact, None);
    let out = folder.path().join("alone");
    let alone = bundle(&checkpoint, everywhere, Format::Q8_0, None, &out);
    let mut alone = Runtime::new(alone, options()).unwrap();
    let (tokens, want) = greedy(&mut alone, &prompt, 6);
    // None, some and all of the neurons; more cold ones than are copied at once.
    for (name, places, streams) in [
        ("none", &PLACES[2..3], false),
        ("none, copied", &PLACES[2..3], true),
        ("some", &PLACES[1..2], false),
        ("some, in turns", &PLACES[..6], true),
        ("all", &PLACES[..1], false),
    ] {
        let Some(device) = test_device(Order::Shuffled(4)) else {
            return;
        };
        let mut plan = plan(&checkpoint, places, Policy::Exact, None);
        if streams {
            let_cold_neurons_stream(&mut plan);
        }
        let out = folder.path().join(name);
        let both = bundle(&checkpoint, plan, Format::Q8_0, None, &out);
        let mut both = Runtime::with_device(both, options(), device).unwrap();
        let (found_tokens, found) = greedy(&mut both, &prompt, 6);
        // QuantisedActivations are rounded to bytes.
        assert_near(&found, &want, 5e-2, name);
        assert_eq!(found_tokens, tokens, "{name}");
    }
}

#[test]
fn sequences_take_turns_and_share_beginnings() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = test_device(Order::Forward) else {
        return;
    };
    let plan = plan(&checkpoint, &PLACES[..2], Policy::Exact, None);
    let bundle = bundle(
        &checkpoint,
        plan,
        Format::F32,
        None,
        &folder.path().join("bundle"),
    );
    let mut model = Runtime::with_device(bundle, options(), device).unwrap();
    let want = model.forward(&prompt).unwrap();
    let vocabulary = model.config().vocabulary_size;
    // What is forgotten is run again, with the same bits.
    model.truncate(5);
    assert_eq!(model.forward(&prompt[5..]).unwrap(), want[5 * vocabulary..]);
    // Two sequences that begin alike, decoded together.
    let mut sequences = model.new_sequences(2).unwrap();
    for sequence in &mut sequences {
        sequence.copy_from(model.sequence(), 9).unwrap();
    }
    for place in 9..12 {
        let tokens = [prompt[place], prompt[place]];
        let logits = model.decode_batch(&mut sequences, &tokens).unwrap();
        let (one, other) = logits.split_at(vocabulary);
        assert_eq!(one, other);
        // A prompt's tokens are added up in another order.
        assert_near(
            one,
            &want[place * vocabulary..][..vocabulary],
            1e-4,
            "alone",
        );
    }
    // Prompt caches are read by the CPU alone.
    let error = model
        .save_prompt_cache(&folder.path().join("cache"))
        .unwrap_err();
    assert!(error.to_string().contains("prompt cache"), "{error}");
}

/// A machine whose link is so fast that copying cold neurons always pays.
fn let_cold_neurons_stream(plan: &mut Plan) {
    plan.hardware = powerinfer_artifact::hardware::named("rtx4090").unwrap();
    if let Some(gpu) = &mut plan.hardware.gpu {
        gpu.pcie_latency_seconds = 0.0;
    }
    // Neurons of a plan that was not placed have no bytes.
    for layer in &mut plan.layers {
        layer.cpu_microseconds = 1e3;
    }
}

#[test]
fn a_prompt_at_once_gives_what_its_tokens_give_one_after_the_other() {
    let families = [
        "llama-relu-gqa",
        "opt-preln",
        "opt-postln-proj",
        "falcon-new-relu",
    ];
    for (index, name) in families.into_iter().enumerate() {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let prompt = golden.ids("p17.input_ids");
        let folder = tempfile::tempdir().unwrap();
        for streams in [false, true] {
            let Some(device) = test_device(Order::Shuffled(index as u16)) else {
                return;
            };
            let mut plan = plan(&checkpoint, &PLACES[1..], Policy::Exact, None);
            if streams {
                let_cold_neurons_stream(&mut plan);
            }
            let out = folder.path().join(format!("bundle-{streams}"));
            let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
            let mut model = Runtime::with_device(bundle, options(), device).unwrap();
            assert!(model.prompt_batch() >= 17, "{name}");
            let want = one_by_one(&mut model, &prompt);
            let alone = model.take_statistics();
            model.reset();
            let found = model.forward(&prompt).unwrap();
            let at_once = model.take_statistics();
            assert_near(&found, &want, 1e-4, &format!("{name}, streams: {streams}"));
            assert_eq!(at_once.neurons, alone.neurons);
            let (one, other) = (at_once.neurons_computed, alone.neurons_computed);
            assert!(
                one.abs_diff(other) * 500 <= other,
                "{one} of {other} neurons"
            );
        }
    }
}

/// What four tokens read of a model whose layers have attention and the first half of the neurons on the device, all in
/// 32 bits, where every gate is looked at.
fn bytes_by_hand(checkpoint: &Checkpoint, times: &SideTimes) -> u64 {
    let config = checkpoint.config();
    let (tokens, layers) = (4, config.layer_count);
    let queries = config.head_count * config.head_size;
    let keys = config.kv_head_count * config.head_size;
    let projections = 2 * config.hidden_size * (queries + keys);
    let seen = 1 + 2 + 3 + 4;
    let gates = tokens * (config.ffn_size / 2) * config.hidden_size;
    let numbers = layers * (tokens * projections + seen * 2 * keys + gates);
    // Rows of up and of down.
    let rows = 2 * times.neurons_on_device * config.hidden_size as u64;
    4 * (numbers as u64 + rows)
}

#[test]
fn both_sides_are_timed_layer_by_layer() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let folder = tempfile::tempdir().unwrap();
    for records in [GraphCapture::Unsupported, GraphCapture::Works] {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let device = Arc::new(device.with_capture(records));
        let plan = plan(&checkpoint, &PLACES[1..2], Policy::Exact, None);
        let out = folder.path().join(format!("{records:?}"));
        let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
        let mut model = Runtime::with_device(bundle, options(), device).unwrap();
        let want = one_by_one(&mut model, &prompt[..4]);
        model.reset();
        model.take_side_times(true);
        let started = std::time::Instant::now();
        let found = one_by_one(&mut model, &prompt[..4]);
        let (elapsed, times) = (started.elapsed(), model.take_side_times(false).unwrap());
        assert!(found == want, "looking changes nothing");
        assert_eq!(
            (times.tokens, times.layers.len()),
            (4, checkpoint.config().layer_count)
        );
        let total = times.total();
        assert!(
            total.device + total.host + total.waiting <= elapsed,
            "{times:?}"
        );
        for layer in &times.layers {
            assert!(
                !layer.device.is_zero() && !layer.host.is_zero(),
                "{times:?}"
            );
        }
        let share = times.device_share();
        assert!(share > 0.2 && share < 0.8, "half of the neurons: {share}");
        assert_eq!(
            times.device_bytes,
            bytes_by_hand(&checkpoint, &times),
            "{times:?}"
        );
        assert!(times.host_bytes > 0, "{times:?}");
        assert!(model.device_read_bandwidth().unwrap().unwrap() > 0.0);
        // Nobody looks any more, and prompts are timed as well.
        model.forward(&prompt[4..6]).unwrap();
        assert_eq!(model.take_side_times(true).unwrap().tokens, 0);
        model.forward(&prompt[6..9]).unwrap();
        let times = model.take_side_times(false).unwrap();
        assert_eq!(times.tokens, 3);
        assert!(!times.total().device.is_zero(), "{times:?}");
        assert!(!times.total().host.is_zero(), "{times:?}");
    }
    // Nothing is left to the host of a prompt whose cold neurons are copied.
    let Some(device) = test_device(Order::Forward) else {
        return;
    };
    let mut plan = plan(&checkpoint, &PLACES[1..2], Policy::Exact, None);
    let_cold_neurons_stream(&mut plan);
    let bundle = bundle(
        &checkpoint,
        plan,
        Format::F32,
        None,
        &folder.path().join("streams"),
    );
    let mut model = Runtime::with_device(bundle, options(), device).unwrap();
    model.take_side_times(true);
    model.forward(&prompt[..5]).unwrap();
    let times = model.take_side_times(false).unwrap();
    assert_eq!((times.tokens, times.device_share()), (5, 1.0));
    assert!(times.total().host.is_zero(), "{times:?}");
}

#[test]
fn prompts_take_the_room_that_is_left() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let folder = tempfile::tempdir().unwrap();
    let mut batches = Vec::new();
    let mut first: Option<Vec<f32>> = None;
    let plan = plan(&checkpoint, &[ALL], Policy::Exact, None);
    let out = folder.path().join("bundle");
    drop(bundle(&checkpoint, plan, Format::F32, None, &out));
    for round in 0.. {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let memory = 4e6 * 0.97f64.powi(round);
        let device = Arc::new(device.with_memory(memory as usize));
        let bundle = Bundle::open(&out, IntegrityCheck::Quick).unwrap();
        let mut model = match Runtime::with_device(bundle, options(), device) {
            Ok(model) => model,
            Err(error) => {
                // Without room for the weights there is none to run in.
                assert_eq!(error.hint(), Some(Hint::LessVram), "{error}");
                break;
            }
        };
        if batches.last() == Some(&model.prompt_batch()) {
            continue;
        }
        batches.push(model.prompt_batch());
        let logits = model.forward(&prompt).unwrap();
        let first = first.get_or_insert_with(|| logits.clone());
        assert_near(&logits, first, 1e-4, &format!("{batches:?}"));
    }
    // From all to few, as memory shrinks.
    assert!(
        batches.is_sorted_by(|more, fewer| more > fewer),
        "{batches:?}"
    );
    assert!(batches[0] >= 17 && batches.len() > 3, "{batches:?}");
}

#[test]
fn the_device_chooses_the_token_that_the_host_would() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let vocabulary = checkpoint.config().vocabulary_size;
    let folder = tempfile::tempdir().unwrap();
    for (name, place) in [
        ("there", ALL),
        (
            "here",
            Place {
                head: Side::Cpu,
                ..ALL
            },
        ),
    ] {
        let Some(device) = test_device(Order::Reverse) else {
            return;
        };
        let plan = plan(&checkpoint, &[place], Policy::Exact, None);
        let out = folder.path().join(name);
        let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
        let mut model = Runtime::with_device(bundle, options(), device).unwrap();
        for known in [vocabulary, vocabulary / 3, 1, usize::MAX] {
            model.reset();
            let want = model.forward_last(&prompt).unwrap();
            let largest = greedy_token(&want[..known.min(vocabulary)]);
            for temperature in [0.0, 1e-6] {
                model.reset();
                let settings = SamplingSettings {
                    temperature,
                    ..SamplingSettings::default()
                };
                let mut sampler = Sampler::new(settings).unwrap();
                model.append(&prompt, &sampler).unwrap();
                let stays = name == "there" && temperature == 0.0;
                assert_eq!(model.last_logits().is_none(), stays);
                assert_eq!(model.sample(&mut sampler, known).unwrap(), largest);
            }
        }
        assert!(
            model
                .append(
                    &[u32::MAX],
                    &Sampler::new(SamplingSettings::default()).unwrap()
                )
                .is_err()
        );
    }
}

#[test]
fn a_device_that_is_lost_is_an_error_and_no_hang() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let prompt = golden.ids("p17.input_ids");
    let folder = tempfile::tempdir().unwrap();
    // One recording a token, and several.
    for (places, name) in [(&PLACES[1..2], "whole"), (&PLACES[3..5], "parts")] {
        let mut survived = false;
        for launches in [0, 1, 2, 3, 7, 20, 31, 42, 55, 1000] {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let device = Arc::new(device.lost_after(launches));
            let plan = plan(&checkpoint, places, Policy::Exact, None);
            let out = folder.path().join(format!("{name}{launches}"));
            let bundle = bundle(&checkpoint, plan, Format::F32, None, &out);
            let started = std::time::Instant::now();
            let mut model = Runtime::with_device(bundle, options(), device as _).unwrap();
            let mut outcome = model.forward(&prompt[..4]);
            for token in &prompt[4..8] {
                outcome = outcome.and_then(|_| model.forward(&[*token]));
            }
            // Long before anybody's patience is over.
            let taken = started.elapsed();
            assert!(taken.as_secs() < 10, "{name}, {launches}: {taken:?}");
            survived = outcome.is_ok();
            if let Err(error) = outcome {
                assert!(error.to_string().contains("it is lost"), "{error}");
                let again = model.forward(&prompt[..1]).unwrap_err();
                assert!(again.to_string().contains("it is lost"), "{again}");
            }
        }
        assert!(survived, "{name}");
    }
}

#[test]
fn what_kernels_cannot_take_is_refused() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = test_device(Order::Forward) else {
        return;
    };
    let mut plan = plan(&checkpoint, &[ALL], Policy::Exact, None);
    plan.budget.kv_cache = CacheFormat::Q8_0;
    let bundle = bundle(
        &checkpoint,
        plan,
        Format::F32,
        None,
        &folder.path().join("bundle"),
    );
    let error = Runtime::with_device(bundle, options(), device).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a KV cache of 8 bits of layer 0"),
        "{error}"
    );
}
