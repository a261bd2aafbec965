//! A GPU and the CPU together: each layer's parts run where the plan puts them, hot neurons on the GPU
//! while cold ones are computed on the CPU, and what both sides add is merged once.
//!
//! ```text
//! GPU   query, key, value ─ attention ─ output ─ predict ─ gate·up of the hot ──────── down, merge
//! CPU                                              └ input, mask ▸ cold neurons ▸ sum ┘
//! ```
//!
//! The hidden state is on one side at a time and crosses where a layer's attention lives elsewhere.

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

/// What of a bundle is on a device, and the vectors of the token that runs.
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
    /// The same for the tokens of a prompt, where there is room for them.
    prompt: Option<State>,
    /// Tokens of the batch that runs.
    tokens: usize,
    /// The layer that runs.
    layer: usize,
    /// Whether all that the device does for the token that runs is launched before the host does its part.
    is_whole: bool,
    /// What both sides take, where somebody wants to know.
    times: Option<SideTimes>,
    segments: GraphSegments,
    /// Whether the newest hidden state is on the device.
    hidden_on_device: bool,
}

/// A layer's parts on the device.
#[derive(Debug)]
struct DeviceLayer {
    attention: Option<DeviceAttention>,
    /// Whether keys and values are there too.
    has_cache: bool,
    /// Neurons of the layer, wherever they are.
    neurons: usize,
    /// From how many tokens of a prompt on its cold neurons are copied to the device, where that ever pays.
    streams_from: Option<usize>,
    /// Without a neuron where there are cold ones to be copied alone.
    ffn: Option<DeviceFfn>,
    /// Behind attention and behind the FFN, where norms come after.
    norms_after: Option<[GpuNorm; 2]>,
}

#[derive(Debug)]
struct DeviceAttention {
    /// None where norms come after.
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
    /// None where norms come after.
    norm: Option<GpuNorm>,
    ffn: Ffn,
    choice: DeviceChoice,
    /// Added for neurons that are not computed.
    offset: Option<Buffer<f32>>,
}

/// How the device's neurons are chosen.
#[derive(Debug)]
enum DeviceChoice {
    /// All.
    Every,
    /// Those whose gate is not exactly zero.
    NotZero,
    /// The same of those that a predictor predicts.
    Predicted {
        predictor: Box<Predictor>,
        middle: Buffer<f32>,
        /// Whether it sees the hidden state before the norm.
        reads_residual: bool,
    },
    /// The same of those that signs predict.
    BySigns(SignBits),
    /// The same of those that the host predicts.
    ByHost,
    /// Those whose gate, times a number of each where there is one, is so large.
    ByGate(f32, Option<Buffer<f32>>),
    /// Those whose product, the centre taken off where there is one, is so large.
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
    /// The token of the largest of them, and what it takes to find it.
    token: Buffer<u32>,
    scratch: Buffer<u32>,
}

/// Vectors of a token, or of some, on the device, and those that both sides see.
#[derive(Debug)]
struct State {
    /// What several tokens need beside; none for one.
    many: Option<Many>,
    hidden: Buffer<f32>,
    /// What the FFN sees where attention has been added to `hidden` already.
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
    /// Who is predicted, for the host.
    predicted: HostBuffer,
    /// A word a layer: the last step whose input the host can read.
    ready: HostBuffer,
    /// What the host's neurons add.
    cold: HostBuffer,
    /// A word a layer: the last step of which that is there.
    done: HostBuffer,
    timed_out: HostBuffer,
    /// Number of the token since the start, from 1 on.
    steps: u32,
    /// Neurons that the device had worked on when that was asked last.
    counts: NeuronCounts,
}

/// What several tokens need on the device.
#[derive(Debug)]
struct Many {
    /// How many there is room for.
    most: usize,
    halves: F16Buffer,
    /// What rows of down are multiplied by.
    products: F16Buffer,
    /// `[tokens, hot]`.
    up: Buffer<f32>,
    /// `[tokens, rank]`.
    middle: Buffer<f32>,
    /// Cold neurons that are copied here, in rotations.
    pieces: Option<[Piece; 2]>,
}

impl Hybrid {
    /// The device.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        self.gpu.device()
    }

    /// Room for keys and values of each layer that has them on the device.
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

    /// Makes room for as many tokens of a prompt at once as the plan's budget leaves, with `caches` bytes of a
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

    /// From now on takes the times of both sides, or no longer; returns those that were taken.
    pub(crate) fn take_times(&mut self, goes_on: bool) -> SideTimes {
        self.segments.set_timed(goes_on);
        let fresh = goes_on.then(|| SideTimes::new(self.layers.len()));
        std::mem::replace(&mut self.times, fresh).unwrap_or_default()
    }

    /// How fast the device reads, in bytes per second, where it has room to tell.
    pub(crate) fn read_bandwidth(&self) -> Result<Option<f64>, DeviceError> {
        bytes::read_bandwidth(self.device())
    }

    /// How many tokens of a prompt run at once.
    pub(crate) fn prompt_tokens(&self) -> usize {
        let many = self.prompt.as_ref().and_then(|state| state.many.as_ref());
        many.map_or(1, |many| many.most)
    }

    /// Whether logits come from the device.
    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Logits of some hidden states, `[tokens, vocabulary]`.
    pub(crate) fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let mut logits = Vec::new();
        for token in hidden.chunks_exact(self.state.hidden.len()) {
            self.run_head(token)?;
            let found = self.head.as_ref().expect("the head is here");
            logits.extend(found.logits.to_vec()?);
        }
        Ok(logits)
    }

    /// Computes the logits of a token's hidden state, which stay on the device.
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

    /// Which of the first `among` logits that were computed last is the largest, the first of equal ones.
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

    /// Fails where more is on the device than the plan has room for, `caches` of a sequence among it.
    pub(crate) fn check_budget(&self, bundle: &Bundle, caches: usize) -> Result<(), RuntimeError> {
        let held = (self.bytes() + caches) as u64;
        let budget = bundle.plan().budget.vram_bytes;
        match bundle.plan().is_placed() && held > budget {
            true => Err(RuntimeError::OverBudget { held, budget }),
            false => Ok(()),
        }
    }

    /// Bytes on the device, caches of sequences not counted.
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
