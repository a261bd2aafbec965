//! Cost rates of the CPU for one model: the matrices of a decode step have rows of the hidden size in one
//! format, so the measured kernel speeds reduce to three numbers.
//!
//! ```text
//! seconds = bytes / bandwidth + scattered rows · row_seconds + axpy rows · sum_row_seconds
//! ```
//!
//! A scattered row is one that does not follow the previously read row, so that the hardware prefetcher
//! restarts. Reading a share `d` of `n` rows has about `d · n · (1 − d)` scattered ones.

use powerinfer_tensor::Format;

use super::{Cpu, Hardware, KernelSpeed};

/// Share of the rows in the measurements of [`KernelSpeed`] that read only some.
const MEASURED_DENSITY: f64 = 0.1;

/// Sizes of a model that determine the cost of a decode step, in addition to its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Storage format of the weights.
    pub format: Format,
    /// Hidden size.
    pub hidden: usize,
    /// Neurons per layer.
    pub neurons: usize,
    /// Vocabulary size.
    pub vocabulary: usize,
}

/// Efficiency of an engine's passes relative to a machine's rates. The rates are measured with single kernels and copies; a pass
/// starts many short kernels, divides some unevenly and computes parts on one thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineRates {
    /// Pairs `(n, share)`, ascending in n: a pass on n threads reaches `share` of n times the kernels' speed on one
    /// thread. The share falls because threads share memory and processors, and because the slowest one has more work than the mean.
    /// The last entry also applies to more threads; if there are no entries, the kernels' measured rates apply.
    pub threads: &'static [(usize, f64)],
    /// Minimum time of a GPU kernel in a captured graph, on top of the time to read its bytes.
    pub gpu_kernel_seconds: f64,
    /// Time per token on a machine with a GPU, in addition to kernels and sampling: launching graphs, copying the embedding,
    /// reading the logits.
    pub gpu_token_seconds: f64,
    /// Share of the throughput of large matrix products that prompts reach, on the CPU and on the GPU.
    pub products: [f64; 2],
    /// Share of the bandwidth of the link at which prompts copy weights to the GPU.
    pub link: f64,
}

impl EngineRates {
    /// An engine that reaches the machine's rates.
    pub const IDEAL: Self = Self {
        threads: &[],
        gpu_kernel_seconds: 0.0,
        gpu_token_seconds: 0.0,
        products: [1.0; 2],
        link: 1.0,
    };

    /// This engine, fitted to measurements on an NVIDIA H200 and 16 virtual cores of an Intel Xeon; see
    /// `docs/reports/simulator.md`. The shares of threads were measured on 26 November 2026 and multiplied by the speedup since then, as
    /// estimated by `bench --parts`.
    pub const CURRENT: Self = Self {
        threads: &[(1, 0.97), (2, 0.81), (4, 0.73), (8, 0.67), (16, 0.60)],
        gpu_kernel_seconds: 6e-6,
        gpu_token_seconds: 110e-6,
        products: [0.75, 0.083],
        link: 1.0,
    };

    /// Speed of a pass on `threads` threads relative to kernels on one thread; `None` if there are no entries.
    fn speedup(&self, threads: usize) -> Option<f64> {
        let above = self.threads.partition_point(|(count, _)| *count < threads);
        let (last, end) = *self.threads.get(above).or(self.threads.last())?;
        let share = match above.checked_sub(1).map(|below| self.threads[below]) {
            Some((first, start)) if last > first && threads < last => {
                let part = (threads - first) as f64 / (last - first) as f64;
                start + (end - start) * part
            }
            _ => end,
        };
        Some(share * threads as f64)
    }
}

/// Cost rates of a number of threads for matrices of one row length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuRates {
    /// Bandwidth of a GEMV over whole matrices.
    pub bytes_per_second: f64,
    /// Time per scattered row, in addition to its bytes.
    pub row_seconds: f64,
    /// Time per axpy row, in addition to its bytes and to `row_seconds`.
    pub sum_row_seconds: f64,
}

/// Seconds per row, by kind of kernel.
#[derive(Clone, Copy)]
struct RowSeconds {
    dense: f64,
    rows: f64,
    axpy: f64,
    dense_axpy: f64,
}

