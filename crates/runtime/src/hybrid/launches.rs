//! What the device does for a layer, step by step, and what both sides hand over to each other.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use powerinfer_kernels::cuda::{
    Attention, Buffer, ColdSum, DeviceError, DownAddends, DownScratch, F16Buffer, Ffn, Gpu,
    GpuCache, GpuNorm, HostMirror, NeuronCounts, NeuronFilter, PredictedMask, TokenMasks,
};

use super::{DeviceChoice, DeviceFfn, Hybrid, times::Stopwatch};

/// How long the host waits for the device's half of a layer before it gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a kernel waits for the host where the driver stops kernels that run for seconds.
const BRIEF_PATIENCE: Duration = Duration::from_secs(1);

/// How often it looks meanwhile whether the device is still there.
const LOOK: Duration = Duration::from_millis(50);

/// Which vector of the device the FFN sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Hidden,
    Residual,
}

impl super::DeviceLayer {
    /// Whether some neurons are on the device for good.
    pub(super) fn has_neurons(&self) -> bool {
        let ffn = self.ffn.as_ref();
        ffn.is_some_and(|ffn| ffn.ffn.down.rows() > 0)
    }

    /// Whether the host has to predict, and so to have the hidden state.
    pub(super) fn needs_host_input(&self) -> bool {
        let choice = self.ffn.as_ref().map(|ffn| &ffn.choice);
        matches!(choice, Some(DeviceChoice::ByHost))
    }

    /// Whether neurons are predicted before any is read.
    pub(super) fn predicts(&self) -> bool {
        let choice = self.ffn.as_ref().map(|ffn| &ffn.choice);
        matches!(
            choice,
            Some(DeviceChoice::ByHost | DeviceChoice::Predicted { .. } | DeviceChoice::BySigns(_))
        )
    }
}

impl DeviceFfn {
    /// What decides, once a product is known, which neurons are computed.
    pub(super) fn rule(&self) -> NeuronFilter<'_> {
        match &self.choice {
            DeviceChoice::Every => NeuronFilter::All,
            DeviceChoice::ByGate(threshold, None) => NeuronFilter::GateThreshold(*threshold),
            DeviceChoice::ByGate(threshold, Some(scale)) => {
                NeuronFilter::ScaledGateThreshold(*threshold, scale)
            }
            DeviceChoice::ByContribution {
                threshold,
                scale,
                centre,
            } => NeuronFilter::ContributionThreshold {
                threshold: *threshold,
                scale,
                centre: centre.as_ref(),
            },
            _ => NeuronFilter::NonZeroGate,
        }
    }
}

/// What rows of down are multiplied by for some tokens, from their input as halves; the products of gate and up are
/// kept on the way.
pub(super) fn products_of_many(
    gpu: &Gpu,
    ffn: &Ffn,
    rule: NeuronFilter<'_>,
    chosen: Option<TokenMasks<'_>>,
    input: &F16Buffer,
    (gate, up, out): (&mut Buffer<f32>, &mut Buffer<f32>, &mut F16Buffer),
    scratch: &mut DownScratch,
) -> Result<(), DeviceError> {
    let count = input.tokens() * ffn.down.rows();
    gate.set_len(count);
    if count == 0 {
        return out.clear(input.tokens());
    }
    gpu.gemm(input, &ffn.gate, gate, false)?;
    let up = match &ffn.up {
        None => None,
        Some(linear) => {
            up.set_len(count);
            gpu.gemm(input, linear, up, false)?;
            Some(&*up)
        }
    };
    gpu.activate_gate_up(ffn, rule, gate, up, chosen, out, scratch)
}

impl Hybrid {
    /// Whether FFN neurons of layer `index` run on the device for the tokens that run.
    pub(super) fn has_ffn(&self, index: usize) -> bool {
        self.layers[index].has_neurons() || self.streams(index)
    }

    /// Ends what is launched at once, for the host is going to look at what it gives.
    pub(super) fn end_segment(&mut self) -> Result<(), DeviceError> {
        self.segments.end(self.layer)
    }

    /// Whether one recording can have all that the device does for a token: nothing of it waits for the host but
    /// sums of cold neurons, for which the kernels that add them wait.
    pub(super) fn can_run_whole(&mut self) -> Result<bool, DeviceError> {
        let is_there = |layer: &super::DeviceLayer| {
            layer.has_cache && layer.has_neurons() && !layer.needs_host_input()
        };
        Ok(self.tokens == 1
            && self.times.is_none()
            && self.layers.iter().all(is_there)
            && self.segments.are_recorded()?)
    }

