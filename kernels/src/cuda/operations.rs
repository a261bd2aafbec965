//! The operations of a token on a device: what is launched, with which arguments, on how many blocks.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{
    Buffer, Device, DeviceError, GpuCache, GpuLinear, GpuMatrix, GpuNorm, HostBuffer, Launch,
    arguments,
};
use crate::Arithmetic;
use powerinfer_tensor::{BLOCK, CacheFormat, Format};

/// Threads of a block, where a kernel says nothing else.
pub(super) const THREADS: usize = 256;
pub(super) const WARP: usize = 32;
/// Neurons of a word of a mask.
pub(super) const WORD: usize = 32;
/// Threads of a block of attention, and positions it looks at together.
const ATTENTION_THREADS: usize = 128;
const TILE: usize = WARP;
/// Of the kernel `down`: threads of a row, rows at once, rows that are listed.
const ROW_THREADS: usize = 16;
const ROW_GROUPS: usize = THREADS / ROW_THREADS;
const LISTED: usize = 2 * THREADS;
/// Blocks per multiprocessor that read rows.
const ROW_BLOCKS: usize = 4;

/// A device and the kernels on it.
#[derive(Debug, Clone)]
pub struct Gpu {
    device: Arc<dyn Device>,
    pub(super) arithmetic: Arithmetic,
}

/// Norms of a head's queries and keys.
#[derive(Debug)]
pub struct HeadNorms {
    /// Of queries.
    pub query: GpuNorm,
    /// Of keys.
    pub key: GpuNorm,
}

/// Attention of one layer, of a token or of some that follow each other.
#[derive(Debug)]
pub struct Attention<'a> {
    /// How many they are.
    pub tokens: usize,
    /// `[tokens, heads, head_size]`.
    pub query: &'a Buffer<f32>,
    /// `[tokens, kv_heads, head_size]`.
    pub key: &'a Buffer<f32>,
    /// `[tokens, kv_heads, head_size]`.
    pub value: &'a Buffer<f32>,
    /// Where heads are normed.
    pub norms: Option<&'a HeadNorms>,
    /// `[tokens, pairs]`, sine and cosine of each pair that is rotated; empty where none is.
    pub sin_cos: &'a Buffer<[f32; 2]>,
    /// ALiBi's slopes, one a head.
    pub alibi_slopes: Option<&'a Buffer<f32>>,
    /// Positions a token sees, itself among them; none means all.
    pub window: Option<usize>,
    /// The first token's.
    pub position: &'a Buffer<u32>,
}

/// A layer's predictor on a device: `B · relu(A · x) + b`, with B by its units.
#[derive(Debug)]
pub struct Predictor {
    /// `[rank, hidden]`.
    pub a: GpuLinear,
    /// `[rank, neurons]`.
    pub b_transposed: GpuMatrix,
    /// Per 32 units, what they are multiplied by for each neuron.
    pub b_scales: Option<Buffer<f32>>,
    /// `[neurons]`.
    pub bias: Buffer<f32>,
    /// The least logit of a neuron that is predicted.
    pub threshold: f32,
}

/// Signs of a layer's gate on a device.
#[derive(Debug)]
pub struct SignBits {
    /// `[neurons, ⌈hidden / 64⌉]` words, as [`pack_signs`](powerinfer_tensor::pack_signs) makes them.
    pub signs: Buffer<u64>,
    /// Neurons.
    pub neurons: usize,
    /// Numbers of an input.
    pub columns: usize,
    /// Signs that agree for a neuron to be predicted.
    pub min_agreements: u32,
}

/// Who is predicted of each token: 32 neurons a word.
#[derive(Debug)]
pub struct PredictedMask<'a> {
    /// For the device, `[tokens, ⌈neurons / 32⌉]` words.
    pub mask: &'a mut Buffer<u32>,
    /// The same for the host, where it has neurons of the layer.
    pub host_mask: Option<&'a HostBuffer>,
    /// What rows of down are multiplied by, of one token; 0 for those who are not predicted.
    pub activations: &'a mut Buffer<f32>,
    /// Neurons on the device, from the first on; 0 where there are several tokens.
    pub hot_count: usize,
}

