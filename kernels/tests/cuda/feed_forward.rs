//! The FFN of one token.

use std::{ops::Range, sync::Arc};

use powerinfer_emulator::{GraphCapture, Order, test_device, test_emulator};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{
        Buffer, ColdSum, Device, Ffn, Gpu, GpuLinear, GpuMatrix, HostBuffer, HostMirror,
        NeuronFilter,
    },
};
use powerinfer_tensor::{Activation, FfnKind, Format, Matrix, NormKind, pack};

use crate::{
    Norm,
    devices::{assert_near, on_every_device},
    noise::noise,
    product, upload, zeros,
};

/// An FFN, checked against its formula in `f64`.
struct FfnCase {
    format: Format,
    hidden: usize,
    hot: usize,
    kind: FfnKind,
    activation: Activation,
    biased: bool,
}

/// [`NeuronFilter`] without device buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filter {
    All,
    NonZeroGate,
    Gate,
    ScaledGate,
    Contribution { centred: bool },
}

const THRESHOLD: f32 = 0.4;

impl FfnCase {
    fn check(&self, filter: Filter, masked: Option<Range<usize>>, arithmetic: Arithmetic) {
        let Self {
            format,
            hidden,
            hot,
            ..
        } = *self;
        let matrix = |seed| pack(format, hot, hidden, &noise(seed, hot * hidden));
        let (gate, up, down) = (matrix(18), matrix(19), matrix(20));
        let x = noise(21, hidden);
        let bias = |seed, count| self.biased.then(|| noise(seed, count));
        let (gate_bias, up_bias, down_bias) = (bias(22, hot), bias(23, hot), bias(24, hidden));
        let (scale, centre, offset, before) = (
            noise(25, hot),
            noise(26, hot),
            noise(27, hidden),
            noise(28, hidden),
        );
        let scale: Vec<f32> = scale.iter().map(|scale| scale.abs() + 0.1).collect();
        let cold = noise(29, hidden);
        let norm = Norm::new(NormKind::RootMeanSquare, hidden);
        let normed = norm.apply(&x);
        let activate = |x: f32| self.activation.apply(x);
        let (gates, ups) = (
            product(&gate.as_view(), &normed, arithmetic),
            product(&up.as_view(), &normed, arithmetic),
        );
        let is_masked = |neuron: usize| {
            masked
                .clone()
                .is_none_or(|masked| masked.contains(&neuron) && neuron % 3 != 1)
        };
        let coefficient = |neuron: usize| {
            let activation =
                activate(gates[neuron] + gate_bias.as_ref().map_or(0.0, |bias| bias[neuron]));
            let up = ups[neuron] + up_bias.as_ref().map_or(0.0, |bias| bias[neuron]);
            let h = match self.kind {
                FfnKind::Plain => activation,
                FfnKind::Gated => activation * up,
                FfnKind::DoublyGated => activation * activate(up),
                FfnKind::ClampedGated => {
                    let limit = self.activation.limit();
                    activation * (up.clamp(-limit, limit) + 1.0)
                }
            };
            // Distance from the threshold.
            let (h, margin) = match filter {
                Filter::All | Filter::NonZeroGate => (h, 1.0),
                Filter::Gate => (h, activation.abs() - THRESHOLD),
                Filter::ScaledGate => (h, activation.abs() * scale[neuron] - THRESHOLD),
                Filter::Contribution { centred } => {
                    let h = if centred { h - centre[neuron] } else { h };
                    (h, h.abs() * scale[neuron] - THRESHOLD)
                }
            };
            if !is_masked(neuron) || margin < 0.0 {
                (0.0, margin)
            } else {
                (h, margin)
            }
        };
        let coefficients: Vec<(f32, f32)> = (0..hot).map(coefficient).collect();
        assert!(
            coefficients.iter().all(|(_, margin)| margin.abs() > 1e-5),
            "no neuron is within rounding of the threshold"
        );
        let mut want: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
        let mut row = vec![0.0; hidden];
        for (neuron, (coefficient, _)) in coefficients.iter().enumerate() {
            down.as_view().dequantise_row(neuron, &mut row);
            for (want, weight) in want.iter_mut().zip(&row) {
                *want += f64::from(*coefficient) * f64::from(*weight);
            }
        }
        for constant in [Some(&offset), down_bias.as_ref(), Some(&cold)]
            .into_iter()
            .flatten()
        {
            want.iter_mut()
                .zip(constant)
                .for_each(|(want, addend)| *want += f64::from(*addend));
        }
        let want: Vec<f32> = want.into_iter().map(|want| want as f32).collect();
        let context = format!(
            "{format}, {hot} neurons of {hidden}, {:?}, {:?}, {filter:?}, mask {masked:?}, {arithmetic:?}",
            self.kind, self.activation
        );
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), arithmetic);
            let linear = |matrix: &Matrix<'_>, bias: &Option<Vec<f32>>| {
                GpuLinear::upload(device, matrix, bias.as_deref()).unwrap()
            };
            let ffn = Ffn {
                gate: linear(&gate.as_view(), &gate_bias),
                up: (self.kind != FfnKind::Plain).then(|| linear(&up.as_view(), &up_bias)),
                down: GpuMatrix::upload(device, &down.as_view()).unwrap(),
                bias: down_bias.as_ref().map(|bias| upload(device, bias)),
                kind: self.kind,
                activation: self.activation,
            };
            let (scale, centre, offset) = (
                upload(device, &scale),
                upload(device, &centre),
                upload(device, &offset),
            );
            let neuron_filter = match filter {
                Filter::All => NeuronFilter::All,
                Filter::NonZeroGate => NeuronFilter::NonZeroGate,
                Filter::Gate => NeuronFilter::GateThreshold(THRESHOLD),
                Filter::ScaledGate => NeuronFilter::ScaledGateThreshold(THRESHOLD, &scale),
                Filter::Contribution { centred } => NeuronFilter::ContributionThreshold {
                    threshold: THRESHOLD,
                    scale: &scale,
                    centre: centred.then_some(&centre),
                },
            };
            let mask = masked.is_some().then(|| {
                let mut words = vec![0u32; hot.div_ceil(32) + 1];
                (0..hot)
                    .filter(|neuron| is_masked(*neuron))
                    .for_each(|neuron| words[neuron / 32] |= 1 << (neuron % 32));
                // Bits after the hot neurons belong to the host.
                words[hot / 32] |= u32::MAX << (hot % 32);
                Buffer::from_slice(device, &words).unwrap()
            });
            let step = Buffer::from_slice(device, &[5u32]).unwrap();
            let [input, ready, sum, timed_out] =
                [hidden, 3, hidden, 1].map(|words| HostBuffer::new(device, words).unwrap());
            let host = HostMirror {
                input: &input,
                flags: &ready,
                flag: 1,
                step: &step,
            };
            let mut activations = zeros(device, hot);
            let mut scratch = gpu.down_scratch([&ffn.down].into_iter(), 1).unwrap();
            let x = upload(device, &x);
            let norm = norm.upload(device);
            gpu.gate_up(
                &x,
                Some(&norm),
                &ffn,
                neuron_filter,
                None,
                mask.as_ref(),
                &mut activations,
                None,
                Some(host),
                &mut scratch,
            )
            .unwrap();
            device.synchronise().unwrap();
            let mut host_input = vec![0.0; hidden];
            input.read_f32(&mut host_input);
            assert_near(&host_input, &normed, 1e-5, &context);
            let acquire = std::sync::atomic::Ordering::Acquire;
            assert_eq!(ready.words()[1].load(acquire), 5);
            sum.write_f32(&cold);
            ready.words()[2].store(5, std::sync::atomic::Ordering::Release);
            let cold = ColdSum {
                sum: &sum,
                flag: Some((&ready, 2)),
                step: &step,
                timed_out: &timed_out,
                timeout_nanoseconds: 1 << 30,
            };
            let mut hidden = upload(device, &before);
            gpu.down(
                &ffn,
                &activations,
                [ffn.bias.as_ref(), Some(&offset)],
                Some(cold),
                &mut scratch,
                &mut hidden,
            )
            .unwrap();
            let found = activations.to_vec().unwrap();
            let want_activations: Vec<f32> = coefficients
                .iter()
                .map(|(coefficient, _)| *coefficient)
                .collect();
            assert_near(&found, &want_activations, 1e-4, &context);
            let found = hidden.to_vec().unwrap();
            assert_near(&found, &want, 1e-4, &context);
            assert_eq!(timed_out.words()[0].load(acquire), 0);
            let down_rows = want_activations.iter().filter(|h| **h != 0.0).count();
            let gate_rows = (0..hot).filter(|neuron| is_masked(*neuron)).count();
            let counts = scratch.counts().unwrap();
            assert_eq!(
                [counts.down_rows, counts.gate_rows, counts.union_rows].map(|rows| rows as usize),
                [down_rows, gate_rows, down_rows]
            );
            found
        });
    }
}

