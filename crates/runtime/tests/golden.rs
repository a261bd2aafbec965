//! The runtime against the goldens and against the reference engine, on bundles packed here.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
mod golden;
#[path = "support/packing.rs"]
mod packing;
#[path = "support/predictor_files.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod predictor_files;

use std::path::Path;

use candle_core::{Device, Tensor};
use golden::{FAMILIES, Golden, MIXTURES, MODELS, PROMPTS, SPARSE_MODELS, floats};
use packing::pack_bundle;
use powerinfer_artifact::{
    TensorFile,
    plan::{Plan, Policy},
    predictor_file::{PredictorFile, PredictorInput},
    random::Random,
};
use powerinfer_bundle::{Bundle, StoredWeights, neuron_bytes};
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, LanguageModel, LayerWeight, Weight, greedy_token};
use powerinfer_reference::{FfnObservation, FfnObserver, ReferenceModel};
use powerinfer_runtime::{Engine, Options, SingleSession, Threads};
use powerinfer_tensor::Format;
use predictor_files::{Network, write_networks};

/// A plan that puts the first `hot` neurons of every layer on the GPU and leaves out all else.
fn plan(checkpoint: &Checkpoint, hot: usize) -> Plan {
    let config = checkpoint.config();
    let hot = hot.min(config.ffn_size);
    let mut plan = Plan::unplaced(
        config.layer_count,
        config.ffn_size,
        Policy::Dense,
        config.context_length,
    );
    plan.layers
        .iter_mut()
        .for_each(|layer| layer.hot_count = hot);
    plan.totals.hot_count = (config.layer_count * hot) as u64;
    plan
}

/// Packs with neurons in reverse order, so that a permutation left out shows.
fn bundle(golden: &Golden, quant: Format, hot: usize, out: &Path) -> Bundle {
    bundle_with(golden, quant, hot, None, out)
}

fn bundle_with(
    golden: &Golden,
    quant: Format,
    hot: usize,
    predictors: Option<&PredictorFile>,
    out: &Path,
) -> Bundle {
    let checkpoint = golden.checkpoint();
    let order = (0..checkpoint.config().ffn_size as u32).rev();
    let plan = plan(&checkpoint, hot);
    pack_bundle(&checkpoint, order, predictors, plan, quant, out)
}

fn runtime(
    golden: &Golden,
    quant: Format,
    hot: usize,
    policy: Policy,
    threads: usize,
) -> SingleSession {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(golden, quant, hot, &folder.path().join("bundle"));
    let threads = Threads::new(Isa::detect().unwrap(), threads).unwrap();
    // The files stay mapped after the folder is gone.
    let policy = Some(policy);
    let engine = Engine::new(bundle, Options { threads, policy }).unwrap();
    SingleSession::new(engine).unwrap()
}

#[test]
fn logits_are_those_of_the_standard_implementation() {
    for (name, golden) in Golden::present(&[&MODELS[..], &FAMILIES, &MIXTURES].concat()) {
        for policy in [Policy::Dense, Policy::Exact] {
            let mut model = runtime(&golden, Format::F32, 70, policy, 2);
            for prompt in PROMPTS {
                model.reset();
                let logits = model
                    .forward(&golden.ids(&format!("{prompt}.input_ids")))
                    .unwrap();
                let what = format!("{name} {prompt} {policy}");
                golden.assert_logits(&logits, prompt, &what);
            }
        }
    }
}

/// Greedy tokens after `prompt`, with the logits they were taken from.
fn greedy(model: &mut SingleSession, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<f32>) {
    model.reset();
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    let mut logits = model.forward_last(prompt).unwrap();
    for _ in 0..count {
        let token = greedy_token(&logits);
        tokens.push(token);
        all.extend(&logits);
        logits = model.forward_last(&[token]).unwrap();
    }
    (tokens, all)
}

