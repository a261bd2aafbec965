//! A token through all layers, or some that follow each other, each part where it lives.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use powerinfer_bundle::StoredLayer;
use powerinfer_kernels::cuda::{
    Attention, Beside, Buffer, Chosen, ColdShare, DeviceError, DownScratch, Ffn, FfnRule, Foreseen,
    Gpu, GpuCache, GpuNorm, Halves, HostView,
};
use powerinfer_model::Positions;

use super::{ColdWeights, DeviceChoice, DeviceFfn, Hybrid, times::Stopwatch};
use crate::{Runtime, RuntimeError, Sequence, Stage, choice::Choice, forward::ffn_of, rotary};

/// How long the host waits for the device's half of a layer before it gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the FFN of a layer reads and adds to.
struct HostState {
    /// The hidden state, where it is here.
    hidden: Vec<f32>,
    /// Whether the device has the newest one.
    is_on_device: bool,
}

impl Runtime {
    /// Runs more tokens of `sequence` on both sides, at most as many as the executor has room for; returns their
    /// hidden states after the last layer, `[tokens, hidden]`.
    pub(crate) fn hybrid_tokens(
        &mut self,
        hybrid: &mut Hybrid,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<Vec<f32>, RuntimeError> {
        let position = sequence.position();
        let many = tokens.len() > 1;
        if many {
            hybrid.turn_to_prompts(tokens.len());
        }
        let mut found = self.try_tokens(hybrid, sequence, tokens);
        if many {
            hybrid.turn_to_prompts(1);
        }
        if found.is_err() {
            // What they have left is written again, or forgotten.
            sequence.truncate(position);
            if !many && hybrid.stretches.fail() {
                // Once more without recording.
                found = self.try_tokens(hybrid, sequence, tokens);
            }
        }
        found
    }

    fn try_tokens(
        &mut self,
        hybrid: &mut Hybrid,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<Vec<f32>, RuntimeError> {
        let weights = std::sync::Arc::clone(&self.weights);
        let first = sequence.position();
        let positions: Vec<usize> = (first..first + tokens.len()).collect();
        let hidden = self.embed(&weights, tokens, &positions);
        self.statistics.mark(Stage::Embedding);
        let turns: Vec<[f32; 2]> = match &self.config.positions {
            Positions::Rotary(rotary) => {
                let positions = positions.iter();
                positions
                    .flat_map(|position| rotary::turns(rotary, *position))
                    .collect()
            }
            _ => Vec::new(),
        };
        if tokens.len() == 1 {
            let caches = sequence.on_device.iter().flatten();
            hybrid
                .stretches
                .start(caches.map(GpuCache::place).collect());
        }
        hybrid.is_whole = hybrid.can_run_whole()?;
        hybrid.start(first, &turns)?;
        let computed_before = self.statistics.neurons_computed;
        let mut state = HostState {
            hidden,
            is_on_device: false,
        };
        for (index, layer) in weights.layers.iter().enumerate() {
            hybrid.layer = index;
            self.hybrid_layer(hybrid, index, layer, sequence, &positions, &mut state)?;
        }
        if hybrid.is_whole {
            self.answer(hybrid, &weights.layers)?;
        }
        hybrid.bring_home(&mut state)?;
        hybrid.end_stretch()?;
        hybrid.check_hand_overs()?;
        let computed = hybrid.take_computed()?;
        let before = self.statistics.neurons_computed;
        self.statistics.neurons_computed += computed;
        self.statistics.neurons_united += computed;
        self.statistics.mark(Stage::Waiting);
        let cold = before - computed_before;
        hybrid.add_times(tokens.len(), computed, computed + cold)?;
        sequence.tokens.extend(tokens);
        self.statistics.tokens += tokens.len() as u64;
        Ok(state.hidden)
    }

    /// One layer.
    fn hybrid_layer(
        &mut self,
        hybrid: &mut Hybrid,
        index: usize,
        layer: &StoredLayer,
        sequence: &mut Sequence,
        positions: &[usize],
        state: &mut HostState,
    ) -> Result<(), RuntimeError> {
        let is_beside = self.is_parallel();
        let has_ffn = hybrid.layers[index].ffn.is_some();
        // Cold neurons of a prompt may be copied to the device instead of being computed here.
        let streams = hybrid.streams(index);
        let cold = self.bundle.plan().layers[index].hot_count < self.config.ffn_size && !streams;
        // What the FFN sees where it runs beside attention, on the side or the sides where it runs.
        let mut residual = None;
        let attended_on_device = hybrid.layers[index].attention.is_some();
        if attended_on_device {
            hybrid.take_along(state)?;
            if is_beside {
                hybrid.keep_residual()?;
                if !has_ffn || hybrid.layers[index].needs_host_input() {
                    residual = Some(hybrid.read_hidden()?);
                }
            }
            hybrid.project_attention(index)?;
            self.statistics.mark(Stage::Launching);
            match &mut sequence.on_device[index] {
                Some(cache) => hybrid.attend(index, cache)?,
                None => {
                    let projected = hybrid.read_projections()?;
                    self.statistics.mark(Stage::Waiting);
                    let cache = [&mut sequence.layers[index]].into_iter();
                    let watch = hybrid.watch();
                    let mixed = self.mix(index, layer, cache, positions, projected);
                    hybrid.add_host(watch.elapsed());
                    self.statistics.mark(Stage::Attention);
                    hybrid.end_stretch()?;
                    hybrid.state.mixed.write(&mixed)?;
                }
            }
            hybrid.add_attention(index)?;
            self.statistics.mark(Stage::Launching);
        } else {
            hybrid.bring_home(state)?;
            self.statistics.mark(Stage::Waiting);
            let cache = [&mut sequence.layers[index]].into_iter();
            let watch = hybrid.watch();
            residual = Some(self.attend_to(index, layer, cache, positions, &mut state.hidden));
            hybrid.add_host(watch.elapsed());
        }
        // From here on the hidden state has what attention adds.
        if !has_ffn {
            hybrid.bring_home(state)?;
            self.statistics.mark(Stage::Waiting);
            let residual = residual.unwrap_or_else(|| state.hidden.clone());
            let watch = hybrid.watch();
            self.feed_forward(index, layer, positions, &residual, &mut state.hidden);
            hybrid.add_host(watch.elapsed());
            return Ok(());
        }
        if !attended_on_device {
            if let (true, Some(residual)) = (is_beside, &residual) {
                hybrid.end_stretch()?;
                hybrid.state.residual.write(residual)?;
            }
            hybrid.take_along(state)?;
        }
        let sees = match is_beside {
            true => Source::Residual,
            false => Source::Hidden,
        };
        if hybrid.layers[index].needs_host_input() {
            // The host foresees for both sides.
            let residual = match residual {
                Some(residual) => residual,
                None => hybrid.read_hidden()?,
            };
            let input = self.ffn_input(layer, &residual);
            let words = self.foresee_here(index, layer, &residual, &input);
            self.statistics.mark(Stage::Foreseeing);
            hybrid.foresee_with(index, &words)?;
        } else {
            hybrid.foresee(index, sees, cold)?;
        }
        hybrid.gate_up(index, sees, cold)?;
        self.statistics.mark(Stage::Launching);
        self.statistics.neurons += (positions.len() * self.config.ffn_size) as u64;
        self.statistics.neurons_passed += self.config.ffn_size as u64;
        if cold && !hybrid.is_whole {
            hybrid.end_stretch()?;
            self.answer_layer(hybrid, index, layer, positions.len())?;
        }
        hybrid.down(index, cold)?;
        if streams {
            let ffn = ffn_of(&self.bundle, index, layer, Choice::Dense);
            let weights = ColdWeights {
                gate: ffn.gate,
                up: ffn.up,
                down: ffn.down,
            };
            hybrid.stream(index, &weights)?;
        }
        hybrid.norm_after(index)?;
        self.statistics.mark(Stage::Launching);
        Ok(())
    }

    /// Computes the host's part of all layers of a token that is on its way as a whole.
    fn answer(&mut self, hybrid: &mut Hybrid, layers: &[StoredLayer]) -> Result<(), RuntimeError> {
        hybrid.end_stretch()?;
        for (index, layer) in layers.iter().enumerate() {
            if self.bundle.plan().layers[index].hot_count < self.config.ffn_size {
                hybrid.layer = index;
                self.answer_layer(hybrid, index, layer, 1)?;
                hybrid.hand_over(index);
            }
        }
        Ok(())
    }

    /// Waits for the input of layer `index`, and computes what its cold neurons add for the device.
    fn answer_layer(
        &mut self,
        hybrid: &mut Hybrid,
        index: usize,
        layer: &StoredLayer,
        tokens: usize,
    ) -> Result<(), RuntimeError> {
        hybrid.wait_for_input(index)?;
        let mut input = vec![0.0; tokens * self.config.hidden_size];
        hybrid.state.input.read_floats(&mut input);
        self.statistics.mark(Stage::Waiting);
        let mask = hybrid.layers[index].foresees().then(|| hybrid.read_mask());
        let watch = hybrid.watch();
        let sum = self.cold_ffn(index, layer, &input, mask.as_deref());
        hybrid.state.cold.write_floats(&sum);
        hybrid.add_host(watch.elapsed());
        self.statistics.mark(Stage::Down);
        Ok(())
    }

    /// Which neurons of layer `index` are foreseen of each token, 32 a word.
    fn foresee_here(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        residual: &[f32],
        input: &[f32],
    ) -> Vec<u32> {
        let (choices, policy) = (&self.choices[index], self.policies[index]);
        let choice = choices.choice(policy, self.bundle.predictors());
        let ffn = ffn_of(&self.bundle, index, layer, choice);
        let foreseen_from = match choices.sees_residual(policy) {
            true => residual,
            false => input,
        };
        ffn.foreseen(
            &self.threads,
            foreseen_from,
            &mut self.scratch,
            &mut self.statistics,
        )
    }

    /// What the neurons that are not on the device add for each token.
    fn cold_ffn(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        input: &[f32],
        mask: Option<&[u32]>,
    ) -> Vec<f32> {
        let choice = self.choices[index].choice(self.policies[index], self.bundle.predictors());
        let ffn = ffn_of(&self.bundle, index, layer, choice);
        ffn.cold_sum(
            &self.threads,
            input,
            mask,
            &mut self.scratch,
            &mut self.statistics,
        )
    }
}

/// Which vector of the device the FFN sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Hidden,
    Residual,
}

impl super::DeviceLayer {
    /// Whether the host has to foresee, and so to have the hidden state.
    fn needs_host_input(&self) -> bool {
        let choice = self.ffn.as_ref().map(|ffn| &ffn.choice);
        matches!(choice, Some(DeviceChoice::ByHost))
    }

