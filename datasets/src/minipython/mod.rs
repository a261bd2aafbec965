//! Small Python functions to write, from task files: JSON Lines, one [`Task`] per line, compressed
//! with gzip.

mod argument;
mod task;

use std::{
    collections::HashSet,
    io::{BufRead, BufReader},
};

use flate2::read::GzDecoder;
use powerinfer_artifact::random::Random;

pub use argument::{Argument, Kind};
pub use task::Task;

/// Tasks that share no combination with those of the other split, nor with the training text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Text to profile a model and to calibrate predictors on.
    Calibration,
    /// Tasks to evaluate on.
    HeldOut,
}

/// More distinct tasks were asked for than the file has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the demo has {available} distinct tasks, {wanted} are wanted; ask for fewer")]
pub struct TooFewTasks {
    /// Tasks asked for.
    pub wanted: usize,
    /// Tasks with different combinations in the file.
    pub available: usize,
}

impl Split {
    /// Every split.
    pub const ALL: [Self; 2] = [Self::Calibration, Self::HeldOut];

    /// Name of the split, and of its file in `datasets/demo` before `.jsonl.gz`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calibration => "calibration",
            Self::HeldOut => "held-out",
        }
    }

    /// Seed that gives the tasks in the order of the file: the default of the commands.
    pub fn default_seed(self) -> u64 {
        match self {
            Self::Calibration => 0,
            Self::HeldOut => 1,
        }
    }

    /// The compressed file.
    fn file(self) -> &'static [u8] {
        match self {
            Self::Calibration => include_bytes!("../../demo/calibration.jsonl.gz"),
            Self::HeldOut => include_bytes!("../../demo/held-out.jsonl.gz"),
        }
    }

    /// Tasks in the order of the file, decompressed as they are read.
    fn in_file_order(self) -> impl Iterator<Item = Task> {
        let lines = BufReader::new(GzDecoder::new(self.file())).lines();
        lines.map(|line| {
            let line = line.expect("the embedded file is gzip of UTF-8");
            serde_json::from_str(&line).expect("every line of the embedded file is a task")
        })
    }
}

/// All tasks of `split`, in an order that `seed` decides. Combinations repeat, with other names,
/// phrasings and constants.
pub fn tasks(split: Split, seed: u64) -> Box<dyn Iterator<Item = Task>> {
    if seed == split.default_seed() {
        return Box::new(split.in_file_order());
    }
    let mut tasks: Vec<Task> = split.in_file_order().collect();
    let mut random = Random::new(seed);
    for last in (1..tasks.len()).rev() {
        tasks.swap(last, random.below(last + 1));
    }
    Box::new(tasks.into_iter())
}

/// The first `count` tasks of [`tasks`] that have different combinations.
///
/// # Errors
///
/// If the split has fewer.
pub fn distinct_tasks(split: Split, seed: u64, count: usize) -> Result<Vec<Task>, TooFewTasks> {
    let mut seen = HashSet::new();
    let distinct: Vec<Task> = tasks(split, seed)
        .filter(|task| seen.insert(task.combination().to_owned()))
        .take(count)
        .collect();
    match distinct.len() {
        available if available < count => Err(TooFewTasks {
            wanted: count,
            available,
        }),
        _ => Ok(distinct),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combinations(split: Split) -> HashSet<String> {
        tasks(split, split.default_seed())
            .map(|task| task.combination().to_owned())
            .collect()
    }

    #[test]
    fn the_splits_share_no_combination() {
        assert!(combinations(Split::Calibration).is_disjoint(&combinations(Split::HeldOut)));
    }

    #[test]
    fn every_seed_gives_the_same_tasks_in_an_order_of_its_own() {
        for split in Split::ALL {
            let in_file: Vec<Task> = split.in_file_order().collect();
            let shuffled: Vec<Task> = tasks(split, 7).collect();
            assert_ne!(in_file, shuffled);
            assert_eq!(shuffled, tasks(split, 7).collect::<Vec<_>>());
            let sorted = |tasks: Vec<Task>| {
                let mut texts: Vec<String> = tasks.iter().map(Task::text).collect();
                texts.sort();
                texts
            };
            assert_eq!(sorted(in_file), sorted(shuffled));
        }
    }

    #[test]
    fn distinct_tasks_have_distinct_combinations() {
        let available = combinations(Split::HeldOut).len();
        let all = distinct_tasks(Split::HeldOut, 1, available).unwrap();
        let seen: HashSet<&str> = all.iter().map(Task::combination).collect();
        assert_eq!(seen.len(), available);
        assert_eq!(
            distinct_tasks(Split::HeldOut, 1, available + 1),
            Err(TooFewTasks {
                wanted: available + 1,
                available
            })
        );
    }

    #[test]
    fn arguments_repeat_for_the_same_seed_and_start_at_the_edge() {
        for task in tasks(Split::HeldOut, 1).take(200) {
            let arguments = task.arguments(5, 16);
            assert_eq!(arguments, task.arguments(5, 16));
            assert_eq!(arguments.len(), 16);
            assert!(arguments[0].iter().all(|argument| match argument {
                Argument::Int(value) => *value == 0,
                Argument::Str(value) => value.is_empty(),
                Argument::Ints(values) => values.is_empty(),
                Argument::Strs(values) => values.is_empty(),
            }));
        }
    }
}
