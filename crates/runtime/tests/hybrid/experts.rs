//! Mixtures of experts: the device selects the experts for itself and for the host.

use std::sync::Arc;

use powerinfer_artifact::{
    plan::{ATTENTION, Device, Plan, Policy, SCRATCH, Score, Threshold},
    predictor_file::PredictorInput,
};
use powerinfer_emulator::{Order, test_device};
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{
    ActivationFormat, Engine, MemoryUse, RuntimeError, SingleSession, memory,
};
use powerinfer_tensor::Format;

use crate::{
    assert_alike, assert_near,
    case::Case,
    golden::Golden,
    mixtures::{LATENT, LATENT_VOCABULARY, RECIPES, Recipe, write_latent, write_mixture},
    one_by_one,
    placement::{PLACEMENTS, Placement},
    predictors::{write_random_networks, write_scores_and_signs},
};

/// A mixture with the prompt of its golden.
fn case(recipe: &Recipe) -> Case {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write_mixture(recipe, false, folder.path());
    let prompt = Golden::open(recipe.golden).ids("p17.input_ids");
    let mut case = Case::new(checkpoint, prompt);
    case.folder = folder;
    case
}

#[test]
fn experts_on_either_device_give_the_logits_of_the_cpu() {
    for (index, recipe) in RECIPES.iter().enumerate() {
        let mut case = case(recipe);
        // Only ReLU has zeros to skip.
        let policies = [Policy::Dense, Policy::Exact];
        let has_zeros = case.config().activation.has_exact_zeros();
        for policy in &policies[..1 + usize::from(has_zeros)] {
            let policy = *policy;
            case.policy = policy;
            let mut host = case.on_host(&PLACEMENTS[..1]);
            for (placements, copies) in [
                (&PLACEMENTS[..1], false),
                (&PLACEMENTS[1..3], false),
                (&PLACEMENTS[3..6], false),
                (&PLACEMENTS[1..6], true),
            ] {
                case.copies_cold_neurons = copies;
                let order = Order::Shuffled(index as u16);
                let Some(mut device) = case.on_device(order, placements) else {
                    return;
                };
                let what = format!("{} {policy} {placements:?}", recipe.architecture);
                assert_alike(&mut host, &mut device, &case.prompt, 1e-4, &what);
                // A whole prompt, then batches and single tokens.
                host.reset();
                let want = host.forward(&case.prompt).unwrap();
                let computed = host.observers_mut().take_statistics();
                device.reset();
                device.observers_mut().take_statistics();
                let found = device.forward(&case.prompt).unwrap();
                assert_near(&found, &want, 1e-4, &what);
                let found = device.observers_mut().take_statistics();
                let (found, want_computed) = (found.neurons_computed, computed.neurons_computed);
                if policy == Policy::Dense {
                    assert!(found <= want_computed, "{what}: {found} of {want_computed}");
                }
                device.reset();
                // All experts are on the device in the first case, so a short prompt runs in batches.
                let is_split = placements.len() == 1;
                let (first, both) = if is_split { (10, 10) } else { (5, 7) };
                let mut batched = device.forward(&case.prompt[..first]).unwrap();
                if !is_split {
                    batched.extend(device.forward(&case.prompt[first..both]).unwrap());
                }
                device.reset();
                assert_eq!(
                    batched,
                    one_by_one(&mut device, &case.prompt[..both]),
                    "{what}"
                );
            }
        }
    }
}

