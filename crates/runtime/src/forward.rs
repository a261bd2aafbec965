//! The forward pass: one page, one comment per step.

use std::sync::Arc;

use powerinfer_artifact::{
    plan::Policy,
    predictor_file::{PredictorFile, PredictorInput, StoredPredictor},
};
use powerinfer_bundle::{Bundle, StoredLayer, StoredLinear, StoredNorm, StoredWeights};
use powerinfer_model::{Block, LanguageModel, ModelConfig, ModelError, Positions};

use crate::{
    PolicyChoice, RuntimeError, Statistics, Threads, Verification,
    attention::{LayerCache, Reach, attend},
    ffn::{Ffn, Linear, Predictor, Scratch},
    norm::norm_all,
    rotary::rotate,
};

/// Tokens of a prompt that go through a layer together.
const PREFILL_BATCH: usize = 64;

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
    bundle: Bundle,
    config: ModelConfig,
    weights: Arc<StoredWeights>,
    predictors: Vec<Option<LayerPredictor>>,
    policies: Vec<Policy>,
    threads: Threads,
    cache: Vec<LayerCache>,
    position: usize,
    statistics: Statistics,
    scratch: Scratch,
    verification: Option<Verification>,
}

/// Where a predictor's matrices lie, and its small parts.
#[derive(Debug)]
struct LayerPredictor {
    stored: StoredPredictor,
    bias: Vec<f32>,
    threshold: f32,
    input: PredictorInput,
}

impl LayerPredictor {
    /// The predictor of `layer`, if `file` has one.
    fn find(
        file: &PredictorFile,
        layer: usize,
        config: &ModelConfig,
    ) -> Result<Option<Self>, RuntimeError> {
        let Some(stored) = file.find(layer, config.hidden_size, config.ffn_size)? else {
            return Ok(None);
        };
        let bias_view = stored.bias.view(file.tensors());
        let mut bias = vec![0.0; config.ffn_size];
        bias.iter_mut()
            .enumerate()
            .for_each(|(row, bias)| bias_view.dequantise_row(row, std::slice::from_mut(bias)));
        Ok(Some(Self {
            stored,
            bias,
            threshold: file.layers()[layer].threshold,
            input: file.input(),
        }))
    }
}

