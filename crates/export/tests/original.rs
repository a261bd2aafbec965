//! Exports for the original PowerInfer: its own files come out as they went in, predictors predict the same neurons.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{
    Header,
    matrix_planes::insert_matrix,
    plan::{Plan, Policy},
    predictor_file::{self, PredictorFile, PredictorSummary, tensor_name},
    progress::Silent,
    random::Random,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};
use powerinfer_bundle::{Bundle, PackInputs, pack};
use powerinfer_export::{ExportError, GpuIndex, OriginalFiles, index_path, to_original};
use powerinfer_import::{OriginalPredictor, OriginalPredictors, PredictedSizes, open_checkpoint};
use powerinfer_model::{
    Checkpoint, Files, LayerWeight, ModelConfig, Weight, container::Container, gguf::GgufFile,
};
use powerinfer_tensor::{Format, OwnedMatrix, f16};
use powerinfer_text::Tokenizer;
use serde_json::{Value as Json, json};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn open(path: &Path) -> Checkpoint {
    open_checkpoint(Files::open(path).unwrap()).unwrap()
}

/// Random numbers that float16 represents.
fn normal(random: &mut Random, count: usize) -> Vec<f32> {
    let number = |_| f16::from_f32(random.normal() as f32).to_f32();
    (0..count).map(number).collect()
}

/// A predictor, neurons in the checkpoint's order.
#[derive(Debug)]
struct Network {
    rank: usize,
    is_linear: bool,
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Vec<f32>,
    threshold: f32,
}

impl Network {
    fn random(config: &ModelConfig, bias: f32, threshold: f32, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let rank = 32;
        Self {
            rank,
            is_linear: false,
            a: normal(random, rank * config.hidden_size),
            b: normal(random, config.ffn_size * rank),
            bias: (normal(random, config.ffn_size).iter())
                .map(|value| value * bias)
                .collect(),
            threshold,
        }
    }

    fn predicts(&self, x: &[f32]) -> Vec<bool> {
        let mut logits = product(&self.a, &self.b, self.rank, x);
        if self.is_linear {
            let negative: Vec<f32> = x.iter().map(|x| -x).collect();
            let subtracted = product(&self.a, &self.b, self.rank, &negative);
            (logits.iter_mut().zip(subtracted)).for_each(|(logit, less)| *logit -= less);
        }
        let logits = logits.iter().zip(&self.bias);
        logits
            .map(|(logit, bias)| logit + bias >= self.threshold)
            .collect()
    }
}

/// `second · relu(first · x)`.
fn product(first: &[f32], second: &[f32], rank: usize, x: &[f32]) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let units = first.chunks_exact(x.len()).map(|row| dot(row, x).max(0.0));
    let units: Vec<f32> = units.collect();
    second
        .chunks_exact(rank)
        .map(|row| dot(row, &units))
        .collect()
}

/// Predictors in a file, with weights in `format`.
fn predictors(
    checkpoint: &Checkpoint,
    networks: &[Network],
    format: Format,
    input: &str,
    folder: &Path,
) -> PredictorFile {
    let config = checkpoint.config();
    let packed: Vec<[OwnedMatrix; 3]> = (networks.iter())
        .map(|it| {
            let pack = powerinfer_tensor::pack;
            [
                pack(format, it.rank, config.hidden_size, &it.a),
                pack(format, config.ffn_size, it.rank, &it.b),
                pack(Format::F32, config.ffn_size, 1, &it.bias),
            ]
        })
        .collect();
    let mut tensors = BTreeMap::new();
    for (layer, matrices) in packed.iter().enumerate() {
        for (name, matrix) in ["a", "b", "bias"].iter().zip(matrices) {
            insert_matrix(&mut tensors, &tensor_name(layer, name), matrix);
        }
    }
    let summaries = networks
        .iter()
        .enumerate()
        .map(|(layer, network)| PredictorSummary {
            rank: network.rank,
            is_linear: network.is_linear,
            threshold: network.threshold,
            ..PredictorSummary::none(layer)
        });
    let summaries: Vec<_> = summaries.collect();
    let model = checkpoint.identity().clone();
    let header = Header::new(predictor_file::FORMAT, predictor_file::VERSION, model, 0)
        .with_setting(predictor_file::WEIGHTS_SETTING, format.name())
        .with_setting(predictor_file::INPUT_SETTING, input)
        .with_setting(
            predictor_file::LAYERS_SETTING,
            serde_json::to_value(summaries).unwrap(),
        );
    let path = folder.join(predictor_file::FILE);
    write_tensors(&path, Some(&header), &tensors).unwrap();
    PredictorFile::open(folder).unwrap()
}

