//! Logits and tokens of all models, formats, thread orders and outcomes of graph capture.

use std::sync::Arc;

use powerinfer_emulator::{
    GraphCapture::{Fails, Unsupported, Works},
    Order, test_emulator,
};
use powerinfer_model::{Checkpoint, LanguageModel};
use powerinfer_runtime::{ActivationFormat, SingleSession};
use powerinfer_tensor::{CacheFormat, Format};

use crate::{
    assert_alike, assert_near,
    case::Case,
    golden::{FAMILIES, Golden, MIXTURES, MODELS},
    greedy, one_by_one,
    placement::{ALL, HALF, PLACEMENTS, Placement},
};

#[test]
fn logits_are_those_of_the_standard_implementation() {
    let goldens = Golden::present(&[&MODELS[..], &FAMILIES, &MIXTURES].concat());
    let runs = |golden: &Golden| golden.checkpoint().config().device_obstacle().is_none();
    let goldens = goldens.into_iter().filter(|(_, golden)| runs(golden));
    for (index, (name, golden)) in goldens.enumerate() {
        let case = Case::open(&name);
        // Models take turns with the placements; in the second round layers differ.
        let rounds = [
            &[PLACEMENTS[index % 6]][..],
            &[PLACEMENTS[(index + 1) % 6], PLACEMENTS[(index + 3) % 6]],
        ];
        for (round, placements) in rounds.into_iter().enumerate() {
            let placements: Vec<Placement> = match case.config().attention_obstacle() {
                None => placements.to_vec(),
                Some(_) => placements
                    .iter()
                    .map(|one| one.with_attention_on_host())
                    .collect(),
            };
            let order = Order::Shuffled(index as u16);
            let Some(mut model) = case.on_device(order, &placements) else {
                return;
            };
            let what = format!("{name} {placements:?}");
            if round == 0 {
                let (tokens, _) = greedy(&mut model, &case.prompt, 3);
                assert_eq!(tokens, golden.ids("p17.greedy_ids")[..3], "{what}");
            }
            model.reset();
            let logits = model.forward(&case.prompt[..8]).unwrap();
            let want = golden.floats("p17.logits");
            golden.assert_close(&logits, &want[..logits.len()], &what);
        }
    }
}

#[test]
fn every_order_of_threads_gives_the_same_bits() {
    let mut case = Case::open("llama-relu-gqa");
    case.quant = Format::Q4_0;
    let mut first: Option<Vec<f32>> = None;
    for order in Order::SAMPLES {
        let Some(mut model) = case.on_device(order, &[ALL, HALF]) else {
            return;
        };
        let mut logits = model.forward(&case.prompt[..9]).unwrap();
        logits.extend(one_by_one(&mut model, &case.prompt[9..12]));
        let first = first.get_or_insert_with(|| logits.clone());
        assert_eq!(*first, logits, "{order:?}");
    }
}

#[test]
fn graphs_give_the_same_bits_as_single_launches() {
    // Attention before the FFN, beside it, and norms after both; several graphs a token, and one.
    for (name, placements, is_whole) in [
        ("llama-relu-gqa", &PLACEMENTS[2..4], false),
        ("falcon-new-relu", &PLACEMENTS[1..4], false),
        ("llama-relu-gqa", &PLACEMENTS[..2], true),
        ("falcon-new-relu", &PLACEMENTS[1..2], true),
        ("opt-postln-proj", &PLACEMENTS[1..2], true),
    ] {
        let case = Case::open(name);
        let prompt = &case.prompt;
        let mut want: Option<Vec<f32>> = None;
        for capture in [Unsupported, Works, Fails] {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let device = Arc::new(device.with_capture(capture));
            let mut model = case.with(Arc::clone(&device) as _, placements);
            if capture == Fails {
                model.observers_mut().expect_retries();
            }
            // Two sequences in turn, one of which is truncated.
            let mut logits = one_by_one(&mut model, &prompt[..3]);
            let second = model.new_session(usize::MAX).unwrap();
            let first = std::mem::replace(&mut model.session, second);
            logits.extend(one_by_one(&mut model, &prompt[1..4]));
            // Passes of several tokens use no graph and leave those captured as they are.
            logits.extend(model.forward(&prompt[4..6]).unwrap());
            let _second = std::mem::replace(&mut model.session, first);
            model.session.truncate(1);
            logits.extend(one_by_one(&mut model, &prompt[4..7]));
            let (launches, captures) = (device.graph_launches(), device.graph_captures());
            match (capture, is_whole) {
                // Every sequence runs the same graph; another was captured to see whether captures work.
                // In debug builds every launch is captured again and compared.
                (Works, _) if cfg!(debug_assertions) => {
                    assert_eq!(captures, launches + usize::from(is_whole))
                }
                (Works, true) => assert_eq!((launches, captures), (9, 2), "one a token"),
                (Works, false) => {
                    assert!(launches > 9 && 8 * captures < launches, "several a token")
                }
                _ => assert_eq!(launches, 0),
            }
            let first = want.get_or_insert_with(|| logits.clone());
            assert!(*first == logits, "{name}, {capture:?}");
        }
    }
}

