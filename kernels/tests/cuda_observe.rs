//! Counting who fires: the kernel against a count by hand, on the emulator or on a card.

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

/// A text: its part, and how many tokens come at once.
const TEXTS: [(usize, &[usize]); 4] = [(0, &[5]), (2, &[1, 1, 40]), (0, &[16, 17]), (1, &[2])];

/// Products of `tokens` tokens, of which some are 0, negative or tiny.
fn products(seed: u64, tokens: usize, neurons: usize) -> Vec<f32> {
    let mut numbers = noise(seed, tokens * neurons);
    for (index, number) in numbers.iter_mut().enumerate() {
        match index % 7 {
            0..3 => *number = 0.0,
            3 => *number = -0.0,
            4 => *number *= 1e-38,
            _ => {}
        }
    }
    // A neuron that never fires, and one that always does.
    for row in numbers.chunks_mut(neurons) {
        row[0] = 0.0;
        row[neurons - 1] = 1.0;
    }
    numbers
}

#[test]
fn counts_are_those_by_hand() {
    for neurons in [1, 31, 32, 257, 700] {
        let mut active = vec![vec![0u32; neurons]; 3];
        let mut magnitude = vec![0.0f64; neurons];
        let mut reuse = [Reuse::default(); 3];
        for (text, (part, batches)) in TEXTS.iter().enumerate() {
            let tokens: usize = batches.iter().sum();
            let numbers = products(text as u64, tokens, neurons);
            let fires = |token: usize, neuron: usize| numbers[token * neurons + neuron] != 0.0;
            for token in 0..tokens {
                for neuron in 0..neurons {
                    magnitude[neuron] += f64::from(numbers[token * neurons + neuron].abs());
                    if !fires(token, neuron) {
                        continue;
                    }
                    active[*part][neuron] += 1;
                    for (window, reuse) in WINDOWS.iter().zip(&mut reuse) {
                        if token >= *window {
                            reuse.active += 1;
                            let mut past = token - window..token;
                            reuse.reused += u64::from(past.any(|token| fires(token, neuron)));
                        }
                    }
                }
            }
        }
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let mut tally = gpu.new_activity_counts(neurons, 3, WINDOWS).unwrap();
            for (text, (part, batches)) in TEXTS.iter().enumerate() {
                let tokens = batches.iter().sum();
                let numbers = products(text as u64, tokens, neurons);
                let mut first = 0;
                for count in *batches {
                    let rows = &numbers[first * neurons..][..count * neurons];
                    let rows = Buffer::from_slice(device, rows).unwrap();
                    gpu.observe(&rows, first, *part, &mut tally).unwrap();
                    first += count;
                }
            }
            for (part, active) in active.iter().enumerate() {
                assert_eq!(&tally.active(part).unwrap(), active, "part {part}");
            }
            assert_eq!(tally.magnitude().unwrap(), magnitude);
            assert_eq!(tally.reuse().unwrap(), reuse);
            assert!(tally.is_finite().unwrap());
            vec![]
        });
    }
}

#[test]
fn what_is_not_finite_is_told() {
    for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let mut tally = gpu.new_activity_counts(40, 1, WINDOWS).unwrap();
            let mut numbers = vec![1.0; 120];
            numbers[79] = strange;
            let rows = Buffer::from_slice(device, &numbers).unwrap();
            gpu.observe(&rows, 0, 0, &mut tally).unwrap();
            assert!(!tally.is_finite().unwrap());
            vec![]
        });
    }
}
