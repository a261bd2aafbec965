//! Kernels of the GPU against the processor's and against plain formulas: on the emulator, its threads in
//! three orders, or on a card.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{ops::Range, sync::Arc};

use powerinfer_emulator::{Order, test_emulator};
use powerinfer_kernels::{
    Arithmetic, Isa, QuantisedActivations,
    cuda::{
        Attention, Buffer, ColdSum, Device, Ffn, Gpu, GpuActivation, GpuCache, GpuFfnKind,
        GpuLinear, GpuMatrix, GpuNorm, GpuNormKind, HeadNorms, HostBuffer, HostMirror,
        NeuronFilter, PredictedMask, Predictor, SignBits,
    },
};
use powerinfer_tensor::{CacheFormat, Format, Matrix, pack, pack_signs};

#[path = "support/devices.rs"]
mod devices;
#[path = "support/noise.rs"]
mod noise;

use devices::{assert_near, on_every_device};
use noise::noise;

/// Columns of rows: less than a block, whole ones, and odd ones.
const COLUMNS: [usize; 8] = [1, 8, 31, 32, 33, 100, 256, 1030];

fn upload(device: &Arc<dyn Device>, numbers: &[f32]) -> Buffer<f32> {
    Buffer::from_slice(device, numbers).unwrap()
}

fn zeros<T: bytemuck::Pod>(device: &Arc<dyn Device>, count: usize) -> Buffer<T> {
    Buffer::new(device, count).unwrap()
}

/// A norm's weight and bias, and what it makes of numbers.
struct Norm {
    kind: GpuNormKind,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

const EPSILON: f32 = 1e-5;

impl Norm {
    fn new(kind: GpuNormKind, size: usize) -> Self {
        Self {
            kind,
            weight: noise(1, size),
            bias: (kind == GpuNormKind::Layer).then(|| noise(2, size)),
        }
    }

    fn upload(&self, device: &Arc<dyn Device>) -> GpuNorm {
        GpuNorm::upload(
            device,
            self.kind,
            EPSILON,
            &self.weight,
            self.bias.as_deref(),
        )
        .unwrap()
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let count = x.len() as f64;
        let mean = match self.kind {
            GpuNormKind::Layer => x.iter().map(|x| f64::from(*x)).sum::<f64>() / count,
            GpuNormKind::RootMeanSquare => 0.0,
        };
        let squares = x
            .iter()
            .map(|x| (f64::from(*x) - mean).powi(2))
            .sum::<f64>();
        let scale = 1.0 / (squares / count + f64::from(EPSILON)).sqrt();
        let normed = x.iter().enumerate().map(|(index, x)| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[index]);
            ((f64::from(*x) - mean) * scale * f64::from(self.weight[index]) + f64::from(bias))
                as f32
        });
        normed.collect()
    }
}

/// `matrix · x` as the processor's kernels define it.
fn product(matrix: &Matrix<'_>, x: &[f32], arithmetic: Arithmetic) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows()];
    if arithmetic == Arithmetic::Integer && matrix.format().is_quantised() {
        let mut bytes = QuantisedActivations::default();
        Isa::SCALAR.quantise(x, matrix.columns(), &mut bytes);
        Isa::SCALAR.gemv_integer(matrix, bytes.vector(0), &mut out);
    } else {
        Isa::SCALAR.gemv(matrix, x, &mut out);
    }
    out
}

#[test]
fn projections_are_those_of_the_processor() {
    use Arithmetic::{Float, Integer};
    for format in Format::ALL {
        for columns in COLUMNS {
            for (rows, arithmetic) in [(1, Integer), (19, Float), (19, Integer), (70, Integer)] {
                let packed = pack(format, rows, columns, &noise(rows as u64, rows * columns));
                let x = noise(3, columns);
                let want = product(&packed.as_view(), &x, arithmetic);
                on_every_device(|device| {
                    let gpu = Gpu::new(Arc::clone(device), arithmetic);
                    let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
                    let mut out = zeros(device, rows);
                    gpu.project(&upload(device, &x), None, &mut [(&linear, &mut out)], false)
                        .unwrap();
                    let found = out.to_vec().unwrap();
                    assert_near(
                        &found,
                        &want,
                        1e-4,
                        &format!("{format} {rows} x {columns}, {arithmetic:?}"),
                    );
                    found
                });
            }
        }
    }
}

