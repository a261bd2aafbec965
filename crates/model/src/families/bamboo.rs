//! Bamboo and TurboSparse: Mistral with a ReLU on gate *and* up in the FFN (dReLU; TurboSparse,
//! Song et al. 2024, §4).

use crate::{
    FfnKind,
    families::{
        Family,
        llama::{IGNORED, llama_names},
        mistral::mistral_like,
    },
};

/// Bamboo 7B and TurboSparse-Mistral.
pub(super) const BAMBOO: Family = Family {
    name: "bamboo",
    architectures: &[
        "BambooForCausalLM",
        "TurboSparseMistralForCausalLM",
        "TurbosparseMistralForCausalLM",
        "TurboSparseForCausalLM",
    ],
    describe: |keys| {
        let mut config = mistral_like(keys, "bamboo")?;
        config.ffn = FfnKind::DoublyGated;
        Ok(config)
    },
    source: |_, weight| llama_names(weight),
    ignored: IGNORED,
};
