//! Mixtures of experts, made from dense goldens: the runtime against the reference engine and against the dense model, and GGUF files
//! against safetensors.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
#[path = "support/mixtures.rs"]
mod mixtures;
#[path = "support/packing.rs"]
mod packing;

use std::path::Path;

use golden::Golden;
use mixtures::{RECIPES, Recipe, write_mixture};
use packing::pack_bundle;
use powerinfer_artifact::{
    ArtifactError,
    plan::{Plan, Policy},
};
use powerinfer_kernels::Isa;
use powerinfer_model::{
    Checkpoint, LanguageModel, RouterScores, Weight,
    gguf::{Dialect, Elements, Metadata, TensorEntry, write_gguf},
};
use powerinfer_reference::ReferenceModel;
use powerinfer_runtime::{Engine, Options, SingleSession, Threads};
use powerinfer_tensor::{Format, pack};

/// Runs a bundle with the neurons in reverse order; the first `hot` are summed separately.
fn runtime(
    checkpoint: &Checkpoint,
    quant: Format,
    hot: usize,
    policy: Policy,
    threads: usize,
) -> SingleSession {
    let config = checkpoint.config();
    let (layers, neurons) = (config.layer_count, config.ffn_size);
    let mut plan = Plan::unplaced(layers, neurons, Policy::Dense, config.context_length);
    for layer in &mut plan.layers {
        layer.hot_count = hot;
    }
    plan.totals.hot_count = (layers * hot) as u64;
    let folder = tempfile::tempdir().unwrap();
    let order = (0..neurons as u32).rev();
    let bundle = pack_bundle(
        checkpoint,
        order,
        None,
        plan,
        quant,
        &folder.path().join("b"),
    );
    let options = Options {
        threads: Threads::new(Isa::detect().unwrap(), threads).unwrap(),
        policy: Some(policy),
    };
    SingleSession::new(Engine::new(bundle, options).unwrap()).unwrap()
}

fn assert_near(found: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (index, (found, want)) in found.iter().zip(want).enumerate() {
        let error = (found - want).abs();
        assert!(
            error <= tolerance * largest,
            "{what}: {found} at {index}, not {want}"
        );
    }
}

#[test]
fn the_runtime_computes_what_the_reference_engine_computes() {
    for recipe in RECIPES {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_mixture(&recipe, false, folder.path());
        let prompt = Golden::open(recipe.golden).ids("p70.input_ids");
        let want = ReferenceModel::load(&checkpoint)
            .unwrap()
            .forward(&prompt)
            .unwrap();
        let config = checkpoint.config();
        let share = config.experts.as_ref().unwrap().selected_share();
        for quant in [Format::F32, Format::Q4_0] {
            for (policy, hot) in [(Policy::Dense, 0), (Policy::Exact, 50)] {
                let what = format!("{} {quant} {policy}", recipe.architecture);
                let mut model = runtime(&checkpoint, quant, hot, policy, 2);
                let found = model.forward(&prompt).unwrap();
                // Rounded weights select other experts if logits nearly tie.
                if quant == Format::F32 {
                    assert_near(&found, &want, 1e-4, &what);
                }
                let computed = model.observers_mut().take_statistics().computed_share();
                if policy == Policy::Dense {
                    assert!((computed - share).abs() < 1e-9, "{what}: {computed}");
                }
                // Results are bit-identical for other thread counts and piece sizes.
                let mut other = runtime(&checkpoint, quant, hot, policy, 3);
                let (first, rest) = prompt.split_at(9);
                let mut pieces = other.forward(first).unwrap();
                pieces.extend(other.forward(&rest[..1]).unwrap());
                pieces.extend(other.forward(&rest[1..]).unwrap());
                assert!(pieces == found, "{what}: in pieces");
            }
        }
    }
}

