//! Changes to an engine that measure what skipping neurons costs and saves.

use std::time::{Duration, Instant};

use powerinfer_artifact::{
    plan::{InputThresholds, Policy, Threshold},
    random::Random,
};

use powerinfer_pool::RecordedJob;

use crate::{
    Engine, LayerAudit, RuntimeError, Session, Stage, StageMark, Statistics, Threads,
    ffn::FfnInputs, selector::Selector,
};

/// Access to the neurons and policies of an engine on the CPU; made by [`Engine::experiments`].
#[derive(Debug)]
pub struct Experiments<'a> {
    engine: &'a mut Engine,
}

impl<'a> Experiments<'a> {
    pub(crate) fn new(engine: &'a mut Engine) -> Self {
        Self { engine }
    }

    fn assert_on_host(&self) {
        assert!(!self.engine.uses_device(), "everything is on the CPU");
    }
    /// Sets the policy of `layer`, and its threshold if one is given.
    ///
    /// # Errors
    ///
    /// The bundle lacks what the policy needs.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer, or a part of the model is on a device, whose selectors cannot change.
    pub fn set_policy(
        &mut self,
        layer: usize,
        policy: Policy,
        threshold: Option<Threshold>,
    ) -> Result<(), RuntimeError> {
        self.assert_on_host();
        let selectors = &mut self.engine.model.selectors[layer];
        selectors.set_threshold(threshold);
        selectors.check(policy, self.engine.model.bundle.folder(), layer)?;
        self.engine.model.policies[layer] = policy;
        Ok(())
    }

    /// Skips the inputs of projections of `layer` that are below `thresholds`; `None` reads all. Inputs of gate and up are
    /// skipped only under `dense`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer, or a part of the model is on a device, which cannot skip inputs.
    pub fn set_input_thresholds(&mut self, layer: usize, thresholds: Option<InputThresholds>) {
        self.assert_on_host();
        self.engine.model.input_thresholds[layer] = thresholds;
    }

    /// Computes only the neurons in `kept`, one list of indices in ascending order per layer, whatever the policies;
    /// `None` lifts the restriction.
    ///
    /// # Panics
    ///
    /// Panics if the lists do not fit the model, or a part of it is on a device.
    pub fn keep_only(&mut self, kept: Option<&[Vec<u32>]>) {
        self.assert_on_host();
        let neurons = self.engine.model.config.ffn_size as u32;
        if let Some(kept) = kept {
            assert_eq!(
                kept.len(),
                self.engine.model.selectors.len(),
                "a list per layer"
            );
            let is_ascending = |list: &Vec<u32>| list.windows(2).all(|pair| pair[0] < pair[1]);
            assert!(kept.iter().all(is_ascending), "indices in ascending order");
            let mut last = kept.iter().filter_map(|list| list.last());
            assert!(last.all(|index| *index < neurons), "indices of neurons");
        }
        for (layer, selectors) in self.engine.model.selectors.iter_mut().enumerate() {
            selectors.keep_only(kept.map(|kept| kept[layer].clone()));
        }
    }

    /// Raises the logit from which the predictors of all layers predict a neuron active: the higher it is, the
    /// fewer neurons are predicted.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device.
    pub fn raise_predictors(&mut self, by: f32) {
        self.assert_on_host();
        for selectors in &mut self.engine.model.selectors {
            selectors.raise_predictor(by);
        }
    }

    /// From now on, also computes every FFN densely, and counts selected and active neurons.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device.
    pub fn begin_audit(&mut self) {
        self.assert_on_host();
        self.engine.observers.audit = Some(vec![
            LayerAudit::default();
            self.engine.model.selectors.len()
        ]);
    }

    /// Takes what was counted, layer by layer, and stops counting.
    pub fn end_audit(&mut self) -> Vec<LayerAudit> {
        self.engine.observers.audit.take().unwrap_or_default()
    }

