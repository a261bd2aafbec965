//! Mixtures of experts, made from dense goldens or with random weights.

use std::{collections::HashMap, path::Path};

use candle_core::{Device, Tensor};
use powerinfer_artifact::random::Random;
use powerinfer_model::Checkpoint;
use serde_json::{Value, json};

use crate::golden::Golden;

/// How a mixture is made from a dense golden.
pub(crate) struct Recipe {
    pub(crate) golden: &'static str,
    pub(crate) architecture: &'static str,
    pub(crate) experts: usize,
    pub(crate) per_token: usize,
    /// Neurons of an expert; the first is made of the dense model's first neurons, and so on.
    pub(crate) size: usize,
    /// Neurons of a shared expert, the dense model's last.
    pub(crate) shared: usize,
}

pub(crate) const RECIPES: [Recipe; 3] = [
    Recipe {
        golden: "llama-relu-gqa",
        architecture: "MixtralForCausalLM",
        experts: 4,
        per_token: 2,
        size: 43,
        shared: 0,
    },
    Recipe {
        golden: "qwen3-qknorm",
        architecture: "Qwen3MoeForCausalLM",
        experts: 5,
        per_token: 3,
        size: 32,
        shared: 0,
    },
    Recipe {
        golden: "qwen2-bias-tied",
        architecture: "Qwen2MoeForCausalLM",
        experts: 4,
        per_token: 2,
        size: 32,
        shared: 24,
    },
];

/// Writes the mixture into `folder`; if `are_equal`, every expert gets the dense model's first neurons.
pub(crate) fn write_mixture(recipe: &Recipe, are_equal: bool, folder: &Path) -> Checkpoint {
    let from = Golden::open(recipe.golden).folder;
    let tensors =
        candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    let is_mixtral = recipe.architecture.starts_with("Mixtral");
    let mut random = Random::new(5);
    let mut written: HashMap<String, Tensor> = HashMap::new();
    for (name, tensor) in tensors {
        let Some((layer, matrix)) = name.split_once(".mlp.") else {
            written.insert(name, tensor);
            continue;
        };
        let axis = usize::from(matrix.starts_with("down"));
        let part = |first, size| tensor.narrow(axis, first, size).unwrap().contiguous();
        for expert in 0..recipe.experts {
            let name = match (is_mixtral, &matrix[..4]) {
                (false, _) => format!("{layer}.mlp.experts.{expert}.{matrix}"),
                (true, own) => {
                    let own = match own {
                        "gate" => "w1",
                        "up_p" => "w3",
                        _ => "w2",
                    };
                    format!("{layer}.block_sparse_moe.experts.{expert}.{own}.weight")
                }
            };
            let first = if are_equal { 0 } else { expert * recipe.size };
            written.insert(name, part(first, recipe.size).unwrap());
        }
        if recipe.shared > 0 {
            let first = tensor.dim(axis).unwrap() - recipe.shared;
            let shared = part(first, recipe.shared).unwrap();
            written.insert(format!("{layer}.mlp.shared_expert.{matrix}"), shared);
        }
        if matrix.starts_with("gate") {
            let hidden = tensor.dim(1).unwrap();
            let mut router = |rows: usize| {
                let values = (0..rows * hidden).map(|_| random.normal() as f32);
                Tensor::from_vec(values.collect(), (rows, hidden), &Device::Cpu).unwrap()
            };
            let name = if is_mixtral {
                "block_sparse_moe.gate.weight"
            } else {
                "mlp.gate.weight"
            };
            written.insert(format!("{layer}.{name}"), router(recipe.experts));
            if recipe.shared > 0 {
                written.insert(format!("{layer}.mlp.shared_expert_gate.weight"), router(1));
            }
        }
    }
    candle_core::safetensors::save(&written, folder.join("model.safetensors")).unwrap();
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let changes = json!({
        "architectures": [recipe.architecture],
        "num_experts_per_tok": recipe.per_token,
    });
    let more = if is_mixtral {
        json!({ "num_local_experts": recipe.experts, "intermediate_size": recipe.size, "sliding_window": null })
    } else {
        json!({ "num_experts": recipe.experts, "moe_intermediate_size": recipe.size })
    };
    for (key, value) in [changes, more]
        .iter()
        .flat_map(|map| map.as_object().unwrap())
    {
        config[key] = value.clone();
    }
    if recipe.shared > 0 {
        config["shared_expert_intermediate_size"] = recipe.shared.into();
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder).unwrap()
}

