//! Prefill kernels against the CPU kernels and against the kernels of one token: on the emulator in several thread orders, or
//! on a GPU.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::sync::Arc;

use powerinfer_kernels::{
    Arithmetic, Isa,
    cuda::{
        Buffer, Device, DownAddends, F16Buffer, Ffn, Gpu, GpuLinear, GpuMatrix, GpuNorm,
        HostBuffer, HostMirror, NeuronFilter, PredictedMask, Predictor, TokenList, TokenMasks,
    },
};
use powerinfer_tensor::{Activation, FfnKind, Format, NormKind, pack};

#[path = "support/devices.rs"]
mod devices;
#[path = "support/noise.rs"]
mod noise;

use devices::{assert_near, on_every_device};
use noise::noise;

fn upload(device: &Arc<dyn Device>, values: &[f32]) -> Buffer<f32> {
    Buffer::from_slice(device, values).unwrap()
}

fn zeros<T: bytemuck::Pod>(device: &Arc<dyn Device>, count: usize) -> Buffer<T> {
    Buffer::new(device, count).unwrap()
}

/// Outputs, inputs and tokens: less than a tile, whole tiles, odd sizes.
const SHAPES: [[usize; 3]; 7] = [
    [1, 1, 2],
    [33, 70, 5],
    [64, 64, 64],
    [40, 130, 67],
    [130, 100, 131],
    [31, 256, 17],
    // Split along the columns.
    [33, 800, 9],
];

#[test]
fn gemm_equals_that_of_the_cpu() {
    for format in Format::ALL {
        for [rows, columns, tokens] in SHAPES {
            let packed = pack(format, rows, columns, &noise(1, rows * columns));
            let (mut x, bias) = (noise(2, tokens * columns), noise(3, rows));
            // Beyond the range of f16, and far below it.
            x[..columns].iter_mut().for_each(|x| *x *= 1e6);
            x[columns..2 * columns].iter_mut().for_each(|x| *x *= 1e-9);
            let mut want = Vec::new();
            for x in x.chunks(columns) {
                let mut products = vec![0.0; rows];
                Isa::SCALAR.gemv(&packed.as_view(), x, &mut products);
                want.push(products);
            }
            for arithmetic in [Arithmetic::Float, Arithmetic::Integer] {
                on_every_device(|device| {
                    let gpu = Gpu::new(Arc::clone(device), arithmetic);
                    let linear = GpuLinear::upload(device, &packed.as_view(), Some(&bias)).unwrap();
                    let mut x_f16 = gpu.new_f16_buffer(tokens + 3, columns + 9, format).unwrap();
                    let sums = gpu.new_split_sums(&[[columns, rows]], tokens).unwrap();
                    let x = upload(device, &x);
                    gpu.to_f16(&x, tokens, None, format, &mut x_f16, None)
                        .unwrap();
                    let mut out = zeros(device, tokens * rows);
                    gpu.gemm(&x_f16, &linear, &sums, &mut out, false).unwrap();
                    gpu.gemm(&x_f16, &linear, &sums, &mut out, true).unwrap();
                    let found = out.to_vec().unwrap();
                    // f16 has 11 significant bits.
                    let tolerance = if arithmetic == Arithmetic::Integer {
                        2e-3
                    } else {
                        4e-6
                    };
                    let tokens = found.chunks(rows).zip(&want);
                    for (token, (found, want)) in tokens.enumerate() {
                        let unit = [1e6, 1e-9].get(token).copied().unwrap_or(1.0);
                        // Product and bias were added twice; the bias absorbs the small values.
                        let sums = found.iter().zip(&bias).map(|(out, bias)| match token {
                            1 => (out / 2.0 - bias) * 0.0,
                            _ => (out / 2.0 - bias) / unit,
                        });
                        let want = want.iter().map(|want| match token {
                            1 => 0.0,
                            _ => want / unit,
                        });
                        let columns = (columns as f32).sqrt();
                        assert_near(
                            &sums.collect::<Vec<_>>(),
                            &want.collect::<Vec<_>>(),
                            tolerance * columns,
                            &format!(
                                "{format} {rows} x {columns}, token {token} of {tokens:?}, {arithmetic:?}",
                                tokens = x.len()
                            ),
                        );
                    }
                    found
                });
            }
        }
    }
}

