//! The layers of a model on a device and the CPU: each part where the plan has it.

use powerinfer_kernels::cuda::GpuCache;

use super::{ColdWeights, Hybrid, launches::Source};
use crate::{
    RuntimeError, Stage,
    executor::{CpuExecutor, Projections, mix},
    ffn::FfnBuffers,
    forward::LayerExecutor,
    model::Model,
    pass::Pass,
};

/// Computes layers on a device and the CPU.
#[derive(Debug)]
pub(crate) struct HybridExecutor {
    pub(crate) hybrid: Hybrid,
    cpu: CpuExecutor,
    cold: FfnBuffers,
    /// The FFN's input on the host, before its norm; none where the host does not need it.
    residual: Option<Vec<f32>>,
    /// Neurons that had been computed on the host when the pass began.
    computed_before: u64,
}

impl HybridExecutor {
    /// An executor of the parts that are on the device of `hybrid`.
    pub(crate) fn new(hybrid: Hybrid) -> Self {
        Self {
            hybrid,
            cpu: CpuExecutor::default(),
            cold: FfnBuffers::default(),
            residual: None,
            computed_before: 0,
        }
    }
}

impl LayerExecutor for HybridExecutor {
    fn batch_tokens(&self) -> usize {
        self.hybrid.prompt_tokens()
    }

    fn batches_sequences(&self) -> bool {
        false
    }

    fn begin(&mut self, pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
        let hybrid = &mut self.hybrid;
        hybrid.hidden_on_device = false;
        hybrid.is_whole = false;
        match pass.tokens.len() {
            1 => {
                let caches = pass.sequences[0].on_device.iter().flatten();
                let places = caches.flat_map(GpuCache::addresses).collect();
                hybrid.segments.start(places);
            }
            tokens => hybrid.turn_to_prompts(tokens),
        }
        hybrid.is_whole = hybrid.can_run_whole()?;
        hybrid.start(pass.buffers.positions[0], &pass.buffers.rotations)?;
        self.computed_before = pass.observers.statistics.neurons_computed;
        Ok(())
    }

    fn attention(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        let hybrid = &mut self.hybrid;
        hybrid.layer = layer;
        self.residual = None;
        if hybrid.streams(layer) {
            hybrid.open_stream()?;
        }
        if hybrid.layers[layer].attention.is_none() {
            return self.attention_on_host(pass, layer);
        }
        hybrid.bring_to_device(&pass.buffers.hidden)?;
        if pass.model.is_parallel() {
            hybrid.keep_residual()?;
            if !hybrid.has_ffn(layer) || hybrid.layers[layer].needs_host_input() {
                self.residual = Some(hybrid.read_hidden()?);
            }
        }
        hybrid.project_attention(layer)?;
        pass.observers.stage(Stage::Launching);
        match &mut pass.sequences[0].on_device[layer] {
            Some(cache) => hybrid.attend(layer, cache)?,
            None => {
                // Keys and values are on the host.
                let [query, key, value] = hybrid.read_projections()?;
                pass.observers.stage(Stage::Waiting);
                let mut projections = Projections { query, key, value };
                let watch = hybrid.watch(pass.observers.statistics.bytes_read);
                mix(pass, layer, &mut projections);
                hybrid.add_host(watch, pass.observers.statistics.bytes_read);
                pass.observers.stage(Stage::Attention);
                hybrid.end_segment()?;
                hybrid.state.mixed.write(&projections.query)?;
            }
        }
        hybrid.add_attention(layer)?;
        pass.observers.stage(Stage::Launching);
        Ok(())
    }

    fn ffn(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        if !self.hybrid.has_ffn(layer) {
            return self.ffn_on_host(pass, layer);
        }
        let (model, hybrid) = (pass.model, &mut self.hybrid);
        // Cold neurons of a prompt may be copied to the device instead of being computed on the host.
        let streams = hybrid.streams(layer);
        let cold = model.bundle.plan().layers[layer].hot_count < model.config.ffn_size && !streams;
        if hybrid.layers[layer].attention.is_none() {
            if let (true, Some(residual)) = (model.is_parallel(), &self.residual) {
                hybrid.end_segment()?;
                hybrid.state.residual.write(residual)?;
            }
            hybrid.bring_to_device(&pass.buffers.hidden)?;
        }
        if streams {
            // The device is busy with attention meanwhile.
            hybrid.begin_stream(layer, &cold_weights(model, layer))?;
        }
        let reads = match model.is_parallel() {
            true => Source::Residual,
            false => Source::Hidden,
        };
        if hybrid.layers[layer].needs_host_input() {
            self.predict_on_host(pass, layer)?;
        } else {
            hybrid.predict(layer, reads, cold)?;
        }
        let hybrid = &mut self.hybrid;
        hybrid.gate_up(layer, reads, cold)?;
        pass.observers.stage(Stage::Launching);
        let neurons = model.config.ffn_size as u64;
        pass.observers.statistics.neurons += pass.tokens.len() as u64 * neurons;
        pass.observers.statistics.neurons_passed += neurons;
        if cold && !hybrid.is_whole {
            hybrid.end_segment()?;
            self.cold_neurons(pass, layer)?;
        }
        let hybrid = &mut self.hybrid;
        hybrid.down(layer, cold)?;
        if streams {
            hybrid.stream(layer, &cold_weights(model, layer))?;
        }
        hybrid.norm_after(layer)?;
        pass.observers.stage(Stage::Launching);
        Ok(())
    }

