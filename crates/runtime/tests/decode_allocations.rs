//! Decoding allocates nothing per token: a counting allocator sees every allocation of all threads.
#![expect(clippy::unwrap_used, reason = "a test")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::alloc::System;

use cap::Cap;
use golden::Golden;
use packing::pack_bundle;
use powerinfer_artifact::plan::{Plan, Policy};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{
    Engine, Generation, Options, Sampler, SamplingSettings, StopConditions, Text, Threads,
};
use powerinfer_tensor::Format;
use predictor_files::full_predictors;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Times that tokens are decoded, at least once without an allocation.
const ATTEMPTS: usize = 10;

// One test, so that nothing else allocates while it counts.
#[test]
fn decoding_allocates_nothing() {
    let settings = [
        SamplingSettings::default(),
        SamplingSettings {
            temperature: 0.8,
            top_k: 20,
            top_p: 0.9,
            repeat_penalty: 1.1,
            ..SamplingSettings::default()
        },
    ];
    for name in ["llama-relu-gqa", "opt-preln", "falcon-rw-alibi", "phi"] {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let config = checkpoint.config();
        let prompt = golden.ids("p17.input_ids");
        for (format, policy, threads) in [
            (Format::Q8_0, Policy::Dense, 1),
            (Format::Q4_0, Policy::Exact, 2),
            (Format::F16, Policy::Exact, 1),
            (Format::Q8_0, Policy::Predicted, 2),
            (Format::Q4_0, Policy::SignBit, 1),
            (Format::Q8_0, Policy::Threshold, 1),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let file = full_predictors(&checkpoint, Format::Q8_0, folder.path());
            let mut plan = Plan::unplaced(config.layer_count, config.ffn_size, policy, 256);
            for layer in &mut plan.layers {
                layer.hot_count = config.ffn_size / 3;
                layer.threshold = Some(file.layers()[0].thresholds[0].threshold(0));
                plan.totals.hot_count += layer.hot_count as u64;
            }
            let order = 0..config.ffn_size as u32;
            let out = folder.path().join("bundle");
            let bundle = pack_bundle(&checkpoint, order, Some(&file), plan, format, &out);
            let options = Options {
                threads: Threads::new(Isa::detect().unwrap(), threads).unwrap(),
                policy: None,
            };
            let mut engine = Engine::new(bundle, options).unwrap();
            let mut session = engine.new_session(256).unwrap();
            for settings in &settings {
                let stop = StopConditions {
                    max_tokens: usize::MAX,
                    stop_tokens: [].into(),
                    vocabulary: config.vocabulary_size,
                };
                let mut text = Text::new(Sampler::new(settings.clone()).unwrap(), stop);
                session.truncate(0);
                let (engine, session) = (&mut engine, &mut session);
                let started = Generation::start(engine, session, &mut text, &prompt, || false);
                let (mut generation, _) = started.unwrap();
                generation.next();
                // A thread takes its buffers with its first part of a kernel, which may come late.
                let allocated = (0..ATTEMPTS).map(|_| {
                    let before = MEMORY.total_allocated();
                    for _ in 0..10 {
                        generation.next().unwrap().unwrap();
                    }
                    MEMORY.total_allocated() - before
                });
                let least = allocated.min().unwrap();
                assert_eq!(least, 0, "{name} {format:?} {policy} {threads} threads");
            }
        }
    }
}
