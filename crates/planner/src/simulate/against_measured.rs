//! Compares predictions with measurements on a machine, for docs/reports/simulator.md. The rates of the machine and of the engine
//! are those of the day of the measurements, so a faster engine changes later predictions but not this comparison.

use std::path::Path;

use powerinfer_artifact::{
    hardware::{EngineRates, Hardware, ModelShape},
    plan::{Device, GPU_PREFILL_BATCHES},
};
use powerinfer_bundle::neuron_bytes;
use powerinfer_model::ModelConfig;
use powerinfer_runtime::memory;
use powerinfer_solver::{LayerMode, cost::GPU_KERNELS};
use powerinfer_synth::Shape;
use powerinfer_tensor::{CacheFormat, Format};

use super::{
    engine::{Engine, LLAMA_CPP, OURS, Streams},
    step::{Estimator, Kind, Pass, Placed, PlacedLayer},
};
use crate::candidates::{HiddenUnits, ModeBuilder, Quality};

/// `doctor`'s file.
const MACHINE: &str = include_str!("h200.toml");

/// Rates of the engine on that day.
const RECORDED: EngineRates = EngineRates {
    threads: &[(1, 0.97), (2, 0.80), (4, 0.70), (8, 0.57), (16, 0.50)],
    gpu_kernel_seconds: 6e-6,
    gpu_token_seconds: 110e-6,
    products: [0.75, 0.083],
    link: 1.0,
};

/// Kernels of a layer on the CPU on that day, in the order of [`CPU_KERNELS`](powerinfer_solver::cost::CPU_KERNELS).
const RECORDED_KERNELS: [f64; 3] = [4.0, 2.0, 3.0];

/// A measurement.
struct Measured {
    what: &'static str,
    engine: &'static str,
    policy: &'static str,
    setup: Setup,
    /// Tokens per second.
    speed: f64,
}

/// Model, placement and pass of a measurement.
#[derive(Clone, Copy)]
struct Setup {
    model: &'static str,
    layers: usize,
    place: Place,
    threads: usize,
    /// Tokens before those that are decoded; `None` for a prompt of 512.
    depth: Option<usize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Gpu,
    Cpu,
    /// Our plan for 2.5 GB: attention of 18 layers, and 380 neurons of every layer, on the GPU.
    Split,
    /// llama.cpp's `-ngl 16`.
    Half,
}

const fn llama_7b(place: Place, threads: usize, depth: Option<usize>) -> Setup {
    Setup {
        model: "llama-7b",
        layers: 32,
        place,
        threads,
        depth,
    }
}

const LLAMA_70B: Setup = Setup {
    model: "llama-70b",
    layers: 2,
    place: Place::Gpu,
    threads: 16,
    depth: Some(32),
};

const fn row(
    what: &'static str,
    engine: &'static str,
    policy: &'static str,
    setup: Setup,
    speed: f64,
) -> Measured {
    Measured {
        what,
        engine,
        policy,
        setup,
        speed,
    }
}

const SHORT: Option<usize> = Some(32);
const LONG: Option<usize> = Some(3932);

