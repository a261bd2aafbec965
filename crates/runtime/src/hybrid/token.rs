//! A token through all layers, or some that follow each other, each part where it lives.

use powerinfer_bundle::StoredLayer;
use powerinfer_kernels::cuda::GpuCache;
use powerinfer_model::Positions;

use super::{ColdWeights, Hybrid, launches::Source};
use crate::{Runtime, RuntimeError, Sequence, Stage, forward::ffn_of, rotary};

/// What the FFN of a layer reads and adds to.
pub(super) struct HostState {
    /// The hidden state, where it is here.
    pub(super) hidden: Vec<f32>,
    /// Whether the device has the newest one.
    pub(super) is_on_device: bool,
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
        let mut attempt = |hybrid: &mut Hybrid, sequence: &mut Sequence| {
            let found = self.try_tokens(hybrid, sequence, tokens);
            if found.is_err() {
                if hybrid.is_whole {
                    hybrid.give_up();
                }
                // What they have left is written again, or forgotten.
                sequence.truncate(position);
            }
            found
        };
        let mut found = attempt(hybrid, sequence);
        if many {
            hybrid.turn_to_prompts(1);
        }
        if found.is_err() && !many && hybrid.segments.fail() {
            // Once more without recording.
            found = attempt(hybrid, sequence);
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
        let rotations: Vec<[f32; 2]> = match &self.config.positions {
            Positions::Rotary(rotary) => {
                let positions = positions.iter();
                positions
                    .flat_map(|position| rotary::rotations(rotary, *position))
                    .collect()
            }
            _ => Vec::new(),
        };
        if tokens.len() == 1 {
            let caches = sequence.on_device.iter().flatten();
            hybrid
                .segments
                .start(caches.flat_map(GpuCache::addresses).collect());
        }
        hybrid.is_whole = hybrid.can_run_whole()?;
        hybrid.start(first, &rotations)?;
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
        hybrid.bring_to_host(&mut state)?;
        hybrid.end_segment()?;
        hybrid.check_syncs()?;
        let counts = hybrid.take_counts()?;
        let computed = u64::from(counts.down_rows);
        let before = self.statistics.neurons_computed;
        self.statistics.neurons_computed += computed;
        self.statistics.neurons_in_union += computed;
        self.statistics.mark(Stage::Waiting);
        hybrid.add_times(first, counts, before - computed_before)?;
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
        // Cold neurons of a prompt may be copied to the device instead of being computed here.
        let streams = hybrid.streams(index);
        let has_ffn = hybrid.layers[index].has_neurons() || streams;
        if streams {
            hybrid.open_stream()?;
        }
        let cold = self.bundle.plan().layers[index].hot_count < self.config.ffn_size && !streams;
        // What the FFN sees where it runs beside attention, on the side or the sides where it runs.
        let mut residual = None;
        let attended_on_device = hybrid.layers[index].attention.is_some();
        if attended_on_device {
            hybrid.bring_to_device(state)?;
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
                    let watch = hybrid.watch(self.statistics.bytes_read);
                    let mixed = self.mix(index, layer, cache, positions, projected);
                    hybrid.add_host(watch, self.statistics.bytes_read);
                    self.statistics.mark(Stage::Attention);
                    hybrid.end_segment()?;
                    hybrid.state.mixed.write(&mixed)?;
                }
            }
            hybrid.add_attention(index)?;
            self.statistics.mark(Stage::Launching);
        } else {
            hybrid.bring_to_host(state)?;
            self.statistics.mark(Stage::Waiting);
            let cache = [&mut sequence.layers[index]].into_iter();
            let watch = hybrid.watch(self.statistics.bytes_read);
            residual = Some(self.attend_to(index, layer, cache, positions, &mut state.hidden));
            hybrid.add_host(watch, self.statistics.bytes_read);
        }
        // From here on the hidden state has what attention adds.
        if !has_ffn {
            hybrid.bring_to_host(state)?;
            self.statistics.mark(Stage::Waiting);
            let residual = residual.unwrap_or_else(|| state.hidden.clone());
            let watch = hybrid.watch(self.statistics.bytes_read);
            self.feed_forward(index, layer, positions, &residual, &mut state.hidden);
            hybrid.add_host(watch, self.statistics.bytes_read);
            return Ok(());
        }
        if !attended_on_device {
            if let (true, Some(residual)) = (is_beside, &residual) {
                hybrid.end_segment()?;
                hybrid.state.residual.write(residual)?;
            }
            hybrid.bring_to_device(state)?;
        }
        if streams {
            // The device is busy with attention meanwhile.
            hybrid.begin_stream(index, &self.cold_weights(index, layer))?;
        }
        let sees = match is_beside {
            true => Source::Residual,
            false => Source::Hidden,
        };
        if hybrid.layers[index].needs_host_input() {
            // The host predicts for both sides.
            let residual = match residual {
                Some(residual) => residual,
                None => hybrid.read_hidden()?,
            };
            let input = self.ffn_input(layer, &residual);
            let watch = hybrid.watch(self.statistics.bytes_read);
            let words = self.predict_on_host(index, layer, &residual, &input);
            hybrid.add_host(watch, self.statistics.bytes_read);
            self.statistics.mark(Stage::Prediction);
            hybrid.set_predicted(index, &words)?;
        } else {
            hybrid.predict(index, sees, cold)?;
        }
        hybrid.gate_up(index, sees, cold)?;
        self.statistics.mark(Stage::Launching);
        self.statistics.neurons += (positions.len() * self.config.ffn_size) as u64;
        self.statistics.neurons_passed += self.config.ffn_size as u64;
        if cold && !hybrid.is_whole {
            hybrid.end_segment()?;
            self.answer_layer(hybrid, index, layer, positions.len())?;
        }
        hybrid.down(index, cold)?;
        if streams {
            hybrid.stream(index, &self.cold_weights(index, layer))?;
        }
        hybrid.norm_after(index)?;
        self.statistics.mark(Stage::Launching);
        Ok(())
    }

    /// Where the neurons of layer `index` lie here, for those that are copied.
    fn cold_weights<'a>(&'a self, index: usize, layer: &'a StoredLayer) -> ColdWeights<'a> {
        let choice = self.choices[index].choice(self.policies[index], self.bundle.predictors());
        let ffn = ffn_of(&self.bundle, index, layer, choice);
        ColdWeights {
            gate: ffn.gate,
            up: ffn.up,
            down: ffn.down,
            choice,
            threads: &self.threads,
        }
    }

    /// Computes the host's part of all layers of a token that is on its way as a whole.
    fn answer(&mut self, hybrid: &mut Hybrid, layers: &[StoredLayer]) -> Result<(), RuntimeError> {
        hybrid.end_segment()?;
        for (index, layer) in layers.iter().enumerate() {
            if self.bundle.plan().layers[index].hot_count < self.config.ffn_size {
                hybrid.layer = index;
                self.answer_layer(hybrid, index, layer, 1)?;
                hybrid.sync(index);
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
        hybrid.state.input.read_f32(&mut input);
        self.statistics.mark(Stage::Waiting);
        let mask = hybrid.layers[index].predicts().then(|| hybrid.read_mask());
        let watch = hybrid.watch(self.statistics.bytes_read);
        let sum = self.cold_ffn(index, layer, &input, mask.as_deref());
        hybrid.state.cold.write_f32(&sum);
        hybrid.add_host(watch, self.statistics.bytes_read);
        self.statistics.mark(Stage::Down);
        Ok(())
    }

    /// Which neurons of layer `index` are predicted of each token, 32 a word.
    fn predict_on_host(
        &mut self,
        index: usize,
        layer: &StoredLayer,
        residual: &[f32],
        input: &[f32],
    ) -> Vec<u32> {
        let (choices, policy) = (&self.choices[index], self.policies[index]);
        let choice = choices.choice(policy, self.bundle.predictors());
        let ffn = ffn_of(&self.bundle, index, layer, choice);
        let predictor_input = match choices.sees_residual(policy) {
            true => residual,
            false => input,
        };
        ffn.predicted(
            &self.threads,
            predictor_input,
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