/// The order of a layer's neurons in bundles.
fn order(layer: usize, neurons: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..neurons as u32).collect();
    let mut random = Random::new(7 + layer as u64);
    for place in (1..neurons).rev() {
        order.swap(place, random.below(place + 1));
    }
    order
}

/// Packs a bundle whose layers are `policies`, with `hot` neurons of the first layer on the GPU.
fn bundle(
    checkpoint: &Checkpoint,
    predictors: Option<&PredictorFile>,
    policies: &[Policy],
    hot: usize,
    quant: Format,
    out: &Path,
) -> Bundle {
    let config = checkpoint.config();
    let mut plan = Plan::unplaced(config.layer_count, config.ffn_size, Policy::Dense, 64);
    for (layer, policy) in plan.layers.iter_mut().zip(policies) {
        layer.policy = *policy;
    }
    plan.layers[0].hot_count = hot;
    plan.totals.hot_count = hot as u64;
    let orders = (0..config.layer_count).map(|layer| order(layer, config.ffn_size));
    let orders: Vec<_> = orders.collect();
    let inputs = PackInputs {
        predictors,
        companions: &Tokenizer::FILES,
        ..PackInputs::new(checkpoint, &orders, plan, quant)
    };
    pack(&inputs, out, &Silent).unwrap()
}

/// Writes a checkpoint of random weights that float16 represents, with 1280 neurons per layer.
fn checkpoint(config: &Json, folder: &Path) -> Checkpoint {
    let parsed = ModelConfig::parse(config.to_string().as_bytes(), folder).unwrap();
    let mut random = Random::new(3);
    let tensors = parsed.stored_tensors().into_iter().map(|tensor| {
        let values = normal(&mut random, tensor.shape.iter().product());
        let bytes = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        (
            tensor.name,
            TensorSource::owned(Dtype::F32, tensor.shape, bytes),
        )
    });
    std::fs::create_dir_all(folder).unwrap();
    write_tensors(&folder.join("model.safetensors"), None, &tensors.collect()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let tokenizer = repository().join("tests/golden/tokenizers/tok-sp-legacy");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer.join(file), folder.join(file)).unwrap();
    }
    open(folder)
}

fn llama() -> Json {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "relu", "hidden_size": 64,
        "intermediate_size": 1280, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 640, "max_position_embeddings": 64,
    })
}

fn bamboo() -> Json {
    let mut config = llama();
    config["architectures"] = json!(["BambooForCausalLM"]);
    config
}

fn falcon() -> Json {
    json!({
        "architectures": ["FalconForCausalLM"], "activation": "relu", "hidden_size": 64,
        "ffn_hidden_size": 1280, "num_attention_heads": 4, "num_kv_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 640, "max_position_embeddings": 64,
        "new_decoder_architecture": true,
    })
}

fn opt() -> Json {
    json!({
        "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 1280,
        "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 640,
        "max_position_embeddings": 64,
    })
}

/// The predictors of an exported model.
fn read_predictors(path: &Path, config: &ModelConfig) -> (f32, Vec<OriginalPredictor>) {
    let sizes = PredictedSizes {
        layers: config.layer_count,
        hidden: config.hidden_size,
        neurons: config.ffn_size,
    };
    let read = OriginalPredictors::open(path, sizes).unwrap();
    let layers = (0..config.layer_count).map(|layer| read.read(layer).unwrap());
    (read.threshold(), layers.collect())
}

