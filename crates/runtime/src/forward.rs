//! The forward pass: one page, one comment per step.

use std::{slice::from_mut, sync::Arc, time::Duration};

use powerinfer_artifact::{
    plan::{InputThresholds, Policy, Threshold},
    random::Random,
};
use powerinfer_bundle::{
    Bundle, StoredLayer, StoredLinear, StoredNorm, StoredWeights,
    memory::{PREFILL_BATCH, kv_bytes},
};
use powerinfer_kernels::cuda::{Device, GpuCache};
use powerinfer_model::{Block, LanguageModel, ModelConfig, ModelError, Positions};

use crate::{
    InputMagnitudes, LayerAudit, PolicyChoice, RuntimeError, Sequence, Stage, Statistics, Threads,
    Verification,
    attention::{Heads, Reach, attend},
    choice::{Choice, LayerChoices},
    ffn::{Ffn, Scratch},
    hybrid::{self, Hybrid, SideTimes},
    linear::Linear,
    memory::{self, Held},
    norm::norm_all,
    rotary::rotate,
    sequence::LayerCache,
    verification::Observation,
};

/// How to run a bundle.
#[derive(Debug)]
pub struct Options {
    /// Kernels and threads.
    pub threads: Threads,
    /// Which neurons to compute.
    pub policy: PolicyChoice,
}

/// A bundle ready to run, and the sequence it is in.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) bundle: Bundle,
    pub(crate) config: ModelConfig,
    pub(crate) weights: Arc<StoredWeights>,
    pub(crate) choices: Vec<LayerChoices>,
    pub(crate) policies: Vec<Policy>,
    input_thresholds: Vec<Option<InputThresholds>>,
    pub(crate) threads: Threads,
    sequence: Sequence,
    pub(crate) statistics: Statistics,
    pub(crate) scratch: Scratch,
    verification: Option<Verification>,
    pub(crate) audit: Option<Vec<LayerAudit>>,
    magnitudes: Option<Vec<InputMagnitudes>>,
    pub(crate) hybrid: Option<Box<Hybrid>>,
}

impl Runtime {
    /// Prepares `bundle` for running on the CPU alone; nothing is converted or copied. Fails where the
    /// plan accounts for other memory than that takes.
    pub fn new(bundle: Bundle, options: Options) -> Result<Self, RuntimeError> {
        Self::place(bundle, options, None)
    }

    /// Prepares `bundle` for running on the CPU and on `device`, which gets a copy of what the plan puts
    /// on a GPU. Fails as [`Self::new`], and where the device has no room.
    pub fn with_device(
        bundle: Bundle,
        options: Options,
        device: Arc<dyn Device>,
    ) -> Result<Self, RuntimeError> {
        Self::place(bundle, options, Some(device))
    }

    fn place(
        bundle: Bundle,
        options: Options,
        device: Option<Arc<dyn Device>>,
    ) -> Result<Self, RuntimeError> {
        let config = bundle.config().clone();
        let weights = StoredWeights::find(bundle.weights(), &config, bundle.quant())?;
        let mut choices = Vec::new();
        for (layer, plan) in bundle.plan().layers.iter().enumerate() {
            let file = bundle.predictors();
            choices.push(LayerChoices::find(file, layer, plan, &config)?);
        }
        let policies: Vec<Policy> = match options.policy {
            PolicyChoice::Planned => bundle
                .plan()
                .layers
                .iter()
                .map(|layer| layer.policy)
                .collect(),
            PolicyChoice::Forced(policy) => vec![policy; config.layer_count],
        };
        // Who forces a policy wants to see what it does, and nothing else.
        let layers = bundle.plan().layers.iter();
        let input_thresholds = layers.map(|layer| match options.policy {
            PolicyChoice::Planned => layer.input_thresholds,
            PolicyChoice::Forced(_) => None,
        });
        let input_thresholds = input_thresholds.collect();
        for (layer, (choices, policy)) in choices.iter().zip(&policies).enumerate() {
            choices.check(*policy, bundle.folder(), layer)?;
        }
        let context = context_limit(&bundle);
        let hybrid = match device {
            Some(device) if bundle.plan().uses_gpu() => Some(Box::new(Hybrid::place(
                device,
                &hybrid::Source {
                    bundle: &bundle,
                    weights: &weights,
                    choices: &choices,
                    policies: &policies,
                    context,
                    activations: options.threads.activations(),
                },
            )?)),
            _ => None,
        };
        let sequence = start(&bundle, hybrid.as_deref())?;
        let mut hybrid = hybrid;
        if let Some(hybrid) = &mut hybrid {
            let caches = sequence.on_device.iter().flatten().map(GpuCache::bytes);
            let caches = caches.sum();
            hybrid.check_budget(&bundle, caches)?;
            hybrid.make_room_for_prompts(&bundle, caches)?;
        }
        memory::check(
            &bundle,
            &memory::held(&config, &weights, &choices, &sequence, context),
        )?;
        Ok(Self {
            sequence,
            threads: options.threads,
            statistics: Statistics::default(),
            scratch: Scratch::default(),
            verification: None,
            audit: None,
            magnitudes: None,
            hybrid,
            bundle,
            weights: Arc::new(weights),
            choices,
            policies,
            input_thresholds,
            config,
        })
    }

