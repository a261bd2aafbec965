//! A token through all layers, each part where it lives.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use powerinfer_bundle::StoredLayer;
use powerinfer_kernels::cuda::{
    Attention, ColdShare, DeviceError, FfnRule, Foreseen, GpuCache, GpuNorm, HostView,
};
use powerinfer_model::Positions;

use super::{DeviceChoice, DeviceFfn, Hybrid};
use crate::{Runtime, RuntimeError, Sequence, Stage, forward::ffn_of, rotary};

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
    /// Runs one more token of `sequence` on both sides; returns its hidden state after the last layer.
    pub(crate) fn hybrid_token(
        &mut self,
        hybrid: &mut Hybrid,
        sequence: &mut Sequence,
        token: u32,
    ) -> Result<Vec<f32>, RuntimeError> {
        let position = sequence.position();
        let found = self.try_token(hybrid, sequence, token);
        if found.is_err() && hybrid.stretches.fail() {
            // Once more without recording: what the token has left is written again.
            sequence.truncate(position);
            return self.try_token(hybrid, sequence, token);
        }
        found
    }

    fn try_token(
        &mut self,
        hybrid: &mut Hybrid,
        sequence: &mut Sequence,
        token: u32,
    ) -> Result<Vec<f32>, RuntimeError> {
        let weights = std::sync::Arc::clone(&self.weights);
        let position = sequence.position();
        let hidden = self.embed(&weights, &[token], &[position]);
        self.statistics.mark(Stage::Embedding);
        let turns = match &self.config.positions {
            Positions::Rotary(rotary) => rotary::turns(rotary, position),
            _ => Vec::new(),
        };
        let caches = sequence.on_device.iter().flatten();
        hybrid
            .stretches
            .start(caches.map(GpuCache::place).collect());
        hybrid.start(position, &turns)?;
        let mut state = HostState {
            hidden,
            is_on_device: false,
        };
        for (index, layer) in weights.layers.iter().enumerate() {
            self.hybrid_layer(hybrid, index, layer, sequence, position, &mut state)?;
        }
        hybrid.bring_home(&mut state)?;
        hybrid.stretches.end()?;
        let computed = hybrid.take_computed()?;
        self.statistics.neurons_computed += computed;
        self.statistics.neurons_united += computed;
        sequence.tokens.push(token);
        self.statistics.tokens += 1;
        Ok(state.hidden)
    }

    /// One layer.
    fn hybrid_layer(
        &mut self,
        hybrid: &mut Hybrid,
        index: usize,
        layer: &StoredLayer,
        sequence: &mut Sequence,
        position: usize,
        state: &mut HostState,
    ) -> Result<(), RuntimeError> {
        let is_beside = self.is_parallel();
        let has_ffn = hybrid.layers[index].ffn.is_some();
        let cold = self.bundle.plan().layers[index].hot_count < self.config.ffn_size;
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
            self.statistics.mark(Stage::QueryKeyValue);
            match &mut sequence.on_device[index] {
                Some(cache) => hybrid.attend(index, cache)?,
                None => {
                    let projected = hybrid.read_projections()?;
                    let cache = [&mut sequence.layers[index]].into_iter();
                    let mixed = self.mix(index, layer, cache, &[position], projected);
                    hybrid.stretches.end()?;
                    hybrid.state.mixed.write(&mixed)?;
                }
            }
            self.statistics.mark(Stage::Attention);
            hybrid.add_attention(index)?;
            self.statistics.mark(Stage::AttentionOutput);
        } else {
            hybrid.bring_home(state)?;
            let cache = [&mut sequence.layers[index]].into_iter();
            residual = Some(self.attend_to(index, layer, cache, &[position], &mut state.hidden));
        }
        // From here on the hidden state has what attention adds.
        if !has_ffn {
            hybrid.bring_home(state)?;
            let residual = residual.unwrap_or_else(|| state.hidden.clone());
            self.feed_forward(index, layer, &[position], &residual, &mut state.hidden);
            return Ok(());
        }
        if !attended_on_device {
            if let (true, Some(residual)) = (is_beside, &residual) {
                hybrid.stretches.end()?;
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
            hybrid.foresee_with(index, &words)?;
        } else {
            hybrid.foresee(index, sees, cold)?;
        }
        self.statistics.mark(Stage::Foreseeing);
        hybrid.gate_up(index, sees, cold)?;
        self.statistics.neurons += self.config.ffn_size as u64;
        self.statistics.neurons_passed += self.config.ffn_size as u64;
        if cold {
            hybrid.wait_for_input(index)?;
            let mut input = vec![0.0; self.config.hidden_size];
            hybrid.state.input.read_floats(&mut input);
            self.statistics.mark(Stage::GateUp);
            let mask = hybrid.layers[index].foresees().then(|| hybrid.read_mask());
            let sum = self.cold_ffn(index, layer, &input, mask.as_deref());
            hybrid.state.cold.write_floats(&sum);
        } else {
            self.statistics.mark(Stage::GateUp);
        }
        hybrid.down(index, cold)?;
        self.statistics.mark(Stage::Down);
        Ok(())
    }

    /// Which neurons of layer `index` are foreseen, 32 a word.
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

    /// What the neurons that are not on the device add for one token.
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