#[test]
fn a_projection_norms_and_serves_three_matrices_and_some_tokens() {
    let (columns, tokens) = (100, 3);
    let rows = [40, 9, 1];
    for kind in [GpuNormKind::RootMeanSquare, GpuNormKind::Layer] {
        let norm = Norm::new(kind, columns);
        let x = noise(4, tokens * columns);
        let packed = rows.map(|rows| {
            pack(
                Format::Bf16,
                rows,
                columns,
                &noise(rows as u64, rows * columns),
            )
        });
        let bias = noise(5, rows[1]);
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let linears = [0, 1, 2].map(|index| {
                let bias = (index == 1).then_some(bias.as_slice());
                GpuLinear::upload(device, &packed[index].as_view(), bias).unwrap()
            });
            let [mut a, mut b, mut c] = rows.map(|rows| zeros::<f32>(device, tokens * rows));
            for add in [false, true] {
                let mut parts = [
                    (&linears[0], &mut a),
                    (&linears[1], &mut b),
                    (&linears[2], &mut c),
                ];
                let norm = norm.upload(device);
                gpu.project(&upload(device, &x), Some(&norm), &mut parts, add)
                    .unwrap();
            }
            let found = [a, b, c].map(|out| out.to_vec().unwrap());
            for (index, rows) in rows.into_iter().enumerate() {
                for (x, found) in x.chunks(columns).zip(found[index].chunks(rows)) {
                    let mut want =
                        product(&packed[index].as_view(), &norm.apply(x), Arithmetic::Float);
                    for (row, want) in want.iter_mut().enumerate() {
                        // Added to itself.
                        *want = 2.0 * (*want + if index == 1 { bias[row] } else { 0.0 });
                    }
                    assert_near(found, &want, 1e-4, &format!("{kind:?}, matrix {index}"));
                }
            }
            found.concat()
        });
    }
}

#[test]
fn norms_in_place_and_the_largest_number() {
    for size in [1, 33, 300] {
        for kind in [GpuNormKind::RootMeanSquare, GpuNormKind::Layer] {
            let norm = Norm::new(kind, size);
            let x = noise(6, 2 * size);
            on_every_device(|device| {
                let mut buffer = upload(device, &x);
                Gpu::new(Arc::clone(device), Arithmetic::Integer)
                    .norm(&mut buffer, &norm.upload(device))
                    .unwrap();
                let found = buffer.to_vec().unwrap();
                let want: Vec<f32> = x.chunks(size).flat_map(|x| norm.apply(x)).collect();
                assert_near(&found, &want, 1e-4, &format!("{kind:?} of {size}"));
                found
            });
        }
    }
    let mut x = noise(7, 9000);
    x[4321] = 7.0;
    x[8000] = 7.0;
    x[17] = f32::NAN;
    for (x, want) in [
        (&x[..], 4321),
        (
            &x[..17],
            (0..17).max_by(|a, b| x[*a].total_cmp(&x[*b])).unwrap(),
        ),
        (&x[17..18], 0),
    ] {
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let (mut out, mut scratch) = (zeros(device, 1), zeros(device, Gpu::ARG_MAX_WORDS));
            for _ in 0..2 {
                gpu.arg_max(&upload(device, x), &mut out, &mut scratch)
                    .unwrap();
                assert_eq!(out.to_vec().unwrap(), [want as u32]);
            }
            Vec::new()
        });
    }
}

/// Attention as it is defined, token after token, in double precision.
struct Attending {
    heads: usize,
    kv_heads: usize,
    size: usize,
    window: Option<usize>,
    slopes: Option<Vec<f32>>,
    pairs: usize,
    norms: Option<[Norm; 2]>,
    format: CacheFormat,
}

