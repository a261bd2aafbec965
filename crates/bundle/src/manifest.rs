//! `manifest.json`: what the bundle is, and the digest of every file in it.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{ArtifactError, Digest, document::Document};
use powerinfer_model::ModelConfig;
use serde::{Deserialize, Serialize};

/// Format name in a bundle's headers.
pub const FORMAT: &str = "powerinfer-bundle";
/// Version of the bundles that are written and read here.
pub const VERSION: u32 = 5;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const WEIGHTS: &str = "weights.safetensors";
pub(crate) const PLAN: &str = "plan.json";
/// What the next plan is called until the manifest speaks of it.
pub(crate) const NEXT_PLAN: &str = "plan.next.json";
pub(crate) const PLAN_FORMAT: &str = "powerinfer-plan";
pub(crate) const PLAN_VERSION: u32 = 3;

/// The body of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Sizes and constants of the model.
    pub config: ModelConfig,
    /// Format of the weights: `f32`, `f16`, `bf16`, `q8_0`, `q4_k` or `q4_0`.
    pub quant: String,
    /// Whether the bundle has `predictors.safetensors`.
    pub predictors: bool,
    /// Whether the bundle has a certificate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub certificate: bool,
    /// Whether the bundle carries what placing it again takes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub placing: bool,
    /// Digests of the other files, by name.
    pub files: BTreeMap<String, Digest>,
    /// Digest of this file as it is without this entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Digest>,
}

/// The document with its seal.
pub(crate) fn sealed(mut document: Document<Manifest>) -> Document<Manifest> {
    document.body.seal = None;
    document.body.seal = Some(Digest::of(&document.to_bytes()));
    document
}

/// Refuses a manifest that is not as it was written.
pub(crate) fn check_seal(path: &Path, document: &Document<Manifest>) -> Result<(), ArtifactError> {
    let (found, expected) = (document.body.seal, sealed(document.clone()).body.seal);
    if found == expected {
        return Ok(());
    }
    let text =
        |seal: Option<Digest>| seal.map_or_else(|| "missing".to_owned(), |seal| seal.to_string());
    // The seal in the file is the promise, the recomputed one is what is there.
    Err(ArtifactError::Damaged {
        path: path.to_owned(),
        expected: text(found),
        found: text(expected),
    })
}
