//! The forward pass: one page, one comment per step.

use powerinfer_artifact::{
    matrix_planes::StoredMatrix,
    plan::Policy,
    predictor_file::{PredictorFile, StoredPredictor},
};
use powerinfer_bundle::{Bundle, StoredWeights};
use powerinfer_model::{LanguageModel, ModelConfig, ModelError};

use crate::{
    PolicyChoice, RuntimeError, Statistics, Threads,
    attention::{LayerCache, attend},
    ffn::{Ffn, Predictor, Scratch},
    norm::rms_norm,
    rotary::Rotary,
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
    weights: StoredWeights,
    predictors: Vec<Option<LayerPredictor>>,
    policies: Vec<Policy>,
    threads: Threads,
    rotary: Rotary,
    cache: Vec<LayerCache>,
    position: usize,
    statistics: Statistics,
    scratch: Scratch,
}

/// Where a predictor's matrices lie, and its small parts.
#[derive(Debug)]
struct LayerPredictor {
    stored: StoredPredictor,
    bias: Vec<f32>,
    threshold: f32,
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
            rotary: Rotary::new(&config),
            threads: options.threads,
            position: 0,
            statistics: Statistics::default(),
            scratch: Scratch::default(),
            bundle,
            weights,
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

    /// Tokens that fit the context that the plan made room for.
    pub fn context_limit(&self) -> usize {
        self.config
            .context_length
            .min(self.bundle.plan().budget.context_tokens as usize)
    }

    /// Runs `tokens`, one batch; returns the hidden states after the last layer, `[tokens, hidden]`.
    fn layers(&mut self, tokens: &[u32]) -> Vec<f32> {
        let file = self.bundle.weights();
        let count = tokens.len();
        let ModelConfig {
            hidden_size,
            norm_epsilon,
            head_size,
            ..
        } = self.config;
        let (queries, keys) = (
            self.config.head_count * head_size,
            self.config.kv_head_count * head_size,
        );
        let mut read = 0;
        let view = |stored: &StoredMatrix| stored.view(file);

        // Each token starts as its row of the embedding.
        let embedding = view(&self.weights.embedding);
        let mut hidden = vec![0.0; count * hidden_size];
        for (token, hidden) in tokens.iter().zip(hidden.chunks_exact_mut(hidden_size)) {
            embedding.dequantise_row(*token as usize, hidden);
            read += embedding.row_bytes();
        }

        let mut normed = vec![0.0; count * hidden_size];
        let (mut query, mut mixed) = (vec![0.0; count * queries], vec![0.0; count * queries]);
        let (mut key, mut value) = (vec![0.0; count * keys], vec![0.0; count * keys]);
        let mut added = vec![0.0; count * hidden_size];
        let mut scores = Vec::new();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            // Attention: norm, query, key and value of all tokens at once.
            norm_all(&hidden, &layer.attention_norm, norm_epsilon, &mut normed);
            for (stored, out) in [
                (&layer.query, &mut query),
                (&layer.key, &mut key),
                (&layer.value, &mut value),
            ] {
                self.threads.gemm(&view(stored), &normed, count, out);
                read += stored.bytes();
            }
            // Positions enter by rotation; each token sees itself and what came before it.
            let cache = &mut self.cache[index];
            for token in 0..count {
                let position = self.position + token;
                let (query, key) = (
                    &mut query[token * queries..][..queries],
                    &mut key[token * keys..][..keys],
                );
                self.rotary.rotate(query, position);
                self.rotary.rotate(key, position);
                cache.push(key, &value[token * keys..][..keys]);
                let mixed = &mut mixed[token * queries..][..queries];
                attend(
                    self.threads.isa(),
                    &self.config,
                    cache,
                    query,
                    &mut scores,
                    mixed,
                );
                read += cache.bytes();
            }
            self.threads
                .gemm(&view(&layer.output), &mixed, count, &mut added);
            read += layer.output.bytes();
            hidden
                .iter_mut()
                .zip(&added)
                .for_each(|(hidden, added)| *hidden += added);

            // FFN: norm, then whatever neurons the policy asks for.
            norm_all(&hidden, &layer.ffn_norm, norm_epsilon, &mut normed);
            let predictor = self.predictors[index]
                .as_ref()
                .zip(self.bundle.predictors())
                .map(|(predictor, file)| Predictor {
                    a: predictor.stored.a.view(file.tensors()),
                    b: predictor.stored.b.view(file.tensors()),
                    bias: &predictor.bias,
                    threshold: predictor.threshold,
                });
            let ffn = Ffn {
                gate: view(&layer.gate),
                up: view(&layer.up),
                down: view(&layer.down),
                activation: self.config.activation,
                policy: self.policies[index],
                predictor,
                hot_count: self.bundle.plan().layers[index].hot_count,
            };
            ffn.run_batch(
                &self.threads,
                &normed,
                &mut hidden,
                &mut self.scratch,
                &mut self.statistics,
            );
        }
        self.position += count;
        self.statistics.tokens += count as u64;
        self.statistics.bytes_read += read as u64;
        hidden
    }

    /// Logits of the hidden states of some tokens, `[tokens, vocabulary]`.
    fn head(&mut self, hidden: &[f32]) -> Vec<f32> {
        let head = self.weights.head.view(self.bundle.weights());
        let count = hidden.len() / self.config.hidden_size;
        let mut normed = vec![0.0; hidden.len()];
        norm_all(
            hidden,
            &self.weights.final_norm,
            self.config.norm_epsilon,
            &mut normed,
        );
        let mut logits = vec![0.0; count * head.rows()];
        self.threads.gemm(&head, &normed, count, &mut logits);
        self.statistics.bytes_read += self.weights.head.bytes() as u64;
        logits
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

/// Normalises each token's hidden state.
fn norm_all(hidden: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    for (x, out) in hidden
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
        rms_norm(x, weight, epsilon, out);
    }
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
