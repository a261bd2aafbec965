//! Llama models with exact zeros under one architecture name, distinguished by their model type: ProSparse (FATReLU) and
//! SparseLM (always ReLU).

use crate::{
    Activation, FfnKind, ModelConfig, ModelError,
    families::{
        Family,
        llama::{IGNORED, LLAMA_DEFAULTS, biases, llama_like, ungated_names},
    },
    keys::Keys,
};

/// ProSparse Llama and SparseLM.
pub(super) const SPARSE_LLAMA: Family = Family {
    name: "sparse_llama",
    architectures: &["SparseLlamaForCausalLM", "ProSparseLlamaForCausalLM"],
    describe: |keys| {
        let activation = keys.text("hidden_act")?;
        match keys.text("model_type")? {
            Some("llama_sparse_relu") => sparse_lm(keys),
            Some("sparsellama") => llama_like(keys, "sparse_llama", &LLAMA_DEFAULTS),
            // Hand-converted files keep the model type of Llama; only ProSparse has this activation.
            _ if activation == Some("fatrelu") => llama_like(keys, "sparse_llama", &LLAMA_DEFAULTS),
            other => Err(keys.unsupported(
                "model_type",
                other.unwrap_or_default(),
                "with this architecture sparsellama (ProSparse) and llama_sparse_relu (SparseLM); models with sparse attention are not supported",
            )),
        }
    },
    source: ungated_names,
    ignored: IGNORED,
};

/// SparseLM: its code computes ReLU, whatever `hidden_act` says.
fn sparse_lm(keys: &Keys<'_>) -> Result<ModelConfig, ModelError> {
    let mut config = llama_like(keys, "sparse_llama", &LLAMA_DEFAULTS)?;
    config.activation = Activation::Relu;
    config.biases = biases(keys)?;
    if !keys.flag("sparsity_gated_mlp", true)? {
        config.ffn = FfnKind::Plain;
    }
    // These keys only concern training.
    keys.ignore_prefix("sparsity_");
    Ok(config)
}
