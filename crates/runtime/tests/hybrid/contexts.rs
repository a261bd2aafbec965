//! Sequences with different contexts: one after the other through one graph, in a batch, with a prompt, and copied.

use std::sync::Arc;

use powerinfer_emulator::{Order, test_emulator};
use powerinfer_runtime::{Passes, Session, SingleSession, Wanted};
use powerinfer_tensor::CacheFormat;

use crate::{
    assert_near,
    case::Case,
    placement::{ALL, HALF, PLACEMENTS},
};

/// Contexts of two sequences: the golden prompt fits each except for its last token.
const PAIRS: [[usize; 2]; 4] = [[17, 16], [16, 17], [256, 16], [16, 256]];

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits of `tokens`, each decoded in a separate pass.
fn decode(model: &mut SingleSession, sequence: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let passes = tokens.chunks(1);
    passes
        .flat_map(|token| {
            model
                .prefill(sequence, token, Wanted::Last)
                .unwrap()
                .to_vec()
        })
        .collect()
}

/// Logits of one token of each sequence but the last, and of the last one of the others, which are of the last sequence.
fn pass(model: &mut SingleSession, sequences: &mut [Session], tokens: &[u32]) -> Vec<f32> {
    let mut sequences: Vec<_> = sequences.iter_mut().collect();
    model.pass(&mut sequences, tokens, Wanted::Last).unwrap();
    model.logits().to_vec()
}

/// New sequences of the given contexts, with the first tokens of `prompt`.
fn sequences(model: &mut SingleSession, contexts: &[usize], prompt: &[u32]) -> Vec<Session> {
    let new = contexts.iter().map(|context| {
        let mut sequence = model.new_session(*context).unwrap();
        decode(model, &mut sequence, prompt);
        sequence
    });
    new.collect()
}

#[test]
fn a_graph_runs_sequences_of_any_context() {
    for (format, pairs) in [
        (CacheFormat::F32, &PAIRS[..]),
        (CacheFormat::F16, &PAIRS[1..2]),
        (CacheFormat::Q8_0, &PAIRS[3..]),
    ] {
        let mut case = Case::open("llama-relu-gqa");
        case.kv_cache = format;
        for (index, contexts) in pairs.iter().enumerate() {
            // Forwards and in turn; all on the device and half of the neurons.
            let placement = [HALF, ALL][index % 2];
            let order = Order::Shuffled(index as u16);
            let Some(mut model) = case.on_device(order, &[placement]) else {
                return;
            };
            let mut host = case.on_host(&[placement]);
            let run = |model: &mut SingleSession| -> Vec<f32> {
                let mut pair = contexts.map(|context| model.new_session(context).unwrap());
                // Together, the two parts fill the smallest context.
                let (first, second) = case.prompt[..16].split_at(13);
                let mut logits = Vec::new();
                for part in [first, second] {
                    for sequence in &mut pair {
                        let (prompt, tokens) = part.split_at(part.len() - 3);
                        model.prefill(sequence, prompt, Wanted::None).unwrap();
                        logits.extend(decode(model, sequence, tokens));
                    }
                }
                logits
            };
            let (want, found) = (run(&mut host), run(&mut model));
            let what = format!("{format} {contexts:?}");
            assert_near(&found, &want, 1e-4, &what);
            assert_eq!(
                (model.graph_failure(), model.observers().graph_retries()),
                (None, 0)
            );
        }
    }
}

#[test]
fn contexts_of_a_batch_may_differ() {
    for format in CacheFormat::ALL {
        let mut case = Case::open("llama-relu-gqa");
        case.kv_cache = format;
        let Some(mut model) = case.on_device(Order::Shuffled(3), &PLACEMENTS) else {
            return;
        };
        let contexts = [17, 64, 12, 200];
        let mut together = sequences(&mut model, &contexts, &case.prompt[..1]);
        let mut alone = sequences(&mut model, &contexts, &case.prompt[..1]);
        for token in &case.prompt[3..5] {
            let found = pass(&mut model, &mut together, &[*token; 4]);
            let want: Vec<f32> = (alone.iter_mut())
                .flat_map(|sequence| decode(&mut model, sequence, &[*token]))
                .collect();
            assert!(bits(&found) == bits(&want), "{format}");
        }
        // Beside a piece of a prompt of another context, in one pass and in a separate pass.
        for piece in [2, 4] {
            let wanted = Wanted::Last;
            let mut tokens = vec![5; 3];
            tokens.extend(&case.prompt[..piece]);
            let found = pass(&mut model, &mut together, &tokens);
            let mut want: Vec<f32> = (alone[..3].iter_mut())
                .flat_map(|sequence| decode(&mut model, sequence, &[5]))
                .collect();
            let last = model.prefill(&mut alone[3], &tokens[3..], wanted);
            want.extend_from_slice(last.unwrap());
            assert!(bits(&found) == bits(&want), "{format} {piece}");
        }
    }
}

#[test]
fn sequences_are_copied_to_other_contexts() {
    let mut case = Case::open("llama-relu-gqa");
    for format in CacheFormat::ALL {
        case.kv_cache = format;
        let placements = [ALL, HALF, PLACEMENTS[4]];
        let on_device = case.on_device(Order::Forward, &placements);
        let runtimes = on_device.into_iter().chain([case.on_host(&placements)]);
        for mut model in runtimes {
            let (start, rest) = case.prompt[..9].split_at(7);
            for [from, to] in [[17, 200], [40, 10]] {
                let mut source = model.new_session(from).unwrap();
                decode(&mut model, &mut source, start);
                let mut copy = model.new_session(to).unwrap();
                decode(&mut model, &mut copy, &case.prompt[10..12]);
                copy.copy_from(&source, 7).unwrap();
                let found = decode(&mut model, &mut copy, rest);
                let want = decode(&mut model, &mut source, rest);
                assert!(bits(&found) == bits(&want), "{format} {from} to {to}");
            }
            let source = sequences(&mut model, &[16], start).remove(0);
            let mut short = sequences(&mut model, &[5], &case.prompt[..2]).remove(0);
            let error = short.copy_from(&source, 6).unwrap_err().to_string();
            assert!(error.contains("6") && error.contains("5"), "{error}");
            assert_eq!(short.tokens(), &case.prompt[..2], "as before");
        }
    }
}

#[test]
fn sequences_of_another_runtime_are_refused() {
    let case = Case::open("llama-relu-gqa");
    // Two devices, also if there is a single GPU.
    let emulators = [(); 2].map(|()| test_emulator(2, Order::Forward));
    let [Some(device), Some(other)] = emulators else {
        return;
    };
    let [mut device, mut other] = [device, other].map(|it| case.with(Arc::new(it), &[HALF]));
    let mut host = case.on_host(&[HALF]);
    let foreign = [&mut host, &mut other, &mut device].map(|model| model.new_session(16).unwrap());
    for (model, mut foreign) in [&mut device, &mut host, &mut other]
        .into_iter()
        .zip(foreign)
    {
        let error = model.prefill(&mut foreign, &[1], Wanted::Last);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("another model"), "{error}");
        let mut own = model.new_session(16).unwrap();
        let error = own.copy_from(&foreign, 0).unwrap_err().to_string();
        assert!(error.contains("another model"), "{error}");
    }
}