    /// The bundle that runs.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Whether a part of the model is on a device beside the CPU.
    pub fn uses_device(&self) -> bool {
        self.hybrid.is_some()
    }

    /// From now on takes the times of a device and of the host beside it, layer by layer, or no longer; returns
    /// those that were taken. None where everything runs on the CPU.
    pub fn take_side_times(&mut self, goes_on: bool) -> Option<SideTimes> {
        let hybrid = self.hybrid.as_mut();
        hybrid.map(|hybrid| hybrid.take_times(goes_on))
    }

    /// How fast the device reads, in bytes per second, by copies within it; none where everything runs on the CPU, or where
    /// the device has no room to tell.
    pub fn device_read_bandwidth(&self) -> Result<Option<f64>, RuntimeError> {
        match &self.hybrid {
            Some(hybrid) => Ok(hybrid.read_bandwidth()?),
            None => Ok(None),
        }
    }

    /// Tokens of a prompt that are run at once: all that fit the scratch memory of the CPU's half, or the room that
    /// a plan leaves on its device.
    pub fn prompt_batch(&self) -> usize {
        let hybrid = self.hybrid.as_ref();
        hybrid.map_or(PREFILL_BATCH, |hybrid| hybrid.prompt_tokens())
    }

    /// The policy of every layer.
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// What was read and computed since the last call. A clock that runs goes on.
    pub fn take_statistics(&mut self) -> Statistics {
        let taken = std::mem::take(&mut self.statistics);
        if taken.stages.is_some() {
            self.statistics.start_clock();
        }
        taken
    }

    /// From now on time counts to stages; what lies before this call counts to none.
    pub fn start_clock(&mut self) {
        self.statistics.start_clock();
    }

    /// What the caller did since the last forward pass was `stage`, where the clock runs.
    pub fn mark(&mut self, stage: Stage) {
        self.statistics.mark(stage);
    }

    /// From now on `layer` follows `policy`, with `threshold` where that is given.
    ///
    /// Fails where the bundle lacks what the policy needs.
    pub fn decide(
        &mut self,
        layer: usize,
        policy: Policy,
        threshold: Option<Threshold>,
    ) -> Result<(), RuntimeError> {
        self.choices[layer].set_threshold(threshold);
        self.choices[layer].check(policy, self.bundle.folder(), layer)?;
        self.policies[layer] = policy;
        Ok(())
    }

    /// From now on `layer` reads the inputs of its projections from `thresholds` on, or all; those of
    /// gate and up only while every neuron is computed.
    pub fn skip_inputs(&mut self, layer: usize, thresholds: Option<InputThresholds>) {
        self.input_thresholds[layer] = thresholds;
    }

    /// Whether some inputs of projections are left out.
    pub fn skips_inputs(&self) -> bool {
        self.input_thresholds.iter().any(Option::is_some)
    }

    /// From now on counts how large the inputs of projections are.
    pub fn observe_inputs(&mut self) {
        self.magnitudes = Some(vec![InputMagnitudes::default(); self.config.layer_count]);
    }

    /// What was counted, layer by layer; ends it.
    pub fn take_input_magnitudes(&mut self) -> Vec<InputMagnitudes> {
        self.magnitudes.take().unwrap_or_default()
    }

    /// From now on computes the FFNs of some tokens exactly as well, to tell how far the policy's
    /// are off; what goes on is the policy's, until a layer leaves the band it was certified for.
    pub fn verify(&mut self, verification: Verification) {
        self.verification = Some(verification);
    }

