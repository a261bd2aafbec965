//! Steps of a layer on the device, in the order of the forward pass, and the exchange with the host.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use powerinfer_kernels::cuda::{
    Attention, Buffer, ColdSum, DeviceError, DownAddends, DownScratch, F16Buffer, Ffn, Gpu,
    GpuLinear, GpuNorm, HostMirror, NeuronFilter, PredictedMask, Routing, SplitSums, TokenMasks,
};

use crate::{
    CopiedParts, DeviceFfn, DeviceModel, DeviceSelector, copied_parts::attention_of,
    experts::ExpertProducts, head::Embedded, state::pieces,
};

/// How long the host waits for the device before it gives up.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Interval at which the host checks that the device still works while waiting for it.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Vector that the FFN and its predictor read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FfnInput {
    /// The hidden state after attention.
    Hidden,
    /// The hidden state before attention, in parallel blocks.
    Residual,
}

/// Computes the factors of the rows of down for the neurons `rows` of several tokens from their input in 16 bits; the products of
/// gate and up are kept in `gate` and `up`.
pub(crate) fn activate_batch(
    gpu: &Gpu,
    (ffn, rows): (&Ffn, &Range<usize>),
    (filter, routing): (NeuronFilter<'_>, Option<Routing<'_>>),
    masks: Option<TokenMasks<'_>>,
    (input, sums): (&F16Buffer, &SplitSums),
    (gate, up, out): (&mut Buffer<f32>, &mut Buffer<f32>, &mut F16Buffer),
    scratch: &mut DownScratch,
) -> Result<(), DeviceError> {
    let count = input.tokens() * rows.len();
    gate.set_len(count);
    if count == 0 {
        return out.clear(input.tokens());
    }
    gpu.gemm_rows(input, &ffn.gate, rows, sums, gate, false)?;
    let up = match &ffn.up {
        None => None,
        Some(linear) => {
            up.set_len(count);
            gpu.gemm_rows(input, linear, rows, sums, up, false)?;
            Some(&*up)
        }
    };
    gpu.activate_gate_up(ffn, rows, filter, routing, gate, up, masks, out, scratch)
}

/// Hidden state and host memory.
///
/// # Errors
///
/// All methods return an error if the device fails.
#[expect(clippy::missing_errors_doc, reason = "stated once for all methods")]
impl DeviceModel {
    /// Copies the hidden state of the tokens that run to the device.
    pub fn write_hidden(&mut self, hidden: &[f32]) -> Result<(), DeviceError> {
        self.end_segment()?;
        self.embedded = Embedded::No;
        self.state.hidden.write(hidden)
    }

    /// Copies the hidden state of the tokens that run to the host.
    pub fn read_hidden(&mut self, hidden: &mut [f32]) -> Result<(), DeviceError> {
        self.end_segment()?;
        self.state.hidden.read(hidden)
    }

    /// Copies the FFN's input of a parallel block, which the host has, to the device.
    pub fn write_residual(&mut self, residual: &[f32]) -> Result<(), DeviceError> {
        self.end_segment()?;
        self.state.residual.write(residual)
    }

    /// Copies queries, keys and values to the host, where the KV cache is.
    pub fn read_projections(&mut self) -> Result<[Vec<f32>; 3], DeviceError> {
        self.end_segment()?;
        let state = &self.state;
        Ok([
            state.query.to_vec()?,
            state.key.to_vec()?,
            state.value.to_vec()?,
        ])
    }

    /// Copies keys and values, `[tokens, kv_heads, head_size]` each, to the host. Head norms and rotation are not yet applied.
    pub fn read_keys_and_values(&mut self) -> Result<[Vec<f32>; 2], DeviceError> {
        self.end_segment()?;
        Ok([self.state.key.to_vec()?, self.state.value.to_vec()?])
    }

    /// Copies the weighted sums of values, which the host has computed, to the device.
    pub fn write_mixed(&mut self, mixed: &[f32]) -> Result<(), DeviceError> {
        self.end_segment()?;
        self.state.mixed.write(mixed)
    }

    /// Copies neurons predicted on the host, 32 per word and `[tokens, ⌈neurons / 32⌉]`, to the device.
    pub fn set_predicted(&mut self, index: usize, words: &[u32]) -> Result<(), DeviceError> {
        self.end_segment()?;
        let hot = self.layers[index].hot_count();
        let state = &mut self.state;
        state.mask.write(words)?;
        for (place, word) in state.predicted.words().iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        match state.prompt {
            None => state.products.write_at(0, &vec![0.0; self.tokens * hot]),
            Some(_) => Ok(()),
        }
    }

