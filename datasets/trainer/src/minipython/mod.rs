//! A compositional grammar of small Python functions.
//!
//! A combination of steps is drawn from one of thirteen families, described in one of several
//! phrasings, and solved by a body that the docstring determines. A hash of the combination
//! alone decides whether it is trained on or held out.

mod arrangement;
mod character;
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
mod word_condition;
mod word_mapping;

use std::collections::HashSet;

use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Task;

use draft::Draft;
use family::Family;
pub(crate) use split::Split;

/// Names of the function to write; they reveal nothing of the task.
const FUNCTION_NAMES: [&str; 16] = [
    "solve",
    "f",
    "compute",
    "func",
    "process",
    "run",
    "task",
    "calc",
    "answer",
    "work",
    "g",
    "convert",
    "evaluate",
    "apply",
    "handle",
    "result_of",
];

/// An endless stream of tasks of `split`; equal seeds give equal streams.
pub(crate) fn tasks(split: Split, seed: u64) -> impl Iterator<Item = Task> {
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || draw(&mut random))
        .filter(move |task| Split::of(task.combination()) == split)
}

/// The first `count` tasks of [`tasks`] that have different combinations.
pub(crate) fn distinct_tasks(split: Split, seed: u64, count: usize) -> Vec<Task> {
    let mut seen = HashSet::new();
    tasks(split, seed)
        .filter(|task| seen.insert(task.combination().to_owned()))
        .take(count)
        .collect()
}

fn draw(random: &mut Random) -> Task {
    let (family, steps) = draw_kind(random);
    task(family, family.draw(steps, random), random)
}

/// A family and a number of steps.
fn draw_kind(random: &mut Random) -> (Family, usize) {
    let weights = difficulty::FAMILY_WEIGHTS.map(|(_, weight)| weight);
    let (family, _) = difficulty::FAMILY_WEIGHTS[random.weighted(&weights)];
    (family, 1 + random.weighted(&difficulty::STEP_WEIGHTS))
}