#[test]
fn long_sums_of_one_sign_keep_f32_precision() {
    let (rows, tokens) = (3, 2);
    for columns in [4096, 8192, 11008] {
        let positive = |seed, count| {
            let values = noise(seed, count).into_iter();
            values.map(|x| x.abs() + 0.1).collect::<Vec<f32>>()
        };
        let (weights, x) = (positive(40, rows * columns), positive(41, tokens * columns));
        let packed = pack(Format::F32, rows, columns, &weights);
        let dot = |token: &[f32], row: &[f32]| {
            let products = token
                .iter()
                .zip(row)
                .map(|(x, y)| f64::from(*x) * f64::from(*y));
            products.sum::<f64>()
        };
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
            let mut x_f16 = gpu.new_f16_buffer(tokens, columns, Format::F32).unwrap();
            let sums = gpu.new_split_sums(&[[columns, rows]], tokens).unwrap();
            gpu.to_f16(
                &upload(device, &x),
                tokens,
                None,
                Format::F32,
                &mut x_f16,
                None,
            )
            .unwrap();
            let mut out = zeros(device, tokens * rows);
            gpu.gemm(&x_f16, &linear, &sums, &mut out, false).unwrap();
            let found = out.to_vec().unwrap();
            for (index, found) in found.iter().enumerate() {
                let (token, row) = (index / rows, index % rows);
                let want = dot(
                    &x[token * columns..][..columns],
                    &weights[row * columns..][..columns],
                );
                let error = (f64::from(*found) - want) / want;
                assert!(
                    error.abs() < 1e-5,
                    "{columns} columns, output {index}: relative error {error:e}"
                );
            }
            found
        });
    }
}

#[test]
fn small_values_keep_their_precision_through_the_scale_per_token() {
    let (rows, columns) = (5, 40);
    let packed = pack(Format::F16, rows, columns, &noise(4, rows * columns));
    let x: Vec<f32> = noise(5, 2 * columns).iter().map(|x| x * 1e-12).collect();
    let mut want = vec![0.0; rows];
    Isa::SCALAR.gemv(&packed.as_view(), &x[columns..], &mut want);
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
        let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
        let mut x_f16 = gpu.new_f16_buffer(2, columns, Format::F16).unwrap();
        let sums = gpu.new_split_sums(&[[columns, rows]], 2).unwrap();
        gpu.to_f16(&upload(device, &x), 2, None, Format::F16, &mut x_f16, None)
            .unwrap();
        let mut out = zeros(device, 2 * rows);
        gpu.gemm(&x_f16, &linear, &sums, &mut out, false).unwrap();
        let found = out.to_vec().unwrap();
        let scaled_up = |values: &[f32]| values.iter().map(|x| x * 1e12).collect::<Vec<_>>();
        assert_near(&scaled_up(&found[rows..]), &scaled_up(&want), 1e-5, "tiny");
        found
    });
}

#[test]
fn listed_tokens_are_multiplied_as_among_all_and_added_to_their_rows() {
    let (rows, columns, tokens) = (33, 70, 9);
    let list = [4u32, 0, 7];
    for format in [Format::F32, Format::Q4_0] {
        let packed = pack(format, rows, columns, &noise(50, rows * columns));
        let (x, before) = (noise(51, tokens * columns), noise(52, tokens * rows));
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
            let new_input = || gpu.new_f16_buffer(tokens, columns, format).unwrap();
            let (mut all, mut some) = (new_input(), new_input());
            let sums = gpu.new_split_sums(&[[columns, rows]], tokens).unwrap();
            let x = upload(device, &x);
            gpu.to_f16(&x, tokens, None, format, &mut all, None)
                .unwrap();
            // The list is in the middle of a buffer.
            let lists = Buffer::from_slice(device, &[8, 4, 0, 7, 1]).unwrap();
            let listed = TokenList {
                lists: &lists,
                start: 1,
                count: list.len(),
            };
            gpu.gather_tokens(&all, listed, &mut some).unwrap();
            let product = |x: &F16Buffer, count: usize| {
                let mut out = zeros(device, count * rows);
                gpu.gemm(x, &linear, &sums, &mut out, false).unwrap();
                out
            };
            let want = product(&all, tokens).to_vec().unwrap();
            let found = product(&some, list.len());
            let mut sum = upload(device, &before);
            gpu.scatter_tokens(&found, listed, &mut sum).unwrap();
            let found = found.to_vec().unwrap();
            let mut wanted_sum = before.clone();
            for (row, token) in list.into_iter().enumerate() {
                let token = token as usize;
                let found = &found[row * rows..][..rows];
                assert_eq!(found, &want[token * rows..][..rows], "token {token}");
                let sums = wanted_sum[token * rows..][..rows].iter_mut();
                sums.zip(found).for_each(|(sum, found)| *sum += found);
            }
            let sum = sum.to_vec().unwrap();
            assert_eq!(sum, wanted_sum);
            sum
        });
    }
}