impl Runtime {
    /// Prepares `bundle` for running; nothing is converted or copied.
    pub fn new(bundle: Bundle, options: Options) -> Result<Self, RuntimeError> {
        let config = bundle.config().clone();
        let weights = StoredWeights::find(bundle.weights(), &config, bundle.quant())?;
        let mut predictors = Vec::new();
        for layer in 0..config.layer_count {
            predictors.push(match bundle.predictors() {
                Some(file) => LayerPredictor::find(file, layer, &config)?,
                None => None,
            });
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
        let unpredicted = |(policy, predictor): (&Policy, &Option<LayerPredictor>)| {
            *policy == Policy::Predicted && predictor.is_none()
        };
        if let Some(layer) = policies.iter().zip(&predictors).position(unpredicted) {
            return Err(RuntimeError::NoPredictor {
                folder: bundle.folder().to_owned(),
                layer,
            });
        }
        Ok(Self {
            cache: (0..config.layer_count)
                .map(|_| LayerCache::new(config.kv_head_count))
                .collect(),
            threads: options.threads,
            position: 0,
            statistics: Statistics::default(),
            scratch: Scratch::default(),
            verification: None,
            bundle,
            weights: Arc::new(weights),
            predictors,
            policies,
            config,
        })
    }

    /// The bundle that runs.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The policy of every layer.
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// What was read and computed since the last call.
    pub fn take_statistics(&mut self) -> Statistics {
        std::mem::take(&mut self.statistics)
    }

    /// From now on computes the FFNs of one in `every` decoded tokens exactly as well, to tell how
    /// far the policy's are off; what goes on is the policy's.
    pub fn verify_every(&mut self, every: usize) {
        self.verification = Some(Verification::new(every, self.config.layer_count));
    }

    /// What verification has found so far.
    pub fn verification(&self) -> Option<&Verification> {
        self.verification.as_ref()
    }

    /// Tokens that fit the context that the plan made room for.
    pub fn context_limit(&self) -> usize {
        self.config
            .context_length
            .min(self.bundle.plan().budget.context_tokens as usize)
    }

    /// Runs `tokens`, one batch; returns the hidden states after the last layer, `[tokens, hidden]`.
    fn layers(&mut self, tokens: &[u32]) -> Vec<f32> {
        let weights = Arc::clone(&self.weights);
        let mut hidden = self.embed(&weights, tokens);
        for (index, layer) in weights.layers.iter().enumerate() {
            // Attention sees the hidden state through a norm, or as it is where norms come after.
            let mut input = hidden.clone();
            if self.config.block != Block::PostNorm {
                self.norm(&layer.attention_norm, &mut input);
            }
            let attended = self.attention(index, layer, &input);

            // The FFN runs after attention was added, or beside it on the same hidden state.
            let residual = match self.config.block {
                Block::Parallel | Block::ParallelSharedNorm => {
                    let residual = hidden.clone();
                    add(&mut hidden, &attended);
                    residual
                }
                Block::PreNorm => {
                    add(&mut hidden, &attended);
                    hidden.clone()
                }
                Block::PostNorm => {
                    add(&mut hidden, &attended);
                    self.norm(&layer.attention_norm, &mut hidden);
                    hidden.clone()
                }
            };
            if self.config.block != Block::ParallelSharedNorm {
                input.clone_from(&residual);
            }
            if let (Block::PreNorm | Block::Parallel, Some(norm)) =
                (self.config.block, &layer.ffn_norm)
            {
                self.norm(norm, &mut input);
            }

            // It computes whatever neurons the policy asks for.
            self.ffn(index, layer, &residual, &input, &mut hidden);
            if let (Block::PostNorm, Some(norm)) = (self.config.block, &layer.ffn_norm) {
                self.norm(norm, &mut hidden);
            }
        }
        self.position += tokens.len();
        self.statistics.tokens += tokens.len() as u64;
        hidden
    }

    /// Each token's row of the embedding, with its position where positions are learned.
    fn embed(&mut self, weights: &StoredWeights, tokens: &[u32]) -> Vec<f32> {
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
            Some(project) => self.linear(project, &embedded),
        };
        if let (Some(table), Positions::Learned { offset }) =
            (&weights.positions, &self.config.positions)
        {
            let table = table.view(self.bundle.weights());
            let mut row = vec![0.0; self.config.hidden_size];
            for (index, hidden) in hidden.chunks_exact_mut(row.len()).enumerate() {
                table.dequantise_row(self.position + index + offset, &mut row);
                add(hidden, &row);
            }
            read += count * table.row_bytes();
        }
        self.statistics.bytes_read += read as u64;
        hidden
    }

    /// What attention adds for the tokens whose inputs are `x [tokens, hidden]`.
    fn attention(&mut self, index: usize, layer: &StoredLayer, x: &[f32]) -> Vec<f32> {
        // Query, key and value of all tokens at once.
        let mut query = self.linear(&layer.query, x);
        let mut key = self.linear(&layer.key, x);
        let value = self.linear(&layer.value, x);
        if let Some([query_norm, key_norm]) = &layer.head_norms {
            self.norm(query_norm, &mut query);
            self.norm(key_norm, &mut key);
        }
        let count = x.len() / self.config.hidden_size;
        let (queries, keys) = (query.len() / count, key.len() / count);
        let reach = Reach {
            window: self.config.attention_windows[index],
            slopes: match &self.config.positions {
                Positions::Alibi { slopes } => Some(slopes),
                _ => None,
            },
        };
        // Each token sees itself and what came before it.
        let cache = &mut self.cache[index];
        let mut mixed = vec![0.0; query.len()];
        let (mut scores, mut read) = (Vec::new(), 0);
        for token in 0..count {
            let query = &mut query[token * queries..][..queries];
            let key = &mut key[token * keys..][..keys];
            if let Positions::Rotary(rotary) = &self.config.positions {
                for heads in [&mut *query, &mut *key] {
                    rotate(rotary, heads, self.config.head_size, self.position + token);
                }
            }
            cache.push(key, &value[token * keys..][..keys]);
            read += attend(
                self.threads.isa(),
                &self.config,
                &reach,
                cache,
                query,
                &mut scores,
                &mut mixed[token * queries..][..queries],
            );
        }
        self.statistics.bytes_read += read as u64;
        self.linear(&layer.output, &mixed)
    }