#[test]
fn every_format_of_the_kv_cache_gives_the_logits_of_the_cpu() {
    for (name, cache) in [
        ("llama-relu-gqa", CacheFormat::F16),
        ("llama-relu-gqa", CacheFormat::Q8_0),
        ("falcon-new-relu", CacheFormat::Q8_0),
    ] {
        let mut case = Case::open(name);
        case.kv_cache = cache;
        let Some(mut device) = case.on_device(Order::Shuffled(5), &[ALL, HALF]) else {
            return;
        };
        let mut host = case.on_host(&[ALL, HALF]);
        // A prompt, then single tokens.
        let logits = |model: &mut SingleSession| -> Vec<f32> {
            let mut logits = model.forward(&case.prompt[..12]).unwrap();
            logits.extend(one_by_one(model, &case.prompt[12..]));
            logits
        };
        let (want, found) = (logits(&mut host), logits(&mut device));
        // A number that is rounded the other way differs by a 127th of the largest.
        assert_near(&found, &want, 2e-3, &format!("{name} {cache}"));
    }
}

#[test]
fn every_format_gives_the_tokens_of_the_cpu() {
    let mut case = Case::open("llama-relu-gqa");
    case.kv_cache = CacheFormat::F16;
    // Only the CPU multiplies 8-bit activations as integers, and rounds the coefficients of down.
    let activations = [
        (ActivationFormat::F32, 1e-4),
        (ActivationFormat::Int8, 0.05),
    ];
    let each = Format::ALL.into_iter();
    for (format, (activations, tolerance)) in
        each.flat_map(|format| activations.map(|activations| (format, activations)))
    {
        (case.quant, case.activations) = (format, activations);
        let Some(mut device) = case.on_device(Order::Reverse, &[HALF]) else {
            return;
        };
        let mut host = case.on_host(&[HALF]);
        let what = format!("{format} {activations:?}");
        match activations {
            ActivationFormat::F32 => {
                assert_alike(&mut host, &mut device, &case.prompt, tolerance, &what);
            }
            // Random weights nearly tie tokens; rounding may turn the order.
            ActivationFormat::Int8 => {
                let [found, want] =
                    [&mut device, &mut host].map(|model| model.forward(&case.prompt[..8]).unwrap());
                assert_near(&found, &want, tolerance, &what);
            }
        }
        let (host, device) = (
            host.observers_mut().take_statistics(),
            device.observers_mut().take_statistics(),
        );
        assert_eq!(device.tokens, host.tokens);
        assert_eq!(device.neurons, host.neurons);
        let (host, device) = (host.computed_share(), device.computed_share());
        assert!(
            (device - host).abs() < 0.01,
            "{format}: {device} of the neurons, {host} on the CPU alone"
        );
    }
}

#[test]
fn the_demo_gives_the_same_tokens_in_every_placement() {
    let golden = Golden::open(MODELS[0]);
    let mut folders = golden.folder.ancestors();
    let demo = folders.find_map(|folder| folder.join("datasets/demo").canonicalize().ok());
    let checkpoint = Checkpoint::open(&demo.unwrap()).unwrap();
    let prompt = (0..12).map(|index| 40 + 7 * index).collect();
    let mut case = Case::new(checkpoint, prompt);
    case.quant = Format::Q8_0;
    let (tokens, want) = greedy(&mut case.on_host(&[ALL]), &case.prompt, 6);
    // No, some and all neurons hot; more cold ones than are copied at once.
    for (name, placements, copies) in [
        ("none", &PLACEMENTS[2..3], false),
        ("none, copied", &PLACEMENTS[2..3], true),
        ("some", &PLACEMENTS[1..2], false),
        ("some, copied in turns", &PLACEMENTS[..6], true),
        ("all", &PLACEMENTS[..1], false),
    ] {
        case.copies_cold_neurons = copies;
        let Some(mut model) = case.on_device(Order::Shuffled(4), placements) else {
            return;
        };
        let (found_tokens, found) = greedy(&mut model, &case.prompt, 6);
        // Activations are rounded to 8 bits.
        assert_near(&found, &want, 5e-2, name);
        assert_eq!(found_tokens, tokens, "{name}");
    }
}
