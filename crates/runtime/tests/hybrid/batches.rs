//! Tokens that run together, of several sequences or of one, have the bits that each has alone.

use powerinfer_artifact::{
    plan::Policy,
    predictor_file::{PredictorFile, PredictorInput},
};
use powerinfer_emulator::Order;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{Passes, Session, SingleSession, Wanted};
use powerinfer_tensor::{CacheFormat, Format};

use crate::{
    case::Case,
    placement::{HALF, PLACEMENTS},
    predictors::write_random_networks,
};

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Sequences of the first tokens of `prompt`: of none, one, two and so on.
fn sequences(model: &mut SingleSession, prompt: &[u32], count: usize) -> Vec<Session> {
    let new = |_| model.new_session(prompt.len() + 8).unwrap();
    let mut all: Vec<Session> = (0..count).map(new).collect();
    for (length, sequence) in all.iter_mut().enumerate() {
        let wanted = Wanted::None;
        for token in &prompt[..length] {
            let token = std::slice::from_ref(token);
            model.prefill(sequence, token, wanted).unwrap();
        }
    }
    all
}

/// Logits of one token of each sequence but the last, and of the last one of the others, which are of the last sequence.
fn pass(model: &mut SingleSession, sequences: &mut [Session], tokens: &[u32]) -> Vec<f32> {
    let mut sequences: Vec<_> = sequences.iter_mut().collect();
    model.pass(&mut sequences, tokens, Wanted::Last).unwrap();
    model.logits().to_vec()
}

/// Logits of one more token of each, one after the other.
fn alone(model: &mut SingleSession, sequences: &mut [Session], tokens: &[u32]) -> Vec<f32> {
    let each = sequences.iter_mut().zip(tokens.chunks(1));
    each.flat_map(|(sequence, token)| {
        model
            .prefill(sequence, token, Wanted::Last)
            .unwrap()
            .to_vec()
    })
    .collect()
}

fn predictors(case: &Case) -> PredictorFile {
    let folder = case.folder.path();
    write_random_networks(
        &case.checkpoint,
        PredictorInput::Normed,
        Format::Q8_0,
        folder,
    )
}

#[test]
fn a_batch_has_the_bits_of_its_tokens_alone() {
    let combinations = [
        (
            "llama-relu-gqa",
            Policy::Exact,
            Format::Q4_0,
            CacheFormat::F16,
        ),
        (
            "falcon-new-relu",
            Policy::Predicted,
            Format::Q8_0,
            CacheFormat::F32,
        ),
        (
            "opt-postln-proj",
            Policy::Dense,
            Format::F16,
            CacheFormat::Q8_0,
        ),
    ];
    for (index, (name, policy, quant, cache)) in combinations.into_iter().enumerate() {
        let mut case = Case::open(name);
        case.predictors = Some(predictors(&case));
        (case.policy, case.quant, case.kv_cache) = (policy, quant, cache);
        let order = Order::Shuffled(index as u16);
        let Some(mut model) = case.on_device(order, &PLACEMENTS[index..]) else {
            return;
        };
        let what = format!("{name} {policy} {quant}");
        assert_eq!(model.decode_batch_size(), 8, "{what}");
        // More sequences than a pass has.
        let count = 10;
        let mut together = sequences(&mut model, &case.prompt, count);
        let mut separate = sequences(&mut model, &case.prompt, count);
        for step in 0..2 {
            let tokens: Vec<u32> = (0..count)
                .map(|index| case.prompt[(index + step) % 7])
                .collect();
            let found = pass(&mut model, &mut together, &tokens);
            let want = alone(&mut model, &mut separate, &tokens);
            assert!(bits(&found) == bits(&want), "{what}, step {step}");
        }
        // Proposed tokens of one sequence, which are verified together.
        let (first, second) = (&mut together[3], &mut separate[3]);
        let proposed = &case.prompt[..5];
        let found = model
            .prefill(first, proposed, Wanted::All)
            .unwrap()
            .to_vec();
        let one_by_one = proposed.chunks(1);
        let want: Vec<f32> = one_by_one
            .flat_map(|token| model.prefill(second, token, Wanted::Last).unwrap().to_vec())
            .collect();
        assert!(bits(&found) == bits(&want), "{what}, proposed");
        // A piece of a prompt beside them, short and long.
        for piece in [2, 9] {
            let mut tokens = vec![5; 4];
            tokens.extend(&case.prompt[..piece]);
            let wanted = Wanted::Last;
            let found = pass(&mut model, &mut together[..5], &tokens);
            let mut want = alone(&mut model, &mut separate[..4], &tokens[..4]);
            let last = &mut separate[4];
            want.extend_from_slice(model.prefill(last, &tokens[4..], wanted).unwrap());
            assert!(bits(&found) == bits(&want), "{what}, a piece of {piece}");
        }
    }
}

#[test]
fn shorter_sequences_have_the_same_bits_and_their_own_limit() {
    let case = Case::open("llama-relu-gqa");
    let Some(mut model) = case.on_device(Order::Forward, &[HALF]) else {
        return;
    };
    let want = model.forward(&case.prompt[..4]).unwrap();
    let mut short = model.new_session(4).unwrap();
    let found = model.prefill(&mut short, &case.prompt[..4], Wanted::All);
    assert!(bits(found.unwrap()) == bits(&want));
    let error = model.prefill(&mut short, &case.prompt[4..5], Wanted::Last);
    assert!(
        error.unwrap_err().to_string().contains("4"),
        "the context is full"
    );
    let [on_host, on_device] = model.session_bytes(4);
    assert_eq!((on_host, on_device > 0), (0, true));
}