/// Joins the parts of `draft` under a name for the function.
fn task(family: Family, draft: Draft, random: &mut Random) -> Task {
    let entry_point = random.pick(&FUNCTION_NAMES);
    let names: Vec<&str> = draft.parameters.iter().map(|it| it.name).collect();
    let mut solution = String::from("\n");
    for line in &draft.body {
        solution.push_str("    ");
        solution.push_str(line);
        solution.push('\n');
    }
    Task::new(
        format!("{}|{}", family.name(), draft.combination),
        draft.parameters.iter().map(|it| it.kind).collect(),
        format!(
            "def {entry_point}({}):\n    \"\"\"{}\"\"\"",
            names.join(", "),
            draft.docstring
        ),
        solution,
    )
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use sha2::{Digest, Sha256};

    use super::*;

    fn any_tasks(seed: u64, count: usize) -> Vec<Task> {
        let mut random = Random::new(seed);
        (0..count).map(|_| draw(&mut random)).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_everywhere() {
        // Family by family, so that the weights can be tuned without changing the digest.
        let mut hasher = Sha256::new();
        for (family, _) in difficulty::FAMILY_WEIGHTS {
            let mut random = Random::new(1);
            for steps in (1..=4).cycle().take(100) {
                let draft = family.draw(steps, &mut random);
                let task = task(family, draft, &mut random);
                hasher.update(task.text());
            }
        }
        let digest = hasher.finalize();
        assert_eq!(
            format!(
                "{:02x}{:02x}{:02x}{:02x}",
                digest[0], digest[1], digest[2], digest[3]
            ),
            "51e27235"
        );
        let texts = |seed| -> Vec<String> {
            let tasks = tasks(Split::Training, seed).take(500);
            tasks.map(|task| task.text()).collect()
        };
        assert_eq!(texts(1), texts(1));
    }

    #[test]
    fn another_seed_gives_other_tasks() {
        let text = |seed| tasks(Split::HeldOut, seed).next().map(|task| task.text());
        assert_ne!(text(1), text(2));
    }

    #[test]
    fn the_splits_share_no_combination() {
        let combinations = |split| -> HashSet<String> {
            tasks(split, 3)
                .take(5000)
                .map(|task| task.combination().to_owned())
                .collect()
        };
        let training = combinations(Split::Training);
        let calibration = combinations(Split::Calibration);
        let held_out = combinations(Split::HeldOut);
        assert!(training.is_disjoint(&held_out));
        assert!(training.is_disjoint(&calibration));
        assert!(calibration.is_disjoint(&held_out));
    }

    #[test]
    fn held_out_texts_never_occur_in_training() {
        let training: HashSet<String> = tasks(Split::Training, 4)
            .take(20_000)
            .map(|task| task.text())
            .collect();
        let unseen = tasks(Split::HeldOut, 4).take(2000);
        assert!(
            unseen
                .into_iter()
                .all(|task| !training.contains(&task.text()))
        );
    }

    #[test]
    fn nine_combinations_in_ten_are_trained_on() {
        let combinations: HashSet<String> = any_tasks(5, 20_000)
            .iter()
            .map(|task| task.combination().to_owned())
            .collect();
        let mut shares: HashMap<Split, usize> = HashMap::new();
        for combination in &combinations {
            *shares.entry(Split::of(combination)).or_default() += 1;
        }
        let percent = |split| 100.0 * shares[&split] as f64 / combinations.len() as f64;
        assert!((percent(Split::Training) - 90.0).abs() < 1.5);
        assert!((percent(Split::Calibration) - 5.0).abs() < 1.0);
        assert!((percent(Split::HeldOut) - 5.0).abs() < 1.0);
    }

    #[test]
    fn a_text_is_a_prompt_and_its_solution() {
        for task in any_tasks(6, 5000) {
            let (prompt, solution) = (task.prompt(), task.solution());
            assert!(prompt.starts_with(&format!("def {}(", task.entry_point())));
            assert!(prompt.ends_with("\"\"\""), "{prompt}");
            assert_eq!(prompt.matches("\"\"\"").count(), 2, "{prompt}");
            assert!(solution.starts_with("\n    "), "{solution}");
            assert!(solution.ends_with('\n') && !solution.ends_with("\n\n"));
            assert_eq!(task.text(), format!("{prompt}{solution}"));
            assert!(task.text().is_ascii());
        }
    }

    #[test]
    fn texts_are_short_and_of_the_intended_mean() {
        let lengths: Vec<usize> = any_tasks(7, 5000)
            .iter()
            .map(|task| task.text().len())
            .collect();
        let mean = lengths.iter().sum::<usize>() / lengths.len();
        assert!((220..=265).contains(&mean), "the mean is {mean} characters");
        let long = lengths.iter().filter(|&&length| length > 460).count();
        assert!(long * 50 < lengths.len(), "{long} texts are long");
    }

    #[test]
    fn every_family_occurs_with_every_number_of_steps() {
        let mut random = Random::new(8);
        let seen: HashSet<(Family, usize)> = (0..20_000).map(|_| draw_kind(&mut random)).collect();
        for (family, _) in difficulty::FAMILY_WEIGHTS {
            for steps in 1..=4 {
                assert!(seen.contains(&(family, steps)), "{family:?}, {steps} steps");
            }
        }
    }

    #[test]
    fn one_combination_has_one_body_up_to_names_and_constants() {
        // Letters and digits aside, only the layout of the code remains.
        let layout = |task: &Task| -> String {
            let letters = |it: char| it.is_ascii_alphanumeric() || it == '_';
            task.solution().replace(letters, "")
        };
        let mut layouts: HashMap<String, String> = HashMap::new();
        for task in any_tasks(9, 30_000) {
            let layout = layout(&task);
            let earlier = layouts
                .entry(task.combination().to_owned())
                .or_insert_with(|| layout.clone());
            assert_eq!(*earlier, layout, "{}", task.combination());
        }
    }

    #[test]
    fn distinct_tasks_have_distinct_combinations() {
        let tasks = distinct_tasks(Split::HeldOut, 10, 1000);
        let combinations: HashSet<&str> = tasks.iter().map(Task::combination).collect();
        assert_eq!(combinations.len(), 1000);
    }
}
