//! A GPU and the CPU together: each part of a layer runs where the plan has it. The GPU computes hot neurons while
//! the CPU computes cold ones, and their sums are merged once per layer.
//!
//! ```text
//! GPU   query, key, value ─ attention ─ output ─ predict ─ gate·up of the hot ──────── down, merge
//! CPU                                              └ input, mask ▸ cold neurons ▸ sum ┘
//! ```
//!
//! The hidden state is on one side at a time, and is copied where attention of the next layer is on the other.

mod bytes;
mod executor;
mod launches;
mod observed;
mod place;
mod segments;
mod streaming;
mod times;
mod upload;

pub(crate) use executor::HybridExecutor;
pub use observed::{ObservedLayer, ObservedToken};
pub use times::{LayerTimes, SideTimes};
pub use upload::LayerWeights;

use std::sync::Arc;

use powerinfer_bundle::{Bundle, memory::PREFILL_BATCH};
use powerinfer_kernels::cuda::{
    Buffer, Device, DeviceError, DownScratch, F16Buffer, Ffn, Gpu, GpuCache, GpuLinear, GpuNorm,
    HeadNorms, HostBuffer, NeuronCounts, Predictor, SignBits,
};
use powerinfer_tensor::CacheFormat;

use crate::RuntimeError;
use segments::GraphSegments;
pub(crate) use streaming::ColdWeights;
use streaming::Piece;

/// The parts of a bundle that are on a device, and the vectors of the tokens that run.
#[derive(Debug)]
pub(crate) struct Hybrid {
    gpu: Gpu,
    layers: Vec<DeviceLayer>,
    head: Option<DeviceHead>,
    cache_format: CacheFormat,
    context: usize,
    kv_heads: usize,
    head_size: usize,
    state: State,
    /// Vectors for the tokens of a prompt, where memory allows several.
    prompt: Option<State>,
    /// Tokens of the current pass.
    tokens: usize,
    /// Layer that runs.
    layer: usize,
    /// Whether all launches of the current token precede the host's part.
    is_whole: bool,
    /// Times of both sides, where they are measured.
    times: Option<SideTimes>,
    segments: GraphSegments,
    /// Whether the current hidden state is on the device.
    hidden_on_device: bool,
}

/// The parts of a layer that are on the device.
#[derive(Debug)]
struct DeviceLayer {
    attention: Option<DeviceAttention>,
    /// Whether keys and values are on the device.
    has_cache: bool,
    /// Neurons of the layer, hot and cold.
    neurons: usize,
    /// Tokens of a prompt from which copying the cold neurons to the device pays; none where it never does.
    streams_from: Option<usize>,
    /// The hot neurons; there may be none where cold ones are copied.
    ffn: Option<DeviceFfn>,
    /// Norms after attention and after the FFN, of post-norm models.
    norms_after: Option<[GpuNorm; 2]>,
}

#[derive(Debug)]
struct DeviceAttention {
    /// None in post-norm models.
    norm: Option<GpuNorm>,
    query: GpuLinear,
    key: GpuLinear,
    value: GpuLinear,
    head_norms: Option<HeadNorms>,
    slopes: Option<Arc<Buffer<f32>>>,
    window: Option<usize>,
    output: GpuLinear,
}

#[derive(Debug)]
struct DeviceFfn {
    /// None in post-norm models.
    norm: Option<GpuNorm>,
    ffn: Ffn,
    choice: DeviceChoice,
    /// Mean contribution of the skipped neurons.
    offset: Option<Buffer<f32>>,
}

/// Selection of the device's neurons.
#[derive(Debug)]
enum DeviceChoice {
    /// All neurons.
    Every,
    /// Neurons whose gate is not exactly zero.
    NotZero,
    /// Neurons that a predictor on the device predicts.
    Predicted {
        predictor: Box<Predictor>,
        middle: Buffer<f32>,
        /// Whether it reads the hidden state before the norm.
        reads_residual: bool,
    },
    /// Neurons that the signs of the gate predict, on the device.
    BySigns(SignBits),
    /// Neurons that the host predicts.
    ByHost,
    /// Neurons whose activation, times a scale of each, reaches a threshold.
    ByGate(f32, Option<Buffer<f32>>),
    /// Neurons whose centred product reaches a threshold.
    ByContribution {
        threshold: f32,
        scale: Buffer<f32>,
        centre: Option<Buffer<f32>>,
    },
}

#[derive(Debug)]
struct DeviceHead {
    norm: Option<GpuNorm>,
    project: Option<(GpuLinear, Buffer<f32>)>,
    head: GpuLinear,
    logits: Buffer<f32>,
    /// Token with the largest logit, and scratch for the arg max.
    token: Buffer<u32>,
    scratch: Buffer<u32>,
}