    /// Whether neurons are foreseen before any is read.
    fn foresees(&self) -> bool {
        let choice = self.ffn.as_ref().map(|ffn| &ffn.choice);
        matches!(
            choice,
            Some(DeviceChoice::ByHost | DeviceChoice::Predicted { .. } | DeviceChoice::BySigns(_))
        )
    }
}

impl DeviceFfn {
    /// What decides, once a product is known, which neurons are computed.
    fn rule(&self) -> FfnRule<'_> {
        match &self.choice {
            DeviceChoice::Every => FfnRule::Every,
            DeviceChoice::ByGate(threshold, None) => FfnRule::ByGate(*threshold),
            DeviceChoice::ByGate(threshold, Some(scale)) => {
                FfnRule::ByWeightedGate(*threshold, scale)
            }
            DeviceChoice::ByContribution {
                threshold,
                scale,
                centre,
            } => FfnRule::ByContribution {
                threshold: *threshold,
                scale,
                centre: centre.as_ref(),
            },
            _ => FfnRule::NotZero,
        }
    }
}

/// What rows of down are multiplied by for some tokens, from their input as halves; the products of gate and up are
/// kept on the way.
fn products_of_many(
    gpu: &Gpu,
    ffn: &Ffn,
    rule: FfnRule<'_>,
    chosen: Option<Chosen<'_>>,
    input: &Halves,
    (gate, up, out): (&mut Buffer<f32>, &mut Buffer<f32>, &mut Halves),
    scratch: &mut DownScratch,
) -> Result<(), DeviceError> {
    let count = input.tokens() * ffn.down.rows();
    gate.set_len(count);
    gpu.multiply(input, &ffn.gate, gate, false)?;
    let up = match &ffn.up {
        None => None,
        Some(linear) => {
            up.set_len(count);
            gpu.multiply(input, linear, up, false)?;
            Some(&*up)
        }
    };
    gpu.combine(ffn, rule, gate, up, chosen, out, scratch)
}