    /// Waits until the host can read the FFN's input in layer `index`.
    pub fn wait_for_input(&mut self, index: usize) -> Result<(), DeviceError> {
        let flag = &self.state.ready.words()[index];
        let (mut since, mut spins, mut check) = (None, 0u32, CHECK_INTERVAL);
        while flag.load(Ordering::Acquire) != self.state.steps {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(4096) {
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() > check {
                    check = since.elapsed() + CHECK_INTERVAL;
                    self.device().check()?;
                }
                if since.elapsed() > TIMEOUT {
                    self.release_waiting_kernels();
                    self.device().synchronise()?;
                    return Err(DeviceError::Failed {
                        device: self.device().info().name.clone(),
                        doing: "computing its part of a layer",
                        reason: format!("it did not finish within {TIMEOUT:?}"),
                    });
                }
            }
        }
        Ok(())
    }

    /// Reads the FFN's input that [`wait_for_input`](Self::wait_for_input) has waited for.
    pub fn read_input(&self, input: &mut [f32]) {
        self.state.input.read_f32(input);
    }

    /// Mask of the neurons that the device's routers and predictors leave, 32 per word; written before the FFN's input.
    pub fn mask_words(&self) -> Vec<u32> {
        let words = self.state.predicted.words().iter();
        let words = words.take(self.state.mask.len());
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Writes the sums of the cold neurons, `[tokens, hidden]`, for the device to add.
    pub fn write_cold_sum(&self, sum: &[f32]) {
        self.state.cold.write_f32(sum);
    }

    /// Signals that the cold sum of layer `index` is complete, to a kernel that waits for it.
    pub fn signal_cold_sum(&self, index: usize) {
        let state = &self.state;
        state.done.words()[index].store(state.steps, Ordering::Release);
    }

    /// Tells the kernels of this pass to stop waiting for the host.
    pub fn release_waiting_kernels(&self) {
        let state = &self.state;
        state.timed_out.words()[0].store(state.steps, Ordering::Release);
    }

    /// Checks that no kernel of the pass stopped waiting for the host.
    pub fn check_syncs(&self) -> Result<(), DeviceError> {
        let state = &self.state;
        if state.timed_out.words()[0].load(Ordering::Acquire) == state.steps {
            Err(DeviceError::HostLate {
                device: self.device().info().name.clone(),
                patience: self.device().info().patience,
            })
        } else {
            Ok(())
        }
    }
}

/// Launches of a layer.
///
/// # Errors
///
/// All methods return an error if the device fails.
///
/// # Panics
///
/// All methods panic if the layer's part is not on the device.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// Whether neurons of layer `index` run on the device for the tokens that run.
    pub fn has_ffn(&self, index: usize) -> bool {
        self.layers[index].has_neurons() || self.streams(index)
    }

    /// Whether attention of layer `index` runs on the device in the current pass.
    pub fn has_attention(&self, index: usize) -> bool {
        self.layers[index].attention.is_some() || self.copies_parts()
    }

    /// Whether the keys and values of layer `index` are on the device in the current pass.
    pub fn has_cache(&self, index: usize) -> bool {
        self.layers[index].has_cache || self.copies_parts()
    }

    /// Whether the neurons of layer `index` are predicted on the host in the current pass.
    pub fn is_predicted_on_host(&self, index: usize) -> bool {
        let copied = self.copied_parts(self.tokens);
        self.layers[index].is_predicted_on_host()
            && copied.and_then(CopiedParts::selector).is_none()
    }

