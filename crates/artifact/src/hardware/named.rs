//! Built-in machines from datasheets; values without a source are marked as assumed.

use std::collections::BTreeMap;

use super::{Cpu, Gpu, Hardware};

/// Names of the built-in machines.
pub const NAMES: [&str; 9] = [
    "pc-high",
    "pc-low",
    "rtx4090",
    "rtx5090",
    "rtx4060-8g",
    "rtx3060-12g",
    "h200-16c",
    "laptop",
    "cpu-only",
];

/// Returns the built-in machine called `name`, one of [`NAMES`].
pub fn named(name: &str) -> Option<Hardware> {
    let paper = "PowerInfer paper (arXiv 2312.12456), section 8.1";
    let machine = match name {
        "pc-high" => Machine {
            description: "the paper's PC-High: i9-13900K, 192 GB DDR5, RTX 4090 on PCIe 4.0",
            threads: (8, "paper, section 8.1: eight performance cores"),
            memory: (67.2, paper),
            memory_sustained: (
                1.0,
                "assumed sustained: the authors' model cards report dense models at 70 GB/s on it",
            ),
            ram_gib: (192, paper),
            cores: RAPTOR_LAKE,
            card: Some(RTX_4090),
        },
        "pc-low" => Machine {
            description: "the paper's PC-Low: i7-12700K, 64 GB DDR4, RTX 2080 Ti on PCIe 3.0",
            threads: (8, "paper, section 8.1: eight performance cores"),
            memory: (38.4, paper),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (64, paper),
            cores: ALDER_LAKE,
            card: Some(RTX_2080_TI),
        },
        "rtx4090" => Machine {
            description: "desktop with two channels of DDR5-5600 and an RTX 4090",
            threads: (16, "assumed: 8 cores, 2 threads each"),
            memory: (89.6, "2 channels × 8 bytes × 5600 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (64, "assumed"),
            cores: DESKTOP_8,
            card: Some(RTX_4090),
        },
        "rtx5090" => Machine {
            description: "desktop with two channels of DDR5-6000 and an RTX 5090 on PCIe 5.0",
            threads: (16, "assumed: 8 cores, 2 threads each"),
            memory: (96.0, "2 channels × 8 bytes × 6000 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (96, "assumed"),
            cores: DESKTOP_8,
            card: Some(RTX_5090),
        },
        "rtx4060-8g" => Machine {
            description: "desktop with two channels of DDR5-4800 and an RTX 4060 8 GB",
            threads: (12, "assumed: 6 cores, 2 threads each"),
            memory: (76.8, "2 channels × 8 bytes × 4800 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (32, "assumed"),
            cores: DESKTOP_6,
            card: Some(RTX_4060),
        },
        "rtx3060-12g" => Machine {
            description: "desktop with two channels of DDR4-3200 and an RTX 3060 12 GB",
            threads: (12, "assumed: 6 cores, 2 threads each"),
            memory: (51.2, "2 channels × 8 bytes × 3200 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (32, "assumed"),
            cores: DESKTOP_6,
            card: Some(RTX_3060),
        },
        "h200-16c" => Machine {
            description: "16 cores of a server with eight channels of DDR5-5600, and an H200",
            threads: (16, "assumed: a share of a server, one thread per core"),
            memory: (
                100.0,
                "assumed: the share of 16 cores in 8 channels × 8 bytes × 5600 MT/s (358 GB/s)",
            ),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (128, "assumed"),
            cores: SERVER_16,
            card: Some(H200),
        },
        "laptop" => Machine {
            description: "laptop with two channels of LPDDR5-5200, four fast cores and no GPU",
            threads: (8, "assumed: 4 cores, 2 threads each"),
            memory: (83.2, "128 bits of LPDDR5 at 5200 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (16, "assumed"),
            cores: LAPTOP_4,
            card: None,
        },
        "cpu-only" => Machine {
            description: "laptop with two channels of DDR5-4800 and no GPU",
            threads: (8, "assumed"),
            memory: (76.8, "2 channels × 8 bytes × 4800 MT/s"),
            memory_sustained: (SUSTAINED, SUSTAINED_NOTE),
            ram_gib: (16, "assumed"),
            cores: LAPTOP_4,
            card: None,
        },
        _ => return None,
    };
    Some(machine.hardware(name))
}

/// Share of the nominal bandwidth that kernels sustain: published sparse kernels reach 73% (AVX2,
/// int8) to 90% (CUDA).
const SUSTAINED: f64 = 0.8;
const SUSTAINED_NOTE: &str = "80% of it sustained";
/// Share of the nominal arithmetic throughput that GEMMs sustain.
const SUSTAINED_OPERATIONS: f64 = 0.5;
const SUSTAINED_OPERATIONS_NOTE: &str = "50% of it sustained, assumed";

/// Time per row that does not follow the previous one, in addition to its bytes, on one thread.
const ROW_SECONDS: f64 = 40e-9;
/// Fixed time per kernel.
const KERNEL_SECONDS: f64 = 5e-6;
/// Times between kernels, on one thread.
const HIDDEN_SECONDS: f64 = 1.5e-9;
const NEURON_SECONDS: f64 = 0.15e-9;
const VOCABULARY_SECONDS: f64 = 1.2e-9;

const RTX_5090: Card = Card {
    name: "NVIDIA GeForce RTX 5090",
    memory: 1792.0,
    vram_mib: 32 << 10,
    link: (64.0, "PCIe 5.0 ×16: 64 GB/s one way"),
    tensor: (
        209.5,
        "170 multiprocessors × 2.41 GHz × 256 multiply-adds a cycle × 2, from memory",
    ),
};
const RTX_4090: Card = Card {
    name: "NVIDIA GeForce RTX 4090",
    memory: 1008.0,
    vram_mib: 24 << 10,
    link: (32.0, "PCIe 4.0 ×16: 32 GB/s one way"),
    tensor: (165.2, "Ada architecture whitepaper"),
};
const RTX_4060: Card = Card {
    name: "NVIDIA GeForce RTX 4060",
    memory: 272.0,
    vram_mib: 8 << 10,
    link: (16.0, "PCIe 4.0 ×8: 16 GB/s one way"),
    tensor: (
        30.2,
        "24 multiprocessors × 2.46 GHz × 256 multiply-adds a cycle × 2, from memory",
    ),
};
const RTX_3060: Card = Card {
    name: "NVIDIA GeForce RTX 3060",
    memory: 360.0,
    vram_mib: 12 << 10,
    link: (32.0, "PCIe 4.0 ×16: 32 GB/s one way"),
    tensor: (
        25.5,
        "28 multiprocessors × 1.777 GHz × 256 multiply-adds a cycle × 2, from memory",
    ),
};
const RTX_2080_TI: Card = Card {
    name: "NVIDIA GeForce RTX 2080 Ti",
    memory: 616.0,
    vram_mib: 11 << 10,
    link: (16.0, "PCIe 3.0 ×16: 16 GB/s one way"),
    tensor: (53.8, "Turing architecture whitepaper, from memory"),
};
const H200: Card = Card {
    name: "NVIDIA H200",
    memory: 4800.0,
    vram_mib: 141_000_000_000 >> 20,
    link: (64.0, "PCIe 5.0 ×16: 64 GB/s one way"),
    tensor: (989.0, "datasheet"),
};

const RAPTOR_LAKE: Cores = Cores {
    count: 8,
    gigahertz: 5.4,
    multiply_adds: AVX2,
    note: "from memory",
};
const ALDER_LAKE: Cores = Cores {
    count: 8,
    gigahertz: 4.7,
    multiply_adds: AVX2,
    note: "from memory",
};
const DESKTOP_8: Cores = Cores {
    count: 8,
    gigahertz: 4.5,
    multiply_adds: AVX2,
    note: "assumed",
};
const DESKTOP_6: Cores = Cores {
    count: 6,
    gigahertz: 4.2,
    multiply_adds: AVX2,
    note: "assumed",
};
const LAPTOP_4: Cores = Cores {
    count: 4,
    gigahertz: 3.5,
    multiply_adds: AVX2,
    note: "assumed",
};
const SERVER_16: Cores = Cores {
    count: 16,
    gigahertz: 3.0,
    multiply_adds: AVX512,
    note: "assumed",
};

/// Multiply-adds of f32 per cycle with two 256-bit units.
const AVX2: u32 = 16;
/// Multiply-adds of f32 per cycle with two 512-bit units.
const AVX512: u32 = 32;

/// Datasheet of a machine; bandwidths in 10⁹ bytes per second, each with its source.
struct Machine {
    description: &'static str,
    threads: (usize, &'static str),
    memory: (f64, &'static str),
    /// Share of the nominal bandwidth that is sustained, with a note.
    memory_sustained: (f64, &'static str),
    ram_gib: (u64, &'static str),
    cores: Cores,
    card: Option<Card>,
}

struct Cores {
    count: u32,
    gigahertz: f64,
    /// Multiply-adds of f32 per cycle.
    multiply_adds: u32,
    note: &'static str,
}

struct Card {
    name: &'static str,
    memory: f64,
    vram_mib: u64,
    link: (f64, &'static str),
    /// Dense f16 throughput with f32 accumulation, in 10¹² operations per second.
    tensor: (f64, &'static str),
}

impl Cores {
    /// Nominal f32 throughput in 10⁹ operations per second; a multiply-add is two operations.
    fn gigaflops(&self) -> f64 {
        f64::from(self.count) * self.gigahertz * f64::from(self.multiply_adds) * 2.0
    }
}

impl Machine {
    fn sources(&self) -> BTreeMap<String, String> {
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
        source(
            "cpu.row_seconds",
            format!("{measured}, roughly, for rows of 2 KiB in q8_0; divided by the threads"),
        );
        source(
            "cpu.kernel_seconds",
            "assumed: dispatch to spinning threads".to_owned(),
        );
        for figure in ["hidden", "neuron", "vocabulary"] {
            source(&format!("cpu.{figure}_seconds"), measured.to_owned());
        }
        let cores = &self.cores;
        source(
            "cpu.operations_per_second",
            format!(
                "{} cores × {} GHz × {} multiply-adds of f32 per cycle × 2, {}; {SUSTAINED_OPERATIONS_NOTE}",
                cores.count, cores.gigahertz, cores.multiply_adds, cores.note
            ),
        );
        let Some(card) = &self.card else {
            return sources;
        };
        source(
            "gpu.read_bandwidth_bytes_per_second",
            format!("{} GB/s, datasheet; {SUSTAINED_NOTE}", card.memory),
        );
        source("gpu.vram_bytes", "datasheet".to_owned());
        source(
            "gpu.pcie_bandwidth_bytes_per_second",
            format!("{}; {SUSTAINED_NOTE}", card.link.1),
        );
        source(
            "gpu.operations_per_second",
            format!(
                "{} TFLOPS of dense float16 with float32 sums, {}; {SUSTAINED_OPERATIONS_NOTE}",
                card.tensor.0, card.tensor.1
            ),
        );
        for (figure, text) in [
            (
                "gpu.pcie_latency_seconds",
                "assumed: a small copy and its event",
            ),
            (
                "gpu.sync_seconds",
                "assumed: two such copies, one in each direction",
            ),
            (
                "gpu.kernel_launch_seconds",
                "assumed: the gap between two nodes of a CUDA graph, 1.5 to 2.5 µs",
            ),
            (
                "gpu.context_bytes",
                "assumed: loaded kernels, captured graphs, partly used pages",
            ),
        ] {
            source(figure, text.to_owned());
        }
        sources
    }

    fn hardware(self, name: &str) -> Hardware {
        Hardware {
            name: name.to_owned(),
            description: self.description.to_owned(),
            sources: self.sources(),
            cpu: Cpu {
                threads: self.threads.0,
                read_bandwidth_bytes_per_second: sustained(self.memory.0, self.memory_sustained.0),
                ram_bytes: self.ram_gib.0 << 30,
                row_seconds: ROW_SECONDS / self.threads.0 as f64,
                sum_row_seconds: 0.0,
                kernel_seconds: KERNEL_SECONDS,
                hidden_seconds: HIDDEN_SECONDS,
                neuron_seconds: NEURON_SECONDS,
                vocabulary_seconds: VOCABULARY_SECONDS,
                layer_seconds: 0.0,
                token_seconds: 0.0,
                operations_per_second: Some(
                    (self.cores.gigaflops() * 1e9 * SUSTAINED_OPERATIONS).round(),
                ),
                float_operations_per_second: None,
                reads: Vec::new(),
                kernels: Vec::new(),
            },
            gpu: self.card.map(|card| Gpu {
                name: card.name.to_owned(),
                read_bandwidth_bytes_per_second: sustained(card.memory, SUSTAINED),
                vram_bytes: card.vram_mib << 20,
                free_bytes: None,
                pcie_bandwidth_bytes_per_second: sustained(card.link.0, SUSTAINED),
                pcie_latency_seconds: 10e-6,
                sync_seconds: 20e-6,
                kernel_launch_seconds: 2e-6,
                context_bytes: 64 << 20,
                operations_per_second: Some((card.tensor.0 * 1e12 * SUSTAINED_OPERATIONS).round()),
            }),
        }
    }
}

/// Sustained bandwidth in bytes per second, rounded to an integer.
fn sustained(nominal_gigabytes_per_second: f64, share: f64) -> f64 {
    (nominal_gigabytes_per_second * 1e9 * share).round()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_machine_is_valid_and_states_the_source_of_every_figure() {
        for name in NAMES {
            let hardware = named(name).unwrap();
            hardware.validate().unwrap();
            assert_eq!(hardware.name, name);
            assert_eq!(
                hardware.gpu.is_none(),
                ["laptop", "cpu-only"].contains(&name)
            );
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
    fn optional_figures_may_be_absent() {
        let minimal = r#"{ "name": "x", "description": "y", "cpu": { "threads": 1,
            "read_bandwidth_bytes_per_second": 1e9, "ram_bytes": 1 }, "gpu": { "name": "z",
            "read_bandwidth_bytes_per_second": 1e9, "vram_bytes": 1,
            "pcie_bandwidth_bytes_per_second": 1e9, "pcie_latency_seconds": 0,
            "sync_seconds": 0, "kernel_launch_seconds": 0, "context_bytes": 0 } }"#;
        let hardware: Hardware = serde_json::from_str(minimal).unwrap();
        hardware.validate().unwrap();
        assert!(hardware.cpu.kernels.is_empty());
    }
}