#[test]
fn a_mixture_of_equal_experts_is_the_dense_model() {
    let recipe = Recipe {
        size: 172,
        ..RECIPES[0]
    };
    let golden = Golden::open(recipe.golden);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write_mixture(&recipe, true, folder.path());
    let mut model = runtime(&checkpoint, Format::F32, 100, Policy::Exact, 2);
    for prompt in ["p1", "p17", "p70"] {
        model.reset();
        let logits = model
            .forward(&golden.ids(&format!("{prompt}.input_ids")))
            .unwrap();
        golden.assert_logits(&logits, prompt, prompt);
    }
}

/// Name, shape and values of a tensor in a GGUF file.
type Written = (String, Vec<usize>, Vec<f32>);

/// Writes `checkpoint` as a GGUF file with the tensor names and shapes of llama.cpp's converter. The experts of a matrix share one
/// tensor, or have one each if `are_separate`.
fn write_as_gguf(checkpoint: &Checkpoint, architecture: &str, are_separate: bool, path: &Path) {
    let config = checkpoint.config();
    let experts = config.experts.as_ref().unwrap();
    let mut metadata = Metadata::default();
    metadata.push("general.architecture", architecture);
    let number = |key: &str, value: usize| (format!("{architecture}.{key}"), value);
    for (key, value) in [
        number("context_length", config.context_length),
        number("embedding_length", config.hidden_size),
        number("block_count", config.layer_count),
        number("attention.head_count", config.head_count),
        number("attention.head_count_kv", config.kv_head_count),
        number("attention.key_length", config.head_size),
        number("attention.value_length", config.head_size),
        number("feed_forward_length", experts.size),
        number("expert_count", experts.count),
        number("expert_used_count", experts.per_token),
    ] {
        metadata.push(key, value);
    }
    if architecture != "llama" {
        let (key, value) = number("expert_feed_forward_length", experts.size);
        metadata.push(key, value);
    }
    if experts.shared_size > 0 {
        let (key, value) = number("expert_shared_feed_forward_length", experts.shared_size);
        metadata.push(key, value);
    }
    let key = format!("{architecture}.attention.layer_norm_rms_epsilon");
    metadata.push(key, config.norm_epsilon);
    let theta = if architecture == "llama" { 1e4f32 } else { 1e6 };
    metadata.push(format!("{architecture}.rope.freq_base"), theta);
    let mut tensors: Vec<Written> = Vec::new();
    for weight in config.weights() {
        use powerinfer_model::LayerWeight::{
            AttentionNorm, Down, FfnNorm, Gate, Key, KeyBias, KeyNorm, Output, Query, QueryBias,
            QueryNorm, Router, SharedGate, Up, Value, ValueBias,
        };
        let (values, shape) = (checkpoint.read(weight).unwrap(), config.shape(weight));
        let mut whole = |name: String, values| tensors.push((name, shape.clone(), values));
        let (layer, weight) = match weight {
            Weight::Embedding => {
                whole("token_embd.weight".to_owned(), values);
                continue;
            }
            Weight::FinalNorm => {
                whole("output_norm.weight".to_owned(), values);
                continue;
            }
            Weight::Head => {
                whole("output.weight".to_owned(), values);
                continue;
            }
            Weight::Layer(layer, weight) => (layer, weight),
            other => panic!("{other:?}"),
        };
        let interleaved = |heads: usize| match architecture {
            "llama" => interleave(&values, heads, config.hidden_size),
            _ => values.clone(),
        };
        let at = |name: &str| format!("blk.{layer}.{name}");
        let name = match weight {
            AttentionNorm => "attn_norm.weight",
            FfnNorm => "ffn_norm.weight",
            Query => {
                whole(at("attn_q.weight"), interleaved(config.head_count));
                continue;
            }
            Key => {
                whole(at("attn_k.weight"), interleaved(config.kv_head_count));
                continue;
            }
            QueryBias => "attn_q.bias",
            KeyBias => "attn_k.bias",
            Value => "attn_v.weight",
            ValueBias => "attn_v.bias",
            QueryNorm => "attn_q_norm.weight",
            KeyNorm => "attn_k_norm.weight",
            Output => "attn_output.weight",
            Router => "ffn_gate_inp.weight",
            SharedGate => {
                tensors.push((at("ffn_gate_inp_shexp.weight"), vec![shape[1]], values));
                continue;
            }
            Gate | Up | Down => {
                let name = match weight {
                    Gate => "ffn_gate",
                    Up => "ffn_up",
                    _ => "ffn_down",
                };
                let hidden = config.hidden_size;
                // The neurons of a block, as rows or as columns.
                let block = |index: usize| -> Vec<f32> {
                    let own = experts.neurons_of(index);
                    match weight {
                        Down => (values.chunks(config.ffn_size))
                            .flat_map(|row| row[own.clone()].to_vec())
                            .collect(),
                        _ => values[own.start * hidden..own.end * hidden].to_vec(),
                    }
                };
                let shape = |neurons| match weight {
                    Down => vec![hidden, neurons],
                    _ => vec![neurons, hidden],
                };
                if are_separate {
                    for expert in 0..experts.count {
                        let name = at(&format!("{name}.{expert}.weight"));
                        tensors.push((name, shape(experts.size), block(expert)));
                    }
                } else {
                    let all = (0..experts.count).flat_map(block).collect();
                    let shape = [&[experts.count], &shape(experts.size)[..]].concat();
                    tensors.push((at(&format!("{name}_exps.weight")), shape, all));
                }
                if experts.shared_size > 0 {
                    let name = at(&format!("{name}_shexp.weight"));
                    tensors.push((name, shape(experts.shared_size), block(experts.count)));
                }
                continue;
            }
            other => panic!("{other:?}"),
        };
        whole(at(name), values);
    }
    let entries: Vec<TensorEntry> = tensors
        .iter()
        .map(|(name, shape, _)| TensorEntry {
            name: name.clone(),
            shape: shape.clone(),
            elements: Elements::Weights(Format::F32),
        })
        .collect();
    write_gguf(path, Dialect::Ggml, &metadata, &entries, |index, writer| {
        let values = &tensors[index].2;
        writer.rows(&pack(Format::F32, 1, values.len(), values).as_view())?;
        Ok::<_, ArtifactError>(())
    })
    .unwrap();
}

