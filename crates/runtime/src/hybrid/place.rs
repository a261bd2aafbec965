//! Putting a bundle's weights on a device, as its plan says.

use std::sync::Arc;

use powerinfer_artifact::{
    TensorFile,
    plan::{self, LayerPlan, Policy, Score},
};
use powerinfer_bundle::{Bundle, Layout, StoredLayer, StoredLinear, StoredNorm, StoredWeights};
use powerinfer_kernels::{
    CacheFormat,
    cuda::{
        Buffer, Device, DeviceError, Ffn, Gpu, GpuActivation, GpuFfnKind, GpuLinear, GpuMatrix,
        GpuNorm, GpuNormKind, HeadNorms, HostBuffer, Predictor, SignBits,
    },
};
use powerinfer_model::{Activation, Block, FfnKind, ModelConfig, NormKind, Positions};

use super::{
    DeviceAttention, DeviceChoice, DeviceFfn, DeviceHead, DeviceLayer, Hybrid, Many, State,
    streaming,
};
use crate::{
    ActivationFormat, RuntimeError,
    choice::{Choice, LayerChoices},
};

/// What is put on a device, and how layers are run.
pub(crate) struct Source<'a> {
    pub(crate) bundle: &'a Bundle,
    pub(crate) weights: &'a StoredWeights,
    pub(crate) choices: &'a [LayerChoices],
    pub(crate) policies: &'a [Policy],
    pub(crate) context: usize,
    pub(crate) activations: ActivationFormat,
}

/// Copies to one device.
struct Upload<'a> {
    device: &'a Arc<dyn Device>,
    file: &'a TensorFile,
    config: &'a ModelConfig,
}

impl Upload<'_> {
    /// The first `rows` rows, or all.
    fn linear(&self, stored: &StoredLinear, rows: Option<usize>) -> Result<GpuLinear, DeviceError> {
        let view = stored.matrix.view(self.file);
        let rows = rows.unwrap_or(view.rows());
        let bias = stored.bias.as_deref().map(|bias| &bias[..rows]);
        GpuLinear::upload(self.device, &view.rows_range(0..rows), bias)
    }

    fn norm(&self, norm: &StoredNorm) -> Result<GpuNorm, DeviceError> {
        let kind = match self.config.norm {
            NormKind::RootMeanSquare => GpuNormKind::RootMeanSquare,
            NormKind::Layer => GpuNormKind::Layer,
        };
        let epsilon = self.config.norm_epsilon;
        GpuNorm::upload(
            self.device,
            kind,
            epsilon,
            &norm.weight,
            norm.bias.as_deref(),
        )
    }

    fn floats(&self, numbers: &[f32]) -> Result<Buffer<f32>, DeviceError> {
        Buffer::from_slice(self.device, numbers)
    }

    fn attention(
        &self,
        layer: usize,
        stored: &StoredLayer,
        slopes: Option<&Arc<Buffer<f32>>>,
    ) -> Result<DeviceAttention, DeviceError> {
        let is_before = self.config.block != Block::PostNorm;
        let head_norms = match &stored.head_norms {
            None => None,
            Some([query, key]) => Some(HeadNorms {
                query: self.norm(query)?,
                key: self.norm(key)?,
            }),
        };
        Ok(DeviceAttention {
            norm: is_before
                .then(|| self.norm(&stored.attention_norm))
                .transpose()?,
            query: self.linear(&stored.query, None)?,
            key: self.linear(&stored.key, None)?,
            value: self.linear(&stored.value, None)?,
            head_norms,
            slopes: slopes.cloned(),
            window: self.config.attention_windows[layer],
            output: self.linear(&stored.output, None)?,
        })
    }

    fn ffn(
        &self,
        stored: &StoredLayer,
        plan: &LayerPlan,
        choices: &LayerChoices,
        policy: Policy,
        bundle: &Bundle,
    ) -> Result<DeviceFfn, DeviceError> {
        let hot = plan.hot_count;
        let norm = match self.config.block {
            Block::PostNorm => None,
            Block::ParallelSharedNorm => Some(&stored.attention_norm),
            Block::PreNorm | Block::Parallel => stored.ffn_norm.as_ref(),
        };
        let down = stored.down.matrix.view(self.file).rows_range(0..hot);
        let up = stored.up.as_ref();
        let ffn = Ffn {
            gate: self.linear(&stored.gate, Some(hot))?,
            up: up.map(|up| self.linear(up, Some(hot))).transpose()?,
            down: GpuMatrix::upload(self.device, &down)?,
            bias: stored
                .down
                .bias
                .as_deref()
                .map(|bias| self.floats(bias))
                .transpose()?,
            kind: match self.config.ffn {
                FfnKind::Plain => GpuFfnKind::Plain,
                FfnKind::Gated => GpuFfnKind::Gated,
                FfnKind::DoublyGated => GpuFfnKind::DoublyGated,
            },
            activation: match self.config.activation {
                Activation::Relu => GpuActivation::Relu,
                Activation::SquaredRelu => GpuActivation::SquaredRelu,
                Activation::FatRelu { threshold } => GpuActivation::FatRelu(threshold),
                Activation::Silu => GpuActivation::Silu,
                Activation::GeluErf => GpuActivation::GeluErf,
                Activation::GeluTanh => GpuActivation::GeluTanh,
            },
        };
        let chosen = choices.choice(policy, bundle.predictors());
        let offset = chosen
            .offset()
            .map(|offset| self.floats(offset))
            .transpose()?;
        let is_here = plan.predictor == Some(plan::Device::Gpu);
        Ok(DeviceFfn {
            norm: norm.map(|norm| self.norm(norm)).transpose()?,
            ffn,
            choice: self.choice(&chosen, choices.sees_residual(policy), is_here, hot)?,
            offset,
        })
    }

    fn choice(
        &self,
        chosen: &Choice<'_>,
        sees_residual: bool,
        is_here: bool,
        hot: usize,
    ) -> Result<DeviceChoice, DeviceError> {
        Ok(match chosen {
            Choice::Dense => DeviceChoice::Every,
            Choice::Exact => DeviceChoice::NotZero,
            Choice::Predicted(_) | Choice::SignBit(_) | Choice::Listed(_) if !is_here => {
                DeviceChoice::ByHost
            }
            Choice::Listed(_) => DeviceChoice::ByHost,
            Choice::Predicted(found) => DeviceChoice::Predicted {
                middle: Buffer::new(self.device, found.a.rows())?,
                predictor: Box::new(Predictor {
                    a: GpuLinear::upload(self.device, &found.a, None)?,
                    units: GpuMatrix::upload(self.device, &found.units)?,
                    scales: match found.scales {
                        [] => None,
                        scales => Some(self.floats(scales)?),
                    },
                    bias: self.floats(found.bias)?,
                    threshold: found.threshold,
                }),
                sees_residual,
            },
            Choice::SignBit(found) => {
                let words: Vec<u64> = found.signs.words().collect();
                DeviceChoice::BySigns(SignBits {
                    signs: Buffer::from_slice(self.device, &words)?,
                    neurons: found.signs.rows(),
                    columns: found.signs.columns(),
                    agreements: found.agreements,
                })
            }
            Choice::Threshold(scoring) => {
                let (threshold, vectors) = (scoring.threshold, scoring.vectors);
                let value = threshold.value;
                match threshold.score {
                    Score::Gate => DeviceChoice::ByGate(value, None),
                    Score::WeightedGate => {
                        DeviceChoice::ByGate(value, Some(self.floats(&vectors.gate_scale[..hot])?))
                    }
                    Score::Contribution => DeviceChoice::ByContribution {
                        threshold: value,
                        scale: self.floats(&vectors.contribution_scale[..hot])?,
                        centre: match threshold.centred {
                            true => Some(self.floats(&vectors.centre[..hot])?),
                            false => None,
                        },
                    },
                }
            }
        })
    }
}