/// How an FFN's two products are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuFfnKind {
    /// Without up.
    Plain,
    /// `act(gate) · up`.
    Gated,
    /// `act(gate) · act(up)`.
    DoublyGated,
}

/// An activation function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GpuActivation {
    /// `max(0, x)`.
    Relu,
    /// `max(0, x)²`.
    SquaredRelu,
    /// `x` from the threshold on, else 0.
    FatRelu(f32),
    /// `x / (1 + e^−x)`.
    Silu,
    /// `x·Φ(x)`.
    GeluErf,
    /// The same by its hyperbolic tangent.
    GeluTanh,
}

impl GpuActivation {
    /// Its number in the sources, and its threshold.
    fn argument(self) -> (i32, f32) {
        match self {
            Self::Relu => (0, 0.0),
            Self::SquaredRelu => (1, 0.0),
            Self::FatRelu(threshold) => (2, threshold),
            Self::Silu => (3, 0.0),
            Self::GeluErf => (4, 0.0),
            Self::GeluTanh => (5, 0.0),
        }
    }
}

/// Which neurons of those looked at are computed.
#[derive(Debug, Clone, Copy)]
pub enum NeuronFilter<'a> {
    /// All.
    All,
    /// Those whose gate is not exactly zero.
    NonZeroGate,
    /// Those whose gate is so large.
    GateThreshold(f32),
    /// Those whose gate times a number of each is.
    ScaledGateThreshold(f32, &'a Buffer<f32>),
    /// Those whose product, the centre taken off where there is one, times a number of each is.
    ContributionThreshold {
        /// The least that counts.
        threshold: f32,
        /// One a neuron.
        scale: &'a Buffer<f32>,
        /// One a neuron.
        centre: Option<&'a Buffer<f32>>,
    },
}

/// Gate, up and down of a layer's hot neurons.
#[derive(Debug)]
pub struct Ffn {
    /// `[hot, hidden]`.
    pub gate: GpuLinear,
    /// The same, where there is one.
    pub up: Option<GpuLinear>,
    /// `[hot, hidden]`: a row is what a neuron adds.
    pub down: GpuMatrix,
    /// Added once.
    pub bias: Option<Buffer<f32>>,
    /// How products are put together.
    pub kind: GpuFfnKind,
    /// The activation function.
    pub activation: GpuActivation,
}

/// Where the host reads what it needs of a layer.
#[derive(Debug, Clone, Copy)]
pub struct HostMirror<'a> {
    /// The normed input of the FFN.
    pub input: &'a HostBuffer,
    /// Words of which each says up to which step a layer's input and mask are there.
    pub flags: &'a HostBuffer,
    /// The layer's.
    pub flag: usize,
    /// The number of the step.
    pub step: &'a Buffer<u32>,
}

/// What the host's neurons add.
#[derive(Debug, Clone, Copy)]
pub struct ColdSum<'a> {
    /// `[hidden]`.
    pub sum: &'a HostBuffer,
    /// Words of which each says up to which step a layer's sum is there; none where it is there already.
    pub flag: Option<(&'a HostBuffer, usize)>,
    /// The number of the step.
    pub step: &'a Buffer<u32>,
    /// Gets the number of a step for whose sum a block has waited for too long.
    pub timed_out: &'a HostBuffer,
    /// Nanoseconds that are too long.
    pub timeout_nanoseconds: u64,
}

/// What sums of rows need on their way, to be used again.
#[derive(Debug)]
pub struct DownScratch {
    partial: Buffer<f32>,
    /// One a tile of columns, all 0 between launches.
    counters: Buffer<u32>,
    /// How many neurons were added, and how many were looked at.
    counted: Buffer<u32>,
}

/// How many neurons of a layer, or of several, were worked on, each modulo 2³².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NeuronCounts {
    /// Those whose rows of down were added.
    pub down_rows: u32,
    /// Those whose gate was multiplied, one token at a time.
    pub gate_rows: u32,
}

impl NeuronCounts {
    /// What has come since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            down_rows: self.down_rows.wrapping_sub(earlier.down_rows),
            gate_rows: self.gate_rows.wrapping_sub(earlier.gate_rows),
        }
    }
}

impl DownScratch {
    /// Neurons that were worked on since this was made.
    pub fn counts(&self) -> Result<NeuronCounts, DeviceError> {
        let counted = self.counted.to_vec()?;
        Ok(NeuronCounts {
            down_rows: counted[0],
            gate_rows: counted[1],
        })
    }