    /// What verification has found so far.
    pub fn verification(&self) -> Option<&Verification> {
        self.verification.as_ref()
    }

    /// Tokens that fit the context that the plan made room for.
    pub fn context_limit(&self) -> usize {
        context_limit(&self.bundle)
    }

    /// What is held in memory, by the lines of a plan.
    pub fn memory(&self) -> Vec<Held> {
        let (config, context) = (&self.config, self.context_limit());
        memory::held(
            config,
            &self.weights,
            &self.choices,
            &self.sequence,
            context,
        )
    }

    /// The sequence that is run.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// The same, to be changed by what knows what it may be.
    pub(crate) fn sequence_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    /// From which magnitude on each layer reads inputs, where it leaves any out.
    pub(crate) fn input_thresholds(&self) -> &[Option<InputThresholds>] {
        &self.input_thresholds
    }

    /// An empty sequence, with as much room.
    pub fn new_sequence(&self) -> Result<Sequence, RuntimeError> {
        start(&self.bundle, self.hybrid.as_deref())
    }

    /// So many of them, each with room of its own, to be decoded together.
    pub fn new_sequences(&self, count: usize) -> Result<Vec<Sequence>, RuntimeError> {
        let mut sequences = Vec::new();
        for index in 0..count {
            let sequence = start(&self.bundle, self.hybrid.as_deref());
            sequences.push(sequence.map_err(|source| in_batch(index, source))?);
        }
        Ok(sequences)
    }

