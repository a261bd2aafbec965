//! Execution modes of a layer's FFN, and the weights that a token reads in each.

use serde::{Deserialize, Serialize};

use crate::plan::{Policy, Score};

/// Amount of weights that a computation reads; the cost model derives its time from it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadCost {
    /// Bytes of weights.
    pub bytes: f64,
    /// Matrix rows that are not adjacent to the row read before: each costs time in addition to its bytes.
    pub scattered_rows: f64,
    /// Rows of the down projection that are accumulated (axpy): each costs time in addition to its bytes.
    pub axpy_rows: f64,
}

/// Execution mode of a layer's FFN: the policy, and what an average token reads under it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerMode {
    /// Policy that selects the neurons to compute.
    pub policy: Policy,
    /// Read once per token before any neuron: a predictor's weights, or sign bits. Zero for policies without prediction.
    pub prediction: ReadCost,
    /// Read for each neuron of the layer, active or not.
    pub per_neuron: ReadCost,
    /// Read for each active neuron, in addition to `per_neuron`.
    pub per_active_neuron: ReadCost,
}

/// Size of a neuron: one row in each of `matrices` equally large matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeuronShape {
    /// Bytes of all its rows, packed.
    pub bytes: u64,
    /// Number of matrices: 3 for gate, up and down; 2 without a gate.
    pub matrices: usize,
}

impl NeuronShape {
    /// ReadCost per neuron of reading its rows in `matrices` matrices, neuron after neuron.
    fn whole(self, matrices: f64) -> ReadCost {
        ReadCost {
            bytes: self.bytes as f64 / self.matrices as f64 * matrices,
            ..ReadCost::default()
        }
    }

    /// ReadCost of reading the rows of a neuron whose neighbours may be skipped.
    fn alone(self, matrices: f64) -> ReadCost {
        ReadCost {
            scattered_rows: matrices,
            ..self.whole(matrices)
        }
    }
}

/// Cost and quality of the prediction of active neurons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// ReadCost of the predictor, once per token.
    pub work: ReadCost,
    /// Predicted neurons per active neuron.
    pub predicted_per_active: f64,
    /// Recall: share of active neurons that are predicted.
    pub recall: f64,
}

impl LayerMode {
    /// Mode of policy `dense`: every weight is read.
    pub fn dense(neuron: NeuronShape) -> Self {
        Self {
            policy: Policy::Dense,
            prediction: ReadCost::default(),
            per_neuron: ReadCost {
                axpy_rows: 1.0,
                ..neuron.whole(neuron.matrices as f64)
            },
            per_active_neuron: ReadCost::default(),
        }
    }

    /// Mode of policy `dense` with input sparsity: down is read in full, the other matrices for the
    /// share `read` of their inputs.
    pub fn dense_of_inputs(neuron: NeuronShape, read: f64) -> Self {
        let down = neuron.whole(1.0);
        let others = neuron.whole(neuron.matrices as f64 - 1.0);
        Self {
            per_neuron: ReadCost {
                bytes: down.bytes + others.bytes * read,
                scattered_rows: 0.0,
                axpy_rows: 1.0,
            },
            ..Self::dense(neuron)
        }
    }

    /// Mode of policy `exact`: every gate row is read, the other rows of active neurons only.
    pub fn exact(neuron: NeuronShape) -> Self {
        Self {
            policy: Policy::Exact,
            per_neuron: neuron.whole(1.0),
            per_active_neuron: ReadCost {
                axpy_rows: 1.0,
                ..neuron.alone(neuron.matrices as f64 - 1.0)
            },
            ..Self::dense(neuron)
        }
    }

    /// Mode of a policy that predicts: the gate rows of predicted neurons are read, the other rows of
    /// those that are active, too.
    pub fn predicted(policy: Policy, neuron: NeuronShape, predicted: Prediction) -> Self {
        let gate = neuron.alone(predicted.predicted_per_active);
        let others = neuron.alone((neuron.matrices as f64 - 1.0) * predicted.recall);
        Self {
            policy,
            prediction: predicted.work,
            per_neuron: ReadCost::default(),
            per_active_neuron: ReadCost {
                bytes: gate.bytes + others.bytes,
                scattered_rows: gate.scattered_rows + others.scattered_rows,
                axpy_rows: predicted.recall,
            },
        }
    }

