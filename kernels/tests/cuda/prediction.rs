//! Prediction of active neurons, by a network or by sign bits.

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic,
    cuda::{Buffer, Gpu, GpuLinear, GpuMatrix, HostBuffer, PredictedMask, Predictor, SignBits},
};
use powerinfer_tensor::{Format, NormKind, pack, pack_signs};

use crate::{Norm, devices::on_every_device, noise::noise, product, upload, zeros};

#[test]
fn predictors_select_the_neurons_of_their_formula() {
    for format in Format::ALL {
        for (hidden, rank, neurons, hot, is_linear) in [
            (40, 7, 33, 20, false),
            (64, 70, 200, 200, true),
            (33, 300, 65, 0, false),
            (33, 300, 65, 0, true),
            (32, 1100, 160, 100, false),
        ] {
            let a = pack(format, rank, hidden, &noise(11, rank * hidden));
            let b = pack(format, rank, neurons, &noise(12, rank * neurons));
            let blocks = rank.div_ceil(32);
            let scales = format.is_quantised().then(|| noise(13, blocks * neurons));
            let (bias, x) = (noise(14, neurons), noise(15, hidden));
            let hidden_units = product(&a.as_view(), &x, Arithmetic::Integer);
            let mut rows = vec![0.0; rank * neurons];
            for (row, out) in rows.chunks_mut(neurons).enumerate() {
                b.as_view().dequantise_row(row, out);
            }
            let logit = |neuron: usize| {
                let terms = (0..rank).map(|unit| {
                    let scale = scales
                        .as_ref()
                        .map_or(1.0, |scales| scales[unit / 32 * neurons + neuron]);
                    let lowest = if is_linear { f32::MIN } else { 0.0 };
                    f64::from(hidden_units[unit].max(lowest))
                        * f64::from(rows[unit * neurons + neuron])
                        * f64::from(scale)
                });
                terms.sum::<f64>() + f64::from(bias[neuron])
            };
            on_every_device(|device| {
                let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
                let predictor = Predictor {
                    a: GpuLinear::upload(device, &a.as_view(), None).unwrap(),
                    b_transposed: GpuMatrix::upload(device, &b.as_view()).unwrap(),
                    b_scales: scales.as_ref().map(|scales| upload(device, scales)),
                    bias: upload(device, &bias),
                    threshold: 0.1,
                    is_linear,
                };
                let words = neurons.div_ceil(32);
                let (mut mask, mut activations) =
                    (zeros(device, words), upload(device, &vec![9.0; neurons]));
                let host = HostBuffer::new(device, words).unwrap();
                let mut predicted = PredictedMask {
                    mask: &mut mask,
                    host_mask: Some(&host),
                    activations: &mut activations,
                    hot_count: hot,
                };
                let x = upload(device, &x);
                gpu.predict(
                    &x,
                    None,
                    &predictor,
                    &mut zeros(device, rank),
                    None,
                    &mut predicted,
                )
                .unwrap();
                device.synchronise().unwrap();
                let mask = mask.to_vec().unwrap();
                let host_mask: Vec<u32> = host
                    .words()
                    .iter()
                    .map(|word| word.load(std::sync::atomic::Ordering::Relaxed))
                    .collect();
                assert_eq!(mask, host_mask);
                for neuron in 0..32 * words {
                    let found = mask[neuron / 32] >> (neuron % 32) & 1 == 1;
                    if neuron >= neurons {
                        assert!(!found, "no neuron {neuron}");
                    } else if (logit(neuron) - 0.1).abs() > 1e-4 {
                        assert_eq!(
                            found,
                            logit(neuron) >= 0.1,
                            "{format}, rank {rank}, neuron {neuron}"
                        );
                    }
                }
                let activations = activations.to_vec().unwrap();
                assert!(activations[..hot].iter().all(|h| *h == 0.0));
                assert!(activations[hot..].iter().all(|h| *h == 9.0));
                mask.into_iter().map(f32::from_bits).collect()
            });
        }
    }
}

#[test]
fn sign_bits_select_the_neurons_with_enough_agreements() {
    let shapes = [(1, 1), (63, 40), (64, 31), (200, 300), (1030, 70)];
    let plain = shapes.map(|shape| (shape, None));
    let kinds = [NormKind::RootMeanSquare, NormKind::Layer];
    let normed = kinds.map(|kind| ((5000, 33), Some(kind)));
    for ((columns, neurons), kind) in plain.into_iter().chain(normed) {
        let (gate, x) = (noise(16, columns * neurons), noise(17, columns));
        let norm = kind.map(|kind| Norm::new(kind, columns));
        let input = norm.as_ref().map_or(x.clone(), |norm| norm.apply(&x));
        let agreements = columns as u32 / 2 + 1;
        let want: Vec<bool> = gate
            .chunks(columns)
            .map(|row| {
                let same = row
                    .iter()
                    .zip(&input)
                    .filter(|(w, x)| w.is_sign_negative() == x.is_sign_negative());
                same.count() as u32 >= agreements
            })
            .collect();
        on_every_device(|device| {
            let words: Vec<u64> = gate.chunks(columns).flat_map(pack_signs).collect();
            let signs = SignBits {
                signs: Buffer::from_slice(device, &words).unwrap(),
                neurons,
                columns,
                min_agreements: agreements,
            };
            let (mut mask, mut activations) =
                (zeros(device, neurons.div_ceil(32)), zeros(device, neurons));
            let mut predicted = PredictedMask {
                mask: &mut mask,
                host_mask: None,
                activations: &mut activations,
                hot_count: neurons,
            };
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let norm = norm.as_ref().map(|norm| norm.upload(device));
            gpu.predict_by_signs(&upload(device, &x), norm.as_ref(), &signs, &mut predicted)
                .unwrap();
            let mask = mask.to_vec().unwrap();
            let found: Vec<bool> = (0..neurons)
                .map(|neuron| mask[neuron / 32] >> (neuron % 32) & 1 == 1)
                .collect();
            assert_eq!(found, want);
            Vec::new()
        });
    }
}
