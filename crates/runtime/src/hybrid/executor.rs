//! The layers of a model on a device and the CPU: each part where the plan has it.

use std::time::Duration;

use powerinfer_gpu::{ColdNeurons, DeviceModel, FfnInput, HostParts};
use powerinfer_kernels::cuda::{DeviceError, NeuronCounts};

use super::{
    PassTimes,
    copied::{host_attention, host_prediction},
    expert_cache::ExpertCache,
    times::Stopwatch,
};
use crate::{
    RuntimeError, Stage,
    executor::LayerExecutor,
    executor::{CpuExecutor, append, mix},
    ffn::FfnBuffers,
    model::Model,
    pass::Pass,
    selector::Selector,
};

/// Computes layers on a device and the CPU.
#[derive(Debug)]
pub(crate) struct HybridExecutor {
    pub(crate) device: DeviceModel,
    cpu: CpuExecutor,
    cold: FfnBuffers,
    /// Experts that are copied to the device while the model runs.
    experts: Option<ExpertCache>,
    /// The FFN's input on the host, before its norm; none if the host does not need it.
    residual: Option<Vec<f32>>,
    /// Neurons that had been computed on the host when the pass began.
    computed_before: u64,
    /// Whether the latest hidden state is on the device.
    hidden_on_device: bool,
    /// The layer that runs.
    layer: usize,
    /// Times of both sides, if they are measured.
    times: Option<PassTimes>,
}

impl HybridExecutor {
    /// An executor of a model whose parts on a device are `device`, of which `experts` replaces some.
    pub(crate) fn new(device: DeviceModel, experts: Option<ExpertCache>) -> Self {
        Self {
            device,
            experts,
            cpu: CpuExecutor::default(),
            cold: FfnBuffers::default(),
            residual: None,
            computed_before: 0,
            hidden_on_device: false,
            layer: 0,
            times: None,
        }
    }

    /// Measures the times of both sides from now on, or no longer; returns those measured so far.
    pub(crate) fn take_times(&mut self, continues: bool) -> PassTimes {
        self.device.set_timed(continues);
        let fresh = continues.then(|| PassTimes::new(self.device.layer_count()));
        std::mem::replace(&mut self.times, fresh).unwrap_or_default()
    }
}

impl LayerExecutor for HybridExecutor {
    fn max_batch_tokens(&self) -> usize {
        self.device.prompt_tokens()
    }

    fn max_exact_tokens(&self) -> usize {
        self.device.batch_tokens()
    }

    fn has_embeddings(&self, tokens: &[u32]) -> bool {
        matches!(tokens, [token] if self.device.has_embedding(*token))
    }

    fn begin(&mut self, pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        self.hidden_on_device = self.has_embeddings(pass.tokens);
        let device = &mut self.device;
        let mut caches = Vec::with_capacity(pass.tokens.len());
        for (index, session) in pass.sessions.iter().enumerate() {
            let tokens = pass.tokens_of(index);
            caches.extend(std::iter::repeat_n(&session.on_device[..], tokens));
        }
        let is_prompt = pass.tokens.len() > device.batch_tokens();
        device.begin(&caches, pass.observers.activity.is_some())?;
        if let Some(experts) = &mut self.experts {
            experts.begin(device, pass.model, is_prompt, DeviceModel::streams)?;
        }
        // Timed passes end a segment in every layer.
        device.launch_ahead(self.times.is_none())?;
        let positions = pass.buffers.positions.iter().copied();
        device.start(positions, &pass.buffers.rotations)?;
        self.computed_before = pass.observers.statistics.neurons_computed;
        Ok(())
    }

    fn attention(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        self.begin_layer(layer);
        self.residual = None;
        if self.device.copies_parts() {
            self.copy_parts(pass, layer)?;
        }
        if self.device.streams(layer) {
            self.device.open_stream()?;
        }
        if !self.device.has_attention(layer) {
            return self.attention_on_host(pass, layer);
        }
        self.bring_to_device(pass)?;
        let device = &mut self.device;
        if pass.model.config.block.is_parallel() {
            device.keep_residual()?;
            if !device.has_ffn(layer) || device.is_predicted_on_host(layer) {
                self.residual = Some(read_hidden(device, pass)?);
            }
        }
        device.project_attention(layer)?;
        pass.observers.end_stage(Stage::Launching);
        if device.has_cache(layer) {
            device.attend(layer)?;
        } else {
            // Keys and values are on the host.
            let mut projections = device.read_projections()?.concat();
            pass.observers.end_stage(Stage::Waiting);
            let watch = self.watch(pass);
            let mut mixed = Vec::new();
            mix(pass, layer, &mut projections, false, &mut mixed);
            self.add_host(watch, pass);
            pass.observers.end_stage(Stage::Attention);
            self.device.write_mixed(&mixed)?;
        }
        self.device.add_attention(layer)?;
        pass.observers.end_stage(Stage::Launching);
        Ok(())
    }

