//! Published sparse models: their `config.json` as published, and tiny checkpoints with their tensor names.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};
use powerinfer_model::{
    Activation, Block, Checkpoint, FfnKind, LayerWeight, ModelConfig, Multipliers, Weight,
};
use serde_json::{Value, json};

/// Published model: configuration, changes for a tiny version, tensors.
struct Published {
    name: &'static str,
    config: Value,
    tiny: Value,
    /// Names and shapes of tensors outside layers.
    top: Tensors,
    /// Names and shapes of each layer's tensors, with `#` for the layer.
    layer: Tensors,
}

type Tensors = &'static [(&'static str, &'static [usize])];

const LLAMA_TOP: Tensors = &[
    ("model.embed_tokens.weight", &[32, 16]),
    ("model.norm.weight", &[16]),
    ("lm_head.weight", &[32, 16]),
];
/// Four heads and two key/value heads of size four, 24 neurons.
const LLAMA_LAYER: Tensors = &[
    ("model.layers.#.input_layernorm.weight", &[16]),
    ("model.layers.#.self_attn.q_proj.weight", &[16, 16]),
    ("model.layers.#.self_attn.k_proj.weight", &[8, 16]),
    ("model.layers.#.self_attn.v_proj.weight", &[8, 16]),
    ("model.layers.#.self_attn.o_proj.weight", &[16, 16]),
    ("model.layers.#.self_attn.rotary_emb.inv_freq", &[2]),
    ("model.layers.#.post_attention_layernorm.weight", &[16]),
    ("model.layers.#.mlp.gate_proj.weight", &[24, 16]),
    ("model.layers.#.mlp.up_proj.weight", &[24, 16]),
    ("model.layers.#.mlp.down_proj.weight", &[16, 24]),
];
const FALCON_TOP: Tensors = &[
    ("transformer.word_embeddings.weight", &[32, 16]),
    ("transformer.ln_f.weight", &[16]),
    ("transformer.ln_f.bias", &[16]),
    ("lm_head.weight", &[32, 16]),
];
const FALCON_LAYER: Tensors = &[
    ("transformer.h.#.ln_attn.weight", &[16]),
    ("transformer.h.#.ln_attn.bias", &[16]),
    ("transformer.h.#.ln_mlp.weight", &[16]),
    ("transformer.h.#.ln_mlp.bias", &[16]),
    (
        "transformer.h.#.self_attention.query_key_value.weight",
        &[32, 16],
    ),
    ("transformer.h.#.self_attention.dense.weight", &[16, 16]),
    ("transformer.h.#.mlp.dense_h_to_4h.weight", &[64, 16]),
    ("transformer.h.#.mlp.dense_4h_to_h.weight", &[16, 64]),
];
/// Names of some facebook/opt-* checkpoints, without the name of the enclosing model.
const OPT_TOP: Tensors = &[
    ("decoder.embed_tokens.weight", &[32, 16]),
    ("decoder.embed_positions.weight", &[32, 16]),
    ("decoder.final_layer_norm.weight", &[16]),
    ("decoder.final_layer_norm.bias", &[16]),
];
const OPT_LAYER: Tensors = &[
    ("decoder.layers.#.self_attn.q_proj.weight", &[16, 16]),
    ("decoder.layers.#.self_attn.q_proj.bias", &[16]),
    ("decoder.layers.#.self_attn.k_proj.weight", &[16, 16]),
    ("decoder.layers.#.self_attn.k_proj.bias", &[16]),
    ("decoder.layers.#.self_attn.v_proj.weight", &[16, 16]),
    ("decoder.layers.#.self_attn.v_proj.bias", &[16]),
    ("decoder.layers.#.self_attn.out_proj.weight", &[16, 16]),
    ("decoder.layers.#.self_attn.out_proj.bias", &[16]),
    ("decoder.layers.#.self_attn_layer_norm.weight", &[16]),
    ("decoder.layers.#.self_attn_layer_norm.bias", &[16]),
    ("decoder.layers.#.fc1.weight", &[24, 16]),
    ("decoder.layers.#.fc1.bias", &[24]),
    ("decoder.layers.#.fc2.weight", &[16, 24]),
    ("decoder.layers.#.fc2.bias", &[16]),
    ("decoder.layers.#.final_layer_norm.weight", &[16]),
    ("decoder.layers.#.final_layer_norm.bias", &[16]),
];

/// Overrides keys of `config`.
fn with(mut config: Value, changes: &Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn llama(name: &'static str, changes: Value) -> Published {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "relu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16",
        "transformers_version": "4.31.0", "use_cache": true, "vocab_size": 32000,
    });
    Published {
        name,
        config: with(config, &changes),
        tiny: json!({
            "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 32,
        }),
        top: LLAMA_TOP,
        layer: LLAMA_LAYER,
    }
}

