//! Sequences decoded together: each has the bits that it has alone, whatever the others are.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::{collections::BTreeMap, path::Path};

use golden::Golden;
use packing::pack_bundle;
use powerinfer_artifact::{
    matrix_planes::insert_matrix,
    plan::{InputThresholds, Plan, Policy, Score, Threshold},
    predictor_file::{
        self, PredictorFile, PredictorSummary, WEIGHTS_SETTING, score_names, tensor_name,
    },
    random::Random,
    tensor_file::Dtype,
    tensor_writer::TensorSource,
};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LanguageModel};
use powerinfer_runtime::{
    Engine, Generation, Options, Passes, RuntimeError, Sampler, SamplingSettings, Session,
    SingleSession, Speculation, SpeculationCounts, StopConditions, StopReason, Text, Threads,
    Wanted,
};
use powerinfer_tensor::{Format, OwnedMatrix};
use predictor_files::{insert_signs, summary, write_predictors};
use proptest::prelude::*;

/// Learned, rotary and linear positions, gated and plain FFNs, pre-norm, post-norm and parallel blocks, windows,
/// with and without zeros.
const MODELS: [&str; 7] = [
    "llama-relu-gqa",
    "llama-silu",
    "falcon-rw-alibi",
    "opt-preln",
    "opt-postln-proj",
    "phi",
    "mistral-swa-relu",
];

const RANK: usize = 40;

/// Random predictors that have whatever policies need; of every token they predict others.
fn predictors(checkpoint: &Checkpoint, weights: Format, folder: &Path) -> PredictorFile {
    let config = checkpoint.config();
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let mut random = Random::new(5);
    let mut normal =
        |count: usize| -> Vec<f32> { (0..count).map(|_| random.normal() as f32).collect() };
    let mut tensors = BTreeMap::new();
    let mut summaries = Vec::new();
    let matrices: Vec<[OwnedMatrix; 3]> = (0..config.layer_count)
        .map(|_| {
            let mut matrix = |format, rows: usize, columns: usize| {
                powerinfer_tensor::pack(format, rows, columns, &normal(rows * columns))
            };
            [
                matrix(weights, RANK, hidden),
                matrix(weights, neurons, RANK),
                matrix(predictor_file::BIAS, neurons, 1),
            ]
        })
        .collect();
    for (layer, matrices) in matrices.iter().enumerate() {
        for (part, matrix) in ["a", "b", "bias"].into_iter().zip(matrices) {
            insert_matrix(&mut tensors, &tensor_name(layer, part), matrix);
        }
        let lengths = [neurons, neurons, neurons, hidden];
        for (name, length) in score_names(layer).into_iter().zip(lengths) {
            let values = normal(length);
            let bytes = values.iter().flat_map(|value| value.abs().to_le_bytes());
            let source = TensorSource::owned(Dtype::F32, vec![length], bytes.collect());
            tensors.insert(name, source);
        }
        insert_signs(&mut tensors, checkpoint, layer);
        summaries.push(PredictorSummary {
            rank: RANK,
            is_linear: layer % 2 == 1,
            ..summary(layer, hidden as u32 / 2 + 1, Score::Contribution, true)
        });
    }
    let settings = [(WEIGHTS_SETTING, weights.name())];
    write_predictors(checkpoint, &settings, &summaries, &tensors, folder)
}

/// Model, formats and threads of a run.
#[derive(Debug, Clone, Copy)]
struct Case {
    model: &'static str,
    quant: Format,
    /// None follows the plan, which leaves inputs of projections out.
    policy: Option<Policy>,
    threads: usize,
}

