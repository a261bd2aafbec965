//! Batches are bit-identical to running each token alone.

use std::sync::{Arc, atomic::Ordering};

use powerinfer_kernels::{
    Arithmetic,
    cuda::{
        Attention, Buffer, CachePlace, CacheShape, ColdSum, Device, Ffn, Gpu, GpuCache, GpuLinear,
        GpuMatrix, GpuNorm, HostBuffer, HostMirror, KeptInput, NeuronFilter, PredictedMask,
        Predictor,
    },
};
use powerinfer_tensor::{
    Activation, CacheFormat, CacheLayout, CachePlane, FfnKind, Format, NormKind, pack,
};

use crate::{Norm, devices::on_every_device, noise::noise, upload, zeros};

/// A layer without attention, of which not all neurons are hot.
struct Layer {
    gpu: Gpu,
    hidden: usize,
    hot: usize,
    neurons: usize,
    norm: GpuNorm,
    projection: GpuLinear,
    predictor: Predictor,
    ffn: Ffn,
}

impl Layer {
    fn new(
        device: &Arc<dyn Device>,
        format: Format,
        arithmetic: Arithmetic,
        kind: NormKind,
        [hidden, hot, neurons]: [usize; 3],
    ) -> Self {
        let rank = 20;
        let matrix = |seed, rows: usize, columns: usize| {
            let packed = pack(format, rows, columns, &noise(seed, rows * columns));
            GpuMatrix::upload(device, &packed.as_view()).unwrap()
        };
        let linear = |seed, rows: usize| GpuLinear {
            matrix: matrix(seed, rows, hidden),
            bias: Some(upload(device, &noise(seed + 100, rows))),
        };
        Self {
            gpu: Gpu::new(Arc::clone(device), arithmetic),
            hidden,
            hot,
            neurons,
            norm: Norm::new(kind, hidden).upload(device),
            projection: linear(31, 50),
            predictor: Predictor {
                a: linear(32, rank),
                b_transposed: matrix(33, rank, neurons),
                b_scales: None,
                bias: upload(device, &noise(34, neurons)),
                threshold: 0.0,
                is_linear: false,
            },
            ffn: Ffn {
                gate: linear(35, hot),
                up: Some(linear(36, hot)),
                down: matrix(37, hot, hidden),
                bias: Some(upload(device, &noise(38, hidden))),
                kind: FfnKind::Gated,
                activation: Activation::Relu,
            },
        }
    }

