//! A bundle that runs: its sequences, its passes, and what observes them.

use std::slice::from_mut;

use powerinfer_artifact::plan::{BudgetLine, Device, InputThresholds, KV_CACHE, Policy, Threshold};
use powerinfer_bundle::Bundle;
use powerinfer_gpu::DeviceModel;
use powerinfer_model::{LanguageModel, ModelConfig, ModelError, check_finite};

use crate::{
    InputMagnitudes, RuntimeError, Sequence, Stage, Statistics, Verification,
    executor::{CpuExecutor, LayerExecutor},
    ffn::FfnBuffers,
    forward::{HeadBuffers, cap_logits, forward, head},
    held::{self, Held},
    hybrid::{HybridExecutor, PassTimes},
    load::new_sequence,
    memory::kv_bytes,
    model::Model,
    observer::Observers,
    pass::{Pass, PassBuffers},
};

/// A bundle ready to run, and its current sequence.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) model: Model,
    pub(crate) executor: Executor,
    pub(crate) sequence: Sequence,
    pub(crate) observers: Observers,
    buffers: PassBuffers,
    head_buffers: HeadBuffers,
    pub(crate) ffn_buffers: FfnBuffers,
    /// Logits of the last token that was decoded, where they are on the host.
    pub(crate) logits: Vec<f32>,
}

/// Tokens of a prompt whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogits {
    /// None.
    None,
    /// The last one.
    Last,
    /// All.
    All,
}

/// Where layers are computed.
#[derive(Debug)]
pub(crate) enum Executor {
    /// On the CPU alone.
    Cpu(Box<CpuExecutor>),
    /// On a device and the CPU.
    Hybrid(Box<HybridExecutor>),
}

impl Executor {
    fn layers(&mut self) -> &mut dyn LayerExecutor {
        match self {
            Self::Cpu(executor) => &mut **executor,
            Self::Hybrid(executor) => &mut **executor,
        }
    }

    /// The parts on a device; none where everything is on the CPU.
    pub(crate) fn device(&self) -> Option<&DeviceModel> {
        match self {
            Self::Cpu(_) => None,
            Self::Hybrid(executor) => Some(&executor.device),
        }
    }

    /// As [`Self::device`], mutably.
    pub(crate) fn device_mut(&mut self) -> Option<&mut DeviceModel> {
        match self {
            Self::Cpu(_) => None,
            Self::Hybrid(executor) => Some(&mut executor.device),
        }
    }
}

impl Runtime {
    pub(crate) fn of(model: Model, executor: Executor, sequence: Sequence) -> Self {
        Self {
            model,
            executor,
            sequence,
            observers: Observers::default(),
            buffers: PassBuffers::default(),
            head_buffers: HeadBuffers::default(),
            ffn_buffers: FfnBuffers::default(),
            logits: Vec::new(),
        }
    }

    /// The bundle that runs.
    pub fn bundle(&self) -> &Bundle {
        &self.model.bundle
    }

    /// Whether a part of the model is on a device.
    pub fn uses_device(&self) -> bool {
        self.executor.device().is_some()
    }

    /// Tokens that run together with the results which each has alone: the sequences that [`Self::decode_batch`] has in a pass.
    /// Fewer than a [`Self::prompt_batch`] on a device, and one where it has no room for more.
    pub fn decode_batch_size(&self) -> usize {
        match &self.executor {
            Executor::Cpu(executor) => executor.max_exact_tokens(),
            Executor::Hybrid(executor) => executor.max_exact_tokens(),
        }
    }

    /// Tokens of a prompt that run together.
    pub fn prompt_batch(&self) -> usize {
        match &self.executor {
            Executor::Cpu(executor) => executor.max_batch_tokens(),
            Executor::Hybrid(executor) => executor.max_batch_tokens(),
        }
    }

    /// Tokens that fit the context of the plan.
    pub fn context_limit(&self) -> usize {
        self.model.context_limit()
    }

