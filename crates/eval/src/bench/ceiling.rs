//! The read bandwidth that memory allows a stage of decoding: a stream's, or that of the rows that its neurons select.

use powerinfer_artifact::{plan::Policy, random::Random};
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{ReadProbe, SingleSession, Stage, Wanted};

use super::Bench;
use crate::EvalError;

/// Bytes of rows to read for a figure, unless that takes too many FFNs.
const ROW_BYTES: usize = 256 << 20;
const MOST_FFNS: usize = 1 << 16;
/// Tokens whose rows are read, at most.
const MOST_TOKENS: usize = 16;

/// Rows that decoding reads, numbered as if a probe's memory held them.
#[derive(Debug)]
pub(super) struct ListedRows {
    pub(super) row_bytes: usize,
    /// In the order of reading.
    pub(super) rows: Vec<u32>,
    /// Bytes per token of gate and up, and of down, that are not listed but read as a whole.
    dense_bytes: [f64; 2],
}

impl ListedRows {
    /// The rows of the active neurons of the first of `ids`, in layers that select neurons; `None` if there are none, or on
    /// another device.
    ///
    /// # Errors
    ///
    /// Fails if the model does, or if the user asks to stop.
    pub(super) fn of_tokens(
        model: &mut SingleSession,
        ids: &[u32],
        bench: &Bench<'_>,
    ) -> Result<Option<Self>, EvalError> {
        let Some(dense_bytes) = Self::dense_bytes(model).filter(|_| !model.uses_device()) else {
            return Ok(None);
        };
        let mut lists = Vec::new();
        model.observers_mut().list_active(true);
        for id in ids.iter().take(MOST_TOKENS) {
            bench.progress.advance(0)?;
            let SingleSession { engine, session } = &mut *model;
            engine.prefill(session, &[*id], Wanted::None)?;
            let active = engine.observers_mut().take_active();
            let layers = active.into_iter().zip(engine.policies());
            let selected = layers.filter(|(_, policy)| **policy != Policy::Dense);
            lists.extend(selected.flat_map(|(tokens, _)| tokens));
        }
        model.observers_mut().list_active(false);
        lists.retain(|list| !list.is_empty());
        if lists.is_empty() {
            return Ok(None);
        }
        let neurons = model.config().ffn_size;
        let row_bytes = model.experiments().ffn_bytes(0)[2] / neurons.max(1);
        let mut next = lists.iter().cycle();
        let draw = || next.next().cloned().unwrap_or_default();
        let found = Self {
            dense_bytes,
            ..Self::drawn(draw, neurons, row_bytes, bench.probe)
        };
        // A small probe may have no room for a row.
        Ok(Some(found).filter(|found| !found.rows.is_empty()))
    }

    /// Bytes of gate and up, and of down, that the policies read as a whole; `None` if that is all.
    fn dense_bytes(model: &mut SingleSession) -> Option<[f64; 2]> {
        let policies = model.policies().to_vec();
        let mut dense_bytes = [0.0; 2];
        for (layer, policy) in policies.iter().enumerate() {
            let [gate, up, down] = model
                .experiments()
                .ffn_bytes(layer)
                .map(|bytes| bytes as f64);
            let [gate_up, of_down] = match policy {
                Policy::Dense => [gate + up, down],
                Policy::Exact | Policy::Threshold => [gate, 0.0],
                Policy::Predicted | Policy::SignBit => [0.0; 2],
            };
            dense_bytes[0] += gate_up;
            dense_bytes[1] += of_down;
        }
        let lists = policies.iter().any(|policy| *policy != Policy::Dense);
        lists.then_some(dense_bytes)
    }

    /// Rows of active hidden units, if trained predictors read `bytes` per token: random ones, as many as were read. Also the
    /// bytes of these predictors that every token reads. `None` without such predictors, if there are others too, or on another device.
    pub(super) fn of_hidden_units(
        model: &mut SingleSession,
        bytes: f64,
        probe: &ReadProbe,
    ) -> Option<(Self, f64)> {
        let layers = 0..model.policies().len();
        let predictors: Vec<_> = layers
            .filter_map(|layer| model.experiments().predictor_bytes(layer))
            .collect();
        let others = model.uses_device() || model.policies().contains(&Policy::SignBit);
        let [_, units, row_bytes] = predictors.first().copied().filter(|_| !others)?;
        let shared: f64 = predictors.iter().map(|[shared, ..]| *shared as f64).sum();
        let all = predictors
            .iter()
            .map(|[_, units, row]| (units * row) as f64);
        let active = (bytes - shared) / all.sum::<f64>();
        let mut random = Random::new(0);
        let draw = || {
            let units = 0..units as u32;
            units.filter(|_| random.unit() < active).collect()
        };
        let found = Self::drawn(draw, units, row_bytes, probe);
        (!found.rows.is_empty()).then_some((found, shared))
    }

