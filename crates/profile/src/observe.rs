//! A layer under observation, on the CPU or on a device.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use candle_core::{Device as CandleDevice, Tensor};
use powerinfer_gpu::{LayerWeights, ObservedLayer};
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_reference::{FfnObservation, FfnObserver, Layer, with_values};

use crate::{
    LayerActivity, ProfileError, Traces,
    activity::{LOCALITY_WINDOWS, Reuse, in_units},
    calibration::Sequence,
    samples::{Row, Sampler, Sampling},
    tally::{Counter, SourceHalf, Tally},
};

/// Parameters of an observation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observation {
    /// Number of sources, which are counted separately.
    pub(crate) sources: usize,
    /// Tokens of the longest sequence.
    pub(crate) longest: usize,
    /// Sampling of each part.
    pub(crate) sampling: [Sampling; 2],
}

/// A layer with its counts and samples.
pub(crate) enum InstrumentedLayer {
    /// On the CPU.
    OnCpu(Box<(Layer, Observer)>),
    /// On a device, which also counts.
    OnDevice(Box<(ObservedLayer, Sampler, Tally)>),
}

impl InstrumentedLayer {
    /// Loads layer `index` of `checkpoint` on the CPU, or uploads its weights to a device.
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        index: usize,
        device: Option<(&Arc<dyn Device>, LayerWeights)>,
        observation: Observation,
    ) -> Result<Self, ProfileError> {
        let config = checkpoint.config();
        let (neurons, sources) = (config.ffn_size, observation.sources);
        let sampler = |norms| {
            let zeros = config.activation.has_exact_zeros();
            Sampler::new(norms, zeros, config.hidden_size, observation.sampling)
        };
        Ok(match device {
            None => {
                let layer = Layer::load(checkpoint, index)?;
                let observer = Observer {
                    sampler: sampler(layer.contribution_norms()?),
                    counter: Counter::new(
                        neurons,
                        sources,
                        config.experts.as_ref().map(|experts| experts.count),
                    ),
                    elapsed: Duration::ZERO,
                };
                Self::OnCpu(Box::new((layer, observer)))
            }
            Some((device, weights)) => {
                let (longest, parts) = (observation.longest, 2 * sources);
                let windows = LOCALITY_WINDOWS;
                let layer =
                    ObservedLayer::new(device, config, index, &weights, longest, parts, windows)?;
                let sampler = sampler(layer.contribution_norms().to_vec());
                Self::OnDevice(Box::new((layer, sampler, Tally::new(neurons, sources))))
            }
        })
    }

    /// Runs a sequence, `[tokens, hidden]`, through the layer; returns its output.
    pub(crate) fn forward(
        &mut self,
        sequence: &Sequence,
        hidden: Vec<f32>,
    ) -> Result<Vec<f32>, ProfileError> {
        let (tokens, place) = (sequence.tokens.len(), SourceHalf::new(sequence));
        match self {
            Self::OnCpu(here) => {
                let (layer, observer) = &mut **here;
                observer.sampler.begin(sequence.part);
                observer.counter.begin(place);
                let shape = (tokens, hidden.len() / tokens.max(1));
                let hidden = Tensor::from_vec(hidden, shape, &CandleDevice::Cpu)?;
                let output = layer.forward(&hidden, observer)?;
                Ok(output.flatten_all()?.to_vec1()?)
            }
            Self::OnDevice(here) => {
                let (layer, sampler, tally) = &mut **here;
                sampler.begin(sequence.part);
                let kept: Vec<bool> = (0..tokens).map(|token| sampler.wants(token)).collect();
                let part = 2 * place.source + place.half;
                let output = layer.forward(
                    &hidden,
                    part,
                    |token| kept[token],
                    |seen| {
                        sampler.keep(Row {
                            residual: seen.residual,
                            input: seen.input,
                            product: seen.product,
                        });
                    },
                )?;
                sampler.advance(tokens);
                tally.counts[place.source][place.half].tokens += tokens as u64;
                Ok(output)
            }
        }
    }

    /// Time spent on observation; 0 on a device, where it is part of the forward pass.
    pub(crate) fn observing(&self) -> Duration {
        match self {
            Self::OnCpu(here) => here.1.elapsed,
            Self::OnDevice(_) => Duration::ZERO,
        }
    }

    /// Activity and samples of layer `index`.
    pub(crate) fn finish(self, index: usize) -> Result<(LayerActivity, Traces), ProfileError> {
        let (sampler, activity) = match self {
            Self::OnCpu(here) => {
                let Observer {
                    sampler, counter, ..
                } = here.1;
                let activity = counter.activity(&sampler.contribution_norms);
                (sampler, activity)
            }
            Self::OnDevice(here) => {
                let (layer, sampler, mut tally) = *here;
                collect(&layer, &mut tally)?;
                let activity = tally.activity(&sampler.contribution_norms);
                (sampler, activity)
            }
        };
        let activity = activity.ok_or(ProfileError::NotFinite { layer: index })?;
        Ok((activity, sampler.traces))
    }
}

/// Copies the counts of a device to the host.
fn collect(layer: &ObservedLayer, tally: &mut Tally) -> Result<(), ProfileError> {
    let found = layer.counts();
    for (source, halves) in tally.counts.iter_mut().enumerate() {
        for (half, counts) in halves.iter_mut().enumerate() {
            let active = found.active(2 * source + half)?;
            counts.active = active.into_iter().map(u64::from).collect();
        }
    }
    tally.magnitude_sum = found.magnitude()?.into_iter().map(in_units).collect();
    tally.locality = found.reuse()?.map(|reuse| Reuse {
        reused: reuse.reused,
        active: reuse.active,
    });
    tally.is_finite = found.is_finite()?;
    Ok(())
}

/// Counts and samples a layer on the CPU.
pub(crate) struct Observer {
    sampler: Sampler,
    counter: Counter,
    /// Time spent on observation.
    elapsed: Duration,
}

impl FfnObserver for Observer {
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        let started = Instant::now();
        let (tokens, hidden) = observation.input.dims2()?;
        let neurons = self.sampler.contribution_norms.len();
        if let Some(routing) = observation.routing {
            for token in 0..tokens {
                let weights = routing.iter().map(|weights| weights[token]);
                self.counter.count_experts(weights);
            }
        }
        with_values(observation.product, |products| {
            with_values(observation.input, |inputs| {
                with_values(observation.residual, |residuals| {
                    for token in 0..tokens {
                        let row = Row {
                            residual: &residuals[token * hidden..][..hidden],
                            input: &inputs[token * hidden..][..hidden],
                            product: &products[token * neurons..][..neurons],
                        };
                        self.counter.count(row.product);
                        if self.sampler.wants(token) {
                            self.sampler.keep(row);
                        }
                    }
                })
            })
        })???;
        self.sampler.advance(tokens);
        self.elapsed += started.elapsed();
        Ok(None)
    }
}