    /// Bytes of the KV cache of a sequence of up to `context` tokens: on the host, and on the device.
    pub fn sequence_bytes(&self, context: usize) -> [u64; 2] {
        let format = self.model.bundle.plan().budget.kv_cache;
        let each = kv_bytes(&self.model.config, context as u64, format);
        let layers = self.model.config.layer_count as u64;
        let on_device = self.executor.device().map_or(0, DeviceModel::cached_layers) as u64;
        [layers - on_device, on_device].map(|layers| each.saturating_mul(layers))
    }

    /// Bytes of the device's memory that the plan's budget leaves for KV caches beside the plan's other lines, those of
    /// [`Self::sequence`] included; none where no KV cache is on a device, or the plan has no budget.
    pub fn device_cache_budget(&self) -> Option<u64> {
        let device = self.executor.device()?;
        let plan = self.model.bundle.plan();
        if !plan.is_placed() || device.cached_layers() == 0 {
            return None;
        }
        let budget = plan.budget.vram_bytes;
        let is_cache = |line: &&BudgetLine| line.name == KV_CACHE && line.device == Device::Gpu;
        let planned = plan.lines.iter().find(is_cache);
        let unplanned = budget.saturating_sub(plan.totals.gpu_bytes);
        let left = unplanned + planned.map_or(0, |line| line.bytes);
        Some(left.min(budget.saturating_sub(device.bytes() as u64)))
    }

    /// Memory in use, by the lines of a plan.
    pub fn memory(&self) -> Vec<Held> {
        held::held(&self.model, &self.sequence)
    }

    /// The policy of every layer.
    pub fn policies(&self) -> &[Policy] {
        &self.model.policies
    }

    /// Sets the policy of `layer`, and its threshold where one is given.
    ///
    /// # Errors
    ///
    /// Fails where the bundle lacks what the policy needs.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer, or a part of the model is on a device, whose selectors cannot change.
    pub fn set_policy(
        &mut self,
        layer: usize,
        policy: Policy,
        threshold: Option<Threshold>,
    ) -> Result<(), RuntimeError> {
        self.assert_on_host();
        let selectors = &mut self.model.selectors[layer];
        selectors.set_threshold(threshold);
        selectors.check(policy, self.model.bundle.folder(), layer)?;
        self.model.policies[layer] = policy;
        Ok(())
    }

    /// Skips the inputs of projections of `layer` that are below `thresholds`; `None` reads all. Those of gate and up are
    /// skipped only under `dense`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer, or a part of the model is on a device, where inputs cannot be skipped.
    pub fn set_input_thresholds(&mut self, layer: usize, thresholds: Option<InputThresholds>) {
        self.assert_on_host();
        self.model.input_thresholds[layer] = thresholds;
    }

    fn assert_on_host(&self) {
        assert!(!self.uses_device(), "everything is on the CPU");
    }

    /// Whether inputs of projections are skipped.
    pub fn skips_inputs(&self) -> bool {
        self.model.input_thresholds.iter().any(Option::is_some)
    }

    /// The current sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// An empty sequence for up to `context` tokens, at most [`Self::context_limit`]. Sequences of a pass may have different
    /// contexts.
    ///
    /// # Errors
    ///
    /// Fails where memory for its KV cache is missing.
    pub fn new_sequence(&self, context: usize) -> Result<Sequence, RuntimeError> {
        let context = context.min(self.context_limit());
        new_sequence(&self.model.bundle, self.executor.device(), context)
    }

    /// `count` empty sequences for up to `context` tokens each, to be decoded together.
    ///
    /// # Errors
    ///
    /// Fails where memory for a KV cache is missing.
    pub fn new_sequences(
        &self,
        count: usize,
        context: usize,
    ) -> Result<Vec<Sequence>, RuntimeError> {
        let new = |index| {
            let sequence = self.new_sequence(context);
            sequence.map_err(|source| in_batch(index, source))
        };
        (0..count).map(new).collect()
    }