    /// Rows of one FFN after the other, each with `neurons` neurons, of which `draw` gives some.
    pub(super) fn drawn(
        mut draw: impl FnMut() -> Vec<u32>,
        neurons: usize,
        row_bytes: usize,
        probe: &ReadProbe,
    ) -> Self {
        let mut rows = Vec::new();
        let mut next = Numbers::new(probe, row_bytes);
        for _ in 0..MOST_FFNS {
            next.add(&mut rows, &draw(), neurons);
            if rows.len() * row_bytes >= ROW_BYTES {
                break;
            }
        }
        Self {
            row_bytes,
            rows,
            dense_bytes: [0.0; 2],
        }
    }

    /// Bytes per second that memory allows `stage`, which reads `bytes` per token, if it has `stream` for a stream and
    /// `rows` for these rows.
    pub(super) fn limit(&self, stage: Stage, bytes: f64, stream: f64, rows: f64) -> f64 {
        let dense = match stage {
            Stage::GateUp => self.dense_bytes[0],
            Stage::Down => self.dense_bytes[1],
            _ => bytes,
        };
        mixed(bytes, dense, stream, rows)
    }
}

/// Bytes per second of reading `bytes`, of which `dense` come as a stream and the others as rows.
pub(super) fn mixed(bytes: f64, dense: f64, stream: f64, rows: f64) -> f64 {
    match dense < bytes {
        true => bytes / (dense / stream + (bytes - dense) / rows),
        // Exactly a stream's, without rounding.
        false => stream,
    }
}

/// Numbers of rows of matrices that lie one after the other in a probe's memory, which they wrap around.
struct Numbers {
    first: usize,
    count: usize,
    wraps: usize,
}

/// Rows by which matrices are shifted at every wrap, so that rows often listed do not come from a cache.
const SHIFT: usize = 1009;

impl Numbers {
    fn new(probe: &ReadProbe, row_bytes: usize) -> Self {
        Self {
            first: 0,
            count: probe.row_count(row_bytes),
            wraps: 0,
        }
    }

    /// Adds the rows `listed` of gate, up and down, each of `neurons` rows.
    fn add(&mut self, rows: &mut Vec<u32>, listed: &[u32], neurons: usize) {
        for _ in 0..3 {
            if self.first + neurons > self.count {
                self.wraps += 1;
                self.first = self.wraps * SHIFT % neurons;
            }
            let numbers = listed.iter().map(|row| self.first + *row as usize);
            rows.extend(
                numbers
                    .filter(|row| *row < self.count)
                    .map(|row| row as u32),
            );
            self.first += neurons;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_weighs_streams_and_rows_by_their_bytes() {
        let listed = ListedRows {
            row_bytes: 2304,
            rows: vec![1],
            dense_bytes: [100.0, 0.0],
        };
        let limit = |stage, bytes| listed.limit(stage, bytes, 40.0, 20.0);
        assert_eq!(limit(Stage::Head, 500.0), 40.0);
        let unrounded = listed.limit(Stage::Head, 3.0, 0.7, 0.1);
        assert_eq!(unrounded, 0.7);
        assert_eq!(limit(Stage::GateUp, 100.0), 40.0, "all gates, no up");
        assert_eq!(limit(Stage::GateUp, 200.0), 200.0 / (2.5 + 5.0));
        assert_eq!(limit(Stage::Down, 300.0), 20.0);
        assert_eq!(limit(Stage::Norms, 0.0), 40.0, "reads nothing");
    }

    #[test]
    fn rows_of_any_number_of_matrices_are_in_the_probe() {
        for (bytes, row_bytes, neurons) in [(1 << 20, 2304, 100), (1 << 16, 1024, 500)] {
            let probe = ReadProbe::new(bytes).unwrap();
            let all: Vec<u32> = (0..neurons as u32).collect();
            let listed = ListedRows::drawn(|| all.clone(), neurons, row_bytes, &probe);
            assert!(!listed.rows.is_empty());
            let count = probe.row_count(row_bytes);
            assert!(listed.rows.iter().all(|row| (*row as usize) < count));
            // It can be read, so no row is outside.
            let isa = powerinfer_kernels::Isa::detect().unwrap();
            assert!(probe.rows(isa, 1, row_bytes, &listed.rows) > 0.0);
        }
    }
}