    /// Keeps the hidden state for the FFN of a parallel block.
    pub fn keep_residual(&mut self) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let state = &mut self.state;
        state.residual.copy_from(&state.hidden)
    }

    /// Norms the hidden state and projects it to queries, keys and values.
    pub fn project_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let attention = attention_of(&self.layers, self.copied.as_ref(), index);
        let state = &mut self.state;
        let mut parts = [
            (&attention.query, &mut state.query),
            (&attention.key, &mut state.key),
            (&attention.value, &mut state.value),
        ];
        if let Some(prompt) = &mut state.prompt {
            let (norm, format) = (attention.norm.as_ref(), attention.query.matrix.format());
            let input = &mut prompt.input;
            self.gpu
                .to_f16(&state.hidden, self.tokens, norm, format, input, None)?;
            for (linear, out) in parts {
                self.gpu
                    .gemm(&prompt.input, linear, &prompt.sums, out, false)?;
            }
            return Ok(());
        }
        self.gpu
            .project(&state.hidden, attention.norm.as_ref(), &mut parts, false)
    }

    /// Appends keys and values to the caches that the pass [began](Self::begin) with, and computes attention over them.
    pub fn attend(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let attention = attention_of(&self.layers, self.copied.as_ref(), index);
        let state = &mut self.state;
        let operands = Attention {
            tokens: self.tokens,
            query: &state.query,
            key: &state.key,
            value: &state.value,
            norms: attention.head_norms.as_ref(),
            sin_cos: &state.rotations,
            alibi_slopes: attention.slopes.as_deref(),
            sinks: attention.sinks.as_ref(),
            window: attention.window,
            positions: &state.positions,
            caches: &state.caches,
            layer: index,
            shape: self.shape.cache(),
        };
        let (partial, counters) = (&mut state.attention_partial, &mut state.attention_counters);
        // SAFETY: the caller of `begin` keeps the caches until the pass ends, `begin` has checked their shapes and `start` the
        // positions.
        #[expect(unsafe_code, reason = "kernels follow addresses in device memory")]
        unsafe {
            self.gpu
                .attend(&operands, partial, counters, &mut state.mixed)
        }
    }

    /// Adds the output projection of attention to the hidden state, and norms it in post-norm blocks.
    pub fn add_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let attention = attention_of(&self.layers, self.copied.as_ref(), index);
        let state = &mut self.state;
        let output = &attention.output;
        if let Some(prompt) = &mut state.prompt {
            let (input, format) = (&mut prompt.input, output.matrix.format());
            self.gpu
                .to_f16(&state.mixed, self.tokens, None, format, input, None)?;
            self.gpu
                .gemm(&prompt.input, output, &prompt.sums, &mut state.hidden, true)?;
        } else {
            self.gpu
                .project(&state.mixed, None, &mut [(output, &mut state.hidden)], true)?;
        }
        if let Some([norm, _]) = &layer.norms_after {
            self.gpu.norm(&mut state.hidden, norm)?;
        }
        Ok(())
    }

    /// Predicts the active neurons of layer `index` on the device, if its selector does; `for_host` also writes them to
    /// host memory.
    pub fn predict(
        &mut self,
        index: usize,
        reads: FfnInput,
        for_host: bool,
    ) -> Result<(), DeviceError> {
        let ffn = self.layers[index].ffn.as_ref();
        let predicts = ffn.is_some_and(|ffn| ffn.selector.predicts());
        if !predicts || !self.segments.wants_launch()? {
            return Ok(());
        }
        let keeps = self.keeps_input(index);
        let copied = self
            .copied
            .as_ref()
            .filter(|_| self.tokens >= self.copies_from);
        let DeviceFfn {
            norm,
            ffn,
            selector,
            ..
        } = self.layers[index]
            .ffn
            .as_ref()
            .expect("neurons are on the device");
        let selector = match selector {
            DeviceSelector::Host => copied
                .and_then(CopiedParts::selector)
                .unwrap_or(&DeviceSelector::Host),
            own => own,
        };
        let state = &mut self.state;
        let x = match reads {
            FfnInput::Hidden => &state.hidden,
            FfnInput::Residual => &state.residual,
        };
        let mut predicted = PredictedMask {
            mask: &mut state.mask,
            host_mask: for_host.then_some(&state.predicted),
            activations: &mut state.products,
            hot_count: match state.prompt {
                None => ffn.gate.matrix.rows(),
                Some(_) => 0,
            },
        };
        match selector {
            DeviceSelector::Predicted {
                predictor,
                reads_residual,
            } => {
                let norm: Option<&GpuNorm> = norm.as_ref().filter(|_| !*reads_residual);
                let units = &mut state.units;
                units.set_len(self.tokens * predictor.b_transposed.rows());
                let kept = keeps.then_some((&mut state.kept, for_host.then_some(&state.input)));
                self.gpu
                    .predict(x, norm, predictor, units, kept, &mut predicted)
            }
            DeviceSelector::SignBit(signs) => {
                self.gpu
                    .predict_by_signs(x, norm.as_ref(), signs, &mut predicted)
            }
            // Predicted on the host, or not before the gate is computed.
            DeviceSelector::Host
            | DeviceSelector::Dense
            | DeviceSelector::Exact
            | DeviceSelector::Gate { .. }
            | DeviceSelector::Contribution { .. } => Ok(()),
        }
    }

    /// Computes gate and up of the hot neurons; `for_host` also writes the FFN's input to host memory. In a prompt, all
    /// pieces of neurons except the last are also multiplied by down.
    pub fn gate_up(
        &mut self,
        index: usize,
        reads: FfnInput,
        for_host: bool,
    ) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let keeps = self.keeps_input(index);
        let by_expert = self.multiplies_by_expert(index);
        let layer = &self.layers[index];
        let is_masked = layer.is_masked();
        let found = layer.ffn.as_ref().expect("neurons are on the device");
        let state = &mut self.state;
        let x = match reads {
            FfnInput::Hidden => &state.hidden,
            FfnInput::Residual => &state.residual,
        };
        let filter = found.selector.filter(None);
        let host = HostMirror {
            input: &state.input,
            flags: &state.ready,
            flag: index,
            step: &state.step,
        };
        let mask = is_masked.then_some(&state.mask);
        let routing = found.routing(&state.routes, 0);
        if let Some(prompt) = &mut state.prompt {
            let host = for_host.then_some(host);
            let (norm, format) = (found.norm.as_ref(), found.ffn.gate.matrix.format());
            self.gpu
                .to_f16(x, self.tokens, norm, format, &mut prompt.input, host)?;
            if let Some(host) = host {
                self.gpu.signal_host(host)?;
            }
            let (ffn, hot) = (&found.ffn, layer.hot_count());
            if by_expert {
                ExpertProducts::new(&self.gpu, layer, state).add(ffn, &(0..hot), filter)?;
                let prompt = state.prompt.as_mut().expect("a prompt runs");
                return prompt.products.clear(self.tokens);
            }
            let masks = mask.map(|mask| TokenMasks {
                mask,
                neurons: layer.neurons,
                first: 0,
                tokens: None,
            });
            for rows in pieces(hot, prompt.most_neurons) {
                let products = (&mut state.products, &mut prompt.up, &mut prompt.products);
                activate_batch(
                    &self.gpu,
                    (ffn, &rows),
                    (filter, routing),
                    masks,
                    (&prompt.input, &prompt.sums),
                    products,
                    &mut state.down,
                )?;
                if rows.end < hot {
                    let (x, addends) = (&prompt.products, DownAddends::default());
                    let (down, out) = (&ffn.down, &mut state.hidden);
                    self.gpu
                        .gemm_down(x, down, &rows, &prompt.sums, addends, out)?;
                }
            }
            return Ok(());
        }
        let products = &mut state.products;
        self.gpu.gate_up(
            x,
            found.norm.as_ref(),
            &found.ffn,
            filter,
            routing,
            mask,
            products,
            keeps.then_some(&state.kept),
            for_host.then_some(host),
            &mut state.down,
        )
    }

    /// Whether the predictor of layer `index` keeps the FFN's input: both read it in 8 bits, and no products of matrices follow.
    fn keeps_input(&self, index: usize) -> bool {
        let ffn = self.layers[index].ffn.as_ref();
        let is_int8 = |linear: &GpuLinear| self.gpu.uses_int8(linear.matrix.format());
        self.state.prompt.is_none()
            && ffn.is_some_and(|found| match &found.selector {
                DeviceSelector::Predicted {
                    predictor,
                    reads_residual,
                } => !reads_residual && is_int8(&predictor.a) && is_int8(&found.ffn.gate),
                _ => false,
            })
    }

    /// Adds the sums of down of the hot neurons to the hidden state, and with `cold` those of the cold neurons, for which
    /// the kernel waits in a [whole](Self::is_launched_ahead) pass.
    pub fn down(&mut self, index: usize, cold: bool) -> Result<(), DeviceError> {
        if !self.segments.wants_launch()? {
            return Ok(());
        }
        let by_expert = self.multiplies_by_expert(index);
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are on the device");
        let state = &mut self.state;
        if let Some(prompt) = &state.prompt {
            let addends = DownAddends {
                bias: found.bias(&state.routes),
                offset: found.offset.as_ref(),
                cold: cold.then_some(&state.cold),
            };
            let (products, sums) = (&prompt.products, &prompt.sums);
            let (down, out) = (&found.ffn.down, &mut state.hidden);
            let rows = match by_expert {
                true => 0..0,
                false => {
                    let rows = pieces(layer.hot_count(), prompt.most_neurons).next_back();
                    rows.expect("at least one piece")
                }
            };
            return self
                .gpu
                .gemm_down(products, down, &rows, sums, addends, out);
        }
        let share = ColdSum {
            sum: &state.cold,
            flag: self.is_launched_ahead.then_some((&state.done, index)),
            step: &state.step,
            timed_out: &state.timed_out,
            timeout_nanoseconds: self.gpu.device().info().patience.as_nanos() as u64,
        };
        self.gpu.down(
            &found.ffn,
            &state.products,
            [found.bias(&state.routes), found.offset.as_ref()],
            cold.then_some(share),
            &mut state.down,
            &mut state.hidden,
        )
    }

    /// Norms the hidden state after the FFN, in post-norm blocks.
    pub fn norm_after(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some([_, norm]) = &self.layers[index].norms_after else {
            return Ok(());
        };
        if self.segments.wants_launch()? {
            self.gpu.norm(&mut self.state.hidden, norm)
        } else {
            Ok(())
        }
    }
}
