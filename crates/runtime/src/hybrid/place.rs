//! Putting a bundle's weights on a device, as its plan says.

use std::sync::Arc;

use powerinfer_artifact::{
    Hint,
    plan::{self, Score},
};
use powerinfer_bundle::{Layout, StoredLinear};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{
        Buffer, Device, DeviceError, Gpu, GpuLinear, GpuMatrix, HostBuffer, NeuronCounts,
        Predictor, SignBits,
    },
};
use powerinfer_model::{ModelConfig, Positions};
use powerinfer_tensor::CacheFormat;

use super::{
    DeviceChoice, DeviceFfn, DeviceHead, DeviceLayer, Hybrid, Many, State,
    streaming::{self, Piece},
    upload::{OfBundle, Upload, upload_stored},
};
use crate::{ActivationFormat, RuntimeError, model::Model, selector::Selector};

impl Upload<'_> {
    fn choice(
        &self,
        chosen: &Selector<'_>,
        reads_residual: bool,
        is_here: bool,
        hot: usize,
    ) -> Result<DeviceChoice, RuntimeError> {
        Ok(match chosen {
            Selector::Dense => DeviceChoice::Every,
            Selector::Exact => DeviceChoice::NotZero,
            Selector::Predicted(_) | Selector::SignBit(_) | Selector::Listed(_) if !is_here => {
                DeviceChoice::ByHost
            }
            Selector::Listed(_) => DeviceChoice::ByHost,
            Selector::Predicted(found) => DeviceChoice::Predicted {
                middle: Buffer::new(self.device, found.a.rows())?,
                predictor: Box::new(Predictor {
                    a: GpuLinear::upload(self.device, &found.a, None)?,
                    b_transposed: GpuMatrix::upload(self.device, &found.units)?,
                    b_scales: match found.scales {
                        [] => None,
                        scales => Some(self.floats(scales)?),
                    },
                    bias: self.floats(found.bias)?,
                    threshold: found.threshold,
                }),
                reads_residual,
            },
            Selector::SignBit(found) => {
                let words: Vec<u64> = found.signs.words().collect();
                DeviceChoice::BySigns(SignBits {
                    signs: Buffer::from_slice(self.device, &words)?,
                    neurons: found.signs.rows(),
                    columns: found.signs.columns(),
                    min_agreements: found.agreements,
                })
            }
            Selector::Threshold(scoring) => {
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
    pub(crate) fn place(device: Arc<dyn Device>, model: &Model) -> Result<Self, RuntimeError> {
        let (bundle, weights) = (&model.bundle, &model.weights);
        let context = model.context_limit();
        let (config, plan) = (bundle.config(), bundle.plan());
        let file = bundle.weights();
        let upload = Upload {
            device: &device,
            config,
        };
        let slopes = upload.slopes()?;
        let mut layers = Vec::new();
        for (index, (stored, plan)) in weights.layers.iter().zip(&plan.layers).enumerate() {
            let has_attention = plan.attention == plan::Device::Gpu;
            let has_cache = has_attention && plan.kv == plan::Device::Gpu;
            let unsupported = |what: &'static str, hint: Hint| RuntimeError::OnDevice {
                folder: bundle.folder().to_owned(),
                layer: index,
                what,
                hint,
            };
            let by_input = |linear: &StoredLinear| linear.layout == Layout::ByInput;
            if (has_attention && by_input(&stored.query))
                || (plan.hot_count > 0 && by_input(&stored.gate))
            {
                return Err(unsupported("projections by input", Hint::NoInputSparsity));
            }
            if has_cache && bundle.plan().budget.kv_cache == CacheFormat::Q8_0 {
                return Err(unsupported(
                    "a KV cache of 8 bits",
                    Hint::HalfPrecisionKvCache,
                ));
            }
            let of_bundle = OfBundle {
                file,
                layer: stored,
            };
            let attention = || upload.attention(&of_bundle, index, slopes.as_ref());
            let (selectors, policy) = (&model.selectors[index], model.policies[index]);
            let hot = plan.hot_count;
            let ffn = || {
                let chosen = selectors.selector(policy, bundle.predictors());
                let reads_residual = selectors.reads_residual(policy);
                let is_here = plan.predictor == Some(plan::Device::Gpu);
                Ok::<_, RuntimeError>(DeviceFfn {
                    norm: upload.ffn_norm(&of_bundle)?,
                    ffn: upload.ffn(&of_bundle, hot)?,
                    choice: upload.choice(&chosen, reads_residual, is_here, hot)?,
                    offset: chosen
                        .offset()
                        .map(|offset| upload.floats(offset))
                        .transpose()?,
                })
            };
            let streams_from = streaming::least_tokens(bundle.plan(), plan, config)
                .filter(|_| !by_input(&stored.gate));
            let has_ffn = hot > 0 || streams_from.is_some();
            layers.push(DeviceLayer {
                attention: has_attention.then(attention).transpose()?,
                has_cache,
                neurons: config.ffn_size,
                streams_from,
                ffn: has_ffn.then(ffn).transpose()?,
                norms_after: match has_attention || has_ffn {
                    true => upload.norms_after(&of_bundle)?,
                    false => None,
                },
            });
        }
        let head = match plan.head {
            plan::Device::Gpu => Some(DeviceHead {
                norm: weights
                    .final_norm
                    .as_ref()
                    .map(|norm| upload.norm(&norm.weight, norm.bias.as_deref()))
                    .transpose()?,
                project: match &weights.project_out {
                    Some(project) => {
                        let linear = upload_stored(&device, file, project)?;
                        let out = Buffer::new(&device, linear.matrix.rows())?;
                        Some((linear, out))
                    }
                    None => None,
                },
                head: upload_stored(&device, file, &weights.head)?,
                logits: Buffer::new(&device, config.vocabulary_size)?,
                token: Buffer::new(&device, 1)?,
                scratch: Buffer::new(&device, Gpu::ARG_MAX_WORDS)?,
            }),
            plan::Device::Cpu => None,
        };
        let gpu = Gpu::new(
            Arc::clone(&device),
            match model.threads.activations() {
                ActivationFormat::F32 => Arithmetic::Float,
                ActivationFormat::Int8 => Arithmetic::Integer,
            },
        );
        Ok(Self {
            state: state(&gpu, config, &layers, context, 1)?,
            prompt: None,
            tokens: 1,
            layer: 0,
            is_whole: false,
            times: None,
            hidden_on_device: false,
            segments: super::GraphSegments::new(gpu.device()),
            gpu,
            layers,
            head,
            cache_format: bundle.plan().budget.kv_cache,
            context,
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
        DeviceChoice::Predicted { predictor, .. } => predictor.b_transposed.rows(),
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
            halves: gpu.new_f16_buffer(tokens, hidden.max(queries))?,
            products: gpu.new_f16_buffer(tokens, wide)?,
            up: floats(wide)?,
            middle: floats(rank.max().unwrap_or(0))?,
            pieces: match streamed.next() {
                None => None,
                Some(ffn) => {
                    let piece = |number| Piece::new(device, number, &ffn.ffn, most_cold);
                    Some([piece(0)?, piece(1)?])
                }
            },
        }),
    };
    // Sums of rows go another way for several tokens.
    let downs = ffns().map(|ffn| &ffn.ffn.down).filter(|_| tokens == 1);
    let size = config.head_size;
    // One token alone is shared between more blocks than one of several.
    let partial = [1, tokens]
        .map(|tokens| gpu.attention_scratch_len(tokens, heads, kv_heads, size, context))
        .into_iter()
        .max();
    Ok(State {
        many,
        hidden: floats(hidden)?,
        residual: floats(hidden)?,
        query: floats(queries)?,
        key: floats(keys)?,
        value: floats(keys)?,
        mixed: floats(queries)?,
        rotations: Buffer::new(device, tokens * pairs)?,
        position: Buffer::new(device, 1)?,
        step: Buffer::new(device, 1)?,
        attention_partial: Buffer::new(device, partial.unwrap_or(0))?,
        attention_counters: Buffer::new(device, tokens * kv_heads)?,
        mask: Buffer::new(device, words)?,
        products: floats(wide)?,
        down: gpu.down_scratch(downs)?,
        input: HostBuffer::new(device, tokens * hidden)?,
        predicted: HostBuffer::new(device, words)?,
        ready: HostBuffer::new(device, layers.len())?,
        cold: HostBuffer::new(device, tokens * hidden)?,
        done: HostBuffer::new(device, layers.len())?,
        timed_out: HostBuffer::new(device, 1)?,
        steps: 0,
        counts: NeuronCounts::default(),
    })
}