    /// Where those are counted whose rows of down are added.
    pub(super) fn computed_address(&self) -> u64 {
        self.counted.address()
    }

    /// Bytes that are taken.
    pub fn bytes(&self) -> usize {
        self.partial.bytes() + self.counters.bytes() + self.counted.bytes()
    }
}

impl Gpu {
    /// The kernels of `device`; `arithmetic` is how quantised rows are multiplied.
    pub fn new(device: Arc<dyn Device>, arithmetic: Arithmetic) -> Self {
        Self { device, arithmetic }
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// `out = matrix · norm(x) + bias` for up to three matrices of a format and as many columns, or the
    /// same added to what is there.
    ///
    /// Panics where shapes do not fit.
    pub fn project(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        parts: &mut [(&GpuLinear, &mut Buffer<f32>)],
        add: bool,
    ) -> Result<(), DeviceError> {
        let (first, _) = parts.first().expect("a matrix");
        let (format, columns) = (first.matrix.format(), first.matrix.columns());
        let tokens = x.len() / columns.max(1);
        assert!(parts.len() <= 3 && norm.is_none_or(|norm| norm.size() == columns));
        let mut arguments = arguments::Projection::zeroed();
        let mut rows = 0;
        for (segment, (linear, out)) in arguments.segments.iter_mut().zip(&mut *parts) {
            let matrix = &linear.matrix;
            assert!(
                matrix.format() == format && matrix.columns() == columns,
                "alike"
            );
            assert_eq!(out.len(), tokens * matrix.rows(), "one output per row");
            segment.matrix = matrix.argument();
            segment.bias = linear.bias.as_ref().map_or(0, Buffer::address);
            segment.out = out.address();
            rows += matrix.rows();
        }
        if rows == 0 || tokens == 0 {
            return Ok(());
        }
        arguments.x = x.address();
        arguments.norm = GpuNorm::argument(norm);
        arguments.segment_count = parts.len() as i32;
        arguments.rounded = (self.arithmetic == Arithmetic::Integer).into();
        arguments.add = add.into();
        self.launch(
            &kernel("project", format),
            [self.row_blocks(rows), tokens as u32, 1],
            THREADS,
            input_bytes(columns, self.rounds(format)),
            "the input of a projection",
            &arguments,
        )
    }

    /// Norms every run of `x` that is as long as the norm.
    pub fn norm(&self, x: &mut Buffer<f32>, norm: &GpuNorm) -> Result<(), DeviceError> {
        let columns = norm.size();
        let arguments = arguments::NormInPlace {
            x: x.address(),
            columns: columns as i32,
            padding: 0,
            norm: GpuNorm::argument(Some(norm)),
        };
        let grid = [(x.len() / columns) as u32, 1, 1];
        let shared = input_bytes(columns, false);
        self.launch("norm_in_place", grid, THREADS, shared, "a norm", &arguments)
    }

    /// The place of the largest of the numbers of `x`, the first of equal ones, into `out`.
    pub fn arg_max(
        &self,
        x: &Buffer<f32>,
        out: &mut Buffer<u32>,
        scratch: &mut Buffer<u32>,
    ) -> Result<(), DeviceError> {
        const BLOCKS: usize = 32;
        assert!(
            scratch.len() >= Self::ARG_MAX_WORDS && !out.is_empty(),
            "room"
        );
        let word = |index: usize| scratch.address() + (index * 4) as u64;
        let arguments = arguments::ArgMax {
            x: x.address(),
            count: x.len() as i32,
            padding: 0,
            counter: word(0),
            largest: word(4),
            places: word(4 + BLOCKS),
            out: out.address(),
        };
        let shared = 2 * THREADS * 4 + 16;
        self.launch(
            "arg_max",
            [BLOCKS as u32, 1, 1],
            THREADS,
            shared,
            "the largest number",
            &arguments,
        )
    }

    /// Words that [`Gpu::arg_max`] needs, the first of which is 0.
    pub const ARG_MAX_WORDS: usize = 4 + 2 * 32;

    /// Attention of some tokens, which join the cache: `out`, `[tokens, heads, head_size]`.
    ///
    /// `partial` has [`Gpu::attention_scratch_len`] numbers, and `counters` a 0 per token and KV head.
    pub fn attend(
        &self,
        attention: &Attention<'_>,
        cache: &mut GpuCache,
        partial: &mut Buffer<f32>,
        counters: &mut Buffer<u32>,
        out: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let (kv_heads, size) = (cache.kv_heads, cache.head_size);
        let tokens = attention.tokens;
        let heads = attention.query.len() / size / tokens;
        let group = heads / kv_heads;
        let splits = self.attention_splits(tokens, kv_heads, cache.context);
        let words = self.attention_scratch_len(tokens, heads, kv_heads, size, cache.context);
        assert!(partial.len() >= words && counters.len() >= tokens * kv_heads);
        assert!(
            attention.query.len() == tokens * heads * size && out.len() == tokens * heads * size
        );
        assert!(attention.key.len() == tokens * kv_heads * size);
        assert!(attention.value.len() == tokens * kv_heads * size);
        let pairs = attention.sin_cos.len() / tokens;
        assert!(2 * pairs <= size && !attention.position.is_empty());
        let norm = |pick: fn(&HeadNorms) -> &GpuNorm| GpuNorm::argument(attention.norms.map(pick));
        let arguments = arguments::Attention {
            query: attention.query.address(),
            key: attention.key.address(),
            value: attention.value.address(),
            query_norm: norm(|norms| &norms.query),
            key_norm: norm(|norms| &norms.key),
            rotations: attention.sin_cos.address(),
            pairs: pairs as i32,
            padding: 0,
            slopes: attention.alibi_slopes.map_or(0, Buffer::address),
            keys: cache.keys.address(),
            values: cache.values.address(),
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_size: size as i32,
            context: cache.context as i32,
            window: attention.window.unwrap_or(0) as i32,
            appended: (tokens > 1).into(),
            position: attention.position.address(),
            scale: std::f32::consts::LOG2_E / (size as f32).sqrt(),
            last_padding: 0,
            partial: partial.address(),
            counters: counters.address(),
            out: out.address(),
        };
        let floats = |count: usize| (count * 4).next_multiple_of(16);
        let shared = 2 * floats(group * size)
            + floats(group * TILE)
            + 3 * floats(group)
            + 2 * floats(TILE * (size + 4))
            + 16;
        let [append, attend] = match cache.format {
            CacheFormat::F32 => ["append_kv_f32", "attention_f32"],
            _ => ["append_kv_f16", "attention_f16"],
        };
        if tokens > 1 {
            // Each sees those before it, whichever block is first.
            let grid = [kv_heads as u32, tokens as u32, 1];
            let shared = floats(size);
            self.launch(append, grid, WARP, shared, "a head", &arguments)?;
        }
        let grid = [kv_heads as u32, splits as u32, tokens as u32];
        self.launch(
            attend,
            grid,
            ATTENTION_THREADS,
            shared,
            "attention",
            &arguments,
        )
    }

    /// Numbers that attention of some tokens needs for what its blocks have seen.
    pub fn attention_scratch_len(
        &self,
        tokens: usize,
        heads: usize,
        kv_heads: usize,
        head_size: usize,
        context: usize,
    ) -> usize {
        self.attention_splits(tokens, kv_heads, context) * tokens * heads * (head_size + 2)
    }

    /// Blocks that share what a KV head sees: as many as fill the device, if the context is long enough. Of several
    /// tokens there are enough without.
    fn attention_splits(&self, tokens: usize, kv_heads: usize, context: usize) -> usize {
        if tokens > 1 {
            return 1;
        }
        let blocks = 2 * self.device.info().multiprocessors;
        let most = context.div_ceil(2 * TILE);
        blocks.div_ceil(kv_heads).clamp(1, most.max(1))
    }

    /// Asks a predictor which neurons to look at; `middle` has a place per token and unit.
    pub fn predict(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        predictor: &Predictor,
        middle: &mut Buffer<f32>,
        predicted: &mut PredictedMask<'_>,
    ) -> Result<(), DeviceError> {
        self.project(x, norm, &mut [(&predictor.a, &mut *middle)], false)?;
        let b = &predictor.b_transposed;
        let neurons = b.columns();
        let tokens = middle.len() / b.rows().max(1);
        assert!(predictor.bias.len() == neurons && middle.len() == tokens * b.rows());
        let blocks = b.rows().div_ceil(BLOCK);
        assert!(
            predictor
                .b_scales
                .as_ref()
                .is_none_or(|scales| scales.len() == blocks * neurons)
        );
        let arguments = arguments::Predict {
            middle: middle.address(),
            units: b.argument(),
            scales: predictor.b_scales.as_ref().map_or(0, Buffer::address),
            bias: predictor.bias.address(),
            threshold: predictor.threshold,
            padding: 0,
            masks: masks(predicted, neurons, tokens),
        };
        let grid = [neurons.div_ceil(WORD) as u32, tokens as u32, 1];
        let shared = THREADS / WARP * WORD * 4;
        let name = kernel("predict", b.format());
        self.launch(&name, grid, THREADS, shared, "a predictor", &arguments)
    }

    /// Counts signs that agree.
    pub fn predict_by_signs(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        signs: &SignBits,
        predicted: &mut PredictedMask<'_>,
    ) -> Result<(), DeviceError> {
        let words = signs.columns.div_ceil(64);
        let tokens = x.len() / signs.columns.max(1);
        assert!(x.len() == tokens * signs.columns && signs.signs.len() == signs.neurons * words);
        let arguments = arguments::PredictBySigns {
            x: x.address(),
            norm: GpuNorm::argument(norm),
            signs: signs.signs.address(),
            neurons: signs.neurons as i32,
            columns: signs.columns as i32,
            agreements: signs.min_agreements as i32,
            padding: 0,
            masks: masks(predicted, signs.neurons, tokens),
        };
        let blocks = self.row_blocks(signs.neurons.div_ceil(WORD));
        let shared = input_bytes(signs.columns, false) + (2 * words * 4).next_multiple_of(16);
        self.launch(
            "predict_by_signs",
            [blocks, tokens as u32, 1],
            THREADS,
            shared,
            "signs",
            &arguments,
        )
    }

    /// What rows of down are multiplied by, of the hot neurons that are predicted, or of all; and the input
    /// for the host, where it has neurons.
    ///
    /// Panics where shapes do not fit.
    #[expect(
        clippy::too_many_arguments,
        reason = "one argument per operand of the kernel"
    )]
    pub fn gate_up(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        ffn: &Ffn,
        rule: NeuronFilter<'_>,
        mask: Option<&Buffer<u32>>,
        products: &mut Buffer<f32>,
        host: Option<HostMirror<'_>>,
        scratch: &mut DownScratch,
    ) -> Result<(), DeviceError> {
        let gate = &ffn.gate.matrix;
        let (hot, columns, format) = (gate.rows(), gate.columns(), gate.format());
        let words = hot.div_ceil(WORD);
        assert!(x.len() == columns && products.len() >= hot);
        assert!(mask.is_none_or(|mask| mask.len() >= words));
        assert_eq!(
            ffn.up.is_none(),
            ffn.kind == GpuFfnKind::Plain,
            "an up product to be gated"
        );
        let mut arguments = arguments::GateUp::zeroed();
        if let Some(up) = &ffn.up {
            let up_matrix = &up.matrix;
            assert!(up_matrix.format() == format && up_matrix.columns() == columns);
            assert_eq!(up_matrix.rows(), hot, "an up row per gate");
            arguments.up = up_matrix.argument();
            arguments.up_bias = up.bias.as_ref().map_or(0, Buffer::address);
        }
        arguments.neurons = neurons(ffn, rule);
        if let Some(host) = host {
            assert!(host.input.len() >= columns && !host.step.is_empty());
            arguments.for_host = host.input.address(0);
            arguments.flag = host.flags.address(host.flag);
            arguments.step = host.step.address();
        }
        arguments.x = x.address();
        arguments.norm = GpuNorm::argument(norm);
        arguments.gate = gate.argument();
        arguments.gate_bias = ffn.gate.bias.as_ref().map_or(0, Buffer::address);
        arguments.mask = mask.map_or(0, Buffer::address);
        arguments.hot_count = hot as i32;
        arguments.products = products.address();
        arguments.evaluated = scratch.counted.address() + size_of::<u32>() as u64;
        arguments.rounded = (self.arithmetic == Arithmetic::Integer).into();
        let of_mask = match mask {
            Some(_) => 2 * (words * 4).next_multiple_of(16) + WARP * 4,
            None => 0,
        };
        let shared = input_bytes(columns, self.rounds(format)) + of_mask;
        let grid = [self.row_blocks(hot.max(1)), 1, 1];
        let name = kernel("gate_up", format);
        self.launch(&name, grid, THREADS, shared, "gate and up", &arguments)
    }

    /// Adds to `hidden` what the neurons with `products` contribute, what is added once, and what the
    /// host's neurons do.
    ///
    /// Panics where shapes do not fit, or where `scratch` is for smaller ones.
    pub fn down(
        &self,
        ffn: &Ffn,
        products: &Buffer<f32>,
        offset: Option<&Buffer<f32>>,
        cold: Option<ColdSum<'_>>,
        scratch: &mut DownScratch,
        hidden: &mut Buffer<f32>,
    ) -> Result<(), DeviceError> {
        let DownScratch {
            partial,
            counters,
            counted,
        } = scratch;
        let matrix = &ffn.down;
        let (columns, format) = (matrix.columns(), matrix.format());
        let (tiles, chunks) = (Self::down_tiles(matrix), self.down_chunks(matrix));
        assert!(products.len() >= matrix.rows() && hidden.len() == columns);
        assert!(partial.len() >= self.down_words(matrix) && counters.len() >= tiles);
        assert!(
            [ffn.bias.as_ref(), offset]
                .into_iter()
                .flatten()
                .all(|added| added.len() == columns)
        );
        let mut arguments = arguments::Down::zeroed();
        if let Some(cold) = cold {
            assert!(cold.sum.len() >= columns && !cold.step.is_empty());
            arguments.cold = cold.sum.address(0);
            arguments.flag = cold.flag.map_or(0, |(flags, index)| flags.address(index));
            arguments.step = cold.step.address();
            arguments.timed_out = cold.timed_out.address(0);
            arguments.timeout_nanoseconds = cold.timeout_nanoseconds;
        }
        arguments.down = matrix.argument();
        arguments.products = products.address();
        arguments.hot_count = matrix.rows() as i32;
        arguments.partial = partial.address();
        arguments.counters = counters.address();
        arguments.bias = ffn.bias.as_ref().map_or(0, Buffer::address);
        arguments.offset = offset.map_or(0, Buffer::address);
        arguments.hidden = hidden.address();
        arguments.computed = counted.address();
        let shared = ROW_GROUPS * ROW_THREADS * width(format) * 4 + 2 * LISTED * 4 + WARP * 4;
        let grid = [tiles as u32, chunks as u32, 1];
        let name = kernel("down", format);
        self.launch(&name, grid, THREADS, shared, "rows of down", &arguments)
    }

    /// What sums of rows need on their way, for any of `matrices`.
    pub fn down_scratch<'a>(
        &self,
        matrices: impl Iterator<Item = &'a GpuMatrix>,
    ) -> Result<DownScratch, DeviceError> {
        let most = |(words, tiles): (usize, usize), matrix| {
            (
                words.max(self.down_words(matrix)),
                tiles.max(Self::down_tiles(matrix)),
            )
        };
        let (words, tiles) = matrices.fold((0, 0), most);
        Ok(DownScratch {
            partial: Buffer::new(&self.device, words)?,
            counters: Buffer::new(&self.device, tiles)?,
            counted: Buffer::new(&self.device, 2)?,
        })
    }

    /// Blocks that share the columns of a row of down.
    fn down_tiles(matrix: &GpuMatrix) -> usize {
        matrix
            .columns()
            .div_ceil(ROW_THREADS * width(matrix.format()))
            .max(1)
    }

    /// Numbers that sums of rows need on their way.
    fn down_words(&self, matrix: &GpuMatrix) -> usize {
        self.down_chunks(matrix) * matrix.columns()
    }

    /// Blocks that share the neurons.
    fn down_chunks(&self, matrix: &GpuMatrix) -> usize {
        let blocks = 2 * self.device.info().multiprocessors;
        let most = matrix.rows().div_ceil(WORD).max(1);
        blocks.div_ceil(Self::down_tiles(matrix)).clamp(1, most)
    }

    /// Whether rows of `format` are multiplied with bytes.
    fn rounds(&self, format: Format) -> bool {
        self.arithmetic == Arithmetic::Integer && format.is_quantised()
    }

    /// Blocks for so many rows, a warp each.
    fn row_blocks(&self, rows: usize) -> u32 {
        let most = ROW_BLOCKS * self.device.info().multiprocessors;
        rows.div_ceil(THREADS / WARP).min(most) as u32
    }

    /// Runs a kernel.
    pub(super) fn launch<T: Pod>(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: usize,
        shared_bytes: usize,
        what: &'static str,
        arguments: &T,
    ) -> Result<(), DeviceError> {
        let info = self.device.info();
        if shared_bytes > info.shared_bytes {
            return Err(DeviceError::TooLarge {
                what,
                device: info.name.clone(),
                needed: shared_bytes,
                available: info.shared_bytes,
            });
        }
        let launch = Launch {
            kernel,
            grid,
            threads: threads as u32,
            shared_bytes,
            arguments: bytemuck::bytes_of(arguments),
        };
        // SAFETY: the arguments are the kernel's, whose size the emulator checks for each; their addresses
        // are those of buffers whose lengths the caller has checked, and which free their memory only
        // after what was launched before.
        #[expect(unsafe_code, reason = "launches kernels")]
        unsafe {
            self.device.launch(&launch)
        }
    }
}