#[test]
fn nan_and_infinity_propagate() {
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
        let packed = pack(Format::F16, 3, 4, &noise(6, 12));
        let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
        let x = [
            [1.0, f32::NAN, 0.0, 0.0],
            [1.0, 2.0, f32::INFINITY, 0.0],
            [0.0; 4],
        ];
        let mut x_f16 = gpu.new_f16_buffer(3, 4, Format::F16).unwrap();
        let sums = gpu.new_split_sums(&[[4, 3]], 3).unwrap();
        let x = upload(device, x.as_flattened());
        gpu.to_f16(&x, 3, None, Format::F16, &mut x_f16, None)
            .unwrap();
        let mut out = zeros(device, 9);
        gpu.gemm(&x_f16, &linear, &sums, &mut out, false).unwrap();
        let found = out.to_vec().unwrap();
        assert!(found[..6].iter().all(|x| !x.is_finite()), "{found:?}");
        assert_eq!(found[6..], [0.0; 3]);
        Vec::new()
    });
}

#[test]
fn down_equals_that_of_the_cpu_for_many_tokens() {
    for format in Format::ALL {
        for [hot, hidden, tokens] in [[70, 40, 130], [130, 200, 70], [800, 33, 65]] {
            let packed = pack(format, hot, hidden, &noise(50, hot * hidden));
            let (products, before) = (noise(51, tokens * hot), noise(52, tokens * hidden));
            let listed: Vec<u32> = (0..hot as u32).collect();
            let mut want = before.clone();
            for (products, want) in products.chunks(hot).zip(want.chunks_mut(hidden)) {
                Isa::SCALAR.axpy_rows(&packed.as_view(), &listed, products, 0..hidden, want);
            }
            on_every_device(|device| {
                let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
                let view = packed.as_view();
                let down = GpuMatrix::upload(device, &view).unwrap();
                let mut x_f16 = gpu.new_f16_buffer(tokens, hot, format).unwrap();
                let sums = gpu.new_split_sums(&[[hot, hidden]], tokens).unwrap();
                gpu.to_f16(
                    &upload(device, &products),
                    tokens,
                    None,
                    format,
                    &mut x_f16,
                    None,
                )
                .unwrap();
                let mut out = upload(device, &before);
                let (rows, addends) = (0..hot, DownAddends::default());
                gpu.gemm_down(&x_f16, &down, &rows, &sums, addends, &mut out)
                    .unwrap();
                let found = out.to_vec().unwrap();
                // f16 has 11 significant bits.
                let tolerance = 2e-3 * (hot as f32).sqrt();
                assert_near(
                    &found,
                    &want,
                    tolerance,
                    &format!("{format} {hot} x {hidden}"),
                );
                found
            });
        }
    }
}