impl Hybrid {
    /// Copies to `device` what the plan puts there.
    ///
    /// Fails where it does not fit, and for what kernels cannot take: projections by input, and a KV cache of
    /// 8 bits.
    pub(crate) fn place(
        device: Arc<dyn Device>,
        source: &Source<'_>,
    ) -> Result<Self, RuntimeError> {
        let (bundle, weights) = (source.bundle, source.weights);
        let (config, plan) = (bundle.config(), bundle.plan());
        let upload = Upload {
            device: &device,
            file: bundle.weights(),
            config,
        };
        let slopes = match &config.positions {
            Positions::Alibi { slopes } => Some(Arc::new(upload.floats(slopes)?)),
            _ => None,
        };
        let mut layers = Vec::new();
        for (index, (stored, plan)) in weights.layers.iter().zip(&plan.layers).enumerate() {
            let has_attention = plan.attention == plan::Device::Gpu;
            let has_cache = has_attention && plan.kv == plan::Device::Gpu;
            let unsupported = |what: &'static str, hint: &'static str| RuntimeError::OnDevice {
                folder: bundle.folder().to_owned(),
                layer: index,
                what,
                hint,
            };
            let by_input = |linear: &StoredLinear| linear.layout == Layout::ByInput;
            if (has_attention && by_input(&stored.query))
                || (plan.hot_count > 0 && by_input(&stored.gate))
            {
                return Err(unsupported(
                    "projections by input",
                    "place it without `--input-sparsity`",
                ));
            }
            if has_cache && bundle.plan().budget.kv_cache == CacheFormat::Q8_0 {
                return Err(unsupported(
                    "a KV cache of 8 bits",
                    "place it with `--kv-cache f16`",
                ));
            }
            let norms_after = match (config.block, &stored.ffn_norm) {
                (Block::PostNorm, Some(norm)) if has_attention || plan.hot_count > 0 => {
                    Some([upload.norm(&stored.attention_norm)?, upload.norm(norm)?])
                }
                _ => None,
            };
            let attention = || upload.attention(index, stored, slopes.as_ref());
            let (choices, policy) = (&source.choices[index], source.policies[index]);
            layers.push(DeviceLayer {
                attention: has_attention.then(attention).transpose()?,
                has_cache,
                neurons: config.ffn_size,
                streams_from: None,
                ffn: match plan.hot_count {
                    0 => None,
                    _ => Some(upload.ffn(stored, plan, choices, policy, bundle)?),
                },
                norms_after,
            });
        }
        for (layer, of_plan) in layers.iter_mut().zip(&plan.layers) {
            layer.streams_from = streaming::least_tokens(plan, of_plan, layer);
        }
        let head = match plan.head {
            plan::Device::Gpu => Some(DeviceHead {
                norm: weights
                    .final_norm
                    .as_ref()
                    .map(|norm| upload.norm(norm))
                    .transpose()?,
                project: match &weights.project_out {
                    Some(project) => {
                        let linear = upload.linear(project, None)?;
                        let out = Buffer::new(&device, linear.matrix.rows())?;
                        Some((linear, out))
                    }
                    None => None,
                },
                head: upload.linear(&weights.head, None)?,
                logits: Buffer::new(&device, config.vocabulary_size)?,
            }),
            plan::Device::Cpu => None,
        };
        let gpu = Gpu::new(
            Arc::clone(&device),
            source.activations == ActivationFormat::Int8,
        );
        Ok(Self {
            state: state(&gpu, config, &layers, source.context, 1)?,
            prompt: None,
            tokens: 1,
            layer: 0,
            is_whole: false,
            times: None,
            stretches: super::Stretches::new(gpu.device()),
            gpu,
            layers,
            head,
            cache_format: bundle.plan().budget.kv_cache,
            context: source.context,
            kv_heads: config.kv_head_count,
            head_size: config.head_size,
        })
    }
}