impl Attending {
    fn new(heads: usize, kv_heads: usize, size: usize) -> Self {
        Self {
            heads,
            kv_heads,
            size,
            window: None,
            slopes: None,
            pairs: 0,
            norms: None,
            format: CacheFormat::F32,
        }
    }

    /// Sine and cosine of each pair at a position.
    fn rotations(&self, position: usize) -> Vec<[f32; 2]> {
        let turn = |pair: usize| {
            let (sine, cosine) = (position as f32 * 0.7f32.powi(pair as i32)).sin_cos();
            [sine, cosine]
        };
        (0..self.pairs).map(turn).collect()
    }

    /// A head as attention takes it.
    fn head(&self, x: &[f32], norm: Option<&Norm>, position: usize) -> Vec<f64> {
        let x = norm.map_or(x.to_vec(), |norm| norm.apply(x));
        let mut x: Vec<f64> = x.into_iter().map(f64::from).collect();
        for (pair, [sine, cosine]) in self.rotations(position).into_iter().enumerate() {
            let (a, b) = (x[pair], x[pair + self.pairs]);
            let (sine, cosine) = (f64::from(sine), f64::from(cosine));
            (x[pair], x[pair + self.pairs]) = (a * cosine - b * sine, a * sine + b * cosine);
        }
        x
    }

    fn check(&self, tokens: usize, context: usize, tolerance: f32) {
        let numbers = |seed, heads: usize| noise(seed, tokens * heads * self.size);
        let (queries, keys, values) = (
            numbers(8, self.heads),
            numbers(9, self.kv_heads),
            numbers(10, self.kv_heads),
        );
        let of = |all: &[f32], heads: usize, token: usize, head: usize| {
            all[(token * heads + head) * self.size..][..self.size].to_vec()
        };
        let [query_norm, key_norm] = match &self.norms {
            Some([query, key]) => [Some(query), Some(key)],
            None => [None, None],
        };
        let mut want = Vec::new();
        for token in 0..tokens {
            let first = self
                .window
                .map_or(0, |window| (token + 1).saturating_sub(window));
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let query = self.head(&of(&queries, self.heads, token, head), query_norm, token);
                let score = |position: usize| {
                    let key = self.head(
                        &of(&keys, self.kv_heads, position, kv_head),
                        key_norm,
                        position,
                    );
                    let product: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    let bias = self.slopes.as_ref().map_or(0.0, |slopes| {
                        f64::from(
                            half::bf16::from_f32(
                                slopes[head] * half::bf16::from_f32(position as f32).to_f32(),
                            )
                            .to_f32(),
                        )
                    });
                    (product + bias) / (self.size as f64).sqrt()
                };
                let scores: Vec<f64> = (first..=token).map(score).collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> =
                    scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for column in 0..self.size {
                    let terms = weights.iter().zip(first..).map(|(weight, position)| {
                        weight * f64::from(of(&values, self.kv_heads, position, kv_head)[column])
                    });
                    want.push((terms.sum::<f64>() / total) as f32);
                }
            }
        }
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let mut cache =
                GpuCache::new(device, self.format, self.kv_heads, context, self.size).unwrap();
            let norms = self.norms.as_ref().map(|[query, key]| HeadNorms {
                query: query.upload(device),
                key: key.upload(device),
            });
            let slopes = self.slopes.as_ref().map(|slopes| upload(device, slopes));
            let mut found = Vec::new();
            // One by one; then the others at once after the first of them, which is in the cache.
            let alone = (0..tokens).map(|token| token..token + 1);
            let apart = tokens / 3 + 1;
            for part in alone.chain(std::iter::once(apart..tokens)) {
                let (token, count) = (part.start, part.len());
                let words =
                    gpu.attention_scratch_len(count, self.heads, self.kv_heads, self.size, context);
                let mut partial = zeros(device, words);
                let mut counters = zeros(device, count * self.kv_heads);
                let own = |all: &[f32], heads: usize| {
                    let size = heads * self.size;
                    upload(device, &all[part.start * size..part.end * size])
                };
                let rotations: Vec<[f32; 2]> = part
                    .clone()
                    .flat_map(|token| self.rotations(token))
                    .collect();
                let mut out = zeros(device, count * self.heads * self.size);
                let attention = Attention {
                    tokens: count,
                    query: &own(&queries, self.heads),
                    key: &own(&keys, self.kv_heads),
                    value: &own(&values, self.kv_heads),
                    norms: norms.as_ref(),
                    sin_cos: &Buffer::from_slice(device, &rotations).unwrap(),
                    alibi_slopes: slopes.as_ref(),
                    window: self.window,
                    position: &Buffer::from_slice(device, &[token as u32]).unwrap(),
                };
                gpu.attend(
                    &attention,
                    &mut cache,
                    &mut partial,
                    &mut counters,
                    &mut out,
                )
                .unwrap();
                found.extend(out.to_vec().unwrap());
            }
            let again = &want[apart * self.heads * self.size..];
            assert_near(
                &found,
                &[&want, again].concat(),
                tolerance,
                &format!("{} heads of {}", self.heads, self.size),
            );
            found
        });
    }
}