/// The name of a kernel for a format.
pub(super) fn kernel(name: &str, format: Format) -> String {
    format!("{name}_{format}")
}

/// Weights that 16 bytes hold.
fn width(format: Format) -> usize {
    match format {
        Format::F32 => 4,
        Format::F16 | Format::Bf16 => 8,
        Format::Q8_0 => 16,
        Format::Q4K | Format::Q4_0 => 32,
    }
}

/// Shared memory of an input: its numbers, sums of a norm, and bytes.
pub(super) fn input_bytes(columns: usize, rounded: bool) -> usize {
    let blocks = columns.div_ceil(BLOCK);
    let of_rounded = match rounded {
        true => blocks * BLOCK + 2 * (blocks * 4).next_multiple_of(16),
        false => 0,
    };
    blocks * BLOCK * 4 + WARP * 4 + of_rounded
}

/// What `rule` makes of the products of the neurons of `ffn`.
pub(super) fn neurons(ffn: &Ffn, rule: NeuronFilter<'_>) -> arguments::Neurons {
    let hot = ffn.gate.matrix.rows();
    let mut found = arguments::Neurons::zeroed();
    (found.activation, found.fat_threshold) = ffn.activation.argument();
    found.kind = match ffn.kind {
        GpuFfnKind::Plain => 0,
        GpuFfnKind::Gated => 1,
        GpuFfnKind::DoublyGated => 2,
    };
    let of_neurons = |scale: &Buffer<f32>| {
        assert!(scale.len() >= hot, "a number per neuron");
        scale.address()
    };
    found.rule = match rule {
        NeuronFilter::All => 0,
        NeuronFilter::NonZeroGate => 1,
        NeuronFilter::GateThreshold(threshold) => {
            found.threshold = threshold;
            2
        }
        NeuronFilter::ScaledGateThreshold(threshold, scale) => {
            found.threshold = threshold;
            found.gate_scale = of_neurons(scale);
            3
        }
        NeuronFilter::ContributionThreshold {
            threshold,
            scale,
            centre,
        } => {
            found.threshold = threshold;
            found.contribution_scale = of_neurons(scale);
            found.centre = centre.map_or(0, of_neurons);
            4
        }
    };
    found
}

fn masks(predicted: &mut PredictedMask<'_>, neurons: usize, tokens: usize) -> arguments::Masks {
    let words = tokens * neurons.div_ceil(WORD);
    assert!(predicted.mask.len() >= words && predicted.activations.len() >= predicted.hot_count);
    assert!(predicted.host_mask.is_none_or(|host| host.len() >= words));
    arguments::Masks {
        all: predicted.mask.address(),
        for_host: predicted.host_mask.map_or(0, |host| host.address(0)),
        products: predicted.activations.address(),
        hot_count: predicted.hot_count as i32,
        padding: 0,
    }
}
