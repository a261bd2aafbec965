//! A compositional grammar of small Python functions.
//!
//! A combination of steps is drawn from one of thirteen families, told in one of several
//! phrasings, and solved by a body that the docstring determines. A hash of the combination
//! alone decides whether it is trained on or held out.

mod argument;
mod arrangement;
mod condition;
mod difficulty;
mod draft;
mod families;
mod family;
mod mapping;

mod phrase;
mod pipeline;
mod reduction;
mod split;
mod subject;
mod task;

use std::collections::HashSet;

pub use argument::Argument;
pub use family::Family;
pub use split::Split;
pub use task::Task;

use crate::random::Random;

/// An endless stream of tasks of `split`; equal seeds give equal streams.
pub fn tasks(split: Split, seed: u64) -> impl Iterator<Item = Task> {
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || draw(&mut random))
        .filter(move |task| Split::of(task.combination()) == split)
}

/// The first `count` tasks of [`tasks`] that have different combinations.
pub fn distinct_tasks(split: Split, seed: u64, count: usize) -> Vec<Task> {
    let mut seen = HashSet::new();
    tasks(split, seed)
        .filter(|task| seen.insert(task.combination().to_owned()))
        .take(count)
        .collect()
}

fn draw(random: &mut Random) -> Task {
    let weights = difficulty::FAMILY_WEIGHTS.map(|(_, weight)| weight);
    let (family, _) = difficulty::FAMILY_WEIGHTS[random.weighted(&weights)];
    let steps = 1 + random.weighted(&difficulty::STEP_WEIGHTS);
    let draft = family.draw(steps, random);
    Task::new(family, steps, draft, random)
}
