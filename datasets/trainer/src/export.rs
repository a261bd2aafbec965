//! Writes the model as an ordinary Hugging Face checkpoint in bfloat16.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, anyhow};
use candle_core::{DType, Tensor};
use serde_json::json;
use tokenizers::Tokenizer;

use crate::{
    model::{CONTEXT, FFN, HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, LAYERS, Model, THETA},
    ops::rms_norm::EPSILON,
    tokenizer::{BEGIN, END},
};

/// Writes `config.json`, `model.safetensors`, the tokenizer's files and `generation_config.json`
/// into `folder`.
pub(crate) fn export(model: &Model, tokenizer: &Tokenizer, folder: &Path) -> anyhow::Result<()> {
    let vocabulary = model.embedding.dim(0)?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "head_dim": HEAD_SIZE,
        "hidden_act": model.activation.name(),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPSILON,
        "rope_scaling": null,
        "rope_theta": THETA,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    });
    let generation = json!({ "bos_token_id": BEGIN, "eos_token_id": END, "do_sample": false });
    let special = json!({ "bos_token": "<s>", "eos_token": "</s>" });
    let mut tokenizer_config = special.clone();
    tokenizer_config["tokenizer_class"] = json!("PreTrainedTokenizerFast");
    tokenizer_config["clean_up_tokenization_spaces"] = json!(false);
    tokenizer_config["model_max_length"] = json!(CONTEXT);
    for (name, value) in [
        ("config.json", &config),
        ("generation_config.json", &generation),
        ("special_tokens_map.json", &special),
        ("tokenizer_config.json", &tokenizer_config),
    ] {
        write(&folder.join(name), format!("{value:#}\n").as_bytes())?;
    }
    let text = tokenizer
        .to_string(false)
        .map_err(|error| anyhow!("{error}"))?;
    write(&folder.join("tokenizer.json"), text.as_bytes())?;
    write(&folder.join("model.safetensors"), &weights(model)?)
}

/// The weights under the names of the Llama family, as a safetensors file.
fn weights(model: &Model) -> anyhow::Result<Vec<u8>> {
    let mut tensors = BTreeMap::new();
    let mut put = |name: String, tensor: Tensor| -> anyhow::Result<()> {
        tensors.insert(name, tensor.to_dtype(DType::BF16)?);
        Ok(())
    };
    put(
        "model.embed_tokens.weight".to_owned(),
        model.embedding.as_tensor().clone(),
    )?;
    put(
        "model.norm.weight".to_owned(),
        model.final_norm.as_tensor().clone(),
    )?;
    for (index, layer) in model.layers.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let (queries, keys) = (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE);
        put(
            name("input_layernorm"),
            layer.attention_norm.as_tensor().clone(),
        )?;
        put(
            name("post_attention_layernorm"),
            layer.ffn_norm.as_tensor().clone(),
        )?;
        put(
            name("self_attn.q_proj"),
            layer.query_key_value.narrow(0, 0, queries)?,
        )?;
        put(
            name("self_attn.k_proj"),
            layer.query_key_value.narrow(0, queries, keys)?,
        )?;
        put(
            name("self_attn.v_proj"),
            layer.query_key_value.narrow(0, queries + keys, keys)?,
        )?;
        put(name("self_attn.o_proj"), layer.output.as_tensor().clone())?;
        put(name("mlp.gate_proj"), layer.gate_up.narrow(0, 0, FFN)?)?;
        put(name("mlp.up_proj"), layer.gate_up.narrow(0, FFN, FFN)?)?;
        put(name("mlp.down_proj"), layer.down.as_tensor().clone())?;
    }
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(safetensors::serialize(&tensors, Some(metadata))?)
}

/// Writes beside the target and renames.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let beside = path.with_extension("partial");
    std::fs::write(&beside, bytes)
        .with_context(|| format!("cannot write `{}`", beside.display()))?;
    std::fs::rename(&beside, path).with_context(|| format!("cannot write `{}`", path.display()))
}
