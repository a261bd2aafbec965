//! Changes one number in a `while` loop until it is small or large enough.

use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::{indented, ten};
use crate::minipython::reduction::Reduction;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

const NAMES: [&str; 5] = ["n", "x", "value", "num", "k"];

/// What a loop reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Report {
    Value,
    Rounds,
    Visited,
    Total,
}

/// Draws a task: over the digits of a number, shrinking it, or growing it.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let name = random.pick(&NAMES);
    let (kind, (combination, docstring, body)) = match random.below(3) {
        0 => (
            Kind::Int {
                low: 0,
                high: 99_999,
            },
            digits(name, steps, random),
        ),
        1 => (
            Kind::Int { low: -9, high: 400 },
            shrink(name, steps, random),
        ),
        _ => (
            Kind::Int {
                low: -30,
                high: 120,
            },
            grow(name, steps, random),
        ),
    };
    Draft {
        combination,
        parameters: vec![Parameter { name, kind }],
        docstring,
        body,
    }
}

type Parts = (String, String, Vec<String>);

/// Gathers the decimal digits, last first.
fn digits(name: &str, steps: usize, random: &mut Random) -> Parts {
    let keep = (steps >= 2).then(|| digit_condition(random));
    let mapping = (steps >= 3).then(|| Mapping::draw(random));
    let finish = (steps == 4).then(|| Mapping::draw(random));
    let reduction = loop {
        let reduction = Reduction::gathered(random);
        let list = reduction == Reduction::List && finish.is_some();
        let count = reduction == Reduction::Count && (keep.is_none() || mapping.is_some());
        if !list && !count {
            break reduction;
        }
    };
    let value = mapping.map_or("digit".to_owned(), |mapping| mapping.expression("digit"));
    let gathering = reduction
        .gathering(&value)
        .expect("a gathered reduction gathers");

    let nouns = format!("digits of {name}");
    let these = match &keep {
        Some(condition) => condition.restrict(&nouns, random),
        None => nouns,
    };
    let order = match reduction {
        Reduction::List => random.pick(&[", last digit first", ", from the last digit on"]),
        _ => "",
    };
    let mut docstring = match mapping {
        None => format!(
            "{} {}{order}.",
            random.pick(&["Return", "Compute", "Return"]),
            reduction.of(&format!("the {these}"), random)
        ),
        Some(mapping) => {
            let verb = random.pick(&["Take", "Go through", "Use"]);
            let change = mapping.imperative("each", random);
            let outcome = reduction.of_the_rest(random);
            format!("{verb} the {these}{order}, {change} and return {outcome}.")
        }
    };
    if let Some(finish) = finish {
        docstring.pop();
        let change = finish.imperative("it", random);
        docstring.push_str(&format!(", but {change} first."));
    }

    let mut inner = vec![gathering.step];
    if let Some(condition) = &keep {
        inner = std::iter::once(format!("if {}:", condition.test("digit")))
            .chain(indented(inner))
            .collect();
    }
    inner.insert(0, format!("digit = {name} % 10"));
    inner.push(format!("{name} //= 10"));
    let mut body = vec![gathering.start.to_owned(), format!("while {name} > 0:")];
    body.extend(indented(inner));
    let result = finish.map_or(gathering.variable.to_owned(), |mapping| {
        mapping.expression(gathering.variable)
    });
    body.push(format!("return {result}"));

    let mut keys = vec!["digits".to_owned()];
    keys.extend(keep.map(|it| format!("keep:{}", exact_key(&it))));
    keys.extend(mapping.map(Mapping::key));
    keys.push(reduction.key());
    keys.extend(finish.map(Mapping::key));
    (keys.join("|"), docstring, body)
}

fn digit_condition(random: &mut Random) -> Condition {
    match random.below(7) {
        0 => Condition::Even,
        1 => Condition::Odd,
        2 => Condition::Greater(random.between(1, 7)),
        3 => Condition::Less(random.between(2, 8)),
        4 => Condition::Divisible(3),
        5 => Condition::Differs(random.between(0, 9)),
        _ => {
            let low = random.between(1, 5);
            Condition::Between(low, random.between(low + 2, 8))
        }
    }
}

/// Digits share one ten, so their conditions are told apart by the constant itself.
fn exact_key(condition: &Condition) -> String {
    condition.test("digit").replace(' ', "")
}

/// Divides or subtracts until the number is no longer above a bound.
fn shrink(name: &str, steps: usize, random: &mut Random) -> Parts {
    let bound = random.between(0, 40);
    let step = random.between(1, 20);
    let divisor = random.between(2, 6);
    let seen: Vec<i64> = (bound + 1..=150).collect();
    let case = (steps >= 2).then(|| case_among(&seen, steps, random));
    let finish = (steps == 4).then(|| Mapping::draw(random));
    let report = match (steps, finish) {
        (1, _) => random.pick(&[Report::Rounds, Report::Value, Report::Visited]),
        (_, None) => random.pick(&[
            Report::Rounds,
            Report::Value,
            Report::Visited,
            Report::Total,
        ]),
        (_, Some(_)) => random.pick(&[Report::Value, Report::Total]),
    };
    let divide = random.chance(50);
    let (usual, other) = match divide {
        true => (Mapping::Divide(divisor), Mapping::Subtract(step)),
        false => (Mapping::Subtract(step), Mapping::Divide(divisor)),
    };
    while_loop(
        &format!("shrink({})", ten(bound)),
        [name, ">", "above"],
        bound,
        (usual, case.map(|condition| (condition, other))),
        (report, finish),
        random,
    )
}