#[test]
fn an_ffn_equals_its_formula_in_every_format_and_shape() {
    for format in Format::ALL {
        for (hidden, hot) in [(32, 1), (33, 40), (100, 290), (600, 31)] {
            let case = FfnCase {
                format,
                hidden,
                hot,
                kind: FfnKind::Gated,
                activation: Activation::Relu,
                biased: false,
            };
            case.check(Filter::NonZeroGate, None, Arithmetic::Integer);
            case.check(Filter::NonZeroGate, Some(0..hot), Arithmetic::Integer);
            case.check(Filter::All, Some(hot / 2..hot), Arithmetic::Float);
        }
    }
}

#[test]
fn an_ffn_equals_its_formula_for_every_kind_activation_and_filter() {
    let activations = [
        Activation::Relu,
        Activation::SquaredRelu,
        Activation::FatRelu { threshold: 0.3 },
        Activation::Silu,
        Activation::GeluErf,
        Activation::GeluTanh,
        Activation::ClampedSwish { limit: 0.7 },
    ];
    for activation in activations {
        for kind in [
            FfnKind::Plain,
            FfnKind::Gated,
            FfnKind::DoublyGated,
            FfnKind::ClampedGated,
        ] {
            let is_fat = matches!(activation, Activation::FatRelu { .. });
            if is_fat && kind == FfnKind::ClampedGated {
                continue; // both use the argument `bound`; no model combines them
            }
            let case = FfnCase {
                format: Format::Q8_0,
                hidden: 64,
                hot: 50,
                kind,
                activation,
                biased: true,
            };
            case.check(Filter::All, None, Arithmetic::Integer);
            case.check(Filter::All, Some(40..40), Arithmetic::Integer);
        }
    }
    let case = FfnCase {
        format: Format::F16,
        hidden: 40,
        hot: 70,
        kind: FfnKind::Gated,
        activation: Activation::Silu,
        biased: false,
    };
    for filter in [
        Filter::Gate,
        Filter::ScaledGate,
        Filter::Contribution { centred: false },
        Filter::Contribution { centred: true },
    ] {
        case.check(filter, None, Arithmetic::Integer);
    }
}

