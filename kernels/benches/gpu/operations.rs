//! The kernels of a layer: sparse FFN, GEMV, GEMM, attention.

use powerinfer_kernels::cuda::{
    Attention, Buffer, CacheShape, DownScratch, Ffn, Gpu, GpuCache, GpuLinear, NeuronFilter,
};
use powerinfer_tensor::{Activation, CacheFormat, FfnKind, Format, f16};

use crate::{
    Bench, Outcome,
    noise::noise,
    tiled::{TILE, Tiled},
};

impl Bench {
    fn ffn(&self, format: Format) -> Outcome<([Tiled; 3], Ffn)> {
        let (neurons, hidden) = (self.neurons, self.hidden);
        let tiled = [1, 2, 3].map(|seed| Tiled::new(format, neurons, hidden, seed));
        let [gate, up, down] = &tiled;
        let linear = |tiled: &Tiled| -> Outcome<GpuLinear> {
            Ok(GpuLinear {
                matrix: tiled.upload(&self.device)?,
                bias: None,
            })
        };
        let ffn = Ffn {
            gate: linear(gate)?,
            up: Some(linear(up)?),
            down: down.upload(&self.device)?,
            bias: None,
            kind: FfnKind::Gated,
            activation: Activation::Silu,
        };
        Ok((tiled, ffn))
    }

    /// A sparse FFN.
    pub(crate) fn sparse(&mut self) -> Outcome<()> {
        println!(
            "| FFN, {} × {} | neurons | gate·up µs | GB/s | of the ceiling | down µs | GB/s | of the ceiling |",
            self.hidden, self.neurons
        );
        println!("| :-- | --: | --: | --: | --: | --: | --: | --: |");
        for format in [Format::F16, Format::Q8_0, Format::Q4K, Format::Q4_0] {
            let (tiled, ffn) = self.ffn(format)?;
            let x = noise(9, self.hidden);
            let [gates, ups] = [0, 1].map(|index| tiled[index].products(&x));
            let on_device = Buffer::from_slice(&self.device, &x)?;
            for percent in [100, 50, 20, 10, 5, 2, 1] {
                let chosen = |neuron: usize| (neuron * 7919) % 100 < percent;
                let mut words = vec![0u32; self.neurons.div_ceil(32)];
                let listed = (0..self.neurons).filter(|neuron| chosen(*neuron));
                let count = listed
                    .inspect(|neuron| words[neuron / 32] |= 1 << (neuron % 32))
                    .count();
                let mask = Buffer::from_slice(&self.device, &words)?;
                let mut products = Buffer::new(&self.device, self.neurons)?;
                let mut scratch = self.gpu.down_scratch([&ffn.down].into_iter(), 1)?;
                let mut hidden = Buffer::new(&self.device, self.hidden)?;
                let mut gate_up = |gpu: &Gpu, scratch: &mut DownScratch| -> Outcome<()> {
                    let (mask, products) = (Some(&mask), &mut products);
                    Ok(gpu.gate_up(
                        &on_device,
                        None,
                        &ffn,
                        NeuronFilter::All,
                        None,
                        mask,
                        products,
                        None,
                        None,
                        scratch,
                    )?)
                };
                let first = self.seconds(|gpu| gate_up(gpu, &mut scratch))?;
                let want = |neuron: usize| {
                    if chosen(neuron) {
                        let gate = gates[neuron % TILE];
                        gate / (1.0 + (-gate).exp()) * ups[neuron % TILE]
                    } else {
                        0.0
                    }
                };
                if !self.is_right(&format!("{format} gate·up"), &products.to_vec()?, want) {
                    continue;
                }
                let second = self.seconds(|gpu| {
                    let (scratch, hidden) = (&mut scratch, &mut hidden);
                    Ok(gpu.down(&ffn, &products, [None; 2], None, scratch, hidden)?)
                })?;
                hidden.clear()?;
                self.gpu
                    .down(&ffn, &products, [None; 2], None, &mut scratch, &mut hidden)?;
                let sums = tiled[2].sums(&products.to_vec()?);
                let what = format!("{format} down");
                if !self.is_right(&what, &hidden.to_vec()?, |column| sums[column]) {
                    continue;
                }
                let row = format.row_bytes(self.hidden) * count;
                let speeds =
                    [2 * row, row]
                        .into_iter()
                        .zip([first, second])
                        .map(|(bytes, seconds)| {
                            let speed = bytes as f64 / seconds;
                            format!(
                                "{:.1} | {:.0} | {:.0} %",
                                seconds * 1e6,
                                speed / 1e9,
                                100.0 * speed / self.ceiling
                            )
                        });
                let speeds: Vec<String> = speeds.collect();
                println!("| {format} | {percent} % | {} |", speeds.join(" | "));
            }
        }
        println!();
        Ok(())
    }

    /// GEMV with the shape of an attention projection.
    pub(crate) fn dense(&mut self) -> Outcome<()> {
        let (rows, columns) = (self.hidden, self.hidden);
        println!(
            "| GEMV, {rows} × {columns} | µs | GB/s | of the ceiling |\n| :-- | --: | --: | --: |"
        );
        for format in Format::ALL {
            let tiled = Tiled::new(format, rows, columns, 4);
            let linear = GpuLinear {
                matrix: tiled.upload(&self.device)?,
                bias: None,
            };
            let x = noise(5, columns);
            let want = tiled.products(&x);
            let x = Buffer::from_slice(&self.device, &x)?;
            let mut out = Buffer::new(&self.device, rows)?;
            let seconds = self
                .seconds(|gpu| Ok(gpu.project(&x, None, &mut [(&linear, &mut out)], false)?))?;
            let what = format!("{format} product");
            if !self.is_right(&what, &out.to_vec()?, |row| want[row % TILE]) {
                continue;
            }
            let speed = linear.matrix.bytes() as f64 / seconds;
            println!(
                "| {format} | {:.1} | {:.0} | {:.0} % |",
                seconds * 1e6,
                speed / 1e9,
                100.0 * speed / self.ceiling
            );
        }
        println!();
        Ok(())
    }

