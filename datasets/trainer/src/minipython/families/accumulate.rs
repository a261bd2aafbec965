//! A running total, changed for each number by the first rule that fits it.

use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::{capitalised, ten};
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// What a rule does to the total.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    AddItem,
    SubtractItem,
    AddMultiple(i64),
    AddSquare,
    Add(i64),
    Subtract(i64),
}

/// Draws a task of one to three rules; the fourth step changes the total at the end.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let subject = Subject::numbers(random);
    let start = match random.chance(40) {
        true => 0,
        false => random.between(1, 99),
    };
    let conditions = match steps {
        1 | 2 => vec![Condition::draw(random)],
        _ => {
            let (first, second) = Condition::cascade(random);
            vec![first, second]
        }
    };
    let finish = (steps == 4).then(|| Mapping::draw(random));
    let mut actions: Vec<Action> = Vec::new();
    for _ in 0..conditions.len() + usize::from(steps > 1) {
        actions.push(Action::draw_other_than(&actions, random));
    }

    let mut keys = vec![format!("start({})", ten(start))];
    for (index, action) in actions.iter().enumerate() {
        let condition = conditions
            .get(index)
            .map_or("else".to_owned(), Condition::key);
        keys.push(format!("{condition}>{}", action.key()));
    }
    keys.extend(finish.map(Mapping::key));

    Draft {
        combination: keys.join("|"),
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Ints,
        }],
        docstring: docstring(subject, start, &conditions, &actions, finish, random),
        body: body(subject, start, &conditions, &actions, finish),
    }
}

fn docstring(
    subject: Subject,
    start: i64,
    conditions: &[Condition],
    actions: &[Action],
    finish: Option<Mapping>,
    random: &mut Random,
) -> String {
    let Subject { name, noun, .. } = subject;
    let condition_first = random.chance(50);
    let mut rules = Vec::new();
    for (index, action) in actions.iter().enumerate() {
        let action = action.told(random);
        let Some(condition) = conditions.get(index) else {
            rules.push(format!("{} {action}", random.pick(&["else", "otherwise"])));
            continue;
        };
        let predicate = condition.predicate(Count::One, random);
        let again = match index {
            0 => "",
            _ => "else ",
        };
        rules.push(match condition_first {
            true => format!("{again}if it is {predicate} {action}"),
            false => format!("{again}{action} if it is {predicate}"),
        });
    }
    let rules = rules.join(", ");
    let sum = random.pick(&["total", "score", "sum"]);
    let told = match random.below(4) {
        0 => format!("Start with a {sum} of {start}. For each {noun} in {name}, {rules}."),
        1 => format!("Begin a {sum} at {start}; for every {noun} in {name} {rules}."),
        2 => format!("With a {sum} starting at {start}, for each {noun} of {name}: {rules}."),
        _ => format!("Go through {name} with a {sum} of {start}: for each {noun} {rules}."),
    };
    match finish {
        None => format!("{told} Return the {sum}."),
        Some(mapping) => {
            let change = mapping.imperative(&format!("the {sum}"), random);
            match random.below(2) {
                0 => format!("{told} Finally {change} and return it."),
                _ => format!("{told} {} at the end and return it.", capitalised(&change)),
            }
        }
    }
}

fn body(
    subject: Subject,
    start: i64,
    conditions: &[Condition],
    actions: &[Action],
    finish: Option<Mapping>,
) -> Vec<String> {
    let Subject { name, item, .. } = subject;
    let mut body = vec![format!("total = {start}"), format!("for {item} in {name}:")];
    for (index, action) in actions.iter().enumerate() {
        body.push(match (index, conditions.get(index)) {
            (0, Some(condition)) => format!("    if {}:", condition.test(item)),
            (_, Some(condition)) => format!("    elif {}:", condition.test(item)),
            (_, None) => "    else:".to_owned(),
        });
        body.push(format!("        {}", action.statement(item)));
    }
    let total = finish.map_or("total".to_owned(), |mapping| mapping.expression("total"));
    body.push(format!("return {total}"));
    body
}

impl Action {
    fn draw_other_than(earlier: &[Self], random: &mut Random) -> Self {
        loop {
            let action = match random.below(8) {
                0..=1 => Self::AddItem,
                2 => Self::SubtractItem,
                3 => Self::AddMultiple(random.between(2, 9)),
                4 => Self::AddSquare,
                5..=6 => Self::Add(random.between(1, 50)),
                _ => Self::Subtract(random.between(1, 50)),
            };
            if !earlier.contains(&action) {
                return action;
            }
        }
    }

    fn key(self) -> String {
        match self {
            Self::AddItem => "add-item".to_owned(),
            Self::SubtractItem => "subtract-item".to_owned(),
            Self::AddMultiple(factor) => format!("add-multiple({factor})"),
            Self::AddSquare => "add-square".to_owned(),
            Self::Add(constant) => format!("add({})", ten(constant)),
            Self::Subtract(constant) => format!("subtract({})", ten(constant)),
        }
    }

    fn told(self, random: &mut Random) -> String {
        match self {
            Self::AddItem => "add it".to_owned(),
            Self::SubtractItem => random.pick(&["subtract it", "take it away"]).to_owned(),
            Self::AddMultiple(2) => random.pick(&["add its double", "add twice it"]).to_owned(),
            Self::AddMultiple(factor) => format!("add {factor} times it"),
            Self::AddSquare => "add its square".to_owned(),
            Self::Add(constant) => format!("add {constant}"),
            Self::Subtract(constant) => match random.below(2) {
                0 => format!("take away {constant}"),
                _ => format!("subtract {constant}"),
            },
        }
    }

    fn statement(self, item: &str) -> String {
        match self {
            Self::AddItem => format!("total += {item}"),
            Self::SubtractItem => format!("total -= {item}"),
            Self::AddMultiple(factor) => format!("total += {item} * {factor}"),
            Self::AddSquare => format!("total += {item} ** 2"),
            Self::Add(constant) => format!("total += {constant}"),
            Self::Subtract(constant) => format!("total -= {constant}"),
        }
    }
}
