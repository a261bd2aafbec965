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
    /// Returns this machine with the rates for one model: bandwidth and row costs of that model's rows, and no
    /// tables of measurements. Idempotent.
    #[must_use]
    pub fn for_model(&self, shape: ModelShape) -> Self {
        let mut machine = self.clone();
        let cpu = &mut machine.cpu;
        let row_bytes = shape.format.row_bytes(shape.hidden);
        if cpu
            .kernels
            .iter()
            .any(|kernel| kernel.format == shape.format)
        {
            let rates = self.cpu.rates(shape.format, cpu.threads, row_bytes as f64);
            cpu.read_bandwidth_bytes_per_second = rates.bytes_per_second;
            cpu.row_seconds = rates.row_seconds;
            cpu.sum_row_seconds = rates.sum_row_seconds;
            for figure in [
                "read_bandwidth_bytes_per_second",
                "row_seconds",
                "sum_row_seconds",
            ] {
                machine.sources.insert(
                    format!("cpu.{figure}"),
                    format!(
                        "measured, for rows of {row_bytes} bytes in {}",
                        shape.format
                    ),
                );
            }
        }
        cpu.kernels.clear();
        cpu.reads.clear();
        cpu.layer_seconds +=
            shape.hidden as f64 * cpu.hidden_seconds + shape.neurons as f64 * cpu.neuron_seconds;
        cpu.token_seconds += shape.vocabulary as f64 * cpu.vocabulary_seconds;
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

    use super::super::named;
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
        let fitted = machine.for_model(shape);
        fitted.validate().unwrap();
        assert!((fitted.cpu.read_bandwidth_bytes_per_second - 1e9).abs() < 1.0);
        assert_eq!(fitted.cpu.row_seconds, 0.0);
        assert!(fitted.cpu.kernels.is_empty());
        assert!(fitted.sources["cpu.row_seconds"].contains("1088 bytes in q8_0"));
        assert!(fitted.cpu.layer_seconds > 0.0);
        assert!(fitted.cpu.token_seconds > 0.0);
        assert_eq!(fitted.for_model(shape), fitted, "idempotent");
        let other = machine.for_model(ModelShape {
            format: Format::F32,
            ..shape
        });
        let (before, after) = (&machine.cpu, &other.cpu);
        assert_eq!(after.row_seconds, before.row_seconds);
        assert_eq!(
            after.read_bandwidth_bytes_per_second,
            before.read_bandwidth_bytes_per_second
        );
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