#[test]
fn greedy_ids_are_exact() {
    for (name, golden) in Golden::present(&[&MODELS[..], &FAMILIES, &MIXTURES].concat()) {
        let mut model = runtime(&golden, Format::F32, 100, Policy::Exact, 1);
        for prompt in PROMPTS {
            let expected = golden.ids(&format!("{prompt}.greedy_ids"));
            let (tokens, logits) = greedy(
                &mut model,
                &golden.ids(&format!("{prompt}.input_ids")),
                expected.len(),
            );
            assert_eq!(tokens, expected, "{name} {prompt}");
            if prompt == "p17" {
                let want = golden.floats("p17.greedy_logits"); // of the first tokens
                golden.assert_close(&logits[..want.len()], &want, &name);
            }
        }
    }
}

/// Predictors that ignore their input: a neuron's bias alone says whether it is computed.
fn fixed_predictors(golden: &Golden, masks: &[Vec<bool>], folder: &Path) -> PredictorFile {
    let checkpoint = golden.checkpoint();
    let networks: Vec<Network> = masks
        .iter()
        .map(|mask| Network {
            rank: 32,
            a: vec![0.5; 32 * checkpoint.config().hidden_size],
            b: vec![0.0; 32 * mask.len()],
            bias: mask
                .iter()
                .map(|keep| if *keep { 1.0 } else { -1.0 })
                .collect(),
        })
        .collect();
    let input = PredictorInput::Normed;
    write_networks(&checkpoint, &networks, Format::Q8_0, input, folder)
}

#[test]
fn masked_logits_are_those_of_the_standard_implementation() {
    for name in SPARSE_MODELS {
        let golden = Golden::open(name);
        let layers = golden.checkpoint().config().layer_count;
        let sparse = TensorFile::open(&golden.folder.join("sparse.safetensors")).unwrap();
        let static30: Vec<Vec<bool>> = (0..layers)
            .map(|layer| {
                let view = sparse
                    .find(&format!("static30.layers.{layer}.mask"))
                    .unwrap();
                view.bytes.iter().map(|keep| *keep == 1).collect()
            })
            .collect();
        let none = static30
            .iter()
            .map(|mask| vec![false; mask.len()])
            .collect();
        for (masks, cases) in [
            (
                static30,
                &["p17.static30.logits", "p70.static30.logits"][..],
            ),
            (none, &["p17.none.logits"]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let predictors = fixed_predictors(&golden, &masks, folder.path());
            let out = folder.path().join("bundle");
            let bundle = bundle_with(&golden, Format::F32, 50, Some(&predictors), &out);
            let options = Options {
                threads: Threads::new(Isa::detect().unwrap(), 2).unwrap(),
                policy: Some(Policy::Predicted),
            };
            let mut model = SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap();
            for case in cases {
                model.reset();
                let prompt = format!("{}.input_ids", case.split_once('.').unwrap().0);
                let logits = model.forward(&golden.ids(&prompt)).unwrap();
                golden.assert_close(&logits, &floats(&sparse, case), &format!("{name} {case}"));
            }
            // The same neurons kept by name; places of a bundle are those of its order, which is turned round.
            let places = |mask: &Vec<bool>| -> Vec<u32> {
                let kept = (0..).zip(mask.iter().rev()).filter(|(_, keep)| **keep);
                kept.map(|(place, _)| place).collect()
            };
            let kept: Vec<Vec<u32>> = masks.iter().map(places).collect();
            let bundle = bundle_with(&golden, Format::F32, 50, None, &folder.path().join("kept"));
            let options = Options {
                threads: Threads::new(Isa::detect().unwrap(), 2).unwrap(),
                policy: Some(Policy::Dense),
            };
            let mut model = SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap();
            let prompt = golden.ids("p17.input_ids");
            let dense = model.forward(&prompt).unwrap();
            model.experiments().keep_only(Some(&kept));
            model.reset();
            let logits = model.forward(&prompt).unwrap();
            let want = floats(&sparse, cases[0]);
            golden.assert_close(&logits, &want, &format!("{name} {}, kept", cases[0]));
            model.experiments().keep_only(None);
            model.reset();
            assert_eq!(model.forward(&prompt).unwrap(), dense);
        }
    }
}

/// Masks each FFN of the reference engine with what predictors say of the tokens in it.
struct Predicting<'a> {
    networks: &'a [Network],
    input: PredictorInput,
}

