//! What a placement comes down to: a chain of stages, each of which takes one of its choices, within
//! the memory of a CPU and of some GPUs.
//!
//! ```text
//! start ──▶ layer 0 ──▶ layer 1 ──▶ … ──▶ head
//!  CPU      CPU | GPU    CPU | GPU         CPU | GPU      where the hidden state is
//! ```
//!
//! A stage's *home* is where the hidden state is in it; it costs something to go from one home to
//! the other. With several GPUs each has a contiguous range of the stages, in their order.

/// A program: minimise the cost of a choice per stage, and of the ways between them.
#[derive(Debug, Clone)]
pub(crate) struct Chain {
    /// The stages, in order.
    pub(crate) stages: Vec<Stage>,
    /// Bytes that each GPU can hold; at least one GPU, be it of 0 bytes.
    pub(crate) capacities: Vec<u64>,
    /// Bytes that the CPU can hold.
    pub(crate) ram: u64,
    /// Cost of going from the CPU to a GPU, or back.
    pub(crate) crossing: f64,
    /// Cost of going from one GPU to another.
    pub(crate) hop: f64,
}

/// What one stage may be, for each home.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stage {
    /// With the hidden state on the CPU, and on the GPU of the stage's range.
    pub(crate) homes: [Vec<Choice>; 2],
}

/// Place of the CPU in [`Stage::homes`].
pub(crate) const ON_CPU: usize = 0;
/// Place of the GPU in [`Stage::homes`].
pub(crate) const ON_GPU: usize = 1;

/// One way to have a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    /// Memory that it takes on the GPU of its range.
    pub(crate) gpu_bytes: u64,
    /// Memory that it takes on the CPU.
    pub(crate) cpu_bytes: u64,
    /// What it costs.
    pub(crate) cost: f64,
    /// What it is, to whoever made it.
    pub(crate) what: u32,
}

/// Where a stage is: the GPU of its range, and its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) gpu: usize,
    pub(crate) layer_device: usize,
}

/// What a solution has at a stage: a state by its index, and a choice of the stage's home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) state: usize,
    pub(crate) choice: usize,
}

impl State {
    /// The state of this index.
    pub(crate) fn of(index: usize) -> Self {
        Self {
            gpu: index / 2,
            layer_device: index % 2,
        }
    }
}

impl Chain {
    /// Number of states a stage can be in.
    pub(crate) fn states(&self) -> usize {
        2 * self.capacities.len()
    }

    /// The state before the first stage.
    pub(crate) const START: usize = 0;

    /// Cost of going from one state to the next; infinite for a range that has ended.
    pub(crate) fn transition(&self, from: usize, to: usize) -> f64 {
        let (from, to) = (State::of(from), State::of(to));
        match (from.layer_device, to.layer_device) {
            _ if to.gpu < from.gpu => f64::INFINITY,
            (ON_CPU, ON_CPU) => 0.0,
            (ON_GPU, ON_GPU) if from.gpu == to.gpu => 0.0,
            (ON_GPU, ON_GPU) => self.hop,
            _ => self.crossing,
        }
    }

    /// The choices of `stage` in `state`.
    pub(crate) fn choices(&self, stage: usize, state: usize) -> &[Choice] {
        &self.stages[stage].homes[State::of(state).layer_device]
    }

    /// The choice that a step takes.
    pub(crate) fn chosen(&self, stage: usize, step: Step) -> &Choice {
        &self.choices(stage, step.state)[step.choice]
    }

    /// Cost of a solution, in the order of its stages.
    pub(crate) fn cost(&self, steps: &[Step]) -> f64 {
        let mut before = Self::START;
        let mut cost = 0.0;
        for (stage, step) in steps.iter().enumerate() {
            cost += self.transition(before, step.state) + self.chosen(stage, *step).cost;
            before = step.state;
        }
        cost
    }

    /// Bytes of a solution on each GPU.
    pub(crate) fn gpu_bytes(&self, steps: &[Step]) -> Vec<u64> {
        let mut bytes = vec![0; self.capacities.len()];
        for (stage, step) in steps.iter().enumerate() {
            bytes[State::of(step.state).gpu] += self.chosen(stage, *step).gpu_bytes;
        }
        bytes
    }

    /// Bytes of a solution on the CPU.
    pub(crate) fn cpu_bytes(&self, steps: &[Step]) -> u64 {
        let steps = steps.iter().enumerate();
        steps
            .map(|(stage, step)| self.chosen(stage, *step).cpu_bytes)
            .sum()
    }

    /// Whether a solution fits every memory.
    pub(crate) fn allows(&self, steps: &[Step]) -> bool {
        let gpus = self.gpu_bytes(steps);
        let fit = gpus
            .iter()
            .zip(&self.capacities)
            .all(|(bytes, capacity)| bytes <= capacity);
        fit && self.cpu_bytes(steps) <= self.ram
    }

    /// The same without the choices that another one of their stage and home beats in cost without
    /// taking more of any memory; of the CPU's only where `ram_matters`.
    pub(crate) fn pruned(&self, ram_matters: bool) -> Self {
        let keep = |choices: &Vec<Choice>| -> Vec<Choice> {
            let mut sorted = choices.clone();
            sorted.sort_by(|a, b| {
                (a.gpu_bytes.cmp(&b.gpu_bytes))
                    .then(a.cost.total_cmp(&b.cost))
                    .then(a.cpu_bytes.cmp(&b.cpu_bytes))
            });
            match ram_matters {
                false => {
                    let mut least = f64::INFINITY;
                    sorted.retain(|choice| {
                        let is_better = choice.cost < least;
                        least = least.min(choice.cost);
                        is_better
                    });
                }
                true => {
                    let mut front = Front::default();
                    sorted.retain(|choice| front.insert(choice.cpu_bytes, choice.cost));
                }
            }
            sorted
        };
        let stages = self.stages.iter().map(|stage| Stage {
            homes: [keep(&stage.homes[ON_CPU]), keep(&stage.homes[ON_GPU])],
        });
        Self {
            stages: stages.collect(),
            capacities: self.capacities.clone(),
            ..*self
        }
    }
}

/// Pairs of bytes and cost of which none has less of one and not more of the other.
#[derive(Debug, Default)]
pub(crate) struct Front(std::collections::BTreeMap<u64, f64>);

impl Front {
    /// Adds a pair, unless one that is there has no more of either.
    pub(crate) fn insert(&mut self, bytes: u64, cost: f64) -> bool {
        if let Some((_, least)) = self.0.range(..=bytes).next_back()
            && *least <= cost
        {
            return false;
        }
        let beaten: Vec<u64> = self
            .0
            .range(bytes..)
            .take_while(|(_, other)| **other >= cost)
            .map(|(bytes, _)| *bytes)
            .collect();
        for bytes in beaten {
            self.0.remove(&bytes);
        }
        self.0.insert(bytes, cost);
        true
    }
}