#[test]
fn a_host_that_does_not_answer_times_out() {
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
        let packed = pack(Format::F32, 4, 8, &noise(30, 32));
        let ffn = Ffn {
            gate: GpuLinear::upload(device, &packed.as_view(), None).unwrap(),
            up: None,
            down: GpuMatrix::upload(device, &packed.as_view()).unwrap(),
            bias: None,
            kind: FfnKind::Plain,
            activation: Activation::Relu,
        };
        let step = Buffer::from_slice(device, &[3u32]).unwrap();
        let [sum, done, timed_out] = [8, 1, 1].map(|words| HostBuffer::new(device, words).unwrap());
        let cold = ColdSum {
            sum: &sum,
            flag: Some((&done, 0)),
            step: &step,
            timed_out: &timed_out,
            timeout_nanoseconds: 1_000_000,
        };
        let mut scratch = gpu.down_scratch([&ffn.down].into_iter(), 1).unwrap();
        let mut hidden = zeros(device, 8);
        gpu.down(
            &ffn,
            &zeros(device, 4),
            [ffn.bias.as_ref(), None],
            Some(cold),
            &mut scratch,
            &mut hidden,
        )
        .unwrap();
        device.synchronise().unwrap();
        assert_eq!(
            timed_out.words()[0].load(std::sync::atomic::Ordering::Acquire),
            3
        );
        // After a timeout, later kernels do not wait.
        let long = ColdSum {
            timeout_nanoseconds: 60_000_000_000,
            ..cold
        };
        let started = std::time::Instant::now();
        gpu.down(
            &ffn,
            &zeros(device, 4),
            [ffn.bias.as_ref(), None],
            Some(long),
            &mut scratch,
            &mut hidden,
        )
        .unwrap();
        device.synchronise().unwrap();
        assert!(started.elapsed().as_secs() < 30, "{:?}", started.elapsed());
        Vec::new()
    });
}

#[test]
fn synchronisations_are_timed_where_graphs_are_captured() {
    let seconds = |device: Arc<dyn Device>| {
        let gpu = Gpu::new(device, Arithmetic::Float);
        gpu.launch_empty().unwrap();
        gpu.sync_seconds(2).unwrap()
    };
    let Some(device) = test_device(Order::Forward) else {
        return;
    };
    let measured = seconds(device);
    assert!(measured.is_sorted() && measured[0] > 0.0, "{measured:?}");
    if let Some(emulator) = test_emulator(2, Order::Forward) {
        let emulator = emulator.with_capture(GraphCapture::Unsupported);
        assert!(seconds(Arc::new(emulator)).is_empty());
    }
}
