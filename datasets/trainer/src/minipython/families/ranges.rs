//! The integers of a range, filtered, mapped and arranged, then reduced.

use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::pipeline::{Pipeline, Source};
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// Which integers.
#[derive(Debug, Clone, Copy)]
enum Span {
    FromOne,
    Below,
    From(i64),
    Every(i64),
    Down,
    FromTo,
}

const ENDS: [&str; 4] = ["n", "limit", "stop", "end"];

/// Draws a task; the reduction counts as a step, the range does not.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let pipeline = Pipeline::draw(steps, random);
    let span = match random.below(7) {
        0..=1 => Span::FromOne,
        2 => Span::Below,
        3 => Span::From(random.between(2, 40)),
        4 => Span::Every(random.between(2, 9)),
        5 => Span::Down,
        _ => Span::FromTo,
    };
    let end = random.pick(&ENDS);
    let integers = random.pick(&["integers", "numbers"]);
    let inclusive = random.pick(&["to", "up to and including", "through"]);
    let (key, told, iterable) = match span {
        Span::FromOne => (
            "from-one".to_owned(),
            format!("the {integers} from 1 {inclusive} {end}"),
            format!("range(1, {end} + 1)"),
        ),
        Span::Below => (
            "below".to_owned(),
            match random.below(2) {
                0 => format!("the {integers} from 0 up to but not including {end}"),
                _ => format!("the non-negative {integers} below {end}"),
            },
            format!("range({end})"),
        ),
        Span::From(start) => (
            format!("from({})", start / 10 * 10),
            format!("the {integers} from {start} {inclusive} {end}"),
            format!("range({start}, {end} + 1)"),
        ),
        Span::Every(stride) => (
            format!("every({stride})"),
            match random.below(2) {
                0 => format!("the multiples of {stride} from 0 and below {end}"),
                _ => format!("the non-negative multiples of {stride} below {end}"),
            },
            format!("range(0, {end}, {stride})"),
        ),
        Span::Down => (
            "down".to_owned(),
            match random.below(2) {
                0 => format!("the {integers} from {end} down to 1"),
                _ => format!("the {integers} counting down from {end} to 1"),
            },
            format!("range({end}, 0, -1)"),
        ),
        Span::FromTo => (
            "from-to".to_owned(),
            format!("the {integers} from a {inclusive} b"),
            "range(a, b + 1)".to_owned(),
        ),
    };
    let names: &[&'static str] = match span {
        Span::FromTo => &["a", "b"],
        _ => &[end],
    };
    let source = Source {
        subject: Subject {
            name: "nums",
            item: "i",
            nouns: integers,
            noun: "number",
        },
        told,
        iterable,
    };
    Draft {
        combination: format!("{key}|{}", pipeline.key()),
        parameters: names
            .iter()
            .map(|&name| Parameter {
                name,
                kind: Kind::Int { low: -9, high: 130 },
            })
            .collect(),
        docstring: pipeline.docstring(&source, random),
        body: pipeline.body(&source),
    }
}