impl FfnObserver for Predicting<'_> {
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        let network = &self.networks[observation.layer];
        let x = match self.input {
            PredictorInput::Normed => observation.input,
            PredictorInput::Residual => observation.residual,
        };
        let matrix = |values: &[f32], rows: usize| {
            Tensor::from_slice(values, (rows, values.len() / rows), &Device::Cpu)
        };
        let a = matrix(&network.a, network.rank)?;
        let b = matrix(&network.b, network.bias.len())?;
        let logits = x.matmul(&a.t()?)?.relu()?.matmul(&b.t()?)?;
        let bias = Tensor::from_slice(&network.bias, network.bias.len(), &Device::Cpu)?;
        let keep = logits.broadcast_add(&bias)?.ge(0.0)?;
        let keep = keep.to_dtype(observation.product.dtype())?;
        (observation.product * keep).map(Some)
    }
}

#[test]
fn predictors_see_what_the_file_says_they_see() {
    // One of each kind of block.
    for name in [
        "llama-relu-gqa",
        "opt-preln",
        "falcon-new-relu",
        "falcon-old-7b",
        "opt-postln-proj",
    ] {
        let golden = Golden::open(name);
        let checkpoint = golden.checkpoint();
        let config = checkpoint.config();
        let (hidden, neurons) = (config.hidden_size, config.ffn_size);
        let mut random = Random::new(7);
        let mut normal =
            |count: usize| -> Vec<f32> { (0..count).map(|_| random.normal() as f32).collect() };
        let networks: Vec<Network> = (0..config.layer_count)
            .map(|_| Network {
                rank: 24,
                a: normal(24 * hidden),
                b: normal(neurons * 24),
                // The scale that a norm takes away decides with these.
                bias: normal(neurons),
            })
            .collect();
        let reference = ReferenceModel::load(&checkpoint).unwrap();
        let prompt = golden.ids("p17.input_ids");
        let mut seen = Vec::new();
        for input in [PredictorInput::Normed, PredictorInput::Residual] {
            let folder = tempfile::tempdir().unwrap();
            let predictors =
                write_networks(&checkpoint, &networks, Format::F32, input, folder.path());
            let out = folder.path().join("bundle");
            let bundle = bundle_with(&golden, Format::F32, 50, Some(&predictors), &out);
            let options = Options {
                threads: Threads::new(Isa::detect().unwrap(), 2).unwrap(),
                policy: Some(Policy::Predicted),
            };
            let mut model = SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap();
            let logits = model.forward(&prompt).unwrap();
            let mut observer = Predicting {
                networks: &networks,
                input,
            };
            let want = reference.run(&prompt, &mut observer).unwrap();
            let want: Vec<f32> = want.flatten_all().unwrap().to_vec1().unwrap();
            golden.assert_close(&logits, &want, &format!("{name} {input:?}"));
            seen.push(logits);
        }
        let apart = seen[0]
            .iter()
            .zip(&seen[1])
            .any(|(normed, residual)| (normed - residual).abs() > 1e-2);
        // After a norm that comes last, both are the same.
        assert_eq!(apart, name != "opt-postln-proj", "{name}");
    }
}

