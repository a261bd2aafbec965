//! A loaded bundle: weights, the policy of every layer, and the threads that compute.

use powerinfer_artifact::plan::{InputThresholds, Policy};
use powerinfer_bundle::{Bundle, StoredLinear, StoredNorm, StoredWeights};
use powerinfer_kernels::Norm;
use powerinfer_model::{Block, ModelConfig};

use crate::{
    Threads,
    ffn::Ffn,
    input::InputBuffers,
    linear::Linear,
    router::{ExpertPlaces, Router},
    selector::{LayerSelectors, Selector},
};

/// Everything that a forward pass reads but does not change.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) bundle: Bundle,
    pub(crate) config: ModelConfig,
    pub(crate) weights: StoredWeights,
    /// Per layer, what the bundle has for its policies.
    pub(crate) selectors: Vec<LayerSelectors>,
    /// Positions of each expert's neurons, per layer; empty in dense models.
    pub(crate) experts: Vec<ExpertPlaces>,
    /// The policy of every layer.
    pub(crate) policies: Vec<Policy>,
    /// Per layer, the magnitudes below which inputs of projections are skipped; none if all are read.
    pub(crate) input_thresholds: Vec<Option<InputThresholds>>,
    pub(crate) threads: Threads,
}

impl Model {
    /// Tokens that fit the context of the plan.
    pub(crate) fn context_limit(&self) -> usize {
        context_limit(&self.bundle)
    }

    /// The FFN of `layer` under its policy.
    pub(crate) fn ffn(&self, layer: usize) -> Ffn<'_> {
        let is_dense = self.policies[layer] == Policy::Dense;
        let thresholds = self.input_thresholds[layer].filter(|_| is_dense);
        Ffn {
            input_threshold: thresholds.and_then(|found| found.ffn).unwrap_or(0.0),
            ..self.ffn_with(layer, self.selector(layer))
        }
    }

    /// The neurons that the policy of `layer` selects.
    pub(crate) fn selector(&self, layer: usize) -> Selector<'_> {
        self.selectors[layer].selector(self.policies[layer], self.bundle.predictors())
    }

    /// The FFN of `layer` with the neurons of `selector`, which reads all inputs.
    pub(crate) fn ffn_with<'a>(&'a self, layer: usize, selector: Selector<'a>) -> Ffn<'a> {
        let stored = &self.weights.layers[layer];
        Ffn {
            gate: self.linear(&stored.gate),
            up: stored.up.as_ref().map(|up| self.linear(up)),
            down: self.linear(&stored.down),
            kind: self.config.ffn,
            activation: self.config.activation,
            input_threshold: 0.0,
            selector,
            router: self.router(layer),
            hot_count: self.bundle.plan().layers[layer].hot_count,
        }
    }

    /// The router of `layer`, in a mixture of experts.
    fn router(&self, layer: usize) -> Option<Router<'_>> {
        let stored = &self.weights.layers[layer];
        Some(Router {
            layer,
            experts: self.config.experts.as_ref()?,
            linear: self.linear(stored.router.as_ref()?),
            shared_gate: stored.shared_gate.as_ref().map(|gate| self.linear(gate)),
            places: &self.experts[layer],
        })
    }

    /// Whether routers read the input of their layer instead of the input of the FFN.
    pub(crate) fn routes_layer_input(&self) -> bool {
        let experts = self.config.experts.as_ref();
        experts.is_some_and(|experts| experts.reads_layer_input)
    }

    /// Whether the predictor of `layer` reads the hidden state before the FFN's norm.
    pub(crate) fn predictor_reads_residual(&self, layer: usize) -> bool {
        self.selectors[layer].reads_residual(self.policies[layer])
    }

    /// A stored projection.
    pub(crate) fn linear<'a>(&'a self, stored: &'a StoredLinear) -> Linear<'a> {
        Linear::new(stored, self.bundle.weights())
    }

    /// Sets `out [tokens, outputs]` to `x · Wᵀ + b` of a stored projection, and returns the bytes read.
    pub(crate) fn project(
        &self,
        stored: &StoredLinear,
        x: &[f32],
        buffers: &mut InputBuffers,
        out: &mut Vec<f32>,
    ) -> usize {
        let linear = self.linear(stored);
        let x = linear.input(&self.threads, x, 0.0, buffers);
        linear.product(&self.threads, &x, 0.0, out)
    }

    /// Returns the norm that follows attention in post-norm blocks and precedes it in others.
    pub(crate) fn attention_norm(&self, layer: usize) -> &StoredNorm {
        let stored = self.weights.layers[layer].attention_norm.as_ref();
        stored.expect("blocks with a norm before or after attention store it")
    }

    /// Normalises each vector of `x` in place.
    pub(crate) fn norm(&self, norm: &StoredNorm, x: &mut [f32]) {
        let norm = Norm {
            kind: self.config.norm,
            epsilon: self.config.norm_epsilon,
            weight: &norm.weight,
            bias: norm.bias.as_deref(),
        };
        self.threads.isa().normalise(norm, x);
    }

    /// Sets `out` to the normalised vectors of `x`.
    pub(crate) fn norm_of(&self, norm: &StoredNorm, x: &[f32], out: &mut Vec<f32>) {
        x.clone_into(out);
        self.norm(norm, out);
    }

    /// Sets `input` to the FFN's input in `layer`, which reads the hidden states `x`.
    pub(crate) fn ffn_norm(&self, layer: usize, x: &[f32], input: &mut Vec<f32>) {
        let stored = &self.weights.layers[layer];
        let norm = match self.config.block {
            Block::PreNorm | Block::Parallel | Block::Sandwich => stored.ffn_norm.as_ref(),
            Block::ParallelSharedNorm => stored.attention_norm.as_ref(),
            Block::PostNorm | Block::OutputNorm => None,
        };
        match norm {
            Some(norm) => self.norm_of(norm, x, input),
            None => x.clone_into(input),
        }
    }
}

/// Tokens that fit the context of the plan of `bundle`.
pub(crate) fn context_limit(bundle: &Bundle) -> usize {
    let planned = bundle.plan().budget.context_tokens;
    let planned = usize::try_from(planned).unwrap_or(usize::MAX);
    bundle.config().context_length.min(planned)
}
