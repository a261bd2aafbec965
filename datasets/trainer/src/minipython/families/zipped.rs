//! Walks two lists side by side and gathers what their pairs make.

use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::indented;
use crate::minipython::reduction::Reduction;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// Two list parameters with their loop variables.
const PAIRS: [(&str, &str, &str, &str); 5] = [
    ("xs", "ys", "x", "y"),
    ("a", "b", "p", "q"),
    ("left", "right", "l", "r"),
    ("first", "second", "f", "s"),
    ("us", "vs", "u", "v"),
];

/// What a pair makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blend {
    Sum,
    Product,
    Difference,
    Distance,
    Larger,
    Smaller,
}

/// Which of the two is larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Above,
    Below,
}

/// Draws a task: gather, then with an order, a condition on the result and a change.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let (left, right, x, y) = random.pick(&PAIRS);
    let blend = Blend::draw(random);
    let condition = match steps {
        1 => None,
        2 => Some(Condition::draw(random)),
        _ => Some(Condition::simple(random)),
    };
    let mapping = (steps >= 3).then(|| Mapping::draw(random));
    let order = (steps == 4).then(|| random.pick(&[Order::Above, Order::Below]));
    let reduction = loop {
        let reduction = Reduction::gathered(random);
        let counts = reduction == Reduction::Count;
        if !counts || (condition.is_some() && mapping.is_none()) {
            break reduction;
        }
    };

    let mut keys = vec![blend.key().to_owned()];
    keys.extend(order.map(|it| it.symbol().to_owned()));
    keys.extend(condition.as_ref().map(Condition::key));
    keys.extend(mapping.map(Mapping::key));
    keys.push(reduction.key());

    let mut told = match random.below(3) {
        0 => format!("Pair up {left} and {right}"),
        1 => format!("Walk {left} and {right} side by side"),
        _ => format!("Go over matching positions of {left} and {right}"),
    };
    if let Some(order) = order {
        let word = match order {
            Order::Above => random.pick(&["greater", "larger"]),
            Order::Below => random.pick(&["smaller", "less"]),
        };
        told.push_str(&format!(", use pairs where the first is {word}"));
    }
    let blended = blend.told(random);
    let docstring = match (&condition, mapping) {
        (None, _) => {
            let outcome = reduction.of(&format!("the {blended}"), random);
            format!("{told} and return {outcome}.")
        }
        (Some(condition), None) => {
            let these = condition.restrict(blended, random);
            let outcome = reduction.of(&format!("the {these}"), random);
            format!("{told} and return {outcome}.")
        }
        (Some(condition), Some(mapping)) => {
            let predicate = condition.predicate(Count::Many, random);
            let verb = random.pick(&["keep", "take", "select"]);
            let change = mapping.imperative("each", random);
            let outcome = reduction.of_the_rest(random);
            format!(
                "{told}, {verb} the {blended} that are {predicate}, {change} and return {outcome}."
            )
        }
    };

    Draft {
        combination: keys.join("|"),
        parameters: [left, right]
            .map(|name| Parameter {
                name,
                kind: Kind::Ints,
            })
            .to_vec(),
        docstring,
        body: body(
            [left, right, x, y],
            blend,
            order,
            condition.as_ref(),
            mapping,
            reduction,
        ),
    }
}

fn body(
    [left, right, x, y]: [&str; 4],
    blend: Blend,
    order: Option<Order>,
    condition: Option<&Condition>,
    mapping: Option<Mapping>,
    reduction: Reduction,
) -> Vec<String> {
    let value = blend.expression(x, y);
    let walk = format!("for {x}, {y} in zip({left}, {right})");
    if condition.is_none()
        && let Some(whole) = reduction.over_comprehension(&format!("{value} {walk}"))
    {
        return vec![format!("return {whole}")];
    }
    let changed = mapping.map_or("value".to_owned(), |mapping| mapping.expression("value"));
    let gathering = reduction
        .gathering(&changed)
        .expect("a gathered reduction gathers");
    let mut inner = vec![gathering.step];
    if let Some(condition) = condition {
        inner = std::iter::once(format!("if {}:", condition.test("value")))
            .chain(indented(inner))
            .collect();
    }
    inner.insert(0, format!("value = {value}"));
    if let Some(order) = order {
        inner = std::iter::once(format!("if {x} {} {y}:", order.symbol()))
            .chain(indented(inner))
            .collect();
    }
    let mut body = vec![gathering.start.to_owned(), format!("{walk}:")];
    body.extend(indented(inner));
    body.push(format!("return {}", gathering.variable));
    body
}

impl Order {
    fn symbol(self) -> &'static str {
        match self {
            Self::Above => ">",
            Self::Below => "<",
        }
    }
}

impl Blend {
    /// Any blend.
    pub(super) fn draw(random: &mut Random) -> Self {
        random.pick(&[
            Self::Sum,
            Self::Sum,
            Self::Product,
            Self::Product,
            Self::Difference,
            Self::Distance,
            Self::Larger,
            Self::Smaller,
        ])
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Sum => "sums",
            Self::Product => "products",
            Self::Difference => "differences",
            Self::Distance => "distances",
            Self::Larger => "maxima",
            Self::Smaller => "minima",
        }
    }

    /// The Python expression over two operands.
    pub(super) fn expression(self, first: &str, second: &str) -> String {
        match self {
            Self::Sum => format!("{first} + {second}"),
            Self::Product => format!("{first} * {second}"),
            Self::Difference => format!("{first} - {second}"),
            Self::Distance => format!("abs({first} - {second})"),
            Self::Larger => format!("max({first}, {second})"),
            Self::Smaller => format!("min({first}, {second})"),
        }
    }

    /// What all pairs make, in the plural.
    pub(super) fn told(self, random: &mut Random) -> &'static str {
        match self {
            Self::Sum => random.pick(&["sums", "pair sums"]),
            Self::Product => random.pick(&["products", "pair products"]),
            Self::Difference => "differences first minus second",
            Self::Distance => random.pick(&["absolute differences", "distances"]),
            Self::Larger => random.pick(&["larger values", "pair maxima"]),
            Self::Smaller => random.pick(&["smaller values", "pair minima"]),
        }
    }
}