#[test]
fn attention_is_as_it_is_defined() {
    Attending::new(4, 2, 16).check(70, 300, 1e-5);
    Attending::new(3, 3, 5).check(34, 34, 1e-5);
    Attending {
        pairs: 8,
        ..Attending::new(6, 1, 24)
    }
    .check(33, 100, 1e-5);
    Attending {
        window: Some(20),
        pairs: 4,
        ..Attending::new(2, 2, 8)
    }
    .check(90, 200, 1e-5);
    Attending {
        slopes: Some(vec![0.5, 0.25, 0.125, 0.0625]),
        ..Attending::new(4, 4, 8)
    }
    .check(40, 64, 1e-5);
    Attending {
        norms: Some(
            [GpuNormKind::RootMeanSquare, GpuNormKind::Layer].map(|kind| Norm::new(kind, 12)),
        ),
        pairs: 6,
        format: CacheFormat::F16,
        ..Attending::new(4, 2, 12)
    }
    .check(40, 64, 4e-3);
}

#[test]
fn predictors_predict_whom_the_processor_does() {
    for format in [
        Format::F32,
        Format::Bf16,
        Format::Q8_0,
        Format::Q4_0,
        Format::Q4K,
    ] {
        for (hidden, rank, neurons, hot) in [(40, 7, 33, 20), (64, 70, 200, 200), (33, 300, 65, 0)]
        {
            let a = pack(format, rank, hidden, &noise(11, rank * hidden));
            let units = pack(format, rank, neurons, &noise(12, rank * neurons));
            let blocks = rank.div_ceil(32);
            let scales = format.is_quantised().then(|| noise(13, blocks * neurons));
            let (bias, x) = (noise(14, neurons), noise(15, hidden));
            let middle = product(&a.as_view(), &x, Arithmetic::Integer);
            let mut rows = vec![0.0; rank * neurons];
            for (row, out) in rows.chunks_mut(neurons).enumerate() {
                units.as_view().dequantise_row(row, out);
            }
            let logit = |neuron: usize| {
                let terms = (0..rank).map(|unit| {
                    let scale = scales
                        .as_ref()
                        .map_or(1.0, |scales| scales[unit / 32 * neurons + neuron]);
                    f64::from(middle[unit].max(0.0))
                        * f64::from(rows[unit * neurons + neuron])
                        * f64::from(scale)
                });
                terms.sum::<f64>() + f64::from(bias[neuron])
            };
            on_every_device(|device| {
                let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
                let predictor = Predictor {
                    a: GpuLinear::upload(device, &a.as_view(), None).unwrap(),
                    b_transposed: GpuMatrix::upload(device, &units.as_view()).unwrap(),
                    b_scales: scales.as_ref().map(|scales| upload(device, scales)),
                    bias: upload(device, &bias),
                    threshold: 0.1,
                };
                let words = neurons.div_ceil(32);
                let (mut mask, mut products) =
                    (zeros(device, words), upload(device, &vec![9.0; neurons]));
                let host = HostBuffer::new(device, words).unwrap();
                let mut predicted = PredictedMask {
                    mask: &mut mask,
                    host_mask: Some(&host),
                    activations: &mut products,
                    hot_count: hot,
                };
                let x = upload(device, &x);
                gpu.predict(
                    &x,
                    None,
                    &predictor,
                    &mut zeros(device, rank),
                    &mut predicted,
                )
                .unwrap();
                device.synchronise().unwrap();
                let mask = mask.to_vec().unwrap();
                let seen: Vec<u32> = host
                    .words()
                    .iter()
                    .map(|word| word.load(std::sync::atomic::Ordering::Relaxed))
                    .collect();
                assert_eq!(mask, seen);
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
                let products = products.to_vec().unwrap();
                assert!(products[..hot].iter().all(|product| *product == 0.0));
                assert!(products[hot..].iter().all(|product| *product == 9.0));
                mask.into_iter().map(f32::from_bits).collect()
            });
        }
    }
}