impl Hybrid {
    /// Ends what is launched at once, for the host is going to look at what it gives.
    fn end_stretch(&mut self) -> Result<(), DeviceError> {
        self.stretches.end(self.layer)
    }

    /// Whether one recording can have all that the device does for a token: nothing of it waits for the host but
    /// sums of cold neurons, for which the kernels that add them wait.
    fn can_run_whole(&mut self) -> Result<bool, DeviceError> {
        let is_there = |layer: &super::DeviceLayer| {
            layer.has_cache && layer.ffn.is_some() && !layer.needs_host_input()
        };
        Ok(self.tokens == 1
            && self.times.is_none()
            && self.layers.iter().all(is_there)
            && self.stretches.are_recorded()?)
    }

    /// Says that what the host's neurons of layer `index` add is there.
    fn hand_over(&self, index: usize) {
        let state = &self.state;
        state.done.words()[index].store(state.steps, Ordering::Release);
    }

    /// Fails where a kernel has waited for the host for too long, and gone on without it.
    fn check_hand_overs(&self) -> Result<(), DeviceError> {
        let state = &self.state;
        match state.gave_up.words()[0].load(Ordering::Acquire) == state.steps {
            true => Err(self.too_late("the host's part of a layer")),
            false => Ok(()),
        }
    }