/// A model with latent attention and random weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Latent {
    pub(crate) query_rank: Option<usize>,
    /// Number of leading layers with a dense FFN, out of three layers.
    pub(crate) dense: usize,
    pub(crate) has_yarn: bool,
}

pub(crate) const LATENT: [Latent; 3] = [
    Latent {
        query_rank: None,
        dense: 1,
        has_yarn: false,
    },
    Latent {
        query_rank: Some(24),
        dense: 0,
        has_yarn: true,
    },
    Latent {
        query_rank: Some(30),
        dense: 2,
        has_yarn: false,
    },
];

/// Vocabulary size of the models that [`write_latent`] writes.
pub(crate) const LATENT_VOCABULARY: usize = 61;

/// Writes a model with the layout of DeepSeek-V2 into `folder`.
pub(crate) fn write_latent(latent: Latent, folder: &Path) -> Checkpoint {
    const HIDDEN: usize = 48;
    const HEADS: usize = 3;
    const RANK: usize = 20;
    const KEY: usize = 12;
    const ROTARY: usize = 8;
    const VALUE: usize = 10;
    const EXPERTS: usize = 4;
    const SIZE: usize = 22;
    const DENSE: usize = 85;
    let mut random = Random::new(7);
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let count = shape.iter().product::<usize>();
        let columns = shape[shape.len() - 1] as f32;
        let values = (0..count).map(|_| {
            let normal = random.normal() as f32;
            // Norms are near 1.
            if shape.len() == 1 {
                1.0 + 0.1 * normal
            } else {
                normal * 1.5 / columns.sqrt()
            }
        });
        let values: Vec<f32> = values.collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        tensors.insert(name, tensor);
    };
    add(
        "model.embed_tokens.weight".to_owned(),
        &[LATENT_VOCABULARY, HIDDEN],
    );
    add("lm_head.weight".to_owned(), &[LATENT_VOCABULARY, HIDDEN]);
    add("model.norm.weight".to_owned(), &[HIDDEN]);
    for layer in 0..3 {
        let mut add = |name: &str, shape: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        };
        add("input_layernorm", &[HIDDEN]);
        add("post_attention_layernorm", &[HIDDEN]);
        let queries = HEADS * (KEY + ROTARY);
        match latent.query_rank {
            None => add("self_attn.q_proj", &[queries, HIDDEN]),
            Some(rank) => {
                add("self_attn.q_a_proj", &[rank, HIDDEN]);
                add("self_attn.q_a_layernorm", &[rank]);
                add("self_attn.q_b_proj", &[queries, rank]);
            }
        }
        add("self_attn.kv_a_proj_with_mqa", &[RANK + ROTARY, HIDDEN]);
        add("self_attn.kv_a_layernorm", &[RANK]);
        add("self_attn.kv_b_proj", &[HEADS * (KEY + VALUE), RANK]);
        add("self_attn.o_proj", &[HIDDEN, HEADS * VALUE]);
        let mut ffn = |folder: &str, size: usize| {
            add(&format!("{folder}.gate_proj"), &[size, HIDDEN]);
            add(&format!("{folder}.up_proj"), &[size, HIDDEN]);
            add(&format!("{folder}.down_proj"), &[HIDDEN, size]);
        };
        if layer < latent.dense {
            ffn("mlp", DENSE);
            continue;
        }
        for expert in 0..EXPERTS {
            ffn(&format!("mlp.experts.{expert}"), SIZE);
        }
        ffn("mlp.shared_experts", SIZE);
        add("mlp.gate", &[EXPERTS, HIDDEN]);
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    let yarn = json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    });
    let config = json!({
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": HEADS,
        "q_lora_rank": latent.query_rank, "kv_lora_rank": RANK, "qk_nope_head_dim": KEY,
        "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE,
        "intermediate_size": DENSE, "moe_intermediate_size": SIZE, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": latent.dense,
        "routed_scaling_factor": 1.5, "vocab_size": LATENT_VOCABULARY,
        "max_position_embeddings": 128, "rope_scaling": latent.has_yarn.then_some(yarn),
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder).unwrap()
}
