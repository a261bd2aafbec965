//! Mixtures of experts made from dense goldens.

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