#[test]
fn signs_are_counted_exactly() {
    for (columns, neurons) in [(1, 1), (63, 40), (64, 31), (200, 300)] {
        let (gate, x) = (noise(16, columns * neurons), noise(17, columns));
        let agreements = columns as u32 / 2 + 1;
        let want: Vec<bool> = gate
            .chunks(columns)
            .map(|row| {
                let same = row
                    .iter()
                    .zip(&x)
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
            let (mut mask, mut products) =
                (zeros(device, neurons.div_ceil(32)), zeros(device, neurons));
            let mut predicted = PredictedMask {
                mask: &mut mask,
                host_mask: None,
                activations: &mut products,
                hot_count: neurons,
            };
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            gpu.predict_by_signs(&upload(device, &x), None, &signs, &mut predicted)
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

/// A layer's FFN, and what it does as it is defined.
struct Layer {
    format: Format,
    hidden: usize,
    hot: usize,
    kind: GpuFfnKind,
    activation: GpuActivation,
    biased: bool,
}

/// Which neurons count, without a device.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Every,
    NotZero,
    Gate,
    WeightedGate,
    Contribution { centred: bool },
}

const THRESHOLD: f32 = 0.4;

impl Layer {
    fn check(&self, rule: Rule, listed: Option<Range<usize>>, arithmetic: Arithmetic) {
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
        let norm = Norm::new(GpuNormKind::RootMeanSquare, hidden);
        let normed = norm.apply(&x);
        let activate = |x: f32| match self.activation {
            GpuActivation::Relu => x.max(0.0),
            GpuActivation::SquaredRelu => x.max(0.0) * x.max(0.0),
            GpuActivation::FatRelu(threshold) if x < threshold => 0.0,
            GpuActivation::FatRelu(_) => x,
            GpuActivation::Silu => x / (1.0 + (-x).exp()),
            GpuActivation::GeluErf => {
                0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
            }
            GpuActivation::GeluTanh => {
                0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh())
            }
        };
        let (gates, ups) = (
            product(&gate.as_view(), &normed, arithmetic),
            product(&up.as_view(), &normed, arithmetic),
        );
        let is_listed = |neuron: usize| {
            listed
                .clone()
                .is_none_or(|listed| listed.contains(&neuron) && neuron % 3 != 1)
        };
        let coefficient = |neuron: usize| {
            let activation =
                activate(gates[neuron] + gate_bias.as_ref().map_or(0.0, |bias| bias[neuron]));
            let up = ups[neuron] + up_bias.as_ref().map_or(0.0, |bias| bias[neuron]);
            let product = match self.kind {
                GpuFfnKind::Plain => activation,
                GpuFfnKind::Gated => activation * up,
                GpuFfnKind::DoublyGated => activation * activate(up),
            };
            // How far the decision is from being another one.
            let (product, margin) = match rule {
                Rule::Every | Rule::NotZero => (product, 1.0),
                Rule::Gate => (product, activation.abs() - THRESHOLD),
                Rule::WeightedGate => (product, activation.abs() * scale[neuron] - THRESHOLD),
                Rule::Contribution { centred } => {
                    let product = if centred {
                        product - centre[neuron]
                    } else {
                        product
                    };
                    (product, product.abs() * scale[neuron] - THRESHOLD)
                }
            };
            if !is_listed(neuron) || margin < 0.0 {
                (0.0, margin)
            } else {
                (product, margin)
            }
        };
        let coefficients: Vec<(f32, f32)> = (0..hot).map(coefficient).collect();
        assert!(
            coefficients.iter().all(|(_, margin)| margin.abs() > 1e-5),
            "a decision that rounding could turn"
        );
        let mut want: Vec<f64> = before.iter().chain([]).map(|x| f64::from(*x)).collect();
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
                .for_each(|(want, more)| *want += f64::from(*more));
        }
        let want: Vec<f32> = want.into_iter().map(|want| want as f32).collect();
        let context = format!(
            "{format}, {hot} neurons of {hidden}, {:?}, {:?}, {rule:?}, listed {listed:?}, {arithmetic:?}",
            self.kind, self.activation
        );
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), arithmetic);
            let linear = |matrix: &Matrix<'_>, bias: &Option<Vec<f32>>| {
                GpuLinear::upload(device, matrix, bias.as_deref()).unwrap()
            };
            let ffn = Ffn {
                gate: linear(&gate.as_view(), &gate_bias),
                up: (self.kind != GpuFfnKind::Plain).then(|| linear(&up.as_view(), &up_bias)),
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
            let rule = match rule {
                Rule::Every => NeuronFilter::All,
                Rule::NotZero => NeuronFilter::NonZeroGate,
                Rule::Gate => NeuronFilter::GateThreshold(THRESHOLD),
                Rule::WeightedGate => NeuronFilter::ScaledGateThreshold(THRESHOLD, &scale),
                Rule::Contribution { centred } => NeuronFilter::ContributionThreshold {
                    threshold: THRESHOLD,
                    scale: &scale,
                    centre: centred.then_some(&centre),
                },
            };
            let mask = listed.is_some().then(|| {
                let mut words = vec![0u32; hot.div_ceil(32) + 1];
                (0..hot)
                    .filter(|neuron| is_listed(*neuron))
                    .for_each(|neuron| words[neuron / 32] |= 1 << (neuron % 32));
                // What is beyond the hot neurons is the host's.
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
            let mut products = zeros(device, hot);
            let mut scratch = gpu.down_scratch([&ffn.down].into_iter()).unwrap();
            let x = upload(device, &x);
            let norm = norm.upload(device);
            gpu.gate_up(
                &x,
                Some(&norm),
                &ffn,
                rule,
                mask.as_ref(),
                &mut products,
                Some(host),
                &mut scratch,
            )
            .unwrap();
            device.synchronise().unwrap();
            let mut seen = vec![0.0; hidden];
            input.read_f32(&mut seen);
            assert_near(&seen, &normed, 1e-5, &context);
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
                &products,
                Some(&offset),
                Some(cold),
                &mut scratch,
                &mut hidden,
            )
            .unwrap();
            let found = products.to_vec().unwrap();
            let want_products: Vec<f32> = coefficients
                .iter()
                .map(|(coefficient, _)| *coefficient)
                .collect();
            assert_near(&found, &want_products, 1e-4, &context);
            let found = hidden.to_vec().unwrap();
            assert_near(&found, &want, 1e-4, &context);
            assert_eq!(timed_out.words()[0].load(acquire), 0);
            let computed = want_products
                .iter()
                .filter(|product| **product != 0.0)
                .count();
            let evaluated = (0..hot).filter(|neuron| is_listed(*neuron)).count();
            let counts = scratch.counts().unwrap();
            assert_eq!(
                [counts.down_rows as usize, counts.gate_rows as usize],
                [computed, evaluated]
            );
            found
        });
    }
}

