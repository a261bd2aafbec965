//! Mixtures of experts: routing, and long prompts, in which each expert is multiplied only with the tokens that select it.

use std::ops::Range;

use powerinfer_kernels::cuda::{
    Buffer, DeviceError, DownAddends, DownScratch, F16Buffer, Ffn, Gpu, NeuronFilter,
    PredictedMask, Routes, SplitSums, TokenList, TokenMasks,
};
use powerinfer_tensor::Format;

use crate::{
    DeviceFfn, DeviceLayer, DeviceModel, FfnInput,
    launches::activate_batch,
    state::{State, pieces},
};

/// Minimum number of tokens for which experts are multiplied one by one. A tile takes as long for 64 tokens as for a few.
pub(crate) const LEAST_TOKENS: usize = 65;

/// Minimum mean length of the runs of consecutive neurons of one expert. If runs are shorter, all neurons are multiplied with all tokens.
const LEAST_ROWS: usize = 16;

/// Consecutive neurons of one block of a mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRows {
    /// The block: an expert, or the shared one.
    pub block: usize,
    /// Range of neurons in the layer.
    pub rows: Range<usize>,
}

impl ExpertRows {
    /// Splits neurons into runs of one block each; `blocks` has the block of each neuron. Returns an empty list if the runs are too short
    /// on average.
    pub fn runs(blocks: &[u16]) -> Vec<Self> {
        let mut runs = Vec::new();
        let mut start = 0;
        for run in blocks.chunk_by(|block, next| block == next) {
            runs.push(Self {
                block: run[0].into(),
                rows: start..start + run.len(),
            });
            start += run.len();
        }
        if runs.len() * LEAST_ROWS > blocks.len() {
            runs.clear();
        }
        runs
    }
}

/// Lists of the tokens that select each expert, and buffers for the tokens of one expert.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// FFN input of one expert's tokens, in 16 bits.
    input: F16Buffer,
    /// `[tokens, hidden]`: contributions of one expert.
    out: Buffer<f32>,
    /// Tokens of every block, one list after the other.
    lists: Buffer<u32>,
    /// Start of each block's list in `lists`, then the end of the last list.
    starts: Vec<usize>,
}

impl Gathered {
    /// Allocates buffers for up to `tokens` tokens, each of which may select all `blocks`.
    pub(crate) fn new(
        gpu: &Gpu,
        (tokens, hidden): (usize, usize),
        format: Format,
        blocks: usize,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            input: gpu.new_f16_buffer(tokens, hidden, format)?,
            out: Buffer::new(gpu.device(), tokens * hidden)?,
            lists: Buffer::new(gpu.device(), tokens * blocks)?,
            starts: Vec::new(),
        })
    }

    /// Maximum bytes of the buffers of [`new`](Self::new).
    pub(crate) fn max_bytes(
        (tokens, hidden): (usize, usize),
        format: Format,
        blocks: usize,
    ) -> usize {
        F16Buffer::max_bytes(tokens, hidden, format) + tokens * (hidden + blocks) * 4
    }

    /// Size in bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.input.bytes() + self.out.bytes() + self.lists.bytes()
    }

    /// Lists, for every block, the tokens whose routing weight for it is not 0; `weights` is `[tokens, blocks]`.
    pub(crate) fn list(&mut self, weights: &[f32], blocks: usize) -> Result<(), DeviceError> {
        let mut lists = Vec::new();
        self.starts.clear();
        for block in 0..blocks {
            self.starts.push(lists.len());
            let of_block = weights.iter().skip(block).step_by(blocks);
            let selected = (0..).zip(of_block).filter(|(_, weight)| **weight != 0.0);
            lists.extend(selected.map(|(token, _): (u32, _)| token));
        }
        self.starts.push(lists.len());
        self.lists.set_len(lists.len());
        self.lists.write(&lists)
    }

    /// Range of `lists` that has the tokens of `block`.
    fn of(&self, block: usize) -> Range<usize> {
        self.starts[block]..self.starts[block + 1]
    }
}

/// Operands and buffers for the experts of a layer.
pub(crate) struct ExpertProducts<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) layer: &'a DeviceFfn,
    /// Number of neurons of the layer.
    pub(crate) neurons: usize,
    pub(crate) routes: &'a Routes,
    pub(crate) mask: &'a Buffer<u32>,
    /// Input of the FFN for all tokens, in 16 bits.
    pub(crate) input: &'a F16Buffer,
    pub(crate) sums: &'a SplitSums,
    pub(crate) gathered: &'a mut Gathered,
    /// Products of gate and up, and the factors of the rows of down.
    pub(crate) products: (&'a mut Buffer<f32>, &'a mut Buffer<f32>, &'a mut F16Buffer),
    /// Maximum number of neurons that are multiplied at a time.
    pub(crate) most_neurons: usize,
    pub(crate) down: &'a mut DownScratch,
    /// `[tokens, hidden]`: hidden state, to which the contributions are added.
    pub(crate) hidden: &'a mut Buffer<f32>,
}

impl<'a> ExpertProducts<'a> {
    /// Collects the operands for the experts of `layer` in the current prompt.
    pub(crate) fn new(gpu: &'a Gpu, layer: &'a DeviceLayer, state: &'a mut State) -> Self {
        let prompt = state.prompt.as_mut().expect("a prompt runs");
        Self {
            gpu,
            layer: layer.ffn.as_ref().expect("neurons are on the device"),
            neurons: layer.neurons,
            routes: &state.routes,
            mask: &state.mask,
            input: &prompt.input,
            sums: &prompt.sums,
            gathered: prompt.gathered.as_mut().expect("buffers for experts"),
            products: (&mut state.products, &mut prompt.up, &mut prompt.products),
            most_neurons: prompt.most_neurons,
            down: &mut state.down,
            hidden: &mut state.hidden,
        }
    }