    fn ffn(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        if !self.device.has_ffn(layer) {
            return self.ffn_on_host(pass, layer);
        }
        let model = pass.model;
        // Cold neurons of a prompt may be copied to the device instead of being computed on the host.
        let streams = self.device.streams(layer);
        let cold = model.bundle.plan().layers[layer].hot_count < model.config.ffn_size && !streams;
        if !self.device.has_attention(layer) {
            if let (true, Some(residual)) = (model.config.block.is_parallel(), &self.residual) {
                self.device.write_residual(residual)?;
            }
            self.bring_to_device(pass)?;
        }
        if streams {
            // The device computes attention in parallel.
            with_cold_neurons(model, layer, |cold| self.device.begin_stream(layer, cold))?;
        }
        let reads = if model.config.block.is_parallel() {
            FfnInput::Residual
        } else {
            FfnInput::Hidden
        };
        if self.device.is_predicted_on_host(layer) {
            self.predict_on_host(pass, layer)?;
        } else {
            self.device.predict(layer, reads, cold)?;
        }
        self.device.route(layer, reads, cold)?;
        self.device.gate_up(layer, reads, cold)?;
        if pass.observers.activity.is_some() && pass.tokens.len() == 1 {
            let products = self.device.read_products(layer)?;
            let cache = self
                .experts
                .as_mut()
                .and_then(|experts| experts.layer(layer));
            let neurons = (0..).zip(products).map(|(row, product)| {
                let neuron = cache.as_ref().map_or(row, |cache| cache.neuron(row));
                (neuron, product)
            });
            pass.observers.set_active(layer, neurons);
        }
        pass.observers.end_stage(Stage::Launching);
        let neurons = model.config.ffn_size as u64;
        pass.observers.statistics.neurons += pass.tokens.len() as u64 * neurons;
        pass.observers.statistics.neurons_per_pass += neurons;
        if cold && !self.device.is_launched_ahead() {
            self.device.end_segment()?;
            self.cold_neurons(pass, layer)?;
        }
        self.device.down(layer, cold)?;
        if streams {
            with_cold_neurons(model, layer, |cold| self.device.stream(layer, cold))?;
        }
        self.device.norm_after(layer)?;
        pass.observers.end_stage(Stage::Launching);
        if self.device.copies_parts() && !self.device.layer(layer).has_cache {
            let both = self.device.read_keys_and_values()?;
            pass.observers.end_stage(Stage::Waiting);
            let watch = self.watch(pass);
            append(pass, layer, both);
            self.add_host(watch, pass);
            pass.observers.end_stage(Stage::Attention);
        }
        Ok(())
    }

    fn finish(&mut self, pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        if self.device.is_launched_ahead() {
            self.cold_neurons_of_all_layers(pass)?;
        }
        // For one token, the search for the largest logit starts before the host waits.
        let search = pass
            .search
            .filter(|_| pass.tokens.len() == 1 && self.hidden_on_device && self.device.has_head());
        match search {
            Some(vocabulary) => self.device.find_largest(None, vocabulary)?,
            None => self.bring_to_host(pass)?,
        }
        let watch = self.watch(pass);
        let device = &mut self.device;
        device.end_segment()?;
        let counts = device.take_counts()?;
        device.check_syncs()?;
        if search.is_some() {
            self.add_waiting(watch);
            pass.search = None;
        }
        let device = &self.device;
        let computed = u64::from(counts.down_rows);
        let statistics = &mut pass.observers.statistics;
        let on_host = statistics.neurons_computed - self.computed_before;
        statistics.neurons_computed += computed;
        statistics.neurons_in_union += match counts.union_rows {
            0 => computed, // not counted in prompts
            counted => u64::from(counted),
        };
        let read = device.bytes_read(&pass.buffers.positions, counts);
        statistics.device_bytes_read += read;
        pass.observers.end_stage(Stage::Waiting);
        if let Some(experts) = &mut self.experts {
            let watch = Stopwatch::start(self.times.is_some(), 0);
            experts.after_pass(&mut self.device, pass.model)?;
            if let Some(times) = &mut self.times {
                times.layers[self.layer].host += watch.elapsed();
            }
            pass.observers.end_stage(Stage::Launching);
        }
        self.add_times(pass, counts, on_host, read)?;
        self.device.end();
        Ok(())
    }

    fn recover(&mut self, error: &RuntimeError) -> bool {
        let of_device = match error {
            RuntimeError::Device(error) => Some(error),
            _ => None,
        };
        self.device.recover(of_device)
    }
}