/// Compares the FFN of a batch of tokens with the kernels of one token.
fn check_ffn(
    format: Format,
    [hot, hidden, tokens]: [usize; 3],
    norm: NormKind,
    kind: FfnKind,
    filter: usize,
    is_masked: bool,
) {
    let matrix = |seed| pack(format, hot, hidden, &noise(seed, hot * hidden));
    let (gate, up, down) = (matrix(7), matrix(8), matrix(9));
    let (x, before) = (noise(10, tokens * hidden), noise(11, tokens * hidden));
    let (scale, cold) = (noise(12, hot), noise(13, tokens * hidden));
    let scale: Vec<f32> = scale.iter().map(|scale| scale.abs() + 0.1).collect();
    let (neurons, weight) = (hot + 40, noise(14, hidden));
    let bias = noise(23, hidden);
    let norm_bias = (norm == NormKind::Layer).then_some(&bias[..]);
    let words = neurons.div_ceil(32);
    let mask: Vec<u32> = (0..tokens * words)
        .map(|word| (word as u32 + 1).wrapping_mul(2_654_435_761))
        .collect();
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
        let linear = |packed: &powerinfer_tensor::OwnedMatrix, seed| {
            GpuLinear::upload(device, &packed.as_view(), Some(&noise(seed, hot))).unwrap()
        };
        let ffn = Ffn {
            gate: linear(&gate, 15),
            up: (kind != FfnKind::Plain).then(|| linear(&up, 16)),
            down: GpuMatrix::upload(device, &down.as_view()).unwrap(),
            bias: Some(upload(device, &noise(17, hidden))),
            kind,
            activation: Activation::Relu,
        };
        let norm = GpuNorm::upload(device, norm, 1e-5, &weight, norm_bias).unwrap();
        let scale = upload(device, &scale);
        let filter = match filter {
            0 => NeuronFilter::NonZeroGate,
            1 => NeuronFilter::ScaledGateThreshold(0.4, &scale),
            _ => NeuronFilter::ContributionThreshold {
                threshold: 0.4,
                scale: &scale,
                centre: None,
            },
        };
        let offset = upload(device, &noise(18, hidden));
        let (step, ready) = (
            Buffer::from_slice(device, &[7u32]).unwrap(),
            HostBuffer::new(device, 3).unwrap(),
        );
        let input = HostBuffer::new(device, tokens * hidden).unwrap();
        let host = HostMirror {
            input: &input,
            flags: &ready,
            flag: 2,
            step: &step,
        };
        let share = HostBuffer::new(device, tokens * hidden).unwrap();
        share.write_f32(&cold);

        // As a batch, in two pieces.
        let new_f16 = |columns| gpu.new_f16_buffer(tokens, columns, format).unwrap();
        let (mut x_f16, mut products) = (new_f16(hidden), new_f16(hot));
        let (sums, mut scratch) = (
            gpu.new_split_sums(&[[hidden, hot], [hot, hidden]], tokens)
                .unwrap(),
            gpu.down_scratch([].into_iter(), 1).unwrap(),
        );
        let x_on_device = upload(device, &x);
        gpu.to_f16(
            &x_on_device,
            tokens,
            Some(&norm),
            format,
            &mut x_f16,
            Some(host),
        )
        .unwrap();
        gpu.signal_host(host).unwrap();
        let mask_on_device = Buffer::from_slice(device, &mask).unwrap();
        let mut hidden_on_device = upload(device, &before);
        let half = hot.div_ceil(2);
        for rows in [0..half, half..hot] {
            if rows.is_empty() {
                continue;
            }
            let products_of = |linear: &GpuLinear| {
                let mut out = zeros(device, tokens * rows.len());
                gpu.gemm_rows(&x_f16, linear, &rows, &sums, &mut out, false)
                    .unwrap();
                out
            };
            let mut gates = products_of(&ffn.gate);
            let ups = ffn.up.as_ref().map(products_of);
            gpu.activate_gate_up(
                &ffn,
                &rows,
                filter,
                None,
                &mut gates,
                ups.as_ref(),
                is_masked.then_some(TokenMasks {
                    mask: &mask_on_device,
                    neurons,
                    first: 0,
                    tokens: None,
                }),
                &mut products,
                &mut scratch,
            )
            .unwrap();
            let addends = if rows.end == hot {
                DownAddends {
                    bias: ffn.bias.as_ref(),
                    offset: Some(&offset),
                    cold: Some(&share),
                }
            } else {
                DownAddends::default()
            };
            let (down, out) = (&ffn.down, &mut hidden_on_device);
            gpu.gemm_down(&products, down, &rows, &sums, addends, out)
                .unwrap();
        }
        let found = hidden_on_device.to_vec().unwrap();
        let down_rows = scratch.counts().unwrap().down_rows;
        assert_eq!(
            ready.words()[2].load(std::sync::atomic::Ordering::Acquire),
            7
        );
        let mut host_input = vec![0.0; tokens * hidden];
        input.read_f32(&mut host_input);

        // Token by token.
        let mut single_scratch = gpu.down_scratch([&ffn.down].into_iter(), 1).unwrap();
        let (mut want, mut want_host_input) = (Vec::new(), Vec::new());
        for token in 0..tokens {
            let slice = |all: &[f32]| upload(device, &all[token * hidden..][..hidden]);
            let mut activations = zeros(device, hot);
            let own_mask = Buffer::from_slice(device, &mask[token * words..][..words]).unwrap();
            let mask = is_masked.then_some(&own_mask);
            gpu.gate_up(
                &slice(&x),
                Some(&norm),
                &ffn,
                filter,
                None,
                mask,
                &mut activations,
                None,
                Some(host),
                &mut single_scratch,
            )
            .unwrap();
            let mut hidden_on_device = slice(&before);
            gpu.down(
                &ffn,
                &activations,
                [ffn.bias.as_ref(), Some(&offset)],
                None,
                &mut single_scratch,
                &mut hidden_on_device,
            )
            .unwrap();
            let sums = hidden_on_device.to_vec().unwrap();
            want.extend(sums.iter().zip(&cold[token * hidden..]).map(|(x, y)| x + y));
            let mut input = vec![0.0; hidden];
            host.input.read_f32(&mut input);
            want_host_input.extend(input);
        }
        let context = format!("{format}, {hot} of {hidden}, {tokens} tokens, {kind:?}, {filter:?}");
        assert_near(&found, &want, 1e-5, &context);
        // The norm of a batch has half as many threads, so that sums of long rows have other bits.
        assert_near(&host_input, &want_host_input, 1e-6, &context);
        assert_eq!(
            down_rows,
            single_scratch.counts().unwrap().down_rows,
            "{context}"
        );
        found
    });
}

