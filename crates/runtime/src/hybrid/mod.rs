//! A GPU and the CPU together: each layer's parts run where the plan puts them, hot neurons on the GPU
//! while cold ones are computed on the CPU, and what both sides add is merged once.
//!
//! ```text
//! GPU   query, key, value ─ attention ─ output ─ foresee ─ gate·up of the hot ──────── down, merge
//! CPU                                              └ input, mask ▸ cold neurons ▸ sum ┘
//! ```
//!
//! The hidden state is on one side at a time and crosses where a layer's attention lives elsewhere.

mod place;
mod stretches;
mod token;

pub(crate) use place::Source;

use std::sync::Arc;

use powerinfer_bundle::Bundle;
use powerinfer_kernels::CacheFormat;
use powerinfer_kernels::cuda::{
    Buffer, Device, DeviceError, DownScratch, Ffn, Gpu, GpuCache, GpuLinear, GpuNorm, HeadNorms,
    HostBuffer, Predictor, SignBits,
};

use crate::RuntimeError;
use stretches::Stretches;

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
    stretches: Stretches,
}

/// A layer's parts on the device.
#[derive(Debug)]
struct DeviceLayer {
    attention: Option<DeviceAttention>,
    /// Whether keys and values are there too.
    has_cache: bool,
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
    /// The same of those that a predictor foresees.
    Predicted {
        predictor: Box<Predictor>,
        middle: Buffer<f32>,
        /// Whether it sees the hidden state before the norm.
        sees_residual: bool,
    },
    /// The same of those that signs foresee.
    BySigns(SignBits),
    /// The same of those that the host foresees.
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
}

/// Vectors of a token on the device, and those that both sides see.
#[derive(Debug)]
struct State {
    hidden: Buffer<f32>,
    /// What the FFN sees where attention has been added to `hidden` already.
    residual: Buffer<f32>,
    query: Buffer<f32>,
    key: Buffer<f32>,
    value: Buffer<f32>,
    mixed: Buffer<f32>,
    turns: Buffer<[f32; 2]>,
    position: Buffer<u32>,
    step: Buffer<u32>,
    attention_partial: Buffer<f32>,
    attention_counters: Buffer<u32>,
    mask: Buffer<u32>,
    products: Buffer<f32>,
    down: DownScratch,
    /// The FFN's input, for the host.
    input: HostBuffer,
    /// Who is foreseen, for the host.
    foreseen: HostBuffer,
    /// A word a layer: the last step whose input the host can read.
    ready: HostBuffer,
    /// What the host's neurons add.
    cold: HostBuffer,
    gave_up: HostBuffer,
    /// Number of the token since the start, from 1 on.
    steps: u32,
    /// Neurons that the device had computed when that was asked last.
    computed: u32,
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

    /// Whether logits come from the device.
    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Logits of some hidden states, `[tokens, vocabulary]`.
    pub(crate) fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let state = &mut self.state;
        let found = self.head.as_mut().expect("the head is here");
        let mut logits = Vec::new();
        for token in hidden.chunks_exact(state.hidden.len()) {
            state.hidden.write(token)?;
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
                .project(x, norm, &mut [(&found.head, &mut found.logits)], false)?;
            logits.extend(found.logits.to_vec()?);
        }
        Ok(logits)
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
        let choice = |choice: &DeviceChoice| match choice {
            DeviceChoice::Predicted {
                predictor, middle, ..
            } => {
                let Predictor {
                    a,
                    units,
                    scales,
                    bias,
                    ..
                } = &**predictor;
                a.bytes() + units.bytes() + floats(scales) + bias.bytes() + middle.bytes()
            }
            DeviceChoice::BySigns(signs) => signs.signs.bytes(),
            DeviceChoice::ByGate(_, scale) => floats(scale),
            DeviceChoice::ByContribution { scale, centre, .. } => scale.bytes() + floats(centre),
            DeviceChoice::Every | DeviceChoice::NotZero | DeviceChoice::ByHost => 0,
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
            norm(&found.norm) + project + found.head.bytes() + found.logits.bytes()
        });
        layers.sum::<usize>() + head + self.state.bytes()
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
        let small = self.turns.bytes() + self.mask.bytes() + self.attention_counters.bytes();
        vectors.into_iter().map(Buffer::bytes).sum::<usize>() + small + self.down.bytes()
    }
}
