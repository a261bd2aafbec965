//! A bundle that runs: its weights, its executors and its passes.

use powerinfer_artifact::plan::{BudgetLine, Device, KV_CACHE, Policy};
use powerinfer_bundle::Bundle;
use powerinfer_gpu::DeviceModel;
use powerinfer_model::{ModelError, check_finite};

use crate::{
    Experiments, Observers, RuntimeError, Session, Stage, Verification,
    executor::{CpuExecutor, LayerExecutor},
    ffn::FfnBuffers,
    forward::{HeadBuffers, cap_logits, forward, head},
    hybrid::{HybridExecutor, PassTimes},
    memory::{PREFILL_BATCH, kv_bytes},
    memory_use::{self, MemoryUse},
    model::Model,
    pass::{Pass, PassBuffers},
};

/// A bundle ready to run: weights, executors and threads.
#[derive(Debug)]
pub struct Engine {
    pub(crate) model: Model,
    pub(crate) executor: Executor,
    /// The session that the plan accounts for, kept until it is asked for.
    reserved: Option<Session>,
    pub(crate) observers: Observers,
    buffers: PassBuffers,
    head_buffers: HeadBuffers,
    pub(crate) ffn_buffers: FfnBuffers,
    /// Logits of the last call, `[tokens, vocabulary]`; empty if none were wanted or they stayed on a device.
    pub(crate) logits: Vec<f32>,
}

/// Which logits of a prompt are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// None.
    None,
    /// The logits of the last token.
    Last,
    /// The logits of the last token, to find the largest of as many as stated, the first ones; they may stay on a device.
    Largest(usize),
    /// The logits of all tokens.
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

    /// The parts on a device; none if everything is on the CPU.
    pub(crate) fn device(&self) -> Option<&DeviceModel> {
        match self {
            Self::Cpu(_) => None,
            Self::Hybrid(executor) => Some(&executor.device),
        }
    }

    /// The parts on a device, mutably; none if everything is on the CPU.
    pub(crate) fn device_mut(&mut self) -> Option<&mut DeviceModel> {
        match self {
            Self::Cpu(_) => None,
            Self::Hybrid(executor) => Some(&mut executor.device),
        }
    }
}

