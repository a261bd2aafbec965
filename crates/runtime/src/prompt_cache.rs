//! Sequences in a file, so that the common prefix of two prompts is computed once.

use std::path::Path;

use powerinfer_artifact::{
    Digest, Header, counted,
    plan::Policy,
    prompt_cache::{FORMAT, LayerCache, PromptCacheFile, VERSION, write},
};
use powerinfer_bundle::Bundle;
use powerinfer_tensor::BLOCK;
use serde_json::{Value, json};

use crate::{Runtime, RuntimeError, Sequence};

const WEIGHTS: &str = "weights";
const PREDICTORS: &str = "predictors";
const POLICIES: &str = "policies";
const DECISIONS: &str = "decisions";

impl Runtime {
    /// Writes the current sequence, tokens with keys and values, to `path`.
    ///
    /// Equal sequences of the same bundle give equal bytes.
    ///
    /// # Errors
    ///
    /// Fails where keys and values are on a device, and where the file cannot be written.
    pub fn save_prompt_cache(&self, path: &Path) -> Result<(), RuntimeError> {
        let sequence = self.sequence();
        cpu_only(sequence)?;
        let layers: Vec<LayerCache<'_>> = sequence
            .layers
            .iter()
            .map(|layer| LayerCache {
                keys: layer.keys.as_bytes(),
                values: layer.values.as_bytes(),
            })
            .collect();
        let format = self.bundle().plan().budget.kv_cache;
        let tokens = sequence.tokens();
        let heads = self.heads();
        Ok(write(path, self.stamp(), tokens, format, heads, &layers)?)
    }

    /// Replaces the current sequence by the longest common prefix of `file` and `prompt`, except the last token of
    /// `prompt`; returns its length. The remaining tokens can be run then.
    ///
    /// # Errors
    ///
    /// Fails where the file belongs to another bundle or other policies, where it is damaged, and where keys and
    /// values are on a device.
    pub fn load_prompt_cache(
        &mut self,
        path: &Path,
        file: &PromptCacheFile,
        prompt: &[u32],
    ) -> Result<usize, RuntimeError> {
        self.check_prompt_cache(path, file)?;
        cpu_only(self.sequence())?;
        let both = file.tokens().iter().zip(prompt);
        let common = both.take_while(|(own, other)| own == other).count();
        let kept = common
            .min(prompt.len().saturating_sub(1))
            .min(self.context_limit());
        // All planes are checked before any is copied.
        let layers = self.bundle().config().layer_count;
        let layers = (0..layers).map(|layer| file.layer(layer, self.heads()));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let sequence = &mut self.sequence;
        for (layer, planes) in sequence.layers.iter_mut().zip(&layers) {
            let planes = [planes.keys, planes.values];
            for (plane, (numbers, scales)) in layer.planes_mut().into_iter().zip(planes) {
                plane.read_bytes(numbers, scales, kept);
            }
        }
        sequence.tokens.clear();
        sequence.tokens.extend(&prompt[..kept]);
        Ok(kept)
    }

    /// Heads of keys and values, and the blocks of each.
    fn heads(&self) -> [usize; 2] {
        let config = self.bundle().config();
        [config.kv_head_count, config.head_size.div_ceil(BLOCK)]
    }

    /// Header that identifies the model and everything else that keys and values depend on.
    fn stamp(&self) -> Header {
        let bundle = self.bundle();
        let header = Header::new(FORMAT, VERSION, bundle.header().model.clone(), 0);
        let mut header = header
            .with_input(WEIGHTS, file_digest(bundle, bundle.weights().path()))
            .with_setting(POLICIES, json!(self.policies()))
            .with_setting(DECISIONS, self.decisions().to_string());
        if let Some(predictors) = bundle.predictors() {
            header = header.with_input(PREDICTORS, file_digest(bundle, &predictors.path()));
        }
        header
    }

    /// Digest of the thresholds and the order of additions.
    fn decisions(&self) -> Digest {
        let plans = self.bundle().plan().layers.iter();
        let layers: Vec<_> = plans
            .zip(self.policies())
            .zip(&self.model.input_thresholds)
            .map(|((plan, policy), inputs)| {
                let threshold = plan.threshold.filter(|_| *policy == Policy::Threshold);
                (policy, threshold, inputs, plan.hot_count)
            })
            .collect();
        Digest::of(json!(layers).to_string().as_bytes())
    }

    /// Refuses a file of another model, bundle or policy.
    fn check_prompt_cache(&self, path: &Path, file: &PromptCacheFile) -> Result<(), RuntimeError> {
        let (own, found) = (self.stamp(), file.header());
        let differs = |what, found: String, expected: String| {
            Err(RuntimeError::OtherPromptCache {
                path: path.to_owned(),
                what,
                found,
                expected,
            })
        };
        if found.model.fingerprint != own.model.fingerprint {
            return differs("model", found.model.to_string(), own.model.to_string());
        }
        let input = |header: &Header, name| match header.inputs.get(name) {
            Some(digest) => format!("{}…", &digest.to_string()[..15]),
            None => "none".to_owned(),
        };
        for (name, what) in [(WEIGHTS, "bundle's weights"), (PREDICTORS, "predictors")] {
            if found.inputs.get(name) != own.inputs.get(name) {
                return differs(what, input(found, name), input(&own, name));
            }
        }
        let format = self.bundle().plan().budget.kv_cache;
        if file.format() != format {
            let (found, own) = (file.format().to_string(), format.to_string());
            return differs("KV cache format", found, own);
        }
        if found.settings.get(POLICIES) != own.settings.get(POLICIES) {
            let policies = |header: &Header| summary(header.settings.get(POLICIES));
            return differs("policies", policies(found), policies(&own));
        }
        if found.settings.get(DECISIONS) != own.settings.get(DECISIONS) {
            let (before, now) = ("those before the bundle was placed again", "others");
            return differs("thresholds or hot neurons", before.into(), now.into());
        }
        Ok(())
    }
}

/// Digest of the file at `path` in the bundle's manifest.
fn file_digest(bundle: &Bundle, path: &Path) -> Digest {
    let files = &bundle.manifest_document().body.files;
    let name = path.file_name().and_then(|name| name.to_str());
    let digest = name.and_then(|name| files.get(name));
    *digest.expect("the manifest has every file of the bundle")
}

/// Refuses a sequence whose keys and values are on a device.
fn cpu_only(sequence: &Sequence) -> Result<(), RuntimeError> {
    match sequence.on_device.iter().any(Option::is_some) {
        true => Err(RuntimeError::CpuOnly {
            what: "a prompt cache",
        }),
        false => Ok(()),
    }
}

/// Policies, with the number of layers of each.
fn summary(policies: Option<&Value>) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for policy in policies.and_then(Value::as_array).into_iter().flatten() {
        let policy = policy.as_str().unwrap_or("?");
        match counts.iter_mut().find(|(name, _)| name == policy) {
            Some((_, count)) => *count += 1,
            None => counts.push((policy.to_owned(), 1)),
        }
    }
    let counts = counts.iter();
    let counts: Vec<_> = counts
        .map(|(name, count)| format!("`{name}` in {}", counted(count, "layer")))
        .collect();
    counts.join(", ")
}
