//! Sequences that are cut, copied, and kept in files go on as if they had been run from the start, in
//! every format of the KV cache; and the formats are as close to each other as they ought to be.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;

use std::path::Path;

use golden::{Golden, MODELS, SPARSE_MODELS};
use packing::pack_bundle;
use powerinfer_artifact::{
    plan::{Plan, Policy},
    prompt_cache::PromptCacheFile,
};
use powerinfer_bundle::Bundle;
use powerinfer_kernels::Isa;
use powerinfer_model::{LanguageModel, greedy_token};
use powerinfer_runtime::{ActivationFormat, Engine, Options, SingleSession, Threads};
use powerinfer_tensor::{CacheFormat, Format};
use proptest::prelude::*;

/// One model for every way to know positions, to group heads and to look back.
const FEW: [&str; 5] = [
    "falcon-old-7b",
    "falcon-rw-alibi",
    "llama-relu-gqa",
    "mistral-swa-relu",
    "opt-preln",
];

/// A bundle of `golden` whose cache is in `format`.
fn bundle(golden: &Golden, quant: Format, format: CacheFormat, out: &Path) -> Bundle {
    let checkpoint = golden.checkpoint();
    let config = checkpoint.config();
    let (layers, neurons) = (config.layer_count, config.ffn_size);
    let mut plan = Plan::unplaced(layers, neurons, Policy::Dense, config.context_length);
    plan.budget.kv_cache = format;
    pack_bundle(&checkpoint, 0..neurons as u32, None, plan, quant, out)
}

fn runtime_of(
    golden: &Golden,
    quant: Format,
    format: CacheFormat,
    policy: Policy,
) -> SingleSession {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(golden, quant, format, &folder.path().join("bundle"));
    let threads = Threads::new(Isa::detect().unwrap(), 2).unwrap();
    let policy = Some(policy);
    // The files stay mapped after the folder is gone.
    SingleSession::new(Engine::new(bundle, Options { threads, policy }).unwrap()).unwrap()
}

/// SingleSession with the given format of activations.
fn runtime_in(golden: &Golden, activations: ActivationFormat) -> SingleSession {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("bundle");
    let bundle = bundle(golden, Format::Q8_0, CacheFormat::F16, &out);
    let threads = Threads::new(Isa::detect().unwrap(), 2).unwrap();
    let threads = threads.with_activations(activations);
    let policy = Some(Policy::Dense);
    SingleSession::new(Engine::new(bundle, Options { threads, policy }).unwrap()).unwrap()
}

