//! Arithmetic on two or three numbers, step by step, with a case distinction.

use super::zipped::Blend;
use crate::minipython::condition::{Condition, Count, usual_numbers};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::{indented, narrate};
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

const TRIPLES: [[&str; 3]; 5] = [
    ["a", "b", "c"],
    ["x", "y", "z"],
    ["m", "n", "k"],
    ["p", "q", "r"],
    ["u", "v", "w"],
];

/// Draws a task: a blend of two numbers, then changes, a case and a third number.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let names = random.pick(&TRIPLES);
    let [first, second, third] = names;
    let blend = Blend::draw(random);
    let mapping = Mapping::draw(random);
    let results: Vec<i64> = usual_numbers()
        .into_iter()
        .map(|value| mapping.apply(value))
        .collect();
    let case = (steps >= 2).then(|| {
        let condition = loop {
            let condition = Condition::simple(random);
            if condition.splits(&results) {
                break condition;
            }
        };
        (condition, Mapping::draw_after(Some(mapping), random))
    });
    let otherwise = match (&case, steps) {
        (Some((_, change)), 3 | 4) => Some(Mapping::draw_after(Some(*change), random)),
        _ => None,
    };
    let last = (steps == 4).then(|| random.pick(&[Blend::Sum, Blend::Product, Blend::Difference]));

    let mut keys = vec![blend.key().to_owned(), mapping.key()];
    keys.extend(
        case.iter()
            .map(|(condition, change)| format!("{}>{}", condition.key(), change.key())),
    );
    keys.extend(otherwise.map(|it| format!("else>{}", it.key())));
    keys.extend(last.map(|it| it.key().to_owned()));

    let mut clauses = vec![told_blend(blend, first, second, random)];
    let result = random.pick(&["the result", "that", "it"]);
    clauses.push(mapping.imperative(result, random));
    if let Some((condition, change)) = &case {
        let predicate = condition.predicate(Count::One, random);
        let change = change.imperative("it", random);
        let mut clause = format!("if the result is {predicate} {change}");
        if let Some(otherwise) = otherwise {
            let word = random.pick(&["else", "otherwise"]);
            clause.push_str(&format!(" {word} {}", otherwise.imperative("it", random)));
        }
        clauses.push(clause);
    }
    clauses.extend(last.map(|blend| match blend {
        Blend::Product => format!("multiply by {third}"),
        Blend::Difference => format!("subtract {third}"),
        _ => format!("add {third}"),
    }));
    let outcome = random.pick(&["the result", "the outcome", "that"]);

    let parameters = match last {
        Some(_) => &names[..],
        None => &names[..2],
    };
    Draft {
        combination: keys.join("|"),
        parameters: parameters
            .iter()
            .map(|&name| Parameter {
                name,
                kind: Kind::Int {
                    low: -40,
                    high: 120,
                },
            })
            .collect(),
        docstring: narrate(&clauses, outcome, None, random),
        body: body(names, blend, mapping, case.as_ref(), otherwise, last),
    }
}

fn told_blend(blend: Blend, first: &str, second: &str, random: &mut Random) -> String {
    match blend {
        Blend::Sum => match random.below(2) {
            0 => format!("take the sum of {first} and {second}"),
            _ => format!("add {first} and {second}"),
        },
        Blend::Product => match random.below(2) {
            0 => format!("take the product of {first} and {second}"),
            _ => format!("multiply {first} by {second}"),
        },
        Blend::Difference => match random.below(2) {
            0 => format!("take {first} minus {second}"),
            _ => format!("subtract {second} from {first}"),
        },
        Blend::Distance => match random.below(2) {
            0 => format!("take the distance between {first} and {second}"),
            _ => format!("take the absolute difference of {first} and {second}"),
        },
        Blend::Larger => match random.below(2) {
            0 => format!("take the larger of {first} and {second}"),
            _ => format!("take the maximum of {first} and {second}"),
        },
        Blend::Smaller => match random.below(2) {
            0 => format!("take the smaller of {first} and {second}"),
            _ => format!("take the minimum of {first} and {second}"),
        },
    }
}

fn body(
    [first, second, third]: [&str; 3],
    blend: Blend,
    mapping: Mapping,
    case: Option<&(Condition, Mapping)>,
    otherwise: Option<Mapping>,
    last: Option<Blend>,
) -> Vec<String> {
    let mut body = vec![
        format!("result = {}", blend.expression(first, second)),
        mapping.statement("result"),
    ];
    if let Some((condition, change)) = case {
        body.push(format!("if {}:", condition.test("result")));
        body.extend(indented([change.statement("result")]));
    }
    if let Some(otherwise) = otherwise {
        body.push("else:".to_owned());
        body.extend(indented([otherwise.statement("result")]));
    }
    body.push(match last {
        Some(blend) => format!("return {}", blend.expression("result", third)),
        None => "return result".to_owned(),
    });
    body
}