    /// Says that what the host's neurons of layer `index` add is there.
    pub(super) fn sync(&self, index: usize) {
        let state = &self.state;
        state.done.words()[index].store(state.steps, Ordering::Release);
    }

    /// Says to kernels of this token that they need not wait for the host any more.
    pub(super) fn give_up(&self) {
        let state = &self.state;
        state.timed_out.words()[0].store(state.steps, Ordering::Release);
    }

    /// Fails where a kernel has waited for the host for too long, and gone on without it.
    pub(super) fn check_syncs(&self) -> Result<(), DeviceError> {
        let state = &self.state;
        match state.timed_out.words()[0].load(Ordering::Acquire) == state.steps {
            true => Err(self.too_late("the host's part of a layer")),
            false => Ok(()),
        }
    }

    pub(super) fn too_late(&self, what: &str) -> DeviceError {
        DeviceError::Failed {
            device: self.device().info().name.clone(),
            doing: "handing a layer over",
            reason: format!("{what} did not come within {} s", PATIENCE.as_secs()),
        }
    }

    /// A stopwatch, which runs where times are taken; the host has read so many bytes by now.
    pub(super) fn watch(&self, bytes: u64) -> Stopwatch {
        Stopwatch::start(self.times.is_some(), bytes)
    }

    /// The host has worked for the layer since `watch` was started, and has read so many bytes by now.
    pub(super) fn add_host(&mut self, watch: Stopwatch, bytes: u64) {
        if let Some(times) = &mut self.times {
            times.layers[self.layer].host += watch.elapsed();
            times.host_bytes += watch.bytes_since(bytes);
        }
    }

    /// Adds what tokens took, from position `first` on, of which the host computed `cold` neurons.
    pub(super) fn add_times(
        &mut self,
        first: usize,
        counts: NeuronCounts,
        cold: u64,
    ) -> Result<(), DeviceError> {
        let bytes = self.bytes_read(first, counts);
        let computed = u64::from(counts.down_rows);
        let Some(times) = &mut self.times else {
            return Ok(());
        };
        times.tokens += self.tokens as u64;
        times.neurons_on_device += computed;
        times.neurons += computed + cold;
        times.device_bytes += bytes;
        for (layer, seconds) in self.segments.take_times()? {
            times.layers[layer].device += Duration::from_secs_f64(seconds.max(0.0));
        }
        Ok(())
    }

    /// From now on runs so many tokens at once, with the vectors of one or those of a prompt.
    pub(super) fn turn_to_prompts(&mut self, tokens: usize) {
        let prompt = self.prompt.as_mut().expect("room for several tokens");
        std::mem::swap(&mut self.state, prompt);
        self.segments.pause(tokens > 1);
        self.set_tokens(tokens);
    }

