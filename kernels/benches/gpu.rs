//! What a card does with each kernel, held against how fast it copies; and what launches, recordings and synchronisations cost.
//!
//! `cargo bench -p powerinfer-kernels --bench gpu`, with a card; `-- --emulate` runs the same on the emulator with small
//! shapes, whose figures mean nothing; `-- launches attention` runs these sections alone, after the copies. Shapes are
//! those of a layer of a 70B model: 8192 numbers, 28672 neurons, 64 heads that share 8. Results are compared with the
//! scalar code before anything is timed. Caches are swept between repeats; figures are medians.
#![expect(unsafe_code, reason = "launches kernels and calls the CUDA driver")]
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use powerinfer_emulator::{Emulator, Order};
use powerinfer_kernels::{
    Arithmetic, Isa,
    cuda::{
        Attention, Buffer, ColdSum, CudaDevice, Device, DownScratch, Ffn, Gpu, GpuActivation,
        GpuCache, GpuFfnKind, GpuLinear, GpuMatrix, HostBuffer, HostMirror, NeuronFilter,
    },
    environment,
};
use powerinfer_tensor::{CacheFormat, Format, Matrix, MatrixData, OwnedMatrix, pack};

#[path = "../tests/support/noise.rs"]
mod noise;

use noise::noise;

/// What is timed, and on what.
struct Bench {
    device: Arc<dyn Device>,
    gpu: Gpu,
    is_card: bool,
    hidden: usize,
    neurons: usize,
    heads: usize,
    context: usize,
    /// Copied to sweep the caches.
    sweep: [Buffer<u8>; 2],
    repeats: usize,
    /// Bytes per second that are read where memory is copied.
    ceiling: f64,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let is_emulated = std::env::args().any(|argument| argument == "--emulate");
    let device: Arc<dyn Device> = match is_emulated {
        true => match Emulator::new(2, Order::Forward) {
            Some(emulator) => Arc::new(emulator),
            None => {
                println!("skipped: the emulator was not built");
                return Ok(());
            }
        },
        false => match CudaDevice::open(0) {
            Ok(card) => Arc::new(card),
            Err(reason) if environment::requires_gpu() => {
                return Err(reason.into());
            }
            Err(reason) => {
                println!("skipped: {reason}");
                return Ok(());
            }
        },
    };
    let mut bench = Bench::new(device, !is_emulated)?;
    println!(
        "\n{}, {} multiprocessors.\n",
        bench.device.info().name,
        bench.device.info().multiprocessors
    );
    let named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    // The first one measures the bandwidth that others are compared with.
    bench.copies()?;
    for (name, section) in SECTIONS {
        if named.is_empty() || named.iter().any(|given| given == name) {
            section(&mut bench)?;
        }
    }
    Ok(())
}

/// A part of the report.
type Section = fn(&mut Bench) -> Outcome<()>;

/// The parts after the copies, by the name that chooses them.
const SECTIONS: [(&str, Section); 6] = [
    ("launches", Bench::launches),
    ("syncs", Bench::syncs),
    ("sparse", Bench::sparse),
    ("dense", Bench::dense),
    ("prompts", Bench::prompts),
    ("attention", Bench::attention),
];

/// The one in the middle.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// A matrix whose rows are those of a small one, again and again: large ones are made in no time.
struct Tiled {
    rows: usize,
    columns: usize,
    small: OwnedMatrix,
}

/// Rows of the small one.
const TILE: usize = 64;

impl Tiled {
    fn new(format: Format, rows: usize, columns: usize, seed: u64) -> Self {
        let values: Vec<f32> = noise(seed, TILE * columns)
            .into_iter()
            .map(|value| 0.02 * value)
            .collect();
        Self {
            rows,
            columns,
            small: pack(format, TILE, columns, &values),
        }
    }

    /// Rows of a plane, again and again.
    fn repeat<T: Copy>(&self, plane: &[T]) -> Vec<T> {
        let count = plane.len() / TILE * self.rows;
        plane.iter().copied().cycle().take(count).collect()
    }

