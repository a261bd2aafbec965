//! NanoChat: squared ReLU without gate, norms without weights, normalised embeddings, and capped logits.

use crate::{
    FfnKind, LayerWeight, Positions, QueryKeyNorm, Weight,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, llama_names},
    },
    source::{Transform, WeightSource},
};

/// NanoChat, in the layout of transformers.
pub(super) const NANOCHAT: Family = Family {
    name: "nanochat",
    architectures: &["NanoChatForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 768,
            layers: 12,
            heads: 6,
            ffn_size: 8192,
            vocabulary: 50304,
            activation: "relu2",
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "nanochat", &defaults)?;
        config.ffn = FfnKind::Plain;
        config.biases = biases(keys)?;
        if config.tied_embeddings {
            return Err(keys.unsupported("tie_word_embeddings", "true", "false"));
        }
        // Because the norm has no weights, it gives the same result before and after the rotation.
        config.query_key_norm = QueryKeyNorm::PerHead;
        // NanoChat rotates in the opposite direction.
        if let Positions::Rotary(rotary) = &mut config.positions {
            for frequency in &mut rotary.frequencies {
                *frequency = -*frequency;
            }
        }
        config.soft_caps.logits = match keys.positive("final_logit_softcapping")? {
            None if !keys.has("final_logit_softcapping") => Some(15.0),
            cap => cap.map(|cap| cap as f32), // null means no cap
        };
        Ok(config)
    },
    source: |config, weight| match weight {
        Weight::FinalNorm => WeightSource::Constant(1.0),
        Weight::Embedding => llama_names(weight).with(Transform::NormalisedRows {
            epsilon: config.norm_epsilon,
        }),
        Weight::Layer(layer, layer_weight) => match layer_weight {
            LayerWeight::AttentionNorm
            | LayerWeight::FfnNorm
            | LayerWeight::QueryNorm
            | LayerWeight::KeyNorm => WeightSource::Constant(1.0),
            LayerWeight::Gate => {
                WeightSource::tensor(format!("model.layers.{layer}.mlp.fc1.weight"))
            }
            LayerWeight::Down => {
                WeightSource::tensor(format!("model.layers.{layer}.mlp.fc2.weight"))
            }
            _ => llama_names(weight),
        },
        weight => llama_names(weight),
    },
    ignored: IGNORED,
};