    /// Bytes of gate, of up (0 without it) and of down in `layer`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer.
    pub fn ffn_bytes(&self, layer: usize) -> [usize; 3] {
        let ffn = self.engine.model.ffn(layer);
        let up = ffn.up.as_ref();
        let matrices = [Some(&ffn.gate), up, Some(&ffn.down)];
        matrices.map(|linear| {
            linear.map_or(0, |linear| linear.matrix.rows() * linear.matrix.row_bytes())
        })
    }

    /// Sizes of the trained predictor of `layer`: bytes that every token reads, number of hidden units, and bytes of each
    /// unit's row, which is read if the unit is active. `None` if the policy does not use it.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer.
    pub fn predictor_bytes(&self, layer: usize) -> Option<[usize; 3]> {
        match self.engine.model.ffn(layer).selector {
            Selector::Predicted(predictor) => Some([
                predictor.shared_bytes(),
                predictor.units.rows(),
                predictor.unit_bytes(&self.engine.model.threads),
            ]),
            _ => None,
        }
    }

    /// From now on, divides all work as for `threads` threads, but runs it on one thread, part by part, and times each part.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device.
    pub fn record_parts(&mut self, threads: usize) {
        self.assert_on_host();
        let before = &self.engine.model.threads;
        let recording = Threads::recording(before.isa(), threads);
        self.engine.model.threads = recording.with_activations(before.activations());
    }

    /// Decodes `token` and returns the times of its parts; call [`record_parts`](Self::record_parts) first.
    ///
    /// # Errors
    ///
    /// Fails if [`Engine::decode`] does.
    ///
    /// # Panics
    ///
    /// Panics if a part of the model is on a device.
    pub fn decode_parts(
        &mut self,
        session: &mut Session,
        token: u32,
    ) -> Result<RecordedToken, RuntimeError> {
        self.assert_on_host();
        let engine = &mut *self.engine;
        engine.model.threads.take_jobs();
        engine.observers.statistics.start_clock();
        let stages = engine.observers.statistics.stages.as_mut();
        stages.expect("the clock runs").keep_marks();
        let started = Instant::now();
        engine.decode(&mut [(session, token)])?;
        let stages = engine.observers.statistics.stages.as_mut();
        Ok(RecordedToken {
            started,
            marks: stages.expect("the clock runs").take_marks(),
            jobs: engine.model.threads.take_jobs(),
        })
    }

    /// Time of gate, up and down of `layer` for one token with random inputs: of the neurons in `listed`, in ascending
    /// order, or of all.
    ///
    /// # Panics
    ///
    /// Panics if there is no such layer or neuron.
    pub fn time_ffn(&mut self, layer: usize, listed: Option<&[u32]>) -> Duration {
        let selector = listed.map_or(Selector::Dense, Selector::Listed);
        let ffn = self.engine.model.ffn_with(layer, selector);
        let mut random = Random::new(layer as u64);
        let normal = |_| random.normal() as f32;
        let x: Vec<f32> = (0..self.engine.model.config.hidden_size)
            .map(normal)
            .collect();
        let (mut hidden, mut statistics) = (x.clone(), Statistics::default());
        let (threads, buffers) = (&self.engine.model.threads, &mut self.engine.ffn_buffers);
        statistics.start_clock();
        let inputs = FfnInputs {
            x: &x,
            predictor: None,
            router: None,
        };
        ffn.add_output(threads, inputs, &mut hidden, buffers, &mut statistics);
        let stages = statistics.stages.unwrap_or_default();
        stages.lap(Stage::GateUp).time + stages.lap(Stage::Down).time
    }
}

/// Recorded stages and jobs of a decoded token, in order.
#[derive(Debug)]
pub struct RecordedToken {
    /// When decoding began.
    pub started: Instant,
    /// The end of each part of a stage.
    pub marks: Vec<StageMark>,
    /// Jobs, with the times of their parts.
    pub jobs: Vec<RecordedJob>,
}