    fn upload(&self, device: &Arc<dyn Device>) -> Outcome<GpuMatrix> {
        let upload = |data: MatrixData<'_>| -> Outcome<GpuMatrix> {
            let matrix = Matrix::new(self.rows, self.columns, data)?;
            Ok(GpuMatrix::upload(device, &matrix)?)
        };
        match self.small.as_view().data() {
            MatrixData::F32(values) => upload(MatrixData::F32(&self.repeat(values))),
            MatrixData::F16(values) => upload(MatrixData::F16(&self.repeat(values))),
            MatrixData::Bf16(values) => upload(MatrixData::Bf16(&self.repeat(values))),
            MatrixData::Q8_0 { quants, scales } => upload(MatrixData::Q8_0 {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
            }),
            MatrixData::Q4K {
                quants,
                scales,
                factors,
            } => upload(MatrixData::Q4K {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
                factors: &self.repeat(factors),
            }),
            MatrixData::Q4_0 { quants, scales } => upload(MatrixData::Q4_0 {
                quants: &self.repeat(quants),
                scales: &self.repeat(scales),
            }),
        }
    }

    /// Products of the small one.
    fn products(&self, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; TILE];
        Isa::SCALAR.gemv(&self.small.as_view(), x, &mut out);
        out
    }
}

impl Tiled {
    /// Sums of rows times `factors`.
    fn sums(&self, factors: &[f32]) -> Vec<f32> {
        let mut of_rows = [0.0; TILE];
        for (row, factor) in factors.iter().enumerate() {
            of_rows[row % TILE] += factor;
        }
        let (mut sums, mut row) = (vec![0.0; self.columns], vec![0.0; self.columns]);
        for (index, factor) in of_rows.into_iter().enumerate() {
            self.small.as_view().dequantise_row(index, &mut row);
            for (sum, weight) in sums.iter_mut().zip(&row) {
                *sum += factor * weight;
            }
        }
        sums
    }
}

/// Fails where a result is not what the scalar code gives.
fn compare(found: &[f32], want: impl Fn(usize) -> f32, what: &str) -> Outcome<()> {
    let largest = found
        .iter()
        .fold(1e-6f32, |most, number| most.max(number.abs()));
    for (index, found) in found.iter().enumerate() {
        let want = want(index);
        let is_near = (found - want).abs() <= 2e-2 * largest;
        if !is_near {
            return Err(format!("{what}: number {index} is {found}, not {want}").into());
        }
    }
    Ok(())
}

impl Bench {
    fn new(device: Arc<dyn Device>, is_card: bool) -> Outcome<Self> {
        let mut bytes = match is_card {
            true => 256 << 20,
            false => 1 << 20,
        };
        let sweep = loop {
            let buffer = || Buffer::new(&device, bytes);
            match buffer().and_then(|one| Ok([one, buffer()?])) {
                Ok(both) => break both,
                Err(_) if bytes > 32 << 20 => bytes /= 2,
                Err(error) => return Err(error.into()),
            }
        };
        let [hidden, neurons, heads, context] = match is_card {
            true => [8192, 28672, 64, 4096],
            false => [256, 320, 8, 64],
        };
        Ok(Self {
            gpu: Gpu::new(Arc::clone(&device), Arithmetic::Integer),
            device,
            is_card,
            hidden,
            neurons,
            heads,
            context,
            sweep,
            repeats: if is_card { 15 } else { 1 },
            ceiling: 0.0,
        })
    }

    /// The seconds that the device takes for what `act` asks of it, its caches swept before.
    fn seconds(&mut self, mut act: impl FnMut(&Gpu) -> Outcome<()>) -> Outcome<f64> {
        let mut all = Vec::new();
        for repeat in 0..=self.repeats {
            let [from, to] = &mut self.sweep;
            to.copy_from(from)?;
            self.device.record_event(0)?;
            act(&self.gpu)?;
            self.device.record_event(1)?;
            self.device.synchronise()?;
            // The first one loads what it needs.
            if repeat > 0 {
                all.push(self.device.elapsed_seconds(0, 1)?.max(1e-9));
            }
        }
        Ok(median(all))
    }

