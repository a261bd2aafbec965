//! Speed of the kernels of a decode step on this machine, measured as a decode step runs them: split over threads in
//! the same way, over weights in a mapped file that exceeds the caches.

use std::{
    cell::Cell,
    hint::black_box,
    path::Path,
    time::{Duration, Instant},
};

use powerinfer_artifact::{
    ArtifactError, hardware::KernelSpeed, mapped_file::FileBytes, random::Random,
};
use powerinfer_kernels::{Isa, Norm, QuantisedActivations};
use powerinfer_model::NormKind;
use powerinfer_tensor::{BLOCK, Format, Matrix, MatrixData, SUPER_BLOCK, pack};

use crate::{
    RuntimeError, Sampler, SamplingSettings, Threads,
    bandwidth::{read_rows, read_stream},
    ffn::Active,
    input::{Input, InputBuffers},
    threads::Parts,
};

/// Every byte of the weights. Repeated, it is a normal number in float32, bfloat16 and float16, so no kernel is slowed down.
pub const WEIGHT_BYTE: u8 = 0x3c;
/// Share of the rows that sparse kernels read, typical of sparse models and isolated from one another.
const DENSITY: f64 = 0.1;
/// If two times of the same work differ by more than this factor, it is measured more often.
const STEADY: f64 = 1.3;
/// How many times as often unsteady work is measured.
const LONGER: usize = 4;
/// Bytes that one kernel reads of a matrix, and of listed rows, about as in models: with several threads a short
/// kernel waits relatively longer for the last one.
const PIECES: [usize; 2] = [8 << 20, 1 << 20];
/// Time between two kernels, about: a norm, an activation.
const BETWEEN_KERNELS: Duration = Duration::from_micros(20);
/// Tokens of a prompt that run together.
const PROMPT_TOKENS: usize = 64;

/// Time of a decode step outside matrix products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeOverheads {
    /// Starting a kernel and waiting for all threads.
    pub kernel_seconds: f64,
    /// Time per layer and element of the hidden state.
    pub hidden_seconds: f64,
    /// Time per layer and neuron.
    pub neuron_seconds: f64,
    /// Time per token and entry of the vocabulary.
    pub vocabulary_seconds: f64,
}

/// Weights to run kernels on: a mapped file of [`WEIGHT_BYTE`]s. Measurements read its windows in turn, so that the next
/// window is in no cache.
#[derive(Debug)]
pub struct SpeedTest {
    weights: FileBytes,
    window_bytes: usize,
    next: Cell<usize>,
}

impl SpeedTest {
    /// Opens the file at `path`, which holds [`WEIGHT_BYTE`]s only and should exceed the caches by several windows of
    /// `window_bytes` bytes.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be mapped.
    pub fn open(path: &Path, window_bytes: usize) -> Result<Self, ArtifactError> {
        let weights = FileBytes::open(path)?;
        // Page faults of the first access belong to no measurement.
        let pages = weights.iter().step_by(4096);
        black_box(pages.map(|byte| u64::from(*byte)).sum::<u64>());
        Ok(Self {
            window_bytes: window_bytes.min(weights.len()),
            weights,
            next: Cell::new(0),
        })
    }

    /// The next window.
    fn window(&self) -> &[u8] {
        let (size, start) = (self.window_bytes, self.next.get());
        let after = start + size;
        let fits = after + size <= self.weights.len();
        self.next.set(if fits { after } else { 0 });
        &self.weights[start..after]
    }

