//! A cache of experts in device memory. A layer's slots first hold the last experts of its hot prefix. If an expert without a slot is
//! selected again soon, it replaces the least recently selected one.
//!
//! ```text
//! pass t      the host computes the missed expert, like any cold neuron
//! after t     the slot is cleared, and the copy starts
//! pass t + 1  runs during the copy; the host computes both experts
//! after t + 1 the slot has its new expert
//! ```
//!
//! Whether device or host computes an expert depends only on the selections of all passes so far, never on how long a copy takes.

use std::ops::Range;

use powerinfer_artifact::plan::LayerPlan;
use powerinfer_gpu::{DeviceModel, DeviceSelector};
use powerinfer_kernels::cuda::DeviceError;

use super::executor::with_cold_neurons;
use crate::{masks::WORD, model::Model};

/// Maximum bytes copied after a pass; a larger expert is copied alone. More bytes would delay the next token, because the host writes them
/// to pinned memory.
pub const EXPERT_COPY_BYTES: usize = 16 << 20;

/// Reuse distance, as a multiple of the number of slots, below which an expert is copied. Experts with longer distances would be evicted
/// before they are selected again.
pub const EXPERT_DISTANCES: usize = 2;

/// The caches of all layers.
#[derive(Debug)]
pub(crate) struct ExpertCache {
    /// By layer; `None` if a layer has no slots.
    layers: Vec<Option<LayerCache>>,
    /// Maximum number of experts that are copied at a time.
    at_once: usize,
    /// Passes so far.
    passes: usize,
    /// The first error of a copy, after which the device's experts are unknown.
    failure: Option<DeviceError>,
}

/// A layer's slots for experts, and its experts by their last selection.
#[derive(Debug, Clone)]
pub(super) struct LayerCache {
    slots: Vec<Slot>,
    /// Rows of each expert in the bundle; of an expert whose rows are not consecutive, those of its first ones.
    rows: Vec<Range<usize>>,
    /// Experts that a slot may hold, most recently selected first.
    recent: Vec<u16>,
    /// A bit per neuron of the bundle, set if the device computes it.
    on_device: Vec<u64>,
    /// Whether an expert was selected before.
    is_known: Vec<bool>,
    /// Selections of the pass that runs: the token's index in the pass and the expert.
    selected: Vec<(u32, u16)>,
}

/// Rows on the device that hold one expert at a time.
#[derive(Debug, Clone)]
struct Slot {
    rows: Range<usize>,
    /// The expert that the plan puts here.
    first: u16,
    expert: u16,
    /// Whether the expert's copy has ended.
    is_there: bool,
}

impl LayerCache {
    /// Slots for the last `cached` experts of the first `hot` neurons; `blocks` has the block of each neuron, of which the first `experts`
    /// are experts. `None` if there are no such experts, or if no expert could replace them.
    pub(super) fn new(blocks: &[u16], experts: usize, hot: usize, cached: usize) -> Option<Self> {
        let mut rows: Vec<Range<usize>> = vec![0..0; experts];
        let mut is_whole = vec![true; experts];
        let mut start = 0;
        for run in blocks.chunk_by(|block, next| block == next) {
            let (own, expert) = (start..start + run.len(), usize::from(run[0]));
            start = own.end;
            match rows.get_mut(expert) {
                Some(rows) if rows.end == 0 => *rows = own,
                Some(_) => is_whole[expert] = false,
                None => {}
            }
        }
        let rows_of = |expert: &u16| &rows[usize::from(*expert)];
        let size = rows.iter().map(Range::len).max().unwrap_or(0);
        let mut order: Vec<u16> = (0..experts as u16).collect();
        // An expert of which a part is hot stays where it is.
        order.retain(|expert| {
            let own = rows_of(expert);
            let is_divided = own.start < hot && own.end > hot;
            is_whole[usize::from(*expert)] && own.len() == size && !is_divided
        });
        order.sort_by_key(|expert| rows_of(expert).start);
        let here = order.partition_point(|expert| rows_of(expert).end <= hot);
        order.drain(..here.saturating_sub(cached));
        let slots = order.iter().take(here.min(cached)).map(|expert| Slot {
            rows: rows_of(expert).clone(),
            first: *expert,
            expert: *expert,
            is_there: true,
        });
        let slots: Vec<Slot> = slots.collect();
        let mut on_device = vec![0; blocks.len().div_ceil(WORD)];
        set(&mut on_device, 0..hot, true);
        (!slots.is_empty() && slots.len() < order.len()).then_some(Self {
            slots,
            rows,
            recent: order,
            on_device,
            is_known: vec![false; experts],
            selected: Vec::new(),
        })
    }