    /// Runs one more token of each of `sequences`, which are of this bundle: token i of sequence i, all
    /// in one pass that reads weights once. Returns their logits, `[sequences, vocabulary]`, with the
    /// bits that each has alone.
    ///
    /// Fails before anything is changed where a sequence cannot take its token.
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
            self.check(sequence.position(), &[*token])
                .map_err(|source| in_batch(index, source))?;
        }
        let mut logits = Vec::with_capacity(tokens.len() * self.config.vocabulary_size);
        let batches = sequences.chunks_mut(PREFILL_BATCH);
        for (sequences, tokens) in batches.zip(tokens.chunks(PREFILL_BATCH)) {
            let hidden = self.run(sequences, tokens)?;
            logits.extend(self.head(&hidden)?);
        }
        Ok(logits)
    }

    /// From now on runs `sequence`; returns the one before.
    pub fn replace_sequence(&mut self, sequence: Sequence) -> Sequence {
        std::mem::replace(&mut self.sequence, sequence)
    }

    /// Forgets all tokens from number `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.sequence.truncate(tokens);
    }

    /// Keeps of the sequence what `tokens` begin with too, all but their last; returns how many tokens
    /// that is. What is left of `tokens` can be run then.
    pub fn keep_prefix_of(&mut self, tokens: &[u32]) -> usize {
        let common = self.sequence.common_prefix(tokens);
        let kept = common.min(tokens.len().saturating_sub(1));
        self.truncate(kept);
        kept
    }

    /// Runs `tokens` of `sequences`, as many of each, on whatever is there; as [`Self::layers`].
    fn run(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[u32],
    ) -> Result<Vec<f32>, RuntimeError> {
        let Some(mut hybrid) = self.hybrid.take() else {
            return Ok(self.layers(sequences, tokens));
        };
        let each = tokens.len() / sequences.len();
        let mut hidden = Vec::with_capacity(tokens.len() * self.config.hidden_size);
        let mut outcome = Ok(());
        for (sequence, tokens) in sequences.iter_mut().zip(tokens.chunks_exact(each)) {
            for tokens in tokens.chunks(hybrid.prompt_tokens()) {
                let state =
                    outcome.and_then(|()| self.hybrid_tokens(&mut hybrid, sequence, tokens));
                outcome = state.map(|state| hidden.extend(state));
            }
        }
        self.hybrid = Some(hybrid);
        outcome.map(|()| hidden)
    }

    /// Runs `tokens`, one batch, of which every sequence gets as many, one sequence's after the
    /// other's; returns the hidden states after the last layer, `[tokens, hidden]`.
    fn layers(&mut self, sequences: &mut [Sequence], tokens: &[u32]) -> Vec<f32> {
        let weights = Arc::clone(&self.weights);
        let each = tokens.len() / sequences.len();
        let after = |sequence: &Sequence| sequence.position()..sequence.position() + each;
        let positions: Vec<usize> = sequences.iter().flat_map(after).collect();
        let mut hidden = self.embed(&weights, tokens, &positions);
        self.statistics.mark(Stage::Embedding);
        for (index, layer) in weights.layers.iter().enumerate() {
            let caches = sequences.iter_mut();
            let caches = caches.map(|sequence| &mut sequence.layers[index]);
            let residual = self.attend_to(index, layer, caches, &positions, &mut hidden);
            self.feed_forward(index, layer, &positions, &residual, &mut hidden);
        }
        for (sequence, tokens) in sequences.iter_mut().zip(tokens.chunks_exact(each)) {
            sequence.tokens.extend(tokens);
        }
        self.statistics.tokens += tokens.len() as u64;
        hidden
    }

    /// Adds to `hidden`, of the tokens at `positions`, what attention gives; returns what the FFN sees, as
    /// attention found it or left it.
    pub(crate) fn attend_to<'a>(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        caches: impl ExactSizeIterator<Item = &'a mut LayerCache>,
        positions: &[usize],
        hidden: &mut [f32],
    ) -> Vec<f32> {
        // Attention sees the hidden state through a norm, or as it is where norms come after.
        let mut input = hidden.to_vec();
        if self.config.block != Block::PostNorm {
            self.norm(&layer.attention_norm, &mut input);
        }
        self.statistics.mark(Stage::Norms);
        let attended = self.attention(index, layer, caches, positions, &input);
        self.statistics.mark(Stage::AttentionOutput);

        // The FFN runs after attention was added, or beside it on the same hidden state.
        let residual = self.is_parallel().then(|| hidden.to_vec());
        add(hidden, &attended);
        if self.config.block == Block::PostNorm {
            self.norm(&layer.attention_norm, hidden);
        }
        residual.unwrap_or_else(|| hidden.to_vec())
    }

    /// Whether the FFN runs beside attention.
    pub(crate) fn is_parallel(&self) -> bool {
        matches!(
            self.config.block,
            Block::Parallel | Block::ParallelSharedNorm
        )
    }

    /// Adds to `hidden` what the FFN gives for `residual`.
    pub(crate) fn feed_forward(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        positions: &[usize],
        residual: &[f32],
        hidden: &mut [f32],
    ) {
        let input = self.ffn_input(layer, residual);
        self.statistics.mark(Stage::Norms);
        // It computes whatever neurons the policy asks for.
        self.ffn(index, layer, positions, residual, &input, hidden);
        if let (Block::PostNorm, Some(norm)) = (self.config.block, &layer.ffn_norm) {
            self.norm(norm, hidden);
        }
    }

    /// What gate and up are multiplied with where the FFN sees `residual`.
    pub(crate) fn ffn_input(&self, layer: &StoredLayer, residual: &[f32]) -> Vec<f32> {
        let mut input = residual.to_vec();
        match (self.config.block, &layer.ffn_norm) {
            (Block::ParallelSharedNorm, _) => self.norm(&layer.attention_norm, &mut input),
            (Block::PreNorm | Block::Parallel, Some(norm)) => self.norm(norm, &mut input),
            _ => {}
        }
        input
    }

    /// Each token's row of the embedding, with its position where positions are learned.
    pub(crate) fn embed(
        &mut self,
        weights: &StoredWeights,
        tokens: &[u32],
        positions: &[usize],
    ) -> Vec<f32> {
        let (count, width) = (tokens.len(), self.config.embedding_size);
        let table = weights.embedding.view(self.bundle.weights());
        let mut embedded = vec![0.0; count * width];
        for (token, out) in tokens.iter().zip(embedded.chunks_exact_mut(width)) {
            table.dequantise_row(*token as usize, out);
            out.iter_mut()
                .for_each(|value| *value *= self.config.embedding_scale);
        }
        let mut read = count * table.row_bytes();
        let mut hidden = match &weights.project_in {
            None => embedded,
            Some(project) => self.linear(project, &embedded, 0.0),
        };
        if let (Some(table), Positions::Learned { offset }) =
            (&weights.positions, &self.config.positions)
        {
            let table = table.view(self.bundle.weights());
            let mut row = vec![0.0; self.config.hidden_size];
            for (position, hidden) in positions.iter().zip(hidden.chunks_exact_mut(row.len())) {
                table.dequantise_row(position + offset, &mut row);
                add(hidden, &row);
            }
            read += count * table.row_bytes();
        }
        self.statistics.bytes_read += read as u64;
        hidden
    }

    /// What attention adds for the tokens at `positions` whose inputs are `x [tokens, hidden]`; every
    /// cache is of as many of them, and each sees its own.
    fn attention<'a>(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        caches: impl ExactSizeIterator<Item = &'a mut LayerCache>,
        positions: &[usize],
        x: &[f32],
    ) -> Vec<f32> {
        // Query, key and value of all tokens at once.
        let thresholds = self.input_thresholds[index];
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.attention);
        if let Some(magnitudes) = &mut self.magnitudes {
            magnitudes[index].attention.add(x);
        }
        let file = self.bundle.weights();
        let input = Linear::of(&layer.query, file).input(&self.threads, x, threshold);
        let mut product = |stored: &StoredLinear| {
            let product = Linear::of(stored, file).product(&self.threads, &input, threshold);
            self.statistics.bytes_read += product.bytes_read as u64;
            product.values
        };
        let (query, key) = (product(&layer.query), product(&layer.key));
        let value = product(&layer.value);
        self.statistics.mark(Stage::QueryKeyValue);
        let mixed = self.mix(index, layer, caches, positions, [query, key, value]);
        self.statistics.mark(Stage::Attention);
        if let Some(magnitudes) = &mut self.magnitudes {
            magnitudes[index].output.add(&mixed);
        }
        let threshold = thresholds.map_or(0.0, |thresholds| thresholds.output);
        self.linear(&layer.output, &mixed, threshold)
    }

    /// What attention mixes of the values that the tokens at `positions` see, `[tokens, heads · head_size]`;
    /// `projected` are their queries, keys and values.
    pub(crate) fn mix<'a>(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        caches: impl ExactSizeIterator<Item = &'a mut LayerCache>,
        positions: &[usize],
        projected: [Vec<f32>; 3],
    ) -> Vec<f32> {
        let [mut query, mut key, value] = projected;
        if let Some([query_norm, key_norm]) = &layer.head_norms {
            self.norm(query_norm, &mut query);
            self.norm(key_norm, &mut key);
        }
        let count = positions.len();
        let (queries, keys) = (query.len() / count, key.len() / count);
        let reach = Reach {
            window: self.config.attention_windows[index],
            slopes: match &self.config.positions {
                Positions::Alibi { slopes } => Some(slopes),
                _ => None,
            },
        };
        if let Positions::Rotary(rotary) = &self.config.positions {
            let heads = query
                .chunks_exact_mut(queries)
                .zip(key.chunks_exact_mut(keys));
            for (position, (query, key)) in positions.iter().zip(heads) {
                for heads in [query, key] {
                    rotate(rotary, heads, self.config.head_size, *position);
                }
            }
        }
        let heads = Heads {
            count: self.config.head_count,
            kv_count: self.config.kv_head_count,
            size: self.config.head_size,
        };
        let mut mixed = query;
        let each = count / caches.len();
        let pairs = key
            .chunks_exact(each * keys)
            .zip(value.chunks_exact(each * keys));
        let own = mixed.chunks_exact_mut(each * queries).zip(pairs);
        for (cache, (mixed, (key, value))) in caches.zip(own) {
            for (key, value) in key.chunks_exact(keys).zip(value.chunks_exact(keys)) {
                cache.push(key, value);
            }
            // Each token sees itself and what came before it.
            let read = attend(&self.threads, heads, &reach, cache, mixed);
            self.statistics.bytes_read += read as u64;
        }
        mixed
    }

    /// Adds the FFN's output for `x [tokens, hidden]`, which is `residual` normed, to `hidden`.
    fn ffn(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        positions: &[usize],
        residual: &[f32],
        x: &[f32],
        hidden: &mut [f32],
    ) {
        if let Some(magnitudes) = &mut self.magnitudes {
            magnitudes[index].ffn.add(x);
        }
        let policy = self.policies[index];
        let thresholds = self.input_thresholds[index].filter(|_| policy == Policy::Dense);
        let choices = &self.choices[index];
        let ffn = Ffn {
            input_threshold: thresholds.and_then(|found| found.ffn).unwrap_or(0.0),
            ..ffn_of(
                &self.bundle,
                index,
                layer,
                choices.choice(policy, self.bundle.predictors()),
            )
        };
        let predictor_input = match choices.sees_residual(policy) {
            true => residual,
            false => x,
        };
        let verification = self.verification.as_mut();
        let verification = verification.filter(|found| found.wants(positions));
        let is_observed = verification.is_some() || self.audit.is_some();
        let before = is_observed.then(|| {
            self.scratch.recorded = Some(Vec::new());
            hidden.to_vec()
        });
        ffn.run_batch(
            &self.threads,
            x,
            predictor_input,
            hidden,
            &mut self.scratch,
            &mut self.statistics,
        );
        let Some(before) = before else {
            return;
        };
        // The same once more with every neuron, which is exact for every activation; of the same
        // inputs, for it is the policy that is looked at.
        let computed = self.scratch.recorded.replace(Vec::new());
        let mut exact = before.clone();
        let dense = Ffn {
            choice: Choice::Dense,
            ..ffn
        };
        dense.run_batch(
            &self.threads,
            x,
            predictor_input,
            &mut exact,
            &mut self.scratch,
            &mut Statistics::default(),
        );
        let products = self.scratch.recorded.take();
        let observation = Observation {
            before: &before,
            sparse: hidden,
            exact: &exact,
            computed: &computed.unwrap_or_default(),
            products: &products.unwrap_or_default(),
            down: &dense.down.matrix,
        };
        if let Some(audit) = &mut self.audit {
            let predicts = ffn.choice.predicts();
            let scratch = &self.scratch;
            let listed = predicts.then_some(|token| scratch.predicted(token, ffn.gate.outputs()));
            audit[index].observe(&observation, listed);
        }
        let alarm = verification.and_then(|found| found.observe(index, positions, &observation));
        if let Some(fallback) = alarm {
            self.policies[index] = fallback;
        }
    }

    /// What gate, up and down of layer `index` take for one token, of the neurons in `listed`, which
    /// ascend, or of all of them.
    pub fn time_ffn(&mut self, index: usize, listed: Option<&[u32]>) -> Duration {
        let layer = &self.weights.layers[index];
        let choice = listed.map_or(Choice::Dense, Choice::Listed);
        let ffn = ffn_of(&self.bundle, index, layer, choice);
        let mut random = Random::new(index as u64);
        let normal = |_| random.normal() as f32;
        let x: Vec<f32> = (0..self.config.hidden_size).map(normal).collect();
        let (mut hidden, mut statistics) = (x.clone(), Statistics::default());
        statistics.start_clock();
        let (scratch, counted) = (&mut self.scratch, &mut statistics);
        ffn.run_batch(&self.threads, &x, &x, &mut hidden, scratch, counted);
        let lap = |stage| statistics.stages.unwrap_or_default().lap(stage).time;
        lap(Stage::GateUp) + lap(Stage::Down)
    }

    /// `x · Wᵀ + b` for `x [tokens, inputs]`, those below `threshold` left out.
    fn linear(&mut self, stored: &StoredLinear, x: &[f32], threshold: f32) -> Vec<f32> {
        let linear = Linear::of(stored, self.bundle.weights());
        let input = linear.input(&self.threads, x, threshold);
        let product = linear.product(&self.threads, &input, threshold);
        self.statistics.bytes_read += product.bytes_read as u64;
        product.values
    }

    fn norm(&self, norm: &StoredNorm, x: &mut [f32]) {
        norm_all(self.config.norm, self.config.norm_epsilon, norm, x);
    }

    /// Logits of the hidden states of some tokens, `[tokens, vocabulary]`.
    pub(crate) fn head(&mut self, hidden: &[f32]) -> Result<Vec<f32>, RuntimeError> {
        if let Some(hybrid) = self.hybrid.as_mut().filter(|hybrid| hybrid.has_head()) {
            let logits = hybrid.logits(hidden)?;
            self.statistics.mark(Stage::Head);
            return Ok(logits);
        }
        let weights = Arc::clone(&self.weights);
        let mut x = hidden.to_vec();
        if let Some(norm) = &weights.final_norm {
            self.norm(norm, &mut x);
        }
        if let Some(project) = &weights.project_out {
            x = self.linear(project, &x, 0.0);
        }
        self.statistics.mark(Stage::Norms);
        let logits = self.linear(&weights.head, &x, 0.0);
        self.statistics.mark(Stage::Head);
        Ok(logits)
    }

    /// Appends `tokens`, of which there is one at least; returns the hidden state behind the last layer of the last one.
    pub(crate) fn last_hidden(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.check(self.position(), tokens)?;
        let mut last = Vec::new();
        let mut sequence = std::mem::take(&mut self.sequence);
        let mut outcome = Ok(());
        for batch in tokens.chunks(PREFILL_BATCH) {
            let hidden = outcome.and_then(|()| self.run(from_mut(&mut sequence), batch));
            outcome = hidden.map(|hidden| {
                last = hidden[hidden.len() - self.config.hidden_size..].to_vec();
            });
        }
        self.sequence = sequence;
        outcome.map_err(executor)?;
        Ok(last)
    }

    /// Refuses tokens outside the vocabulary, and beyond the context after `position`.
    fn check(&self, position: usize, tokens: &[u32]) -> Result<(), ModelError> {
        let vocabulary = self.config.vocabulary_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(ModelError::TokenOutside {
                token: *token,
                vocabulary,
            });
        }
        let (asked, limit) = (position + tokens.len(), self.context_limit());
        if asked > limit {
            return Err(ModelError::ContextFull {
                tokens: asked,
                limit,
            });
        }
        Ok(())
    }
}