    /// A matrix with rows of `columns` weights: as many rows as fit into the next window.
    fn matrix(&self, format: Format, columns: usize) -> Matrix<'_> {
        let bytes = self.window();
        let rows = bytes.len() / format.row_bytes(columns);
        let blocks = rows * columns.div_ceil(BLOCK);
        let plane = |start: usize, length: usize| &bytes[start..][..length];
        let data = match format {
            Format::F32 => MatrixData::F32(bytemuck::cast_slice(plane(0, rows * columns * 4))),
            Format::F16 => MatrixData::F16(bytemuck::cast_slice(plane(0, rows * columns * 2))),
            Format::Bf16 => MatrixData::Bf16(bytemuck::cast_slice(plane(0, rows * columns * 2))),
            Format::Q8_0 => MatrixData::Q8_0 {
                quants: bytemuck::cast_slice(plane(0, blocks * BLOCK)),
                scales: bytemuck::cast_slice(plane(blocks * BLOCK, blocks * 2)),
            },
            Format::Q4K => {
                let super_blocks = rows * columns.div_ceil(BLOCK).div_ceil(SUPER_BLOCK);
                let scales = blocks * BLOCK / 2;
                let factors = scales + super_blocks * 4;
                MatrixData::Q4K {
                    quants: plane(0, scales),
                    scales: bytemuck::cast_slice(plane(scales, factors - scales)),
                    factors: bytemuck::cast_slice(plane(factors, blocks * 2)),
                }
            }
            Format::Q4_0 => MatrixData::Q4_0 {
                quants: plane(0, blocks * BLOCK / 2),
                scales: bytemuck::cast_slice(plane(blocks * BLOCK / 2, blocks * 2)),
            },
        };
        Matrix::new(rows, columns, data).expect("the planes were cut for this shape")
    }

    /// Measures every kind of kernel over rows of `columns` weights, `passes` times each in turn, or longer if the times of a kind
    /// differ by more than 30%; `kernel_seconds`, the time to start a kernel, is subtracted.
    pub fn kernels(
        &self,
        threads: &Threads,
        format: Format,
        columns: usize,
        passes: usize,
        kernel_seconds: f64,
    ) -> KernelSpeed {
        let matrix = self.matrix(format, columns);
        let (rows, row_bytes) = (matrix.rows(), matrix.row_bytes());
        let x = vec![0.5; columns];
        let mut buffers = InputBuffers::default();
        let input = Input::new(threads, &x[..], columns, &matrix, &mut buffers);
        let mut out = vec![0.0; rows];
        let mut sum = vec![0.0; columns];
        let mut random = Random::new(1);
        let all: Vec<u32> = (0..rows as u32).collect();
        let coefficients = vec![1e-3; rows];
        let mut some = || -> Vec<u32> {
            let rows = 0..rows as u32;
            rows.filter(|_| random.unit() < DENSITY).collect()
        };
        let [whole, few] = PIECES.map(|bytes| (bytes / row_bytes).max(1));
        let mut seconds: [Vec<f64>; 4] = Default::default();
        while !is_measured(&seconds, passes.max(1)) {
            // Seconds per byte.
            let mut time = |kind: usize, rows: usize, kernels: usize, act: &mut dyn FnMut()| {
                let started = Instant::now();
                act();
                let elapsed = started.elapsed().as_secs_f64();
                // Reading takes at least half of the time, whatever the estimate of the start.
                let reading = (elapsed - kernels as f64 * kernel_seconds).max(elapsed / 2.0);
                let bytes = (rows * row_bytes).max(1) as f64;
                seconds[kind].push(reading / bytes);
            };
            let (products, sums) = (some(), some());
            let matrix = self.matrix(format, columns);
            time(0, rows, rows.div_ceil(whole), &mut || {
                for piece in all.chunks(whole) {
                    let rows = piece[0] as usize..piece[0] as usize + piece.len();
                    threads.gemv(&matrix.rows_range(rows.clone()), &input, &mut out[rows]);
                }
            });
            let matrix = self.matrix(format, columns);
            time(1, products.len(), products.len().div_ceil(few), &mut || {
                for (piece, out) in products.chunks(few).zip(out.chunks_mut(few)) {
                    threads.gemv_rows(&matrix, piece, &input, &mut out[..piece.len()]);
                }
            });
            // Each piece is of a matrix of its own, as threads share the parts of a matrix.
            let mut add = |listed: &[u32], pieces: usize| {
                let matrix = self.matrix(format, columns);
                let mut listed = listed;
                let step = rows.div_ceil(pieces).max(1);
                for start in (0..rows).step_by(step) {
                    let rows = start..rows.min(start + step);
                    let (piece, rest) =
                        listed.split_at(listed.partition_point(|row| (*row as usize) < rows.end));
                    let piece: Vec<u32> = piece.iter().map(|row| row - start as u32).collect();
                    let coefficients = &coefficients[..piece.len()];
                    threads.add_rows_of(&matrix.rows_range(rows), &piece, coefficients, &mut sum);
                    listed = rest;
                }
            };
            let pieces = rows.div_ceil(whole);
            time(2, rows, pieces, &mut || add(&all, pieces));
            let pieces = sums.len().div_ceil(few).max(1);
            time(3, sums.len(), pieces, &mut || add(&sums, pieces));
            black_box((&out, &sum));
        }
        let speed = |kind: usize| (1.0 / usual(seconds[kind].clone())).round();
        KernelSpeed {
            format,
            threads: threads.count(),
            row_bytes: row_bytes as u64,
            dense_bytes_per_second: speed(0),
            rows_bytes_per_second: speed(1),
            axpy_bytes_per_second: speed(3),
            dense_axpy_bytes_per_second: speed(2),
        }
    }

    /// Bytes per second that `threads` threads read in rows of `row_bytes`: a random tenth of the rows, or all as a stream.
    pub fn read(&self, isa: Isa, threads: usize, row_bytes: usize, passes: usize) -> f64 {
        let mut random = Random::new(2);
        let mut pass = || {
            let bytes = self.window();
            let rows = bytes.len() / row_bytes;
            let words: &[u64] = bytemuck::cast_slice(&bytes[..bytes.len() / 8 * 8]);
            if rows < 1024 {
                read_stream(isa, threads, words)
            } else {
                let rows = (0..rows as u32).filter(|_| random.unit() < DENSITY);
                read_rows(isa, threads, words, row_bytes, &rows.collect::<Vec<_>>())
            }
        };
        let mut seconds = [Vec::new()];
        while !is_measured(&seconds, passes.max(1)) {
            seconds[0].push(1.0 / pass());
        }
        let [seconds] = seconds;
        (1.0 / usual(seconds)).round()
    }

    /// Operations per second of GEMMs of prompts with weights in `format`.
    pub fn operations(&self, threads: &Threads, format: Format) -> f64 {
        const ROWS: usize = 2048;
        const COLUMNS: usize = 2048;
        let matrix = self.matrix(format, COLUMNS);
        let matrix = matrix.rows_range(0..matrix.rows().min(ROWS));
        let x = vec![0.5; PROMPT_TOKENS * COLUMNS];
        let mut out = vec![0.0; PROMPT_TOKENS * matrix.rows()];
        let seconds = usual_seconds(3, || {
            let mut buffers = InputBuffers::default();
            let input = Input::new(threads, &x[..], COLUMNS, &matrix, &mut buffers);
            threads.gemm(&matrix, &input, &mut out);
        });
        ((2 * PROMPT_TOKENS * matrix.rows() * COLUMNS) as f64 / seconds).round()
    }

    /// Returns the number of threads, of the ascending `counts`, that decodes fastest: the smallest whose time is at most 3% above the
    /// shortest.
    ///
    /// # Errors
    ///
    /// Threads cannot be started.
    ///
    /// # Panics
    ///
    /// If `counts` is empty.
    pub fn fastest(&self, isa: Isa, counts: &[usize]) -> Result<usize, RuntimeError> {
        const COLUMNS: usize = 4096;
        const ROUNDS: usize = 15;
        const CLOSE: f64 = 1.03;
        let format = Format::Q4_0;
        let mut random = Random::new(5);
        let x = vec![0.5; COLUMNS];
        let [whole, _] = PIECES.map(|bytes| bytes / format.row_bytes(COLUMNS));
        let listed: Vec<u32> = (0..whole as u32)
            .filter(|_| random.unit() < DENSITY)
            .collect();
        let coefficients = vec![1e-3; listed.len()];
        let (mut out, mut sum) = (vec![0.0; whole], vec![0.0; COLUMNS]);
        let pause = || {
            let started = Instant::now();
            while started.elapsed() < BETWEEN_KERNELS {
                std::hint::spin_loop();
            }
        };
        let pools = counts.iter().map(|count| Threads::new(isa, *count));
        let pools = pools.collect::<Result<Vec<_>, _>>()?;
        let mut seconds = vec![Vec::new(); pools.len()];
        for _ in 0..ROUNDS {
            // In turn, so that all counts meet the same disturbances.
            for (threads, seconds) in pools.iter().zip(&mut seconds) {
                let [dense, sparse, sums] = [(); 3].map(|()| self.matrix(format, COLUMNS));
                let [dense, sparse, sums] = [&dense, &sparse, &sums]
                    .map(|matrix| matrix.rows_range(0..whole.min(matrix.rows())));
                let mut buffers = InputBuffers::default();
                let input = Input::new(threads, &x[..], COLUMNS, &dense, &mut buffers);
                let listed =
                    &listed[..listed.partition_point(|row| (*row as usize) < dense.rows())];
                let started = Instant::now();
                threads.gemv(&dense, &input, &mut out[..dense.rows()]);
                pause();
                threads.gemv_rows(&sparse, listed, &input, &mut out[..listed.len()]);
                pause();
                threads.add_rows_of(&sums, listed, &coefficients[..listed.len()], &mut sum);
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        let times: Vec<f64> = seconds.into_iter().map(usual).collect();
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        let fastest = times.iter().position(|time| *time <= CLOSE * least);
        Ok(counts[fastest.expect("the least time is in the list")])
    }

    /// Measures the time of a decode step outside matrix products.
    ///
    /// # Errors
    ///
    /// Threads cannot be started.
    pub fn decode_overheads(&self, threads: &Threads) -> Result<DecodeOverheads, RuntimeError> {
        Ok(DecodeOverheads {
            kernel_seconds: self.kernel_seconds(threads)?,
            hidden_seconds: hidden_seconds(threads.isa()),
            neuron_seconds: neuron_seconds(),
            vocabulary_seconds: vocabulary_seconds()?,
        })
    }

    /// Time to start a kernel on all threads and to wait for it.
    ///
    /// # Errors
    ///
    /// Threads cannot be started.
    pub fn kernel_seconds(&self, threads: &Threads) -> Result<f64, RuntimeError> {
        // Large enough to be shared, and small enough to stay in the caches, so that its own time is small.
        const COLUMNS: usize = 1024;
        const ROWS: usize = 512;
        let matrix = self.matrix(Format::Q8_0, COLUMNS).rows_range(0..ROWS);
        let (x, mut out) = (vec![0.5; COLUMNS], vec![0.0; ROWS]);
        let alone = Threads::new(threads.isa(), 1)?;
        let mut buffers = InputBuffers::default();
        let input = Input::new(threads, &x[..], COLUMNS, &matrix, &mut buffers);
        let mut time = |threads: &Threads| {
            let times = (0..301).map(|_| {
                // Work between kernels, after which threads have to be woken as in a decode step.
                let gap = Instant::now();
                while gap.elapsed() < BETWEEN_KERNELS {
                    std::hint::spin_loop();
                }
                let started = Instant::now();
                threads.gemv(&matrix, black_box(&input), &mut out);
                started.elapsed().as_secs_f64()
            });
            usual(times.collect())
        };
        let (one, all) = (time(&alone), time(threads));
        let tiny = pack(Format::Q8_0, 1, BLOCK, &[0.5; BLOCK]);
        let mut short = InputBuffers::default();
        let short = Input::new(&alone, &x[..BLOCK], BLOCK, &tiny.as_view(), &mut short);
        let start = usual_seconds(301, || {
            alone.gemv(&tiny.as_view(), black_box(&short), &mut out[..1]);
        });
        Ok((all - one / threads.count() as f64).max(start))
    }
}

/// Time per layer and element of the hidden state that one thread spends before jobs: computing two norms and rounding three inputs.
fn hidden_seconds(isa: Isa) -> f64 {
    const SIZE: usize = 4096;
    let weight = [1.0; SIZE];
    let norm = Norm {
        kind: NormKind::RootMeanSquare,
        epsilon: 1e-5,
        weight: &weight,
        bias: None,
    };
    let hidden: Vec<f32> = (0..SIZE).map(|index| (index as f32).sin()).collect();
    let (mut x, mut rounded) = (Vec::new(), QuantisedActivations::default());
    let seconds = usual_seconds(101, || {
        for is_norm in [true, false, true] {
            if is_norm {
                black_box(&hidden).clone_into(&mut x);
                isa.normalise(norm, &mut x);
            }
            isa.quantise(black_box(&x), SIZE, &mut rounded);
            black_box(&rounded);
        }
    });
    seconds / SIZE as f64
}

/// Time per neuron that one thread spends between gate-up and down: listing the computed neurons (10% of all), and dividing the list.
fn neuron_seconds() -> f64 {
    const NEURONS: u32 = 8192;
    let computed: Vec<_> = (0..NEURONS).step_by(10).map(|row| (row, 0.5)).collect();
    let mut active = Active::default();
    let seconds = usual_seconds(101, || {
        active.clear(computed.len());
        active.extend(black_box(&computed));
        black_box(Parts::new(&active.rows, &active.coefficients));
    });
    seconds / f64::from(NEURONS)
}

/// Greedy sampling.
fn vocabulary_seconds() -> Result<f64, RuntimeError> {
    const VOCABULARY: usize = 32_000;
    let mut random = Random::new(4);
    let logits: Vec<f32> = (0..VOCABULARY).map(|_| random.normal() as f32).collect();
    let mut sampler = Sampler::new(SamplingSettings::default())?;
    let seconds = usual_seconds(31, || {
        black_box(sampler.sample(black_box(&logits)));
    });
    Ok(seconds / VOCABULARY as f64)
}

/// Whether each kind was measured often enough: `passes` times, or more often if the two fastest times differ.
fn is_measured(seconds: &[Vec<f64>], passes: usize) -> bool {
    let count = seconds[0].len();
    let is_steady = |times: &Vec<f64>| {
        let mut times = times.clone();
        times.sort_unstable_by(f64::total_cmp);
        times.len() < 2 || times[1] <= STEADY * times[0]
    };
    count >= LONGER * passes || (count >= passes && seconds.iter().all(is_steady))
}

/// Typical time of `act`.
fn usual_seconds(passes: usize, mut act: impl FnMut()) -> f64 {
    usual(
        (0..passes.max(1))
            .map(|_| {
                let started = Instant::now();
                act();
                started.elapsed().as_secs_f64()
            })
            .collect(),
    )
}

/// Mean of all but the slowest tenth, never 0. Predicted times are means over tokens, and on shared machines the mean
/// is well above the minimum.
fn usual(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.truncate(times.len() - times.len() / 10);
    (times.iter().sum::<f64>() / times.len() as f64).max(1e-15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsteady_times_are_measured_longer() {
        let steady = vec![1.0, 1.2];
        let mut unsteady = vec![1.0, 2.0];
        assert!(!is_measured(&[vec![1.0]], 2));
        assert!(!is_measured(&[steady.clone(), unsteady.clone()], 2));
        assert!(is_measured(&[steady], 2));
        unsteady.extend([1.5; 6]);
        assert!(is_measured(&[unsteady], 2), "but not for ever");
    }

    #[test]
    fn every_speed_is_one_whatever_the_shape() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![WEIGHT_BYTE; 12 << 20]).unwrap();
        let test = SpeedTest::open(&path, 5 << 20).unwrap();
        for count in [1, 2] {
            let isa = Isa::detect().unwrap();
            let threads = Threads::new(isa, count).unwrap();
            for format in Format::ALL {
                for columns in [32, 1024, 5000] {
                    let columns = columns / BLOCK * BLOCK;
                    let speed = test.kernels(&threads, format, columns, 1, 1e-6);
                    assert_eq!(speed.row_bytes as usize, format.row_bytes(columns));
                    assert_eq!((speed.format, speed.threads), (format, count));
                    for speed in [
                        speed.dense_bytes_per_second,
                        speed.rows_bytes_per_second,
                        speed.axpy_bytes_per_second,
                        speed.dense_axpy_bytes_per_second,
                    ] {
                        assert!(speed.is_finite() && speed > 1e3, "{speed}");
                    }
                }
            }
            assert!(test.read(isa, count, 4096, 1) > 1e3);
            assert!(test.read(isa, count, 4 << 20, 1) > 1e3, "a stream");
            for format in [Format::Q8_0, Format::F16] {
                assert!(test.operations(&threads, format) > 1e3);
            }
            let overheads = test.decode_overheads(&threads).unwrap();
            for seconds in [
                overheads.kernel_seconds,
                overheads.hidden_seconds,
                overheads.neuron_seconds,
                overheads.vocabulary_seconds,
            ] {
                assert!(seconds > 0.0 && seconds < 1e-2, "{overheads:?}");
            }
        }
    }
}
