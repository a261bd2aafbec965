//! Expert selections on text: frequency, routing weights, pairs, and reuse.

use std::path::Path;

use powerinfer_artifact::{
    Header, TensorFile,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, fill_tensors},
};
use powerinfer_model::Experts;
use serde::{Deserialize, Serialize};

use crate::{Counts, LayerActivity, NeuronsFor, ProfileError, Skew, activity::in_units};

/// File of expert selections.
pub(crate) const EXPERTS: &str = "experts.safetensors";
/// Format name in its header.
const FORMAT: &str = "powerinfer-experts";

/// Selections of a layer's experts, excluding a shared expert; additive over shards, texts and rounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertActivity {
    /// Tokens that selected each expert, in each of two independent halves of the text.
    pub selected: [Vec<u64>; 2],
    /// Sum of each expert's routing weights, in units of 2⁻³².
    pub weight_sum: Vec<u64>,
    /// Number of selections by reuse distance: the number of other experts that earlier tokens of the sequence selected more recently
    /// than this one. Element `d` counts the selections at distance `d`. If a token selects several experts, the one with the
    /// highest index counts as the most recent. The first selection of an expert in a sequence has no distance and is not counted.
    pub distances: Vec<u64>,
    /// `[experts, experts]`: tokens that selected both experts.
    pub together: Vec<u64>,
}

/// Summary of the selections of a layer's experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertSummary {
    /// Smallest shares of experts that receive 50%, 80% and 95% of the selections.
    pub experts_for: NeuronsFor,
    /// Jaccard similarity of the most frequently selected 20% of the experts in two independent halves of the text.
    pub half_overlap: f64,
    /// Share of active neurons among those of a token's experts, including the shared expert, if any.
    pub active: f64,
    /// Hit rates if 10%, 20%, … 100% of the experts, rounded up, are kept in fast memory.
    pub held: Vec<Held>,
    /// Pair of experts for which the share of tokens that select both is furthest above the share expected for independent experts;
    /// `None` if the difference may be due to chance.
    pub pair: Option<ExpertPair>,
}

/// Hit rates of a layer if some of its experts are kept in fast memory: shares of selections that find their expert there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// Number of experts kept in fast memory.
    pub experts: usize,
    /// Hit rate, in each half of the text, of the experts most frequently selected in the other half, pooled over both halves; `None` if
    /// either half has no selections.
    pub fixed: Option<f64>,
    /// Hit rate of a cache that evicts the least recently selected expert and is empty at the start of each sequence.
    pub cached: f64,
}

/// Two experts that tokens select together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertPair {
    /// Indices of the experts.
    pub experts: [usize; 2],
    /// Share of tokens that selected both.
    pub share: f64,
    /// `share` divided by the share expected if the experts were independent.
    pub lift: f64,
}

impl ExpertActivity {
    /// Zero counts for `experts` experts.
    pub fn new(experts: usize) -> Self {
        let zeros = || vec![0; experts];
        Self {
            selected: [zeros(), zeros()],
            weight_sum: zeros(),
            distances: zeros(),
            together: vec![0; experts * experts],
        }
    }

    /// All counts: selections in each half, weight sums, distances, pairs; `[experts + 4, experts]`.
    pub(crate) fn to_numbers(&self) -> Vec<u64> {
        let [first, second] = &self.selected;
        let rows = [first, second, &self.weight_sum, &self.distances];
        let rows = rows.into_iter().chain([&self.together]);
        rows.flatten().copied().collect()
    }

    /// Counts of `experts` experts, in the order of [`to_numbers`](Self::to_numbers).
    pub(crate) fn from_numbers(experts: usize, numbers: &[u64]) -> Self {
        let row = |index: usize| numbers[index * experts..][..experts].to_vec();
        Self {
            selected: [row(0), row(1)],
            weight_sum: row(2),
            distances: row(3),
            together: numbers[4 * experts..].to_vec(),
        }
    }

    /// Adds the selections counted on other text.
    pub fn add(&mut self, other: &Self) {
        let numbers = self.to_numbers().into_iter().zip(other.to_numbers());
        let sums: Vec<u64> = numbers
            .map(|(mine, more)| mine.saturating_add(more))
            .collect();
        *self = Self::from_numbers(self.distances.len(), &sums);
    }

    /// Number of tokens that selected each expert.
    pub fn selections(&self) -> Vec<u64> {
        let [first, second] = &self.selected;
        first.iter().zip(second).map(|(a, b)| a + b).collect()
    }