/// Share of neurons for which a layer's exported predictor, on hidden states, and its network, on `input` of them, predict
/// the same.
fn agreement(
    exported: &OriginalPredictor,
    threshold: f32,
    network: &Network,
    hidden: usize,
    input: impl Fn(&[f32]) -> Vec<f32>,
) -> f64 {
    let mut random = Random::new(11);
    let (mut same, mut total) = (0, 0);
    for token in 0..200 {
        // Of very different norms, some dominated by one element, as in real models.
        let scale = 2f32.powi(token % 12 - 4);
        let mut state: Vec<f32> = (0..hidden)
            .map(|_| random.normal() as f32 * scale)
            .collect();
        if token % 5 == 0 {
            state[token as usize % hidden] *= 50.0;
        }
        let ours = network.predicts(&input(&state));
        let theirs = product(&exported.fc1, &exported.fc2, exported.rank, &state);
        same += (ours.iter().zip(&theirs))
            .filter(|(ours, theirs)| **ours == (**theirs >= threshold))
            .count();
        total += ours.len();
    }
    same as f64 / f64::from(total as u32)
}

const PREDICTED: [Policy; 2] = [Policy::Predicted; 2];

/// Exports a checkpoint in f16 with predictors of the residual, and `hot` neurons of the first layer on the GPU.
fn export_f16(
    checkpoint: &Checkpoint,
    networks: &[Network],
    hot: usize,
    folder: &Path,
) -> (OriginalFiles, PathBuf) {
    let file = predictors(checkpoint, networks, Format::F16, "residual", folder);
    let packed = folder.join("bundle");
    let bundle = bundle(
        checkpoint,
        Some(&file),
        &PREDICTED,
        hot,
        Format::F16,
        &packed,
    );
    let out = folder.join("out.gguf");
    let written = to_original(&bundle, None, &out, &Silent).unwrap();
    (written, out)
}

#[test]
fn files_of_the_original_come_out_as_they_went_in() {
    for (quant, other) in [(Format::F16, ""), (Format::Q4_0, "output.weight")] {
        let name = format!("tiny.powerinfer.{quant}.gguf");
        let path = repository().join("tests/golden/gguf").join(name);
        let checkpoint = open(&path);
        let (_, originals) = read_predictors(&path, checkpoint.config());
        let networks: Vec<Network> = (originals.into_iter())
            .map(|it| Network {
                rank: it.rank,
                is_linear: false,
                a: it.fc1,
                b: it.fc2,
                bias: vec![0.0; 1024],
                threshold: 0.0,
            })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let file = predictors(&checkpoint, &networks, quant, "residual", folder.path());
        let packed = folder.path().join("bundle");
        let bundle = bundle(&checkpoint, Some(&file), &PREDICTED, 0, quant, &packed);
        let out = folder.path().join("out.powerinfer.gguf");
        let written = to_original(&bundle, None, &out, &Silent).unwrap();
        assert_eq!((written.quant, written.hot_neurons), (quant, 0));
        let (got, want) = (
            GgufFile::open(&out).unwrap(),
            GgufFile::open(&path).unwrap(),
        );
        assert_eq!(got.names(), want.names());
        for name in want.names() {
            assert_eq!(got.shape(&name), want.shape(&name), "{name}");
            // The original's quantiser packs the head in Q8_0.
            if name != other {
                assert!(
                    got.stored(&name).unwrap() == want.stored(&name).unwrap(),
                    "{quant} {name}"
                );
            }
        }
        let ignored = ["general.name", "tokenizer.ggml.scores"];
        for (key, value) in want.entries() {
            if !ignored.contains(&key) {
                assert_eq!(got.value(key), Some(value), "{key}");
            }
        }
    }
}