    /// Mode of policy `threshold`: the rows that `score` needs are read for every neuron, the other
    /// rows for the neurons that reach the threshold.
    pub fn threshold(neuron: NeuronShape, score: Score) -> Self {
        let before = if score.precedes_up() {
            1.0
        } else {
            neuron.matrices as f64 - 1.0
        };
        Self {
            policy: Policy::Threshold,
            per_neuron: neuron.whole(before),
            per_active_neuron: ReadCost {
                axpy_rows: 1.0,
                ..neuron.alone(neuron.matrices as f64 - before)
            },
            ..Self::dense(neuron)
        }
    }

    /// Returns this mode in a mixture of experts. Neurons that are read whether active or not are read only if they belong to the
    /// token's experts: the share `selected` on average.
    pub fn of_experts(self, selected: f64) -> Self {
        let ReadCost {
            bytes,
            scattered_rows,
            axpy_rows,
        } = self.per_neuron;
        Self {
            per_neuron: ReadCost {
                bytes: bytes * selected,
                scattered_rows: scattered_rows * selected,
                axpy_rows: axpy_rows * selected,
            },
            ..self
        }
    }

    /// Total work of one token for `count` neurons of which `active` are active on average.
    ///
    /// Rows of active neurons are counted as non-adjacent in proportion to the inactive share.
    pub fn work(&self, count: f64, active: f64) -> ReadCost {
        // The row of an active neuron is adjacent to the last one read where the neuron before it is active too.
        let apart = if count > 0.0 {
            1.0 - active / count
        } else {
            0.0
        };
        ReadCost {
            bytes: self.prediction.bytes
                + count * self.per_neuron.bytes
                + active * self.per_active_neuron.bytes,
            scattered_rows: self.prediction.scattered_rows
                + count * self.per_neuron.scattered_rows
                + active * self.per_active_neuron.scattered_rows * apart.max(0.0),
            axpy_rows: self.prediction.axpy_rows
                + count * self.per_neuron.axpy_rows
                + active * self.per_active_neuron.axpy_rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_non_adjacent_where_neighbours_are_skipped() {
        let mode = LayerMode::exact(NeuronShape {
            bytes: 300,
            matrices: 3,
        });
        let work = |active| mode.work(100.0, active);
        assert_eq!(work(100.0).scattered_rows, 0.0);
        assert_eq!(work(25.0).scattered_rows, 25.0 * 2.0 * 0.75);
        assert_eq!((work(25.0).axpy_rows, work(25.0).bytes), (25.0, 15_000.0));
        assert_eq!(mode.work(0.0, 0.0), ReadCost::default());
    }

    #[test]
    fn a_token_reads_the_neurons_of_its_experts() {
        let neuron = NeuronShape {
            bytes: 300,
            matrices: 3,
        };
        let mode = LayerMode::exact(neuron).of_experts(0.25);
        assert_eq!(mode.work(100.0, 10.0).bytes, 25.0 * 100.0 + 10.0 * 200.0);
        assert_eq!(
            LayerMode::exact(neuron).of_experts(1.0),
            LayerMode::exact(neuron)
        );
    }

    #[test]
    fn input_sparsity_reads_down_in_full() {
        let neuron = NeuronShape {
            bytes: 300,
            matrices: 3,
        };
        assert_eq!(
            LayerMode::dense_of_inputs(neuron, 1.0),
            LayerMode::dense(neuron)
        );
        let mode = LayerMode::dense_of_inputs(neuron, 0.75);
        assert_eq!(mode.work(2.0, 0.0).bytes, 2.0 * (100.0 + 0.75 * 200.0));
    }
}
