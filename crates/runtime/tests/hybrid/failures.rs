//! Lost devices and unsupported settings.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use powerinfer_emulator::{
    GraphCapture::{Fails, Unsupported},
    Order, test_emulator,
};
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{Engine, SingleSession};
use powerinfer_tensor::CacheFormat;

use crate::{assert_near, case::Case, one_by_one, placement::PLACEMENTS};

#[test]
fn a_lost_device_is_an_error_and_not_a_hang() {
    let case = Case::open("llama-relu-gqa");
    // One graph a token, and several.
    for (placements, name) in [(&PLACEMENTS[1..2], "one"), (&PLACEMENTS[3..5], "several")] {
        let mut survived = false;
        for launches in [0, 1, 2, 3, 7, 20, 31, 42, 55, 1000] {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let bundle = case.pack(placements);
            let device = Arc::new(device.lost_after(launches));
            let started = Instant::now();
            let mut model =
                SingleSession::new(Engine::with_device(bundle, case.options(), device).unwrap())
                    .unwrap();
            let mut outcome = model.forward(&case.prompt[..4]);
            for token in &case.prompt[4..8] {
                outcome = outcome.and_then(|_| model.forward(&[*token]));
            }
            let elapsed = started.elapsed();
            assert!(elapsed.as_secs() < 10, "{name}, {launches}: {elapsed:?}");
            survived = outcome.is_ok();
            if let Err(error) = outcome {
                assert!(error.to_string().contains("it is lost"), "{error}");
                let again = model.forward(&case.prompt[..1]).unwrap_err();
                assert!(again.to_string().contains("it is lost"), "{again}");
            }
        }
        assert!(survived, "{name}");
    }
}

#[test]
fn a_late_host_costs_a_token_its_graph_and_no_other() {
    let case = Case::open("llama-relu-gqa");
    let tokens = &case.prompt[..6];
    let want = one_by_one(&mut case.on_host(&PLACEMENTS[1..2]), tokens);
    let Some(device) = test_emulator(2, Order::Forward) else {
        return;
    };
    // No kernel waits for the host for more than a nanosecond.
    let device = Arc::new(device.with_patience(Duration::from_nanos(1)));
    let mut model = case.with(Arc::clone(&device) as _, &PLACEMENTS[1..2]);
    model.observers_mut().expect_retries();
    for (token, want) in tokens.iter().zip(want.chunks_exact(want.len() / 6)) {
        let before = device.graph_launches();
        let found = model.forward(&[*token]).unwrap();
        assert_near(&found, want, 1e-4, "late");
        assert_eq!(device.graph_launches(), before + 1);
    }
    assert_eq!(model.graph_failure(), None);
    let counted = model.observers_mut().take_statistics();
    // How often the host is late depends on its speed.
    assert!(model.observers().graph_retries() <= 6);
    assert_eq!(counted.tokens, 6);
    let neurons = 6 * (case.config().ffn_size * case.config().layer_count) as u64;
    assert_eq!(counted.neurons, neurons, "counted once");
}

#[test]
fn a_failed_launch_is_an_error_that_leaves_the_sequence_as_it_was() {
    let mut case = Case::open("llama-relu-gqa");
    for (format, placements) in [
        (CacheFormat::F32, &PLACEMENTS[1..2]),
        (CacheFormat::Q8_0, &PLACEMENTS[3..5]),
    ] {
        case.kv_cache = format;
        let tokens = &case.prompt[..7];
        let mut failures = 0;
        let mut want = Vec::new();
        // Launches of loading, of the first token, of a prompt and of later tokens.
        for launches in (0..120).step_by(13).chain([usize::MAX >> 1]).rev() {
            let Some(device) = test_emulator(2, Order::Forward) else {
                return;
            };
            let device = Arc::new(device.failing_after(launches));
            let mut model = case.with(device, placements);
            let mut logits = Vec::new();
            for part in [
                &tokens[..1],
                &tokens[1..2],
                &tokens[2..5],
                &tokens[5..6],
                &tokens[6..],
            ] {
                let before = model.position();
                let found = model.forward(part).or_else(|error| {
                    failures += 1;
                    assert!(error.to_string().contains("made to fail"), "{error}");
                    assert_eq!(model.position(), before);
                    model.forward(part)
                });
                logits.extend(found.unwrap().into_iter().map(f32::to_bits));
            }
            if want.is_empty() {
                want.clone_from(&logits);
            }
            assert!(logits == want, "{format}, {launches}");
            assert_eq!(model.observers().graph_retries(), 0, "no failure is hidden");
        }
        assert!(failures > 5, "{failures}");
    }
}

#[test]
fn a_launch_that_fails_in_a_copied_pass_leaves_the_sequence_as_it_was() {
    let mut case = Case::open("llama-relu-gqa");
    case.copies_cold_neurons = true;
    let tokens: Vec<u32> = case.prompt.iter().copied().cycle().take(150).collect();
    let mut failures = 0;
    let mut want = Vec::new();
    // Never, and in each part of a pass.
    for launches in (20..160).step_by(14).chain([usize::MAX >> 1]).rev() {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let device = Arc::new(device.failing_after(launches));
        let mut model = case.with(device, &PLACEMENTS);
        let mut logits = Vec::new();
        for part in [&tokens[..75], &tokens[75..149], &tokens[149..]] {
            let before = model.position();
            let found = model.forward(part).or_else(|error| {
                failures += 1;
                assert!(error.to_string().contains("made to fail"), "{error}");
                assert_eq!(model.position(), before);
                model.forward(part)
            });
            logits.extend(found.unwrap().into_iter().map(f32::to_bits));
        }
        if want.is_empty() {
            want.clone_from(&logits);
        }
        assert!(logits == want, "{launches}");
    }
    assert!(failures > 3, "{failures}");
}

#[test]
fn a_failed_capture_is_reported() {
    let case = Case::open("llama-relu-gqa");
    for (capture, part) in [(Fails, "made to fail"), (Unsupported, "does not capture")] {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let device = Arc::new(device.with_capture(capture));
        let mut model = case.with(device, &PLACEMENTS[1..2]);
        model.forward(&case.prompt[..1]).unwrap();
        let failure = model.graph_failure().unwrap();
        assert!(failure.contains(part), "{failure}");
    }
}