    /// Adds the FFN's output for `x [tokens, hidden]`, which is `residual` normed, to `hidden`.
    fn ffn(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        residual: &[f32],
        x: &[f32],
        hidden: &mut [f32],
    ) {
        let file = self.bundle.weights();
        let predictor = self.predictors[index]
            .as_ref()
            .zip(self.bundle.predictors())
            .map(|(predictor, file)| Predictor {
                a: predictor.stored.a.view(file.tensors()),
                b: predictor.stored.b.view(file.tensors()),
                bias: &predictor.bias,
                threshold: predictor.threshold,
            });
        let mut ffn = Ffn {
            gate: Linear::of(&layer.gate, file),
            up: layer.up.as_ref().map(|up| Linear::of(up, file)),
            down: Linear::of(&layer.down, file),
            kind: self.config.ffn,
            activation: self.config.activation,
            policy: self.policies[index],
            predictor,
            hot_count: self.bundle.plan().layers[index].hot_count,
        };
        let foreseen_from = match self.predictors[index].as_ref().map(|found| found.input) {
            Some(PredictorInput::Residual) => residual,
            Some(PredictorInput::Normed) | None => x,
        };
        let is_decoding = x.len() == self.config.hidden_size;
        let verification = self.verification.as_mut();
        let verification = verification.filter(|found| is_decoding && found.takes(self.position));
        let before = verification.is_some().then(|| hidden.to_vec());
        ffn.run_batch(
            &self.threads,
            x,
            foreseen_from,
            hidden,
            &mut self.scratch,
            &mut self.statistics,
        );
        if let (Some(verification), Some(before)) = (verification, before) {
            // Dense is exact for every activation.
            ffn.policy = Policy::Dense;
            let mut exact = before.clone();
            let mut uncounted = Statistics::default();
            ffn.run_batch(
                &self.threads,
                x,
                foreseen_from,
                &mut exact,
                &mut self.scratch,
                &mut uncounted,
            );
            verification.observe(index, &before, hidden, &exact);
        }
    }

    /// `x · Wᵀ + b` for `x [tokens, columns]`.
    fn linear(&mut self, stored: &StoredLinear, x: &[f32]) -> Vec<f32> {
        let matrix = stored.matrix.view(self.bundle.weights());
        let count = x.len() / matrix.columns();
        let mut out = vec![0.0; count * matrix.rows()];
        self.threads.gemm(&matrix, x, count, &mut out);
        if let Some(bias) = &stored.bias {
            out.chunks_exact_mut(bias.len())
                .for_each(|out| add(out, bias));
        }
        self.statistics.bytes_read += stored.bytes() as u64;
        out
    }

    fn norm(&self, norm: &StoredNorm, x: &mut [f32]) {
        norm_all(self.config.norm, self.config.norm_epsilon, norm, x);
    }

    /// Logits of the hidden states of some tokens, `[tokens, vocabulary]`.
    fn head(&mut self, hidden: &[f32]) -> Vec<f32> {
        let weights = Arc::clone(&self.weights);
        let mut x = hidden.to_vec();
        if let Some(norm) = &weights.final_norm {
            self.norm(norm, &mut x);
        }
        if let Some(project) = &weights.project_out {
            x = self.linear(project, &x);
        }
        self.linear(&weights.head, &x)
    }

    /// Refuses tokens outside the vocabulary and beyond the context.
    fn check(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocabulary = self.config.vocabulary_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(ModelError::TokenOutside {
                token: *token,
                vocabulary,
            });
        }
        let (asked, limit) = (self.position + tokens.len(), self.context_limit());
        if asked > limit {
            return Err(ModelError::ContextFull { asked, limit });
        }
        Ok(())
    }
}

/// Adds `x` to `sum`.
fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

impl LanguageModel for Runtime {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.check(tokens)?;
        let mut logits = Vec::with_capacity(tokens.len() * self.config.vocabulary_size);
        for batch in tokens.chunks(PREFILL_BATCH) {
            let hidden = self.layers(batch);
            logits.extend(self.head(&hidden));
        }
        Ok(logits)
    }

    fn forward_last(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.check(tokens)?;
        let mut last = Vec::new();
        for batch in tokens.chunks(PREFILL_BATCH) {
            let hidden = self.layers(batch);
            last = hidden[hidden.len() - self.config.hidden_size..].to_vec();
        }
        Ok(self.head(&last))
    }

    fn reset(&mut self) {
        self.cache.iter_mut().for_each(LayerCache::clear);
        self.position = 0;
    }

    fn position(&self) -> usize {
        self.position
    }
}