/// All measurements of 2026-11-26 on the H200: 32 layers of 7B or 2 of 70B, q4_0, random weights, 90% zeros, predictors of rank
/// 256 in q8_0. llama.cpp is 0c1e570 with flash attention.
#[rustfmt::skip]
const MEASURED: [Measured; 28] = [
    row("all on the GPU", "ours", "predicted", llama_7b(Place::Gpu, 16, SHORT), 560.0),
    row("all on the GPU", "ours", "exact", llama_7b(Place::Gpu, 16, SHORT), 575.0),
    row("all on the GPU", "ours", "dense", llama_7b(Place::Gpu, 16, SHORT), 515.0),
    row("all on the GPU", "llama.cpp", "dense", llama_7b(Place::Gpu, 16, SHORT), 351.3),
    row("all on the GPU, after 3,900 tokens", "ours", "predicted", llama_7b(Place::Gpu, 16, LONG), 419.0),
    row("all on the GPU, after 3,900 tokens", "llama.cpp", "dense", llama_7b(Place::Gpu, 16, LONG), 303.4),
    row("all on the GPU, prompt of 512", "ours", "predicted", llama_7b(Place::Gpu, 16, None), 3334.0),
    row("all on the GPU, prompt of 512", "llama.cpp", "dense", llama_7b(Place::Gpu, 16, None), 10566.0),
    row("2.5 GB of VRAM", "ours", "predicted", llama_7b(Place::Split, 16, SHORT), 61.5),
    row("2.5 GB of VRAM", "ours", "dense", llama_7b(Place::Split, 16, SHORT), 26.8),
    row("2.5 GB of VRAM (`-ngl 16`)", "llama.cpp", "dense", llama_7b(Place::Half, 16, SHORT), 27.94),
    row("2.5 GB of VRAM (`-ngl 16`), 8 threads", "llama.cpp", "dense", llama_7b(Place::Half, 8, SHORT), 17.74),
    row("2.5 GB of VRAM, prompt of 512", "ours", "predicted", llama_7b(Place::Split, 16, None), 208.0),
    row("2.5 GB of VRAM (`-ngl 16`), prompt of 512", "llama.cpp", "dense", llama_7b(Place::Half, 16, None), 1495.8),
    row("CPU, 1 thread", "ours", "predicted", llama_7b(Place::Cpu, 1, SHORT), 7.81),
    row("CPU, 2 threads", "ours", "predicted", llama_7b(Place::Cpu, 2, SHORT), 11.8),
    row("CPU, 4 threads", "ours", "predicted", llama_7b(Place::Cpu, 4, SHORT), 20.2),
    row("CPU, 8 threads", "ours", "predicted", llama_7b(Place::Cpu, 8, SHORT), 27.3),
    row("CPU, 16 threads", "ours", "predicted", llama_7b(Place::Cpu, 16, SHORT), 36.7),
    row("CPU, 4 threads", "ours", "dense", llama_7b(Place::Cpu, 4, SHORT), 9.22),
    row("CPU, 16 threads", "ours", "dense", llama_7b(Place::Cpu, 16, SHORT), 19.8),
    row("CPU, 4 threads", "llama.cpp", "dense", llama_7b(Place::Cpu, 4, SHORT), 5.20),
    row("CPU, 8 threads", "llama.cpp", "dense", llama_7b(Place::Cpu, 8, SHORT), 8.88),
    row("CPU, 16 threads", "llama.cpp", "dense", llama_7b(Place::Cpu, 16, SHORT), 15.17),
    row("2 layers of 70B on the GPU", "ours", "predicted", LLAMA_70B, 2838.0),
    row("2 layers of 70B on the GPU", "ours", "exact", LLAMA_70B, 2719.0),
    row("2 layers of 70B on the GPU", "ours", "dense", LLAMA_70B, 2381.0),
    row("2 layers of 70B on the GPU", "llama.cpp", "dense", LLAMA_70B, 1633.4),
];

const QUANT: Format = Format::Q4_0;
/// Prompt tokens of a measurement.
const PROMPT: usize = 512;
/// Share of active neurons. The 2.5 GB plan has the 380 hottest of 11,008 neurons on the GPU, which produce 30.5% of the
/// activations.
const ACTIVE: f64 = 0.103;
const HOTTEST: usize = 380;
const CARRIED: f64 = 0.305;

/// Activation frequencies of a layer: the hottest, and all others.
fn frequencies(neurons: usize) -> Vec<f64> {
    let active = ACTIVE * neurons as f64;
    let hot = CARRIED * active / HOTTEST as f64;
    let cold = (1.0 - CARRIED) * active / (neurons - HOTTEST) as f64;
    (0..neurons)
        .map(|index| if index < HOTTEST { hot } else { cold })
        .collect()
}

fn mode(config: &ModelConfig, policy: &str) -> LayerMode {
    let modes = ModeBuilder::new(config, QUANT);
    match policy {
        "predicted" => modes.predicted(
            Format::Q8_0,
            HiddenUnits {
                rank: 256,
                is_linear: false,
            },
            Quality::PERFECT,
        ),
        "exact" => modes.exact(),
        _ => modes.dense(None),
    }
}

