//! Instrumentation of passes: executors report to it, and it does not change what a pass computes.

use powerinfer_artifact::plan::Policy;

use crate::{
    InputMagnitudes, LayerAudit, Stage, Statistics, Threads, Verification,
    ffn::{Ffn, FfnBuffers, FfnInputs},
    selector::Selector,
    verification::Observation,
};

/// Counts and measurements of the passes of an [`Engine`](crate::Engine).
#[derive(Debug)]
pub struct Observers {
    layers: usize,
    /// Counts of tokens, neurons and bytes, and the time of each stage.
    pub(crate) statistics: Statistics,
    /// Passes that were run again.
    pub(crate) retries: u64,
    /// Whether debug builds continue after such a pass.
    pub(crate) expects_retries: bool,
    /// Comparison of FFN outputs with dense, of some tokens.
    pub(crate) verification: Option<Verification>,
    /// Per layer, counts of predicted, computed and active neurons.
    pub(crate) audit: Option<Vec<LayerAudit>>,
    /// Per layer, the active neurons of every token of the last pass.
    pub(crate) activity: Option<Vec<Vec<Vec<u32>>>>,
    /// Per layer, magnitudes of the inputs of projections.
    pub(crate) magnitudes: Option<Vec<InputMagnitudes>>,
    /// Policies that layers get after the pass because they exceeded their error bound.
    pub(crate) fallbacks: Vec<(usize, Policy)>,
}

/// An input of a layer's projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerInput {
    /// Input of query, key and value.
    Attention,
    /// Input of attention's output projection.
    Output,
    /// Input of gate and up.
    Ffn,
}

/// One call of an FFN, to be run and possibly compared with dense.
pub(crate) struct FfnCall<'a> {
    pub(crate) layer: usize,
    pub(crate) positions: &'a [usize],
    /// Whether the pass has one token of each session.
    pub(crate) is_decode: bool,
    pub(crate) inputs: FfnInputs<'a>,
}

impl Observers {
    /// Observers of a model with `layers` layers. They count tokens, neurons and bytes, and measure nothing else yet.
    pub(crate) fn new(layers: usize) -> Self {
        Self {
            layers,
            statistics: Statistics::default(),
            retries: 0,
            expects_retries: false,
            verification: None,
            audit: None,
            activity: None,
            magnitudes: None,
            fallbacks: Vec::new(),
        }
    }

    /// Takes the counts since the last call; a running clock continues.
    pub fn take_statistics(&mut self) -> Statistics {
        let taken = std::mem::take(&mut self.statistics);
        if taken.stages.is_some() {
            self.statistics.start_clock();
        }
        taken
    }

    /// Starts to measure the time of stages, from this call on.
    pub fn start_clock(&mut self) {
        self.statistics.start_clock();
    }

    /// Adds the time since the last stage to `stage`, if the clock runs.
    pub fn mark(&mut self, stage: Stage) {
        self.end_stage(stage);
    }

    /// Starts to count the magnitudes of the inputs of projections.
    pub fn count_inputs(&mut self) {
        self.magnitudes = Some(vec![InputMagnitudes::default(); self.layers]);
    }

    /// Takes the counted magnitudes, layer by layer, and stops counting.
    pub fn take_input_magnitudes(&mut self) -> Vec<InputMagnitudes> {
        self.magnitudes.take().unwrap_or_default()
    }

    /// Starts or stops listing the active neurons of every token. None are listed for prompts that run partly on a device.
    pub fn list_active(&mut self, on: bool) {
        self.activity = on.then(|| vec![Vec::new(); self.layers]);
    }

    /// Takes the active neurons (`h_i ≠ 0`) of the last pass, `[layers][tokens]`, in the order of the bundle; empty
    /// without [`Self::list_active`].
    pub fn take_active(&mut self) -> Vec<Vec<Vec<u32>>> {
        let layers = self.activity.iter_mut().flatten();
        layers.map(std::mem::take).collect()
    }

    /// Measurements of verification so far.
    pub fn verification(&self) -> Option<&Verification> {
        self.verification.as_ref()
    }

    /// Number of passes that a device has run again without graphs, because the host was late or a graph failed.
    pub fn graph_retries(&self) -> u64 {
        self.retries
    }

    /// Permits passes to be run again without graphs. Otherwise debug builds panic, so that tests see every failure.
    pub fn expect_retries(&mut self) {
        self.expects_retries = true;
    }