/// Attention runs on the host; dense FFNs are blocks of neurons that every token selects.
#[test]
fn experts_beside_latent_attention_give_the_logits_of_the_cpu() {
    for (index, latent) in LATENT.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_latent(latent, folder.path());
        let prompt: Vec<u32> = (0..90).map(|i| i * i % LATENT_VOCABULARY as u32).collect();
        let mut case = Case::new(checkpoint, prompt);
        case.folder = folder;
        case.policy = Policy::Dense;
        let placements = PLACEMENTS.map(Placement::with_attention_on_host);
        let mut host = case.on_host(&PLACEMENTS[..1]);
        for (placements, copies) in [(&placements[..1], false), (&placements[1..6], true)] {
            case.copies_cold_neurons = copies;
            let order = Order::Shuffled(index as u16);
            let Some(emulator) = test_device(order) else {
                return;
            };
            // Latent attention on the device is refused, because no kernel supports it.
            let refused = case.pack(&PLACEMENTS[..1]);
            let refused = Engine::with_device(refused, case.options(), Arc::clone(&emulator));
            assert!(matches!(refused, Err(RuntimeError::OnDevice { .. })));
            let mut device = case.with(emulator, placements);
            let what = format!("{latent:?} {placements:?}");
            assert_alike(&mut host, &mut device, &case.prompt[..9], 1e-4, &what);
            host.reset();
            device.reset();
            let want = host.forward(&case.prompt).unwrap();
            let found = device.forward(&case.prompt).unwrap();
            assert_near(&found, &want, 1e-4, &what);
        }
    }
}

#[test]
fn experts_of_long_prompts_are_multiplied_with_the_tokens_that_select_them() {
    for (index, recipe) in RECIPES.iter().enumerate() {
        let mut case = case(recipe);
        case.policy = Policy::Dense;
        let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(90).collect();
        let mut host = case.on_host(&PLACEMENTS[..1]);
        let want = host.forward(&prompt).unwrap();
        for (placements, copies) in [(&PLACEMENTS[..1], false), (&PLACEMENTS[1..6], true)] {
            case.copies_cold_neurons = copies;
            let order = Order::Shuffled(index as u16);
            let Some(mut device) = case.on_device(order, placements) else {
                return;
            };
            assert!(device.prompt_batch() >= 90, "{}", recipe.architecture);
            device.observers_mut().take_statistics();
            let found = device.forward(&prompt).unwrap();
            let what = format!("{}, copies: {copies}", recipe.architecture);
            assert_near(&found, &want, 1e-4, &what);
            let computed = device.observers_mut().take_statistics().computed_share();
            let share = case.config().experts.as_ref().unwrap().selected_share();
            // The device does not count the zeros of ReLU.
            if !case.config().activation.has_exact_zeros() {
                assert!((computed - share).abs() < 1e-3, "{what}: {computed}");
            }
            // The next token, in a pass with no others, gives the same logits as on the CPU.
            let next = device.forward(&prompt[..1]).unwrap();
            assert_near(&next, &host_after(&case, &prompt), 1e-4, &what);
        }
    }
}

#[test]
fn experts_are_replaced_while_a_model_runs() {
    let mut replacing = 0;
    for (index, recipe) in RECIPES.iter().enumerate() {
        let mut case = case(recipe);
        let has_zeros = case.config().activation.has_exact_zeros();
        case.policy = if has_zeros {
            Policy::Exact
        } else {
            Policy::Dense
        };
        // Long prompts copy the cold neurons, which are those of the plan.
        case.copies_cold_neurons = index == 0;
        // One layer may be on the host, or single tokens run as one graph.
        let placements = &PLACEMENTS[1..][..2 - usize::from(index > 0)];
        let text: Vec<u32> = case.prompt.iter().copied().cycle().take(40).collect();
        let mut host = case.on_host(&PLACEMENTS[..1]);
        let want = one_by_one(&mut host, &text);
        let mut run = |cached_experts| {
            case.cached_experts = cached_experts;
            let order = Order::Shuffled(index as u16);
            let mut device = case.on_device(order, placements)?;
            let logits = one_by_one(&mut device, &text);
            Some((device, logits))
        };
        let Some((mut device, found)) = run(usize::MAX) else {
            return;
        };
        let what = recipe.architecture;
        assert_near(&found, &want, 1e-4, what);
        let (_, again) = run(usize::MAX).unwrap();
        assert_eq!(
            again, found,
            "{what}: where an expert runs depends on the tokens alone"
        );
        let (_, fixed) = run(0).unwrap();
        let statistics = device.observers_mut().take_statistics();
        replacing += u32::from(fixed != found && statistics.experts_on_device > 0);
        // A batch, a prompt, and the token after them.
        let passes = [0..5, 5..38, 38..39];
        let all = |model: &mut SingleSession| -> Vec<f32> {
            model.reset();
            let passes = passes.iter().cloned();
            let logits = passes.map(|pass| model.forward(&text[pass]).unwrap());
            logits.flatten().collect()
        };
        assert_near(&all(&mut device), &all(&mut host), 1e-4, what);
    }
    assert_eq!(replacing, 3);
}

