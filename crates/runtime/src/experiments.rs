//! Changes to what is computed that nobody runs a model with, but that tell what skipping costs.

use crate::{LayerAudit, Runtime};

impl Runtime {
    /// From now on computes these neurons of each layer and no others, whatever the policies say: places in the bundle,
    /// in ascending order. None ends that.
    ///
    /// Panics where layers are more or fewer, or a place is none; and where neurons are on a device.
    pub fn keep_only(&mut self, kept: Option<&[Vec<u32>]>) {
        assert!(!self.uses_device(), "neurons on the processor");
        let neurons = self.config.ffn_size as u32;
        if let Some(kept) = kept {
            assert_eq!(kept.len(), self.choices.len(), "a list per layer");
            let is_ascending = |list: &Vec<u32>| list.windows(2).all(|pair| pair[0] < pair[1]);
            assert!(kept.iter().all(is_ascending), "places in ascending order");
            let mut last = kept.iter().filter_map(|list| list.last());
            assert!(last.all(|place| *place < neurons), "places of neurons");
        }
        for (layer, choices) in self.choices.iter_mut().enumerate() {
            choices.keep_only(kept.map(|kept| kept[layer].clone()));
        }
    }

    /// Raises the logit from which predictors predict a neuron, of all layers: the higher, the fewer are computed.
    ///
    /// Panics where neurons are on a device.
    pub fn raise_predictors(&mut self, by: f32) {
        assert!(!self.uses_device(), "neurons on the processor");
        for choices in &mut self.choices {
            choices.raise_predictor(by);
        }
    }

    /// From now on computes every FFN in full as well, and counts what the policy chose beside what fired.
    ///
    /// Panics where neurons are on a device.
    pub fn begin_audit(&mut self) {
        assert!(!self.uses_device(), "neurons on the processor");
        self.audit = Some(vec![LayerAudit::default(); self.choices.len()]);
    }

    /// What was counted, layer by layer; ends it.
    pub fn end_audit(&mut self) -> Vec<LayerAudit> {
        self.audit.take().unwrap_or_default()
    }
}