/// Vectors of up to `tokens` tokens, all zeros.
pub(super) fn state(
    gpu: &Gpu,
    config: &ModelConfig,
    layers: &[DeviceLayer],
    context: usize,
    tokens: usize,
) -> Result<State, DeviceError> {
    let device = gpu.device();
    let floats = |count: usize| Buffer::<f32>::new(device, tokens * count);
    let (queries, keys) = (
        config.head_count * config.head_size,
        config.kv_head_count * config.head_size,
    );
    let pairs = match &config.positions {
        Positions::Rotary(rotary) => rotary.frequencies.len(),
        _ => 0,
    };
    let words = tokens * config.ffn_size.div_ceil(32);
    let (hidden, heads, kv_heads) = (config.hidden_size, config.head_count, config.kv_head_count);
    let ffns = || layers.iter().filter_map(|layer| layer.ffn.as_ref());
    let hot = ffns().map(|ffn| ffn.ffn.down.rows()).max().unwrap_or(0);
    let rank = ffns().map(|ffn| match &ffn.choice {
        DeviceChoice::Predicted { predictor, .. } => predictor.units.rows(),
        _ => 0,
    });
    // Those whose cold neurons are copied for so many tokens.
    let streams = |layer: &&DeviceLayer| layer.streams_from.is_some_and(|least| tokens >= least);
    let cold = |layer: &DeviceLayer| {
        layer
            .ffn
            .as_ref()
            .map(|ffn| layer.neurons - ffn.ffn.down.rows())
    };
    let most_cold = layers
        .iter()
        .filter(streams)
        .filter_map(cold)
        .max()
        .unwrap_or(0);
    let mut streamed = layers
        .iter()
        .filter(streams)
        .filter_map(|layer| layer.ffn.as_ref());
    let wide = hot.max(most_cold.min(streaming::PIECE));
    let many = match tokens {
        1 => None,
        _ => Some(Many {
            most: tokens,
            halves: gpu.new_halves(tokens, hidden.max(queries))?,
            products: gpu.new_halves(tokens, wide)?,
            up: floats(wide)?,
            middle: floats(rank.max().unwrap_or(0))?,
            piece: streamed
                .next()
                .map(|ffn| streaming::room(device, &ffn.ffn, most_cold))
                .transpose()?,
        }),
    };
    // Sums of rows go another way for several tokens.
    let downs = ffns().map(|ffn| &ffn.ffn.down).filter(|_| tokens == 1);
    let size = config.head_size;
    let partial = gpu.attention_words(tokens, heads, kv_heads, size, context);
    Ok(State {
        many,
        hidden: floats(hidden)?,
        residual: floats(hidden)?,
        query: floats(queries)?,
        key: floats(keys)?,
        value: floats(keys)?,
        mixed: floats(queries)?,
        turns: Buffer::new(device, tokens * pairs)?,
        position: Buffer::new(device, 1)?,
        step: Buffer::new(device, 1)?,
        attention_partial: Buffer::new(device, partial)?,
        attention_counters: Buffer::new(device, tokens * kv_heads)?,
        mask: Buffer::new(device, words)?,
        products: floats(wide)?,
        down: gpu.down_scratch(downs)?,
        input: HostBuffer::new(device, tokens * hidden)?,
        foreseen: HostBuffer::new(device, words)?,
        ready: HostBuffer::new(device, layers.len())?,
        cold: HostBuffer::new(device, tokens * hidden)?,
        done: HostBuffer::new(device, layers.len())?,
        gave_up: HostBuffer::new(device, 1)?,
        steps: 0,
        computed: 0,
    })
}
