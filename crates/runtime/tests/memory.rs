//! A running model takes the memory of the plan's lines, to the byte. While tokens are computed, it takes
//! at most the line for scratch: an allocator counts.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/mixtures.rs"]
mod mixtures;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::{alloc::System, collections::BTreeMap, io::Write};

use cap::Cap;
use golden::{Golden, MODELS};
use mixtures::{LATENT, LATENT_VOCABULARY, RECIPES, Recipe, write_latent, write_mixture};
use packing::pack_bundle;
use powerinfer_artifact::{
    TensorFile,
    plan::{
        ATTENTION, BudgetLine, COLD_NEURONS, Device, EMBEDDINGS, HEAD, HOT_NEURONS,
        InputThresholds, KV_CACHE, PREDICTORS, Plan, Policy, SCRATCH,
    },
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_kernels::Isa;
use powerinfer_model::{LanguageModel, ModelConfig};
use powerinfer_runtime::{
    Engine, Options, Sampler, SamplingSettings, SingleSession, Threads, memory,
};
use powerinfer_tensor::Format;
use predictor_files::{RANK, full_predictors};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes allowed for allocations of the test itself: a message.
const SLACK: usize = 1024;

/// Settings of a bundle.
#[derive(Debug, Clone, Copy)]
struct Case {
    quant: Format,
    /// Weights of predictors that have everything, if there are any.
    predictors: Option<Format>,
    policy: Policy,
    /// Matrices by input, those of FFNs too or not.
    inputs: Option<bool>,
}

const PLAIN: Case = Case {
    quant: Format::Q8_0,
    predictors: None,
    policy: Policy::Dense,
    inputs: None,
};

fn cases() -> Vec<Case> {
    let quant = |quant| Case { quant, ..PLAIN };
    let inputs = |quant, ffn| Case {
        quant,
        inputs: Some(ffn),
        ..PLAIN
    };
    let policy = |policy, format| Case {
        policy,
        predictors: Some(format),
        ..PLAIN
    };
    vec![
        quant(Format::F32),
        quant(Format::Bf16),
        quant(Format::Q8_0),
        quant(Format::Q4_0),
        inputs(Format::F32, true),
        inputs(Format::Q8_0, true),
        inputs(Format::Q4_0, false),
        policy(Policy::Dense, Format::Q4_0),
        policy(Policy::Exact, Format::Bf16),
        policy(Policy::Predicted, Format::Q8_0),
        policy(Policy::Predicted, Format::F32),
        policy(Policy::SignBit, Format::Q4_0),
        policy(Policy::Threshold, Format::Q4_0),
    ]
}

/// A plan whose lines are those of the arithmetic that placing uses, some neurons hot.
fn plan(config: &ModelConfig, case: Case, file: Option<&PredictorFile>) -> Plan {
    let (layers, neurons) = (config.layer_count as u64, config.ffn_size);
    let context = config.context_length as u64;
    let mut plan = Plan::unplaced(config.layer_count, neurons, case.policy, context as usize);
    let neuron_bytes = match case.inputs {
        Some(_) => memory::neuron_bytes_in_either_layout(config, case.quant),
        None => powerinfer_bundle::neuron_bytes(config, case.quant),
    };
    let hot = neurons / 3;
    let thresholds = InputThresholds {
        share: 0.1,
        attention: 1e-3,
        output: 1e-3,
        ffn: case.inputs.and_then(|ffn| ffn.then_some(1e-3)),
    };
    let threshold = (case.policy == Policy::Threshold).then(|| {
        let curve = &file.unwrap().layers()[0].thresholds[0];
        curve.threshold(0)
    });
    for layer in &mut plan.layers {
        (layer.hot_count, layer.neuron_bytes) = (hot, neuron_bytes);
        layer.input_thresholds = case.inputs.map(|_| thresholds);
        layer.threshold = threshold;
    }
    plan.totals.hot_count = layers * hot as u64;
    let prediction = |file: &PredictorFile| -> u64 {
        let signs = case.policy == Policy::SignBit;
        let bytes = |layer| memory::predictor_bytes(config, layer, file.weights(), signs);
        file.layers().iter().map(bytes).sum()
    };
    let by_input = case.inputs.is_some();
    let mut lines = vec![
        (
            ATTENTION,
            layers * memory::attention_bytes(config, case.quant, by_input),
        ),
        (PREDICTORS, file.map_or(0, prediction)),
        (EMBEDDINGS, memory::embedding_bytes(config, case.quant)),
        (HOT_NEURONS, plan.totals.hot_count * neuron_bytes),
        (COLD_NEURONS, layers * (neurons - hot) as u64 * neuron_bytes),
        (
            KV_CACHE,
            layers * memory::kv_bytes(config, context, plan.budget.kv_cache),
        ),
        (
            SCRATCH,
            memory::cpu_scratch_bytes(config, context, file.map_or(0, |_| RANK)),
        ),
    ];
    if !config.tied_embeddings {
        lines.push((HEAD, memory::head_bytes(config, case.quant)));
    }
    let line = |(name, bytes): (&str, u64)| BudgetLine {
        gpu: 0,
        name: name.to_owned(),
        device: Device::Cpu,
        bytes,
    };
    plan.lines = lines.into_iter().map(line).collect();
    plan.totals.cpu_bytes = plan.lines.iter().map(|line| line.bytes).sum();
    plan.budget.ram_bytes = plan.totals.cpu_bytes;
    plan
}

fn runtime(bundle: Bundle) -> Result<SingleSession, powerinfer_runtime::RuntimeError> {
    let options = Options {
        threads: Threads::new(Isa::detect().unwrap(), 1).unwrap(),
        policy: None,
    };
    SingleSession::new(Engine::new(bundle, options)?)
}

/// Bytes of all tensors of a file but the orders of neurons, which are only checked.
fn tensor_bytes(file: &TensorFile) -> u64 {
    let names = file.names().into_iter();
    let held = names.filter(|name| !name.ends_with(".neurons"));
    held.map(|name| file.find(&name).unwrap().bytes.len() as u64)
        .sum()
}

// One test, so that nothing else allocates while it counts.
#[test]
fn running_holds_what_the_plan_says_and_no_more() {
    let mut largest_share = 0f64;
    for name in MODELS {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let config = checkpoint.config();
        let prompt = golden.ids("p70.input_ids");
        for case in cases() {
            // Whoever runs out of memory cannot say where any more.
            writeln!(std::io::stderr(), "{name} {case:?}").unwrap();
            let folder = tempfile::tempdir().unwrap();
            let file = case
                .predictors
                .map(|format| full_predictors(&checkpoint, format, folder.path()));
            let plan = plan(config, case, file.as_ref());
            let out = folder.path().join("bundle");
            let bundle = pack_bundle(
                &checkpoint,
                (0..config.ffn_size as u32).rev(),
                file.as_ref(),
                plan.clone(),
                case.quant,
                &out,
            );
            let file_bytes = tensor_bytes(bundle.weights());
            let mut model = runtime(bundle).unwrap();

            // Line by line: what is held is what the plan says.
            let held: BTreeMap<&str, u64> = model
                .memory()
                .iter()
                .map(|held| (held.line, held.bytes))
                .collect();
            let is_padded = case.inputs.is_some() && case.quant.is_quantised();
            for (line, planned) in [
                (ATTENTION, plan.line(ATTENTION)),
                (PREDICTORS, plan.line(PREDICTORS)),
                (HEAD, plan.line(HEAD)),
                (EMBEDDINGS, plan.line(EMBEDDINGS)),
                (KV_CACHE, plan.line(KV_CACHE)),
                (SCRATCH, plan.line(SCRATCH)),
                ("neurons", plan.line(HOT_NEURONS) + plan.line(COLD_NEURONS)),
            ] {
                let is_right = if line == "neurons" && is_padded {
                    held[line] <= planned
                } else {
                    held[line] == planned
                };
                assert!(is_right, "{line}: {} held, {planned} planned", held[line]);
            }
            let weights = [ATTENTION, HEAD, EMBEDDINGS, "neurons"].map(|line| held[line]);
            assert_eq!(
                weights.iter().sum::<u64>(),
                file_bytes,
                "no weight is forgotten"
            );

            let kept = run_within_scratch(&mut model, config, &prompt, held[SCRATCH]);
            largest_share = largest_share.max(kept as f64 / held[SCRATCH] as f64);
            // Nothing grows with the sequence.
            model.reset();
            assert_eq!(
                model.memory(),
                runtime(Bundle::open(&out, IntegrityCheck::Quick).unwrap())
                    .unwrap()
                    .memory()
            );
        }
    }
    assert!(largest_share > 0.0, "something was allocated");
    long_prompts_of_mixtures_fit_the_scratch_of_all_neurons();
    latent_attention_fits_the_scratch();
}

/// Runs a prompt and decodes while the allocator gives no more than the `scratch` of the plan. Returns the number of bytes that stay
/// allocated.
fn run_within_scratch(
    model: &mut SingleSession,
    config: &ModelConfig,
    prompt: &[u32],
    scratch: u64,
) -> usize {
    let settings = SamplingSettings {
        temperature: 0.8,
        top_k: 0,
        repeat_penalty: 1.1,
        ..SamplingSettings::default()
    };
    let before = MEMORY.allocated();
    // Only one thread unpacks weights here.
    let others = (memory::BATCH_THREADS - 1) * memory::thread_bytes(config);
    let line = scratch as usize - others;
    MEMORY.set_limit(before + line + SLACK).unwrap();
    let mut sampler = Sampler::new(settings).unwrap();
    let mut logits = model.forward_last(prompt).unwrap();
    for _ in 0..3 {
        let token = sampler.sample(&logits);
        logits = model.forward_last(&[token]).unwrap();
    }
    MEMORY.set_limit(usize::MAX).unwrap();
    drop((logits, sampler));
    MEMORY.allocated() - before.min(MEMORY.allocated())
}

/// Runs models with latent attention within the scratch of the plan; their dense FFNs are as small as their experts.
fn latent_attention_fits_the_scratch() {
    let prompt: Vec<u32> = (0..90).map(|i| i * i % LATENT_VOCABULARY as u32).collect();
    for latent in LATENT {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_latent(latent, folder.path());
        let config = checkpoint.config();
        for quant in [Format::F32, Format::Q8_0, Format::Q4_0] {
            let plan = plan(config, Case { quant, ..PLAIN }, None);
            let out = folder.path().join(quant.name());
            let order = 0..config.ffn_size as u32;
            let bundle = pack_bundle(&checkpoint, order, None, plan, quant, &out);
            let mut model = runtime(bundle).unwrap();
            let held = model.memory().iter().map(|held| held.bytes).sum::<u64>();
            assert!(held > 0);
            let scratch = memory::cpu_scratch_bytes(config, config.context_length as u64, 0);
            run_within_scratch(&mut model, config, &prompt, scratch);
        }
    }
}

/// More than 64 tokens of a mixture run together in the memory that 64 would need to compute all neurons.
fn long_prompts_of_mixtures_fit_the_scratch_of_all_neurons() {
    let recipe = Recipe {
        experts: 150,
        size: 172,
        ..RECIPES[0]
    };
    let golden = Golden::open(recipe.golden);
    let ids = golden.ids("p70.input_ids");
    let prompt: Vec<u32> = ids.iter().copied().cycle().take(240).collect();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write_mixture(&recipe, true, folder.path());
    let config = checkpoint.config();
    let neurons = config.ffn_size as u32;
    let interleaved = |place| place % 150 * 172 + place / 150;
    for quant in [Format::F32, Format::Q8_0, Format::Q4_0] {
        for order in [
            (0..neurons).collect(),
            (0..neurons).map(interleaved).collect(),
        ] {
            let order: Vec<u32> = order;
            let plan = plan(config, Case { quant, ..PLAIN }, None);
            let out = tempfile::tempdir().unwrap();
            let out = out.path().join("bundle");
            let bundle = pack_bundle(&checkpoint, order.into_iter(), None, plan, quant, &out);
            let mut model = runtime(bundle).unwrap();
            assert!(model.prompt_batch() > 192, "{}", model.prompt_batch());
            let scratch = memory::cpu_scratch_bytes(config, config.context_length as u64, 0);
            // Each thread has products of a group of neurons for all tokens of a pass; only one thread runs here.
            let others = (memory::BATCH_THREADS - 1) * 64 * size_of::<f32>() * model.prompt_batch();
            run_within_scratch(&mut model, config, &prompt, scratch - others as u64);
        }
    }
}
