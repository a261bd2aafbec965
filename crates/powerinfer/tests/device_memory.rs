//! Plans list, line by line, the bytes that a device holds.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

use std::{collections::BTreeMap, path::Path, sync::Arc};

use powerinfer::{
    Bundle, CalibrationText, Checkpoint, DeviceChoice, Engine, Execution, Files, Format,
    PlanOptions, Policy, Prepare, Recipe, Silent, Tokens, Training,
};
use powerinfer_artifact::plan::{
    ATTENTION, BudgetLine, Device, KV_CACHE, PINNED_EMBEDDINGS, Plan, RESERVE, SCRATCH,
};
use powerinfer_emulator::{Emulator, Order};

/// Maximum bytes of scratch that a plan may list beyond those that the device uses.
const SPARE: u64 = 256 << 10;

/// Bytes of the norms of all layers.
const NORMS: u64 = 32 << 10;

/// Prepares `checkpoint` with `vram_bytes` of VRAM for a machine on which even small models are faster on the GPU.
fn place(checkpoint: &Checkpoint, vram_bytes: u64, pins: &[&str], folder: &Path) -> Bundle {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut hardware = powerinfer::hardware("rtx4090").unwrap();
    hardware.cpu.kernel_seconds = 2e-5;
    let training = Training::default();
    let how = Prepare {
        text: CalibrationText {
            paths: vec![repository.join("README.md")],
            tokens: Tokens::Count(1000),
            settled: 0.9,
        },
        trace_tokens: 64,
        recipe: Recipe::Train(training.settings(checkpoint, Format::Q8_0, 0)),
        options: PlanOptions {
            vram: Some(format!("{vram_bytes}B").parse().unwrap()),
            quant: Some(Format::Q8_0),
            policy: Some(Policy::Exact),
            hardware: Some(hardware),
            prompt_batch: Some(128),
            pins: pins.iter().map(|pin| pin.parse().unwrap()).collect(),
            certify_tokens: Some(0),
            ..PlanOptions::default()
        },
        device: None,
        seed: 0,
    };
    let tokenizer = powerinfer::tokenizer(checkpoint.files()).unwrap();
    let (bundle, _) =
        powerinfer::prepare(checkpoint, &tokenizer, &how, folder, &Silent, &mut |_| {}).unwrap();
    bundle
}

/// Bytes of a line on the GPU.
fn on_gpu(plan: &Plan, name: &str) -> u64 {
    let is_it = |line: &&BudgetLine| line.name == name && line.device == Device::Gpu;
    plan.lines.iter().find(is_it).map_or(0, |line| line.bytes)
}

#[test]
fn a_device_holds_what_the_plan_says() {
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama-relu-gqa");
    let checkpoint = powerinfer::open_checkpoint(Files::open(&golden).unwrap()).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let check = |vram_bytes: u64, pins: &[&str]| -> Option<Plan> {
        let bundle = place(&checkpoint, vram_bytes, pins, scratch.path());
        let plan = bundle.plan().clone();
        let execution = Execution {
            device: DeviceChoice::Given(Arc::new(Emulator::new(2, Order::Forward)?)),
            ..Execution::on_cpu(2)
        };
        let engine = Engine::open(bundle, None, &execution, &Silent).unwrap();
        let held: BTreeMap<_, _> = (engine.memory().into_iter())
            .filter(|held| held.device == Device::Gpu || held.line == PINNED_EMBEDDINGS)
            .map(|held| (held.line, held.bytes))
            .collect();
        for line in plan.lines.iter().filter(|line| {
            (line.device == Device::Gpu && line.name != RESERVE) || line.name == PINNED_EMBEDDINGS
        }) {
            let held = held[&*line.name];
            // The GPU also holds the norm of a layer that has neurons but no attention on it.
            let [most, spare] = match &*line.name {
                SCRATCH => [line.bytes, SPARE],
                ATTENTION => [line.bytes + NORMS, 0],
                _ => [line.bytes, 0],
            };
            assert!(
                held <= most && held + spare >= line.bytes,
                "{vram_bytes}: {line:?}, {held} held"
            );
        }
        assert_eq!(
            held.contains_key(PINNED_EMBEDDINGS),
            plan.line(PINNED_EMBEDDINGS) > 0
        );
        Some(plan)
    };
    let Some(whole) = check(1 << 30, &[]) else {
        println!("skipped: no C++ compiler");
        return;
    };
    assert!(
        whole.line(PINNED_EMBEDDINGS) > 0,
        "the embedding is looked up"
    );
    // Long prompts copy the parts that are on the host, one layer at a time.
    for (pin, lacks) in [
        ("layers:0=cpu", true),
        ("layers:0-1=cpu", true),
        ("head=cpu", false),
    ] {
        let plan = check(1 << 30, &[pin]).unwrap();
        let copied =
            (on_gpu(&whole, ATTENTION) + on_gpu(&whole, KV_CACHE)) / whole.layers.len() as u64;
        let scratch = on_gpu(&whole, SCRATCH) + if lacks { copied } else { 0 };
        assert_eq!(on_gpu(&plan, SCRATCH), scratch, "{pin}");
    }
}