fn runtime(case: Case) -> SingleSession {
    let golden = Golden::open(case.model);
    let checkpoint = golden.checkpoint();
    let config = checkpoint.config();
    let folder = tempfile::tempdir().unwrap();
    let weights = if case.quant.is_quantised() {
        Format::Q8_0
    } else {
        Format::F32
    };
    let predictors = predictors(&checkpoint, weights, folder.path());
    let (count, neurons) = (config.layer_count, config.ffn_size);
    let policy = case.policy.unwrap_or(Policy::Dense);
    let mut plan = Plan::unplaced(count, neurons, policy, config.context_length);
    for layer in &mut plan.layers {
        layer.hot_count = 50;
        layer.threshold = Some(Threshold {
            score: Score::Contribution,
            centred: true,
            value: 0.3,
            error: 0.1,
        });
        layer.input_thresholds = case.policy.is_none().then_some(InputThresholds {
            share: 0.2,
            attention: 0.2,
            output: 0.001,
            ffn: Some(0.2),
        });
    }
    plan.totals.hot_count = count as u64 * 50;
    let order = (0..neurons as u32).rev();
    let out = folder.path().join("bundle");
    let bundle = pack_bundle(
        &checkpoint,
        order,
        Some(&predictors),
        plan,
        case.quant,
        &out,
    );
    let threads = Threads::new(Isa::detect().unwrap(), case.threads).unwrap();
    let policy = case.policy;
    // The files stay mapped after the folder is gone.
    SingleSession::new(Engine::new(bundle, Options { threads, policy }).unwrap()).unwrap()
}

/// Sessions for the whole context.
fn new_sessions(model: &mut Engine, count: usize) -> Vec<Session> {
    let new = |_| model.new_session(usize::MAX).unwrap();
    (0..count).map(new).collect()
}

/// Sessions of these lengths, each of which begins with so many tokens of the one before.
fn sessions(
    model: &mut SingleSession,
    beginnings: &[(usize, usize)],
    random: &mut Random,
) -> Vec<Session> {
    let vocabulary = model.config().vocabulary_size;
    let mut all = new_sessions(model, beginnings.len());
    for (index, (shared, own)) in beginnings.iter().enumerate() {
        let (before, rest) = all.split_at_mut(index);
        if let Some(before) = before.last() {
            let kept = before.position().min(*shared);
            rest[0].copy_from(before, kept).unwrap();
        }
        let tokens: Vec<u32> = (0..*own).map(|_| random.below(vocabulary) as u32).collect();
        if !tokens.is_empty() {
            model.prefill(&mut rest[0], &tokens, Wanted::None).unwrap();
        }
    }
    all
}

/// Logits of one token of each session.
fn decode(
    model: &mut Engine,
    sessions: &mut [Session],
    tokens: &[u32],
) -> Result<Vec<f32>, RuntimeError> {
    let batch = sessions.iter_mut().zip(tokens.iter().copied());
    Ok(model.decode(&mut batch.collect::<Vec<_>>())?.to_vec())
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn each_has_the_bits_that_it_has_alone(
        model in prop::sample::select(&MODELS[..]),
        quant in prop::sample::select(vec![Format::F32, Format::Bf16, Format::Q8_0, Format::Q4_0]),
        policy in prop::sample::select(vec![
            None,
            Some(Policy::Dense),
            Some(Policy::Exact),
            Some(Policy::Predicted),
            Some(Policy::SignBit),
            Some(Policy::Threshold),
        ]),
        threads in 1usize..4,
        beginnings in prop::collection::vec((0usize..40, 0usize..40), 1..20),
        piece in 0usize..20,
        seed: u64,
    ) {
        const STEPS: usize = 2;
        let mut model = runtime(Case { model, quant, policy, threads });
        let mut random = Random::new(seed);
        let room = model.context_limit() - STEPS - piece;
        let beginnings: Vec<_> = beginnings
            .into_iter()
            .map(|(shared, own)| (shared.min(room / 2), own.min(room / 2)))
            .collect();
        let mut batch = sessions(&mut model, &beginnings, &mut random);
        let vocabulary = model.config().vocabulary_size;
        let mut alone = new_sessions(&mut model, batch.len());
        for (alone, sequence) in alone.iter_mut().zip(&batch) {
            alone.copy_from(sequence, sequence.position()).unwrap();
        }
        for _ in 0..STEPS {
            let tokens: Vec<u32> = batch.iter().map(|_| random.below(vocabulary) as u32).collect();
            let together = decode(&mut model, &mut batch, &tokens).unwrap();
            prop_assert_eq!(together.len(), batch.len() * vocabulary);
            for ((token, together), alone) in
                tokens.iter().zip(together.chunks_exact(vocabulary)).zip(&mut alone)
            {
                let logits = model.prefill(alone, &[*token], Wanted::Last).unwrap();
                prop_assert!(bits(together) == bits(logits));
            }
        }
        // With a piece of a prompt, in the last sequence.
        let (decoded, count) = (batch.len() - 1, batch.len() + piece);
        let tokens: Vec<u32> = (0..count).map(|_| random.below(vocabulary) as u32).collect();
        let wanted = [Wanted::None, Wanted::Last, Wanted::All][piece % 3];
        let mut all: Vec<_> = batch.iter_mut().collect();
        model.pass(&mut all, &tokens, wanted).unwrap();
        let together = model.logits().to_vec();
        let mut separate = Vec::new();
        for (index, alone) in alone.iter_mut().enumerate() {
            let (own, wanted) = if index == decoded { (&tokens[index..], wanted) } else { (&tokens[index..=index], Wanted::Last) };
            separate.extend_from_slice(model.prefill(alone, own, wanted).unwrap());
        }
        prop_assert!(bits(&together) == bits(&separate));
        for (one, other) in batch.iter().zip(&alone) {
            prop_assert_eq!(one.tokens(), other.tokens());
        }
    }
}