fn opt(name: &'static str, hidden: usize, layers: usize, heads: usize) -> Published {
    Published {
        name,
        config: json!({
            "_name_or_path": name, "_remove_final_layer_norm": false, "activation_dropout": 0.0,
            "activation_function": "relu", "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": true,
            "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4 * hidden, "hidden_size": hidden,
            "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
            "model_type": "opt", "num_attention_heads": heads, "num_hidden_layers": layers,
            "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
            "transformers_version": "4.21.0.dev0", "use_cache": true, "vocab_size": 50272,
            "word_embed_proj_dim": hidden,
        }),
        tiny: json!({
            "hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
            "vocab_size": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 30,
        }),
        top: OPT_TOP,
        layer: OPT_LAYER,
    }
}

fn falcon_40b() -> Published {
    Published {
        name: "SparseLLM/ReluFalcon-40B",
        config: json!({
            "activation": "relu", "alibi": false, "architectures": ["FalconForCausalLM"],
            "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
            "bias": false, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
            "hidden_size": 8192, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "model_type": "falcon", "multi_query": true, "new_decoder_architecture": true,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
            "parallel_attn": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": true, "vocab_size": 65024,
        }),
        tiny: json!({
            "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_kv_heads": 2, "vocab_size": 32,
        }),
        top: FALCON_TOP,
        layer: FALCON_LAYER,
    }
}

fn published() -> Vec<Published> {
    let wider = json!({
        "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 40,
    });
    let widest = json!({
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8,
    });
    let prosparse = json!({
        "architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama",
        "auto_map": {
            "AutoConfig": "configuration_sparsellama.SparseLlamaConfig",
            "AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM",
        },
        "hidden_act": "fatrelu", "hidden_act_param": 0.01, "rope_theta": 10000.0,
    });
    let mistral = |architecture: &str, kind: &str| {
        json!({
            "architectures": [architecture], "model_type": kind, "intermediate_size": 14336,
            "num_key_value_heads": 8, "sliding_window": 4096, "rope_theta": 10000.0,
            "max_position_embeddings": 32768, "auto_map": { "AutoConfig": "configuration.Config" },
        })
    };
    vec![
        llama("SparseLLM/ReluLLaMA-7B", json!({})),
        llama("SparseLLM/ReluLLaMA-13B", wider.clone()),
        llama("SparseLLM/ReluLLaMA-70B", widest),
        llama("SparseLLM/prosparse-llama-2-7b", prosparse.clone()),
        llama("SparseLLM/prosparse-llama-2-13b", with(prosparse, &wider)),
        falcon_40b(),
        llama(
            "PowerInfer/Bamboo-base-v0_1",
            mistral("BambooForCausalLM", "bamboo"),
        ),
        llama(
            "PowerInfer/TurboSparse-Mistral-Instruct",
            mistral("TurboSparseMistralForCausalLM", "turbosparsemistral"),
        ),
        opt("facebook/opt-125m", 768, 12, 12),
        opt("facebook/opt-6.7b", 4096, 32, 32),
        opt("facebook/opt-30b", 7168, 48, 56),
        opt("facebook/opt-66b", 9216, 64, 72),
    ]
}

fn parse(config: &Value) -> ModelConfig {
    let text = config.to_string();
    ModelConfig::parse(text.as_bytes(), Path::new("config.json")).unwrap()
}

/// Writes a checkpoint with the model's tensor names.
fn write(model: &Published, folder: &Path) {
    let config = with(model.config.clone(), &model.tiny);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors: BTreeMap<String, TensorSource<'_>> = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let bytes = (0..count)
            .flat_map(|index| (index as f32 / 1000.0 + name.len() as f32).to_le_bytes())
            .collect();
        tensors.insert(name, TensorSource::owned(Dtype::F32, shape.to_vec(), bytes));
    };
    for (name, shape) in model.top {
        add((*name).to_owned(), shape);
    }
    for layer in ["0", "1"] {
        for (name, shape) in model.layer {
            add(name.replace('#', layer), shape);
        }
    }
    write_tensors(&folder.join("model.safetensors"), None, &tensors).unwrap();
}

#[test]
fn published_configurations_and_tensor_names_are_supported() {
    for model in published() {
        parse(&model.config);
        let folder = tempfile::tempdir().unwrap();
        write(&model, folder.path());
        let checkpoint = Checkpoint::open(folder.path());
        let checkpoint = checkpoint.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        let config = checkpoint.config();
        assert!(config.activation.has_exact_zeros(), "{}", model.name);
        for weight in config.weights() {
            let count: usize = config.shape(weight).iter().product();
            assert_eq!(checkpoint.read(weight).unwrap().len(), count);
        }
        // The first element of the first query row is the first of its tensor.
        let query = Weight::Layer(1, LayerWeight::Query);
        let query = checkpoint.read(query).unwrap();
        assert_eq!(query[0].fract(), 0.0, "{}", model.name);
    }
}

