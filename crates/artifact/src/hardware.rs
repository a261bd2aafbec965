//! What a machine can do, as far as placement cares: how fast each side reads, how much it
//! holds, and what crossing between them costs; measured, or named for machines one does not own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
    /// Cost of one more row of a matrix beside its bytes, all threads together.
    #[serde(default)]
    pub row_seconds: f64,
    /// Cost of one kernel beside its rows and bytes: starting it, and waiting for all threads.
    #[serde(default)]
    pub kernel_seconds: f64,
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
    /// Sustained bytes per second over the link, one way.
    pub pcie_bandwidth_bytes_per_second: f64,
    /// Time until the first byte of a transfer has arrived.
    pub pcie_latency_seconds: f64,
    /// `T_sync`: handing a layer's input to the other side and taking its share back.
    pub hand_over_seconds: f64,
    /// Cost of one kernel beside its reading.
    pub kernel_launch_seconds: f64,
    /// Memory that nobody can use: the CUDA context, and a reserve for fragmentation.
    pub context_bytes: u64,
}

/// A hardware figure that cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HardwareError {
    /// Less than one, infinite or not a number where a size or a speed must stand.
    #[error(
        "hardware `{hardware}`: `{field}` is {value}, it must be a number of 1 or more; measure it with `powerinfer doctor` or correct the file"
    )]
    NotPositive {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the figure.
        field: &'static str,
        /// What was found.
        value: f64,
    },
    /// Negative, infinite or not a number where a delay must stand.
    #[error(
        "hardware `{hardware}`: `{field}` is {value}, it must be 0 or more; measure it with `powerinfer doctor` or correct the file"
    )]
    Negative {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the figure.
        field: &'static str,
        /// What was found.
        value: f64,
    },
}

