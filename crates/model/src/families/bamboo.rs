//! Bamboo and TurboSparse: Mistral whose FFN has a ReLU on gate *and* up (dReLU; TurboSparse,
//! Song et al. 2024, §4).

use crate::{
    FfnKind,
    families::{
        Family,
        llama::{SPARE, llama_names},
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
    spare: SPARE,
};