impl HybridExecutor {
    fn begin_layer(&mut self, layer: usize) {
        self.layer = layer;
        self.device.begin_layer(layer);
    }

    /// Copies the hidden state to the device if the latest is on the host.
    fn bring_to_device(&mut self, pass: &Pass<'_, '_>) -> Result<(), DeviceError> {
        if !std::mem::replace(&mut self.hidden_on_device, true) {
            self.device.write_hidden(&pass.buffers.hidden)?;
        }
        Ok(())
    }

    /// Copies the hidden state to the host if the latest is on the device.
    fn bring_to_host(&mut self, pass: &mut Pass<'_, '_>) -> Result<(), DeviceError> {
        if self.hidden_on_device {
            self.device.end_segment()?;
            let watch = self.watch(pass);
            self.device.read_hidden(&mut pass.buffers.hidden)?;
            self.hidden_on_device = false;
            self.add_waiting(watch);
        }
        Ok(())
    }

    /// Stopwatch of the host, which runs if times are measured.
    fn watch(&self, pass: &Pass<'_, '_>) -> Stopwatch {
        Stopwatch::start(self.times.is_some(), pass.observers.statistics.bytes_read)
    }

    /// Adds the host's computing in the current layer since `watch` was started.
    fn add_host(&mut self, watch: Stopwatch, pass: &Pass<'_, '_>) {
        if let Some(times) = &mut self.times {
            times.layers[self.layer].host += watch.elapsed();
            times.host_bytes += watch.bytes_since(pass.observers.statistics.bytes_read);
        }
    }

    /// Adds the host's waiting in the current layer since `watch` was started.
    fn add_waiting(&mut self, watch: Stopwatch) {
        if let Some(times) = &mut self.times {
            times.layers[self.layer].waiting += watch.elapsed();
        }
    }

    /// Adds the device's part of a complete pass, in which the host computed `on_host` neurons and the device read `read` bytes.
    fn add_times(
        &mut self,
        pass: &Pass<'_, '_>,
        counts: NeuronCounts,
        on_host: u64,
        read: u64,
    ) -> Result<(), DeviceError> {
        let Some(times) = &mut self.times else {
            return Ok(());
        };
        let computed = u64::from(counts.down_rows);
        times.tokens += pass.tokens.len() as u64;
        times.neurons_on_device += computed;
        times.neurons += computed + on_host;
        times.device_bytes += read;
        for (layer, seconds) in self.device.take_segment_times()? {
            times.layers[layer].device += Duration::from_secs_f64(seconds.max(0.0));
        }
        Ok(())
    }

    /// Copies the parts of `layer` on the host, except neurons, to the device: attention, earlier keys and values, and the predictor.
    fn copy_parts(&mut self, pass: &Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        let (model, on_device) = (pass.model, self.device.layer(layer));
        let (is_here, has_cache) = (on_device.attention.is_some(), on_device.has_cache);
        let predicts = on_device.is_predicted_on_host();
        if !is_here || predicts {
            self.device.copy_parts(&HostParts {
                attention: (!is_here).then(|| host_attention(model, layer)),
                prediction: predicts
                    .then(|| host_prediction(&model.selector(layer)))
                    .flatten(),
                copy: &|to, from| model.threads.copy(to, from),
            })?;
        }
        let session = pass.sessions.last().expect("a sequence runs");
        let positions = session.position();
        if !has_cache && positions > 0 {
            let [keys, values] = session.layers[layer].to_rows(&model.threads);
            self.device
                .write_copied_cache(positions, [&keys, &values])?;
        }
        Ok(())
    }

    fn attention_on_host(
        &mut self,
        pass: &mut Pass<'_, '_>,
        layer: usize,
    ) -> Result<(), RuntimeError> {
        self.bring_to_host(pass)?;
        pass.observers.end_stage(Stage::Waiting);
        let watch = self.watch(pass);
        self.cpu.attention(pass, layer)?;
        self.add_host(watch, pass);
        let residual = if pass.model.config.block.is_parallel() {
            std::mem::take(&mut self.cpu.residual)
        } else {
            pass.buffers.hidden.clone()
        };
        self.residual = Some(residual);
        Ok(())
    }

    fn ffn_on_host(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        self.bring_to_host(pass)?;
        pass.observers.end_stage(Stage::Waiting);
        self.cpu.residual = self.residual.take().unwrap_or_default();
        let watch = self.watch(pass);
        self.cpu.ffn(pass, layer)?;
        self.add_host(watch, pass);
        Ok(())
    }