#[test]
fn an_ffn_in_every_format_and_shape() {
    for format in Format::ALL {
        for (hidden, hot) in [(32, 1), (33, 40), (100, 290), (600, 31)] {
            let layer = Layer {
                format,
                hidden,
                hot,
                kind: GpuFfnKind::Gated,
                activation: GpuActivation::Relu,
                biased: false,
            };
            layer.check(Rule::NotZero, None, Arithmetic::Integer);
            layer.check(Rule::NotZero, Some(0..hot), Arithmetic::Integer);
            layer.check(Rule::Every, Some(hot / 2..hot), Arithmetic::Float);
        }
    }
}

#[test]
fn an_ffn_of_every_kind_and_rule() {
    let activations = [
        GpuActivation::Relu,
        GpuActivation::SquaredRelu,
        GpuActivation::FatRelu(0.3),
        GpuActivation::Silu,
        GpuActivation::GeluErf,
        GpuActivation::GeluTanh,
    ];
    for activation in activations {
        for kind in [
            GpuFfnKind::Plain,
            GpuFfnKind::Gated,
            GpuFfnKind::DoublyGated,
        ] {
            let layer = Layer {
                format: Format::Q8_0,
                hidden: 64,
                hot: 50,
                kind,
                activation,
                biased: true,
            };
            layer.check(Rule::Every, None, Arithmetic::Integer);
            layer.check(Rule::Every, Some(40..40), Arithmetic::Integer);
        }
    }
    let layer = Layer {
        format: Format::F16,
        hidden: 40,
        hot: 70,
        kind: GpuFfnKind::Gated,
        activation: GpuActivation::Silu,
        biased: false,
    };
    for rule in [
        Rule::Gate,
        Rule::WeightedGate,
        Rule::Contribution { centred: false },
        Rule::Contribution { centred: true },
    ] {
        layer.check(rule, None, Arithmetic::Integer);
    }
}