#[test]
fn batched_ffns_equal_those_of_single_tokens() {
    use NormKind::{Layer, RootMeanSquare};
    for format in Format::ALL {
        check_ffn(format, [33, 70, 5], RootMeanSquare, FfnKind::Gated, 0, true);
    }
    check_ffn(
        Format::Q4_0,
        [100, 64, 66],
        RootMeanSquare,
        FfnKind::Plain,
        0,
        false,
    );
    check_ffn(
        Format::F16,
        [1, 33, 2],
        RootMeanSquare,
        FfnKind::DoublyGated,
        0,
        false,
    );
    check_ffn(
        Format::Bf16,
        [65, 31, 9],
        RootMeanSquare,
        FfnKind::Gated,
        1,
        true,
    );
    check_ffn(
        Format::Q8_0,
        [64, 100, 4],
        RootMeanSquare,
        FfnKind::Gated,
        2,
        false,
    );
    // Long enough for the unrolled loops over the input.
    check_ffn(Format::Q8_0, [9, 4700, 3], Layer, FfnKind::Gated, 0, true);
    check_ffn(Format::F32, [9, 4700, 3], Layer, FfnKind::Gated, 0, true);
}

#[test]
fn batched_predictions_equal_those_of_single_tokens() {
    let (hidden, rank, neurons, tokens) = (40, 37, 70, 6);
    let a = pack(Format::Q8_0, rank, hidden, &noise(19, rank * hidden));
    let b = pack(Format::Bf16, rank, neurons, &noise(20, rank * neurons));
    let x = noise(21, tokens * hidden);
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
        let predictor = Predictor {
            a: GpuLinear::upload(device, &a.as_view(), None).unwrap(),
            b_transposed: GpuMatrix::upload(device, &b.as_view()).unwrap(),
            b_scales: None,
            bias: upload(device, &noise(22, neurons)),
            threshold: 0.1,
            is_linear: true,
        };
        let words = neurons.div_ceil(32);
        let predict = |x: &[f32], tokens: usize| {
            let (mut mask, mut activations) = (zeros(device, tokens * words), zeros(device, 1));
            let host = HostBuffer::new(device, tokens * words).unwrap();
            let mut predicted = PredictedMask {
                mask: &mut mask,
                host_mask: Some(&host),
                activations: &mut activations,
                hot_count: 0,
            };
            let mut hidden_units = zeros(device, tokens * rank);
            gpu.predict(
                &upload(device, x),
                None,
                &predictor,
                &mut hidden_units,
                None,
                &mut predicted,
            )
            .unwrap();
            let mask: Vec<u32> = mask.to_vec().unwrap();
            let host_mask = host.words().iter();
            let host_mask = host_mask.map(|word| word.load(std::sync::atomic::Ordering::Relaxed));
            assert_eq!(mask, host_mask.collect::<Vec<_>>());
            mask
        };
        let batched = predict(&x, tokens);
        let single: Vec<u32> = x.chunks(hidden).flat_map(|x| predict(x, 1)).collect();
        assert_eq!(batched, single);
        assert!(batched.iter().any(|word| *word != 0));
        Vec::new()
    });
}
