//! Published dense models, listed in `published_dense.json`: their `config.json` as published, and their number
//! of parameters.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::path::Path;

use powerinfer_model::{ModelConfig, ModelError};
use serde_json::{Value, json};

/// Reads the list: keys shared by the models of a family, and the keys of each model.
fn listed() -> Value {
    serde_json::from_str(include_str!("published_dense.json")).unwrap()
}

fn parse(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::parse(config.to_string().as_bytes(), Path::new("config.json"))
}

/// Overrides keys of `config`.
fn with(config: &Value, changes: &Value) -> Value {
    let mut config = config.clone();
    let changes = changes.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(changes);
    config
}

/// Returns the published configuration called `name` with overridden keys.
fn published(name: &str, changes: &Value) -> Value {
    let listed = listed();
    let mut models = listed["models"].as_array().unwrap().iter();
    let model = models.find(|model| model["name"] == name).unwrap();
    let family = &listed["families"][model["family"].as_str().unwrap()];
    with(&with(family, &model["config"]), changes)
}

#[test]
fn parameter_counts_of_published_configurations_match() {
    for model in listed()["models"].as_array().unwrap() {
        let name = model["name"].as_str().unwrap();
        let config = parse(&published(name, &json!({})));
        let config = config.unwrap_or_else(|error| panic!("{name}: {error}"));
        let size = |weight| config.shape(weight).iter().product::<usize>();
        let count: usize = config.weights().into_iter().map(size).sum();
        assert_eq!(model["parameters"], count, "{name}");
    }
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let llama = "meta-llama/Llama-2-7b-hf";
    let neox = "EleutherAI/pythia-70m";
    for (name, changes, named) in [
        (
            llama,
            json!({ "architectures": ["Phi9ForCausalLM"] }),
            "PhiForCausalLM",
        ),
        (
            llama,
            json!({ "quantization_config": { "quant_method": "gptq", "bits": 4 } }),
            "quantised by GPTQ",
        ),
        (
            llama,
            json!({ "rope_scaling": { "type": "mrope", "factor": 2.0 } }),
            "mrope",
        ),
        (
            llama,
            json!({ "partial_rotary_factor": 0.5 }),
            "partial_rotary_factor",
        ),
        (
            "Qwen/Qwen2-7B",
            json!({ "rope_interleaved": true, "auto_map": { "AutoConfig": "own.Config" } }),
            "rope_interleaved",
        ),
        (
            "EleutherAI/pythia-70m",
            json!({ "classifier_bias": 7, "auto_map": { "AutoConfig": "own.Config" } }),
            "classifier_bias",
        ),
        (
            "Qwen/Qwen2-7B",
            json!({ "layer_types": "full_attention" }),
            "layer_types",
        ),
        (
            "Qwen/Qwen2-7B",
            json!({ "max_window_layers": "all" }),
            "max_window_layers",
        ),
        (
            neox,
            json!({ "partial_rotary_factor": 0.5 }),
            "`rotary_pct` is 0.25 and `partial_rotary_factor` 0.5",
        ),
        (
            "tiiuae/falcon-40b",
            json!({ "num_ln_in_parallel_attn": 3 }),
            "num_ln_in_parallel_attn",
        ),
        (
            "tiiuae/falcon-7b",
            json!({ "activation": "gelu", "hidden_act": "relu" }),
            "`activation` is `gelu` and `hidden_act` is `relu`",
        ),
        (
            "facebook/opt-125m",
            json!({ "learned_embeddings": false }),
            "learned_embeddings",
        ),
    ] {
        let message = parse(&published(name, &changes)).unwrap_err().to_string();
        assert!(message.contains(named), "{message}");
    }
}

#[test]
fn keys_that_transformers_does_not_read_change_nothing() {
    for (name, changes) in [
        (
            "meta-llama/Llama-2-7b-hf",
            json!({ "rope_interleaved": true, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4 }),
        ),
        (
            "mistralai/Mistral-7B-v0.1",
            json!({ "attention_bias": true }),
        ),
    ] {
        let plain = parse(&published(name, &json!({}))).unwrap();
        assert_eq!(parse(&published(name, &changes)).unwrap(), plain, "{name}");
    }
}

#[test]
fn sliding_windows_of_qwen_follow_the_configuration() {
    let enabled = json!({
        "num_hidden_layers": 3, "sliding_window": 16, "use_sliding_window": true,
        "max_window_layers": 1,
    });
    let first = json!(["sliding_attention", "full_attention", "full_attention"]);
    for (changes, windows) in [
        (json!({}), [None, Some(16), Some(16)]),
        (json!({ "layer_types": first }), [Some(16), None, None]),
        (json!({ "sliding_window": null }), [None; 3]),
        (json!({ "use_sliding_window": false }), [None; 3]),
    ] {
        let config = published("Qwen/Qwen2.5-0.5B", &with(&enabled, &changes));
        assert_eq!(parse(&config).unwrap().attention_windows, windows);
    }
}
