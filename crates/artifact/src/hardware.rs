//! What a machine can do, as far as placement cares: how fast each side reads, how much it
//! holds, and what crossing between them costs; measured, or named for machines one does not own.

mod file;
mod named;
mod rates;

use std::{collections::BTreeMap, path::PathBuf};

use powerinfer_tensor::Format;
use serde::{Deserialize, Serialize};

pub use named::{NAMES, named};
pub use rates::{CpuRates, ModelShape};

use crate::Hint;

/// One machine. Every figure's origin stands in `sources`, under the figure's dotted name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Short name, as `--hardware` takes it.
    pub name: String,
    /// The machine in one line.
    pub description: String,
    /// The side that holds the cold neurons.
    pub cpu: Cpu,
    /// The side that holds the hot neurons, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// Where each figure comes from: `gpu.vram_bytes` → `datasheet`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// The processor and its memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// Threads that compute.
    pub threads: usize,
    /// Sustained bytes per second that all threads together read from memory.
    pub read_bandwidth_bytes_per_second: f64,
    /// Memory of the machine.
    pub ram_bytes: u64,
    /// Cost of a row of a matrix that does not follow the one read before, beside its bytes; all
    /// threads together.
    #[serde(default)]
    pub row_seconds: f64,
    /// Cost of a row that is added to a sum, beside its bytes: threads share the columns of a sum, so
    /// each reads a piece of every row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sum_row_seconds: f64,
    /// Cost of one kernel beside its rows and bytes: starting it, and waiting for all threads.
    #[serde(default)]
    pub kernel_seconds: f64,
    /// What a layer does with each number of the hidden state beside matrices: norms, rotation, sums.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hidden_seconds: f64,
    /// What a layer does with each of its neurons beside matrices: activation, and whether it counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub neuron_seconds: f64,
    /// What choosing a token takes for each entry of the vocabulary.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub vocabulary_seconds: f64,
    /// What a layer takes beside matrices. Follows from [`hidden_seconds`](Self::hidden_seconds) and
    /// [`neuron_seconds`](Self::neuron_seconds) once there is a model.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub layer_seconds: f64,
    /// What a token takes beside matrices and layers. Follows from
    /// [`vocabulary_seconds`](Self::vocabulary_seconds) once there is a model.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub token_seconds: f64,
    /// Multiplications and additions per second, sustained, in the matrix products of prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<f64>,
    /// Plain reading of scattered rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reads: Vec<ReadSpeed>,
    /// The kernels that decoding runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<KernelSpeed>,
}

/// How fast rows are read that lie scattered over much more memory than the caches hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadSpeed {
    /// Threads that read.
    pub threads: usize,
    /// Bytes of a row; so large a one as to be a stream is the last.
    pub row_bytes: u64,
    /// Of all threads together.
    pub bytes_per_second: f64,
}

/// How fast the kernels of decoding go through weights, in bytes of weights per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelSpeed {
    /// How the weights are stored.
    #[serde(with = "format_name")]
    pub format: Format,
    /// Threads that compute.
    pub threads: usize,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Whole matrices times a vector.
    pub dense_bytes_per_second: f64,
    /// Every tenth row, at random, times a vector.
    pub rows_bytes_per_second: f64,
    /// The sum of every tenth row, at random.
    pub axpy_bytes_per_second: f64,
    /// The sum of all rows.
    pub dense_axpy_bytes_per_second: f64,
}

/// The graphics card and its link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// The card's name.
    pub name: String,
    /// Sustained bytes per second that kernels read from the card's memory.
    pub read_bandwidth_bytes_per_second: f64,
    /// Memory of the card.
    pub vram_bytes: u64,
    /// Memory of the card that nobody used when it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Sustained bytes per second over the link, one way.
    pub pcie_bandwidth_bytes_per_second: f64,
    /// Time until the first byte of a transfer has arrived.
    pub pcie_latency_seconds: f64,
    /// `T_sync`: handing a layer's input to the other side and taking its share back.
    pub sync_seconds: f64,
    /// Cost of one kernel beside its reading.
    pub kernel_launch_seconds: f64,
    /// Memory that nobody can use: the CUDA context, and a reserve for fragmentation.
    pub context_bytes: u64,
    /// Multiplications and additions per second, sustained, in the matrix products of prompts: 16-bit
    /// numbers, 32-bit sums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<f64>,
}