    /// Makes `sequence` the current one; returns the one before.
    pub fn replace_sequence(&mut self, sequence: Sequence) -> Sequence {
        std::mem::replace(&mut self.sequence, sequence)
    }

    /// Removes all tokens from index `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.sequence.truncate(tokens);
    }

    /// Keeps the longest common prefix with `tokens`, except their last token; returns its length. The remaining
    /// tokens can be run then.
    pub fn keep_prefix_of(&mut self, tokens: &[u32]) -> usize {
        let common = self.sequence.common_prefix(tokens);
        let kept = common.min(tokens.len().saturating_sub(1));
        self.truncate(kept);
        kept
    }

    /// Runs one more token of each of `sequences`, sequences of this bundle, in passes that read the weights once for
    /// all. Returns the logits `[sequences, vocabulary]`, which do not depend on batching.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, a context is full, or a device fails; the sequences are as before.
    pub fn decode_batch(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[u32],
    ) -> Result<Vec<f32>, RuntimeError> {
        if sequences.is_empty() || sequences.len() != tokens.len() {
            return Err(RuntimeError::BatchSize {
                sequences: sequences.len(),
                tokens: tokens.len(),
            });
        }
        for (index, (sequence, token)) in sequences.iter().zip(tokens).enumerate() {
            self.check(sequence, &[*token])
                .map_err(|source| in_batch(index, source))?;
        }
        let size = self.decode_batch_size();
        let mut logits = Vec::with_capacity(tokens.len() * self.model.config.vocabulary_size);
        undo_on_failure(sequences, |sequences| {
            for (sequences, tokens) in sequences.chunks_mut(size).zip(tokens.chunks(size)) {
                self.pass(sequences, tokens)?;
                let hidden = 0..self.buffers.hidden.len();
                self.head(hidden)?;
                logits.extend_from_slice(&self.logits);
            }
            Ok(())
        })?;
        Ok(logits)
    }

    /// Runs tokens of `sequences`, at least one sequence of this bundle, in one pass: one token of each but the last, and
    /// the remaining ones, a piece of a prompt, of the last. On a device the piece has a pass of its own if it is long. Returns the logits of the former, `[sequences - 1,
    /// vocabulary]`, and those asked for of the latter; they do not depend on what runs together.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::decode_batch`], and where there are more tokens than [`Self::prompt_batch`].
    pub fn run_with_prompt(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[u32],
        logits: PromptLogits,
    ) -> Result<Vec<f32>, RuntimeError> {
        let is_piece = (sequences.len()..=self.prompt_batch()).contains(&tokens.len());
        let Some(decoded) = sequences.len().checked_sub(1).filter(|_| is_piece) else {
            return Err(RuntimeError::BatchSize {
                sequences: sequences.len(),
                tokens: tokens.len(),
            });
        };
        for (index, sequence) in sequences.iter().enumerate() {
            let own = match index == decoded {
                true => &tokens[index..],
                false => &tokens[index..=index],
            };
            self.check(sequence, own)
                .map_err(|source| in_batch(index, source))?;
        }
        undo_on_failure(sequences, |sequences| {
            self.run_with_checked_prompt(sequences, tokens, logits)
        })
    }

    /// Runs tokens that were already checked; see [`Self::run_with_prompt`]. After a failure, some sequences keep their new tokens.
    fn run_with_checked_prompt(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[u32],
        logits: PromptLogits,
    ) -> Result<Vec<f32>, RuntimeError> {
        let decoded = sequences.len() - 1;
        if decoded > 0 && tokens.len() > self.decode_batch_size() {
            let ((others, own), (pending, piece)) =
                (sequences.split_at_mut(decoded), tokens.split_at(decoded));
            let mut all = self.decode_batch(others, pending)?;
            all.extend(self.run_prompt(&mut own[0], piece, logits)?);
            return Ok(all);
        }
        self.pass(sequences, tokens)?;
        let hidden = self.model.config.hidden_size;
        let mut all = Vec::new();
        let ends = match logits {
            PromptLogits::All => [tokens.len(), tokens.len()],
            PromptLogits::Last => [decoded, tokens.len()],
            PromptLogits::None => [decoded, decoded],
        };
        if ends[0] > 0 {
            self.head(0..ends[0] * hidden)?;
            all.extend_from_slice(&self.logits);
        }
        if ends[1] > ends[0] {
            self.head(self.last_hidden())?;
            all.extend_from_slice(&self.logits);
        }
        Ok(all)
    }

    /// Runs `tokens`, at least one, of `sequence`, a sequence of this bundle; returns the logits asked for,
    /// `[tokens, vocabulary]`. They do not depend on how a prompt is split into calls.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, the context is full, or a device fails; the sequence is as before.
    pub fn run_prompt(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        logits: PromptLogits,
    ) -> Result<Vec<f32>, RuntimeError> {
        self.check(sequence, tokens)?;
        let mut all = Vec::new();
        undo_on_failure(from_mut(sequence), |sequences| {
            for batch in tokens.chunks(self.prompt_batch()) {
                self.pass(sequences, batch)?;
                if logits == PromptLogits::All {
                    self.head(0..self.buffers.hidden.len())?;
                    all.extend_from_slice(&self.logits);
                }
            }
            if logits == PromptLogits::Last && !tokens.is_empty() {
                self.head(self.last_hidden())?;
                all.extend_from_slice(&self.logits);
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// As [`Self::run_prompt`], of the current sequence.
    fn run_current(
        &mut self,
        tokens: &[u32],
        logits: PromptLogits,
    ) -> Result<Vec<f32>, ModelError> {
        let mut sequence = std::mem::take(&mut self.sequence);
        let result = self.run_prompt(&mut sequence, tokens, logits);
        self.sequence = sequence;
        result.map_err(model_error)
    }

    /// The range of the last token's hidden state.
    fn last_hidden(&self) -> std::ops::Range<usize> {
        let end = self.buffers.hidden.len();
        end - self.model.config.hidden_size..end
    }

    /// Runs `tokens`, one of each of `sequences` and the remaining ones of the last; the hidden states after the last layer
    /// are left in the buffers.
    fn pass(&mut self, sequences: &mut [Sequence], tokens: &[u32]) -> Result<(), RuntimeError> {
        let mut pass = Pass {
            model: &self.model,
            sequences,
            tokens,
            observers: &mut self.observers,
            buffers: &mut self.buffers,
        };
        forward(self.executor.layers(), &mut pass)?;
        for (layer, policy) in self.observers.fallbacks.drain(..) {
            self.model.policies[layer] = policy;
        }
        Ok(())
    }

    /// Runs `tokens` and leaves the last hidden state in the buffers; returns its range, which is empty without tokens.
    pub(crate) fn run_to_last(
        &mut self,
        tokens: &[u32],
    ) -> Result<std::ops::Range<usize>, ModelError> {
        self.run_current(tokens, PromptLogits::None)?;
        Ok(match tokens.is_empty() {
            true => 0..0,
            false => self.last_hidden(),
        })
    }

    /// Runs `tokens`, at least one and at most [`Self::prompt_batch`], of the current sequence, and leaves the logits of all.
    pub(crate) fn run_with_logits(&mut self, tokens: &[u32]) -> Result<(), ModelError> {
        self.undo_on_failure(|model| {
            model.run_current(tokens, PromptLogits::None)?;
            let hidden = 0..model.buffers.hidden.len();
            model.head(hidden).map_err(model_error)
        })
    }

    /// Runs `run`; if it fails, removes the tokens that it has added to the current sequence.
    pub(crate) fn undo_on_failure(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let before = self.sequence.position();
        let result = run(self);
        if result.is_err() {
            self.sequence.truncate(before);
        }
        result
    }

    /// The hidden states of the last pass, `[tokens, hidden]`.
    pub(crate) fn hidden(&self) -> &[f32] {
        &self.buffers.hidden
    }

    /// Sets the logits to those of the hidden states in `range`, on the host; they are finite.
    pub(crate) fn head(&mut self, range: std::ops::Range<usize>) -> Result<(), RuntimeError> {
        let hidden = &self.buffers.hidden[range];
        let device = self.executor.device_mut();
        if let Some(device) = device.filter(|device| device.has_head()) {
            self.logits = device.logits(hidden)?;
            let tokens = hidden.len() / self.model.config.hidden_size;
            self.observers.statistics.device_bytes_read += device.head_bytes_read(tokens);
            self.observers.end_stage(Stage::Head);
        } else {
            let (buffers, logits) = (&mut self.head_buffers, &mut self.logits);
            head(&self.model, hidden, buffers, logits, &mut self.observers);
        }
        cap_logits(&self.model.config, &mut self.logits);
        Ok(check_finite(&self.logits)?)
    }

    /// Refuses tokens outside the vocabulary, tokens beyond the context of `sequence`, and sequences of other runtimes.
    fn check(&self, sequence: &Sequence, tokens: &[u32]) -> Result<(), RuntimeError> {
        let vocabulary = self.model.config.vocabulary_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            let token = *token;
            return Err(ModelError::TokenOutside { token, vocabulary }.into());
        }
        let (asked, limit) = (
            sequence.position() + tokens.len(),
            sequence.context.min(self.context_limit()),
        );
        if asked > limit {
            let tokens = asked;
            return Err(ModelError::ContextFull { tokens, limit }.into());
        }
        let format = self.model.bundle.plan().budget.kv_cache;
        match sequence.is_of(&self.model.config, format, self.executor.device()) {
            true => Ok(()),
            false => Err(RuntimeError::OtherSequence),
        }
    }
}

/// Observers of the passes.
impl Runtime {
    /// Takes what was read and computed since the last call; a running clock continues.
    pub fn take_statistics(&mut self) -> Statistics {
        let statistics = &mut self.observers.statistics;
        let taken = std::mem::take(statistics);
        if taken.stages.is_some() {
            statistics.start_clock();
        }
        taken
    }

    /// Starts to measure the time of stages; what is before this call belongs to none.
    pub fn start_clock(&mut self) {
        self.observers.statistics.start_clock();
    }

    /// Attributes the time since the last forward pass to `stage`, where the clock runs.
    pub fn mark(&mut self, stage: Stage) {
        self.observers.end_stage(stage);
    }

    /// Starts to count the magnitudes of the inputs of projections.
    pub fn observe_inputs(&mut self) {
        let layers = self.model.config.layer_count;
        self.observers.magnitudes = Some(vec![InputMagnitudes::default(); layers]);
    }

    /// Takes what was counted, layer by layer, and stops counting.
    pub fn take_input_magnitudes(&mut self) -> Vec<InputMagnitudes> {
        self.observers.magnitudes.take().unwrap_or_default()
    }

    /// Lists the active neurons of every token from now on, or no longer. Of prompts with a part on a device
    /// nothing is listed.
    pub fn observe_activity(&mut self, on: bool) {
        let layers = self.model.config.layer_count;
        self.observers.activity = on.then(|| vec![Vec::new(); layers]);
    }

    /// Takes the active neurons (`h_i ≠ 0`) of the last pass, `[layers][tokens]`, in the order of the bundle; empty
    /// without [`Self::observe_activity`].
    pub fn take_activity(&mut self) -> Vec<Vec<Vec<u32>>> {
        let layers = self.observers.activity.iter_mut().flatten();
        layers.map(std::mem::take).collect()
    }

    /// Compares the FFN outputs of some tokens with dense from now on. The pass continues with the policy's output; a
    /// layer that exceeds its error bound changes its policy after the pass.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device, whose selectors cannot change.
    pub fn verify(&mut self, verification: Verification) {
        self.assert_on_host();
        self.observers.verification = Some(verification);
    }

    /// Verifies one of `every` decoded tokens, within the error bounds of the bundle's certificate; a policy that is
    /// `forced` has none.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device, whose selectors cannot change.
    pub fn verify_decoded(&mut self, every: usize, forced: bool) {
        let verification = Verification::of_decoded(every, self.model.config.layer_count);
        let bundle = &self.model.bundle;
        let certificate = bundle
            .certificate()
            .filter(|_| !forced && bundle.certificate_matches());
        self.verify(match certificate {
            None => verification,
            Some(certificate) => {
                let layers = certificate.layers.iter();
                let fallback = match self.model.config.activation.has_exact_zeros() {
                    true => Policy::Exact,
                    false => Policy::Dense,
                };
                verification.within(layers.map(|layer| layer.error_bound).collect(), fallback)
            }
        });
    }

    /// What verification has measured so far.
    pub fn verification(&self) -> Option<&Verification> {
        self.observers.verification.as_ref()
    }

    /// Takes the times of device and host by layer, and goes on measuring them where `continues`; none where everything
    /// is on the CPU.
    pub fn take_pass_times(&mut self, continues: bool) -> Option<PassTimes> {
        match &mut self.executor {
            Executor::Cpu(_) => None,
            Executor::Hybrid(executor) => Some(executor.take_times(continues)),
        }
    }

    /// Number of tokens that a device has run again without graphs so far, because the host was late or a graph failed.
    pub fn graph_retries(&self) -> u64 {
        self.observers.retries
    }

    /// Allows a device to run tokens again without graphs. Otherwise this panics in a debug build, so that tests see every
    /// failure.
    pub fn expect_retries(&mut self) {
        self.observers.expects_retries = true;
    }

    /// Why the device launches kernels one by one rather than as a graph; `None` where it captures graphs, or everything is
    /// on the CPU.
    pub fn graph_failure(&self) -> Option<String> {
        Some(self.executor.device()?.graph_failure()?.to_string())
    }

    /// Read bandwidth of the device in bytes per second, measured by copies within it; none where everything is on the
    /// CPU, or the device has too little free memory.
    ///
    /// # Errors
    ///
    /// Fails where the device does.
    pub fn device_read_bandwidth(&self) -> Result<Option<f64>, RuntimeError> {
        match self.executor.device() {
            Some(device) => Ok(powerinfer_gpu::read_bandwidth(device.device())?),
            None => Ok(None),
        }
    }
}

/// Runs `run`; if it fails, removes the tokens that it has added to `sequences`.
fn undo_on_failure<Output>(
    sequences: &mut [Sequence],
    run: impl FnOnce(&mut [Sequence]) -> Result<Output, RuntimeError>,
) -> Result<Output, RuntimeError> {
    // For a single sequence, nothing is allocated.
    let first = sequences.first().map(Sequence::position);
    let rest: Vec<usize> = sequences.iter().skip(1).map(Sequence::position).collect();
    let result = run(sequences);
    if result.is_err() {
        for (sequence, before) in sequences.iter_mut().zip(first.into_iter().chain(rest)) {
            sequence.truncate(before);
        }
    }
    result
}

/// The error of a model whose executor failed.
pub(crate) fn model_error(source: RuntimeError) -> ModelError {
    match source {
        RuntimeError::Model(source) => source,
        other => ModelError::Device(other.to_string()),
    }
}

/// The error of sequence `sequence` of a batch.
fn in_batch(sequence: usize, source: impl Into<RuntimeError>) -> RuntimeError {
    RuntimeError::InBatch {
        sequence,
        source: Box::new(source.into()),
    }
}

impl LanguageModel for Runtime {
    fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.run_current(tokens, PromptLogits::All)
    }

    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.undo_on_failure(|model| {
            let last = model.run_to_last(tokens)?;
            model.head(last).map_err(model_error)
        })?;
        Ok(self.logits.clone())
    }

    fn reset(&mut self) {
        self.sequence.truncate(0);
    }

    fn position(&self) -> usize {
        self.sequence.position()
    }
}