/// Adds until the number is no longer below a bound.
fn grow(name: &str, steps: usize, random: &mut Random) -> Parts {
    let bound = random.between(20, 99);
    let step = random.between(1, 25);
    let seen: Vec<i64> = (-40..bound).collect();
    let case = (steps >= 2).then(|| case_among(&seen, steps, random));
    let finish = (steps == 4).then(|| Mapping::draw(random));
    let report = match (steps, finish) {
        (1, _) => random.pick(&[Report::Rounds, Report::Value, Report::Visited]),
        (_, None) => random.pick(&[
            Report::Rounds,
            Report::Value,
            Report::Visited,
            Report::Total,
        ]),
        (_, Some(_)) => random.pick(&[Report::Value, Report::Total]),
    };
    let other = loop {
        let other = random.between(1, 25);
        if other != step {
            break Mapping::Add(other);
        }
    };
    while_loop(
        &format!("grow({})", ten(bound)),
        [name, "<", "below"],
        bound,
        (Mapping::Add(step), case.map(|condition| (condition, other))),
        (report, finish),
        random,
    )
}

/// A condition that some of the numbers `seen` in the loop pass and some do not.
fn case_among(seen: &[i64], steps: usize, random: &mut Random) -> Condition {
    loop {
        let condition = match steps {
            2 => Condition::modular(random),
            _ => Condition::draw(random),
        };
        if condition.splits(seen) {
            return condition;
        }
    }
}

/// `usual` is what happens in a round, `case` when something else does.
fn while_loop(
    key: &str,
    [name, symbol, word]: [&str; 3],
    bound: i64,
    (usual, case): (Mapping, Option<(Condition, Mapping)>),
    (report, finish): (Report, Option<Mapping>),
    random: &mut Random,
) -> Parts {
    let mut keys = vec![key.to_owned(), usual.key()];
    keys.extend(
        case.iter()
            .map(|(condition, other)| format!("{}>{}", condition.key(), other.key())),
    );
    keys.push(report.key().to_owned());
    keys.extend(finish.map(Mapping::key));

    let told = match &case {
        None => usual.imperative("it", random),
        Some((condition, other)) => {
            let predicate = condition.predicate(Count::One, random);
            let other = other.imperative("it", random);
            let usual = usual.imperative("it", random);
            match random.below(2) {
                0 => format!("if it is {predicate} {other}, otherwise {usual}"),
                _ => format!("{other} if it is {predicate}, else {usual}"),
            }
        }
    };
    let told = match random.below(3) {
        0 => format!("While {name} is {word} {bound}, {told}."),
        1 => format!("As long as {name} is {word} {bound}: {told}."),
        _ => format!("Repeat while {name} is {word} {bound}: {told}."),
    };
    let outcome = report.told(name, random);
    let docstring = match finish {
        None => format!("{told} Return {outcome}."),
        Some(mapping) => {
            let change = mapping.imperative(&outcome, random);
            format!("{told} Then {change} and return it.")
        }
    };

    let mut inner = Vec::new();
    match &case {
        None => inner.push(usual.statement(name)),
        Some((condition, other)) => {
            inner.push(format!("if {}:", condition.test(name)));
            inner.extend(indented([other.statement(name)]));
            inner.push("else:".to_owned());
            inner.extend(indented([usual.statement(name)]));
        }
    }
    let (start, step, variable) = match report {
        Report::Value => (None, None, name),
        Report::Rounds => (Some("rounds = 0"), Some("rounds += 1".to_owned()), "rounds"),
        Report::Visited => (
            Some("result = []"),
            Some(format!("result.append({name})")),
            "result",
        ),
        Report::Total => (Some("total = 0"), Some(format!("total += {name}")), "total"),
    };
    inner.extend(step);
    let mut body: Vec<String> = start.map(str::to_owned).into_iter().collect();
    body.push(format!("while {name} {symbol} {bound}:"));
    body.extend(indented(inner));
    let value = finish.map_or(variable.to_owned(), |mapping| mapping.expression(variable));
    body.push(format!("return {value}"));
    (keys.join("|"), docstring, body)
}

impl Report {
    fn key(self) -> &'static str {
        match self {
            Self::Value => "value",
            Self::Rounds => "rounds",
            Self::Visited => "visited",
            Self::Total => "total",
        }
    }

    fn told(self, name: &str, random: &mut Random) -> String {
        match self {
            Self::Value => match random.below(2) {
                0 => format!("the final {name}"),
                _ => format!("the last value of {name}"),
            },
            Self::Rounds => random
                .pick(&[
                    "the number of rounds",
                    "how many rounds it took",
                    "the number of steps",
                ])
                .to_owned(),
            Self::Visited => match random.below(2) {
                0 => format!("the list of {name} after every round"),
                _ => format!("the values of {name} after each step as a list"),
            },
            Self::Total => match random.below(2) {
                0 => format!("the sum of {name} after every round"),
                _ => format!("the total of the values of {name} after each step"),
            },
        }
    }
}
