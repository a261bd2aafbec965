//! Times, neurons and bytes of device and host.

use std::{sync::Arc, time::Instant};

use powerinfer_emulator::{GraphCapture, Order, test_emulator};
use powerinfer_model::{LanguageModel, ModelConfig};
use powerinfer_runtime::{PassTimes, SingleSession};

use crate::{
    case::Case,
    one_by_one,
    placement::{ALL, HALF},
};

/// Bytes which the device reads for four tokens if it has attention and the first half of the neurons, all in 32 bits,
/// and every gate is read.
fn expected_bytes(config: &ModelConfig, times: &PassTimes) -> u64 {
    let (tokens, layers) = (4, config.layer_count);
    let queries = config.head_count * config.head_size;
    let keys = config.kv_head_count * config.head_size;
    let projections = 2 * config.hidden_size * (queries + keys);
    let positions = 1 + 2 + 3 + 4;
    let gates = tokens * (config.ffn_size / 2) * config.hidden_size;
    let numbers = layers * (tokens * projections + positions * 2 * keys + gates);
    // Rows of up and of down.
    let rows = 2 * times.neurons_on_device * config.hidden_size as u64;
    4 * (numbers as u64 + rows)
}

#[test]
fn device_and_host_are_timed_in_every_layer() {
    let case = Case::open("llama-relu-gqa");
    let prompt = &case.prompt;
    for capture in [GraphCapture::Unsupported, GraphCapture::Works] {
        let Some(device) = test_emulator(2, Order::Forward) else {
            return;
        };
        let mut model = case.with(Arc::new(device.with_capture(capture)), &[HALF]);
        let want = one_by_one(&mut model, &prompt[..4]);
        model.reset();
        model.take_pass_times(true);
        let started = Instant::now();
        let found = one_by_one(&mut model, &prompt[..4]);
        let (elapsed, times) = (started.elapsed(), model.take_pass_times(false).unwrap());
        assert!(found == want, "measuring changes nothing");
        assert_eq!(times.tokens, 4);
        assert_eq!(times.layers.len(), case.config().layer_count);
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
        let bytes = expected_bytes(case.config(), &times);
        assert_eq!(times.device_bytes, bytes, "{times:?}");
        assert!(times.host_bytes > 0, "{times:?}");
        assert!(model.device_read_bandwidth().unwrap().unwrap() > 0.0);
        // Measuring has ended; it starts again with a prompt.
        model.forward(&prompt[4..6]).unwrap();
        assert_eq!(model.take_pass_times(true).unwrap().tokens, 0);
        model.forward(&prompt[6..9]).unwrap();
        let times = model.take_pass_times(false).unwrap();
        assert_eq!(times.tokens, 3);
        assert!(!times.total().device.is_zero(), "{times:?}");
        assert!(!times.total().host.is_zero(), "{times:?}");
    }
}

#[test]
fn the_host_has_no_part_in_a_prompt_whose_cold_neurons_are_copied() {
    let mut case = Case::open("llama-relu-gqa");
    case.copies_cold_neurons = true;
    let Some(mut model) = case.on_device(Order::Forward, &[HALF]) else {
        return;
    };
    model.take_pass_times(true);
    // More tokens than a batch.
    model.forward(&case.prompt[..9]).unwrap();
    let times = model.take_pass_times(false).unwrap();
    assert_eq!((times.tokens, times.device_share()), (9, 1.0));
    assert!(times.total().host.is_zero(), "{times:?}");
}

#[test]
fn a_device_reads_the_bytes_that_the_cpu_would() {
    let case = Case::open("llama-relu-gqa");
    let Some(mut device) = case.on_device(Order::Forward, &[ALL]) else {
        return;
    };
    let mut cpu = case.on_host(&[ALL]);
    let bytes = |model: &mut SingleSession, tokens: &[u32]| {
        model.reset();
        model.observers_mut().take_statistics();
        model.forward(tokens).unwrap();
        model.observers_mut().take_statistics().all_bytes_read() as f64
    };
    // A token, and a batch.
    for tokens in [&case.prompt[..1], &case.prompt[..5]] {
        let (found, want) = (bytes(&mut device, tokens), bytes(&mut cpu, tokens));
        assert!(
            (found / want - 1.0).abs() < 0.05,
            "{}: {found}, {want}",
            tokens.len()
        );
    }
}