#[test]
fn predictors_run_in_every_format() {
    let golden = Golden::open("llama-relu-gqa");
    let checkpoint = golden.checkpoint();
    let mask: Vec<bool> = (0..172).map(|neuron| neuron % 3 == 0).collect();
    let network = Network {
        rank: 40, // no whole number of blocks
        a: vec![0.0; 40 * 64],
        b: vec![0.25; 172 * 40],
        bias: mask
            .iter()
            .map(|keep| if *keep { 1.0 } else { -1.0 })
            .collect(),
    };
    let logits = powerinfer_artifact::predictor_file::WEIGHTS.map(|weights| {
        let folder = tempfile::tempdir().unwrap();
        let networks = vec![network.clone(); 3];
        let input = PredictorInput::Normed;
        let predictors = write_networks(&checkpoint, &networks, weights, input, folder.path());
        let out = folder.path().join("bundle");
        let bundle = bundle_with(&golden, Format::F32, 50, Some(&predictors), &out);
        let options = Options {
            threads: Threads::new(Isa::detect().unwrap(), 1).unwrap(),
            policy: Some(Policy::Predicted),
        };
        let mut model = SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap();
        model.forward(&golden.ids("p17.input_ids")).unwrap()
    });
    assert!(logits.iter().all(|other| *other == logits[0]));
    assert_ne!(logits[0], golden.floats("p17.logits"));
}

#[test]
fn exact_is_dense_bit_for_bit_in_every_format() {
    for (name, quant) in SPARSE_MODELS
        .into_iter()
        .flat_map(|name| Format::ALL.map(|quant| (name, quant)))
    {
        let golden = Golden::open(name);
        let prompt = golden.ids("p17.input_ids");
        let dense = greedy(
            &mut runtime(&golden, quant, 64, Policy::Dense, 1),
            &prompt,
            24,
        );
        let exact = greedy(
            &mut runtime(&golden, quant, 64, Policy::Exact, 1),
            &prompt,
            24,
        );
        assert_eq!(dense, exact, "{name} {quant}");
    }
}

#[test]
fn a_bundle_has_the_numbers_of_a_gguf_file_in_q4_k() {
    let folder = tempfile::tempdir().unwrap();
    for (name, expected) in [("llama-sp", 12), ("llama-bpe", 5)] {
        let file = format!("../../tests/golden/gguf/{name}.q4_k_m.gguf");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let config = checkpoint.config();
        let order = (0..config.ffn_size as u32).rev();
        let plan = plan(&checkpoint, 0);
        let out = folder.path().join(name);
        let bundle = pack_bundle(&checkpoint, order.clone(), None, plan, Format::Q4K, &out);
        let stored = StoredWeights::find(bundle.weights(), config, Format::Q4K).unwrap();
        let mut matrices = vec![(Weight::Embedding, &stored.embedding)];
        for (index, layer) in stored.layers.iter().enumerate() {
            let up = layer.up.as_ref().unwrap();
            for (part, linear) in [
                (LayerWeight::Query, &layer.query),
                (LayerWeight::Key, &layer.key),
                (LayerWeight::Value, &layer.value),
                (LayerWeight::Output, &layer.output),
                (LayerWeight::Gate, &layer.gate),
                (LayerWeight::Up, up),
            ] {
                matrices.push((Weight::Layer(index, part), &linear.matrix));
            }
        }
        let mut exact = 0;
        for (weight, matrix) in matrices {
            if checkpoint.read_q4_k(weight, &[]).unwrap().is_none() {
                continue; // the file has it in another type
            }
            exact += 1;
            let view = matrix.view(bundle.weights());
            let wanted = checkpoint.read(weight).unwrap();
            let mut found = vec![0.0; view.columns()];
            let rows: Vec<usize> = match weight {
                Weight::Layer(_, LayerWeight::Gate | LayerWeight::Up) => {
                    order.clone().map(|neuron| neuron as usize).collect()
                }
                _ => (0..view.rows()).collect(),
            };
            assert_eq!(rows.len(), view.rows());
            for (row, of_file) in rows.into_iter().enumerate() {
                view.dequantise_row(row, &mut found);
                let wanted = &wanted[of_file * view.columns()..][..view.columns()];
                assert_eq!(found, wanted, "{name} {weight:?} row {row}");
            }
        }
        // Queries, keys, outputs, gates and ups, and of `llama-sp` the embedding and a value.
        assert_eq!(exact, expected, "{name}");
    }
}

