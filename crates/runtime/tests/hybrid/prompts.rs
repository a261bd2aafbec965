//! Prompts at once, their memory, the sequences after them and the first token after a prompt.

use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};

use candle_core::{Device as CandleDevice, Tensor};
use powerinfer_artifact::{
    Hint,
    plan::{Device, Policy},
    predictor_file::PredictorInput,
    prompt_cache::PromptCacheFile,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_emulator::{Order, test_device, test_emulator};
use powerinfer_model::{Checkpoint, LanguageModel, greedy_token};
use powerinfer_runtime::{
    ActivationFormat, Engine, Generation, Passes, Sampler, SamplingSettings, SingleSession,
    StopConditions, Text, Wanted, memory::PREFILL_BATCH, run_pass,
};
use powerinfer_tensor::{CacheFormat, Format};

use crate::{
    assert_near,
    case::Case,
    golden::Golden,
    one_by_one,
    placement::{ALL, HALF, PLACEMENTS, Placement},
    predictors::write_random_networks,
};

#[test]
fn prefill_gives_the_logits_of_its_tokens_one_by_one() {
    let families = [
        "llama-relu-gqa",
        "opt-preln",
        "opt-postln-proj",
        "falcon-new-relu",
    ];
    for (index, name) in families.into_iter().enumerate() {
        let mut case = Case::open(name);
        for copies in [false, true] {
            case.copies_cold_neurons = copies;
            let order = Order::Shuffled(index as u16);
            let Some(mut model) = case.on_device(order, &PLACEMENTS[1..]) else {
                return;
            };
            assert!(model.prompt_batch() >= 17, "{name}");
            let want = one_by_one(&mut model, &case.prompt);
            let decode = model.observers_mut().take_statistics();
            model.reset();
            let found = model.forward(&case.prompt).unwrap();
            let prefill = model.observers_mut().take_statistics();
            assert_near(&found, &want, 1e-4, &format!("{name}, copies: {copies}"));
            assert_eq!(prefill.neurons, decode.neurons);
            let (prefill, decode) = (prefill.neurons_computed, decode.neurons_computed);
            assert!(
                prefill.abs_diff(decode) * 500 <= decode,
                "{prefill} of {decode} neurons"
            );
        }
    }
}

#[test]
fn long_prompts_run_at_once_if_the_device_has_all_layers() {
    let mut case = Case::open("llama-rope3");
    let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(300).collect();
    for (quant, tolerance) in [
        (Format::F32, 1e-4),
        (Format::F16, 1e-2),
        (Format::Q4_0, 5e-2),
    ] {
        case.quant = quant;
        case.activations = ActivationFormat::Int8;
        let Some(mut model) = case.on_device(Order::Shuffled(5), &[ALL]) else {
            return;
        };
        assert!(model.prompt_batch() >= 300, "{quant}");
        let want = case.on_host(&[ALL]).forward(&prompt).unwrap();
        let found = model.forward(&prompt).unwrap();
        assert_near(&found, &want, tolerance, &format!("{quant}"));
        // The next token reads the KV cache that the prompt has filled.
        let want = {
            let mut host = case.on_host(&[ALL]);
            host.forward(&prompt).unwrap();
            host.forward(&prompt[..1]).unwrap()
        };
        let next = model.forward(&prompt[..1]).unwrap();
        assert_near(&next, &want, tolerance, &format!("{quant}, next"));
    }
    // If the host computes some parts, fewer tokens run at a time.
    let model = case.on_device(Order::Forward, &[HALF]).unwrap();
    assert_eq!(model.prompt_batch(), PREFILL_BATCH);
    // Only on the host are other sessions in the same pass.
    assert_eq!(model.prompt_room(3), PREFILL_BATCH);
    assert_eq!(case.on_host(&[ALL]).prompt_room(3), PREFILL_BATCH - 3);
}

#[test]
fn prompts_multiply_many_neurons_in_pieces() {
    for (name, placements) in [("llama-relu-gqa", &[ALL]), ("opt-preln", &[HALF])] {
        let folder = tempfile::tempdir().unwrap();
        let golden = Golden::open(name);
        // Several pieces of 4096 neurons each.
        widen(
            &golden.folder,
            if name == "opt-preln" { 90 } else { 50 },
            folder.path(),
        );
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let case = Case::new(checkpoint, golden.ids("p17.input_ids"));
        assert!(case.config().ffn_size * placements[0].quarters / 4 > 8192);
        let Some(mut model) = case.on_device(Order::Shuffled(3), placements) else {
            return;
        };
        let want = case.on_host(&[ALL]).forward(&case.prompt).unwrap();
        let found = model.forward(&case.prompt).unwrap();
        assert_near(&found, &want, 1e-4, name);
        let statistics = model.observers_mut().take_statistics();
        let share = statistics.computed_share();
        assert!(share > 0.1 && share < 0.9, "{name}: {share} of the neurons");
    }
}

/// Writes the checkpoint in `from` to `to`, repeating every neuron `times` times; each copy has an equal part of its output.
fn widen(from: &Path, times: usize, to: &Path) {
    let file = from.join("model.safetensors");
    let tensors = candle_core::safetensors::load(file, &CandleDevice::Cpu).unwrap();
    let widened: HashMap<String, Tensor> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let is = |parts: [&str; 3]| parts.iter().any(|part| name.contains(part));
            let repeat = |axis| Tensor::cat(&vec![&tensor; times], axis).unwrap();
            let tensor = if is(["gate_proj", "up_proj", "fc1"]) {
                repeat(0)
            } else if is(["down_proj", "down_proj", "fc2.weight"]) {
                (repeat(1) / times as f64).unwrap()
            } else {
                tensor
            };
            (name, tensor)
        })
        .collect();
    candle_core::safetensors::save(&widened, to.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    for key in ["intermediate_size", "ffn_dim"] {
        if let Some(size) = config[key].as_u64() {
            config[key] = (size * times as u64).into();
        }
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn long_prompts_are_predicted_as_on_the_host() {
    let mut case = Case::open("llama-relu-gqa");
    case.policy = Policy::Predicted;
    // Only the CPU rounds the inputs of products, which would change predictions near the threshold.
    case.activations = ActivationFormat::F32;
    let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(200).collect();
    for (input, format) in [
        (PredictorInput::Normed, Format::F32),
        (PredictorInput::Residual, Format::Q8_0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let networks = write_random_networks(&case.checkpoint, input, format, folder.path());
        case.predictors = Some(networks);
        // In the second case, the device lacks predictors and other parts.
        for (placements, copies) in [(&[ALL][..], false), (&PLACEMENTS, true)] {
            case.copies_cold_neurons = copies;
            let Some(mut model) = case.on_device(Order::Shuffled(6), placements) else {
                return;
            };
            assert!(model.prompt_batch() >= 200);
            let want = case.on_host(&[ALL]).forward(&prompt).unwrap();
            let found = model.forward(&prompt).unwrap();
            assert_near(&found, &want, 1e-4, &format!("{input:?}, copies: {copies}"));
        }
    }
}

#[test]
fn long_prompts_copy_what_the_device_lacks() {
    for (index, name) in [
        "llama-relu-gqa",
        "opt-preln",
        "opt-postln-proj",
        "falcon-new-relu",
        "qwen3-qknorm",
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = Case::open(name);
        case.copies_cold_neurons = true;
        case.kv_cache = CacheFormat::ALL[index % 3];
        let tokens = case.config().context_length.min(150) - 1;
        let prompt = case.prompt.iter().copied().cycle().take(tokens);
        let prompt: Vec<u32> = prompt.collect();
        let host = |pieces: &[&[u32]]| {
            let mut host = case.on_host(&[ALL]);
            let forward = |piece: &&[u32]| host.forward(piece).unwrap();
            pieces.iter().flat_map(forward).collect::<Vec<f32>>()
        };
        let order = Order::Shuffled(index as u16);
        let Some(mut model) = case.on_device(order, &PLACEMENTS) else {
            return;
        };
        assert!(model.prompt_batch() >= tokens, "{name}");
        // A second piece, or a single token, reads earlier keys and values, some of which are on the host.
        let (first, second) = prompt.split_at(tokens / 2);
        for pieces in [[&prompt[..], &prompt[..1]].as_slice(), &[first, second]] {
            model.reset();
            let found = pieces
                .iter()
                .flat_map(|piece| model.forward(piece).unwrap());
            let found: Vec<f32> = found.collect();
            assert_near(&found, &host(pieces), 1e-3, name);
        }
    }
}

#[test]
fn a_prompt_cache_is_read_back_on_its_device_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let mut case = Case::open("llama-relu-gqa");
    for format in CacheFormat::ALL {
        case.kv_cache = format;
        // Keys and values of some layers are on the device, of others on the host.
        let bundle = case.pack(&PLACEMENTS[..4]);
        let open = || Bundle::open(bundle.folder(), IntegrityCheck::Quick).unwrap();
        let on_device = || {
            let device = test_device(Order::Forward)?;
            Some(
                SingleSession::new(Engine::with_device(open(), case.options(), device).unwrap())
                    .unwrap(),
            )
        };
        let Some(mut model) = on_device() else {
            return;
        };
        let (before, after) = case.prompt.split_at(13);
        model.forward(before).unwrap();
        model.save_prompt_cache(&model.session, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let want = one_by_one(&mut model, &after[..2]);
        let file = PromptCacheFile::open(&path).unwrap();
        let mut again = on_device().unwrap();
        let mut on_host = SingleSession::new(Engine::new(open(), case.options()).unwrap()).unwrap();
        // The caches held another sequence before.
        again.forward(after).unwrap();
        let SingleSession { engine, session } = &mut again;
        let kept = engine.load_prompt_cache(session, &path, &file, &case.prompt);
        assert_eq!(kept.unwrap(), 13);
        again.save_prompt_cache(&again.session, &path).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes, "{format}");
        let cached = one_by_one(&mut again, &after[..2]);
        assert_near(&cached, &want, 0.0, "cached");
        // The host has other numbers.
        let SingleSession { engine, session } = &mut on_host;
        let refused = engine.load_prompt_cache(session, &path, &file, &case.prompt);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("of other device: "), "{message}");
        assert!(message.ends_with("; expected the CPU"), "{message}");
    }
}

#[test]
fn prompt_batches_shrink_with_the_memory_that_is_left() {
    let case = Case::open("llama-relu-gqa");
    let folder = case.pack(&[ALL]).folder().to_owned();
    let mut batches = Vec::new();
    let mut first: Option<Vec<f32>> = None;
    for round in 0.. {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let bytes = 4e6 * 0.97f64.powi(round);
        let device = Arc::new(device.with_memory(bytes as usize));
        let bundle = Bundle::open(&folder, IntegrityCheck::Quick).unwrap();
        let mut model = match Engine::with_device(bundle, case.options(), device) {
            Ok(engine) => SingleSession::new(engine).unwrap(),
            Err(error) => {
                // Too little memory for the weights.
                assert_eq!(error.hint(), Some(Hint::LessVram), "{error}");
                break;
            }
        };
        if batches.last() == Some(&model.prompt_batch()) {
            continue;
        }
        batches.push(model.prompt_batch());
        let logits = model.forward(&case.prompt).unwrap();
        let first = first.get_or_insert_with(|| logits.clone());
        assert_near(&logits, first, 1e-4, &format!("{batches:?}"));
    }
    assert!(
        batches.is_sorted_by(|more, fewer| more > fewer),
        "{batches:?}"
    );
    assert!(batches[0] >= 17 && batches.len() > 3, "{batches:?}");
}

#[test]
fn sequences_take_turns_and_share_prefixes() {
    let case = Case::open("llama-relu-gqa");
    let prompt = &case.prompt;
    let Some(mut model) = case.on_device(Order::Forward, &[ALL, HALF]) else {
        return;
    };
    let want = model.forward(prompt).unwrap();
    let vocabulary = case.config().vocabulary_size;
    // Truncated tokens give the same bits again.
    model.session.truncate(5);
    assert_eq!(model.forward(&prompt[5..]).unwrap(), want[5 * vocabulary..]);
    // Two sequences with the same prefix, decoded together.
    let new = |_| model.new_session(usize::MAX).unwrap();
    let mut sessions: Vec<_> = (0..2).map(new).collect();
    for session in &mut sessions {
        session.copy_from(&model.session, 9).unwrap();
    }
    for position in 9..12 {
        let batch = sessions
            .iter_mut()
            .map(|session| (session, prompt[position]));
        let logits = model.decode(&mut batch.collect::<Vec<_>>()).unwrap();
        let (first, second) = logits.split_at(vocabulary);
        assert_eq!(first, second);
        // Prefill adds up in another order.
        let want = &want[position * vocabulary..][..vocabulary];
        assert_near(first, want, 1e-4, "prefill");
    }
}

#[test]
fn the_device_chooses_the_token_that_the_host_would() {
    let case = Case::open("llama-relu-gqa");
    let vocabulary = case.config().vocabulary_size;
    let text = |temperature, vocabulary| {
        let settings = SamplingSettings {
            temperature,
            ..SamplingSettings::default()
        };
        let stop = StopConditions {
            max_tokens: 1,
            stop_tokens: [].into(),
            vocabulary,
        };
        Text::new(Sampler::new(settings).unwrap(), stop)
    };
    let text_after = |token, temperature, known| text(temperature, known).with_pending(token);
    for head in [Device::Gpu, Device::Cpu] {
        let placement = Placement { head, ..ALL };
        let Some(mut model) = case.on_device(Order::Reverse, &[placement]) else {
            return;
        };
        for known in [vocabulary, vocabulary / 3, 1, usize::MAX] {
            model.reset();
            let want = model.forward_last(&case.prompt).unwrap();
            let largest = greedy_token(&want[..known.min(vocabulary)]);
            for temperature in [0.0, 1e-6] {
                model.reset();
                let SingleSession { engine, session } = &mut model;
                let mut text = text(temperature, known);
                // Decoding, without a piece of a prompt.
                let (last, before) = case.prompt.split_last().unwrap();
                engine.prefill(session, before, Wanted::None).unwrap();
                let mut pending = text_after(*last, temperature, known);
                let mut running = [(&mut *session, &mut pending)];
                let ran = run_pass(engine, &mut running, None).unwrap();
                assert!(ran.piece_logits(engine).is_empty());
                let mut tokens = Vec::new();
                let sampled = ran.accept(engine, &mut running, |sampled| {
                    tokens.push(sampled.token.unwrap().id);
                });
                assert_eq!((sampled.unwrap(), tokens), (0, vec![largest]));
                session.truncate(0);
                let started = Generation::start(engine, session, &mut text, &case.prompt, || false);
                let (mut generation, _) = started.unwrap();
                let on_device = head == Device::Gpu && temperature == 0.0;
                assert_eq!(generation.passes().logits().is_empty(), on_device);
                assert_eq!(generation.next().unwrap().unwrap().id, largest);
            }
        }
        let SingleSession { engine, session } = &mut model;
        let mut text = text(0.0, 1);
        let outside = [u32::MAX];
        assert!(Generation::start(engine, session, &mut text, &outside, || false).is_err());
    }
}

#[test]
fn a_found_token_is_embedded_on_the_device() {
    let half = Placement {
        head: Device::Gpu,
        ..HALF
    };
    // Separate heads and heads that are the embedding, scaled rows, parallel blocks; and learned positions, which the host adds.
    for (name, is_on_device) in [
        ("llama-relu-gqa", true),
        ("minicpm-s", true),
        ("falcon-new-relu", true),
        ("opt-preln", false),
    ] {
        let case = Case::open(name);
        let vocabulary = case.config().vocabulary_size;
        let mut host = case.on_host(&[ALL]);
        let mut want = vec![greedy_token(&host.forward_last(&case.prompt).unwrap())];
        for _ in 0..8 {
            let logits = host.forward_last(&want[want.len() - 1..]).unwrap();
            want.push(greedy_token(&logits));
        }
        let unlike = (want[want.len() - 1] + 1) % vocabulary as u32;
        let after_unlike = host.forward_last(&[unlike]).unwrap();
        // If the host is late with the cold neurons, the token runs again and the host looks it up.
        for (placement, is_late) in [(ALL, false), (half, false), (half, true)] {
            let Some(mut device) = test_emulator(2, Order::Shuffled(3)) else {
                return;
            };
            if is_late {
                device = device.with_patience(Duration::from_nanos(1));
            }
            let SingleSession {
                mut engine,
                session: mut one,
            } = case.with(Arc::new(device), &[placement]);
            engine.observers_mut().expect_retries();
            let mut other = engine.new_session(64).unwrap();
            let largest = Wanted::Largest(vocabulary);
            let mut found = Vec::new();
            for (number, token) in want.iter().enumerate() {
                engine.observers_mut().take_statistics();
                let tokens = match number {
                    0 => &case.prompt[..],
                    _ => &want[number - 1..number],
                };
                engine.prefill(&mut one, tokens, largest).unwrap();
                found.push(engine.largest().unwrap());
                let read = engine.observers_mut().take_statistics().bytes_read;
                // The row of the previous token is still there, unless another sequence has run.
                let is_looked_up = number == 0 || number % 3 == 1 || !is_on_device;
                let has_cold = placement.quarters < 4;
                assert!(
                    has_cold || (read > 0) == is_looked_up,
                    "{name}, {number}: {read}"
                );
                if number % 3 == 0 {
                    engine.prefill(&mut other, &[*token], largest).unwrap();
                    assert!((engine.largest().unwrap() as usize) < vocabulary);
                }
            }
            assert_eq!(found, want, "{name}");
            // A token that was not found is looked up.
            engine.prefill(&mut one, &[unlike], Wanted::Last).unwrap();
            assert_near(engine.logits(), &after_unlike, 1e-4, name);
        }
    }
}
