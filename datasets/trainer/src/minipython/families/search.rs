//! Walks a list and stops early: at the first number that fits, or before or after it.

use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::phrase::indented;
use crate::minipython::reduction::Reduction;
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// Draws a task; every step adds a condition, a change or a place to look from.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let subject = Subject::numbers(random);
    let (combination, docstring, body) = match steps {
        1 if random.chance(30) => any_or_all(subject, random),
        1 => first_that_fits(subject, None, random),
        2 if random.chance(50) => {
            let mapping = Mapping::draw(random);
            first_that_fits(subject, Some(mapping), random)
        }
        3 if random.chance(40) => first_after(subject, random),
        _ => until(subject, steps, random),
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

fn any_or_all(subject: Subject, random: &mut Random) -> Parts {
    let Subject {
        name,
        item,
        noun,
        nouns,
    } = subject;
    let condition = Condition::draw(random);
    let all = random.chance(50);
    let function = if all { "all" } else { "any" };
    let docstring = match (all, random.below(3)) {
        (true, 0) => {
            let told = condition.predicate(Count::One, random);
            format!("Return True if every {noun} in {name} is {told}, otherwise False.")
        }
        (true, 1) => {
            let told = condition.predicate(Count::Many, random);
            format!("Check whether all {nouns} in {name} are {told}.")
        }
        (true, _) => {
            let told = condition.predicate(Count::Many, random);
            format!("Tell if the {nouns} in {name} are all {told}.")
        }
        (false, 0) => {
            let told = condition.predicate(Count::One, random);
            format!("Return True if some {noun} in {name} is {told}, otherwise False.")
        }
        (false, 1) => {
            let told = condition.predicate(Count::One, random);
            format!("Check whether at least one {noun} in {name} is {told}.")
        }
        (false, _) => {
            let told = condition.predicate(Count::Many, random);
            format!("Tell if any {nouns} in {name} are {told}.")
        }
    };
    let test = condition.test(item);
    (
        format!("{function}:{}", condition.key()),
        docstring,
        vec![format!("return {function}({test} for {item} in {name})")],
    )
}

fn first_that_fits(subject: Subject, mapping: Option<Mapping>, random: &mut Random) -> Parts {
    let Subject {
        name, item, noun, ..
    } = subject;
    let condition = Condition::draw(random);
    let last = random.chance(30);
    let index = mapping.is_none() && !last && random.chance(45);
    let missing = random.pick(&["-1", "0", "None"]);
    let told = condition.predicate(Count::One, random);
    let which = if last { "last" } else { "first" };
    let found = match random.below(2) {
        0 => format!("the {which} {noun} in {name} that is {told}"),
        _ => format!("the {which} {noun} of {name} which is {told}"),
    };
    let absent = match random.below(3) {
        0 => format!("or {missing} if there is none"),
        1 => format!("or {missing} if no {noun} fits"),
        _ => format!("or else {missing}"),
    };
    let docstring = match (index, mapping) {
        (true, _) => match random.below(2) {
            0 => format!("Return the index of {found}, {absent}."),
            _ => format!("Return the position, counted from 0, of {found}, {absent}."),
        },
        (false, None) => match random.below(3) {
            0 => format!("Find {found}, {absent}."),
            _ => format!("Return {found}, {absent}."),
        },
        (false, Some(mapping)) => {
            let change = mapping.imperative("it", random);
            match random.below(2) {
                0 => format!("Find {found}, {change} and return that, {absent}."),
                _ => format!("Take {found}, {change} and return the result, {absent}."),
            }
        }
    };
    let value = match (index, mapping) {
        (true, _) => "i".to_owned(),
        (false, None) => item.to_owned(),
        (false, Some(mapping)) => mapping.expression(item),
    };
    let walk = match (index, last) {
        (true, _) => format!("for i, {item} in enumerate({name}):"),
        (false, true) => format!("for {item} in reversed({name}):"),
        (false, false) => format!("for {item} in {name}:"),
    };
    let what = match mapping {
        _ if index => "index".to_owned(),
        None => "value".to_owned(),
        Some(mapping) => mapping.key(),
    };
    (
        format!("{which}:{}|{what}|{missing}", condition.key()),
        docstring,
        vec![
            walk,
            format!("    if {}:", condition.test(item)),
            format!("        return {value}"),
            format!("return {missing}"),
        ],
    )
}

fn first_after(subject: Subject, random: &mut Random) -> Parts {
    let Subject {
        name, item, noun, ..
    } = subject;
    let opening = Condition::simple(random);
    let wanted = Condition::draw(random);
    let missing = random.pick(&["-1", "0", "None"]);
    let told_opening = opening.predicate(Count::One, random);
    let told_wanted = wanted.predicate(Count::One, random);
    let docstring = match random.below(3) {
        0 => format!(
            "Return the first {noun} in {name} that is {told_wanted} and comes after one that \
             is {told_opening}, or {missing} if there is none."
        ),
        1 => format!(
            "Skip {name} up to and including the first {noun} that is {told_opening}. Return \
             the next one that is {told_wanted}, or {missing}."
        ),
        _ => format!(
            "After the first {noun} in {name} that is {told_opening}, find the first that is \
             {told_wanted} and return it, or {missing} if none."
        ),
    };
    (
        format!("after:{}|first:{}|{missing}", opening.key(), wanted.key()),
        docstring,
        vec![
            "found = False".to_owned(),
            format!("for {item} in {name}:"),
            "    if found:".to_owned(),
            format!("        if {}:", wanted.test(item)),
            format!("            return {item}"),
            format!("    elif {}:", opening.test(item)),
            "        found = True".to_owned(),
            format!("return {missing}"),
        ],
    )
}

/// Gathers numbers until one fits: two steps, a third keeps only some, a fourth changes them.
fn until(subject: Subject, steps: usize, random: &mut Random) -> Parts {
    let Subject {
        name,
        item,
        noun,
        nouns,
    } = subject;
    let (stop, keep) = Condition::cascade(random);
    let keep = (steps >= 3).then_some(keep);
    let mapping = (steps >= 4).then(|| Mapping::draw(random));
    let reduction = Reduction::gathered(random);
    let inclusive = random.chance(30);
    let value = mapping.map_or(item.to_owned(), |mapping| mapping.expression(item));
    let gathering = reduction
        .gathering(&value)
        .expect("a gathered reduction gathers");

    let these = match &keep {
        Some(condition) => condition.restrict(&format!("{nouns} in {name}"), random),
        None => format!("{nouns} in {name}"),
    };
    let told_stop = stop.predicate(Count::One, random);
    let end = match (inclusive, random.below(2)) {
        (true, 0) => format!("up to and including the first {noun} that is {told_stop}"),
        (true, _) => format!("through the first {noun} that is {told_stop}"),
        (false, 0) => format!("before the first {noun} that is {told_stop}"),
        (false, _) => format!("up to but not including the first {noun} that is {told_stop}"),
    };
    let docstring = match mapping {
        None => {
            let outcome = reduction.of(&format!("the {these}"), random);
            match random.below(2) {
                0 => format!("Return {outcome}, {end}."),
                _ => format!("Looking only {end}, return {outcome}."),
            }
        }
        Some(mapping) => {
            let change = mapping.imperative("each", random);
            let outcome = reduction.of_the_rest(random);
            match random.below(2) {
                0 => format!("Take the {these}, {end}, {change} and return {outcome}."),
                _ => {
                    format!("Looking only {end}, take the {these}, {change} and return {outcome}.")
                }
            }
        }
    };

    let mut gather = vec![gathering.step];
    if let Some(condition) = &keep {
        gather = std::iter::once(format!("if {}:", condition.test(item)))
            .chain(indented(gather))
            .collect();
    }
    let leave = vec![format!("if {}:", stop.test(item)), "    break".to_owned()];
    let inner: Vec<String> = match inclusive {
        true => gather.into_iter().chain(leave).collect(),
        false => leave.into_iter().chain(gather).collect(),
    };
    let mut body = vec![gathering.start.to_owned(), format!("for {item} in {name}:")];
    body.extend(indented(inner));
    body.push(format!("return {}", gathering.variable));

    let mut keys = vec![format!(
        "{}:{}",
        if inclusive { "through" } else { "until" },
        stop.key()
    )];
    keys.extend(keep.map(|it| format!("keep:{}", it.key())));
    keys.extend(mapping.map(Mapping::key));
    keys.push(reduction.key());
    (keys.join("|"), docstring, body)
}