#[test]
fn placement_and_threads_do_not_change_tokens() {
    let golden = Golden::open("llama-relu-gqa");
    let prompt = golden.ids("p70.input_ids");
    for format in [Format::F32, Format::Q8_0] {
        let run = |hot, threads| {
            let mut model = runtime(&golden, format, hot, Policy::Exact, threads);
            greedy(&mut model, &prompt, 24)
        };
        let (expected, logits) = run(0, 1);
        for hot in [0, 1, 86, 171, 172] {
            let alone = run(hot, 1);
            assert_eq!(alone.0, expected, "{hot} hot, {format}");
            // Rounding inputs to 8 bits magnifies differences in the order of sums.
            if format == Format::F32 {
                golden.assert_close(&alone.1, &logits, "logits");
                continue;
            }
            for threads in [2, 5] {
                assert!(run(hot, threads) == alone, "{hot} hot, {threads} threads");
            }
        }
    }
}

#[test]
fn a_prompt_in_pieces_is_a_prompt() {
    let golden = Golden::open("llama-silu");
    let prompt = golden.ids("p70.input_ids");
    let mut model = runtime(&golden, Format::Q4_0, 100, Policy::Dense, 1);
    let whole = model.forward(&prompt).unwrap();
    model.reset();
    let pieces: Vec<f32> = [1usize, 7, 62]
        .iter()
        .scan(0, |start, length| {
            let piece = model.forward(&prompt[*start..*start + length]).unwrap();
            *start += length;
            Some(piece)
        })
        .flatten()
        .collect();
    assert_eq!(whole, pieces);
}

#[test]
fn statistics_count_what_is_read() {
    let golden = Golden::open("llama-relu-gqa");
    let prompt = golden.ids("p17.input_ids");
    let mut read = Vec::new();
    for policy in [Policy::Dense, Policy::Exact] {
        let mut model = runtime(&golden, Format::F32, 0, policy, 1);
        model.forward_last(&prompt).unwrap();
        model.observers_mut().take_statistics();
        model.forward_last(&prompt[..1]).unwrap();
        let statistics = model.observers_mut().take_statistics();
        assert_eq!((statistics.tokens, statistics.neurons), (1, 3 * 172));
        read.push(statistics);
    }
    let neuron = neuron_bytes(golden.checkpoint().config(), Format::F32);
    let skipped = read[0].neurons_computed - read[1].neurons_computed;
    assert_eq!(read[0].neurons_computed, 3 * 172);
    assert!(skipped > 0, "a ReLU model has silent neurons");
    assert_eq!(
        read[0].bytes_read - read[1].bytes_read,
        skipped * neuron * 2 / 3,
        "exact skips up and down"
    );
}

#[test]
fn too_many_tokens_and_foreign_tokens_are_errors() {
    let golden = Golden::open("llama-silu");
    let mut model = runtime(&golden, Format::F32, 0, Policy::Dense, 1);
    let error = model.forward(&[640]).unwrap_err().to_string();
    assert!(error.contains("640"), "{error}");
    let error = model.forward(&[1; 257]).unwrap_err().to_string();
    assert!(error.contains("257") && error.contains("256"), "{error}");
    assert_eq!(model.position(), 0);
}

#[test]
fn predicted_without_predictors_is_refused() {
    let golden = Golden::open("llama-relu-gqa");
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(&golden, Format::F32, 0, &folder.path().join("bundle"));
    let threads = Threads::new(Isa::SCALAR, 1).unwrap();
    let options = Options {
        threads,
        policy: Some(Policy::Predicted),
    };
    let error = Engine::new(bundle, options).unwrap_err().to_string();
    assert!(error.contains("predictor"), "{error}");
}