/// A generated text.
#[derive(Debug, PartialEq)]
struct Generated {
    tokens: Vec<u32>,
    reason: Option<StopReason>,
    /// Tokens of the session at the end.
    session: Vec<u32>,
    /// Logits of one more token.
    logits: Vec<u32>,
}

fn generated(
    model: &mut SingleSession,
    prompt: &[u32],
    settings: SamplingSettings,
    stop: StopConditions,
    speculates: bool,
) -> (Generated, SpeculationCounts) {
    model.reset();
    let mut text = Text::new(Sampler::new(settings).unwrap(), stop);
    if speculates {
        // So that many tokens are proposed.
        text.speculate(Speculation::with_cost(prompt, 0.05));
    }
    let SingleSession { engine, session } = model;
    let (mut generation, _) =
        Generation::start(engine, session, &mut text, prompt, || false).unwrap();
    let tokens = generation.by_ref().map(|token| token.unwrap().id).collect();
    generation.finish().unwrap();
    let counts = text.speculation().map(Speculation::counts);
    let tokens_of_session = model.session.tokens().to_vec();
    let logits = if model.position() < model.context_limit() {
        bits(&model.forward_last(&[1]).unwrap())
    } else {
        Vec::new()
    };
    let generated = Generated {
        tokens,
        reason: text.stop_reason(),
        session: tokens_of_session,
        logits,
    };
    (generated, counts.unwrap_or_default())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn speculation_changes_no_token(
        model in prop::sample::select(&MODELS[..]),
        quant in prop::sample::select(vec![Format::F32, Format::Q4_0]),
        policy in prop::sample::select(vec![
            Some(Policy::Dense),
            Some(Policy::Exact),
            Some(Policy::Predicted),
            Some(Policy::Threshold),
        ]),
        prompt in prop::collection::vec(0u32..4, 1..30),
        (temperature, repeat_penalty) in prop::sample::select(vec![(0.0, 1.0), (0.05, 1.0), (0.5, 1.1)]),
        seed: u64,
        stop_token in 0u32..200,
        max_tokens in 0usize..60,
    ) {
        let mut model = runtime(Case { model, quant, policy, threads: 2 });
        let stop = StopConditions {
            max_tokens,
            stop_tokens: [stop_token].into(),
            vocabulary: model.config().vocabulary_size - 3,
        };
        let settings = SamplingSettings { temperature, repeat_penalty, seed, ..SamplingSettings::default() };
        let (plain, _) = generated(&mut model, &prompt, settings.clone(), stop.clone(), false);
        let (speculative, _) = generated(&mut model, &prompt, settings, stop, true);
        prop_assert_eq!(plain, speculative);
    }
}