    fn finish(&mut self, pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
        if self.hybrid.is_whole {
            self.cold_neurons_of_all_layers(pass)?;
        }
        let hybrid = &mut self.hybrid;
        hybrid.bring_to_host(&mut pass.buffers.hidden)?;
        hybrid.end_segment()?;
        hybrid.check_syncs()?;
        let counts = hybrid.take_counts()?;
        let computed = u64::from(counts.down_rows);
        let statistics = &mut pass.observers.statistics;
        let on_host = statistics.neurons_computed - self.computed_before;
        statistics.neurons_computed += computed;
        statistics.neurons_in_union += computed;
        pass.observers.stage(Stage::Waiting);
        hybrid.add_times(pass.buffers.positions[0], counts, on_host)?;
        if pass.tokens.len() > 1 {
            hybrid.turn_to_prompts(1);
        }
        Ok(())
    }

    fn abort(&mut self, pass: &mut Pass<'_>) -> bool {
        if self.hybrid.is_whole {
            self.hybrid.give_up();
        }
        if pass.tokens.len() > 1 {
            self.hybrid.turn_to_prompts(1);
            return false;
        }
        // Once more without graphs.
        self.hybrid.segments.fail()
    }
}

impl HybridExecutor {
    fn attention_on_host(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        let hybrid = &mut self.hybrid;
        hybrid.bring_to_host(&mut pass.buffers.hidden)?;
        pass.observers.stage(Stage::Waiting);
        let watch = hybrid.watch(pass.observers.statistics.bytes_read);
        self.cpu.attention(pass, layer)?;
        hybrid.add_host(watch, pass.observers.statistics.bytes_read);
        self.residual = Some(std::mem::take(&mut self.cpu.residual));
        Ok(())
    }

    fn ffn_on_host(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        let hybrid = &mut self.hybrid;
        hybrid.bring_to_host(&mut pass.buffers.hidden)?;
        pass.observers.stage(Stage::Waiting);
        let residual = self.residual.take();
        self.cpu.residual = residual.unwrap_or_else(|| pass.buffers.hidden.clone());
        let watch = hybrid.watch(pass.observers.statistics.bytes_read);
        self.cpu.ffn(pass, layer)?;
        hybrid.add_host(watch, pass.observers.statistics.bytes_read);
        Ok(())
    }

    /// Predicts the active neurons of `layer` on the host, for both sides.
    fn predict_on_host(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        let (model, hybrid) = (pass.model, &mut self.hybrid);
        let residual = match self.residual.take() {
            Some(residual) => residual,
            None => hybrid.read_hidden()?,
        };
        let mut input = residual.clone();
        model.ffn_norm(layer, &mut input);
        let predictor_input = match model.predictor_reads_residual(layer) {
            true => &residual,
            false => &input,
        };
        let statistics = &mut pass.observers.statistics;
        let watch = hybrid.watch(statistics.bytes_read);
        let ffn = model.ffn_with(layer, model.selector(layer));
        let words =
            ffn.predicted_words(&model.threads, predictor_input, &mut self.cold, statistics);
        hybrid.add_host(watch, statistics.bytes_read);
        pass.observers.stage(Stage::Prediction);
        hybrid.set_predicted(layer, &words)?;
        Ok(())
    }

    /// Computes the cold neurons of all layers of a token whose launches are all on their way.
    fn cold_neurons_of_all_layers(&mut self, pass: &mut Pass<'_>) -> Result<(), RuntimeError> {
        let model = pass.model;
        self.hybrid.end_segment()?;
        for (layer, plan) in model.bundle.plan().layers.iter().enumerate() {
            if plan.hot_count < model.config.ffn_size {
                self.hybrid.layer = layer;
                self.cold_neurons(pass, layer)?;
                self.hybrid.sync(layer);
            }
        }
        Ok(())
    }

    /// Waits for the FFN's input in `layer`, and computes the sum of its cold neurons for the device.
    fn cold_neurons(&mut self, pass: &mut Pass<'_>, layer: usize) -> Result<(), RuntimeError> {
        let (model, hybrid) = (pass.model, &mut self.hybrid);
        hybrid.wait_for_input(layer)?;
        let mut input = vec![0.0; pass.tokens.len() * model.config.hidden_size];
        hybrid.state.input.read_f32(&mut input);
        pass.observers.stage(Stage::Waiting);
        let mask = hybrid.layers[layer].predicts().then(|| hybrid.read_mask());
        let statistics = &mut pass.observers.statistics;
        let watch = hybrid.watch(statistics.bytes_read);
        let ffn = model.ffn_with(layer, model.selector(layer));
        let sum = ffn.cold_sum(
            &model.threads,
            &input,
            mask.as_deref(),
            &mut self.cold,
            statistics,
        );
        hybrid.state.cold.write_f32(&sum);
        hybrid.add_host(watch, statistics.bytes_read);
        pass.observers.stage(Stage::Down);
        Ok(())
    }
}

/// The weights of `layer` on the host, of whose neurons the cold ones are copied.
fn cold_weights(model: &Model, layer: usize) -> ColdWeights<'_> {
    let ffn = model.ffn_with(layer, model.selector(layer));
    ColdWeights {
        gate: ffn.gate,
        up: ffn.up,
        down: ffn.down,
        selector: ffn.selector,
        threads: &model.threads,
    }
}