    fn too_late(&self, what: &str) -> DeviceError {
        DeviceError::Failed {
            device: self.device().info().name.clone(),
            doing: "handing a layer over",
            reason: format!("{what} did not come within {} s", PATIENCE.as_secs()),
        }
    }

    /// A stopwatch, which runs where times are taken.
    fn watch(&self) -> Stopwatch {
        Stopwatch::start(self.times.is_some())
    }

    /// The host has worked for the layer.
    fn add_host(&mut self, time: Duration) {
        if let Some(times) = &mut self.times {
            times.layers[self.layer].host += time;
        }
    }

    /// Adds what tokens took that are done on both sides.
    fn add_times(&mut self, tokens: usize, on_device: u64, all: u64) -> Result<(), DeviceError> {
        let Some(times) = &mut self.times else {
            return Ok(());
        };
        times.tokens += tokens as u64;
        times.neurons_on_device += on_device;
        times.neurons += all;
        for (layer, seconds) in self.stretches.take_times()? {
            times.layers[layer].device += Duration::from_secs_f64(seconds.max(0.0));
        }
        Ok(())
    }

    /// From now on runs so many tokens at once.
    fn turn_to_prompts(&mut self, tokens: usize) {
        let prompt = self.prompt.as_mut().expect("room for several tokens");
        std::mem::swap(&mut self.state, prompt);
        self.stretches.pause(tokens > 1);
        let before = std::mem::replace(&mut self.tokens, tokens);
        let most = self.state.many.as_ref().map_or(1, |many| many.most);
        debug_assert!(tokens <= most && before != tokens);
        let state = &mut self.state;
        let (floats, words) = (
            [
                &mut state.hidden,
                &mut state.residual,
                &mut state.query,
                &mut state.key,
                &mut state.value,
                &mut state.mixed,
            ],
            &mut state.mask,
        );
        for buffer in floats {
            buffer.set_len(buffer.capacity() / most * tokens);
        }
        words.set_len(words.capacity() / most * tokens);
        state.turns.set_len(state.turns.capacity() / most * tokens);
    }

    /// Begins a token, or some that follow each other.
    fn start(&mut self, position: usize, turns: &[[f32; 2]]) -> Result<(), DeviceError> {
        let state = &mut self.state;
        state.steps = state.steps.wrapping_add(1).max(1);
        state.step.write(&[state.steps])?;
        state.position.write(&[position as u32])?;
        state.turns.write(turns)
    }

    /// The hidden state goes to the device, if it is not there.
    fn take_along(&mut self, state: &mut HostState) -> Result<(), DeviceError> {
        if !state.is_on_device {
            self.stretches.end(self.layer)?;
            self.state.hidden.write(&state.hidden)?;
            state.is_on_device = true;
        }
        Ok(())
    }