#[test]
fn models_are_read_back_in_the_order_of_the_checkpoint() {
    let mut tied = llama();
    tied["tie_word_embeddings"] = json!(true);
    for config in [llama(), tied, bamboo(), falcon(), opt()] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(&config, &folder.path().join("model"));
        let config = checkpoint.config();
        let networks: Vec<Network> = (0..2)
            .map(|seed| Network::random(config, 0.0, 0.25, seed))
            .collect();
        let (written, out) = export_f16(&checkpoint, &networks, 700, folder.path());
        let back = open(&out);
        for weight in config.weights() {
            let (read, own) = (back.read(weight).unwrap(), checkpoint.read(weight).unwrap());
            let (same, padding) = read.split_at(own.len());
            assert!(
                same == own && padding.iter().all(|value| *value == 0.0),
                "{} {weight:?}",
                config.family
            );
            assert!(padding.is_empty() || weight == Weight::Positions);
        }
        if config.family.starts_with("opt") {
            assert_eq!(
                back.config().shape(Weight::Positions),
                [2050, config.hidden_size]
            );
        }
        // Its engine takes the embedding for the head of an OPT, and needs one in the others.
        let has_head = GgufFile::open(&out)
            .unwrap()
            .shape("output.weight")
            .is_some();
        assert_eq!(has_head, config.family != "opt");
        let (threshold, exported) = read_predictors(&out, config);
        assert_eq!(threshold, 0.25);
        for (exported, network) in exported.iter().zip(&networks) {
            assert_eq!((&exported.fc1, &exported.fc2), (&network.a, &network.b));
        }
        check_index(&written, &out);
    }
}

/// Fails unless the index has the 512 hottest neurons of the first layer.
fn check_index(written: &OriginalFiles, out: &Path) {
    assert_eq!(written.index, index_path(out));
    assert!(
        written
            .model
            .notes
            .iter()
            .any(|note| note.starts_with("188 neurons"))
    );
    let index = GpuIndex::read(&written.index).unwrap();
    assert_eq!((index.neurons, index.capacity % 512), (1280, 0));
    let mut hot = order(0, 1280)[..512].to_vec();
    hot.sort_unstable();
    assert_eq!(index.hot, [hot, Vec::new()]);
    // The layout that its engine reads, in which integers have ggml's number of 2023; with today's they are read too.
    let mut bytes = std::fs::read(&written.index).unwrap();
    for name in ["blk.0.gpu_idx", "blk.1.gpu_bucket"] {
        let mut found = bytes.windows(name.len());
        let after = found.position(|bytes| bytes == name.as_bytes()).unwrap() + name.len();
        assert_eq!(bytes[after + 12..][..4], 18u32.to_le_bytes());
        bytes[after + 12..][..4].copy_from_slice(&26u32.to_le_bytes());
    }
    let today = out.with_extension("today.gpuidx");
    std::fs::write(&today, bytes).unwrap();
    assert_eq!(GpuIndex::read(&today).unwrap(), index);
    let file = GgufFile::open(&written.index).unwrap();
    let flags = file.integers("blk.0.gpu_idx").unwrap();
    let flagged = (0..).zip(&flags).filter(|(_, flag)| **flag == 1);
    assert_eq!(
        flagged.map(|(id, _)| id).collect::<Vec<u32>>(),
        index.hot[0]
    );
    assert_eq!(file.integers("blk.1.gpu_idx").unwrap(), [0; 1280]);
    assert_eq!(file.integers("blk.1.gpu_bucket").unwrap(), [0i32; 0]);
    // A model is no index.
    let error = GpuIndex::read(out).unwrap_err().to_string();
    assert!(error.contains("not an index of neurons"), "{error}");
}

