//! [`Case`].

use std::{cell::Cell, sync::Arc};

use powerinfer_artifact::{
    hardware,
    plan::{Plan, Policy, Threshold},
    predictor_file::PredictorFile,
};
use powerinfer_bundle::Bundle;
use powerinfer_emulator::{Order, test_device};
use powerinfer_kernels::{Isa, cuda::Device};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_runtime::{ActivationFormat, Engine, Options, SingleSession, Threads};
use powerinfer_tensor::{CacheFormat, Format};
use tempfile::TempDir;

use crate::{golden::Golden, packing::pack_bundle, placement::Placement};

/// A model and a prompt, with the settings for bundles which are packed from the model.
pub(crate) struct Case {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) prompt: Vec<u32>,
    /// Removed at the end of the test.
    pub(crate) folder: TempDir,
    bundle_count: Cell<usize>,
    /// Format of the weights.
    pub(crate) quant: Format,
    pub(crate) activations: ActivationFormat,
    pub(crate) kv_cache: CacheFormat,
    pub(crate) policy: Policy,
    pub(crate) threshold: Option<Threshold>,
    pub(crate) predictors: Option<PredictorFile>,
    /// How many hot experts of every layer may be replaced.
    pub(crate) cached_experts: usize,
    /// Whether the device computes the cold neurons of prompts, because the planned link is fast.
    pub(crate) copies_cold_neurons: bool,
}

impl Case {
    /// The golden checkpoint `name` with its prompt of 17 tokens.
    pub(crate) fn open(name: &str) -> Self {
        let golden = Golden::open(name);
        Self::new(golden.checkpoint(), golden.ids("p17.input_ids"))
    }

    /// Policy `exact`, a KV cache and weights of 32 bits.
    pub(crate) fn new(checkpoint: Checkpoint, prompt: Vec<u32>) -> Self {
        Self {
            checkpoint,
            prompt,
            folder: tempfile::tempdir().unwrap(),
            bundle_count: Cell::new(0),
            quant: Format::F32,
            activations: ActivationFormat::default(),
            kv_cache: CacheFormat::F32,
            policy: Policy::Exact,
            threshold: None,
            predictors: None,
            cached_experts: 0,
            copies_cold_neurons: false,
        }
    }

    pub(crate) fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    /// A plan which applies `placements` to the layers in turn, and the first also to the head.
    fn plan(&self, placements: &[Placement]) -> Plan {
        let config = self.config();
        let (layers, neurons) = (config.layer_count, config.ffn_size);
        let mut plan = Plan::unplaced(layers, neurons, self.policy, config.context_length);
        for (layer, placement) in plan.layers.iter_mut().zip(placements.iter().cycle()) {
            // Need not be a multiple of the bits of a mask's word.
            layer.hot_count = neurons * placement.quarters / 4;
            layer.cached_experts = self.cached_experts.min(layer.hot_count);
            layer.attention = placement.attention;
            layer.kv = placement.kv;
            layer.threshold = self.threshold;
            layer.predictor = Some(placement.predictor);
            // An unplaced plan has no bytes to compare the copies with.
            layer.cpu_microseconds = if self.copies_cold_neurons { 1e3 } else { 0.0 };
            plan.totals.hot_count += layer.hot_count as u64;
        }
        plan.head = placements[0].head;
        plan.budget.kv_cache = self.kv_cache;
        if self.copies_cold_neurons {
            plan.hardware = hardware::named("rtx4090").unwrap();
            plan.hardware.gpu.as_mut().unwrap().pcie_latency_seconds = 0.0;
        }
        plan
    }

    /// Packs a bundle into a new subfolder, neurons in reverse order.
    pub(crate) fn pack(&self, placements: &[Placement]) -> Bundle {
        let number = self.bundle_count.replace(self.bundle_count.get() + 1);
        let out = self.folder.path().join(number.to_string());
        let order = (0..self.config().ffn_size as u32).rev();
        let (plan, predictors) = (self.plan(placements), self.predictors.as_ref());
        pack_bundle(&self.checkpoint, order, predictors, plan, self.quant, &out)
    }

    /// Two threads of the best kernels.
    pub(crate) fn options(&self) -> Options {
        let threads = Threads::new(Isa::detect().unwrap(), 2).unwrap();
        Options {
            threads: threads.with_activations(self.activations),
            policy: None,
        }
    }

    /// Runs a new bundle on the CPU alone.
    pub(crate) fn on_host(&self, placements: &[Placement]) -> SingleSession {
        SingleSession::new(Engine::new(self.pack(placements), self.options()).unwrap()).unwrap()
    }

    /// Runs a new bundle on `device` and the CPU.
    pub(crate) fn with(&self, device: Arc<dyn Device>, placements: &[Placement]) -> SingleSession {
        SingleSession::new(
            Engine::with_device(self.pack(placements), self.options(), device).unwrap(),
        )
        .unwrap()
    }

    /// Runs a new bundle on the [`test_device`], if there is one, and the CPU.
    pub(crate) fn on_device(
        &self,
        order: Order,
        placements: &[Placement],
    ) -> Option<SingleSession> {
        test_device(order).map(|device| self.with(device, placements))
    }
}
