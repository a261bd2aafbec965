//! What was asked for, resolved to what decides the bundle.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest,
    hardware::{self, Hardware},
    plan::{Budget, Policy},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{Bundle, REQUEST};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_profile::Profile;
use powerinfer_tensor::{CacheFormat, Format};
use serde_json::json;

use super::{BudgetArguments, inputs::InputSparsity};
use crate::machine;

/// Machine whose GPU is assumed where `--hardware` names none.
const ASSUMED_HARDWARE: &str = "rtx4090";

/// Longest context a plan makes room for unless told otherwise.
const DEFAULT_CONTEXT: usize = 4096;

/// What was asked for, resolved: the same again gives the same bundle.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(super) budget: Budget,
    pub(super) hardware: Hardware,
    pub(super) inputs: BTreeMap<String, Digest>,
    pub(super) settings: serde_json::Value,
}

impl Request {
    /// Resolves `arguments` for a model.
    pub(crate) fn of(
        checkpoint: &Checkpoint,
        profile: &Profile,
        predictors: Option<&PredictorFile>,
        arguments: &BudgetArguments,
    ) -> Result<Self> {
        let mut inputs = BTreeMap::from([("profile".to_owned(), profile.digest()?)]);
        if let Some(file) = predictors {
            inputs.insert("predictors".to_owned(), Digest::of_file(&file.path())?);
        }
        let config = checkpoint.config();
        let context = context(
            arguments,
            config,
            config.context_length.min(DEFAULT_CONTEXT),
        )?;
        let hardware = arguments.hardware.as_deref();
        let hardware = read_hardware(hardware.unwrap_or(ASSUMED_HARDWARE))?;
        let ram = arguments.ram.unwrap_or_else(|| {
            let here = machine::memory().filter(|_| arguments.hardware.is_none());
            ByteSize(here.map_or(hardware.cpu.ram_bytes, |(total, _)| total))
        });
        let mut budget = Budget {
            vram_split: Vec::new(),
            vram_bytes: 0,
            ram_bytes: ram.0,
            context_tokens: context as u64,
            kv_cache: arguments.kv_cache.unwrap_or(CacheFormat::F16),
        };
        let is_this_machine = arguments.hardware.is_none();
        arguments
            .vram
            .set(&mut budget, &hardware, is_this_machine)?;
        let settings = json!({
            "budget": budget,
            "placement": arguments.placement.settings(),
            "hardware": hardware,
            "policy": arguments.policy.map(Policy::from),
            "max_ppl_increase": arguments.allowed_rise(),
            "input_sparsity": arguments.input_sparsity.map(|InputSparsity(share)| share),
            "certify_tokens": arguments.certify_tokens(config),
        });
        let settings = Digest::of(settings.to_string().as_bytes());
        Ok(Self {
            budget,
            hardware,
            inputs,
            settings: json!(settings),
        })
    }

    /// The bundle in `out`, where it was made from the same inputs and by the same request.
    pub(crate) fn packed(
        &self,
        checkpoint: &Checkpoint,
        quant: Format,
        out: &Path,
    ) -> Option<Bundle> {
        let bundle = Bundle::open(out, powerinfer_bundle::Verification::Quick).ok()?;
        let header = bundle.header();
        let is_same = header.model.fingerprint == checkpoint.identity().fingerprint
            && header.inputs == self.inputs
            && header.settings.get(REQUEST) == Some(&self.settings)
            && bundle.quant() == quant;
        is_same.then_some(bundle)
    }
}

/// Tokens to make room for, `usual` unless `arguments` say so.
pub(super) fn context(
    arguments: &BudgetArguments,
    config: &ModelConfig,
    usual: usize,
) -> Result<usize> {
    let context = arguments.context.unwrap_or(usual);
    if context == 0 || context > config.context_length {
        bail!(
            "`--context` is {context}; this model was made for 1 to {} tokens",
            config.context_length
        );
    }
    Ok(context)
}

/// The machine called `name`, or described in the file of that name.
pub(crate) fn read_hardware(name: &str) -> Result<Hardware> {
    if let Some(hardware) = hardware::named(name) {
        return Ok(hardware);
    }
    let path = Path::new(name);
    if !path.exists() {
        bail!(
            "there is no machine called `{name}` and no such file; known are {}",
            hardware::NAMES.join(", ")
        );
    }
    Ok(Hardware::read(path)?)
}