    /// Adds the contributions of the layer's neurons `part`, stored in `ffn`, to the hidden state, expert by expert.
    pub(crate) fn add(
        &mut self,
        ffn: &Ffn,
        part: &Range<usize>,
        filter: NeuronFilter<'_>,
    ) -> Result<(), DeviceError> {
        let (gpu, tokens, columns) = (self.gpu, self.input.tokens(), ffn.down.columns());
        let routing = self.layer.routing(self.routes, part.start);
        for run in &self.layer.experts {
            let rows = run.rows.start.max(part.start)..run.rows.end.min(part.end);
            let positions = self.gathered.of(run.block);
            if rows.is_empty() || positions.is_empty() {
                continue;
            }
            let count = positions.len();
            let Gathered {
                input, out, lists, ..
            } = &mut *self.gathered;
            let list = TokenList {
                lists,
                start: positions.start,
                count,
            };
            let list = (count < tokens).then_some(list);
            let (x, out) = match list {
                None => (self.input, &mut *self.hidden),
                Some(list) => {
                    gpu.gather_tokens(self.input, list, input)?;
                    out.set_len(count * columns);
                    out.clear()?;
                    (&*input, out)
                }
            };
            for piece in pieces(rows.len(), self.most_neurons) {
                let first = rows.start - part.start;
                let piece = first + piece.start..first + piece.end;
                let masks = TokenMasks {
                    mask: self.mask,
                    neurons: self.neurons,
                    first: part.start,
                    tokens: list,
                };
                let (gate, up, products) = &mut self.products;
                activate_batch(
                    gpu,
                    (ffn, &piece),
                    (filter, routing),
                    Some(masks),
                    (x, self.sums),
                    (gate, up, products),
                    self.down,
                )?;
                let (down, addends) = (&ffn.down, DownAddends::default());
                gpu.gemm_down(products, down, &piece, self.sums, addends, out)?;
            }
            if count < tokens {
                let Gathered { out, lists, .. } = &*self.gathered;
                let list = TokenList {
                    lists,
                    start: positions.start,
                    count,
                };
                gpu.scatter_tokens(out, list, self.hidden)?;
            }
        }
        Ok(())
    }
}

/// Routing in a mixture of experts.
///
/// # Errors
///
/// All methods that return a result fail if the device fails.
///
/// # Panics
///
/// [`route`](Self::route) panics if the layer does not exist.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// In a mixture of experts, selects the experts of each token in layer `index` and limits the predicted neurons to theirs. If
    /// `for_host`, the mask and the routing weights are also written to host memory.
    pub fn route(
        &mut self,
        index: usize,
        reads: FfnInput,
        for_host: bool,
    ) -> Result<(), DeviceError> {
        let ffn = self.layers[index].ffn.as_ref();
        let Some((found, router)) = ffn.and_then(|ffn| Some((ffn, ffn.router.as_ref()?))) else {
            return Ok(());
        };
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let by_expert = self.multiplies_by_expert(index);
        let state = &mut self.state;
        let x = match reads {
            FfnInput::Hidden => &state.hidden,
            FfnInput::Residual => &state.residual,
        };
        let (norm, routes) = (found.norm.as_ref(), &mut state.routes);
        let logits = &mut [(&router.linear, &mut routes.logits)];
        self.gpu.project(x, norm, logits, false)?;
        if let Some(gate) = &router.shared_gate {
            let logits = &mut [(gate, &mut routes.shared_logits)];
            self.gpu.project(x, norm, logits, false)?;
        }
        let mut mask = PredictedMask {
            mask: &mut state.mask,
            host_mask: for_host.then_some(&state.predicted),
            activations: &mut state.products,
            hot_count: match state.prompt {
                None => found.ffn.gate.matrix.rows(),
                Some(_) => 0,
            },
        };
        let is_predicted = found.selector.predicts();
        self.gpu.route(
            router,
            routes,
            for_host || by_expert,
            &mut mask,
            is_predicted,
        )?;
        if by_expert {
            // The host must know how many tokens select each expert before it launches the products.
            self.gpu.device().synchronise()?;
            let blocks = router.block_count;
            let weights = self.routing_weights();
            let prompt = self.state.prompt.as_mut();
            let gathered = prompt.and_then(|prompt| prompt.gathered.as_mut());
            gathered
                .expect("buffers for experts")
                .list(&weights, blocks)?;
        }
        Ok(())
    }

    /// Whether the current pass multiplies the experts of layer `index` one by one, each only with the tokens that select it.
    pub(crate) fn multiplies_by_expert(&self, index: usize) -> bool {
        let has_runs = |ffn: &DeviceFfn| !ffn.experts.is_empty();
        let prompt = self.state.prompt.as_ref();
        self.layers[index].ffn.as_ref().is_some_and(has_runs)
            && self.tokens >= LEAST_TOKENS
            && prompt.is_some_and(|prompt| prompt.gathered.is_some())
    }

    /// Routing weights `[tokens, blocks]` in a mixture of experts; written before the FFN's input.
    pub fn routing_weights(&self) -> Vec<f32> {
        let mut weights = vec![0.0; self.state.routes.weights.len()];
        self.state.routes.host.read_f32(&mut weights);
        weights
    }
}
