//! `manifest.json`: the model's configuration and the digest of every file of the bundle.

use std::collections::BTreeMap;

use powerinfer_artifact::{
    Digest, certificate, document::Sealed, placement_inputs, predictor_file, write::Contents,
};
use powerinfer_model::ModelConfig;
use serde::{Deserialize, Serialize};

/// Format name in a bundle's headers.
pub const FORMAT: &str = "powerinfer-bundle";
/// Latest bundle version that this program reads and writes.
pub const VERSION: u32 = 8;
/// Version of mixtures of experts without what [`VERSION`] added: latent attention, layers with dense FFNs, and a factor of the routing
/// weights.
const EXPERTS_VERSION: u32 = 7;
/// Version of bundles of dense models; the next version added mixtures of experts.
pub const DENSE_VERSION: u32 = 6;

/// Returns the version of a bundle of a model with `config`: the oldest that has its keys and tensors.
pub(crate) fn version_of(config: &ModelConfig) -> u32 {
    match &config.experts {
        None if config.latent.is_none() => DENSE_VERSION,
        Some(experts)
            if config.latent.is_none() && experts.dense.is_none() && experts.scale == 1.0 =>
        {
            EXPERTS_VERSION
        }
        _ => VERSION,
    }
}

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const WEIGHTS: &str = "weights.safetensors";
pub(crate) const PLAN: &str = "plan.json";
/// Name of a new plan until the manifest refers to it.
pub(crate) const NEXT_PLAN: &str = "plan.next.json";
pub(crate) const PLAN_FORMAT: &str = "powerinfer-plan";
pub(crate) const PLAN_VERSION: u32 = 3;

/// Files of a bundle, of which `companions` come from the checkpoint.
pub fn contents(companions: &[&str]) -> Contents {
    Contents::new(MANIFEST, FORMAT)
        .with_names(&[
            WEIGHTS,
            PLAN,
            NEXT_PLAN,
            predictor_file::FILE,
            placement_inputs::FILE,
            certificate::FILE,
            certificate::TEXT_FILE,
        ])
        .with_names(companions)
}

/// Body of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Sizes and constants of the model.
    pub config: ModelConfig,
    /// Format of the weights: `f32`, `f16`, `bf16`, `q8_0`, `q4_k` or `q4_0`.
    pub quant: String,
    /// Whether the bundle has `predictors.safetensors`.
    pub predictors: bool,
    /// Whether the bundle is certified.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub certificate: bool,
    /// Whether the bundle has the planner inputs with which it can be re-planned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub placement_inputs: bool,
    /// Digests of the other files, by name.
    pub files: BTreeMap<String, Digest>,
    /// Digest of this file without this entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Digest>,
}

impl Sealed for Manifest {
    fn seal(&mut self) -> &mut Option<Digest> {
        &mut self.seal
    }
}