/// Vectors of one or several tokens on the device, and those in pinned memory that both sides access.
#[derive(Debug)]
struct State {
    /// Vectors that only several tokens need.
    many: Option<Many>,
    hidden: Buffer<f32>,
    /// Input of the FFN where attention has been added to `hidden` already.
    residual: Buffer<f32>,
    query: Buffer<f32>,
    key: Buffer<f32>,
    value: Buffer<f32>,
    mixed: Buffer<f32>,
    rotations: Buffer<[f32; 2]>,
    position: Buffer<u32>,
    step: Buffer<u32>,
    attention_partial: Buffer<f32>,
    attention_counters: Buffer<u32>,
    mask: Buffer<u32>,
    products: Buffer<f32>,
    down: DownScratch,
    /// The FFN's input, for the host.
    input: HostBuffer,
    /// Masks of the predicted neurons, for the host.
    predicted: HostBuffer,
    /// Flag per layer: the last step whose input the host can read.
    ready: HostBuffer,
    /// Sums of the cold neurons.
    cold: HostBuffer,
    /// Flag per layer: the last step whose sums are written.
    done: HostBuffer,
    timed_out: HostBuffer,
    /// Steps since the start; the first is 1.
    steps: u32,
    /// The device's neuron counts when they were read last.
    counts: NeuronCounts,
}

/// Vectors of several tokens on the device.
#[derive(Debug)]
struct Many {
    /// Tokens there is memory for.
    most: usize,
    halves: F16Buffer,
    /// Coefficients of the rows of down.
    products: F16Buffer,
    /// `[tokens, hot]`.
    up: Buffer<f32>,
    /// `[tokens, rank]`.
    middle: Buffer<f32>,
    /// Buffers for cold neurons, used alternately.
    pieces: Option<[Piece; 2]>,
}