fn placed<'a>(
    setup: Setup,
    config: &ModelConfig,
    mode: LayerMode,
    frequencies: &'a [f64],
) -> Placed<'a> {
    let numbers = 2 * config.kv_head_count * config.head_size;
    let layer = |index: usize| {
        let neurons = frequencies.len();
        let (attention, hot_count) = match setup.place {
            Place::Gpu => (Device::Gpu, neurons),
            Place::Cpu => (Device::Cpu, 0),
            Place::Split if index < 18 => (Device::Gpu, HOTTEST),
            Place::Split => (Device::Cpu, HOTTEST),
            Place::Half if index >= setup.layers / 2 => (Device::Gpu, neurons),
            Place::Half => (Device::Cpu, 0),
        };
        PlacedLayer {
            mode,
            frequencies,
            hot_count,
            selected: 1.0,
            expert_neurons: config.ffn_size as f64,
            neuron_bytes: neuron_bytes(config, QUANT),
            attention,
            attention_bytes: memory::attention_bytes(config, QUANT, false),
            prediction: attention,
            kv: attention,
            kv_numbers: numbers,
            kv_bytes: memory::kv_bytes(config, 32, CacheFormat::F16) as f64 / 32.0,
        }
    };
    Placed {
        layers: (0..setup.layers).map(layer).collect(),
        head: if setup.place == Place::Gpu {
            Device::Gpu
        } else {
            Device::Cpu
        },
        head_bytes: memory::head_bytes(config, QUANT),
        quant: QUANT,
        hidden_size: config.hidden_size,
        matrices: config.matrices_per_neuron(),
    }
}

/// The machine with `threads` threads.
fn machine(threads: usize) -> Hardware {
    let mut machine = Hardware::parse(MACHINE, Path::new("h200.toml")).unwrap();
    let share = threads as f64 / machine.cpu.threads as f64;
    machine.cpu.threads = threads;
    for operations in [
        &mut machine.cpu.operations_per_second,
        &mut machine.cpu.float_operations_per_second,
    ] {
        *operations = operations.map(|all| share * all);
    }
    machine
}

impl Measured {
    /// The engine on the day of the measurement.
    fn engine(&self) -> Engine {
        match self.engine {
            "ours" => Engine {
                rates: RECORDED,
                kernels: [GPU_KERNELS, RECORDED_KERNELS],
                ..OURS
            },
            _ => LLAMA_CPP,
        }
    }

    /// Predicted tokens per second of `engine`.
    fn predicted(&self, engine: &Engine) -> f64 {
        let config = Shape::find(self.setup.model).unwrap().describe().unwrap();
        let shape = ModelShape {
            format: QUANT,
            hidden: config.hidden_size,
            neurons: config.ffn_size,
            vocabulary: config.vocabulary_size,
        };
        let hardware = machine(self.setup.threads).for_model(shape, &engine.rates);
        let estimator = Estimator {
            engine,
            hardware: &hardware,
        };
        let frequencies = match self.engine {
            "ours" => frequencies(config.ffn_size),
            _ => vec![1.0; config.ffn_size],
        };
        let mode = mode(&config, self.policy);
        let placed = placed(self.setup, &config, mode, &frequencies);
        match self.setup.depth {
            Some(depth) => {
                let pass = Pass {
                    tokens: 1.0,
                    context: depth as f64,
                    kind: Kind::Decode,
                };
                1.0 / estimator.pass(&placed, pass).total
            }
            None => PROMPT as f64 / estimator.prompt(&placed, PROMPT),
        }
    }
}

/// The rows of the comparison, and the error of each.
pub(super) fn rows() -> (String, Vec<f64>) {
    let mut text = String::from(
        "| placement | engine | policy | measured | predicted | error | today |\n|---|---|---|--:|--:|--:|--:|\n",
    );
    let mut errors = Vec::new();
    for measured in &MEASURED {
        let found = measured.predicted(&measured.engine());
        let error = found / measured.speed - 1.0;
        errors.push(error);
        let Measured {
            what,
            engine,
            policy,
            speed,
            ..
        } = measured;
        let number = |speed: f64| match speed {
            s if s < 100.0 => format!("{s:.1}"),
            s => format!("{s:.0}"),
        };
        let today = match *engine {
            "ours" => number(measured.predicted(&Engine {
                prompt_batch: GPU_PREFILL_BATCHES[0],
                streams: Streams::All,
                ..OURS
            })),
            _ => String::new(),
        };
        text += &format!(
            "| {what} | {engine} | {policy} | {} | {} | {:+.0}% | {today} |\n",
            number(*speed),
            number(found),
            100.0 * error
        );
    }
    (text, errors)
}

#[test]
fn predictions_are_near_measurements() {
    let (text, errors) = rows();
    println!("{text}");
    for (measured, error) in MEASURED.iter().zip(errors) {
        let is_our_decode = measured.engine == "ours" && measured.setup.depth.is_some();
        let allowed = if is_our_decode { 0.2 } else { 0.25 };
        assert!(
            error.abs() <= allowed,
            "{}, {}, {}: {:+.0}%",
            measured.what,
            measured.engine,
            measured.policy,
            100.0 * error
        );
    }
}