    fn copies(&mut self) -> Outcome<()> {
        let bytes = self.sweep[0].len();
        let mut all = Vec::new();
        for _ in 0..2 * self.repeats + 1 {
            let [from, to] = &mut self.sweep;
            self.device.record_event(0)?;
            to.copy_from(from)?;
            self.device.record_event(1)?;
            self.device.synchronise()?;
            all.push(self.device.elapsed_seconds(0, 1)?.max(1e-9));
        }
        self.ceiling = 2.0 * bytes as f64 / median(all);
        println!(
            "Copies within the device read and write {:.0} GB/s together, {} MiB at a time: the ceiling below.\n",
            self.ceiling / 1e9,
            bytes >> 20
        );
        println!("| bytes from page-locked memory | GB/s | µs |\n| --: | --: | --: |");
        for bytes in [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            if bytes > self.sweep[0].len() {
                break;
            }
            let (host, _) = self.device.allocate_host(bytes)?;
            let mut all = Vec::new();
            for _ in 0..2 * self.repeats + 1 {
                let to = self.device.allocate(bytes)?;
                // SAFETY: so many bytes were just taken on both sides, and are given back when the copy is done.
                unsafe {
                    host.write_bytes(1, bytes);
                    let from = std::slice::from_raw_parts(host, bytes);
                    let started = Instant::now();
                    self.device.make_copies_wait(0)?;
                    self.device.copy_async(0, to, from)?;
                    self.device.synchronise_copies(0)?;
                    all.push(started.elapsed().as_secs_f64());
                    self.device.free(to, bytes);
                }
            }
            // SAFETY: nobody uses it any more.
            unsafe {
                self.device.free_host(host, bytes);
            }
            let seconds = median(all);
            println!(
                "| {bytes} | {:.1} | {:.1} |",
                bytes as f64 / seconds / 1e9,
                seconds * 1e6
            );
        }
        println!();
        Ok(())
    }

    /// What a launch costs, alone and in a recording.
    fn launches(&mut self) -> Outcome<()> {
        const COUNT: usize = 200;
        let view = Flags::new(&self.device, 1)?;
        let launch_all = |gpu: &Gpu| -> Outcome<()> {
            for _ in 0..COUNT {
                gpu.signal_host(view.host_view(0))?;
            }
            Ok(())
        };
        let eager = self.seconds(launch_all)? / COUNT as f64;
        let mut host = Vec::new();
        for _ in 0..self.repeats {
            let started = Instant::now();
            launch_all(&self.gpu)?;
            host.push(started.elapsed().as_secs_f64() / COUNT as f64);
            self.device.synchronise()?;
        }
        println!("| launches of a kernel that does nothing | µs each |\n| :-- | --: |");
        println!(
            "| one by one, what the host takes | {:.2} |",
            median(host) * 1e6
        );
        println!("| one by one, from one to the next | {:.2} |", eager * 1e6);
        if self.device.begin_capture()? {
            launch_all(&self.gpu)?;
            let recorded = self.device.end_capture()?;
            let replay = |_: &Gpu| -> Outcome<()> {
                // SAFETY: what was recorded uses what is still here.
                unsafe {
                    recorded.launch()?;
                }
                Ok(())
            };
            let seconds = self.seconds(replay)? / COUNT as f64;
            println!("| recorded, from one to the next | {:.2} |", seconds * 1e6);
        }
        println!();
        Ok(())
    }

    /// What it takes until the host has an answer from the device, and the device one from the host.
    fn syncs(&mut self) -> Outcome<()> {
        println!("| a synchronisation to the host and back, by | µs |\n| :-- | --: |");
        let flag = self.sync_by_flags()?;
        println!(
            "| flags that kernels write and wait for | {:.2} |",
            flag * 1e6
        );
        if self.is_card {
            for (name, seconds) in by_driver::syncs(self.repeats)? {
                println!("| {name} | {:.2} |", seconds * 1e6);
            }
        }
        println!();
        Ok(())
    }