    /// The hidden state comes to the host, if it is not there.
    fn bring_home(&mut self, state: &mut HostState) -> Result<(), DeviceError> {
        if state.is_on_device {
            self.stretches.end(self.layer)?;
            let watch = self.watch();
            self.state.hidden.read(&mut state.hidden)?;
            state.is_on_device = false;
            if let Some(times) = &mut self.times {
                times.layers[self.layer].waiting += watch.elapsed();
            }
        }
        Ok(())
    }

    /// A copy of the hidden state, which is on the device.
    fn read_hidden(&mut self) -> Result<Vec<f32>, DeviceError> {
        self.stretches.end(self.layer)?;
        self.state.hidden.to_vec()
    }

    /// Keeps the hidden state for an FFN that runs beside attention.
    fn keep_residual(&mut self) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
            return Ok(());
        }
        let state = &mut self.state;
        state.residual.copy_from(&state.hidden)
    }

    fn project_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
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
                .halve(&state.hidden, self.tokens, norm, format, halves, None)?;
            for (linear, out) in parts {
                self.gpu.multiply(&many.halves, linear, out, false)?;
            }
            return Ok(());
        }
        self.gpu
            .project(&state.hidden, attention.norm.as_ref(), &mut parts, false)
    }

    fn read_projections(&mut self) -> Result<[Vec<f32>; 3], DeviceError> {
        self.stretches.end(self.layer)?;
        let state = &self.state;
        Ok([
            state.query.to_vec()?,
            state.key.to_vec()?,
            state.value.to_vec()?,
        ])
    }

    fn attend(&mut self, index: usize, cache: &mut GpuCache) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
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
            turns: &state.turns,
            slopes: attention.slopes.as_deref(),
            window: attention.window,
            position: &state.position,
        };
        let (partial, counters) = (&mut state.attention_partial, &mut state.attention_counters);
        self.gpu
            .attend(&what, cache, partial, counters, &mut state.mixed)
    }

    /// Adds what attention gives to the hidden state, and norms it where norms come after.
    fn add_attention(&mut self, index: usize) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let attention = layer.attention.as_ref().expect("attention is here");
        let state = &mut self.state;
        let output = &attention.output;
        if let Some(many) = &mut state.many {
            let (halves, format) = (&mut many.halves, output.matrix.format());
            self.gpu
                .halve(&state.mixed, self.tokens, None, format, halves, None)?;
            self.gpu
                .multiply(&many.halves, output, &mut state.hidden, true)?;
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
    fn foresee(&mut self, index: usize, sees: Source, cold: bool) -> Result<(), DeviceError> {
        if !self.layers[index].foresees() || !self.stretches.wants_launch()? {
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
        let mut foreseen = Foreseen {
            mask: &mut state.mask,
            for_host: cold.then_some(&state.foreseen),
            products: &mut state.products,
            hot_count: match state.many {
                None => ffn.gate.matrix.rows(),
                Some(_) => 0,
            },
        };
        match choice {
            DeviceChoice::Predicted {
                predictor,
                middle,
                sees_residual,
            } => {
                let norm: Option<&GpuNorm> = norm.as_ref().filter(|_| !*sees_residual);
                let middle = match &mut state.many {
                    None => middle,
                    Some(many) => {
                        many.middle.set_len(self.tokens * predictor.units.rows());
                        &mut many.middle
                    }
                };
                self.gpu.foresee(x, norm, predictor, middle, &mut foreseen)
            }
            DeviceChoice::BySigns(signs) => {
                self.gpu
                    .foresee_by_signs(x, norm.as_ref(), signs, &mut foreseen)
            }
            _ => Ok(()),
        }
    }

    /// Takes over whom the host foresees.
    fn foresee_with(&mut self, index: usize, words: &[u32]) -> Result<(), DeviceError> {
        self.stretches.end(self.layer)?;
        let hot = self.layers[index]
            .ffn
            .as_ref()
            .map_or(0, |ffn| ffn.ffn.gate.matrix.rows());
        let state = &mut self.state;
        state.mask.write(words)?;
        for (place, word) in state.foreseen.words().iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        match state.many {
            None => state.products.write(&vec![0.0; hot]),
            Some(_) => Ok(()),
        }
    }

    /// Launches gate and up; where there are cold neurons, the host gets their input.
    fn gate_up(&mut self, index: usize, sees: Source, cold: bool) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let foresees = layer.foresees();
        let found = layer.ffn.as_ref().expect("neurons are here");
        let state = &mut self.state;
        let x = match sees {
            Source::Hidden => &state.hidden,
            Source::Residual => &state.residual,
        };
        let rule = found.rule();
        let host = HostView {
            input: &state.input,
            ready: &state.ready,
            flag: index,
            step: &state.step,
        };
        let mask = foresees.then_some(&state.mask);
        if let Some(many) = &mut state.many {
            let host = cold.then_some(host);
            let (norm, format) = (found.norm.as_ref(), found.ffn.gate.matrix.format());
            self.gpu
                .halve(x, self.tokens, norm, format, &mut many.halves, host)?;
            if let Some(host) = host {
                self.gpu.announce(host)?;
            }
            let chosen = mask.map(|mask| Chosen {
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
        )
    }

    /// Waits until the host can read the input of layer `index`.
    fn wait_for_input(&mut self, index: usize) -> Result<(), DeviceError> {
        let watch = self.watch();
        let flag = &self.state.ready.words()[index];
        let mut since = None;
        let mut spins = 0u32;
        while flag.load(Ordering::Acquire) != self.state.steps {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(4096) {
                let since = *since.get_or_insert_with(Instant::now);
                // What went wrong on the device shows when it is waited for.
                if since.elapsed() > PATIENCE {
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

    fn read_mask(&self) -> Vec<u32> {
        let words = self
            .state
            .foreseen
            .words()
            .iter()
            .take(self.state.mask.len());
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Adds what both sides' neurons contribute.
    fn down(&mut self, index: usize, cold: bool) -> Result<(), DeviceError> {
        if !self.stretches.wants_launch()? {
            return Ok(());
        }
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are here");
        let state = &mut self.state;
        if let Some(many) = &state.many {
            let beside = Beside {
                offset: found.offset.as_ref(),
                cold: cold.then_some(&state.cold),
            };
            self.gpu
                .multiply_down(&many.products, &found.ffn, beside, &mut state.hidden)?;
            return Ok(());
        }
        let share = ColdShare {
            sum: &state.cold,
            done: self.is_whole.then_some((&state.done, index)),
            step: &state.step,
            gave_up: &state.gave_up,
            patience: PATIENCE.as_nanos() as u64,
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
    fn norm_after(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some([_, norm]) = &self.layers[index].norms_after else {
            return Ok(());
        };
        match self.stretches.wants_launch()? {
            true => self.gpu.norm(&mut self.state.hidden, norm),
            false => Ok(()),
        }
    }

    /// Whether the cold neurons of layer `index` are copied to the device for the tokens that run.
    fn streams(&self, index: usize) -> bool {
        let many = self.state.many.as_ref();
        let least = self.layers[index].streams_from;
        many.is_some_and(|many| many.piece.is_some())
            && least.is_some_and(|least| self.tokens >= least)
    }

    /// Adds what the cold neurons of layer `index` contribute, piece by piece; the input of its FFN is there
    /// as halves.
    fn stream(&mut self, index: usize, weights: &ColdWeights<'_>) -> Result<(), DeviceError> {
        let layer = &self.layers[index];
        let found = layer.ffn.as_ref().expect("neurons are here");
        let (rule, is_masked) = (found.rule(), layer.foresees());
        let state = &mut self.state;
        let many = state.many.as_mut().expect("several tokens");
        let piece = many.piece.as_mut().expect("room for cold neurons");
        let mut first = found.ffn.down.rows();
        while first < layer.neurons {
            let count = weights.copy(first, piece)?;
            let chosen = is_masked.then_some(Chosen {
                mask: &state.mask,
                neurons: layer.neurons,
                first,
            });
            let products = (&mut state.products, &mut many.up, &mut many.products);
            products_of_many(
                &self.gpu,
                piece,
                rule,
                chosen,
                &many.halves,
                products,
                &mut state.down,
            )?;
            let hidden = &mut state.hidden;
            self.gpu
                .multiply_down(&many.products, piece, Beside::default(), hidden)?;
            first += count;
        }
        Ok(())
    }

    /// Neurons that the device computed since this was asked last.
    fn take_computed(&mut self) -> Result<u64, DeviceError> {
        let now = self.state.down.computed()?;
        let since = now.wrapping_sub(std::mem::replace(&mut self.state.computed, now));
        Ok(u64::from(since))
    }
}
