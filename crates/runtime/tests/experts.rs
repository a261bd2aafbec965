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

use std::{collections::HashMap, path::Path};

use candle_core::{Device, Tensor};
use golden::Golden;
use mixtures::{LATENT, LATENT_VOCABULARY, RECIPES, Recipe, write_latent, write_mixture};
use packing::pack_bundle;
use powerinfer_artifact::{
    ArtifactError,
    plan::{Plan, Policy},
    random::Random,
};
use powerinfer_kernels::Isa;
use powerinfer_model::{
    Activation, Checkpoint, LanguageModel, ModelConfig, RouterScores, Weight,
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
    let order = (0..checkpoint.config().ffn_size as u32).rev();
    runtime_in_order(checkpoint, order, quant, hot, policy, threads)
}

/// [`runtime`] with the neurons in the given order.
fn runtime_in_order(
    checkpoint: &Checkpoint,
    order: impl Iterator<Item = u32> + Clone,
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

/// The runtime keeps one latent vector per position; the reference engine computes the keys and values of each head.
#[test]
fn latent_attention_is_that_of_the_reference_engine() {
    let prompt: Vec<u32> = (0..70).map(|i| i * i % LATENT_VOCABULARY as u32).collect();
    for latent in LATENT {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_latent(latent, folder.path());
        let want = ReferenceModel::load(&checkpoint)
            .unwrap()
            .forward(&prompt)
            .unwrap();
        for (hot, threads) in [(0, 1), (40, 3)] {
            let what = format!("{latent:?} {hot} {threads}");
            let mut model = runtime(&checkpoint, Format::F32, hot, Policy::Dense, threads);
            assert_near(&model.forward(&prompt).unwrap(), &want, 1e-4, &what);
            let computed = model.observers_mut().take_statistics().computed_share();
            let experts = checkpoint.config().experts.clone().unwrap();
            // 44 neurons of selected experts and 22 shared ones; in a dense layer, 85, rounded up to whole experts.
            let neurons = 66 * (3 - latent.dense) + 88 * latent.dense;
            let share = neurons as f64 / (3 * experts.neurons()) as f64;
            assert!(
                (computed - share).abs() < 1e-9,
                "{what}: {computed} {share}"
            );
        }
        // Results are bit-identical for all batch sizes and thread counts, in every format.
        for quant in [Format::F32, Format::F16, Format::Q8_0, Format::Q4_0] {
            let mut model = runtime(&checkpoint, quant, 30, Policy::Dense, 1);
            let whole = model.forward(&prompt).unwrap();
            let mut model = runtime(&checkpoint, quant, 30, Policy::Dense, 3);
            let mut parts = model.forward(&prompt[..1]).unwrap();
            parts.extend(model.forward(&prompt[1..4]).unwrap());
            parts.extend(model.forward(&prompt[4..69]).unwrap());
            parts.extend(model.forward(&prompt[69..]).unwrap());
            assert!(whole == parts, "{latent:?} {quant}");
        }
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

/// In a mixture of many experts, more than 64 tokens run together.
#[test]
fn tokens_of_long_prompts_share_experts_and_keep_their_bits() {
    let recipe = Recipe {
        experts: 150,
        size: 172,
        ..RECIPES[0]
    };
    let golden = Golden::open(recipe.golden);
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = write_mixture(&recipe, true, folder.path());
    let neurons = checkpoint.config().ffn_size as u32;
    let ids = golden.ids("p70.input_ids");
    let prompt: Vec<u32> = ids.iter().copied().cycle().take(200).collect();
    // Experts follow one another or are interleaved; if interleaved, tokens share few rows of a group.
    let interleaved = (0..neurons).map(|place| place % 150 * 172 + place / 150);
    let orders: [Vec<u32>; 2] = [(0..neurons).collect(), interleaved.collect()];
    for (order, quant, policy, hot) in [
        (0, Format::F32, Policy::Dense, 0),
        (0, Format::Q4_0, Policy::Dense, 1000),
        (0, Format::Q8_0, Policy::Exact, 0),
        (1, Format::Q4_0, Policy::Exact, 300),
        (1, Format::F32, Policy::Dense, 0),
    ] {
        let what = format!("order {order}, {quant}, {policy}");
        let order = || orders[order].iter().copied();
        let mut model = runtime_in_order(&checkpoint, order(), quant, hot, policy, 2);
        assert!(model.prompt_batch() > 128, "{what}");
        let together = model.forward(&prompt).unwrap();
        if quant == Format::F32 {
            let vocabulary = checkpoint.config().vocabulary_size;
            golden.assert_logits(&together[..ids.len() * vocabulary], "p70", &what);
        }
        let mut other = runtime_in_order(&checkpoint, order(), quant, hot, policy, 1);
        let pieces = prompt.chunks(50).map(|piece| other.forward(piece).unwrap());
        assert!(pieces.flatten().eq(together), "{what}");
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
    if architecture == "gpt-oss" {
        let window = config.attention_windows[0].unwrap();
        for (key, value) in [
            number("attention.sliding_window", window),
            number("rope.scaling.original_context_length", 4096),
        ] {
            metadata.push(key, value);
        }
        let of_scaling = |key: &str| format!("{architecture}.rope.scaling.{key}");
        metadata.push(of_scaling("type"), "yarn");
        metadata.push(of_scaling("factor"), 32f32);
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
    let theta = match architecture {
        "llama" => 1e4f32,
        "gpt-oss" => 1.5e5,
        _ => 1e6,
    };
    metadata.push(format!("{architecture}.rope.freq_base"), theta);
    let mut tensors: Vec<Written> = Vec::new();
    for weight in config.weights() {
        use powerinfer_model::LayerWeight::{
            AttentionNorm, Down, DownBias, FfnNorm, Gate, GateBias, Key, KeyBias, KeyNorm, Output,
            OutputBias, Query, QueryBias, QueryNorm, Router, RouterBias, SharedGate, Sinks, Up,
            UpBias, Value, ValueBias,
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
            FfnNorm if architecture == "gpt-oss" => "post_attention_norm.weight",
            FfnNorm => "ffn_norm.weight",
            Sinks => "attn_sinks.weight",
            OutputBias => "attn_output.bias",
            RouterBias => "ffn_gate_inp.bias",
            DownBias => "ffn_down_exps.bias",
            GateBias | UpBias => {
                let name = match weight {
                    GateBias => "ffn_gate_exps.bias",
                    _ => "ffn_up_exps.bias",
                };
                tensors.push((at(name), vec![experts.count, experts.size], values));
                continue;
            }
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
    write_f32(path, &metadata, &tensors);
}

/// Writes a GGUF file with `tensors` in float32.
fn write_f32(path: &Path, metadata: &Metadata, tensors: &[Written]) {
    let entries: Vec<TensorEntry> = tensors
        .iter()
        .map(|(name, shape, _)| TensorEntry {
            name: name.clone(),
            shape: shape.clone(),
            elements: Elements::Weights(Format::F32),
        })
        .collect();
    write_gguf(path, Dialect::Ggml, metadata, &entries, |index, writer| {
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
fn a_gguf_file_of_gpt_oss_describes_the_same_model_as_its_safetensors() {
    let checkpoint = Golden::open("gptoss").checkpoint();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_as_gguf(&checkpoint, "gpt-oss", false, &path);
    let file = Checkpoint::open(&path).unwrap();
    let (found, want) = (file.config(), checkpoint.config());
    assert_eq!(
        (&found.experts, &found.positions, &found.attention_windows),
        (&want.experts, &want.positions, &want.attention_windows)
    );
    assert_eq!((found.ffn, found.activation), (want.ffn, want.activation));
    assert!(found.attention_sinks && found.biases == want.biases);
    for weight in want.weights() {
        let same = file.read(weight).unwrap() == checkpoint.read(weight).unwrap();
        assert!(same, "{weight:?}");
    }
}

#[test]
fn a_limit_that_is_not_positive_is_refused() {
    let mut config = Golden::open("gptoss").checkpoint().config().clone();
    assert_eq!(config.validate(), Ok(()));
    for limit in [0.0, -7.0, f32::NAN, f32::INFINITY] {
        config.activation = Activation::ClampedSwish { limit };
        let reason = config.validate().unwrap_err();
        assert!(reason.contains("the limit of the activation"), "{reason}");
    }
    config.activation = Activation::Silu;
    let reason = config.validate().unwrap_err();
    assert!(reason.contains("does not fit the kind"), "{reason}");
}

#[test]
fn absent_keys_of_gpt_oss_have_the_defaults_of_its_class() {
    let golden = Golden::open("gptoss").folder;
    let text = std::fs::read(golden.join("config.json")).unwrap();
    let parse = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut config = serde_json::from_slice(&text).unwrap();
        change(&mut config);
        ModelConfig::parse(config.to_string().as_bytes(), &golden)
    };
    let stated = parse(&|_| {}).unwrap();
    let absent = parse(&|config| {
        let keys = config.as_object_mut().unwrap();
        for key in [
            "rope_scaling",
            "attention_bias",
            "layer_types",
            "swiglu_limit",
        ] {
            keys.remove(key).unwrap();
        }
    });
    assert_eq!(absent.unwrap(), stated);
    let plain = parse(&|config| config["rope_scaling"] = serde_json::Value::Null).unwrap();
    assert_ne!(plain.positions, stated.positions);
    let other = parse(&|config| config["swiglu_alpha"] = 1.5.into()).unwrap_err();
    assert!(other.to_string().contains("swiglu_alpha"), "{other}");
    parse(&|config| config["swiglu_alpha"] = 1.702.into()).unwrap();
}

#[test]
fn a_single_expert_must_be_stored_as_one() {
    let golden = Golden::open("gptoss");
    let folder = tempfile::tempdir().unwrap();
    let tensors =
        candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu);
    for flat in ["gate_up_proj", "gate_up_proj_bias", "down_proj_bias", ""] {
        let config = std::fs::read(golden.folder.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        (config["num_local_experts"], config["num_experts_per_tok"]) = (1.into(), 1.into());
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let one = tensors.as_ref().unwrap().iter().map(|(name, tensor)| {
            let is_of_experts = name.contains(".experts.") || name.contains(".router.");
            let tensor = match is_of_experts {
                true => tensor.narrow(0, 0, 1).unwrap().contiguous().unwrap(),
                false => tensor.clone(),
            };
            let is_flat = !flat.is_empty() && name.ends_with(flat);
            let tensor = if is_flat {
                tensor.squeeze(0).unwrap()
            } else {
                tensor
            };
            (name.clone(), tensor)
        });
        let one: HashMap<String, Tensor> = one.collect();
        candle_core::safetensors::save(&one, folder.path().join("model.safetensors")).unwrap();
        let opened = Checkpoint::open(folder.path());
        match flat {
            // One row, which may be a vector.
            "" | "down_proj_bias" => {
                let model = runtime(&opened.unwrap(), Format::F32, 10, Policy::Dense, 1);
                assert_eq!(model.config().experts.as_ref().unwrap().count, 1);
            }
            _ => assert!(opened.unwrap_err().to_string().contains(flat)),
        }
    }
}

/// Value of an MXFP4 code: a sign bit, two exponent bits and one mantissa bit.
fn e2m1(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 1 & 3, f32::from(code & 1));
    let magnitude = match exponent {
        0 => mantissa / 2.0,
        exponent => (2.0 + mantissa) * 2f32.powi(i32::from(exponent) - 2),
    };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

#[test]
fn experts_in_mxfp4_are_read_as_transformers_unpacks_them() {
    let golden = Golden::open("gptoss").folder;
    let config = std::fs::read(golden.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    (config["hidden_size"], config["intermediate_size"]) = (64.into(), 32.into());
    let (packed, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let text = config.to_string();
    std::fs::write(plain.path().join("config.json"), &text).unwrap();
    let shapes = ModelConfig::parse(text.as_bytes(), plain.path()).unwrap();
    config["quantization_config"] = serde_json::json!({
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"],
    });
    std::fs::write(packed.path().join("config.json"), config.to_string()).unwrap();
    let mut random = Random::new(9);
    let (mut in_plain, mut in_packed) = (HashMap::new(), HashMap::new());
    for tensor in shapes.stored_tensors() {
        let count: usize = tensor.shape.iter().product();
        if !tensor.name.ends_with("_proj") {
            let values = (0..count).map(|_| random.normal() as f32).collect();
            let values = Tensor::from_vec(values, &tensor.shape[..], &Device::Cpu).unwrap();
            in_packed.insert(tensor.name.clone(), values.clone());
            in_plain.insert(tensor.name, values);
            continue;
        }
        // The file stores rows of blocks; unpacking transposes them.
        let [experts, columns, rows] = tensor.shape[..] else {
            panic!("{:?}", tensor.shape);
        };
        let blocks = columns / 32;
        let bytes: Vec<u8> = (0..count / 2).map(|_| random.below(256) as u8).collect();
        let scales: Vec<u8> = (0..count / 32)
            .map(|_| 120 + random.below(10) as u8)
            .collect();
        let mut values = vec![0.0; count];
        for (index, (block, scale)) in bytes.chunks(16).zip(&scales).enumerate() {
            let (matrix, row, first) = (
                index / blocks / rows,
                index / blocks % rows,
                index % blocks * 32,
            );
            for (offset, byte) in block.iter().enumerate() {
                for (half, code) in [byte & 15, byte >> 4].into_iter().enumerate() {
                    let column = first + 2 * offset + half;
                    values[(matrix * columns + column) * rows + row] =
                        e2m1(code) * 2f32.powi(i32::from(*scale) - 127);
                }
            }
        }
        let values = Tensor::from_vec(values, &tensor.shape[..], &Device::Cpu).unwrap();
        in_plain.insert(tensor.name.clone(), values);
        for (end, bytes, shape) in [
            ("blocks", bytes, vec![experts, rows, blocks, 16]),
            ("scales", scales, vec![experts, rows, blocks]),
        ] {
            let bytes = Tensor::from_vec(bytes, shape, &Device::Cpu).unwrap();
            in_packed.insert(format!("{}_{end}", tensor.name), bytes);
        }
    }
    for (folder, tensors) in [(&packed, &in_packed), (&plain, &in_plain)] {
        candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).unwrap();
    }
    let [packed, plain] = [&packed, &plain].map(|folder| Checkpoint::open(folder.path()).unwrap());
    for weight in shapes.weights() {
        let same = packed.read(weight).unwrap() == plain.read(weight).unwrap();
        assert!(same, "{weight:?}");
    }
    assert_ne!(packed.identity().fingerprint, plain.identity().fingerprint);
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

#[test]
fn older_gguf_files_of_deepseek_describe_the_same_model_as_its_safetensors() {
    for latent in LATENT {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = write_latent(latent, folder.path());
        let config = checkpoint.config();
        let (sizes, experts) = (config.latent.unwrap(), config.experts.clone().unwrap());
        let stored = folder.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
        let tensor = |name: &str| stored.get(&format!("{name}.weight"));
        let mut tensors: Vec<Written> = Vec::new();
        let written = |name: String, tensor: &Tensor| -> Written {
            let values = tensor.flatten_all().unwrap().to_vec1().unwrap();
            (name, tensor.dims().to_vec(), values)
        };
        let mut copy = |to: String, from: &str| {
            tensors.extend(tensor(from).map(|tensor| written(format!("{to}.weight"), tensor)));
        };
        for (to, from) in [
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("output", "lm_head"),
        ] {
            copy(to.to_owned(), from);
        }
        for layer in 0..config.layer_count {
            for (to, from) in [
                ("attn_norm", "input_layernorm"),
                ("ffn_norm", "post_attention_layernorm"),
                ("attn_q", "self_attn.q_proj"),
                ("attn_q_a", "self_attn.q_a_proj"),
                ("attn_q_a_norm", "self_attn.q_a_layernorm"),
                ("attn_q_b", "self_attn.q_b_proj"),
                ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
                ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
                ("attn_kv_b", "self_attn.kv_b_proj"),
                ("attn_output", "self_attn.o_proj"),
                ("ffn_gate_inp", "mlp.gate"),
                ("ffn_gate", "mlp.gate_proj"),
                ("ffn_up", "mlp.up_proj"),
                ("ffn_down", "mlp.down_proj"),
                ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
                ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
                ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
            ] {
                copy(
                    format!("blk.{layer}.{to}"),
                    &format!("model.layers.{layer}.{from}"),
                );
            }
        }
        for layer in latent.dense..config.layer_count {
            for matrix in ["gate", "up", "down"] {
                let of =
                    |expert| format!("model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj");
                let all: Vec<_> = (0..experts.count)
                    .filter_map(|expert| tensor(&of(expert)))
                    .collect();
                let name = format!("blk.{layer}.ffn_{matrix}_exps.weight");
                tensors.push(written(name, &Tensor::stack(&all, 0).unwrap()));
            }
        }
        let mut metadata = Metadata::default();
        metadata.push("general.architecture", "deepseek2");
        for (key, value) in [
            ("context_length", config.context_length),
            ("embedding_length", config.hidden_size),
            ("block_count", config.layer_count),
            ("feed_forward_length", 85),
            ("leading_dense_block_count", latent.dense),
            ("attention.head_count", config.head_count),
            ("attention.head_count_kv", config.head_count),
            ("attention.kv_lora_rank", sizes.rank),
            ("attention.key_length", sizes.query_size()),
            ("attention.value_length", sizes.value_size),
            ("rope.dimension_count", sizes.rotary_size),
            ("expert_count", experts.count),
            ("expert_used_count", experts.per_token),
            ("expert_feed_forward_length", experts.size),
            ("expert_shared_count", 1),
        ] {
            metadata.push(format!("deepseek2.{key}"), value);
        }
        if let Some(rank) = sizes.query_rank {
            metadata.push("deepseek2.attention.q_lora_rank", rank);
        }
        for (key, value) in [
            ("attention.layer_norm_rms_epsilon", config.norm_epsilon),
            ("rope.freq_base", 1e4),
            ("expert_weights_scale", experts.scale),
        ] {
            metadata.push(format!("deepseek2.{key}"), value);
        }
        if latent.has_yarn {
            let of_scaling = |key: &str| format!("deepseek2.rope.scaling.{key}");
            metadata.push(of_scaling("type"), "yarn");
            metadata.push(of_scaling("factor"), 4f32);
            metadata.push(of_scaling("original_context_length"), 32usize);
            metadata.push(of_scaling("yarn_log_multiplier"), 0.0707f32);
        }
        let path = folder.path().join("old.gguf");
        write_f32(&path, &metadata, &tensors);
        let file = Checkpoint::open(&path).unwrap();
        assert_eq!(file.config().latent, config.latent, "{latent:?}");
        assert_eq!(file.config().experts, config.experts, "{latent:?}");
        for weight in config.weights() {
            let (found, want) = (file.read(weight).unwrap(), checkpoint.read(weight).unwrap());
            // YaRN's factor was rounded to float32.
            assert_near(&found, &want, 1e-6, &format!("{latent:?} {weight:?}"));
        }
        let ids: Vec<u32> = (0..40).collect();
        let [found, want] =
            [&file, &checkpoint].map(|it| ReferenceModel::load(it).unwrap().forward(&ids).unwrap());
        assert_near(&found, &want, 1e-5, &format!("{latent:?}"));
    }
}