    /// Predicts the active neurons of `layer` on the host, for both sides.
    fn predict_on_host(
        &mut self,
        pass: &mut Pass<'_, '_>,
        layer: usize,
    ) -> Result<(), RuntimeError> {
        let model = pass.model;
        let residual = match self.residual.take() {
            Some(residual) => residual,
            None => read_hidden(&mut self.device, pass)?,
        };
        let mut input = Vec::new();
        model.ffn_norm(layer, &residual, &mut input);
        let predictor_input = if model.predictor_reads_residual(layer) {
            &residual
        } else {
            &input
        };
        let watch = self.watch(pass);
        let statistics = &mut pass.observers.statistics;
        let ffn = model.ffn_with(layer, model.selector(layer));
        let words =
            ffn.predicted_words(&model.threads, predictor_input, &mut self.cold, statistics);
        self.add_host(watch, pass);
        pass.observers.end_stage(Stage::Prediction);
        self.device.set_predicted(layer, &words)?;
        Ok(())
    }

    /// Computes the cold neurons of all layers of a token whose launches are all on their way.
    fn cold_neurons_of_all_layers(&mut self, pass: &mut Pass<'_, '_>) -> Result<(), RuntimeError> {
        let model = pass.model;
        self.device.end_segment()?;
        for (layer, plan) in model.bundle.plan().layers.iter().enumerate() {
            if plan.hot_count < model.config.ffn_size {
                self.begin_layer(layer);
                self.cold_neurons(pass, layer)?;
                self.device.signal_cold_sum(layer);
            }
        }
        Ok(())
    }

    /// Waits for the FFN's input in `layer`, and computes the sum of its cold neurons for the device.
    fn cold_neurons(&mut self, pass: &mut Pass<'_, '_>, layer: usize) -> Result<(), RuntimeError> {
        let model = pass.model;
        let watch = self.watch(pass);
        self.device.wait_for_input(layer)?;
        self.add_waiting(watch);
        let device = &self.device;
        let mut input = vec![0.0; pass.tokens.len() * model.config.hidden_size];
        device.read_input(&mut input);
        pass.observers.end_stage(Stage::Waiting);
        let mut mask = (device.layer(layer).is_masked()).then(|| device.mask_words());
        let weights = (model.config.experts.as_ref()).map(|_| device.routing_weights());
        let watch = self.watch(pass);
        let cache = self.experts.as_mut();
        let cache = cache.and_then(|experts| experts.layer(layer));
        let on_device = match (cache, &weights, &model.config.experts) {
            (Some(cache), Some(weights), Some(experts)) => {
                let statistics = &mut pass.observers.statistics;
                let tokens = weights.chunks_exact(experts.blocks());
                for (token, weights) in tokens.enumerate() {
                    let [hits, selected] = cache.select(token, weights);
                    statistics.experts_on_device += hits;
                    statistics.experts_selected += selected;
                }
                // The device's mask is in the order of its rows.
                mask = None;
                Some(cache.on_device())
            }
            _ => None,
        };
        let observes = pass.observers.activity.is_some() && pass.tokens.len() == 1;
        self.cold.recorded = observes.then(Vec::new);
        let statistics = &mut pass.observers.statistics;
        let ffn = model.ffn_with(layer, model.selector(layer));
        let sum = ffn.cold_sum(
            &model.threads,
            &input,
            mask.as_deref(),
            weights,
            on_device,
            &mut self.cold,
            statistics,
        );
        for neurons in self.cold.recorded.take().into_iter().flatten() {
            pass.observers.add_active(layer, neurons);
        }
        self.device.write_cold_sum(&sum);
        self.add_host(watch, pass);
        pass.observers.end_stage(Stage::Down);
        Ok(())
    }
}

/// Copies the hidden state of the tokens that run from the device.
fn read_hidden(device: &mut DeviceModel, pass: &Pass<'_, '_>) -> Result<Vec<f32>, DeviceError> {
    let mut hidden = vec![0.0; pass.buffers.hidden.len()];
    device.read_hidden(&mut hidden)?;
    Ok(hidden)
}

/// Calls `copy` with the neurons of `layer` in host memory, of which the cold ones are copied to the device.
pub(super) fn with_cold_neurons<Output>(
    model: &Model,
    layer: usize,
    copy: impl FnOnce(&ColdNeurons<'_>) -> Output,
) -> Output {
    let ffn = model.ffn_with(layer, model.selector(layer));
    copy(&ColdNeurons {
        gate: (ffn.gate.matrix, ffn.gate.bias),
        up: ffn.up.map(|up| (up.matrix, up.bias)),
        down: ffn.down.matrix,
        score: match &ffn.selector {
            Selector::Threshold(scoring) => scoring.of_neurons(),
            _ => [None; 2],
        },
        copy: &|to, from| model.threads.copy(to, from),
    })
}