    /// Outputs of a pass of the tokens `x`, `[tokens, hidden]`, for each token.
    fn run(&self, x: &[f32]) -> Vec<Vec<f32>> {
        let device = self.gpu.device();
        let tokens = x.len() / self.hidden;
        let (x, mut hidden) = (upload(device, x), upload(device, x));
        let floats = |count: usize| zeros::<f32>(device, tokens * count);
        let mut projected = floats(50);
        let parts = &mut [(&self.projection, &mut projected)];
        self.gpu
            .project(&x, Some(&self.norm), parts, false)
            .unwrap();

        let words = self.neurons.div_ceil(32);
        let mut mask = zeros(device, tokens * words);
        let mut activations = upload(device, &vec![9.0; tokens * self.hot]);
        let host = |count: usize| HostBuffer::new(device, count).unwrap();
        let (host_mask, input) = (host(tokens * words), host(tokens * self.hidden));
        let keeps = self.gpu.uses_int8(self.ffn.gate.matrix.format());
        let mut kept = KeptInput::new(device, self.hidden, tokens).unwrap();
        let mut predicted = PredictedMask {
            mask: &mut mask,
            host_mask: Some(&host_mask),
            activations: &mut activations,
            hot_count: self.hot,
        };
        self.gpu
            .predict(
                &x,
                Some(&self.norm),
                &self.predictor,
                &mut floats(20),
                keeps.then_some((&mut kept, Some(&input))),
                &mut predicted,
            )
            .unwrap();

        let step = Buffer::from_slice(device, &[5u32]).unwrap();
        let (ready, sum, timed_out) = (host(1), host(tokens * self.hidden), host(1));
        let mut scratch = self
            .gpu
            .down_scratch([&self.ffn.down].into_iter(), tokens)
            .unwrap();
        let mirror = HostMirror {
            input: &input,
            flags: &ready,
            flag: 0,
            step: &step,
        };
        self.gpu
            .gate_up(
                &x,
                Some(&self.norm),
                &self.ffn,
                NeuronFilter::NonZeroGate,
                None,
                Some(&mask),
                &mut activations,
                keeps.then_some(&kept),
                Some(mirror),
                &mut scratch,
            )
            .unwrap();
        device.synchronise().unwrap();
        assert_eq!(ready.words()[0].load(Ordering::Acquire), 5);
        let mut inputs = vec![0.0; tokens * self.hidden];
        input.read_f32(&mut inputs);
        // Of each token another.
        sum.write_f32(&inputs);
        let cold = ColdSum {
            sum: &sum,
            flag: None,
            step: &step,
            timed_out: &timed_out,
            timeout_nanoseconds: 1 << 30,
        };
        let (sums, cold) = (&mut scratch, Some(cold));
        self.gpu
            .down(
                &self.ffn,
                &activations,
                [self.ffn.bias.as_ref(), None],
                cold,
                sums,
                &mut hidden,
            )
            .unwrap();

        let counts = scratch.counts().unwrap();
        let active: Vec<bool> = activations
            .to_vec()
            .unwrap()
            .iter()
            .map(|h| *h != 0.0)
            .collect();
        let is_in_union =
            |neuron: &usize| (0..tokens).any(|token| active[token * self.hot + neuron]);
        assert_eq!(
            counts.union_rows as usize,
            (0..self.hot).filter(is_in_union).count()
        );
        assert_eq!(
            counts.down_rows as usize,
            active.iter().filter(|active| **active).count()
        );

        let masks: Vec<f32> = mask
            .to_vec()
            .unwrap()
            .into_iter()
            .map(f32::from_bits)
            .collect();
        let outputs = [projected, activations, hidden].map(|buffer| buffer.to_vec().unwrap());
        let [projected, activations, hidden] = &outputs;
        let all = [projected, activations, hidden, &masks, &inputs];
        let of_token = |token: usize| {
            let part = |values: &&Vec<f32>| {
                let size = values.len() / tokens;
                values[token * size..][..size].to_vec()
            };
            all.iter().flat_map(part).collect()
        };
        (0..tokens).map(of_token).collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn products_of_a_batch_have_the_bits_of_its_tokens_alone() {
    for format in Format::ALL {
        use NormKind::{Layer as Mean, RootMeanSquare};
        for (arithmetic, kind, shape, tokens) in [
            (Arithmetic::Integer, RootMeanSquare, [33, 40, 70], 2),
            (Arithmetic::Integer, RootMeanSquare, [100, 130, 140], 8),
            (Arithmetic::Integer, RootMeanSquare, [1200, 31, 32], 3),
            (Arithmetic::Integer, RootMeanSquare, [8, 900, 910], 2),
            (Arithmetic::Float, RootMeanSquare, [64, 70, 70], 5),
            // Long enough for the unrolled loops over the input.
            (Arithmetic::Integer, Mean, [4700, 9, 10], 2),
            (Arithmetic::Float, Mean, [4700, 9, 10], 2),
        ] {
            let x = noise(39, tokens * shape[0]);
            on_every_device(|device| {
                let layer = Layer::new(device, format, arithmetic, kind, shape);
                let together = layer.run(&x);
                for index in [0, tokens - 1] {
                    let alone = &layer.run(&x[index * shape[0]..][..shape[0]])[0];
                    let what = format!("{format} {arithmetic:?} {kind:?} {shape:?}, token {index}");
                    assert!(bits(&together[index]) == bits(alone), "{what}");
                }
                together.concat()
            });
        }
    }
}

#[test]
fn attention_of_a_batch_has_the_bits_of_its_tokens_alone() {
    let (heads, kv_heads, size, pairs) = (6, 2, 20, 10);
    // Positions of each sequence.
    let contexts = [300, 6, 103, 251];
    // The sequence of each token, and its position.
    let batch = [(0, 0), (1, 5), (2, 100), (2, 101), (2, 102), (3, 250)];
    for format in CacheFormat::ALL {
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let shape = |context| CacheShape {
                format,
                kv_heads,
                head_size: size,
                context,
            };
            let most = shape(300);
            // Keys and values of earlier tokens.
            let caches = || -> Vec<GpuCache> {
                let new = |(context, seed)| {
                    let mut cache = GpuCache::new(device, shape(context)).unwrap();
                    let elements = kv_heads * context * size;
                    let floats = noise(seed, 2 * elements);
                    let (keys, values) = floats.split_at(elements);
                    let [keys, values] =
                        [keys, values].map(|floats| rows(format, kv_heads, size, floats));
                    cache.write(context, [&keys, &values]).unwrap();
                    cache
                };
                contexts.into_iter().zip(40..).map(new).collect()
            };
            let run = |caches: &[GpuCache], batch: &[(usize, usize)]| -> Vec<f32> {
                let tokens = batch.len();
                let per_token = |count: usize, seed: u64| -> Vec<f32> {
                    let of = |(sequence, position): &(usize, usize)| {
                        noise(seed + (1000 * sequence + position) as u64, count)
                    };
                    batch.iter().flat_map(of).collect()
                };
                let rotations: Vec<[f32; 2]> = per_token(2 * pairs, 9)
                    .chunks_exact(2)
                    .map(|pair| [pair[0], pair[1]])
                    .collect();
                let positions: Vec<u32> = batch.iter().map(|token| token.1 as u32).collect();
                let places = batch.iter().map(|token| caches[token.0].place());
                let table: Vec<CachePlace> = places
                    .flat_map(|place| [CachePlace::default(), place])
                    .collect();
                let words = gpu.attention_scratch_len(tokens, heads, &most);
                let mut out = zeros(device, tokens * heads * size);
                let attention = Attention {
                    tokens,
                    query: &upload(device, &per_token(heads * size, 1)),
                    key: &upload(device, &per_token(kv_heads * size, 2)),
                    value: &upload(device, &per_token(kv_heads * size, 3)),
                    norms: None,
                    sin_cos: &Buffer::from_slice(device, &rotations).unwrap(),
                    alibi_slopes: None,
                    sinks: None,
                    window: None,
                    positions: &Buffer::from_slice(device, &positions).unwrap(),
                    caches: &Buffer::from_slice(device, &table).unwrap(),
                    layer: 1,
                    shape: most,
                };
                let (mut partial, mut counters) =
                    (zeros(device, words), zeros(device, tokens * heads));
                // SAFETY: the caches exist until the end, and have the positions.
                #[expect(unsafe_code, reason = "kernels follow addresses in device memory")]
                unsafe { gpu.attend(&attention, &mut partial, &mut counters, &mut out) }.unwrap();
                out.to_vec().unwrap()
            };
            let together = run(&caches(), &batch);
            let caches = caches();
            let alone = batch.map(|token| run(&caches, &[token])).concat();
            assert!(bits(&together) == bits(&alone), "{format:?}");
            together
        });
    }
}

/// Converts keys or values `[positions, kv_heads, size]` to the byte layout of a cache.
fn rows(format: CacheFormat, kv_heads: usize, size: usize, floats: &[f32]) -> Vec<u8> {
    let positions = floats.len() / (kv_heads * size);
    let mut plane =
        CachePlane::new(CacheLayout::Values, format, kv_heads, size, positions).unwrap();
    for position in floats.chunks_exact(kv_heads * size) {
        plane.push(position);
    }
    let mut rows = vec![0; kv_heads * plane.rows_bytes()];
    for (head, rows) in rows.chunks_exact_mut(plane.rows_bytes()).enumerate() {
        plane.copy_rows(head, rows);
    }
    rows
}