fn runtime(golden: &Golden, format: CacheFormat) -> SingleSession {
    runtime_of(golden, Format::Q8_0, format, Policy::Dense)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits of `tokens` and of three greedy tokens after them, one after the other.
fn go_on(model: &mut SingleSession, tokens: &[u32]) -> Vec<u32> {
    let mut all = model.forward(tokens).unwrap();
    let size = model.config().vocabulary_size;
    for _ in 0..3 {
        let token = greedy_token(&all[all.len() - size..]);
        all.extend(model.forward(&[token]).unwrap());
    }
    bits(&all)
}

#[test]
fn narrow_caches_are_close_to_the_wide_one() {
    for name in MODELS {
        let golden = Golden::open(name);
        let prompt = golden.ids("p70.input_ids");
        let run = |format| {
            let mut model = runtime_of(&golden, Format::F32, format, Policy::Dense);
            model.forward(&prompt).unwrap()
        };
        let wide = run(CacheFormat::F32);
        let norm = |numbers: &mut dyn Iterator<Item = f32>| {
            numbers
                .map(|x| f64::from(x) * f64::from(x))
                .sum::<f64>()
                .sqrt()
        };
        for (format, allowed) in [(CacheFormat::F16, 1e-3), (CacheFormat::Q8_0, 5e-2)] {
            let narrow = run(format);
            let mut differences = wide.iter().zip(&narrow).map(|(wide, narrow)| wide - narrow);
            let off = norm(&mut differences) / norm(&mut wide.iter().copied());
            assert!(off <= allowed, "{name} {format}: {off}");
            assert!(off > 0.0, "{name} {format} is another format");
        }
    }
}

#[test]
fn what_was_cut_or_copied_goes_on_as_if_it_had_been_run() {
    for name in FEW {
        let golden = Golden::open(name);
        let prompt = golden.ids("p70.input_ids");
        for format in CacheFormat::ALL {
            let mut model = runtime(&golden, format);
            let fresh = go_on(&mut model, &prompt);
            for kept in [0, 1, 31, 32, 50, 69] {
                let what = format!("{name} {format} {kept}");
                let size = model.config().vocabulary_size;
                let rest = &fresh[kept * size..];
                // Another text that begins alike, cut back to what both have.
                let mut other = prompt.clone();
                other.iter_mut().skip(kept).for_each(|token| *token ^= 1);
                model.reset();
                model.forward(&other).unwrap();
                assert_eq!(model.session.keep_prefix(&prompt), kept, "{what}");
                assert_eq!(go_on(&mut model, &prompt[kept..]), rest, "{what} cut");
                // A copy of what both have, while the first goes on by itself.
                let mut copy = model.new_session(usize::MAX).unwrap();
                copy.copy_from(&model.session, kept).unwrap();
                let first = std::mem::replace(&mut model.session, copy);
                assert_eq!(first.position(), prompt.len() + 3);
                assert_eq!(model.position(), kept);
                assert_eq!(go_on(&mut model, &prompt[kept..]), rest, "{what} copied");
            }
        }
    }
}

#[test]
fn of_the_very_same_prompt_the_last_token_is_computed_again() {
    let golden = Golden::open(MODELS[0]);
    let prompt = golden.ids("p17.input_ids");
    let mut model = runtime(&golden, CacheFormat::F16);
    let fresh = bits(&model.forward_last(&prompt).unwrap());
    assert_eq!(model.session.keep_prefix(&prompt), prompt.len() - 1);
    let again = model.forward_last(&prompt[prompt.len() - 1..]).unwrap();
    assert_eq!(bits(&again), fresh);
    assert_eq!(model.session.keep_prefix(&[]), 0);
}

#[test]
fn a_prompt_cache_is_as_good_as_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    for name in FEW {
        let golden = Golden::open(name);
        let prompt = golden.ids("p70.input_ids");
        for format in CacheFormat::ALL {
            let mut model = runtime(&golden, format);
            let fresh = go_on(&mut model, &prompt);
            model.session.truncate(prompt.len());
            model.save_prompt_cache(&model.session, &path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let file = PromptCacheFile::open(&path).unwrap();
            assert_eq!((file.tokens(), file.format()), (&prompt[..], format));
            // Another run of the bundle, of prompts that share more and less of it.
            let mut model = runtime(&golden, format);
            model.forward(&prompt[3..20]).unwrap();
            for shared in [70, 69, 40, 32, 1, 0] {
                let mut other = prompt.clone();
                other.iter_mut().skip(shared).for_each(|token| *token ^= 1);
                let SingleSession { engine, session } = &mut model;
                let kept = engine
                    .load_prompt_cache(session, &path, &file, &other)
                    .unwrap();
                assert_eq!(kept, shared.min(prompt.len() - 1));
                assert_eq!(model.position(), kept);
                let cached = go_on(&mut model, &other[kept..]);
                let size = model.config().vocabulary_size;
                match shared {
                    70 => assert_eq!(cached, fresh[kept * size..], "{name} {format}"),
                    _ => {
                        model.reset();
                        let expected = go_on(&mut model, &other);
                        assert_eq!(cached, expected[kept * size..], "{name} {format} {shared}");
                    }
                }
            }
            // The same again gives the same bytes, whatever was there in between.
            model.reset();
            model.forward(&prompt).unwrap();
            model.save_prompt_cache(&model.session, &path).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name} {format}");
        }
    }
}

