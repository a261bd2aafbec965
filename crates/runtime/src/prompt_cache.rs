//! Sequences in a file, so that the common prefix of two prompts is computed once.

use std::path::Path;

use powerinfer_artifact::{
    Digest, Header, counted,
    plan::LayerPlan,
    prompt_cache::{FORMAT, LayerCache, PromptCacheFile, VERSION, write},
};
use powerinfer_bundle::Bundle;
use powerinfer_tensor::BLOCK;
use serde_json::{Value, json};

use crate::{Engine, RuntimeError, Session, model::Model, session};

const WEIGHTS: &str = "weights";
const PREDICTORS: &str = "predictors";
const CONFIGURATION: &str = "configuration";
const POLICIES: &str = "policies";
const DECISIONS: &str = "decisions";
const ACTIVATIONS: &str = "activations";
const DEVICE: &str = "device";

impl Engine {
    /// Writes `session`, tokens with keys and values, to `path`.
    ///
    /// Equal sessions of the same bundle on the same device give equal bytes.
    ///
    /// # Errors
    ///
    /// A layer fell back to another policy while the session was computed, the device fails, memory is missing, or the file
    /// cannot be written.
    pub fn save_prompt_cache(&self, session: &Session, path: &Path) -> Result<(), RuntimeError> {
        let layers = self
            .observers
            .verification()
            .map_or(0, |found| found.alarms().len());
        if layers > 0 {
            return Err(RuntimeError::FellBack { layers });
        }
        let tokens = session.tokens();
        let copies =
            (0..session.layers.len()).map(|layer| self.copy_of(session, layer, tokens.len()));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        let layers: Vec<LayerCache<'_>> = (session.layers.iter().zip(&copies))
            .map(|(layer, copy)| copy.as_ref().unwrap_or(layer))
            .map(|layer| LayerCache {
                keys: layer.keys.as_bytes(),
                values: layer.values.as_bytes(),
            })
            .collect();
        let format = self.bundle().plan().budget.kv_cache;
        let heads = self.heads();
        Ok(write(path, self.stamp(), tokens, format, heads, &layers)?)
    }

    /// Replaces the content of `session` by the longest common prefix of `file` and `prompt`, except the last token of
    /// `prompt`; returns its length. The remaining tokens can be run then.
    ///
    /// # Errors
    ///
    /// The file belongs to another bundle or was computed with other settings, it is damaged, a device fails, or memory is
    /// missing.
    pub fn load_prompt_cache(
        &self,
        session: &mut Session,
        path: &Path,
        file: &PromptCacheFile,
        prompt: &[u32],
    ) -> Result<usize, RuntimeError> {
        self.check_prompt_cache(path, file)?;
        let both = file.tokens().iter().zip(prompt);
        let common = both.take_while(|(own, other)| own == other).count();
        let kept = common
            .min(prompt.len().saturating_sub(1))
            .min(session.context);
        // All planes are checked before any is copied.
        let layers = self.bundle().config().layer_count;
        let layers = (0..layers).map(|layer| file.layer(layer, self.heads()));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        if let Err(error) = self.read_layers(session, &layers, kept) {
            // Layers that were already read have positions without tokens.
            session.truncate(0);
            return Err(error);
        }
        session.tokens.clear();
        session.tokens.extend(&prompt[..kept]);
        Ok(kept)
    }