#[test]
fn a_small_ffn_is_padded_with_neurons_of_zeros() {
    for base in [llama(), bamboo(), opt()] {
        let folder = tempfile::tempdir().unwrap();
        let mut config = base;
        let size = if config["ffn_dim"].is_null() {
            "intermediate_size"
        } else {
            "ffn_dim"
        };
        config[size] = json!(992);
        let checkpoint = checkpoint(&config, &folder.path().join("model"));
        let config = checkpoint.config();
        let networks = [0, 1].map(|seed| Network::random(config, 0.0, 0.25, seed));
        let (written, out) = export_f16(&checkpoint, &networks, 300, folder.path());
        let notes = &written.model.notes;
        assert!(
            notes
                .iter()
                .any(|note| note.contains("padded with 32 neurons"))
        );
        let back = open(&out);
        assert_eq!(back.config().ffn_size, 1024);
        for weight in config.weights() {
            let (read, own) = (back.read(weight).unwrap(), checkpoint.read(weight).unwrap());
            // Zeros follow every row, or the last.
            let (shape, padded) = (config.shape(weight), back.config().shape(weight));
            let columns = [&shape, &padded].map(|shape| *shape.last().unwrap());
            let mut rows = own.chunks_exact(columns[0]);
            for read in read.chunks_exact(columns[1]) {
                let (same, padding) = read.split_at(columns[0]);
                let zeros = vec![0.0; columns[0]];
                assert!(
                    same == rows.next().unwrap_or(&zeros)
                        && padding.iter().all(|value| *value == 0.0),
                    "{} {weight:?}",
                    config.family
                );
            }
            assert_eq!(rows.next(), None);
        }
        let (_, exported) = read_predictors(&out, back.config());
        for (exported, network) in exported.iter().zip(&networks) {
            let (same, padding) = exported.fc2.split_at(network.b.len());
            assert!(same == network.b && padding.iter().all(|value| *value == 0.0));
        }
        let index = GpuIndex::read(&written.index).unwrap();
        assert_eq!((index.neurons, index.hot[0].len()), (1024, 256));
    }
}

#[test]
fn predictors_of_the_normed_state_predict_the_same_from_the_residual() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(&llama(), &folder.path().join("model"));
    let config = checkpoint.config();
    let packed = folder.path().join("bundle");
    for (bias, threshold, least, ranks) in
        [(0.0, 0.0, 0.9995, [32, 64]), (4.0, 1.0, 0.97, [160, 192])]
    {
        let mut networks = [0, 1].map(|seed| Network::random(config, bias, threshold, seed));
        networks[1].is_linear = true;
        let file = predictors(&checkpoint, &networks, Format::F32, "normed", folder.path());
        let bundle = bundle(
            &checkpoint,
            Some(&file),
            &PREDICTED,
            0,
            Format::F16,
            &packed,
        );
        let out = folder.path().join("out.gguf");
        let written = to_original(&bundle, None, &out, &Silent).unwrap();
        let estimated = written
            .model
            .notes
            .iter()
            .find(|note| note.contains("estimate them"));
        assert_eq!(estimated.is_some(), bias > 0.0, "{:?}", written.model.notes);
        let (threshold, exported) = read_predictors(&out, config);
        assert_eq!(threshold, 0.0);
        for (layer, (exported, network)) in exported.iter().zip(&networks).enumerate() {
            assert_eq!(exported.rank, ranks[layer]);
            let norm = Weight::Layer(layer, LayerWeight::FfnNorm);
            let norm = checkpoint.read(norm).unwrap();
            let normed = |state: &[f32]| {
                let square = state.iter().map(|x| x * x).sum::<f32>() / state.len() as f32;
                let rms = (square + config.norm_epsilon).sqrt();
                state.iter().zip(&norm).map(|(x, w)| x / rms * w).collect()
            };
            let share = agreement(exported, threshold, network, config.hidden_size, normed);
            assert!(share > least, "{share} with bias {bias}");
            // Without the bias it would be less.
            assert!(bias == 0.0 || share < 1.0);
        }
    }
}

