//! Options of a plan, and the request that they resolve to for a model.

use std::{collections::BTreeMap, path::Path, str::FromStr};

use powerinfer_artifact::{
    ByteSize, Digest, Header, Hint, Progress,
    hardware::{self, Hardware},
    plan::{Budget, Device, Objective, Policy},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::{Bundle, REQUEST};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_pool::system;
use powerinfer_profile::Profile;
use powerinfer_solver::{Backend, Options};
use powerinfer_tensor::{CacheFormat, Format};
use powerinfer_text::Tokenizer;
use serde_json::json;

use crate::{Part, Pin, PlannerError, certify, machine};

/// Machine to plan for if a GPU is asked for and this machine has none.
const ASSUMED_HARDWARE: &str = "rtx4090";

/// Largest default context length, in tokens.
const DEFAULT_CONTEXT: usize = 4096;

/// Options of a plan. Fields that are `None` have a default; when a bundle is re-planned, they keep their present value.
#[derive(Debug, Clone, Default)]
pub struct PlanOptions {
    /// GPU memory to use [default: what is free].
    pub vram: Option<Vram>,
    /// CPU memory to use, in bytes [default: all of the machine's].
    pub ram_bytes: Option<u64>,
    /// Tokens that the KV cache has room for [default: the model's context, at most 4096].
    pub context: Option<usize>,
    /// Format of the KV cache [default: f16].
    pub kv_cache: Option<CacheFormat>,
    /// Prompt tokens per pass on the GPU: one of [`GPU_PREFILL_BATCHES`](powerinfer_artifact::plan::GPU_PREFILL_BATCHES), or
    /// [`PREFILL_BATCH`](powerinfer_artifact::plan::PREFILL_BATCH) [default: the largest that needs at most 10% of the VRAM for
    /// weights; re-planning a bundle uses this default too].
    pub prompt_batch: Option<usize>,
    /// Machine to plan for [default: this one; `rtx4090` with this machine's memory if `vram` asks for a GPU that is not
    /// here].
    pub hardware: Option<Hardware>,
    /// Policy of every layer [default: the fastest of each layer within the perplexity budget].
    pub policy: Option<Policy>,
    /// Perplexity budget: allowed relative rise on held-out text [default: 0.01].
    pub max_perplexity_increase: Option<f64>,
    /// Share of the inputs of attention's projections, and of dense gate and up, to skip [default: none].
    pub input_sparsity: Option<f64>,
    /// Tokens of held-out text to certify on, and as many to decide on [default: by the model's size, at most as many as
    /// are profiled].
    pub certify_tokens: Option<usize>,
    /// Format of the weights [default: q8_0].
    pub quant: Option<Format>,
    /// Objective to optimise.
    pub objective: Objective,
    /// Solver to use.
    pub backend: Backend,
    /// Parts with a prescribed device.
    pub pins: Vec<Pin>,
}

impl PlanOptions {
    /// Format of the weights.
    pub fn quant(&self) -> Format {
        self.quant.unwrap_or(Format::Q8_0)
    }

    /// Perplexity budget, as a relative rise.
    pub(crate) fn perplexity_budget(&self) -> f64 {
        self.max_perplexity_increase.unwrap_or(0.01)
    }

    /// Number of tokens for the certificate, and for decisions.
    pub(crate) fn certify_tokens(&self, config: &ModelConfig, profile: &Profile) -> usize {
        self.certify_tokens.unwrap_or_else(|| {
            let profiled = usize::try_from(profile.document().tokens).unwrap_or(usize::MAX);
            certify::usual_tokens(config.parameters()).min(profiled)
        })
    }

    /// Checks what a model's configuration alone decides: the context, the pins, and whether a policy needs exact zeros.
    ///
    /// # Errors
    ///
    /// An option is out of range for the model.
    pub fn check(&self, config: &ModelConfig) -> Result<(), PlannerError> {
        self.context(config, config.context_length)?;
        let last = config.layer_count.saturating_sub(1);
        let pinned = self.pins.iter().filter_map(|pin| pin.layers);
        if let Some((_, layer)) = pinned.into_iter().find(|(_, layer)| *layer > last) {
            return Err(PlannerError::PinnedLayer { layer, last });
        }
        self.check_attention(config)?;
        match self.policy {
            Some(policy @ (Policy::Exact | Policy::Predicted | Policy::SignBit))
                if !config.activation.has_exact_zeros() =>
            {
                Err(PlannerError::NeverZero(policy))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the model's attention supports the options.
    pub(crate) fn check_attention(&self, config: &ModelConfig) -> Result<(), PlannerError> {
        let Some(obstacle) = config.attention_obstacle() else {
            return Ok(());
        };
        let is_on_gpu = |pin: &Pin| pin.part != Part::Head && pin.device == Device::Gpu;
        if self.pins.iter().any(is_on_gpu) {
            return Err(PlannerError::AttentionOnGpu(obstacle));
        }
        match self.input_sparsity {
            Some(_) => Err(PlannerError::InputSparsity(obstacle)),
            None => Ok(()),
        }
    }

    /// Whether the bundle is certified.
    pub fn certifies(&self) -> bool {
        self.certify_tokens != Some(0)
    }

    /// Options of the solver.
    pub(crate) fn solver(&self) -> Options {
        Options {
            objective: self.objective,
            backend: self.backend,
            ..Options::default()
        }
    }

    /// Context length in tokens, `default` if the options do not set it.
    pub(crate) fn context(
        &self,
        config: &ModelConfig,
        default: usize,
    ) -> Result<usize, PlannerError> {
        let context = self.context.unwrap_or(default);
        if context == 0 || context > config.context_length {
            return Err(PlannerError::Context {
                context,
                longest: config.context_length,
            });
        }
        Ok(context)
    }
}

/// GPU memory to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vram {
    /// The free memory of the GPU, less a reserve.
    Auto,
    /// Bytes on each GPU.
    Sizes(Vec<ByteSize>),
}

/// Most GPUs that a plan may be for.
const MOST_GPUS: usize = 16;

/// Bytes that `auto` leaves free for other programs, such as a desktop.
const LEFT_FREE: u64 = 256 << 20;
/// `auto` rounds down to multiples of this, so that small changes of the free memory give the same plan.
const ROUNDED_TO: u64 = 64 << 20;

impl FromStr for Vram {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "auto" {
            return Ok(Self::Auto);
        }
        let sizes = text
            .split(',')
            .map(|size| size.parse::<ByteSize>().map_err(|error| error.to_string()))
            .collect::<Result<Vec<_>, _>>()?;
        match sizes.len() {
            2.. if sizes.contains(&ByteSize(0)) => {
                Err("leave out GPUs that may not be used".to_owned())
            }
            0..=MOST_GPUS => Ok(Self::Sizes(sizes)),
            count => Err(format!("{count} GPUs; plans are for at most {MOST_GPUS}")),
        }
    }
}

impl Vram {
    pub(crate) fn asks_for_gpu(&self) -> bool {
        match self {
            Self::Auto => false,
            Self::Sizes(sizes) => sizes.iter().any(|size| size.0 > 0),
        }
    }

    /// Bytes on each GPU of the machine `named`; `None` is this machine.
    pub(crate) fn sizes(&self, named: Option<&Hardware>) -> Result<Vec<u64>, PlannerError> {
        Ok(match self {
            Self::Sizes(sizes) => sizes.iter().map(|size| size.0).collect(),
            Self::Auto => {
                let free = match named {
                    Some(Hardware { gpu: Some(gpu), .. }) => {
                        gpu.free_bytes.unwrap_or(gpu.vram_bytes)
                    }
                    Some(Hardware { gpu: None, .. }) => 0,
                    None if powerinfer_gpu::installed_gpus().is_empty() => 0,
                    None => powerinfer_gpu::vram_free()
                        .map_err(|reason| PlannerError::VramUnknown { reason })?,
                };
                vec![free.saturating_sub(LEFT_FREE) / ROUNDED_TO * ROUNDED_TO]
            }
        })
    }

    /// Sets the VRAM of `budget` for the machine `named`; `None` is this machine.
    ///
    /// # Errors
    ///
    /// The free memory of this machine's GPU is unknown, or the sum overflows.
    pub fn set(&self, budget: &mut Budget, named: Option<&Hardware>) -> Result<(), PlannerError> {
        let sizes = self.sizes(named)?;
        let sum = sizes
            .iter()
            .try_fold(0, |sum: u64, size| sum.checked_add(*size));
        let Some(sum) = sum else {
            return Err(PlannerError::VramSum);
        };
        budget.vram_bytes = sum;
        budget.vram_split = if sizes.len() > 1 { sizes } else { Vec::new() };
        Ok(())
    }
}

/// Options resolved for a model. Equal requests give equal bundles.
#[derive(Debug, Clone)]
pub struct Request {
    pub(crate) budget: Budget,
    pub(crate) hardware: Hardware,
    pub(crate) inputs: BTreeMap<String, Digest>,
    pub(crate) settings: serde_json::Value,
}

impl Request {
    /// Resolves `options` for a model, its profile and its predictors.
    ///
    /// # Errors
    ///
    /// The profile or the predictors cannot be read, the context is out of range, the VRAM is unknown, or this machine
    /// cannot be measured.
    pub fn new(
        checkpoint: &Checkpoint,
        profile: &Profile,
        predictors: Option<&PredictorFile>,
        options: &PlanOptions,
        progress: &dyn Progress,
    ) -> Result<Self, PlannerError> {
        // Without `..`, because a bundle depends on all fields.
        let PlanOptions {
            vram,
            ram_bytes,
            context: _, // resolved below, as are the perplexity budget and the tokens
            kv_cache,
            prompt_batch,
            hardware: named,
            policy,
            max_perplexity_increase: _,
            input_sparsity,
            certify_tokens: _,
            quant: _, // recorded in the manifest
            objective,
            backend,
            pins,
        } = options;
        let mut inputs = BTreeMap::from([("profile".to_owned(), profile.digest()?)]);
        if let Some(file) = predictors {
            inputs.insert("predictors".to_owned(), Digest::of_file(&file.path())?);
        }
        let config = checkpoint.config();
        let context = options.context(config, config.context_length.min(DEFAULT_CONTEXT))?;
        let vram = vram.as_ref().unwrap_or(&Vram::Auto);
        let named = named.as_ref();
        let hardware = match named {
            Some(hardware) => hardware.clone(),
            None => default_hardware(vram, progress)?,
        };
        let ram_bytes = ram_bytes.unwrap_or(hardware.cpu.ram_bytes);
        let mut budget = Budget {
            vram_split: Vec::new(),
            vram_bytes: 0,
            ram_bytes,
            context_tokens: context as u64,
            kv_cache: kv_cache.unwrap_or(CacheFormat::F16),
        };
        vram.set(&mut budget, named)?;
        let settings = json!({
            "budget": budget,
            "placement": format!("{objective:?} {backend:?} {pins:?}"),
            "prompt_batch": prompt_batch,
            "hardware": hardware,
            "policy": policy,
            "max_ppl_increase": options.perplexity_budget(),
            "input_sparsity": input_sparsity,
            "certify_tokens": options.certify_tokens(config, profile),
        });
        let settings = Digest::from_content(settings.to_string().as_bytes());
        Ok(Self {
            budget,
            hardware,
            inputs,
            settings: json!(settings),
        })
    }

    /// Opens the bundle in `out`; `None` unless this version of the program made it from the same inputs, tokenizer files
    /// included, by the same request.
    pub fn packed(&self, checkpoint: &Checkpoint, quant: Format, out: &Path) -> Option<Bundle> {
        let bundle = Bundle::open(out, powerinfer_bundle::IntegrityCheck::Quick).ok()?;
        let header = bundle.header();
        let is_same = header.tool == Header::tool()
            && header.model.fingerprint == checkpoint.identity().fingerprint
            && header.inputs == self.inputs
            && header.settings.get(REQUEST) == Some(&self.settings)
            && bundle.quant() == quant
            && bundle.has_files(&Tokenizer::FILES, checkpoint.files());
        is_same.then_some(bundle)
    }
}

/// Returns the machine to plan for by default: this one, or the assumed `rtx4090` with this machine's memory if `vram`
/// asks for a GPU and there is none.
///
/// # Errors
///
/// This machine cannot be measured.
#[expect(clippy::missing_panics_doc, reason = "the assumed machine is known")]
pub fn default_hardware(vram: &Vram, progress: &dyn Progress) -> Result<Hardware, PlannerError> {
    if !vram.asks_for_gpu() || !powerinfer_gpu::installed_gpus().is_empty() {
        return machine::this_machine(progress);
    }
    let line = format!(
        "there is no GPU here: this is planned for `{ASSUMED_HARDWARE}` with this machine's memory"
    );
    progress.advise(&line, Hint::NameHardware);
    let mut assumed = hardware::named(ASSUMED_HARDWARE).expect("the assumed machine is known");
    if let Some((total, _)) = system::memory() {
        assumed.cpu.ram_bytes = total;
    }
    Ok(assumed)
}

/// Returns the known machine `name`, or reads the hardware file `name`.
///
/// # Errors
///
/// There is neither, or the file is invalid.
pub fn read_hardware(name: &str) -> Result<Hardware, PlannerError> {
    if let Some(hardware) = hardware::named(name) {
        return Ok(hardware);
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(PlannerError::UnknownHardware {
            name: name.to_owned(),
        });
    }
    Ok(Hardware::read(path)?)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::{PREFILL_BATCH, Plan};
    use powerinfer_solver::Layer;
    use powerinfer_synth::Shape;

    use super::*;
    use crate::problem::{PredictorSizes, problem};

    #[test]
    fn vram_is_one_size_or_one_per_gpu() {
        let vram = |text: &str| text.parse::<Vram>();
        assert_eq!(vram("auto"), Ok(Vram::Auto));
        assert_eq!(vram("0G"), Ok(Vram::Sizes(vec![ByteSize(0)])));
        assert_eq!(
            vram("24G,12G"),
            Ok(Vram::Sizes(vec![ByteSize::gib(24), ByteSize::gib(12)]))
        );
        let many = ["1G"; 17].join(",");
        for bad in ["", "-1G", "24G,", "24G,0G", "much", "24", many.as_str()] {
            assert!(vram(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn latent_attention_is_planned_for_the_cpu_with_all_inputs() {
        let describe = |name: &str| Shape::find(name).unwrap().describe().unwrap();
        let (latent, other) = (describe("deepseek-v2-lite"), describe("qwen3-30b-a3b"));
        let of_pin = |pin: &str| PlanOptions {
            pins: vec![pin.parse().unwrap()],
            ..PlanOptions::default()
        };
        for pin in ["attention=gpu", "layers:0-3=gpu"] {
            let message = of_pin(pin).check(&latent).unwrap_err().to_string();
            assert!(message.contains("latent attention"), "{message}");
            of_pin(pin).check(&other).unwrap();
        }
        for pin in ["head=gpu", "attention=cpu"] {
            of_pin(pin).check(&latent).unwrap();
        }
        let skipping = PlanOptions {
            input_sparsity: Some(0.25),
            ..PlanOptions::default()
        };
        let message = skipping.check(&latent).unwrap_err().to_string();
        assert!(message.contains("--input-sparsity"), "{message}");
        let budget = Budget {
            vram_bytes: 6 << 30,
            ram_bytes: 64 << 30,
            ..Plan::unplaced(1, 1, Policy::Dense, 4096).budget
        };
        let hardware = hardware::named("rtx4090").unwrap();
        let sizes = PredictorSizes::default();
        let copying = problem(
            &other,
            budget.clone(),
            hardware.clone(),
            Format::Q4_0,
            None,
            sizes,
            None,
        );
        assert!(copying.prompt_batch > PREFILL_BATCH);
        let problem = problem(&latent, budget, hardware, Format::Q4_0, None, sizes, None);
        assert_eq!(problem.budget.vram_bytes, 6 << 30);
        assert_eq!(problem.prompt_batch, PREFILL_BATCH);
        let is_on_cpu = |layer: &Layer| layer.pins.attention == Some(Device::Cpu);
        assert!(problem.layers.iter().all(is_on_cpu));
    }
}