/// Moves rows i and i + size/2 of each head to rows 2i and 2i + 1.
fn interleave(values: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks(width).collect();
    let size = rows.len() / heads;
    let from = |row: usize| row / size * size + row % size / 2 + row % 2 * (size / 2);
    (0..rows.len())
        .flat_map(|row| rows[from(row)].to_vec())
        .collect()
}

#[test]
fn gguf_files_have_the_same_experts_as_safetensors() {
    for recipe in RECIPES {
        let architecture = match recipe.architecture {
            "MixtralForCausalLM" => "llama",
            "Qwen2MoeForCausalLM" => "qwen2moe",
            _ => "qwen3moe",
        };
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_mixture(&recipe, false, folder.path());
        for are_separate in [false, true] {
            let path = folder.path().join(format!("{are_separate}.gguf"));
            write_as_gguf(&checkpoint, architecture, are_separate, &path);
            let file = Checkpoint::open(&path).unwrap();
            let what = format!("{architecture}, separate: {are_separate}");
            let mut want = checkpoint.config().experts.clone().unwrap();
            // llama.cpp normalises by architecture, which the file does not state.
            want.scores = match architecture {
                "qwen2moe" => RouterScores::Softmax,
                _ => RouterScores::SoftmaxOfSelected,
            };
            assert_eq!(file.config().experts, Some(want), "{what}");
            assert_eq!(
                file.config().positions,
                checkpoint.config().positions,
                "{what}"
            );
            for weight in checkpoint.config().weights() {
                let (found, want) = (file.read(weight), checkpoint.read(weight));
                assert!(found.unwrap() == want.unwrap(), "{what}: {weight:?}");
            }
        }
    }
}