/// A hardware figure that cannot be, or a file that describes no machine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HardwareError {
    /// Less than one, infinite or not a number where a size or a speed must stand.
    #[error("hardware `{hardware}`: `{field}` is {value}, it must be a number of 1 or more")]
    NotPositive {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the figure.
        field: String,
        /// What was found.
        value: f64,
    },
    /// More than any machine has, so that times and sums would be no numbers.
    #[error("hardware `{hardware}`: `{field}` is {value:e}, it must be at most {most:e}")]
    TooMuch {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the figure.
        field: String,
        /// What was found.
        value: f64,
        /// The most that is taken.
        most: f64,
    },
    /// Negative, infinite or not a number where a delay must stand.
    #[error("hardware `{hardware}`: `{field}` is {value}, it must be 0 or more")]
    Negative {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the figure.
        field: String,
        /// What was found.
        value: f64,
    },
    /// More of something free than there is.
    #[error(
        "hardware `{hardware}`: `gpu.free_bytes` is {free}, more than `gpu.vram_bytes` with {all}"
    )]
    MoreFreeThanThere {
        /// Name of the machine.
        hardware: String,
        /// What is free.
        free: u64,
        /// What there is.
        all: u64,
    },
    /// The operating system refused to read.
    #[error("cannot read `{path}`: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Something else than the figures of a machine.
    #[error("`{path}` does not describe a machine: {reason}")]
    NotAMachine {
        /// The file.
        path: PathBuf,
        /// Line, column and field.
        reason: String,
    },
    /// A file whose name does not say what is in it.
    #[error("`{path}` ends in neither `.toml` nor `.json`; name the file after its format")]
    UnknownForm {
        /// The file.
        path: PathBuf,
    },
}

impl HardwareError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::NotPositive { .. }
            | Self::TooMuch { .. }
            | Self::Negative { .. }
            | Self::MoreFreeThanThere { .. } => Some(Hint::MeasureHardware),
            Self::NotAMachine { .. } => Some(Hint::WriteHardwareFile),
            Self::Read { .. } | Self::UnknownForm { .. } => None,
        }
    }
}