    /// The vectors that are there hold so many tokens from now on.
    pub(super) fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
        let state = &mut self.state;
        let most = state.many.as_ref().map_or(1, |many| many.most);
        for buffer in [
            &mut state.hidden,
            &mut state.residual,
            &mut state.query,
            &mut state.key,
            &mut state.value,
            &mut state.mixed,
        ] {
            buffer.set_len(buffer.capacity() / most * tokens);
        }
        let (mask, rotations) = (&mut state.mask, &mut state.rotations);
        mask.set_len(mask.capacity() / most * tokens);
        rotations.set_len(rotations.capacity() / most * tokens);
    }

    /// Begins a token, or some that follow each other.
    pub(super) fn start(
        &mut self,
        position: usize,
        rotations: &[[f32; 2]],
    ) -> Result<(), DeviceError> {
        let state = &mut self.state;
        state.steps = state.steps.wrapping_add(1).max(1);
        state.step.write(&[state.steps])?;
        state.position.write(&[position as u32])?;
        state.rotations.write(rotations)
    }

    /// The hidden state goes to the device, if it is not there.
    pub(super) fn bring_to_device(&mut self, hidden: &[f32]) -> Result<(), DeviceError> {
        if !self.hidden_on_device {
            self.segments.end(self.layer)?;
            self.state.hidden.write(hidden)?;
            self.hidden_on_device = true;
        }
        Ok(())
    }

    /// The hidden state comes to the host, if it is not there.
    pub(super) fn bring_to_host(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        if self.hidden_on_device {
            self.segments.end(self.layer)?;
            let watch = self.watch(0);
            self.state.hidden.read(hidden)?;
            self.hidden_on_device = false;
            if let Some(times) = &mut self.times {
                times.layers[self.layer].waiting += watch.elapsed();
            }
        }
        Ok(())
    }

    /// A copy of the hidden state, which is on the device.
    pub(super) fn read_hidden(&mut self) -> Result<Vec<f32>, DeviceError> {
        self.segments.end(self.layer)?;
        self.state.hidden.to_vec()
    }

    /// Keeps the hidden state for an FFN that runs beside attention.
    pub(super) fn keep_residual(&mut self) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let state = &mut self.state;
        state.residual.copy_from(&state.hidden)
    }

    pub(super) fn project_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let attention = self.layers[index]
            .attention
            .as_ref()
            .expect("attention is here");
        let state = &mut self.state;
        let mut parts = [
            (&attention.query, &mut state.query),
            (&attention.key, &mut state.key),
            (&attention.value, &mut state.value),
        ];
        if let Some(many) = &mut state.many {
            let (norm, format) = (attention.norm.as_ref(), attention.query.matrix.format());
            let halves = &mut many.halves;
            self.gpu
                .to_f16(&state.hidden, self.tokens, norm, format, halves, None)?;
            for (linear, out) in parts {
                self.gpu.gemm(&many.halves, linear, out, false)?;
            }
            return Ok(());
        }
        self.gpu
            .project(&state.hidden, attention.norm.as_ref(), &mut parts, false)
    }

    pub(super) fn read_projections(&mut self) -> Result<[Vec<f32>; 3], DeviceError> {
        self.segments.end(self.layer)?;
        let state = &self.state;
        Ok([
            state.query.to_vec()?,
            state.key.to_vec()?,
            state.value.to_vec()?,
        ])
    }

    pub(super) fn attend(&mut self, index: usize, cache: &mut GpuCache) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let attention = self.layers[index]
            .attention
            .as_ref()
            .expect("attention is here");
        let state = &mut self.state;
        let what = Attention {
            tokens: self.tokens,
            query: &state.query,
            key: &state.key,
            value: &state.value,
            norms: attention.head_norms.as_ref(),
            sin_cos: &state.rotations,
            alibi_slopes: attention.slopes.as_deref(),
            window: attention.window,
            position: &state.position,
        };
        let (partial, counters) = (&mut state.attention_partial, &mut state.attention_counters);
        self.gpu
            .attend(&what, cache, partial, counters, &mut state.mixed)
    }

    /// Adds what attention gives to the hidden state, and norms it where norms come after.
    pub(super) fn add_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let attention = layer.attention.as_ref().expect("attention is here");
        let state = &mut self.state;
        let output = &attention.output;
        if let Some(many) = &mut state.many {
            let (halves, format) = (&mut many.halves, output.matrix.format());
            self.gpu
                .to_f16(&state.mixed, self.tokens, None, format, halves, None)?;
            self.gpu
                .gemm(&many.halves, output, &mut state.hidden, true)?;
        } else {
            self.gpu
                .project(&state.mixed, None, &mut [(output, &mut state.hidden)], true)?;
        }
        if let Some([norm, _]) = &layer.norms_after {
            self.gpu.norm(&mut state.hidden, norm)?;
        }
        Ok(())
    }

    /// Asks the device which neurons to look at, where something is asked.
    pub(super) fn predict(
        &mut self,
        index: usize,
        sees: Source,
        cold: bool,
    ) -> Result<(), DeviceError> {
        if !self.layers[index].predicts() || !self.segments.wants_launch()? {
            return Ok(());
        }
        let DeviceFfn {
            norm, ffn, choice, ..
        } = self.layers[index].ffn.as_mut().expect("neurons are here");
        let state = &mut self.state;
        let x = match sees {
            Source::Hidden => &state.hidden,
            Source::Residual => &state.residual,
        };
        let mut predicted = PredictedMask {
            mask: &mut state.mask,
            host_mask: cold.then_some(&state.predicted),
            activations: &mut state.products,
            hot_count: match state.many {
                None => ffn.gate.matrix.rows(),
                Some(_) => 0,
            },
        };
        match choice {
            DeviceChoice::Predicted {
                predictor,
                middle,
                reads_residual,
            } => {
                let norm: Option<&GpuNorm> = norm.as_ref().filter(|_| !*reads_residual);
                let middle = match &mut state.many {
                    None => middle,
                    Some(many) => {
                        many.middle
                            .set_len(self.tokens * predictor.b_transposed.rows());
                        &mut many.middle
                    }
                };
                self.gpu.predict(x, norm, predictor, middle, &mut predicted)
            }
            DeviceChoice::BySigns(signs) => {
                self.gpu
                    .predict_by_signs(x, norm.as_ref(), signs, &mut predicted)
            }
            _ => Ok(()),
        }
    }

    /// Takes over whom the host predicts.
    pub(super) fn set_predicted(&mut self, index: usize, words: &[u32]) -> Result<(), DeviceError> {
        self.segments.end(self.layer)?;
        let hot = self.layers[index]
            .ffn
            .as_ref()
            .map_or(0, |ffn| ffn.ffn.gate.matrix.rows());
        let state = &mut self.state;
        state.mask.write(words)?;
        for (place, word) in state.predicted.words().iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        match state.many {
            None => state.products.write(&vec![0.0; hot]),
            Some(_) => Ok(()),
        }
    }

    /// Launches gate and up; where there are cold neurons, the host gets their input.
    pub(super) fn gate_up(
        &mut self,
        index: usize,
        sees: Source,
        cold: bool,
    ) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let predicts = layer.predicts();
        let found = layer.ffn.as_ref().expect("neurons are here");
        let state = &mut self.state;
        let x = match sees {
            Source::Hidden => &state.hidden,
            Source::Residual => &state.residual,
        };
        let rule = found.rule();
        let host = HostMirror {
            input: &state.input,
            flags: &state.ready,
            flag: index,
            step: &state.step,
        };
        let mask = predicts.then_some(&state.mask);
        if let Some(many) = &mut state.many {
            let host = cold.then_some(host);
            let (norm, format) = (found.norm.as_ref(), found.ffn.gate.matrix.format());
            self.gpu
                .to_f16(x, self.tokens, norm, format, &mut many.halves, host)?;
            if let Some(host) = host {
                self.gpu.signal_host(host)?;
            }
            let chosen = mask.map(|mask| TokenMasks {
                mask,
                neurons: layer.neurons,
                first: 0,
            });
            let products = (&mut state.products, &mut many.up, &mut many.products);
            let (gpu, scratch) = (&self.gpu, &mut state.down);
            return products_of_many(
                gpu,
                &found.ffn,
                rule,
                chosen,
                &many.halves,
                products,
                scratch,
            );
        }
        let products = &mut state.products;
        self.gpu.gate_up(
            x,
            found.norm.as_ref(),
            &found.ffn,
            rule,
            mask,
            products,
            cold.then_some(host),
            &mut state.down,
        )
    }

    /// Waits until the host can read the input of layer `index`.
    pub(super) fn wait_for_input(&mut self, index: usize) -> Result<(), DeviceError> {
        let watch = self.watch(0);
        let flag = &self.state.ready.words()[index];
        let (mut since, mut spins, mut look) = (None, 0u32, LOOK);
        while flag.load(Ordering::Acquire) != self.state.steps {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(4096) {
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() > look {
                    look = since.elapsed() + LOOK;
                    self.device().check()?;
                }
                if since.elapsed() > PATIENCE {
                    self.give_up();
                    self.device().synchronise()?;
                    return Err(self.too_late("the device's part of a layer"));
                }
            }
        }
        if let Some(times) = &mut self.times {
            times.layers[index].waiting += watch.elapsed();
        }
        Ok(())
    }

    pub(super) fn read_mask(&self) -> Vec<u32> {
        let words = self
            .state
            .predicted
            .words()
            .iter()
            .take(self.state.mask.len());
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Adds what both sides' neurons contribute.
    pub(super) fn down(&mut self, index: usize, cold: bool) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are here");
        let state = &mut self.state;
        if let Some(many) = &state.many {
            let beside = DownAddends {
                offset: found.offset.as_ref(),
                cold: cold.then_some(&state.cold),
            };
            self.gpu
                .gemm_down(&many.products, &found.ffn, beside, &mut state.hidden)?;
            return Ok(());
        }
        let share = ColdSum {
            sum: &state.cold,
            flag: self.is_whole.then_some((&state.done, index)),
            step: &state.step,
            timed_out: &state.timed_out,
            timeout_nanoseconds: match self.gpu.device().info().has_watchdog {
                true => BRIEF_PATIENCE.as_nanos() as u64,
                false => PATIENCE.as_nanos() as u64,
            },
        };
        self.gpu.down(
            &found.ffn,
            &state.products,
            found.offset.as_ref(),
            cold.then_some(share),
            &mut state.down,
            &mut state.hidden,
        )
    }

    /// Norms what the FFN leaves, where norms come after.
    pub(super) fn norm_after(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some([_, norm]) = &self.layers[index].norms_after else {
            return Ok(());
        };
        match self.segments.wants_launch()? {
            true => self.gpu.norm(&mut self.state.hidden, norm),
            false => Ok(()),
        }
    }

    /// Neurons that the device worked on since this was asked last.
    pub(super) fn take_counts(&mut self) -> Result<NeuronCounts, DeviceError> {
        let now = self.state.down.counts()?;
        Ok(now.since(std::mem::replace(&mut self.state.counts, now)))
    }
}
