//! Interventions that measure what skipping neurons costs; no model is run with them otherwise.

use crate::{LayerAudit, Runtime};

impl Runtime {
    /// Computes only the neurons in `kept`, one list of indices in ascending order per layer, whatever the policies;
    /// `None` lifts the restriction.
    ///
    /// # Panics
    ///
    /// Panics where lists do not fit the model, and where neurons are on a device.
    pub fn keep_only(&mut self, kept: Option<&[Vec<u32>]>) {
        assert!(!self.uses_device(), "all neurons on the CPU");
        let neurons = self.model.config.ffn_size as u32;
        if let Some(kept) = kept {
            assert_eq!(kept.len(), self.model.selectors.len(), "a list per layer");
            let is_ascending = |list: &Vec<u32>| list.windows(2).all(|pair| pair[0] < pair[1]);
            assert!(kept.iter().all(is_ascending), "indices in ascending order");
            let mut last = kept.iter().filter_map(|list| list.last());
            assert!(last.all(|index| *index < neurons), "indices of neurons");
        }
        for (layer, selectors) in self.model.selectors.iter_mut().enumerate() {
            selectors.keep_only(kept.map(|kept| kept[layer].clone()));
        }
    }

    /// Raises the logit from which the predictors of all layers predict a neuron active: the higher, the fewer.
    ///
    /// # Panics
    ///
    /// Panics where neurons are on a device.
    pub fn raise_predictors(&mut self, by: f32) {
        assert!(!self.uses_device(), "all neurons on the CPU");
        for selectors in &mut self.model.selectors {
            selectors.raise_predictor(by);
        }
    }

    /// Computes every FFN densely as well from now on, and counts selected and active neurons.
    ///
    /// # Panics
    ///
    /// Panics where neurons are on a device.
    pub fn begin_audit(&mut self) {
        assert!(!self.uses_device(), "all neurons on the CPU");
        self.observers.audit = Some(vec![LayerAudit::default(); self.model.selectors.len()]);
    }

    /// Takes what was counted, layer by layer, and stops counting.
    pub fn end_audit(&mut self) -> Vec<LayerAudit> {
        self.observers.audit.take().unwrap_or_default()
    }
}