/// Logits, on the CPU, of the first token of `prompt` repeated after the whole prompt.
fn host_after(case: &Case, prompt: &[u32]) -> Vec<f32> {
    let mut host = case.on_host(&PLACEMENTS[..1]);
    host.forward(prompt).unwrap();
    host.forward(&prompt[..1]).unwrap()
}

#[test]
fn the_device_holds_what_a_plan_says() {
    for recipe in &RECIPES {
        let mut case = case(recipe);
        case.quant = Format::Q4_0;
        let Some(model) = case.on_device(Order::Forward, &PLACEMENTS[..1]) else {
            return;
        };
        let held = |line: &str| {
            let is_it = |held: &MemoryUse| held.line == line && held.device == Device::Gpu;
            model.memory().into_iter().find(is_it).unwrap().bytes
        };
        let config = case.config();
        let attention = memory::attention_bytes(config, case.quant, false);
        let layers = config.layer_count as u64;
        assert_eq!(held(ATTENTION), layers * attention, "{}", recipe.golden);
        let budget = &Plan::unplaced(1, 1, case.policy, config.context_length).budget;
        let planned = memory::device_scratch_bytes(config, case.quant, budget, 0, 512);
        assert!((held(SCRATCH)..held(SCRATCH) + (8 << 20)).contains(&planned));
    }
}

#[test]
fn experts_in_4_bits_are_close_to_those_of_the_cpu() {
    // In this recipe, no two logits of the router are nearly equal.
    let mut case = case(&RECIPES[2]);
    case.quant = Format::Q4_0;
    case.activations = ActivationFormat::Int8;
    let mut host = case.on_host(&PLACEMENTS[..1]);
    let Some(mut device) = case.on_device(Order::Forward, &PLACEMENTS[..2]) else {
        return;
    };
    assert_alike(&mut host, &mut device, &case.prompt, 5e-2, "q4_0");
}

#[test]
fn predictors_and_thresholds_skip_neurons_of_selected_experts() {
    let mut case = case(&RECIPES[0]);
    // Otherwise only the CPU would round the inputs of products, which would change predictions near the threshold.
    case.activations = ActivationFormat::F32;
    let folders = ["networks", "scores"].map(|name| case.folder.path().join(name));
    let (checkpoint, input) = (&case.checkpoint, PredictorInput::Normed);
    let networks = write_random_networks(checkpoint, input, Format::F32, &folders[0]);
    let scores = write_scores_and_signs(checkpoint, &folders[1]);
    case.predictors = Some(networks);
    case.policy = Policy::Predicted;
    assert_same_neurons(&case);
    case.predictors = Some(scores);
    case.policy = Policy::SignBit;
    assert_same_neurons(&case);
    case.policy = Policy::Threshold;
    for (score, centred) in [(Score::WeightedGate, false), (Score::Contribution, true)] {
        case.threshold = Some(Threshold {
            score,
            centred,
            value: 0.02,
            error: 0.0,
        });
        assert_same_neurons(&case);
    }
}

/// Fails unless the device and the CPU compute the same neurons in every placement.
#[track_caller]
fn assert_same_neurons(case: &Case) {
    for placements in [&PLACEMENTS[1..2], &PLACEMENTS[1..6]] {
        let Some(mut device) = case.on_device(Order::Shuffled(3), placements) else {
            return;
        };
        let mut host = case.on_host(placements);
        let what = format!("{} {:?} {placements:?}", case.policy, case.threshold);
        assert_alike(&mut host, &mut device, &case.prompt, 1e-2, &what);
        host.reset();
        device.reset();
        let want = host.forward(&case.prompt[..12]).unwrap();
        let found = device.forward(&case.prompt[..12]).unwrap();
        assert_near(&found, &want, 1e-2, &format!("{what}: a prompt"));
    }
}