    /// Counts bytes read of weights or of the KV cache.
    pub(crate) fn count_bytes(&mut self, bytes: usize) {
        self.statistics.bytes_read += bytes as u64;
    }

    /// Adds the time and bytes since the last call to `stage`.
    pub(crate) fn end_stage(&mut self, stage: Stage) {
        self.statistics.mark(stage);
    }

    /// Counts the magnitudes of `x`, an input of projections of `layer`, if asked for.
    pub(crate) fn input(&mut self, layer: usize, input: LayerInput, x: &[f32]) {
        if let Some(magnitudes) = &mut self.magnitudes {
            let layer = &mut magnitudes[layer];
            match input {
                LayerInput::Attention => layer.attention.add(x),
                LayerInput::Output => layer.output.add(x),
                LayerInput::Ffn => layer.ffn.add(x),
            }
        }
    }

    /// Lists the active neurons of `layer` for the only token of a pass; `products` are the factors of down's rows.
    pub(crate) fn set_active(&mut self, layer: usize, products: impl Iterator<Item = (u32, f32)>) {
        if let Some(activity) = &mut self.activity {
            activity[layer] = vec![active(products).collect()];
        }
    }

    /// As [`set_active`](Self::set_active), for the neurons that another device has computed.
    pub(crate) fn add_active(
        &mut self,
        layer: usize,
        products: impl IntoIterator<Item = (u32, f32)>,
    ) {
        if let Some([token]) = self
            .activity
            .as_mut()
            .map(|activity| &mut activity[layer][..])
        {
            token.extend(active(products.into_iter()));
        }
    }

    /// Adds the output of `ffn` to `hidden`, and compares it with dense if an observer asks for it.
    pub(crate) fn run_ffn(
        &mut self,
        threads: &Threads,
        ffn: &Ffn<'_>,
        call: &FfnCall<'_>,
        hidden: &mut [f32],
        buffers: &mut FfnBuffers,
    ) {
        let verification = self.verification.as_ref();
        let is_verified =
            verification.is_some_and(|found| found.wants(call.positions, call.is_decode));
        let run = |ffn: &Ffn<'_>, hidden: &mut [f32], buffers: &mut FfnBuffers, counts| {
            ffn.add_output(threads, call.inputs, hidden, buffers, counts);
        };
        if !is_verified && self.audit.is_none() && self.activity.is_none() {
            return run(ffn, hidden, buffers, &mut self.statistics);
        }
        let before = hidden.to_vec();
        buffers.recorded = Some(Vec::new());
        run(ffn, hidden, buffers, &mut self.statistics);
        let computed = buffers.recorded.take().unwrap_or_default();
        if let Some(activity) = &mut self.activity {
            let computed = computed.iter();
            activity[call.layer] = computed
                .map(|token| active(token.iter().copied()).collect())
                .collect();
        }
        if !is_verified && self.audit.is_none() {
            return;
        }
        buffers.recorded = Some(Vec::new());
        // Dense on the same inputs: exact for every activation, and only the policy differs.
        let mut exact = before.clone();
        let dense = Ffn {
            selector: Selector::Dense,
            ..*ffn
        };
        run(&dense, &mut exact, buffers, &mut Statistics::default());
        let products = buffers.recorded.take().unwrap_or_default();
        let observation = Observation {
            before: &before,
            sparse: hidden,
            exact: &exact,
            computed: &computed,
            products: &products,
            down: &dense.down.matrix,
        };
        if let Some(audit) = &mut self.audit {
            let neurons = ffn.gate.outputs();
            let predicts = ffn.selector.predicts();
            let predicted = predicts.then_some(|token| buffers.predicted(token, neurons));
            audit[call.layer].observe(&observation, predicted);
        }
        if let Some(verification) = self.verification.as_mut().filter(|_| is_verified) {
            let fallback = verification.observe(call.layer, call.positions, &observation);
            self.fallbacks
                .extend(fallback.map(|policy| (call.layer, policy)));
        }
    }
}

/// Neurons whose product is not 0.
fn active(products: impl Iterator<Item = (u32, f32)>) -> impl Iterator<Item = u32> {
    products
        .filter(|(_, product)| *product != 0.0)
        .map(|(neuron, _)| neuron)
}