    /// Hit rates if 0, 1, … all experts are kept in fast memory.
    pub fn held(&self) -> Vec<Held> {
        let [first, second] = &self.selected;
        let (there, back) = (caught(first, second), caught(second, first));
        let total = |counts: &[u64]| counts.iter().sum::<u64>();
        let has_halves = total(first) > 0 && total(second) > 0;
        let all = (total(first) + total(second)).max(1) as f64;
        let mut hits = 0;
        (0..=self.distances.len())
            .map(|experts| {
                if experts > 0 {
                    hits += self.distances[experts - 1];
                }
                Held {
                    experts,
                    fixed: has_halves.then(|| (there[experts] + back[experts]) as f64 / all),
                    cached: hits as f64 / all,
                }
            })
            .collect()
    }

    fn pair(&self, tokens: u64) -> Option<ExpertPair> {
        let experts = self.distances.len();
        let pairs = (0..experts).flat_map(|a| (a + 1..experts).map(move |b| [a, b]));
        let selections = self.selections();
        let share = |count: u64| count as f64 / tokens.max(1) as f64;
        let both = |[a, b]: [usize; 2]| share(self.together[a * experts + b]);
        let expected = |[a, b]: [usize; 2]| share(selections[a]) * share(selections[b]);
        let excess = |pair: &[usize; 2]| both(*pair) - expected(*pair);
        // Five standard deviations of the share, if the number of tokens that select both is Poisson-distributed.
        let chance = |pair: &[usize; 2]| 5.0 * (both(*pair) / tokens.max(1) as f64).sqrt();
        // Ties go to the first pair.
        let pair = pairs
            .rev()
            .max_by(|a, b| excess(a).total_cmp(&excess(b)))
            .filter(|pair| excess(pair) > chance(pair))?;
        Some(ExpertPair {
            experts: pair,
            share: both(pair),
            lift: both(pair) / expected(pair),
        })
    }
}

impl ExpertSummary {
    /// Summary of the selections in `activity`; `None` if there are none.
    pub(crate) fn new(layer: usize, experts: &Experts, activity: &LayerActivity) -> Option<Self> {
        let found = activity.experts.as_ref()?;
        let counts = |active: &Vec<u64>| Counts {
            tokens: activity.tokens,
            active: active.clone(),
        };
        let [first, second] = &found.selected;
        let computed = match experts.dense_size(layer) {
            Some(size) => size,
            None => experts.neurons_per_token(),
        };
        let computed = activity.tokens.max(1) as f64 * computed as f64;
        let held = found.held();
        let mut tenths: Vec<usize> = (1..=10)
            .map(|tenth| (tenth * experts.count).div_ceil(10))
            .collect();
        tenths.dedup();
        Some(Self {
            experts_for: NeuronsFor::new(&Skew::new(found.selections())),
            half_overlap: counts(first).overlap(&counts(second)),
            active: activity.active.iter().sum::<u64>() as f64 / computed,
            held: tenths.into_iter().map(|count| held[count]).collect(),
            pair: found.pair(activity.tokens),
        })
    }
}

/// Number of selections in `seen` that hit the 0, 1, … experts most frequently selected in `chosen`.
fn caught(chosen: &[u64], seen: &[u64]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    order.sort_by_key(|expert| std::cmp::Reverse(chosen[*expert]));
    let sums = order.into_iter().scan(0, |sum, expert| {
        *sum += seen[expert];
        Some(*sum)
    });
    [0].into_iter().chain(sums).collect()
}

/// Counts of a layer's selections, token by token.
#[derive(Debug)]
pub(crate) struct ExpertCounter {
    pub(crate) activity: ExpertActivity,
    /// Experts selected in the current sequence, most recent first.
    recent: Vec<usize>,
}

impl ExpertCounter {
    /// Counts of zero.
    pub(crate) fn new(experts: usize) -> Self {
        Self {
            activity: ExpertActivity::new(experts),
            recent: Vec::new(),
        }
    }

    /// Begins a sequence.
    pub(crate) fn begin(&mut self) {
        self.recent.clear();
    }

    /// Counts the experts that a token in half `half` selects, which are the ones with a non-zero weight.
    pub(crate) fn count(&mut self, half: usize, weights: impl Iterator<Item = f32>) {
        let found = &mut self.activity;
        let selected: Vec<(usize, f32)> = weights
            .take(found.distances.len())
            .enumerate()
            .filter(|(_, weight)| *weight != 0.0)
            .collect();
        let experts = found.distances.len();
        for (expert, weight) in &selected {
            found.selected[half][*expert] += 1;
            found.weight_sum[*expert] += in_units(f64::from(weight.abs()));
            for (other, _) in selected.iter().filter(|(other, _)| other != expert) {
                found.together[expert * experts + other] += 1;
            }
            if let Some(distance) = self.recent.iter().position(|recent| recent == expert) {
                found.distances[distance] += 1;
            }
        }
        for (expert, _) in &selected {
            self.recent.retain(|recent| recent != expert);
            self.recent.insert(0, *expert);
        }
    }
}