/// A format by its name.
mod format_name {
    use powerinfer_tensor::Format;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(format: &Format, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(format.name())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Format, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(D::Error::custom)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

/// What a figure may be.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    /// A size or a speed.
    Positive,
    /// A delay or a reserve.
    NotNegative,
}

impl Hardware {
    /// Every figure by its dotted name, with what it may be.
    fn figures(&self) -> Vec<(String, f64, Bound)> {
        use Bound::{NotNegative, Positive};
        let cpu = &self.cpu;
        let mut figures = Vec::new();
        let mut add = |name: &str, value: f64, bound: Bound| {
            figures.push((name.to_owned(), value, bound));
        };
        add("cpu.threads", cpu.threads as f64, Positive);
        add(
            "cpu.read_bandwidth_bytes_per_second",
            cpu.read_bandwidth_bytes_per_second,
            Positive,
        );
        add("cpu.ram_bytes", cpu.ram_bytes as f64, Positive);
        for (name, value) in [
            ("cpu.row_seconds", cpu.row_seconds),
            ("cpu.sum_row_seconds", cpu.sum_row_seconds),
            ("cpu.kernel_seconds", cpu.kernel_seconds),
            ("cpu.hidden_seconds", cpu.hidden_seconds),
            ("cpu.neuron_seconds", cpu.neuron_seconds),
            ("cpu.vocabulary_seconds", cpu.vocabulary_seconds),
            ("cpu.layer_seconds", cpu.layer_seconds),
            ("cpu.token_seconds", cpu.token_seconds),
        ] {
            add(name, value, NotNegative);
        }
        if let Some(value) = cpu.operations_per_second {
            add("cpu.operations_per_second", value, Positive);
        }
        for (index, read) in cpu.reads.iter().enumerate() {
            for (name, value) in [
                ("threads", read.threads as f64),
                ("row_bytes", read.row_bytes as f64),
                ("bytes_per_second", read.bytes_per_second),
            ] {
                add(&format!("cpu.reads[{index}].{name}"), value, Positive);
            }
        }
        for (index, kernel) in cpu.kernels.iter().enumerate() {
            for (name, value) in [
                ("threads", kernel.threads as f64),
                ("row_bytes", kernel.row_bytes as f64),
                ("dense_bytes_per_second", kernel.dense_bytes_per_second),
                ("rows_bytes_per_second", kernel.rows_bytes_per_second),
                ("axpy_bytes_per_second", kernel.axpy_bytes_per_second),
                (
                    "dense_axpy_bytes_per_second",
                    kernel.dense_axpy_bytes_per_second,
                ),
            ] {
                add(&format!("cpu.kernels[{index}].{name}"), value, Positive);
            }
        }
        let Some(gpu) = &self.gpu else {
            return figures;
        };
        add(
            "gpu.read_bandwidth_bytes_per_second",
            gpu.read_bandwidth_bytes_per_second,
            Positive,
        );
        add("gpu.vram_bytes", gpu.vram_bytes as f64, Positive);
        add(
            "gpu.pcie_bandwidth_bytes_per_second",
            gpu.pcie_bandwidth_bytes_per_second,
            Positive,
        );
        for (name, value) in [
            ("gpu.pcie_latency_seconds", gpu.pcie_latency_seconds),
            ("gpu.sync_seconds", gpu.sync_seconds),
            ("gpu.kernel_launch_seconds", gpu.kernel_launch_seconds),
        ] {
            add(name, value, NotNegative);
        }
        if let Some(value) = gpu.operations_per_second {
            add("gpu.operations_per_second", value, Positive);
        }
        figures
    }

    /// Checks every figure: sizes and speeds are above zero, delays and reserves not below.
    pub fn validate(&self) -> Result<(), HardwareError> {
        let hardware = || self.name.clone();
        for (field, value, bound) in self.figures() {
            // An exabyte, or as much a second; a quarter of an hour.
            let (least, most) = match bound {
                Bound::Positive => (1.0, 1e18),
                Bound::NotNegative => (0.0, 1e3),
            };
            if value.is_finite() && value > most {
                return Err(HardwareError::TooMuch {
                    hardware: hardware(),
                    field,
                    value,
                    most,
                });
            }
            if value.is_finite() && value >= least {
                continue;
            }
            return Err(match bound {
                Bound::Positive => HardwareError::NotPositive {
                    hardware: hardware(),
                    field,
                    value,
                },
                Bound::NotNegative => HardwareError::Negative {
                    hardware: hardware(),
                    field,
                    value,
                },
            });
        }
        match &self.gpu {
            Some(gpu) if gpu.free_bytes.is_some_and(|free| free > gpu.vram_bytes) => {
                Err(HardwareError::MoreFreeThanThere {
                    hardware: hardware(),
                    free: gpu.free_bytes.unwrap_or_default(),
                    all: gpu.vram_bytes,
                })
            }
            _ => Ok(()),
        }
    }

