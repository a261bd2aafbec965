//! Compares each number with the one before it, or carries a running value along.

use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::{indented, ten};
use crate::minipython::reduction::Reduction;
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// How a number stands to the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Rises,
    Falls,
    RisesByMore(i64),
    FarFrom(i64),
    Equals,
}

/// Draws a task: a comparison or a running total, with a filter and a change from step two on.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let subject = Subject::numbers(random);
    let (combination, docstring, body) = match random.chance(55) {
        true => compare(subject, steps, random),
        false => running(subject, steps, random),
    };
    Draft {
        combination,
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Ints,
        }],
        docstring,
        body,
    }
}

type Parts = (String, String, Vec<String>);

impl Relation {
    fn draw(random: &mut Random) -> Self {
        match random.below(7) {
            0..=1 => Self::Rises,
            2..=3 => Self::Falls,
            4 => Self::RisesByMore(random.between(2, 40)),
            5 => Self::FarFrom(random.between(2, 40)),
            _ => Self::Equals,
        }
    }

    fn key(self) -> String {
        match self {
            Self::Rises => "rises".to_owned(),
            Self::Falls => "falls".to_owned(),
            Self::RisesByMore(step) => format!("rises-by-more({})", ten(step)),
            Self::FarFrom(step) => format!("far-from({})", ten(step)),
            Self::Equals => "equals".to_owned(),
        }
    }

    fn test(self, now: &str, before: &str) -> String {
        match self {
            Self::Rises => format!("{now} > {before}"),
            Self::Falls => format!("{now} < {before}"),
            Self::RisesByMore(step) => format!("{now} > {before} + {step}"),
            Self::FarFrom(step) => format!("abs({now} - {before}) > {step}"),
            Self::Equals => format!("{now} == {before}"),
        }
    }

    fn told(self, random: &mut Random) -> String {
        let before = random.pick(&["the one before", "the previous one", "their predecessor"]);
        match self {
            Self::Rises => {
                let word = random.pick(&["greater than", "above", "larger than"]);
                format!("{word} {before}")
            }
            Self::Falls => {
                let word = random.pick(&["less than", "below", "smaller than"]);
                format!("{word} {before}")
            }
            Self::RisesByMore(step) => format!("more than {step} above {before}"),
            Self::FarFrom(step) => format!("more than {step} away from {before}"),
            Self::Equals => format!("equal to {before}"),
        }
    }
}

fn compare(subject: Subject, steps: usize, random: &mut Random) -> Parts {
    let Subject { name, nouns, .. } = subject;
    let relation = Relation::draw(random);
    let mapping = (steps == 2 || steps == 4).then(|| Mapping::draw(random));
    let keep = (steps >= 3).then(|| Condition::simple(random));
    let reduction = loop {
        let reduction = Reduction::gathered(random);
        if mapping.is_none() || reduction != Reduction::Count {
            break reduction;
        }
    };
    let now = format!("{name}[i]");
    let value = mapping.map_or(now.clone(), |mapping| mapping.expression(&now));
    let gathering = reduction
        .gathering(&value)
        .expect("a gathered reduction gathers");

    let these = match &keep {
        None => format!("{nouns} in {name} that are {}", relation.told(random)),
        Some(condition) => format!(
            "{nouns} in {name} that are {} and {}",
            relation.told(random),
            condition.predicate(Count::Many, random)
        ),
    };
    let docstring = match mapping {
        None => {
            let outcome = reduction.of(&format!("the {these}"), random);
            match random.below(2) {
                0 => format!("Return {outcome}."),
                _ => format!("Find {outcome}."),
            }
        }
        Some(mapping) => {
            let verb = random.pick(&["Take", "Pick", "Find", "Keep"]);
            let change = mapping.imperative("each", random);
            let outcome = reduction.of_the_rest(random);
            format!("{verb} the {these}, {change} and return {outcome}.")
        }
    };

    let mut inner = vec![gathering.step];
    if let Some(condition) = &keep {
        inner = std::iter::once(format!("if {}:", condition.test(&now)))
            .chain(indented(inner))
            .collect();
    }
    let test = relation.test(&now, &format!("{name}[i - 1]"));
    inner = std::iter::once(format!("if {test}:"))
        .chain(indented(inner))
        .collect();
    let mut body = vec![
        gathering.start.to_owned(),
        format!("for i in range(1, len({name})):"),
    ];
    body.extend(indented(inner));
    body.push(format!("return {}", gathering.variable));

    let mut keys = vec![relation.key()];
    keys.extend(keep.map(|it| format!("keep:{}", it.key())));
    keys.extend(mapping.map(Mapping::key));
    keys.push(reduction.key());
    (keys.join("|"), docstring, body)
}

/// Running totals: of all numbers, of some, of changed ones, starting again when too large.
fn running(subject: Subject, steps: usize, random: &mut Random) -> Parts {
    let Subject {
        name, item, nouns, ..
    } = subject;
    let start = match random.chance(40) {
        true => 0,
        false => random.between(1, 60),
    };
    let keep = (steps == 2 || steps == 4).then(|| Condition::simple(random));
    let mapping = (steps >= 3).then(|| Mapping::draw(random));
    let reset = (steps >= 3).then(|| random.between(30, 99));

    let these = match &keep {
        Some(condition) => condition.restrict(&format!("{nouns} in {name}"), random),
        None => format!("{nouns} in {name}"),
    };
    let totals = random.pick(&["running totals", "running sums", "partial sums"]);
    let begin = match start {
        0 => String::new(),
        _ => format!(" starting from {start}"),
    };
    let mut docstring = match mapping {
        None => match random.below(2) {
            0 => format!("Return the {totals} of the {these}{begin}."),
            _ => format!("Return the list of {totals}{begin} over the {these}."),
        },
        Some(mapping) => {
            let change = mapping.imperative("each", random);
            match random.below(2) {
                0 => format!("Take the {these}, {change} and return the {totals}{begin}."),
                _ => format!("Return the {totals}{begin} of the {these}; first {change}."),
            }
        }
    };
    if let Some(bound) = reset {
        docstring.push_str(&match random.below(3) {
            0 => format!(" A total above {bound} is listed and then set to 0."),
            1 => format!(" After listing a total greater than {bound}, start again from 0."),
            _ => format!(" Once a total over {bound} is listed, reset it to 0."),
        });
    }

    let value = mapping.map_or(item.to_owned(), |mapping| mapping.expression(item));
    let mut inner = vec![
        format!("total += {value}"),
        "result.append(total)".to_owned(),
    ];
    if let Some(bound) = reset {
        inner.push(format!("if total > {bound}:"));
        inner.push("    total = 0".to_owned());
    }
    if let Some(condition) = &keep {
        inner = std::iter::once(format!("if {}:", condition.test(item)))
            .chain(indented(inner))
            .collect();
    }
    let mut body = vec![
        format!("total = {start}"),
        "result = []".to_owned(),
        format!("for {item} in {name}:"),
    ];
    body.extend(indented(inner));
    body.push("return result".to_owned());

    let mut keys = vec![format!("running({})", ten(start))];
    keys.extend(keep.map(|it| format!("keep:{}", it.key())));
    keys.extend(mapping.map(Mapping::key));
    keys.extend(reset.map(|bound| format!("reset({})", ten(bound))));
    (keys.join("|"), docstring, body)
}