/// The message with which an engine refuses the prompt cache at `path`.
fn refusal(model: &mut SingleSession, path: &Path) -> String {
    let file = PromptCacheFile::open(path).unwrap();
    let SingleSession { engine, session } = model;
    let refused = engine.load_prompt_cache(session, path, &file, &[1, 2, 3]);
    refused.unwrap_err().to_string()
}

#[test]
fn a_prompt_cache_of_something_else_is_refused_by_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let golden = Golden::open(SPARSE_MODELS[0]);
    let mut model = runtime(&golden, CacheFormat::F16);
    model.forward(&golden.ids("p17.input_ids")).unwrap();
    model.save_prompt_cache(&model.session, &path).unwrap();

    let other = MODELS.iter().find(|name| **name != SPARSE_MODELS[0]);
    let other = Golden::open(other.unwrap());
    let neurons = model.config().ffn_size as u32;
    let layers = model.config().layer_count;
    let mut pruned = runtime(&golden, CacheFormat::F16);
    pruned
        .experiments()
        .keep_only(Some(&vec![(0..neurons / 2).collect(); layers]));
    let cases = [
        ("of other model:", runtime(&other, CacheFormat::F16)),
        (
            "of other activations: int8; expected f32",
            runtime_in(&golden, ActivationFormat::F32),
        ),
        ("of other thresholds or hot neurons:", pruned),
        (
            "of other bundle's weights:",
            runtime_of(&golden, Format::Q4_0, CacheFormat::F16, Policy::Dense),
        ),
        (
            "of other KV cache format: f16; expected q8_0",
            runtime(&golden, CacheFormat::Q8_0),
        ),
        (
            "of other policies: `dense` in",
            runtime_of(&golden, Format::Q8_0, CacheFormat::F16, Policy::Exact),
        ),
    ];
    for (what, mut model) in cases {
        let said = refusal(&mut model, &path);
        assert!(said.contains(what), "{said}");
        assert_eq!(model.position(), 0);
    }
}

#[test]
fn a_damaged_prompt_cache_is_an_error_wherever_the_damage_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let golden = Golden::open(MODELS[0]);
    let mut model = runtime(&golden, CacheFormat::Q8_0);
    model.forward(&golden.ids("p17.input_ids")).unwrap();
    model.save_prompt_cache(&model.session, &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let damaged = folder.path().join("damaged");
    let step = (whole.len() / 400).max(1);
    for index in (0..whole.len()).step_by(step).chain(0..64) {
        let mut bytes = whole.clone();
        bytes[index] ^= 1 << (index % 7);
        std::fs::write(&damaged, &bytes).unwrap();
        assert!(PromptCacheFile::open(&damaged).is_err(), "byte {index}");
    }
    for length in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&damaged, &whole[..length]).unwrap();
        assert!(PromptCacheFile::open(&damaged).is_err(), "{length} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_way_to_a_sequence_gives_its_logits(
        format in 0usize..3,
        first in proptest::collection::vec(0u32..100, 1..90),
        second in proptest::collection::vec(0u32..100, 1..40),
        kept in 0usize..90,
    ) {
        let golden = Golden::open(MODELS[0]);
        let mut model = runtime(&golden, CacheFormat::ALL[format]);
        let text = [&first[..kept.min(first.len())], &second].concat();
        prop_assume!(text.len().max(first.len()) <= model.context_limit());
        let fresh = bits(&model.forward_last(&text).unwrap());
        model.reset();
        model.forward_last(&first).unwrap();
        let taken = model.session.keep_prefix(&text);
        prop_assert!(taken >= kept.min(first.len()));
        prop_assert_eq!(bits(&model.forward_last(&text[taken..]).unwrap()), fresh);
    }
}
