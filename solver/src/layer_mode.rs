//! The ways to run a layer's FFN, and what a token reads in each.

use powerinfer_artifact::plan::{Policy, Score};

/// What a piece of work reads: what its time follows from.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Bytes of weights.
    pub bytes: f64,
    /// Rows of matrices that do not follow the one read before: each has a cost beside its bytes.
    pub rows: f64,
    /// Rows that are added to a sum: each has another.
    pub sums: f64,
}

/// One way to run the FFN of a layer, for an average token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerMode {
    /// What it is called.
    pub policy: Policy,
    /// Read before any neuron: a predictor, or signs.
    pub prediction: Work,
    /// Read of every neuron.
    pub every: Work,
    /// Read of a neuron besides, for each token on which it is active.
    pub active: Work,
}

/// A neuron: a row in each of so many equally large matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeuronShape {
    /// All its rows, packed.
    pub bytes: u64,
    /// Gate, up and down, or two of them.
    pub matrices: usize,
}

impl NeuronShape {
    /// What is read of so many of the matrices, every neuron of them.
    fn whole(self, matrices: f64) -> Work {
        Work {
            bytes: self.bytes as f64 / self.matrices as f64 * matrices,
            ..Work::default()
        }
    }

    /// The same of a neuron whose neighbours need not be read.
    fn alone(self, matrices: f64) -> Work {
        Work {
            rows: matrices,
            ..self.whole(matrices)
        }
    }
}

/// How well active neurons are predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// What prediction reads.
    pub work: Work,
    /// Neurons predicted, for each one that is active.
    pub predicted_per_active: f64,
    /// Share of active neurons that are predicted.
    pub recall: f64,
}

impl LayerMode {
    /// Everything is read.
    pub fn dense(neuron: NeuronShape) -> Self {
        Self {
            policy: Policy::Dense,
            prediction: Work::default(),
            every: Work {
                sums: 1.0,
                ..neuron.whole(neuron.matrices as f64)
            },
            active: Work::default(),
        }
    }

    /// Everything is read, but of what the first matrices see only the share `read` of the inputs.
    pub fn dense_of_inputs(neuron: NeuronShape, read: f64) -> Self {
        let down = neuron.whole(1.0);
        let others = neuron.whole(neuron.matrices as f64 - 1.0);
        Self {
            every: Work {
                bytes: down.bytes + others.bytes * read,
                rows: 0.0,
                sums: 1.0,
            },
            ..Self::dense(neuron)
        }
    }

    /// Every gate is read, the rest of those that it leaves alive.
    pub fn exact(neuron: NeuronShape) -> Self {
        Self {
            policy: Policy::Exact,
            every: neuron.whole(1.0),
            active: Work {
                sums: 1.0,
                ..neuron.alone(neuron.matrices as f64 - 1.0)
            },
            ..Self::dense(neuron)
        }
    }

    /// As [`exact`](Self::exact), of the neurons that something predicts.
    pub fn predicted(policy: Policy, neuron: NeuronShape, predicted: Prediction) -> Self {
        let gate = neuron.alone(predicted.predicted_per_active);
        let others = neuron.alone((neuron.matrices as f64 - 1.0) * predicted.recall);
        Self {
            policy,
            prediction: predicted.work,
            every: Work::default(),
            active: Work {
                bytes: gate.bytes + others.bytes,
                rows: gate.rows + others.rows,
                sums: predicted.recall,
            },
        }
    }

    /// What the score needs of every neuron is read, the rest of those that reach the threshold.
    pub fn threshold(neuron: NeuronShape, score: Score) -> Self {
        let before = match score.precedes_up() {
            true => 1.0,
            false => neuron.matrices as f64 - 1.0,
        };
        Self {
            policy: Policy::Threshold,
            every: neuron.whole(before),
            active: Work {
                sums: 1.0,
                ..neuron.alone(neuron.matrices as f64 - before)
            },
            ..Self::dense(neuron)
        }
    }

    /// What a token reads in all, of `count` neurons that are active so often in sum.
    pub fn work(&self, count: f64, active: f64) -> Work {
        // The row of an active neuron follows another's where the neuron before it is active too.
        let apart = if count > 0.0 {
            1.0 - active / count
        } else {
            0.0
        };
        Work {
            bytes: self.prediction.bytes + count * self.every.bytes + active * self.active.bytes,
            rows: self.prediction.rows
                + count * self.every.rows
                + active * self.active.rows * apart.max(0.0),
            sums: self.prediction.sums + count * self.every.sums + active * self.active.sums,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_jump_where_their_neighbours_are_left_out() {
        let mode = LayerMode::exact(NeuronShape {
            bytes: 300,
            matrices: 3,
        });
        let work = |active| mode.work(100.0, active);
        assert_eq!(work(100.0).rows, 0.0);
        assert_eq!(work(25.0).rows, 25.0 * 2.0 * 0.75);
        assert_eq!((work(25.0).sums, work(25.0).bytes), (25.0, 15_000.0));
        assert_eq!(mode.work(0.0, 0.0), Work::default());
    }

    #[test]
    fn down_is_read_whole_whatever_gate_and_up_leave_out() {
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