#[test]
fn distinctive_settings_of_each_model_are_read() {
    let find = |name: &str| {
        let found = published().into_iter().find(|model| model.name == name);
        parse(&found.unwrap().config)
    };
    let relu = find("SparseLLM/ReluLLaMA-70B");
    assert_eq!((relu.activation, relu.kv_head_count), (Activation::Relu, 8));
    let fat = find("SparseLLM/prosparse-llama-2-7b").activation;
    assert_eq!(fat, Activation::FatRelu { threshold: 0.01 });
    for name in [
        "PowerInfer/Bamboo-base-v0_1",
        "PowerInfer/TurboSparse-Mistral-Instruct",
    ] {
        let config = find(name);
        assert_eq!(config.ffn, FfnKind::DoublyGated, "{name}");
        assert_eq!(config.attention_windows, [Some(4096); 32], "{name}");
    }
    let falcon = find("SparseLLM/ReluFalcon-40B");
    assert_eq!((falcon.block, falcon.ffn_size), (Block::Parallel, 4 * 8192));
    let opt = find("facebook/opt-6.7b");
    assert_eq!((opt.ffn, opt.tied_embeddings), (FfnKind::Plain, true));
}

#[test]
fn models_under_one_architecture_are_told_apart_by_their_type_and_keys() {
    let changed = |changes: Value| {
        let config = llama("a sparse Llama", changes).config.to_string();
        ModelConfig::parse(config.as_bytes(), Path::new("config.json"))
    };
    let architecture = json!(["SparseLlamaForCausalLM"]);
    // SparseLM computes ReLU, whatever the file says, with or without its training settings.
    for training in [
        json!({}),
        json!({ "sparsity_l1_coeff": 2e-5, "sparsity_mlp_execution_logic": "training", "is_llama_config": true }),
    ] {
        let config = json!({ "architectures": architecture, "model_type": "llama_sparse_relu", "hidden_act": "silu" });
        let config = changed(with(config, &training)).unwrap();
        assert_eq!(
            (config.activation, config.ffn),
            (Activation::Relu, FfnKind::Gated)
        );
    }
    let ungated = json!({ "architectures": architecture, "model_type": "llama_sparse_relu", "sparsity_gated_mlp": false });
    assert_eq!(changed(ungated).unwrap().ffn, FfnKind::Plain);
    let pro_sparse = json!({ "architectures": architecture, "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.01 });
    let fat = Activation::FatRelu { threshold: 0.01 };
    assert_eq!(changed(pro_sparse).unwrap().activation, fat);
    // A third model has sparse attention.
    let sparse_attention =
        json!({ "architectures": architecture, "model_type": "llama", "hidden_act": "silu" });
    let message = changed(sparse_attention).unwrap_err().to_string();
    assert!(message.contains("sparse attention"), "{message}");
}

#[test]
fn mini_cpm_s_is_read_as_published_and_in_the_format_of_llama() {
    let keys = json!({ "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4 });
    let changed = |changes: Value| {
        let config = with(llama("MiniCPM", changes).config, &keys).to_string();
        ModelConfig::parse(config.as_bytes(), Path::new("config.json")).unwrap()
    };
    let own = changed(json!({
        "architectures": ["MiniCPMForCausalLM"], "hidden_act": "fatrelu", "hidden_act_param": 0.03,
    }));
    assert_eq!(own.activation, Activation::FatRelu { threshold: 0.03 });
    assert_eq!(own.embedding_scale, 12.0);
    assert!((own.multipliers.residual - 1.4 / 32f32.sqrt()).abs() < 1e-6);
    assert_eq!(own.multipliers.logits, 256.0 / 4096.0);
    // The class of Llama ignores the multipliers, which such files contain already.
    let as_llama = changed(json!({ "hidden_act": "relu" }));
    assert_eq!(
        (as_llama.activation, as_llama.embedding_scale),
        (Activation::Relu, 1.0)
    );
    assert_eq!(as_llama.multipliers, Multipliers::default());
}

#[test]
fn contradictions_are_reported_by_tensor_or_key() {
    for (changes, named) in [
        (json!({ "vocab_size": 33 }), "model.embed_tokens.weight"),
        (
            json!({ "num_hidden_layers": 3 }),
            "model.layers.2.input_layernorm.weight",
        ),
        (json!({ "num_hidden_layers": 1 }), "`model.layers.1."),
        (json!({ "attention_bias": true }), "self_attn.q_proj.bias"),
        (json!({ "intermediate_size": 25 }), "mlp.gate_proj.weight"),
        (
            json!({ "attn_logit_softcapping": 30.0, "auto_map": { "AutoConfig": "own.Config" } }),
            "attn_logit_softcapping",
        ),
        (json!({ "num_key_value_heads": 3 }), "do not divide"),
        (json!({ "hidden_act": "mish" }), "mish"),
        (
            json!({ "rope_scaling": { "type": "mrope", "factor": 2.0 } }),
            "mrope",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = &published()[0];
        write(model, folder.path());
        let config = with(with(model.config.clone(), &model.tiny), &changes);
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(named), "{changes}: {message}");
    }
}
