//! Memory on the device against the lines of a plan.

use std::{collections::BTreeMap, sync::Arc};

use powerinfer_artifact::plan::{ATTENTION, Device, HEAD, HOT_NEURONS, KV_CACHE, Plan, SCRATCH};
use powerinfer_bundle::neuron_bytes;
use powerinfer_emulator::{Order, test_emulator};
use powerinfer_runtime::{MemoryUse, memory};
use powerinfer_tensor::Format;

use crate::{
    case::Case,
    golden::MODELS,
    placement::{ALL, PLACEMENTS},
};

#[test]
fn the_device_holds_what_a_plan_says() {
    for name in MODELS {
        for (quant, multiprocessors) in [(Format::F32, 2), (Format::Q8_0, 192), (Format::Q4_0, 132)]
        {
            let mut case = Case::open(name);
            if case.config().device_obstacle().is_some() {
                continue;
            }
            case.quant = quant;
            let Some(device) = test_emulator(multiprocessors, Order::Forward) else {
                return;
            };
            let model = case.with(Arc::new(device), &[ALL]);
            let held: BTreeMap<&str, u64> = model
                .memory()
                .iter()
                .filter(|held| held.device == Device::Gpu)
                .map(|held| (held.line, held.bytes))
                .collect();
            let config = case.config();
            let (layers, neurons) = (config.layer_count as u64, config.ffn_size as u64);
            let context = config.context_length as u64;
            for (line, planned) in [
                (
                    ATTENTION,
                    layers * memory::attention_bytes(config, quant, false),
                ),
                (HEAD, memory::head_bytes(config, quant)),
                (HOT_NEURONS, layers * neurons * neuron_bytes(config, quant)),
                (
                    KV_CACHE,
                    layers * memory::kv_bytes(config, context, case.kv_cache),
                ),
            ] {
                // A norm that attention and FFN share is there twice.
                let norms = layers * 2 * 4 * config.hidden_size as u64;
                let most = planned + if line == ATTENTION { norms } else { 0 };
                assert!(
                    (planned..=most).contains(&held[line]),
                    "{name} {quant} {line}: {} held, {planned} planned",
                    held[line]
                );
            }
            let budget = &Plan::unplaced(1, 1, case.policy, config.context_length).budget;
            let planned = memory::device_scratch_bytes(config, quant, budget, 0, 512);
            let spare = planned.checked_sub(held[SCRATCH]);
            assert!(
                spare.is_some_and(|spare| spare < 8 << 20),
                "{name} {quant}: {} of scratch, {planned} planned",
                held[SCRATCH]
            );
        }
    }
}

#[test]
fn the_device_holds_what_a_plan_says_for_copied_parts() {
    for (name, quant, multiprocessors) in [
        ("llama-relu-gqa", Format::F32, 192),
        ("opt-preln", Format::Q4_0, 132),
        ("falcon-new-relu", Format::Q8_0, 28),
    ] {
        let mut case = Case::open(name);
        (case.quant, case.copies_cold_neurons) = (quant, true);
        let Some(device) = test_emulator(multiprocessors, Order::Forward) else {
            return;
        };
        let model = case.with(Arc::new(device), &PLACEMENTS);
        let (config, context) = (case.config(), case.config().context_length);
        assert_eq!(model.prompt_batch(), context.min(512), "{name}");
        let scratch = |held: &MemoryUse| held.line == SCRATCH && held.device == Device::Gpu;
        let held = model.memory().into_iter().find(scratch).unwrap().bytes;
        let budget = &Plan::unplaced(1, 1, case.policy, context).budget;
        let planned = memory::device_scratch_bytes(config, quant, budget, 0, 512)
            + memory::copied_bytes(config, quant, budget, 0);
        let spare = planned.checked_sub(held);
        assert!(
            spare.is_some_and(|spare| spare < 8 << 20),
            "{name} {quant}: {held} of scratch, {planned} planned"
        );
    }
}