    /// This machine with the card of `other` where it has none of its own: for planning ahead.
    #[must_use]
    pub fn or_gpu_of(mut self, other: &Hardware) -> Self {
        if let (None, Some(gpu)) = (&self.gpu, &other.gpu) {
            self.name = format!("{} + {}", self.name, gpu.name);
            for (figure, source) in &other.sources {
                if figure.starts_with("gpu.") {
                    self.sources
                        .insert(figure.clone(), format!("assumed, {}: {source}", other.name));
                }
            }
            self.gpu = Some(gpu.clone());
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with a figure in every field.
    pub(super) fn whole() -> Hardware {
        let mut hardware = named("pc-high").unwrap();
        hardware.cpu.layer_seconds = 1e-6;
        hardware.cpu.token_seconds = 1e-6;
        hardware.cpu.sum_row_seconds = 1e-9;
        hardware.cpu.reads = vec![ReadSpeed {
            threads: 2,
            row_bytes: 4096,
            bytes_per_second: 1e10,
        }];
        hardware.cpu.kernels = vec![KernelSpeed {
            format: Format::Q4_0,
            threads: 2,
            row_bytes: 2304,
            dense_bytes_per_second: 4e9,
            rows_bytes_per_second: 3e9,
            axpy_bytes_per_second: 2e9,
            dense_axpy_bytes_per_second: 3.5e9,
        }];
        hardware.gpu.as_mut().unwrap().free_bytes = Some(20 << 30);
        hardware
    }

    /// Replaces the figure at `name`, such as `cpu.kernels[0].threads`, in JSON.
    fn put(json: &mut serde_json::Value, name: &str, value: serde_json::Value) {
        let pointer = name.replace(['.', '['], "/").replace(']', "");
        *json.pointer_mut(&format!("/{pointer}")).unwrap() = value;
    }

    #[test]
    fn impossible_figures_are_named_whichever_they_are() {
        let good = whole();
        good.validate().unwrap();
        let json = serde_json::to_value(&good).unwrap();
        let names = good.figures();
        assert!(names.len() > 25, "{}", names.len());
        for (name, _, bound) in names {
            let is_count = ["threads", "row_bytes", "ram_bytes", "vram_bytes"]
                .iter()
                .any(|count| name.ends_with(count));
            let mut bad = json.clone();
            let wrong = if bound == Bound::Positive { 0 } else { -1 };
            put(&mut bad, &name, wrong.into());
            let bad: Hardware = serde_json::from_value(bad).unwrap();
            let error = bad.validate().unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}` is {wrong}")), "{error}");
            assert!(error.contains("hardware `pc-high`"), "{error}");
            if is_count {
                continue;
            }
            // TOML can say what JSON cannot.
            let mark = 777_777.125;
            let mut marked = json.clone();
            put(&mut marked, &name, mark.into());
            let marked: Hardware = serde_json::from_value(marked).unwrap();
            let text = marked.to_toml();
            assert_eq!(text.matches("777777.125").count(), 1, "{name}: {text}");
            for value in ["nan", "-inf", "inf", "-1.0"] {
                let text = text.replace("777777.125", value);
                let path = std::path::Path::new("machine.toml");
                let error = Hardware::parse(&text, path).unwrap_err().to_string();
                assert!(error.contains(&format!("`{name}` is ")), "{error}");
            }
        }
    }

    #[test]
    fn no_more_is_free_than_there_is() {
        let mut bad = whole();
        bad.gpu.as_mut().unwrap().free_bytes = Some(u64::MAX);
        let error = bad.validate().unwrap_err().to_string();
        assert!(error.contains("`gpu.free_bytes`"), "{error}");
    }

    #[test]
    fn delays_may_be_nothing() {
        let mut free = whole();
        free.gpu.as_mut().unwrap().sync_seconds = 0.0;
        free.cpu.row_seconds = 0.0;
        free.validate().unwrap();
    }

    #[test]
    fn a_machine_without_a_card_borrows_one_and_says_so() {
        let card = named("rtx4090").unwrap();
        let borrowed = named("cpu-only").unwrap().or_gpu_of(&card);
        assert_eq!(borrowed.gpu, card.gpu);
        assert!(borrowed.sources["gpu.vram_bytes"].starts_with("assumed"));
        borrowed.validate().unwrap();
        assert_eq!(card.clone().or_gpu_of(&named("pc-low").unwrap()), card);
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let mut json = serde_json::to_value(named("cpu-only").unwrap()).unwrap();
        json["cpu"]["cores"] = 8.into();
        let error = serde_json::from_value::<Hardware>(json).unwrap_err();
        assert!(error.to_string().contains("cores"));
    }
}