impl Engine {
    pub(crate) fn from_parts(model: Model, executor: Executor, reserved: Session) -> Self {
        Self {
            observers: Observers::new(model.config.layer_count),
            model,
            executor,
            reserved: Some(reserved),
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

    /// Most tokens of one pass whose results match running each alone: the sessions that [`Self::decode`] runs together.
    /// On a device, fewer than [`Self::prompt_batch`], and one if there is no room for more.
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

    /// Maximum number of prompt tokens in a pass that also decodes one token for each of `decoded` other sessions. A device runs
    /// prompt tokens in separate passes. Its results depend on the number of tokens in a pass, so other sessions must not affect it.
    pub fn prompt_room(&self, decoded: usize) -> usize {
        let all = self.prompt_batch();
        if decoded == 0 || self.uses_device() {
            return all;
        }
        // Other sessions wait until the pass ends, so it is kept short.
        all.min(PREFILL_BATCH).saturating_sub(decoded).max(1)
    }

    /// Tokens that fit the context of the plan.
    pub fn context_limit(&self) -> usize {
        self.model.context_limit()
    }

    /// Bytes of the KV cache of a session of up to `context` tokens: on the host, and on the device.
    pub fn session_bytes(&self, context: usize) -> [u64; 2] {
        let format = self.model.bundle.plan().budget.kv_cache;
        let each = kv_bytes(&self.model.config, context as u64, format);
        let layers = self.model.config.layer_count as u64;
        let on_device = self.executor.device().map_or(0, DeviceModel::cached_layers) as u64;
        [layers - on_device, on_device].map(|layers| each.saturating_mul(layers))
    }

    /// Bytes of device memory that the plan's budget leaves for KV caches after the plan's other lines, including the
    /// session that the plan accounts for; none if no KV cache is on a device, or the plan has no budget.
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

    /// Memory in use, including the session in the plan's account, by the plan's lines: first the CPU's, then the GPU's.
    pub fn memory(&self) -> Vec<MemoryUse> {
        let session = self.session_bytes(self.context_limit());
        let mut held = memory_use::held(&self.model, session.iter().sum());
        if let Some(device) = self.executor.device() {
            held.extend(memory_use::held_on(device, session[1]));
            held.extend(memory_use::cached_experts(&self.model));
        }
        held
    }

    /// The policy of every layer.
    pub fn policies(&self) -> &[Policy] {
        &self.model.policies
    }

    /// Counts and measurements of passes.
    pub fn observers(&self) -> &Observers {
        &self.observers
    }

    /// Counts and measurements of passes, mutably.
    pub fn observers_mut(&mut self) -> &mut Observers {
        &mut self.observers
    }

    /// Compares the FFN outputs of some tokens with dense from now on. The pass continues with the policy's output; a
    /// layer that exceeds its error bound changes its policy after the pass.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device, whose selectors cannot change.
    pub fn verify(&mut self, verification: Verification) {
        assert!(!self.uses_device(), "everything is on the CPU");
        self.observers.verification = Some(verification);
    }

    /// Changes of policies and neurons.
    pub fn experiments(&mut self) -> Experiments<'_> {
        Experiments::new(self)
    }

    /// Whether inputs of projections are skipped.
    pub fn skips_inputs(&self) -> bool {
        self.model.input_thresholds.iter().any(Option::is_some)
    }

    /// An empty session for up to `context` tokens, at most [`Self::context_limit`]. Sessions of a pass may have different
    /// contexts.
    ///
    /// # Errors
    ///
    /// There is not enough memory for its KV cache.
    pub fn new_session(&mut self, context: usize) -> Result<Session, RuntimeError> {
        let context = context.min(self.context_limit());
        match self.reserved.take() {
            Some(session) if session.context() == context => Ok(session),
            // The memory of the reserved session is freed first.
            _ => Session::new(&self.model.bundle, self.executor.device(), context),
        }
    }

    /// Runs `tokens` of `session` in as many passes as needed. Returns the logits that are `wanted`,
    /// `[tokens, vocabulary]`, which do not depend on how a prompt is split into calls.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, the context is full, the session belongs to another engine, or a device fails.
    /// The session is as before.
    pub fn prefill(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<&[f32], RuntimeError> {
        if tokens.is_empty() {
            self.logits.clear();
        } else {
            self.run(&mut [session], tokens, wanted)?;
        }
        Ok(&self.logits)
    }

    /// Runs one more token of each session of `batch`, in passes that read the weights once for all of them. Returns the
    /// logits `[sessions, vocabulary]`, which do not depend on what runs together.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::prefill`] for any session; all sessions are as before.
    pub fn decode(&mut self, batch: &mut [(&mut Session, u32)]) -> Result<&[f32], RuntimeError> {
        let tokens: Vec<u32> = batch.iter().map(|(_, token)| *token).collect();
        let sessions = batch.iter_mut().map(|(session, _)| &mut **session);
        self.run(&mut sessions.collect::<Vec<_>>(), &tokens, Wanted::Last)?;
        Ok(&self.logits)
    }

    /// Runs one token of each of `sessions` except the last, which gets the remaining `tokens`, a piece of a prompt. Leaves
    /// the logits of the other sessions, and those that are `wanted` of the last, in [`Self::logits`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::decode`].
    pub(crate) fn run(
        &mut self,
        sessions: &mut [&mut Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError> {
        let Some(decoded) = sessions
            .len()
            .checked_sub(1)
            .filter(|decoded| *decoded < tokens.len())
        else {
            return Err(RuntimeError::BatchSize {
                sessions: sessions.len(),
                tokens: tokens.len(),
            });
        };
        for (index, session) in sessions.iter().enumerate() {
            let own = if index == decoded {
                &tokens[index..]
            } else {
                &tokens[index..=index]
            };
            self.check(session, own).map_err(|source| match decoded {
                0 => source,
                _ => in_batch(index, source),
            })?;
        }
        // For a single session, nothing is allocated.
        let first = sessions[0].position();
        let rest: Vec<usize> = sessions
            .iter()
            .skip(1)
            .map(|session| session.position())
            .collect();
        let result = self.run_checked(sessions, tokens, wanted);
        if result.is_err() {
            for (session, before) in sessions.iter_mut().zip(std::iter::once(first).chain(rest)) {
                session.truncate(before);
            }
        }
        result
    }

    /// Runs tokens that were checked. After a failure, some sessions keep new tokens.
    fn run_checked(
        &mut self,
        sessions: &mut [&mut Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError> {
        let (count, decoded) = (sessions.len(), sessions.len() - 1);
        let together = self.decode_batch_size();
        if count == 1 {
            self.logits.clear();
            return self.run_alone(sessions, tokens, wanted);
        }
        if tokens.len() <= together {
            return self.run_together(sessions, tokens, wanted);
        }
        // All sessions if each has one token, or else the sessions before the prompt.
        let batched = if tokens.len() == count {
            count
        } else {
            decoded
        };
        let mut all = Vec::new();
        for first in (0..batched).step_by(together) {
            let batch = first..batched.min(first + together);
            self.run_together(&mut sessions[batch.clone()], &tokens[batch], Wanted::Last)?;
            all.append(&mut self.logits);
        }
        if batched == decoded {
            self.run_alone(&mut sessions[decoded..], &tokens[decoded..], wanted)?;
            all.append(&mut self.logits);
        }
        self.logits = all;
        Ok(())
    }

    /// Runs tokens of several sessions in one pass.
    fn run_together(
        &mut self,
        sessions: &mut [&mut Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError> {
        self.pass(sessions, tokens, None)?;
        let (decoded, size) = (sessions.len() - 1, self.model.config.hidden_size);
        let rows = match wanted {
            Wanted::All => tokens.len(),
            Wanted::None | Wanted::Last | Wanted::Largest(_) => decoded,
        };
        self.head(0..rows * size)?;
        if matches!(wanted, Wanted::Last | Wanted::Largest(_)) {
            let mut logits = std::mem::take(&mut self.logits);
            self.head(self.last_hidden())?;
            logits.append(&mut self.logits);
            self.logits = logits;
        }
        Ok(())
    }

    /// Number of tokens at the start of `tokens`, the rest of one prompt, that run together. It is at most [`Self::prompt_batch`], or
    /// [`Self::decode_batch_size`] for the last [`PREFILL_BATCH`] tokens if the device has most experts of a mixture. A decoding batch
    /// reads only the experts that its tokens select. A longer pass of up to [`PREFILL_BATCH`] tokens multiplies every expert on the device
    /// with a whole tile of tokens, which takes longer by the simulator's estimate.
    fn piece(&self, tokens: &[u32]) -> usize {
        let (config, totals) = (&self.model.config, &self.model.bundle.plan().totals);
        // If the host has most of the experts, passes of many tokens are faster.
        let is_mostly_on_device = 2 * totals.hot_count >= totals.neuron_count;
        let is_split = config.experts.is_some() && self.uses_device() && is_mostly_on_device;
        let most = if is_split && tokens.len() <= PREFILL_BATCH {
            self.decode_batch_size()
        } else {
            self.prompt_batch()
        };
        most.min(tokens.len())
    }

    /// Runs tokens of one session in [pieces](Self::piece).
    fn run_alone(
        &mut self,
        session: &mut [&mut Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError> {
        let mut earlier = Vec::new();
        let mut is_found = false;
        let mut left = tokens;
        while !left.is_empty() {
            let piece;
            (piece, left) = left.split_at(self.piece(left));
            let search = match wanted {
                Wanted::Largest(vocabulary) if left.is_empty() => Some(vocabulary),
                _ => None,
            };
            is_found = self.pass(session, piece, search)?;
            if wanted == Wanted::All {
                let all = self.buffers.hidden.len();
                // On the CPU, the head's temporary memory is planned for fewer tokens.
                let size = match self.uses_device() {
                    true => all,
                    false => PREFILL_BATCH * (all / piece.len()),
                };
                for start in (0..all).step_by(size) {
                    self.head(start..all.min(start + size))?;
                    earlier.append(&mut self.logits);
                }
            }
        }
        match wanted {
            Wanted::None => self.logits.clear(),
            Wanted::Last => self.head(self.last_hidden())?,
            Wanted::Largest(vocabulary) => self.head_for_largest(vocabulary, is_found)?,
            Wanted::All => self.logits = earlier,
        }
        Ok(())
    }

    /// Finds the largest of the first `vocabulary` logits of the last token, unless it `is_found` already. The logits stay on the
    /// device if it has the head.
    fn head_for_largest(&mut self, vocabulary: usize, is_found: bool) -> Result<(), RuntimeError> {
        let range = self.last_hidden();
        let device = self.executor.device_mut();
        let Some(device) = device.filter(|device| device.has_head()) else {
            return self.head(range);
        };
        if !is_found {
            device.find_largest(Some(&self.buffers.hidden[range]), vocabulary)?;
        }
        self.observers.statistics.device_bytes_read += device.head_bytes_read(1);
        self.logits.clear();
        self.observers.end_stage(Stage::Head);
        Ok(())
    }

    /// The range of the last token's hidden state.
    fn last_hidden(&self) -> std::ops::Range<usize> {
        let end = self.buffers.hidden.len();
        end - self.model.config.hidden_size..end
    }

    /// Runs `tokens`: one of each of `sessions`, and the remaining ones of the last. Leaves the hidden states after the last
    /// layer in the buffers, unless a device has found the largest of the first `search` logits; returns whether it has.
    fn pass(
        &mut self,
        sessions: &mut [&mut Session],
        tokens: &[u32],
        search: Option<usize>,
    ) -> Result<bool, RuntimeError> {
        let mut pass = Pass {
            model: &self.model,
            sessions,
            tokens,
            search,
            observers: &mut self.observers,
            buffers: &mut self.buffers,
        };
        forward(self.executor.layers(), &mut pass)?;
        let is_found = search.is_some() && pass.search.is_none();
        for (layer, policy) in self.observers.fallbacks.drain(..) {
            self.model.policies[layer] = policy;
        }
        Ok(is_found)
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

    /// Refuses tokens outside the vocabulary, tokens beyond the context of `session`, and sessions of other engines.
    fn check(&self, session: &Session, tokens: &[u32]) -> Result<(), RuntimeError> {
        let vocabulary = self.model.config.vocabulary_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            let token = *token;
            return Err(ModelError::TokenOutside { token, vocabulary }.into());
        }
        let (asked, limit) = (
            session.position() + tokens.len(),
            session.context.min(self.context_limit()),
        );
        if asked > limit {
            let tokens = asked;
            return Err(ModelError::ContextFull { tokens, limit }.into());
        }
        let format = self.model.bundle.plan().budget.kv_cache;
        if session.is_of(&self.model.config, format, self.executor.device()) {
            Ok(())
        } else {
            Err(RuntimeError::OtherSession)
        }
    }
}

/// Properties of a device.
impl Engine {
    /// Takes the times of device and host by layer, and keeps measuring them if `continues`; none if everything
    /// is on the CPU.
    pub fn take_pass_times(&mut self, continues: bool) -> Option<PassTimes> {
        match &mut self.executor {
            Executor::Cpu(_) => None,
            Executor::Hybrid(executor) => Some(executor.take_times(continues)),
        }
    }

    /// Why the device launches kernels one by one rather than as a graph; `None` if it captures graphs, or everything is
    /// on the CPU.
    pub fn graph_failure(&self) -> Option<String> {
        Some(self.executor.device()?.graph_failure()?.to_string())
    }

    /// Read bandwidth of the device in bytes per second, measured by copies within it; none if everything is on the
    /// CPU, or the device has too little free memory.
    ///
    /// # Errors
    ///
    /// The device fails.
    pub fn device_read_bandwidth(&self) -> Result<Option<f64>, RuntimeError> {
        match self.executor.device() {
            Some(device) => Ok(powerinfer_gpu::read_bandwidth(device.device())?),
            None => Ok(None),
        }
    }
}

/// The error of session `session` of a batch.
fn in_batch(session: usize, source: impl Into<RuntimeError>) -> RuntimeError {
    RuntimeError::InBatch {
        session,
        source: Box::new(source.into()),
    }
}