#[test]
fn a_host_that_does_not_answer_is_given_up() {
    on_every_device(|device| {
        let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
        let packed = pack(Format::F32, 4, 8, &noise(30, 32));
        let ffn = Ffn {
            gate: GpuLinear::upload(device, &packed.as_view(), None).unwrap(),
            up: None,
            down: GpuMatrix::upload(device, &packed.as_view()).unwrap(),
            bias: None,
            kind: GpuFfnKind::Plain,
            activation: GpuActivation::Relu,
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
        let mut scratch = gpu.down_scratch([&ffn.down].into_iter()).unwrap();
        let mut hidden = zeros(device, 8);
        gpu.down(
            &ffn,
            &zeros(device, 4),
            None,
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
        // Once somebody has given up, nobody waits.
        let patient = ColdSum {
            timeout_nanoseconds: 60_000_000_000,
            ..cold
        };
        let started = std::time::Instant::now();
        gpu.down(
            &ffn,
            &zeros(device, 4),
            None,
            Some(patient),
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
fn a_shape_that_does_not_fit_is_refused() {
    let Some(emulator) = test_emulator(1, Order::Forward) else {
        return;
    };
    let device: Arc<dyn Device> = Arc::new(emulator);
    let packed = pack(Format::F32, 1, 40_000, &vec![0.0; 40_000]);
    let linear = GpuLinear::upload(&device, &packed.as_view(), None).unwrap();
    let (x, mut out) = (zeros(&device, 40_000), zeros(&device, 1));
    let gpu = Gpu::new(Arc::clone(&device), Arithmetic::Integer);
    let error = gpu
        .project(&x, None, &mut [(&linear, &mut out)], false)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the input of a projection needs 160128 bytes of shared memory, emulator has 101376; keep that layer on the CPU"
    );
}
