//! Arcee (AFM): Llama with squared ReLU and an FFN without gate.

use crate::{
    FfnKind,
    families::{
        Family,
        llama::{Defaults, IGNORED, LLAMA_DEFAULTS, biases, llama_like, ungated_names},
    },
};

/// AFM-4.5B.
pub(super) const ARCEE: Family = Family {
    name: "arcee",
    architectures: &["ArceeForCausalLM"],
    describe: |keys| {
        let defaults = Defaults {
            hidden_size: 2560,
            ffn_size: 18432,
            context: 4096,
            epsilon: ("rms_norm_eps", 1e-5),
            activation: "relu2",
            ..LLAMA_DEFAULTS
        };
        let mut config = llama_like(keys, "arcee", &defaults)?;
        config.ffn = FfnKind::Plain;
        config.biases = biases(keys)?;
        Ok(config)
    },
    source: ungated_names,
    ignored: IGNORED,
};