    /// Neurons that the device computes, a bit each.
    pub(super) fn on_device(&self) -> &[u64] {
        &self.on_device
    }

    /// The neuron of the bundle that the device computes in `row`.
    pub(super) fn neuron(&self, row: u32) -> u32 {
        let is_here = |slot: &&Slot| slot.rows.contains(&(row as usize));
        self.slots.iter().find(is_here).map_or(row, |slot| {
            let first = self.rows[usize::from(slot.expert)].start;
            row + first as u32 - slot.rows.start as u32
        })
    }

    /// Records the experts that token `index` of a pass selected: those with a non-zero routing weight in `weights`. Returns the number of
    /// them on the device, and the number of all of them.
    pub(super) fn select(&mut self, index: usize, weights: &[f32]) -> [u64; 2] {
        let mut counts = [0; 2];
        for (expert, (rows, weight)) in self.rows.iter().zip(weights).enumerate() {
            if *weight != 0.0 {
                counts[0] += self.on_device[rows.start / WORD] >> (rows.start % WORD) & 1;
                counts[1] += 1;
                self.selected.push((index as u32, expert as u16));
            }
        }
        counts
    }

    /// Moves the experts that the pass selected to the front of `recent`. Returns the missed ones whose reuse distance makes a copy
    /// worthwhile. As in a profile, a token's own selections do not affect its distances; if it selects several experts, the one with
    /// the highest index becomes the most recent.
    fn missed(&mut self) -> Vec<u16> {
        let mut missed = Vec::new();
        let selected = std::mem::take(&mut self.selected);
        for token in selected.chunk_by(|a, b| a.0 == b.0) {
            let distance = |expert: u16| self.recent.iter().position(|other| *other == expert);
            for (_, expert) in token {
                let Some(distance) = distance(*expert) else {
                    continue;
                };
                let has_slot = self.slots.iter().any(|slot| slot.expert == *expert);
                let is_worthwhile = self.is_known[usize::from(*expert)]
                    && distance < EXPERT_DISTANCES * self.slots.len();
                if is_worthwhile && !has_slot && !missed.contains(expert) {
                    missed.push(*expert);
                }
            }
            for (_, expert) in token {
                self.is_known[usize::from(*expert)] = true;
                if let Some(place) = self.recent.iter().position(|other| other == expert) {
                    self.recent[..=place].rotate_right(1);
                }
            }
        }
        missed
    }

    /// Evicts the least recently selected expert and assigns its slot to `expert`, which the caller then copies there. Returns the slot;
    /// `None` if no expert in a slot was selected less recently than `expert`.
    fn replace(&mut self, expert: u16) -> Option<usize> {
        let age = |expert: u16| self.recent.iter().position(|other| *other == expert);
        let slots = self.slots.iter().enumerate();
        let (index, slot) = slots
            .filter(|(_, slot)| slot.is_there)
            .max_by_key(|(_, slot)| age(slot.expert))?;
        if age(slot.expert) < age(expert) {
            return None;
        }
        self.put(index, expert);
        Some(index)
    }

    /// Assigns a slot to `expert`, which is then copied to it.
    fn put(&mut self, slot: usize, expert: u16) {
        let slot = &mut self.slots[slot];
        let evicted = self.rows[usize::from(slot.expert)].clone();
        set(&mut self.on_device, evicted, false);
        (slot.expert, slot.is_there) = (expert, false);
    }