#[test]
fn repeated_text_is_accepted_and_ends_as_without_speculation() {
    let mut model = runtime(Case {
        model: "llama-relu-gqa",
        quant: Format::F32,
        policy: Some(Policy::Dense),
        threads: 1,
    });
    let vocabulary = model.config().vocabulary_size;
    let context = model.context_limit();
    let greedy = SamplingSettings::default;
    let mut of = |max_tokens, stop_tokens: &[u32], speculates| {
        let stop = StopConditions {
            max_tokens,
            stop_tokens: stop_tokens.into(),
            vocabulary,
        };
        generated(&mut model, &[3, 5, 3, 5], greedy(), stop, speculates)
    };
    // To the end of the context.
    let (plain, _) = of(usize::MAX, &[], false);
    let (speculative, counts) = of(usize::MAX, &[], true);
    assert_eq!(plain, speculative);
    assert_eq!(plain.reason, Some(StopReason::ContextFull));
    assert_eq!(plain.session.len(), context);
    assert!(counts.accepted > 0 && counts.passes < plain.tokens.len() as u64);
    // Each token of the text once as the one that ends it, by its limit and by its name.
    for (index, token) in plain.tokens.iter().enumerate() {
        for (most, ends) in [(index, &[][..]), (usize::MAX, &[*token])] {
            assert_eq!(of(most, ends, false).0, of(most, ends, true).0, "{index}");
        }
    }
}

#[test]
fn more_sequences_than_go_through_a_layer_together_are_decoded_too() {
    let mut model = runtime(Case {
        model: "llama-relu-gqa",
        quant: Format::Q4_0,
        policy: Some(Policy::Exact),
        threads: 2,
    });
    let mut batch = new_sessions(&mut model, 70);
    let vocabulary = model.config().vocabulary_size;
    let tokens: Vec<u32> = (0..70).map(|token| token % vocabulary as u32).collect();
    let together = decode(&mut model, &mut batch, &tokens).unwrap();
    assert!(batch.iter().all(|sequence| sequence.position() == 1));
    for (token, together) in tokens.iter().zip(together.chunks_exact(vocabulary)) {
        model.reset();
        let logits = model.forward_last(&[*token]).unwrap();
        assert_eq!(bits(together), bits(&logits), "{token}");
    }
}

#[test]
fn what_cannot_be_decoded_names_its_sequence_and_changes_nothing() {
    let mut model = runtime(Case {
        model: "llama-relu-gqa",
        quant: Format::F32,
        policy: Some(Policy::Dense),
        threads: 1,
    });
    let mut random = Random::new(1);
    let limit = model.context_limit();
    let mut batch = sessions(&mut model, &[(0, 3), (0, limit), (2, 1)], &mut random);
    let positions = |batch: &[Session]| batch.iter().map(Session::position).collect::<Vec<_>>();
    let before = positions(&batch);
    let mut refused = |batch: &mut [Session], tokens: &[u32]| {
        let error = decode(&mut model, batch, tokens).unwrap_err();
        error.to_string()
    };
    let full = refused(&mut batch, &[0, 0, 0]);
    assert!(
        full.contains("session 1") && full.contains(&limit.to_string()),
        "{full}"
    );
    let outside = refused(&mut batch, &[0, 0, 1 << 20]);
    assert!(outside.contains("session 1"), "{outside}");
    let outside = refused(&mut batch[2..], &[1 << 20]);
    assert!(outside.contains("1048576"), "{outside}");
    let nothing = refused(&mut [], &[]);
    assert!(nothing.contains("0 sessions"), "{nothing}");
    for (sessions, tokens) in [(0, 1), (3, 2)] {
        let mut sessions: Vec<_> = batch[..sessions].iter_mut().collect();
        let result = model.pass(&mut sessions, &vec![0; tokens], Wanted::Last);
        assert!(
            matches!(result, Err(RuntimeError::BatchSize { .. })),
            "{result:?}"
        );
    }
    assert_eq!(positions(&batch), before);
}