#[test]
fn thresholds_of_layers_become_one() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(&llama(), &folder.path().join("model"));
    let config = checkpoint.config();
    let out = folder.path().join("out.gguf");
    let packed = folder.path().join("bundle");
    let export = |thresholds: [f32; 2], bias: f32, policies: &[Policy]| {
        let networks =
            [0, 1].map(|layer| Network::random(config, bias, thresholds[layer], layer as u64));
        let file = predictors(
            &checkpoint,
            &networks,
            Format::F32,
            "residual",
            folder.path(),
        );
        let bundle = bundle(&checkpoint, Some(&file), policies, 0, Format::F16, &packed);
        to_original(&bundle, None, &out, &Silent).map(|written| (written, networks))
    };
    for thresholds in [[0.5, 2.0], [-1.0, -0.125], [0.0, 0.0]] {
        let (_, networks) = export(thresholds, 0.0, &PREDICTED).unwrap();
        let (threshold, exported) = read_predictors(&out, config);
        assert_eq!(threshold, thresholds[0]);
        for (exported, network) in exported.iter().zip(&networks) {
            let share = agreement(exported, threshold, network, 64, <[f32]>::to_vec);
            assert!(share > 0.9995, "{share}");
        }
    }
    let refused = |thresholds: [f32; 2], bias: f32, policies: &[Policy], part: &str| {
        let error = export(thresholds, bias, policies).unwrap_err();
        assert!(matches!(error, ExportError::Predictor { .. }));
        assert!(error.to_string().contains(part), "{error}");
    };
    refused([0.5, -0.5], 0.0, &PREDICTED, "of one sign");
    refused([0.5, 0.0], 0.0, &PREDICTED, "of one sign");
    refused([0.0, 0.0], 1.0, &PREDICTED, "has a bias");
    refused(
        [0.5, 0.5],
        0.0,
        &[Policy::Predicted, Policy::Exact],
        "layer 1",
    );
    // A layer of another policy predicts all.
    let (written, _) = export([0.0, 0.0], 0.0, &[Policy::Predicted, Policy::Exact]).unwrap();
    assert!(
        written
            .model
            .notes
            .iter()
            .any(|note| note.starts_with("1 of 2 layers predict every neuron"))
    );
    let (threshold, exported) = read_predictors(&out, config);
    let logits = product(
        &exported[1].fc1,
        &exported[1].fc2,
        exported[1].rank,
        &[1.0; 64],
    );
    assert!(logits.iter().all(|logit| *logit >= threshold));
}

#[test]
fn models_that_the_original_cannot_run_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let with = |base: Json, key: &str, value: Json| {
        let mut config = base;
        config[key] = value;
        config
    };
    for (name, config, part) in [
        (
            "silu",
            with(llama(), "hidden_act", json!("silu")),
            "computes ReLU, the model SiLU",
        ),
        (
            "bias",
            with(llama(), "attention_bias", json!(true)),
            "biases",
        ),
        ("head", with(llama(), "head_dim", json!(32)), "heads"),
        (
            "rope",
            with(
                llama(),
                "rope_scaling",
                json!({ "rope_type": "llama3", "factor": 8.0 }),
            ),
            "RoPE",
        ),
        (
            "post",
            with(opt(), "do_layer_norm_before", json!(false)),
            "`block`",
        ),
    ] {
        let checkpoint = checkpoint(&config, &folder.path().join(name));
        let packed = folder.path().join("bundle");
        let bundle = bundle(&checkpoint, None, &[], 0, Format::F16, &packed);
        let message = to_original(&bundle, None, &out, &Silent)
            .unwrap_err()
            .to_string();
        assert!(message.contains(part), "{name}: {message}");
        assert!(!out.exists());
    }
    let checkpoint = checkpoint(&falcon(), &folder.path().join("falcon"));
    let networks = [0, 1].map(|seed| Network::random(checkpoint.config(), 1.0, 0.0, seed));
    let file = predictors(&checkpoint, &networks, Format::F32, "normed", folder.path());
    let packed = folder.path().join("bundle");
    let bundle = bundle(
        &checkpoint,
        Some(&file),
        &PREDICTED,
        0,
        Format::Q8_0,
        &packed,
    );
    let message = to_original(&bundle, None, &out, &Silent)
        .unwrap_err()
        .to_string();
    assert!(message.contains("layer norm"), "{message}");
    let message = to_original(&bundle, Some(Format::Q8_0), &out, &Silent).unwrap_err();
    assert!(message.to_string().contains("f16 and q4_0"), "{message}");
}