impl Hybrid {
    /// The device.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        self.gpu.device()
    }

    /// Empty KV caches of the layers that have theirs on the device.
    pub(crate) fn new_caches(&self) -> Result<Vec<Option<GpuCache>>, DeviceError> {
        let new = |layer: &DeviceLayer| {
            let cache = || {
                GpuCache::new(
                    self.device(),
                    self.cache_format,
                    self.kv_heads,
                    self.context,
                    self.head_size,
                )
            };
            layer.has_cache.then(cache).transpose()
        };
        self.layers.iter().map(new).collect()
    }

    /// Allocates vectors for as many tokens of a prompt as the plan's budget allows; `caches` are the bytes of a
    /// sequence on the device.
    pub(crate) fn make_room_for_prompts(
        &mut self,
        bundle: &Bundle,
        caches: usize,
    ) -> Result<(), DeviceError> {
        let held = (self.bytes() + caches) as u64;
        let mut tokens = PREFILL_BATCH.min(self.context);
        while tokens > 1 {
            match place::state(
                &self.gpu,
                bundle.config(),
                &self.layers,
                self.context,
                tokens,
            ) {
                Ok(state) => {
                    let fits = held + state.bytes() as u64 <= bundle.plan().budget.vram_bytes;
                    if fits || !bundle.plan().is_placed() {
                        self.prompt = Some(state);
                        return Ok(());
                    }
                }
                Err(DeviceError::OutOfMemory { .. }) => {}
                Err(other) => return Err(other),
            }
            tokens /= 2;
        }
        Ok(())
    }

    /// Takes the times of both sides, and goes on measuring them where `continues`.
    pub(crate) fn take_times(&mut self, continues: bool) -> SideTimes {
        self.segments.set_timed(continues);
        let fresh = continues.then(|| SideTimes::new(self.layers.len()));
        std::mem::replace(&mut self.times, fresh).unwrap_or_default()
    }

    /// Read bandwidth of the device in bytes per second; none without enough free memory.
    pub(crate) fn read_bandwidth(&self) -> Result<Option<f64>, DeviceError> {
        bytes::read_bandwidth(self.device())
    }

    /// Tokens of a prompt that run together.
    pub(crate) fn prompt_tokens(&self) -> usize {
        let many = self.prompt.as_ref().and_then(|state| state.many.as_ref());
        many.map_or(1, |many| many.most)
    }

    /// Whether the head is on the device.
    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Logits of `hidden [tokens, hidden]`, `[tokens, vocabulary]`.
    pub(crate) fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let mut logits = Vec::new();
        for token in hidden.chunks_exact(self.state.hidden.len()) {
            self.run_head(token)?;
            let found = self.head.as_ref().expect("the head is here");
            logits.extend(found.logits.to_vec()?);
        }
        Ok(logits)
    }

    /// Computes the logits of one hidden state; they stay on the device.
    pub(crate) fn run_head(&mut self, hidden: &[f32]) -> Result<(), DeviceError> {
        let state = &mut self.state;
        let found = self.head.as_mut().expect("the head is here");
        state.hidden.write(hidden)?;
        let norm = found.norm.as_ref();
        let (x, norm) = match &mut found.project {
            Some((project, out)) => {
                self.gpu
                    .project(&state.hidden, norm, &mut [(&*project, &mut *out)], false)?;
                (&*out, None)
            }
            None => (&state.hidden, norm),
        };
        self.gpu
            .project(x, norm, &mut [(&found.head, &mut found.logits)], false)
    }

    /// Index of the largest of the first `among` logits that were computed last; the lowest of equal ones.
    pub(crate) fn largest_logit(&mut self, among: usize) -> Result<u32, DeviceError> {
        let found = self.head.as_mut().expect("the head is here");
        let all = found.logits.len();
        found.logits.set_len(among.min(all));
        let (token, scratch) = (&mut found.token, &mut found.scratch);
        let launched = self.gpu.arg_max(&found.logits, token, scratch);
        found.logits.set_len(all);
        launched?;
        Ok(found.token.to_vec()?[0])
    }

    /// Checks that the plan accounts for what is on the device, with `caches` bytes of a sequence.
    pub(crate) fn check_budget(&self, bundle: &Bundle, caches: usize) -> Result<(), RuntimeError> {
        let held = (self.bytes() + caches) as u64;
        let budget = bundle.plan().budget.vram_bytes;
        match bundle.plan().is_placed() && held > budget {
            true => Err(RuntimeError::OverBudget { held, budget }),
            false => Ok(()),
        }
    }

    /// Bytes on the device, without the caches of sequences.
    pub(crate) fn bytes(&self) -> usize {
        let norm = |norm: &Option<GpuNorm>| norm.as_ref().map_or(0, GpuNorm::bytes);
        let floats = |buffer: &Option<Buffer<f32>>| buffer.as_ref().map_or(0, Buffer::bytes);
        let attention = |a: &DeviceAttention| {
            let linears = [&a.query, &a.key, &a.value, &a.output].map(GpuLinear::bytes);
            let norms = a
                .head_norms
                .as_ref()
                .map_or(0, |norms| norms.query.bytes() + norms.key.bytes());
            linears.iter().sum::<usize>() + norms + norm(&a.norm)
        };
        let choice = |choice: &DeviceChoice| {
            let beside = match choice {
                DeviceChoice::Predicted { middle, .. } => middle.bytes(),
                DeviceChoice::ByGate(_, scale) => floats(scale),
                DeviceChoice::ByContribution { scale, centre, .. } => {
                    scale.bytes() + floats(centre)
                }
                _ => 0,
            };
            choice.read_bytes() + beside
        };
        let ffn = |found: &DeviceFfn| {
            let Ffn {
                gate,
                up,
                down,
                bias,
                ..
            } = &found.ffn;
            let matrices = gate.bytes() + up.as_ref().map_or(0, GpuLinear::bytes) + down.bytes();
            matrices
                + floats(bias)
                + norm(&found.norm)
                + choice(&found.choice)
                + floats(&found.offset)
        };
        let layers = self.layers.iter().map(|layer| {
            let after = layer
                .norms_after
                .iter()
                .flatten()
                .map(GpuNorm::bytes)
                .sum::<usize>();
            layer.attention.as_ref().map_or(0, attention)
                + layer.ffn.as_ref().map_or(0, ffn)
                + after
        });
        let head = self.head.as_ref().map_or(0, |found| {
            let project = found
                .project
                .as_ref()
                .map_or(0, |(linear, out)| linear.bytes() + out.bytes());
            let token = found.logits.bytes() + found.token.bytes() + found.scratch.bytes();
            norm(&found.norm) + project + found.head.bytes() + token
        });
        let prompt = self.prompt.as_ref().map_or(0, State::bytes);
        layers.sum::<usize>() + head + self.state.bytes() + prompt
    }
}

impl State {
    fn bytes(&self) -> usize {
        let vectors = [
            &self.hidden,
            &self.residual,
            &self.query,
            &self.key,
            &self.value,
            &self.mixed,
            &self.attention_partial,
            &self.products,
        ];
        let small = self.rotations.bytes() + self.mask.bytes() + self.attention_counters.bytes();
        let many = self.many.as_ref().map_or(0, |many| {
            let halves = many.halves.bytes() + many.products.bytes();
            let pieces = many.pieces.iter().flatten().map(Piece::bytes);
            halves + many.up.bytes() + many.middle.bytes() + pieces.sum::<usize>()
        });
        vectors.into_iter().map(Buffer::bytes).sum::<usize>() + small + self.down.bytes() + many
    }
}
