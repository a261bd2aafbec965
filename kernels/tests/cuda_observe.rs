//! Activation counts of the kernel against a straightforward count, on the emulator or a GPU.

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic,
    cuda::{Buffer, Gpu, Reuse},
};

#[path = "support/devices.rs"]
#[expect(dead_code, reason = "this test uses a part")]
mod devices;
#[path = "support/noise.rs"]
mod noise;

use devices::on_every_device;
use noise::noise;

const WINDOWS: [usize; 3] = [1, 4, 16];

/// A text: its part, and its batches of tokens.
const TEXTS: [(usize, &[usize]); 4] = [(0, &[5]), (2, &[1, 1, 40]), (0, &[16, 17]), (1, &[2])];

/// Activations of `tokens` tokens, some of them 0, negative or tiny.
fn activations(seed: u64, tokens: usize, neurons: usize) -> Vec<f32> {
    let mut values = noise(seed, tokens * neurons);
    for (index, value) in values.iter_mut().enumerate() {
        match index % 7 {
            0..3 => *value = 0.0,
            3 => *value = -0.0,
            4 => *value *= 1e-38,
            _ => {}
        }
    }
    // One neuron is never active, one always.
    for row in values.chunks_mut(neurons) {
        row[0] = 0.0;
        row[neurons - 1] = 1.0;
    }
    values
}

#[test]
fn counts_equal_a_straightforward_count() {
    for neurons in [1, 31, 32, 257, 700] {
        let mut active = vec![vec![0u32; neurons]; 3];
        let mut magnitude = vec![0.0f64; neurons];
        let mut reuse = [Reuse::default(); 3];
        for (text, (part, batches)) in TEXTS.iter().enumerate() {
            let tokens: usize = batches.iter().sum();
            let values = activations(text as u64, tokens, neurons);
            let is_active = |token: usize, neuron: usize| values[token * neurons + neuron] != 0.0;
            for token in 0..tokens {
                for neuron in 0..neurons {
                    magnitude[neuron] += f64::from(values[token * neurons + neuron].abs());
                    if !is_active(token, neuron) {
                        continue;
                    }
                    active[*part][neuron] += 1;
                    for (window, reuse) in WINDOWS.iter().zip(&mut reuse) {
                        if token >= *window {
                            reuse.active += 1;
                            let mut past = token - window..token;
                            reuse.reused += u64::from(past.any(|token| is_active(token, neuron)));
                        }
                    }
                }
            }
        }
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let mut counts = gpu.new_activity_counts(neurons, 3, WINDOWS).unwrap();
            for (text, (part, batches)) in TEXTS.iter().enumerate() {
                let tokens = batches.iter().sum();
                let values = activations(text as u64, tokens, neurons);
                let mut first = 0;
                for count in *batches {
                    let rows = &values[first * neurons..][..count * neurons];
                    let rows = Buffer::from_slice(device, rows).unwrap();
                    gpu.observe(&rows, first, *part, &mut counts).unwrap();
                    first += count;
                }
            }
            for (part, active) in active.iter().enumerate() {
                assert_eq!(&counts.active(part).unwrap(), active, "part {part}");
            }
            assert_eq!(counts.magnitude().unwrap(), magnitude);
            assert_eq!(counts.reuse().unwrap(), reuse);
            assert!(counts.is_finite().unwrap());
            vec![]
        });
    }
}

#[test]
fn values_that_are_not_finite_are_reported() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let mut counts = gpu.new_activity_counts(40, 1, WINDOWS).unwrap();
            let mut values = vec![1.0; 120];
            values[79] = special;
            let rows = Buffer::from_slice(device, &values).unwrap();
            gpu.observe(&rows, 0, 0, &mut counts).unwrap();
            assert!(!counts.is_finite().unwrap());
            vec![]
        });
    }
}
