//! Experts of a long prompt: each is multiplied only with the tokens that select it.

use std::ops::Range;

use powerinfer_kernels::cuda::{
    Buffer, DeviceError, DownAddends, DownScratch, F16Buffer, Ffn, Gpu, NeuronFilter, Routes,
    SplitSums, TokenList, TokenMasks,
};
use powerinfer_tensor::Format;

use crate::{DeviceFfn, launches::activate_batch, state::pieces};

/// Minimum number of tokens for which experts are multiplied one by one. A tile multiplies up to 64 tokens in the same time as a few.
pub(crate) const LEAST_TOKENS: usize = 65;

/// Minimum mean number of neurons of one expert that follow each other. If there are fewer, all neurons are multiplied with all tokens.
const LEAST_ROWS: usize = 16;

/// Consecutive neurons of one block of a mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRows {
    /// The block: an expert, or the shared one.
    pub block: usize,
    /// Neurons of the layer.
    pub rows: Range<usize>,
}

impl ExpertRows {
    /// Splits neurons into runs of one block; `blocks` has the block of each. Returns none if the runs are too short.
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

/// The tokens that select each expert, and buffers for those of one expert.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Input of the FFN, in 16 bits.
    input: F16Buffer,
    /// `[tokens, hidden]`: contributions of the expert.
    out: Buffer<f32>,
    /// Tokens of every block, one list after the other.
    lists: Buffer<u32>,
    /// Start of the list of each block, and the end of the last.
    starts: Vec<usize>,
}

impl Gathered {
    /// Buffers for up to `tokens` tokens, of which every one may select all `blocks`.
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

    /// Bytes of [`new`](Self::new) for inputs of quantised weights.
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

    /// Lists the tokens of every block, whose routing weight is not 0; `weights` is `[tokens, blocks]`.
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

    /// Positions of the tokens of `block` in the lists.
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
    /// `[tokens, hidden]`.
    pub(crate) hidden: &'a mut Buffer<f32>,
}

impl ExpertProducts<'_> {
    /// Adds the contributions of the neurons `part` of the layer, which `ffn` has, to the hidden state, expert by expert.
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