    /// GEMM over the tokens of a prompt.
    pub(crate) fn prompts(&mut self) -> Outcome<()> {
        let (rows, columns) = (self.hidden, self.hidden);
        println!("| GEMM, {rows} × {columns} | tokens | µs | TFLOP/s |\n| :-- | --: | --: | --: |");
        for format in Format::ALL {
            let tiled = Tiled::new(format, rows, columns, 6);
            let linear = GpuLinear {
                matrix: tiled.upload(&self.device)?,
                bias: None,
            };
            for tokens in [64, 512] {
                let x = noise(7, tokens * columns);
                let last = (tokens - 1) * columns;
                let (want, want_last) = (tiled.products(&x[..columns]), tiled.products(&x[last..]));
                let x = Buffer::from_slice(&self.device, &x)?;
                let mut x_f16 = self.gpu.new_f16_buffer(tokens, columns, format)?;
                self.gpu
                    .to_f16(&x, tokens, None, format, &mut x_f16, None)?;
                let mut out = Buffer::new(&self.device, tokens * rows)?;
                let sums = self.gpu.new_split_sums(&[[columns, rows]], tokens)?;
                let seconds =
                    self.seconds(|gpu| Ok(gpu.gemm(&x_f16, &linear, &sums, &mut out, false)?))?;
                let found = out.to_vec()?;
                let what = format!("{format} product of {tokens} tokens");
                let of_last = &found[(tokens - 1) * rows..];
                if !self.is_right(&what, &found[..rows], |row| want[row % TILE])
                    || !self.is_right(&what, of_last, |row| want_last[row % TILE])
                {
                    continue;
                }
                let operations = 2.0 * (tokens * rows * columns) as f64;
                println!(
                    "| {format} | {tokens} | {:.1} | {:.1} |",
                    seconds * 1e6,
                    operations / seconds / 1e12
                );
            }
        }
        println!();
        Ok(())
    }

    /// Attention of one token over a context.
    pub(crate) fn attention(&mut self) -> Outcome<()> {
        let (heads, size) = (self.heads, 128);
        let kv_heads = heads / 8;
        println!(
            "| attention, {heads} heads, {kv_heads} KV heads | positions | µs | GB/s | of the ceiling |\n| :-- | --: | --: | --: | --: |"
        );
        for positions in [self.context / 8, self.context] {
            let device = &self.device;
            let [q, k, v] = [(1, heads), (2, kv_heads), (3, kv_heads)]
                .map(|(seed, count)| noise(seed, count * size));
            let [query, key, value] = [&q, &k, &v].map(|x| Buffer::from_slice(device, x));
            let (query, key, value) = (query?, key?, value?);
            let rotations = Buffer::new(device, 0)?;
            let position = Buffer::from_slice(device, &[positions as u32 - 1])?;
            let shape = CacheShape {
                format: CacheFormat::F16,
                kv_heads,
                head_size: size,
                context: self.context,
            };
            let mut cache = GpuCache::new(device, shape)?;
            // Cached keys are 0, the values of the first half of the positions 1, the others 0.
            let (cached, ones) = (positions - 1, positions / 2);
            let values = (0..kv_heads * cached * size).map(|i| i / size % cached < ones);
            let values = values.map(|is_one| f16::from_f32(f32::from(u8::from(is_one))));
            let values: Vec<f16> = values.collect();
            let values = bytemuck::cast_slice(&values);
            cache.write(cached, [&vec![0; values.len()], values])?;
            let want = |index: usize| {
                let (head, kv_head) = (index / size, index / size / (heads / kv_heads));
                let products = q[head * size..][..size].iter().zip(&k[kv_head * size..]);
                let score = products.map(|(q, k)| q * k).sum::<f32>() / (size as f32).sqrt();
                let value = v[kv_head * size + index % size];
                (ones as f32 + score.exp() * value) / (cached as f32 + score.exp())
            };
            let caches = Buffer::from_slice(device, &[cache.place()])?;
            let words = self.gpu.attention_scratch_len(1, heads, &shape);
            let (mut partial, mut counters) =
                (Buffer::new(device, words)?, Buffer::new(device, heads)?);
            let mut out = Buffer::new(device, heads * size)?;
            let seconds = self.seconds(|gpu| {
                let what = Attention {
                    tokens: 1,
                    query: &query,
                    key: &key,
                    value: &value,
                    norms: None,
                    sin_cos: &rotations,
                    alibi_slopes: None,
                    sinks: None,
                    window: None,
                    positions: &position,
                    caches: &caches,
                    layer: 0,
                    shape,
                };
                // SAFETY: the cache exists until the end, and has the position.
                #[expect(unsafe_code, reason = "kernels follow addresses in device memory")]
                unsafe {
                    Ok(gpu.attend(&what, &mut partial, &mut counters, &mut out)?)
                }
            })?;
            let what = format!("attention over {positions} positions");
            if !self.is_right(&what, &out.to_vec()?, want) {
                continue;
            }
            let bytes = 2 * positions * kv_heads * size * 2;
            let speed = bytes as f64 / seconds;
            println!(
                "| f16 | {positions} | {:.1} | {:.0} | {:.0} % |",
                seconds * 1e6,
                speed / 1e9,
                100.0 * speed / self.ceiling
            );
        }
        println!();
        Ok(())
    }
}
