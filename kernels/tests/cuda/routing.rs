//! Selection of experts by the kernel `route`.

use std::{cmp::Reverse, sync::Arc};

use powerinfer_kernels::{
    Arithmetic,
    cuda::{Buffer, Gpu, GpuLinear, HostBuffer, PredictedMask, Router, Routes},
};
use powerinfer_tensor::{Format, OwnedMatrix, pack};

use crate::{devices::on_every_device, noise::noise, upload, zeros};

/// Values of `is_sigmoid` (sigmoids instead of exponentials) and `sums_all` (the sum over all experts instead of the selected ones).
const SCORES: [(bool, bool); 3] = [(false, true), (false, false), (true, false)];

#[test]
fn routers_select_the_experts_with_the_largest_logits() {
    for (experts, per_token, shared, neurons, hot) in [
        (1, 1, false, 3, 3),
        (5, 2, true, 70, 40),
        (128, 8, false, 4500, 4500),
        (300, 7, true, 901, 0),
    ] {
        let scale = if experts == 5 { 16.0 } else { 1.0 };
        for (is_sigmoid, sums_all) in SCORES {
            for is_predicted in [false, true] {
                let tokens = 3;
                let block_count = experts + usize::from(shared);
                let mut logits = noise(31, tokens * experts);
                if experts > 2 {
                    // The first of equal logits is preferred, and NaN is the largest.
                    logits[2] = logits[1];
                    logits[experts + 1] = 5.0;
                    logits[experts + 2] = 5.0;
                    logits[2 * experts + 2] = f32::NAN;
                }
                let shared_logits = noise(32, tokens);
                let blocks: Vec<u16> = (0..neurons)
                    .map(|neuron| (7 * neuron % block_count) as u16)
                    .collect();
                let hidden = 300;
                let biases = noise(34, block_count * hidden);
                let words = neurons.div_ceil(32);
                let before: Vec<u32> = noise(33, tokens * words)
                    .into_iter()
                    .map(f32::to_bits)
                    .collect();
                let mut want = Vec::new();
                for (token, logits) in logits.chunks(experts).enumerate() {
                    let mut order: Vec<usize> = (0..experts).collect();
                    order.sort_by_key(|expert| Reverse(ordered(logits[*expert])));
                    let score = |expert: &usize| match f64::from(logits[*expert]) {
                        logit if is_sigmoid => 1.0 / (1.0 + (-logit).exp()),
                        logit => logit.exp(),
                    };
                    let summed = if sums_all { experts } else { per_token };
                    let sum: f64 = order[..summed].iter().map(score).sum();
                    let mut weights = vec![0.0; block_count];
                    for expert in &order[..per_token] {
                        weights[*expert] = f64::from(scale) * score(expert) / sum;
                    }
                    if shared {
                        let logit = f64::from(shared_logits[token]);
                        weights[experts] = 1.0 / (1.0 + (-logit).exp());
                    }
                    want.extend(weights);
                }
                let linear = pack(Format::F32, experts, 1, &vec![0.0; experts]);
                let gate = pack(Format::F32, 1, 1, &[0.0]);
                on_every_device(|device| {
                    let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
                    let upload_linear = |matrix: &OwnedMatrix| {
                        GpuLinear::upload(device, &matrix.as_view(), None).unwrap()
                    };
                    let router = Router {
                        linear: upload_linear(&linear),
                        shared_gate: shared.then(|| upload_linear(&gate)),
                        blocks: Buffer::from_slice(device, &blocks).unwrap(),
                        biases: shared.then(|| upload(device, &biases)),
                        block_count,
                        per_token,
                        is_sigmoid,
                        sums_all,
                        scale,
                        shared_weight: 1.0,
                    };
                    let mut routes = Routes {
                        logits: upload(device, &logits),
                        shared_logits: upload(device, &shared_logits),
                        weights: zeros(device, tokens * block_count),
                        bias_sums: zeros(device, if shared { tokens * hidden } else { 0 }),
                        host: HostBuffer::new(device, tokens * block_count).unwrap(),
                    };
                    let mut mask = Buffer::from_slice(device, &before).unwrap();
                    let mut activations = upload(device, &vec![9.0; tokens * hot]);
                    let host_mask = HostBuffer::new(device, tokens * words).unwrap();
                    let mut masks = PredictedMask {
                        mask: &mut mask,
                        host_mask: Some(&host_mask),
                        activations: &mut activations,
                        hot_count: hot,
                    };
                    gpu.route(&router, &mut routes, true, &mut masks, is_predicted)
                        .unwrap();
                    device.synchronise().unwrap();
                    let weights = routes.weights.to_vec().unwrap();
                    let mut on_host = vec![0.0; weights.len()];
                    routes.host.read_f32(&mut on_host);
                    let bits = |values: &[f32]| -> Vec<u32> {
                        values.iter().map(|value| value.to_bits()).collect()
                    };
                    assert_eq!(bits(&weights), bits(&on_host));
                    for (index, (found, want)) in weights.iter().zip(&want).enumerate() {
                        let is_near = (f64::from(*found) - want).abs() <= 1e-5 * want.abs();
                        let is_same = is_near || found.is_nan() && want.is_nan();
                        assert!(
                            is_same,
                            "weight {index} of {block_count}: {found}, not {want}"
                        );
                    }
                    let sums = routes.bias_sums.to_vec().unwrap();
                    for (index, found) in sums.iter().enumerate() {
                        let (token, column) = (index / hidden, index % hidden);
                        let weights = &want[token * block_count..][..block_count];
                        let terms = weights.iter().zip(biases[column..].iter().step_by(hidden));
                        let selected = terms.filter(|(weight, _)| **weight != 0.0);
                        let want: f64 = selected.map(|(w, bias)| w * f64::from(*bias)).sum();
                        let is_near = (f64::from(*found) - want).abs() <= 1e-4 * (1.0 + want.abs());
                        assert!(
                            is_near || found.is_nan() && want.is_nan(),
                            "{found}, not {want}"
                        );
                    }
                    let mask = mask.to_vec().unwrap();
                    for (index, word) in host_mask.words().iter().enumerate() {
                        let word = word.load(std::sync::atomic::Ordering::Relaxed);
                        assert_eq!(word, mask[index], "word {index}");
                    }
                    for token in 0..tokens {
                        for neuron in 0..32 * words {
                            let bit = |words_of: &[u32]| {
                                words_of[token * words + neuron / 32] >> (neuron % 32) & 1 == 1
                            };
                            let block = blocks.get(neuron);
                            let is_selected = block.is_some_and(|block| {
                                want[token * block_count + usize::from(*block)] != 0.0
                            });
                            let is_left = is_selected && (!is_predicted || bit(&before));
                            assert_eq!(bit(&mask), is_left, "token {token}, neuron {neuron}");
                        }
                    }
                    let activations = activations.to_vec().unwrap();
                    assert!(activations.iter().all(|h| *h == 0.0));
                    // NaN is not equal to itself.
                    weights.iter().map(|weight| weight.max(0.0)).collect()
                });
            }
        }
    }
}

/// Maps a logit to an integer that is ordered as `total_cmp` orders logits.
fn ordered(logit: f32) -> u32 {
    let bits = logit.to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}