/// An empty sequence of `bundle`.
fn start(bundle: &Bundle, hybrid: Option<&Hybrid>) -> Result<Sequence, RuntimeError> {
    let (config, context) = (bundle.config(), context_limit(bundle));
    let format = bundle.plan().budget.kv_cache;
    let on_device = match hybrid {
        Some(hybrid) => hybrid.new_caches()?,
        None => Vec::new(),
    };
    Sequence::new(config, format, context, on_device).ok_or_else(|| RuntimeError::NoRoom {
        tokens: context,
        bytes: kv_bytes(config, context as u64, format).saturating_mul(config.layer_count as u64),
    })
}

/// What a model fails of that runs on a device.
pub(crate) fn executor(source: RuntimeError) -> ModelError {
    match source {
        RuntimeError::Model(source) => source,
        other => ModelError::Device(other.to_string()),
    }
}

/// What sequence `sequence` of a batch cannot have.
fn in_batch(sequence: usize, source: impl Into<RuntimeError>) -> RuntimeError {
    RuntimeError::InBatch {
        sequence,
        source: Box::new(source.into()),
    }
}

fn context_limit(bundle: &Bundle) -> usize {
    let planned = bundle.plan().budget.context_tokens;
    let planned = usize::try_from(planned).unwrap_or(usize::MAX);
    bundle.config().context_length.min(planned)
}