    /// Marks the expert of a slot as copied.
    fn arrive(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        slot.is_there = true;
        let own = self.rows[usize::from(slot.expert)].clone();
        set(&mut self.on_device, own, true);
    }

    /// Sets the order of experts back to that of the plan.
    fn forget(&mut self) {
        self.recent
            .sort_by_key(|expert| self.rows[usize::from(*expert)].start);
        self.is_known.fill(false);
    }
}

impl ExpertCache {
    /// Creates the caches of the plan of `model`, and allocates pinned memory for copies. A layer has no slots if its policy predicts
    /// neurons or keeps per-neuron vectors on the device. `None` if no layer has slots, or if there is too little pinned memory.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub(crate) fn new(
        model: &Model,
        device: &mut DeviceModel,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(experts) = &model.config.experts else {
            return Ok(None);
        };
        let plans = &model.bundle.plan().layers;
        let layer = |(index, plan): (usize, &LayerPlan)| {
            let ffn = device.layer(index).ffn.as_ref()?;
            let has_no_vectors = match &ffn.selector {
                DeviceSelector::Dense | DeviceSelector::Exact => true,
                DeviceSelector::Gate { scale, .. } => scale.is_none(),
                _ => false,
            };
            let blocks = model.experts[index].blocks();
            let cache =
                || LayerCache::new(blocks, experts.count, plan.hot_count, plan.cached_experts);
            has_no_vectors.then(cache)?
        };
        let layers: Vec<_> = plans.iter().enumerate().map(layer).collect();
        if layers.iter().all(Option::is_none) {
            return Ok(None);
        }
        let row_bytes = |layer: usize| {
            let ffn = model.ffn_with(layer, model.selector(layer));
            let linears = [Some(ffn.gate), ffn.up, Some(ffn.down)];
            let bytes = linears.into_iter().flatten();
            let bytes = bytes.map(|linear| linear.matrix.row_bytes() + size_of::<f32>());
            bytes.sum::<usize>()
        };
        let row_bytes = (0..layers.len()).map(row_bytes).max().unwrap_or(0);
        let expert_bytes = row_bytes * experts.size;
        let slots = layers.iter().flatten().map(|cache| cache.slots.len());
        let at_once = (EXPERT_COPY_BYTES / expert_bytes.max(1)).clamp(1, slots.sum());
        match device.allocate_expert_copies(at_once, at_once * expert_bytes) {
            Ok(()) => Ok(Some(Self {
                layers,
                at_once,
                passes: 0,
                failure: None,
            })),
            Err(DeviceError::OutOfMemory { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// The slots of `layer`, if it has any.
    pub(super) fn layer(&mut self, layer: usize) -> Option<&mut LayerCache> {
        self.layers[layer].as_mut()
    }

    /// Prepares for a pass: puts the plan's experts back into the layers for which `is_planned` is true. Before a prompt, waits for all
    /// copies.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails, or if an earlier copy failed.
    pub(super) fn begin(
        &mut self,
        device: &mut DeviceModel,
        model: &Model,
        is_prompt: bool,
        is_planned: impl Fn(&DeviceModel, usize) -> bool,
    ) -> Result<(), DeviceError> {
        for cache in self.layers.iter_mut().flatten() {
            // Left by a pass that failed.
            cache.selected.clear();
        }
        self.noted(|cache| {
            if is_prompt {
                cache.finish_copies(device)?;
            }
            let mut copies = Vec::new();
            for (layer, slots) in cache.layers.iter_mut().enumerate() {
                let Some(slots) = slots.as_mut().filter(|_| is_planned(device, layer)) else {
                    continue;
                };
                slots.forget();
                for slot in 0..slots.slots.len() {
                    let first = slots.slots[slot].first;
                    if slots.slots[slot].expert != first {
                        slots.put(slot, first);
                        copies.push((layer, slot));
                    }
                }
            }
            for copies in copies.chunks(cache.at_once) {
                cache.start_copies(copies, device, model)?;
                device.finish_expert_copies()?;
            }
            match copies.is_empty() {
                true => Ok(()),
                false => cache.finish_copies(device),
            }
        })
    }

    /// Ends the copies that ran during a pass, and starts those of the experts that it missed. The layers take turns to be the first, as
    /// not all copies may fit.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    pub(super) fn after_pass(
        &mut self,
        device: &mut DeviceModel,
        model: &Model,
    ) -> Result<(), DeviceError> {
        self.noted(|cache| {
            cache.finish_copies(device)?;
            let count = cache.layers.len();
            let mut copies = Vec::new();
            for layer in (0..count).map(|layer| (cache.passes + layer) % count) {
                let Some(slots) = &mut cache.layers[layer] else {
                    continue;
                };
                for expert in slots.missed() {
                    if copies.len() < cache.at_once
                        && let Some(slot) = slots.replace(expert)
                    {
                        copies.push((layer, slot));
                    }
                }
            }
            cache.passes += 1;
            cache.start_copies(&copies, device, model)
        })
    }

    /// Calls `act`, unless it has failed before.
    fn noted(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let result = act(self);
        self.failure = result.clone().err();
        result
    }

    /// Starts to copy the experts of slots, by layer and slot, to them.
    fn start_copies(
        &mut self,
        copies: &[(usize, usize)],
        device: &mut DeviceModel,
        model: &Model,
    ) -> Result<(), DeviceError> {
        if copies.is_empty() {
            return Ok(());
        }
        device.begin_expert_copies()?;
        for (layer, slot) in copies {
            let cache = self.layers[*layer].as_ref().expect("slots of the layer");
            let slot = &cache.slots[*slot];
            let from = &cache.rows[usize::from(slot.expert)];
            device.set_expert(*layer, &slot.rows, None)?;
            let (layer, first) = (*layer, slot.rows.start);
            with_cold_neurons(model, layer, |neurons| {
                device.copy_expert(layer, first, neurons, from)
            })?;
        }
        Ok(())
    }

    /// Waits for the copies that run, and assigns their slots to the experts.
    fn finish_copies(&mut self, device: &mut DeviceModel) -> Result<(), DeviceError> {
        let caches = self.layers.iter_mut().enumerate();
        let mut is_finished = false;
        for (layer, cache) in caches.filter_map(|(layer, cache)| Some((layer, cache.as_mut()?))) {
            for slot in 0..cache.slots.len() {
                if cache.slots[slot].is_there {
                    continue;
                }
                if !std::mem::replace(&mut is_finished, true) {
                    device.finish_expert_copies()?;
                }
                cache.arrive(slot);
                let Slot { rows, expert, .. } = &cache.slots[slot];
                device.set_expert(layer, rows, Some(*expert))?;
            }
        }
        Ok(())
    }
}

/// Sets or clears the bits of `neurons`.
fn set(words: &mut [u64], neurons: Range<usize>, is_set: bool) {
    for neuron in neurons {
        let bit = 1 << (neuron % WORD);
        match is_set {
            true => words[neuron / WORD] |= bit,
            false => words[neuron / WORD] &= !bit,
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;

    use super::*;

    /// Experts 0 to 5 of four neurons each in this order, of which the first three are hot, and a shared one before them.
    fn cache(cached: usize) -> Option<LayerCache> {
        let blocks = [6, 0, 1, 2, 3, 4, 5].map(|block| [block; 4]).concat();
        LayerCache::new(&blocks, 6, 16, cached)
    }

    /// The routing weights of a token that selects `expert`.
    fn weights(expert: usize) -> [f32; 7] {
        let mut weights = [0.0; 7];
        (weights[expert], weights[6]) = (0.5, 1.0);
        weights
    }

    /// Copies what the latest token missed, at once.
    fn copy(cache: &mut LayerCache) {
        for expert in cache.missed() {
            if let Some(slot) = cache.replace(expert) {
                cache.arrive(slot);
            }
        }
    }

    #[test]
    fn the_least_recently_selected_expert_is_replaced() {
        let mut cache = cache(3).unwrap();
        let mut recent = [0, 1, 2, 3, 4, 5];
        cache.is_known.fill(true);
        let mut random = Random::new(7);
        for _ in 0..500 {
            let expert = random.below(6);
            let distance = recent.iter().position(|other| *other == expert).unwrap();
            let counts = cache.select(0, &weights(expert));
            // Every distance is below twice the number of slots, so all misses are copied.
            assert_eq!(counts, [u64::from(distance < 3), 1]);
            copy(&mut cache);
            recent[..=distance].rotate_right(1);
            let mut held: Vec<usize> = cache.slots.iter().map(|slot| slot.expert.into()).collect();
            let mut expected = recent[..3].to_vec();
            held.sort_unstable();
            expected.sort_unstable();
            assert_eq!(held, expected);
            let bits = held
                .iter()
                .fold(0b1111, |bits, expert| bits | 0b1111 << (4 * expert + 4));
            assert_eq!(cache.on_device(), [bits]);
            for slot in &cache.slots {
                let neuron = cache.neuron(slot.rows.start as u32 + 1);
                assert_eq!(neuron, 4 * u32::from(slot.expert) + 5);
            }
        }
        assert_eq!(cache.neuron(2), 2, "shared neurons stay");
    }

    #[test]
    fn a_miss_is_copied_if_the_expert_was_selected_not_long_ago() {
        let mut cache = cache(1).unwrap();
        let mut selects = |expert: usize, is_here: u64, missed: &[u16]| {
            assert_eq!(cache.select(0, &weights(expert)), [is_here, 1]);
            assert_eq!(cache.missed(), missed);
        };
        // Experts 0 and 1 are always on the device, and 2 is in the only slot.
        selects(1, 1, &[]);
        selects(5, 0, &[]);
        selects(5, 0, &[5]);
        selects(3, 0, &[]);
        selects(4, 0, &[]);
        selects(5, 0, &[]);
        selects(4, 0, &[4]);
        assert_eq!(cache.replace(4), Some(0));
        assert_eq!(
            cache.on_device(),
            [0xfff],
            "expert 2 is computed on the host"
        );
        cache.arrive(0);
        assert_eq!(cache.on_device(), [0xf0_0fff]);
        cache.forget();
        assert_eq!(cache.recent, [2, 3, 4, 5]);
        assert_eq!(
            cache.replace(5),
            None,
            "the slot has an expert that was selected later"
        );
    }

    #[test]
    fn distances_are_those_before_the_token() {
        let mut cache = cache(1).unwrap();
        cache.is_known.fill(true);
        // The order is 2, 3, 4, 5; distances below 2 are worthwhile.
        let both: Vec<f32> = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0].into();
        assert_eq!(cache.select(0, &both), [0, 2]);
        assert_eq!(cache.missed(), [3]);
        assert_eq!(cache.recent, [4, 3, 2, 5]);
        // Two tokens of a pass.
        cache.select(0, &weights(5));
        cache.select(1, &weights(5));
        assert_eq!(cache.missed(), [5]);
    }

    #[test]
    fn divided_experts_have_no_slots() {
        assert!(cache(0).is_none());
        let ordered = [0, 0, 1, 1, 2, 2];
        let slots = |blocks: &[u16], hot| {
            let cache = LayerCache::new(blocks, 3, hot, usize::MAX);
            cache.map_or(0, |cache| cache.slots.len())
        };
        assert_eq!(slots(&ordered, 2), 1);
        assert_eq!(slots(&ordered, 3), 1, "half of expert 1 is hot");
        assert_eq!(slots(&ordered, 6), 0, "nothing could replace them");
        assert_eq!(
            slots(&[0, 1, 0, 1, 2, 2], 4),
            0,
            "no expert is in one piece"
        );
        assert_eq!(slots(&[], 0), 0);
    }
}