impl Hardware {
    /// Checks every figure: sizes and speeds are above zero, delays and reserves not below.
    pub fn validate(&self) -> Result<(), HardwareError> {
        let cpu = &self.cpu;
        let mut positive = vec![
            ("cpu.threads", cpu.threads as f64),
            (
                "cpu.read_bandwidth_bytes_per_second",
                cpu.read_bandwidth_bytes_per_second,
            ),
            ("cpu.ram_bytes", cpu.ram_bytes as f64),
        ];
        let mut not_negative = vec![
            ("cpu.row_seconds", cpu.row_seconds),
            ("cpu.kernel_seconds", cpu.kernel_seconds),
        ];
        if let Some(gpu) = &self.gpu {
            positive.extend([
                (
                    "gpu.read_bandwidth_bytes_per_second",
                    gpu.read_bandwidth_bytes_per_second,
                ),
                ("gpu.vram_bytes", gpu.vram_bytes as f64),
                (
                    "gpu.pcie_bandwidth_bytes_per_second",
                    gpu.pcie_bandwidth_bytes_per_second,
                ),
            ]);
            not_negative.extend([
                ("gpu.pcie_latency_seconds", gpu.pcie_latency_seconds),
                ("gpu.hand_over_seconds", gpu.hand_over_seconds),
                ("gpu.kernel_launch_seconds", gpu.kernel_launch_seconds),
            ]);
        }
        for (field, value) in positive {
            if !(value.is_finite() && value >= 1.0) {
                return Err(HardwareError::NotPositive {
                    hardware: self.name.clone(),
                    field,
                    value,
                });
            }
        }
        for (field, value) in not_negative {
            if !(value.is_finite() && value >= 0.0) {
                return Err(HardwareError::Negative {
                    hardware: self.name.clone(),
                    field,
                    value,
                });
            }
        }
        Ok(())
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

/// Names that [`named`] knows.
pub const NAMES: [&str; 5] = ["pc-high", "pc-low", "rtx4090", "rtx3060-12g", "cpu-only"];

/// A machine one need not own; `None` for a name not in [`NAMES`].
pub fn named(name: &str) -> Option<Hardware> {
    let paper = "PowerInfer paper (arXiv 2312.12456), section 8.1";
    let machine = match name {
        "pc-high" => Machine {
            description: "the paper's PC-High: i9-13900K, 192 GB DDR5, RTX 4090 on PCIe 4.0",
            threads: (8, "paper, section 8.1: eight performance cores"),
            memory: (67.2, paper),
            memory_sustained: (
                1.0,
                "taken for sustained: the authors' model cards have dense models at 70 GB/s on it",
            ),
            ram_gib: (192, paper),
            card: Some(RTX_4090),
        },
        "pc-low" => Machine {
            description: "the paper's PC-Low: i7-12700K, 64 GB DDR4, RTX 2080 Ti on PCIe 3.0",
            threads: (8, "paper, section 8.1: eight performance cores"),
            memory: (38.4, paper),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (64, paper),
            card: Some(RTX_2080_TI),
        },
        "rtx4090" => Machine {
            description: "desktop with two channels of DDR5-5600 and an RTX 4090",
            threads: (16, "assumed: 8 cores, 2 threads each"),
            memory: (89.6, "2 channels × 8 bytes × 5600 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (64, "assumed"),
            card: Some(RTX_4090),
        },
        "rtx3060-12g" => Machine {
            description: "desktop with two channels of DDR4-3200 and an RTX 3060 12 GB",
            threads: (12, "assumed: 6 cores, 2 threads each"),
            memory: (51.2, "2 channels × 8 bytes × 3200 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (32, "assumed"),
            card: Some(RTX_3060),
        },
        "cpu-only" => Machine {
            description: "laptop with two channels of DDR5-4800 and no graphics card",
            threads: (8, "assumed"),
            memory: (76.8, "2 channels × 8 bytes × 4800 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (16, "assumed"),
            card: None,
        },
        _ => return None,
    };
    Some(machine.hardware(name))
}

/// Share of the nominal bandwidth that kernels sustain: published sparse kernels reach 73 % (AVX2,
/// int8) to 90 % (CUDA) of it.
const SUSTAINED: f64 = 0.8;
const SUSTAINED_NOTE: &str = "80 % of it sustained";

/// Cost of a row beside its bytes, on one thread.
const ROW_SECONDS: f64 = 8e-9;
/// Cost of a kernel beside its rows and bytes.
const KERNEL_SECONDS: f64 = 1e-6;

const RTX_4090: Card = Card {
    name: "NVIDIA GeForce RTX 4090",
    memory: 1008.0,
    vram_mib: 24 << 10,
    link: (32.0, "PCIe 4.0 ×16: 32 GB/s one way"),
};
const RTX_3060: Card = Card {
    name: "NVIDIA GeForce RTX 3060",
    memory: 360.0,
    vram_mib: 12 << 10,
    link: (32.0, "PCIe 4.0 ×16: 32 GB/s one way"),
};
const RTX_2080_TI: Card = Card {
    name: "NVIDIA GeForce RTX 2080 Ti",
    memory: 616.0,
    vram_mib: 11 << 10,
    link: (16.0, "PCIe 3.0 ×16: 16 GB/s one way"),
};

/// A machine by its datasheet; bandwidths in 10⁹ bytes per second.
struct Machine {
    description: &'static str,
    threads: (usize, &'static str),
    memory: (f64, &'static str),
    /// Share of it that is sustained.
    memory_sustained: (f64, &'static str),
    ram_gib: (u64, &'static str),
    card: Option<Card>,
}

struct Card {
    name: &'static str,
    memory: f64,
    vram_mib: u64,
    link: (f64, &'static str),
}

impl Machine {
    fn hardware(self, name: &str) -> Hardware {
        let mut sources = BTreeMap::new();
        let mut source = |figure: &str, text: String| {
            sources.insert(figure.to_owned(), text);
        };
        source("cpu.threads", self.threads.1.to_owned());
        let (nominal, from) = self.memory;
        source(
            "cpu.read_bandwidth_bytes_per_second",
            format!("{nominal} GB/s, {from}; {}", self.memory_sustained.1),
        );
        source("cpu.ram_bytes", self.ram_gib.1.to_owned());
        let measured = "measured by `powerinfer doctor` on 2 cores of an AMD EPYC (Zen 4)";
        source("cpu.row_seconds", format!("{measured}, over the threads"));
        source("cpu.kernel_seconds", measured.to_owned());
        if let Some(card) = &self.card {
            source(
                "gpu.read_bandwidth_bytes_per_second",
                format!("{} GB/s, datasheet; {SUSTAINED_NOTE}", card.memory),
            );
            source("gpu.vram_bytes", "datasheet".to_owned());
            source(
                "gpu.pcie_bandwidth_bytes_per_second",
                format!("{}; {SUSTAINED_NOTE}", card.link.1),
            );
            for (figure, text) in [
                (
                    "gpu.pcie_latency_seconds",
                    "assumed: a small copy and its event",
                ),
                (
                    "gpu.hand_over_seconds",
                    "assumed: two such copies, there and back",
                ),
                (
                    "gpu.kernel_launch_seconds",
                    "assumed: the gap between two nodes of a CUDA graph, 1.5 to 2.5 µs",
                ),
                (
                    "gpu.context_bytes",
                    "assumed: a CUDA context with its modules, and a reserve",
                ),
            ] {
                source(figure, text.to_owned());
            }
        }
        Hardware {
            name: name.to_owned(),
            description: self.description.to_owned(),
            cpu: Cpu {
                threads: self.threads.0,
                read_bandwidth_bytes_per_second: sustained(nominal, self.memory_sustained.0),
                ram_bytes: self.ram_gib.0 << 30,
                row_seconds: ROW_SECONDS / self.threads.0 as f64,
                kernel_seconds: KERNEL_SECONDS,
            },
            gpu: self.card.map(|card| Gpu {
                name: card.name.to_owned(),
                read_bandwidth_bytes_per_second: sustained(card.memory, SUSTAINED),
                vram_bytes: card.vram_mib << 20,
                pcie_bandwidth_bytes_per_second: sustained(card.link.0, SUSTAINED),
                pcie_latency_seconds: 10e-6,
                hand_over_seconds: 20e-6,
                kernel_launch_seconds: 2e-6,
                context_bytes: 512 << 20,
            }),
            sources,
        }
    }
}

/// Whole bytes per second, so that the figure reads well in a file.
fn sustained(nominal_gigabytes_per_second: f64, share: f64) -> f64 {
    (nominal_gigabytes_per_second * 1e9 * share).round()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_machine_is_valid_and_names_the_source_of_every_figure() {
        for name in NAMES {
            let hardware = named(name).unwrap();
            hardware.validate().unwrap();
            assert_eq!(hardware.name, name);
            assert_eq!(hardware.gpu.is_none(), name == "cpu-only");
            let json = serde_json::to_value(&hardware).unwrap();
            for side in ["cpu", "gpu"] {
                for figure in json[side]
                    .as_object()
                    .into_iter()
                    .flat_map(|side| side.keys())
                {
                    let figure = format!("{side}.{figure}");
                    assert!(
                        figure == "gpu.name" || hardware.sources.contains_key(&figure),
                        "{name}: {figure}"
                    );
                }
            }
            assert_eq!(serde_json::from_value::<Hardware>(json).unwrap(), hardware);
        }
        assert_eq!(named("abacus"), None);
    }

    #[test]
    fn impossible_figures_are_named() {
        let good = named("pc-high").unwrap();
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut bad = good.clone();
            bad.gpu.as_mut().unwrap().read_bandwidth_bytes_per_second = value;
            let error = bad.validate().unwrap_err().to_string();
            assert!(
                error.contains("`gpu.read_bandwidth_bytes_per_second`"),
                "{error}"
            );
        }
        let mut bad = good.clone();
        bad.cpu.ram_bytes = 0;
        assert!(matches!(
            bad.validate(),
            Err(HardwareError::NotPositive {
                field: "cpu.ram_bytes",
                ..
            })
        ));
        for value in [-1e-6, f64::NAN] {
            let mut bad = good.clone();
            bad.gpu.as_mut().unwrap().hand_over_seconds = value;
            assert!(matches!(
                bad.validate(),
                Err(HardwareError::Negative {
                    field: "gpu.hand_over_seconds",
                    ..
                })
            ));
        }
        let mut free = good;
        free.gpu.as_mut().unwrap().hand_over_seconds = 0.0;
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