/// The FFN of `layer`, number `index`, with the neurons of `choice`.
pub(crate) fn ffn_of<'a>(
    bundle: &'a Bundle,
    index: usize,
    layer: &'a StoredLayer,
    choice: Choice<'a>,
) -> Ffn<'a> {
    let file = bundle.weights();
    Ffn {
        gate: Linear::of(&layer.gate, file),
        up: layer.up.as_ref().map(|up| Linear::of(up, file)),
        down: Linear::of(&layer.down, file),
        kind: bundle.config().ffn,
        activation: bundle.config().activation,
        input_threshold: 0.0,
        choice,
        hot_count: bundle.plan().layers[index].hot_count,
    }
}

/// Adds `x` to `sum`.
pub(crate) fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

impl LanguageModel for Runtime {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.check(self.position(), tokens)?;
        let mut logits = Vec::with_capacity(tokens.len() * self.config.vocabulary_size);
        let mut sequence = std::mem::take(&mut self.sequence);
        let mut outcome = Ok(());
        for batch in tokens.chunks(PREFILL_BATCH) {
            let hidden = outcome.and_then(|()| self.run(from_mut(&mut sequence), batch));
            let own = hidden.and_then(|hidden| self.head(&hidden));
            outcome = own.map(|own| logits.extend(own));
        }
        self.sequence = sequence;
        outcome.map_err(executor)?;
        Ok(logits)
    }

    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let last = self.last_hidden(tokens)?;
        self.head(&last).map_err(executor)
    }

    fn reset(&mut self) {
        self.sequence.truncate(0);
    }

    fn position(&self) -> usize {
        self.sequence.position()
    }
}