    /// Replaces the first `positions` keys and values of every layer of `session`.
    fn read_layers(
        &self,
        session: &mut Session,
        layers: &[LayerCache<'_>],
        positions: usize,
    ) -> Result<(), RuntimeError> {
        for (index, planes) in layers.iter().enumerate() {
            let planes = [planes.keys, planes.values];
            let read = |layer: &mut session::LayerCache| {
                for (plane, (numbers, scales)) in layer.planes_mut().into_iter().zip(planes) {
                    plane.read_bytes(numbers, scales, positions);
                }
            };
            let mut copy = self.empty_cache(positions)?;
            match session.on_device.get_mut(index) {
                Some(Some(cache)) => {
                    read(&mut copy);
                    let [keys, values] = copy.to_rows(&self.model.threads);
                    cache.write(positions, [&keys, &values])?;
                }
                _ => read(&mut session.layers[index]),
            }
        }
        Ok(())
    }

    /// A copy in host memory of the first `positions` keys and values of `layer`; `None` if they are there already.
    fn copy_of(
        &self,
        session: &Session,
        layer: usize,
        positions: usize,
    ) -> Result<Option<session::LayerCache>, RuntimeError> {
        let Some(Some(cache)) = session.on_device.get(layer) else {
            return Ok(None);
        };
        let mut copy = self.empty_cache(positions)?;
        let planes = cache.read(positions)?;
        for (plane, floats) in copy.planes_mut().into_iter().zip(planes) {
            let size = plane.head_size();
            let of_heads = floats.chunks_exact((positions * size).max(1));
            let of_heads: Vec<&[f32]> = of_heads.collect();
            for position in 0..positions {
                let heads = of_heads.iter();
                let heads = heads.flat_map(|head| &head[position * size..][..size]);
                plane.push(&heads.copied().collect::<Vec<f32>>());
            }
        }
        Ok(Some(copy))
    }

    /// An empty cache of a layer in host memory.
    fn empty_cache(&self, positions: usize) -> Result<session::LayerCache, RuntimeError> {
        let config = self.bundle().config();
        let format = self.bundle().plan().budget.kv_cache;
        let (heads, size) = (config.kv_head_count, config.head_size);
        let cache = session::LayerCache::new(heads, size, format, positions);
        cache.ok_or(RuntimeError::NoRoom {
            tokens: positions,
            bytes: (2 * format.plane_bytes(heads, size, positions)) as u64,
        })
    }

    /// Heads of keys and values, and the blocks of each.
    fn heads(&self) -> [usize; 2] {
        let config = self.bundle().config();
        [config.kv_head_count, config.head_size.div_ceil(BLOCK)]
    }

    /// Header with everything that keys and values depend on. [`Model`] and its parts are destructured without `..`, so that a
    /// new setting is either recorded here or stated not to matter.
    fn stamp(&self) -> Header {
        let Model {
            bundle,
            config,
            weights: _,
            experts: _,
            selectors,
            policies,
            input_thresholds,
            threads,
        } = &self.model;
        let plan = bundle.plan();
        let layers = plan.layers.iter().zip(selectors).zip(policies);
        let layers = layers.zip(input_thresholds);
        let decisions: Vec<Value> = layers
            .map(|(((plan, selectors), policy), inputs)| {
                // Hot and cold neurons are summed separately. Policy and thresholds are those of the model, which may
                // have replaced the plan's. A device's numbers depend on the whole plan, see below.
                let LayerPlan {
                    hot_count,
                    layer: _,
                    policy: _,
                    reason: _,
                    threshold: _,
                    input_thresholds: _,
                    neuron_count: _,
                    hot_share: _,
                    neuron_bytes: _,
                    cached_experts: _,
                    gpu: _,
                    attention: _,
                    kv: _,
                    predictor: _,
                    gpu_bytes: _,
                    cpu_bytes: _,
                    gpu_microseconds: _,
                    cpu_microseconds: _,
                    sync_microseconds: _,
                    microseconds: _,
                    limit: _,
                } = plan;
                json!([selectors.settings(*policy), inputs, hot_count])
            })
            .collect();
        let device = self.executor.device().map(|device| {
            json!({
                "name": device.device().info().name,
                "prompt_batch": self.prompt_batch(),
                "plan": Digest::from_content(json!(plan).to_string().as_bytes()),
            })
        });
        let digest = |value: Value| Digest::from_content(value.to_string().as_bytes()).to_string();
        let header = Header::new(FORMAT, VERSION, bundle.header().model.clone(), 0);
        let mut header = header
            .with_input(WEIGHTS, file_digest(bundle, bundle.weights().path()))
            .with_setting(CONFIGURATION, digest(json!(config)))
            .with_setting(POLICIES, json!(policies))
            .with_setting(DECISIONS, digest(json!(decisions)))
            .with_setting(ACTIVATIONS, threads.arithmetic().name())
            .with_setting(DEVICE, device);
        if let Some(predictors) = bundle.predictors() {
            header = header.with_input(PREDICTORS, file_digest(bundle, &predictors.path()));
        }
        header
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
        let setting = |header: &Header, name| header.settings.get(name).cloned();
        let text = |header: &Header, name| match setting(header, name) {
            Some(Value::String(text)) => text,
            Some(value) => value["name"].as_str().unwrap_or("the CPU").to_owned(),
            None => "unknown".to_owned(),
        };
        for name in [ACTIVATIONS, DEVICE] {
            let (found, own) = (text(found, name), text(&own, name));
            if found != own {
                return differs(name, found, own);
            }
        }
        if found.tool != own.tool {
            return differs("program version", found.tool.clone(), own.tool);
        }
        for (name, what) in [
            (CONFIGURATION, "configuration"),
            (DECISIONS, "thresholds or hot neurons"),
            (DEVICE, "plan or memory of the device"),
        ] {
            if setting(found, name) != setting(&own, name) {
                let (before, now) = ("those before the bundle was re-planned", "others");
                return differs(what, before.into(), now.into());
            }
        }
        // All other settings, including ones added later.
        let mut settings = own.settings.iter();
        if found.inputs != own.inputs
            || settings.any(|(name, value)| found.settings.get(name) != Some(value))
        {
            return differs("settings", "others".into(), "those of this run".into());
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