/// Name of the tensor of `layer`.
fn name(layer: usize) -> String {
    format!("layer-{layer:04}")
}

/// Writes the selections of all layers.
pub(crate) fn write(
    path: &Path,
    header: &Header,
    activities: &[LayerActivity],
) -> Result<(), ProfileError> {
    let header = Header {
        format: FORMAT.to_owned(),
        ..header.clone()
    };
    let all = || {
        (0..)
            .zip(activities)
            .filter_map(|(layer, activity)| Some((layer, activity.experts.as_ref()?)))
    };
    let shapes: TensorShapes = all()
        .map(|(layer, found)| {
            let experts = found.distances.len();
            (name(layer), (Dtype::U64, vec![experts + 4, experts]))
        })
        .collect();
    fill_tensors(path, Some(&header), &shapes, |writer| {
        for (layer, found) in all() {
            let numbers = found.to_numbers().into_iter();
            let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
            writer.append(&name(layer), &bytes)?;
        }
        Ok::<_, ProfileError>(())
    })
}

/// Reads the expert selections in the file at `path` into the activity of each layer. Every layer has `neurons` neurons.
pub(crate) fn read(
    path: &Path,
    experts: &Experts,
    neurons: usize,
    activities: &mut [LayerActivity],
) -> Result<(), ProfileError> {
    let wrong = |reason: String| ProfileError::Table {
        path: path.to_owned(),
        reason,
    };
    experts.validate().map_err(wrong)?;
    if experts.neurons() != neurons {
        let reason = "the number of neurons in `profile.json` does not match its experts";
        return Err(wrong(reason.to_owned()));
    }
    let (file, count) = (TensorFile::open(path)?, experts.count);
    for (layer, activity) in activities.iter_mut().enumerate() {
        let bytes = file.expect(&name(layer), Dtype::U64, &[count + 4, count])?;
        let numbers = bytes.as_chunks::<8>().0.iter();
        let numbers: Vec<u64> = numbers.map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let found = ExpertActivity::from_numbers(count, &numbers);
        let sum = |counts: &mut dyn Iterator<Item = &u64>| -> u128 {
            counts.map(|count| u128::from(*count)).sum()
        };
        let selections = sum(&mut found.selected.iter().flatten());
        let most = u128::from(activity.tokens) * experts.selected_in(layer) as u128;
        let is_possible = most < 1 << 62
            && selections <= most
            && sum(&mut found.distances.iter()) <= selections
            && found.together.iter().all(|both| *both <= activity.tokens);
        if !is_possible {
            return Err(wrong(format!(
                "layer {layer} has more selections of experts than its tokens allow"
            )));
        }
        activity.experts = Some(found);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{Digest, ModelIdentity, random::Random};
    use powerinfer_model::RouterScores;

    use super::*;

    const EXPERTS: usize = 12;

    /// Routing weights of 300 tokens in three sequences.
    fn weights() -> Vec<Vec<f32>> {
        let mut random = Random::new(5);
        let mut token = || {
            let weight = |expert: u32| f32::from(random.chance(5 + 4 * expert)) * 0.25;
            (0..EXPERTS as u32).map(weight).collect()
        };
        (0..300).map(|_| token()).collect()
    }

    fn counted() -> ExpertActivity {
        let mut counter = ExpertCounter::new(EXPERTS);
        for (token, weights) in weights().into_iter().enumerate() {
            if token % 100 == 0 {
                counter.begin();
            }
            counter.count(token % 2, weights.into_iter());
        }
        counter.activity
    }

    #[test]
    fn hits_are_those_of_a_cache() {
        let held = counted().held();
        for (size, held) in held.iter().enumerate() {
            let (mut cache, mut hits, mut all) = (Vec::new(), 0, 0);
            for (token, weights) in weights().into_iter().enumerate() {
                if token % 100 == 0 {
                    cache.clear();
                }
                let selected = || (0..EXPERTS).filter(|expert| weights[*expert] != 0.0);
                all += selected().count();
                hits += selected().filter(|expert| cache.contains(expert)).count();
                for expert in selected() {
                    cache.retain(|other| *other != expert);
                    cache.push(expert);
                }
                let evicted = cache.len().saturating_sub(size);
                cache.drain(..evicted);
            }
            let expected = hits as f64 / all as f64;
            assert!((held.cached - expected).abs() < 1e-12, "{size}");
        }
    }

    #[test]
    fn a_fixed_set_is_chosen_on_the_other_half() {
        let mut found = ExpertActivity::new(3);
        found.selected = [vec![6, 3, 1], vec![1, 3, 4]];
        let fixed: Vec<f64> = found
            .held()
            .iter()
            .map(|held| held.fixed.unwrap())
            .collect();
        // Expert 0 is the busiest in the first half and has 1 of 8 selections in the second; for expert 2, it is 1 of 10 in the first.
        let expected = [0.0, 2.0 / 18.0, 8.0 / 18.0, 1.0];
        for (fixed, expected) in fixed.iter().zip(expected) {
            assert!((fixed - expected).abs() < 1e-12, "{fixed} {expected}");
        }
        found.selected[1].fill(0);
        assert!(found.held().iter().all(|held| held.fixed.is_none()));
    }

    #[test]
    fn counts_are_those_of_the_tokens_and_additive() {
        let found = counted();
        let weights = weights();
        let tokens = |of: &dyn Fn(&Vec<f32>) -> bool| weights.iter().filter(|row| of(row)).count();
        for a in 0..EXPERTS {
            let own = tokens(&|row| row[a] != 0.0);
            assert_eq!(found.selections()[a], own as u64);
            assert_eq!(found.weight_sum[a], own as u64 * in_units(0.25));
            for b in (0..EXPERTS).filter(|b| *b != a) {
                let both = tokens(&|row| row[a] != 0.0 && row[b] != 0.0);
                assert_eq!(found.together[a * EXPERTS + b], both as u64);
            }
        }
        let mut twice = ExpertActivity::new(EXPERTS);
        twice.add(&found);
        assert_eq!(twice, found);
        twice.add(&found);
        assert_eq!(
            twice.selections(),
            found.selections().iter().map(|n| 2 * n).collect::<Vec<_>>()
        );
        assert_eq!(twice.held(), found.held());
        assert_eq!(ExpertActivity::new(4).pair(0), None);
    }
    #[test]
    fn a_pair_is_shown_only_if_it_is_not_chance() {
        assert_eq!(counted().pair(300), None, "experts are independent");
        let mut counter = ExpertCounter::new(EXPERTS);
        for mut weights in weights() {
            weights[7] = weights[2];
            counter.count(0, weights.into_iter());
        }
        let found = counter.activity;
        let pair = found.pair(300).unwrap();
        assert_eq!(pair.experts, [2, 7]);
        let share = found.selections()[2] as f64 / 300.0;
        assert!((pair.share - share).abs() < 1e-12);
        assert!((pair.lift - 1.0 / share).abs() < 1e-9);
        assert_eq!(ExpertActivity::new(4).pair(0), None);
    }
    #[test]
    fn impossible_counts_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(super::EXPERTS);
        let model = ModelIdentity {
            name: "model".to_owned(),
            fingerprint: Digest::from_content(b"model"),
        };
        let header = Header::new(FORMAT, 3, model, 0);
        let experts = Experts {
            count: 2,
            size: 5,
            per_token: 1,
            scores: RouterScores::Softmax,
            has_router_bias: false,
            reads_layer_input: false,
            shared_size: 0,
            has_shared_gate: false,
            scale: 1.0,
            dense: None,
        };
        let mut good = LayerActivity::new(10, 1);
        good.tokens = 9;
        good.experts = Some(ExpertActivity::from_numbers(
            2,
            &[3, 2, 1, 3, 7, 7, 4, 0, 0, 0, 0, 0],
        ));
        let read_back = |written: &LayerActivity, experts: &Experts| {
            write(&path, &header, std::slice::from_ref(written))?;
            let mut layer = [LayerActivity {
                experts: None,
                ..written.clone()
            }];
            read(&path, experts, 10, &mut layer)?;
            let [layer] = layer;
            Ok::<_, ProfileError>(layer)
        };
        assert_eq!(read_back(&good, &experts).unwrap(), good);
        for (row, value) in [(0, u64::MAX), (1, 9), (3, 10), (4, 10)] {
            let mut numbers = good.experts.as_ref().unwrap().to_numbers();
            numbers[2 * row] = value;
            let wrong = LayerActivity {
                experts: Some(ExpertActivity::from_numbers(2, &numbers)),
                ..good.clone()
            };
            let error = read_back(&wrong, &experts).unwrap_err().to_string();
            assert!(error.contains("more selections"), "row {row}: {error}");
        }
        for (count, size) in [(usize::MAX - 3, 5), (2, 4), (1, 10)] {
            let other = Experts {
                count,
                size,
                ..experts.clone()
            };
            assert!(read_back(&good, &other).is_err(), "{count} of {size}");
        }
    }
}