impl Hybrid {
    /// Begins a token.
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
            self.stretches.end()?;
            self.state.hidden.write(&state.hidden)?;
            state.is_on_device = true;
        }
        Ok(())
    }

    /// The hidden state comes to the host, if it is not there.
    fn bring_home(&mut self, state: &mut HostState) -> Result<(), DeviceError> {
        if state.is_on_device {
            self.stretches.end()?;
            self.state.hidden.read(&mut state.hidden)?;
            state.is_on_device = false;
        }
        Ok(())
    }

    /// A copy of the hidden state, which is on the device.
    fn read_hidden(&mut self) -> Result<Vec<f32>, DeviceError> {
        self.stretches.end()?;
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
        self.gpu
            .project(&state.hidden, attention.norm.as_ref(), &mut parts, false)
    }

    fn read_projections(&mut self) -> Result<[Vec<f32>; 3], DeviceError> {
        self.stretches.end()?;
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
        self.gpu.project(
            &state.mixed,
            None,
            &mut [(&attention.output, &mut state.hidden)],
            true,
        )?;
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
            hot_count: ffn.gate.matrix.rows(),
        };
        match choice {
            DeviceChoice::Predicted {
                predictor,
                middle,
                sees_residual,
            } => {
                let norm: Option<&GpuNorm> = norm.as_ref().filter(|_| !*sees_residual);
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
        self.stretches.end()?;
        let hot = self.layers[index]
            .ffn
            .as_ref()
            .map_or(0, |ffn| ffn.ffn.gate.matrix.rows());
        let state = &mut self.state;
        let words = &words[..state.mask.len()]; // 64 neurons may be more than there are
        state.mask.write(words)?;
        for (place, word) in state.foreseen.words().iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        state.products.write(&vec![0.0; hot])
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
        let rule = match &found.choice {
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
        };
        let host = HostView {
            input: &state.input,
            ready: &state.ready,
            flag: index,
            step: &state.step,
        };
        let mask = foresees.then_some(&state.mask);
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
        self.stretches.end()?;
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
                    return Err(DeviceError::Failed {
                        device: self.device().info().name.clone(),
                        doing: "handing a layer over",
                        reason: format!("nothing came within {} s", PATIENCE.as_secs()),
                    });
                }
            }
        }
        Ok(())
    }

    fn read_mask(&self) -> Vec<u32> {
        let words = self.state.foreseen.words().iter();
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
        let share = ColdShare {
            sum: &state.cold,
            done: None,
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
        )?;
        if let Some([_, norm]) = &layer.norms_after {
            self.gpu.norm(&mut state.hidden, norm)?;
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
