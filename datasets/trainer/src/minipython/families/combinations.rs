//! Two nested loops: every pair out of one list, or one number from each of two.

use super::zipped::Blend;
use crate::minipython::condition::Condition;
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::indented;
use crate::minipython::reduction::Reduction;
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// Draws a task: pairs, then a condition on what they make, a change, a condition on the first.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let one_list = random.chance(50);
    let subject = Subject::numbers(random);
    let blend = match one_list {
        // Which of two positions comes first is easily misread, so no differences here.
        true => random.pick(&[Blend::Sum, Blend::Product, Blend::Distance, Blend::Larger]),
        false => Blend::draw(random),
    };
    let condition = (steps >= 2).then(|| match steps {
        2 => Condition::draw(random),
        _ => Condition::simple(random),
    });
    let mapping = (steps >= 3).then(|| Mapping::draw(random));
    let outer = (steps == 4).then(|| Condition::simple(random));
    let reduction = loop {
        let reduction = Reduction::gathered(random);
        let counts = reduction == Reduction::Count;
        // The product of a hundred products says more about big integers than about loops.
        let huge = reduction == Reduction::Product;
        if !huge && (!counts || (condition.is_some() && mapping.is_none())) {
            break reduction;
        }
    };

    let (x, y) = match one_list {
        true => (
            format!("{}[i]", subject.name),
            format!("{}[j]", subject.name),
        ),
        false => ("x".to_owned(), "y".to_owned()),
    };
    let blended = blend.told(random);
    let pairs = match (one_list, random.below(3)) {
        (true, 0) => format!("all pairs of different positions in {}", subject.name),
        (true, 1) => format!("every two {} of {}", subject.nouns, subject.name),
        (true, _) => format!("each pair i < j of indices into {}", subject.name),
        (false, 0) => "every x in xs and every y in ys".to_owned(),
        (false, 1) => "all pairs of one number of xs and one of ys".to_owned(),
        (false, _) => "each number of xs with each of ys".to_owned(),
    };
    let mut told = format!("{} {pairs}", random.pick(&["For", "Over", "Combining"]));
    if let Some(outer) = &outer {
        let predicate = outer.predicate(crate::minipython::condition::Count::One, random);
        told.push_str(&format!(" where the first is {predicate}"));
    }
    let these = match &condition {
        Some(condition) => condition.restrict(blended, random),
        None => blended.to_owned(),
    };
    let docstring = match mapping {
        None => {
            let outcome = reduction.of(&format!("the {these}"), random);
            format!("{told}, return {outcome}.")
        }
        Some(mapping) => {
            let verb = random.pick(&["keep", "take", "pick"]);
            let change = mapping.imperative("each", random);
            let outcome = reduction.of_the_rest(random);
            format!("{told}, {verb} the {these}, {change} and return {outcome}.")
        }
    };

    let changed = mapping.map_or("value".to_owned(), |mapping| mapping.expression("value"));
    let gathering = reduction
        .gathering(&changed)
        .expect("a gathered reduction gathers");
    let mut inner = vec![gathering.step];
    if let Some(condition) = &condition {
        inner = std::iter::once(format!("if {}:", condition.test("value")))
            .chain(indented(inner))
            .collect();
    }
    inner.insert(0, format!("value = {}", blend.expression(&x, &y)));
    let (outer_walk, inner_walk) = match one_list {
        true => (
            format!("for i in range(len({})):", subject.name),
            format!("for j in range(i + 1, len({})):", subject.name),
        ),
        false => ("for x in xs:".to_owned(), "for y in ys:".to_owned()),
    };
    inner = std::iter::once(inner_walk).chain(indented(inner)).collect();
    if let Some(outer) = &outer {
        inner = std::iter::once(format!("if {}:", outer.test(&x)))
            .chain(indented(inner))
            .collect();
    }
    let mut body = vec![gathering.start.to_owned(), outer_walk];
    body.extend(indented(inner));
    body.push(format!("return {}", gathering.variable));

    let mut keys = vec![match one_list {
        true => "one-list".to_owned(),
        false => "two-lists".to_owned(),
    }];
    keys.extend(outer.map(|it| format!("first:{}", it.key())));
    keys.push(blend.key().to_owned());
    keys.extend(condition.map(|it| it.key()));
    keys.extend(mapping.map(Mapping::key));
    keys.push(reduction.key());
    let names: &[&'static str] = match one_list {
        true => &[subject.name],
        false => &["xs", "ys"],
    };
    Draft {
        combination: keys.join("|"),
        parameters: names
            .iter()
            .map(|&name| Parameter {
                name,
                kind: Kind::Ints,
            })
            .collect(),
        docstring,
        body,
    }
}