    /// Seconds of a synchronisation within one recording, its two kernels among it.
    fn sync_by_flags(&self) -> Outcome<f64> {
        const COUNT: usize = 50;
        let device = &self.device;
        let mut ready = Flags::new(device, COUNT)?;
        let done = HostBuffer::new(device, COUNT)?;
        let (sum, timed_out) = (HostBuffer::new(device, 32)?, HostBuffer::new(device, 1)?);
        let matrix = pack(Format::F32, 1, 32, &[0.0; 32]);
        let linear = || GpuLinear::upload(device, &matrix.as_view(), None);
        let ffn = Ffn {
            gate: linear()?,
            up: None,
            down: GpuMatrix::upload(device, &matrix.as_view())?,
            bias: None,
            kind: GpuFfnKind::Plain,
            activation: GpuActivation::Relu,
        };
        let products = Buffer::new(device, 1)?;
        let mut scratch = self.gpu.down_scratch([&ffn.down].into_iter())?;
        let mut hidden = Buffer::new(device, 32)?;
        let mut launch_all = |ready: &Flags| -> Outcome<()> {
            for index in 0..COUNT {
                self.gpu.signal_host(ready.host_view(index))?;
                let cold = ColdSum {
                    sum: &sum,
                    flag: Some((&done, index)),
                    step: &ready.step,
                    timed_out: &timed_out,
                    timeout_nanoseconds: 5_000_000_000,
                };
                let (ffn, hidden) = (&ffn, &mut hidden);
                self.gpu
                    .down(ffn, &products, None, Some(cold), &mut scratch, hidden)?;
            }
            Ok(())
        };
        if !self.device.begin_capture()? {
            return Ok(f64::NAN);
        }
        launch_all(&ready)?;
        let recorded = self.device.end_capture()?;
        let mut all = Vec::new();
        for round in 1..=self.repeats as u32 + 1 {
            ready.step.write(&[round])?;
            device.synchronise()?;
            let started = Instant::now();
            // SAFETY: what was recorded uses what is still here.
            unsafe {
                recorded.launch()?;
            }
            for index in 0..COUNT {
                let flag = &ready.ready.words()[index];
                while flag.load(Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                done.words()[index].store(round, Ordering::Release);
            }
            device.synchronise()?;
            all.push(started.elapsed().as_secs_f64() / COUNT as f64);
        }
        if timed_out.words()[0].load(Ordering::Acquire) != 0 {
            return Err("a kernel gave a synchronisation up".into());
        }
        Ok(median(all))
    }

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
            kind: GpuFfnKind::Gated,
            activation: GpuActivation::Silu,
        };
        Ok((tiled, ffn))
    }

    /// An FFN of which some neurons are computed.
    fn sparse(&mut self) -> Outcome<()> {
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
                let mut scratch = self.gpu.down_scratch([&ffn.down].into_iter())?;
                let mut hidden = Buffer::new(&self.device, self.hidden)?;
                let mut gate_up = |gpu: &Gpu, scratch: &mut DownScratch| -> Outcome<()> {
                    let (mask, products) = (Some(&mask), &mut products);
                    Ok(gpu.gate_up(
                        &on_device,
                        None,
                        &ffn,
                        NeuronFilter::All,
                        mask,
                        products,
                        None,
                        scratch,
                    )?)
                };
                let first = self.seconds(|gpu| gate_up(gpu, &mut scratch))?;
                let want = |neuron: usize| match chosen(neuron) {
                    true => {
                        let gate = gates[neuron % TILE];
                        gate / (1.0 + (-gate).exp()) * ups[neuron % TILE]
                    }
                    false => 0.0,
                };
                compare(&products.to_vec()?, want, &format!("{format} gate·up"))?;
                let second = self.seconds(|gpu| {
                    let (scratch, hidden) = (&mut scratch, &mut hidden);
                    Ok(gpu.down(&ffn, &products, None, None, scratch, hidden)?)
                })?;
                hidden.clear()?;
                self.gpu
                    .down(&ffn, &products, None, None, &mut scratch, &mut hidden)?;
                let sums = tiled[2].sums(&products.to_vec()?);
                let what = format!("{format} down");
                compare(&hidden.to_vec()?, |column| sums[column], &what)?;
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

    /// The projections of attention.
    fn dense(&mut self) -> Outcome<()> {
        let (rows, columns) = (self.hidden, self.hidden);
        println!(
            "| product, {rows} × {columns} | µs | GB/s | of the ceiling |\n| :-- | --: | --: | --: |"
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
            compare(
                &out.to_vec()?,
                |row| want[row % TILE],
                &format!("{format} product"),
            )?;
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

    /// Products of the tokens of a prompt.
    fn prompts(&mut self) -> Outcome<()> {
        let (rows, columns) = (self.hidden, self.hidden);
        println!(
            "| product, {rows} × {columns}, of tokens of a prompt | tokens | µs | TFLOP/s |\n| :-- | --: | --: | --: |"
        );
        for format in Format::ALL {
            let tiled = Tiled::new(format, rows, columns, 6);
            let linear = GpuLinear {
                matrix: tiled.upload(&self.device)?,
                bias: None,
            };
            for tokens in [64, 256] {
                let x = noise(7, tokens * columns);
                let want = tiled.products(&x[..columns]);
                let x = Buffer::from_slice(&self.device, &x)?;
                let mut halves = self.gpu.new_f16_buffer(tokens, columns)?;
                self.gpu
                    .to_f16(&x, tokens, None, format, &mut halves, None)?;
                let mut out = Buffer::new(&self.device, tokens * rows)?;
                let seconds =
                    self.seconds(|gpu| Ok(gpu.gemm(&halves, &linear, &mut out, false)?))?;
                let found = out.to_vec()?;
                let what = format!("{format} product of {tokens} tokens");
                compare(&found[..rows], |row| want[row % TILE], &what)?;
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

    /// Attention of a token at the end of a context.
    fn attention(&mut self) -> Outcome<()> {
        let (heads, size) = (self.heads, 128);
        let kv_heads = heads / 8;
        println!(
            "| attention, {heads} heads that share {kv_heads} | positions | µs | GB/s | of the ceiling |\n| :-- | --: | --: | --: | --: |"
        );
        for positions in [self.context / 8, self.context] {
            let device = &self.device;
            let floats = |count: usize, seed| Buffer::from_slice(device, &noise(seed, count));
            let (query, key, value) = (
                floats(heads * size, 1)?,
                floats(kv_heads * size, 2)?,
                floats(kv_heads * size, 3)?,
            );
            let rotations = Buffer::new(device, 0)?;
            let position = Buffer::from_slice(device, &[positions as u32 - 1])?;
            let mut cache = GpuCache::new(device, CacheFormat::F16, kv_heads, self.context, size)?;
            let words = self
                .gpu
                .attention_scratch_len(1, heads, kv_heads, size, self.context);
            let (mut partial, mut counters) =
                (Buffer::new(device, words)?, Buffer::new(device, kv_heads)?);
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
                    window: None,
                    position: &position,
                };
                Ok(gpu.attend(&what, &mut cache, &mut partial, &mut counters, &mut out)?)
            })?;
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

/// Words that a kernel writes for the host.
struct Flags {
    ready: HostBuffer,
    input: HostBuffer,
    step: Buffer<u32>,
}

impl Flags {
    fn new(device: &Arc<dyn Device>, count: usize) -> Outcome<Self> {
        Ok(Self {
            ready: HostBuffer::new(device, count)?,
            input: HostBuffer::new(device, 1)?,
            step: Buffer::from_slice(device, &[1u32])?,
        })
    }

    fn host_view(&self, flag: usize) -> HostMirror<'_> {
        HostMirror {
            input: &self.input,
            flags: &self.ready,
            flag,
            step: &self.step,
        }
    }
}

/// Hand-overs that the driver makes, for comparison.
mod by_driver {
    use super::*;
    use cudarc::driver::{CudaContext, sys};
    use std::ffi::c_void;

    const COUNT: usize = 50;

    unsafe extern "C" fn count(word: *mut c_void) {
        // SAFETY: it is the word that was given along, which is atomic and still there.
        let word = unsafe { &*word.cast::<AtomicU32>() };
        word.fetch_add(1, Ordering::Release);
    }

    /// Names, and seconds of a round trip each.
    pub(super) fn syncs(repeats: usize) -> Outcome<Vec<(&'static str, f64)>> {
        let context = CudaContext::new(0)?;
        let stream = context.new_stream()?;
        let raw = stream.cu_stream();
        let mut found = Vec::new();
        // SAFETY: flags and words stay until the stream is done with them.
        unsafe {
            let mut host = std::ptr::null_mut();
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            sys::cuMemHostAlloc(&mut host, 2 * 4 * COUNT, flags).result()?;
            let mut address = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0).result()?;
            let words = std::slice::from_raw_parts(host.cast::<AtomicU32>(), 2 * COUNT);
            for word in words {
                word.store(0, Ordering::Relaxed);
            }
            let word = |index: usize| address + 4 * index as u64;
            let mut all = Vec::new();
            for round in 1..=repeats as u32 + 1 {
                let started = Instant::now();
                for index in 0..COUNT {
                    sys::cuStreamWriteValue32_v2(raw, word(index), round, 0).result()?;
                    // 1: wait until it is equal.
                    sys::cuStreamWaitValue32_v2(raw, word(COUNT + index), round, 1).result()?;
                }
                for index in 0..COUNT {
                    while words[index].load(Ordering::Acquire) != round {
                        std::hint::spin_loop();
                    }
                    words[COUNT + index].store(round, Ordering::Release);
                }
                stream.synchronize()?;
                all.push(started.elapsed().as_secs_f64() / COUNT as f64);
            }
            found.push(("operations of the driver on memory", median(all)));
            sys::cuMemFreeHost(host).result()?;

            let counted = AtomicU32::new(0);
            let mut all = Vec::new();
            for _ in 0..=repeats {
                let started = Instant::now();
                for _ in 0..COUNT {
                    let to = std::ptr::from_ref(&counted).cast_mut().cast();
                    sys::cuLaunchHostFunc(raw, Some(count), to).result()?;
                }
                stream.synchronize()?;
                all.push(started.elapsed().as_secs_f64() / COUNT as f64);
            }
            if counted.load(Ordering::Acquire) as usize != (repeats + 1) * COUNT {
                return Err("functions of the host were not all called".into());
            }
            found.push(("functions of the host that the driver calls", median(all)));
        }
        Ok(found)
    }
}