impl RowSeconds {
    fn new(speed: &KernelSpeed) -> Self {
        let bytes = speed.row_bytes as f64;
        Self {
            dense: bytes / speed.dense_bytes_per_second,
            rows: bytes / speed.rows_bytes_per_second,
            axpy: bytes / speed.axpy_bytes_per_second,
            dense_axpy: bytes / speed.dense_axpy_bytes_per_second,
        }
    }

    fn map(self, other: Self, change: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            dense: change(self.dense, other.dense),
            rows: change(self.rows, other.rows),
            axpy: change(self.axpy, other.axpy),
            dense_axpy: change(self.dense_axpy, other.dense_axpy),
        }
    }
}

impl Cpu {
    /// Operations per second of GEMMs with weights in `format`, if they are known.
    pub fn gemm_operations_per_second(&self, format: Format) -> Option<f64> {
        let float = self.float_operations_per_second;
        float
            .filter(|_| !format.is_quantised())
            .or(self.operations_per_second)
    }

    /// Returns the rates of `threads` threads for matrices in `format` with rows of `row_bytes` bytes.
    ///
    /// The time per row is interpolated linearly between measured row lengths; beyond them the throughput of
    /// the nearest one holds. Without a measurement of `format`, the rates are the machine's bandwidth and
    /// [`row_seconds`](Cpu::row_seconds).
    pub fn rates(&self, format: Format, threads: usize, row_bytes: f64) -> CpuRates {
        let of_format = || self.kernels.iter().filter(|kernel| kernel.format == format);
        // The largest measured number of threads up to `threads`, else the smallest.
        let measured = of_format().map(|kernel| kernel.threads);
        let measured = measured
            .clone()
            .filter(|count| *count <= threads)
            .max()
            .or(measured.min());
        let mut points: Vec<(f64, RowSeconds)> = of_format()
            .filter(|kernel| Some(kernel.threads) == measured)
            .map(|kernel| (kernel.row_bytes as f64, RowSeconds::new(kernel)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let above = points.partition_point(|(bytes, _)| *bytes < row_bytes);
        let scaled = |(bytes, row): (f64, RowSeconds)| row.map(row, |a, _| a * row_bytes / bytes);
        let row = match (
            above.checked_sub(1).map(|below| points[below]),
            points.get(above),
        ) {
            (None, None) => {
                return CpuRates {
                    bytes_per_second: self.read_bandwidth_bytes_per_second,
                    row_seconds: self.row_seconds,
                    sum_row_seconds: self.sum_row_seconds,
                };
            }
            (None, Some(end)) => scaled(*end),
            (Some(end), None) => scaled(end),
            (Some(below), Some(above)) => {
                let part = (row_bytes - below.0) / (above.0 - below.0);
                below.1.map(above.1, |a, b| a + (b - a) * part)
            }
        };
        let scattered = |some: f64, all: f64| ((some - all) / (1.0 - MEASURED_DENSITY)).max(0.0);
        CpuRates {
            bytes_per_second: row_bytes / row.dense,
            row_seconds: (scattered(row.rows, row.dense) + scattered(row.axpy, row.dense_axpy))
                / 2.0,
            sum_row_seconds: (row.dense_axpy - row.dense).max(0.0),
        }
    }
}

impl Hardware {
    /// Returns this machine with the rates of one engine for one model: bandwidth and row costs of that model's rows. From the
    /// tables of measurements, it keeps only the sequential reads.
    #[must_use]
    pub fn for_model(&self, shape: ModelShape, engine: &EngineRates) -> Self {
        let mut machine = self.clone();
        let cpu = &mut machine.cpu;
        let row_bytes = shape.format.row_bytes(shape.hidden);
        if cpu
            .kernels
            .iter()
            .any(|kernel| kernel.format == shape.format)
        {
            let rates = |threads| self.cpu.rates(shape.format, threads, row_bytes as f64);
            let (one, all) = (rates(1), rates(cpu.threads));
            let reached = engine.speedup(cpu.threads).map_or(1.0, |speedup| {
                (speedup * one.bytes_per_second / all.bytes_per_second).min(1.0)
            });
            cpu.read_bandwidth_bytes_per_second = reached * all.bytes_per_second;
            cpu.row_seconds = all.row_seconds / reached;
            cpu.sum_row_seconds = all.sum_row_seconds / reached;
            for figure in [
                "read_bandwidth_bytes_per_second",
                "row_seconds",
                "sum_row_seconds",
            ] {
                machine.sources.insert(
                    format!("cpu.{figure}"),
                    format!(
                        "measured, for rows of {row_bytes} bytes in {}; a pass reaches {:.0}% of it",
                        shape.format,
                        100.0 * reached
                    ),
                );
            }
        }
        cpu.kernels.clear();
        cpu.reads = cpu.streams().cloned().collect();
        cpu.layer_seconds +=
            shape.hidden as f64 * cpu.hidden_seconds + shape.neurons as f64 * cpu.neuron_seconds;
        cpu.token_seconds += shape.vocabulary as f64 * cpu.vocabulary_seconds;
        if let Some(gpu) = &mut machine.gpu {
            gpu.kernel_launch_seconds = gpu.kernel_launch_seconds.max(engine.gpu_kernel_seconds);
            cpu.token_seconds += engine.gpu_token_seconds;
        }
        (
            cpu.hidden_seconds,
            cpu.neuron_seconds,
            cpu.vocabulary_seconds,
        ) = (0.0, 0.0, 0.0);
        machine
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{ReadSpeed, named};
    use super::*;

    fn speed(row_bytes: u64, threads: usize, speeds: [f64; 4]) -> KernelSpeed {
        KernelSpeed {
            format: Format::Q8_0,
            threads,
            row_bytes,
            dense_bytes_per_second: speeds[0],
            rows_bytes_per_second: speeds[1],
            axpy_bytes_per_second: speeds[2],
            dense_axpy_bytes_per_second: speeds[3],
        }
    }

    #[test]
    fn rates_match_the_measurements() {
        let mut cpu = named("cpu-only").unwrap().cpu;
        cpu.kernels = vec![
            speed(1000, 1, [1e9, 0.5e9, 0.5e9, 1e9]),
            speed(2000, 1, [2e9, 1e9, 1e9, 2e9]),
            speed(1000, 4, [4e9, 2e9, 1e9, 2e9]),
        ];
        let rates = cpu.rates(Format::Q8_0, 3, 1000.0);
        assert!((rates.bytes_per_second - 1e9).abs() < 1.0);
        // A tenth of the rows takes 2 µs a row instead of 1, nine tenths of them scattered.
        assert!((rates.row_seconds - 1e-6 / 0.9).abs() < 1e-15);
        assert_eq!(rates.sum_row_seconds, 0.0);
        let rates = cpu.rates(Format::Q8_0, 4, 1000.0);
        assert!((rates.sum_row_seconds - 0.25e-6).abs() < 1e-15);
        let between = cpu.rates(Format::Q8_0, 1, 1500.0);
        assert!((between.bytes_per_second - 1.5e9).abs() < 1.0);
        assert!((cpu.rates(Format::Q8_0, 1, 4000.0).bytes_per_second - 2e9).abs() < 1.0);
        let other = cpu.rates(Format::F32, 1, 1000.0);
        assert_eq!(other.bytes_per_second, cpu.read_bandwidth_bytes_per_second);
    }

    #[test]
    fn for_model_keeps_only_the_rates_of_the_models_rows() {
        let mut machine = named("cpu-only").unwrap();
        machine.cpu.kernels = vec![speed(1088, 8, [1e9, 1e9, 1e9, 1e9])];
        let shape = ModelShape {
            format: Format::Q8_0,
            hidden: 1024,
            neurons: 4096,
            vocabulary: 1000,
        };
        let fitted = machine.for_model(shape, &EngineRates::IDEAL);
        fitted.validate().unwrap();
        assert!((fitted.cpu.read_bandwidth_bytes_per_second - 1e9).abs() < 1.0);
        assert_eq!(fitted.cpu.row_seconds, 0.0);
        assert!(fitted.cpu.kernels.is_empty());
        assert!(fitted.sources["cpu.row_seconds"].contains("1088 bytes in q8_0"));
        assert!(fitted.cpu.layer_seconds > 0.0);
        assert!(fitted.cpu.token_seconds > 0.0);
        let f32 = ModelShape {
            format: Format::F32,
            ..shape
        };
        let other = machine.for_model(f32, &EngineRates::IDEAL);
        let (before, after) = (&machine.cpu, &other.cpu);
        assert_eq!(after.row_seconds, before.row_seconds);
        assert_eq!(
            after.read_bandwidth_bytes_per_second,
            before.read_bandwidth_bytes_per_second
        );
    }

    #[test]
    fn a_pass_reaches_a_share_of_what_kernels_reach_alone() {
        let engine = EngineRates {
            threads: &[(1, 0.9), (4, 0.6)],
            gpu_kernel_seconds: 6e-6,
            gpu_token_seconds: 1e-4,
            ..EngineRates::IDEAL
        };
        let speedups = [1, 2, 4, 8].map(|threads| engine.speedup(threads).unwrap());
        for (found, expected) in speedups.into_iter().zip([0.9, 1.6, 2.4, 4.8]) {
            assert!((found - expected).abs() < 1e-12, "{found}");
        }
        assert_eq!(EngineRates::IDEAL.speedup(4), None);

        let shape = ModelShape {
            format: Format::Q8_0,
            hidden: 1024,
            neurons: 4096,
            vocabulary: 1000,
        };
        let mut machine = named("rtx4090").unwrap();
        machine.cpu.threads = 4;
        machine.cpu.kernels = vec![
            speed(1088, 1, [1e9, 1e9, 1e9, 1e9]),
            speed(1088, 4, [3e9, 2e9, 2e9, 3e9]),
        ];
        let [alone, passes] =
            [&EngineRates::IDEAL, &engine].map(|engine| machine.for_model(shape, engine));
        let share = |of: fn(&Cpu) -> f64| of(&passes.cpu) / of(&alone.cpu);
        assert!((share(|cpu| cpu.read_bandwidth_bytes_per_second) - 0.8).abs() < 1e-12);
        assert!((share(|cpu| cpu.row_seconds) - 1.25).abs() < 1e-12);
        assert!((passes.cpu.token_seconds - alone.cpu.token_seconds - 1e-4).abs() < 1e-12);
        assert_eq!(passes.gpu.unwrap().kernel_launch_seconds, 6e-6);
        // Memory is the limit, not the threads.
        machine.cpu.kernels[1] = speed(1088, 4, [2e9, 2e9, 2e9, 2e9]);
        let limited = machine.for_model(shape, &engine);
        assert_eq!(limited.cpu.read_bandwidth_bytes_per_second, 2e9);
    }

    #[test]
    fn plans_keep_the_streams_of_every_number_of_threads() {
        let mut machine = named("cpu-only").unwrap();
        let shape = ModelShape {
            format: Format::Q8_0,
            hidden: 1024,
            neurons: 4096,
            vocabulary: 1000,
        };
        let assumed = machine.cpu.read_bandwidth_bytes_per_second;
        assert_eq!(machine.cpu.stream_bytes_per_second(3), assumed);
        let read = |threads, row_bytes, bytes_per_second| ReadSpeed {
            threads,
            row_bytes,
            bytes_per_second,
        };
        machine.cpu.reads = vec![
            read(2, 4096, 9e9),
            read(2, 1 << 22, 2e10),
            read(8, 4096, 3e10),
            read(8, 1 << 22, 7e10),
        ];
        let cpu = machine.for_model(shape, &EngineRates::CURRENT).cpu;
        assert_eq!(cpu.reads.len(), 2);
        let found = [1, 2, 7, 8, 16].map(|threads| cpu.stream_bytes_per_second(threads));
        assert_eq!(found, [2e10, 2e10, 2e10, 7e10, 7e10]);
    }

    proptest! {
        #[test]
        fn rates_are_finite_and_never_negative(
            speeds in prop::collection::vec((64u64..100_000, 1usize..9, prop::array::uniform4(1e8f64..1e11)), 0..9),
            row_bytes in 16.0f64..200_000.0, threads in 1usize..12,
        ) {
            let mut cpu = named("cpu-only").unwrap().cpu;
            cpu.kernels = speeds.into_iter().map(|(bytes, threads, s)| speed(bytes, threads, s)).collect();
            let rates = cpu.rates(Format::Q8_0, threads, row_bytes);
            prop_assert!(rates.bytes_per_second.is_finite() && rates.bytes_per_second > 0.0);
            for seconds in [rates.row_seconds, rates.sum_row_seconds] {
                prop_assert!(seconds.is_finite() && seconds >= 0.0);
            }
        }
    }
}
