//! A list of strings, filtered, mapped and arranged, then joined, counted or measured.

use crate::minipython::arrangement::Arrangement;
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::phrase::{bracketed, indented, narrate};
use crate::minipython::subject::Subject;
use crate::minipython::word_condition::WordCondition;
use crate::minipython::word_mapping::WordMapping;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// An order of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordOrder {
    Alphabetical,
    ReverseAlphabetical,
    ShortestFirst,
    LongestFirst,
}

/// A step from one list of words to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Operation {
    Keep(WordCondition),
    Map(WordMapping),
    Sort(WordOrder),
    Arrange(Arrangement),
}

/// What is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reduction {
    List,
    Join(&'static str),
    Count,
    TotalLength,
    Lengths,
    Longest,
    Shortest,
    Initials,
}

use Operation::{Arrange, Keep, Map, Sort};

/// Draws a task; the reduction counts as a step unless it is the list itself.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let (operations, reduction) = draw_steps(steps, random);
    let subject = Subject::words(random);
    let mut keys: Vec<String> = operations.iter().map(Operation::key).collect();
    keys.push(reduction.key());
    Draft {
        combination: keys.join("|"),
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Strs,
        }],
        docstring: docstring(&operations, reduction, subject, random),
        body: body(&operations, reduction, subject),
    }
}

fn draw_steps(steps: usize, random: &mut Random) -> (Vec<Operation>, Reduction) {
    loop {
        let reduction = match random.chance(35) {
            true => Reduction::List,
            false => Reduction::draw(random),
        };
        let count = steps - usize::from(reduction != Reduction::List);
        let mut operations: Vec<Operation> = Vec::with_capacity(count);
        for _ in 0..count {
            operations.push(Operation::draw_after(operations.last(), random));
        }
        let idle = match reduction {
            Reduction::Count => matches!(operations.last(), None | Some(Map(_) | Sort(_))),
            Reduction::TotalLength => {
                matches!(operations.last(), Some(operation) if operation.is_order())
            }
            _ => false,
        };
        // Lengths are asked for once, and not after they have been cut to a constant.
        let lengths_are_known = |operation: &Operation| match operation {
            Keep(condition) => condition.measures_length(),
            Map(mapping) => matches!(mapping, WordMapping::First(_) | WordMapping::Last(_)),
            Sort(_) | Arrange(_) => false,
        };
        let known = operations.iter().position(lengths_are_known);
        let asked = operations.iter().rposition(
            |operation| matches!(operation, Keep(condition) if condition.measures_length()),
        );
        let asked_again = known.is_some() && asked > known;
        if !idle && !asked_again {
            return (operations, reduction);
        }
    }
}

fn docstring(
    operations: &[Operation],
    reduction: Reduction,
    subject: Subject,
    random: &mut Random,
) -> String {
    let name = subject.name;
    if let ([Keep(condition)], true) = (operations, random.chance(50)) {
        let these = condition.restrict(&format!("{} in {name}", subject.nouns), random);
        return format!("Return {}.", reduction.of(&format!("the {these}"), random));
    }
    let clauses: Vec<String> = operations
        .iter()
        .enumerate()
        .map(|(index, operation)| operation.clause((index == 0).then_some(subject), random))
        .collect();
    if clauses.is_empty() {
        let these = format!("the {} in {name}", subject.nouns);
        return format!("Return {}.", reduction.of(&these, random));
    }
    let outcome = match reduction {
        Reduction::List => random
            .pick(&["the result", "the list", "the resulting list"])
            .to_owned(),
        Reduction::Count => random
            .pick(&["how many are left", "their number", "how many there are"])
            .to_owned(),
        _ => {
            let these = random.pick(&["them", "the results", "them"]);
            reduction.of(these, random)
        }
    };
    let told_of = match reduction {
        Reduction::Count => None,
        Reduction::List => Some(name.to_owned()),
        _ => Some(reduction.of(name, random)),
    };
    narrate(&clauses, &outcome, told_of.as_deref(), random)
}

/// One comprehension, one loop, or one line for each step, as the steps alone decide.
fn body(operations: &[Operation], reduction: Reduction, subject: Subject) -> Vec<String> {
    let Subject { name, item, .. } = subject;
    let (value, test) = match operations {
        [] => (Some(item.to_owned()), None),
        [Keep(condition)] => (Some(item.to_owned()), Some(condition)),
        [Map(mapping)] => (Some(mapping.expression(item)), None),
        [Keep(condition), Map(mapping)] => (Some(mapping.expression(item)), Some(condition)),
        _ => (None, None),
    };
    if let Some(value) = value {
        let test = test.map_or(String::new(), |it| format!(" if {}", it.test(item)));
        let walk = format!("for {item} in {name}{test}");
        return vec![format!("return {}", reduction.over(&value, &walk))];
    }
    if let Some(body) = gathering_loop(operations, reduction, subject) {
        return body;
    }
    let mut body: Vec<String> = operations.iter().map(|it| it.line(name, item)).collect();
    body.push(format!(
        "return {}",
        match reduction {
            Reduction::List => name.to_owned(),
            Reduction::Count => format!("len({name})"),
            Reduction::Join(separator) => format!("'{separator}'.join({name})"),
            Reduction::Longest => format!("max({name}, key=len, default='')"),
            Reduction::Shortest => format!("min({name}, key=len, default='')"),
            _ => reduction.over(item, &format!("for {item} in {name}")),
        }
    ));
    body
}

fn gathering_loop(
    operations: &[Operation],
    reduction: Reduction,
    subject: Subject,
) -> Option<Vec<String>> {
    let Subject { name, item, .. } = subject;
    let (variable, start, step) = match reduction {
        Reduction::List => ("result", "result = []", format!("result.append({item})")),
        Reduction::Count => ("count", "count = 0", "count += 1".to_owned()),
        Reduction::TotalLength => ("total", "total = 0", format!("total += len({item})")),
        Reduction::Lengths => (
            "result",
            "result = []",
            format!("result.append(len({item}))"),
        ),
        _ => return None,
    };
    let mut inner = vec![step];
    for operation in operations.iter().rev() {
        inner = match operation {
            Keep(condition) => std::iter::once(format!("if {}:", condition.test(item)))
                .chain(indented(inner))
                .collect(),
            Map(mapping) => {
                let statement = format!("{item} = {}", mapping.expression(item));
                std::iter::once(statement).chain(inner).collect()
            }
            Sort(_) | Arrange(_) => return None,
        };
    }
    let mut body = vec![start.to_owned(), format!("for {item} in {name}:")];
    body.extend(indented(inner));
    body.push(format!("return {variable}"));
    Some(body)
}

impl Operation {
    fn draw_after(before: Option<&Self>, random: &mut Random) -> Self {
        loop {
            let operation = match random.below(20) {
                0..=7 => Keep(WordCondition::draw(random)),
                8..=14 => Map(WordMapping::draw(random)),
                15..=17 => Sort(random.pick(&[
                    WordOrder::Alphabetical,
                    WordOrder::ReverseAlphabetical,
                    WordOrder::ShortestFirst,
                    WordOrder::LongestFirst,
                ])),
                _ => match Arrangement::draw(random) {
                    Arrangement::Ascending | Arrangement::Descending => continue,
                    arrangement => Arrange(arrangement),
                },
            };
            let clash = match (before, &operation) {
                (Some(Keep(_)), Keep(_)) | (Some(Arrange(_)), Arrange(_)) => true,
                (Some(before), Sort(_)) => before.is_order(),
                (Some(Sort(_)), Arrange(arrangement)) => arrangement.is_order(),
                (Some(Map(before)), Map(now)) => {
                    let cases = |mapping: &WordMapping| {
                        matches!(
                            mapping,
                            WordMapping::Upper | WordMapping::Lower | WordMapping::Capitalize
                        )
                    };
                    std::mem::discriminant(before) == std::mem::discriminant(now)
                        || (cases(before) && cases(now))
                }
                _ => false,
            };
            if !clash {
                return operation;
            }
        }
    }

    fn is_order(&self) -> bool {
        matches!(self, Sort(_)) || matches!(self, Arrange(it) if it.is_order())
    }

    fn key(&self) -> String {
        match self {
            Keep(condition) => format!("keep:{}", condition.key()),
            Map(mapping) => mapping.key(),
            Sort(WordOrder::Alphabetical) => "alphabetical".to_owned(),
            Sort(WordOrder::ReverseAlphabetical) => "reverse-alphabetical".to_owned(),
            Sort(WordOrder::ShortestFirst) => "shortest-first".to_owned(),
            Sort(WordOrder::LongestFirst) => "longest-first".to_owned(),
            Arrange(arrangement) => arrangement.key(),
        }
    }

    fn line(&self, list: &str, item: &str) -> String {
        match self {
            Keep(condition) => {
                let test = condition.test(item);
                format!("{list} = [{item} for {item} in {list} if {test}]")
            }
            Map(mapping) => {
                let expression = mapping.expression(item);
                format!("{list} = [{expression} for {item} in {list}]")
            }
            Sort(WordOrder::Alphabetical) => format!("{list} = sorted({list})"),
            Sort(WordOrder::ReverseAlphabetical) => {
                format!("{list} = sorted({list}, reverse=True)")
            }
            Sort(WordOrder::ShortestFirst) => format!("{list} = sorted({list}, key=len)"),
            Sort(WordOrder::LongestFirst) => {
                format!("{list} = sorted({list}, key=len, reverse=True)")
            }
            Arrange(arrangement) => format!("{list} = {}", arrangement.expression(list)),
        }
    }

    fn clause(&self, subject: Option<Subject>, random: &mut Random) -> String {
        let whole = match subject {
            Some(subject) => subject.name,
            None => random.pick(&["them", "the result", "them"]),
        };
        match self {
            Keep(condition) => {
                let nouns = match subject {
                    Some(subject) => format!("{} in {}", subject.nouns, subject.name),
                    None => random.pick(&["ones", "results"]).to_owned(),
                };
                let verb = random.pick(&["keep", "take", "select", "keep only"]);
                format!("{verb} the {}", condition.restrict(&nouns, random))
            }
            Map(mapping) => {
                let object = match subject {
                    Some(subject) => {
                        let each = random.pick(&["each", "every"]);
                        format!("{each} {} in {}", subject.noun, subject.name)
                    }
                    None => random
                        .pick(&["each", "each of them", "each one"])
                        .to_owned(),
                };
                mapping.imperative(&object, random)
            }
            Sort(WordOrder::Alphabetical) => match random.below(3) {
                0 => format!("sort {whole}"),
                1 => format!("put {whole} in alphabetical order"),
                _ => format!("sort {whole} alphabetically"),
            },
            Sort(WordOrder::ReverseAlphabetical) => match random.below(2) {
                0 => format!("sort {whole} in reverse alphabetical order"),
                _ => format!("sort {whole} in descending order"),
            },
            Sort(WordOrder::ShortestFirst) => match random.below(3) {
                0 => format!("order {whole} by length"),
                1 => format!("sort {whole} from shortest to longest"),
                _ => format!("sort {whole} by length"),
            },
            Sort(WordOrder::LongestFirst) => match random.below(2) {
                0 => format!("sort {whole} by descending length"),
                _ => format!("sort {whole} from longest to shortest"),
            },
            Arrange(arrangement) => arrangement.imperative(whole, random),
        }
    }
}

impl Reduction {
    fn draw(random: &mut Random) -> Self {
        match random.below(14) {
            0..=3 => Self::Join(random.pick(&["-", ", ", " ", "", "+", "/"])),
            4..=6 => Self::Count,
            7..=8 => Self::TotalLength,
            9 => Self::Lengths,
            10..=11 => Self::Longest,
            12 => Self::Shortest,
            _ => Self::Initials,
        }
    }

    fn key(self) -> String {
        match self {
            Self::List => "list".to_owned(),
            Self::Join(separator) => format!("join({separator})"),
            Self::Count => "count".to_owned(),
            Self::TotalLength => "total-length".to_owned(),
            Self::Lengths => "lengths".to_owned(),
            Self::Longest => "longest".to_owned(),
            Self::Shortest => "shortest".to_owned(),
            Self::Initials => "initials".to_owned(),
        }
    }

    /// The Python expression over `value` for every round of `walk`.
    fn over(self, value: &str, walk: &str) -> String {
        match self {
            Self::List => format!("[{value} {walk}]"),
            Self::Join(separator) => format!("'{separator}'.join({value} {walk})"),
            Self::Count => format!("len([{value} {walk}])"),
            Self::TotalLength => format!("sum(len({value}) {walk})"),
            Self::Lengths => format!("[len({value}) {walk}]"),
            Self::Longest => format!("max(({value} {walk}), key=len, default='')"),
            Self::Shortest => format!("min(({value} {walk}), key=len, default='')"),
            Self::Initials => format!("''.join({}[:1] {walk})", bracketed(value)),
        }
    }

    fn of(self, these: &str, random: &mut Random) -> String {
        match self {
            Self::List => format!("{} of {these}", random.pick(&["the list", "a list"])),
            Self::Join("") => match random.below(2) {
                0 => format!("the concatenation of {these}"),
                _ => format!("{these} joined without a separator"),
            },
            Self::Join(separator) => match random.below(3) {
                0 => format!("{these} separated by '{separator}'"),
                1 => format!("{these} joined by '{separator}'"),
                _ => format!("{these} joined with '{separator}'"),
            },
            Self::Count => format!("{} of {these}", random.pick(&["the number", "the count"])),
            Self::TotalLength => match random.below(2) {
                0 => format!("the sum of the lengths of {these}"),
                _ => format!("the total length of {these}"),
            },
            Self::Lengths => match random.below(2) {
                0 => format!("the list of lengths of {these}"),
                _ => format!("the lengths of {these}"),
            },
            Self::Longest => match random.below(2) {
                0 => format!("the first longest of {these} or ''"),
                _ => format!("the longest of {these} or '' if there is none"),
            },
            Self::Shortest => match random.below(2) {
                0 => format!("the first shortest of {these} or ''"),
                _ => format!("the shortest of {these} or '' if there is none"),
            },
            Self::Initials => match random.below(2) {
                0 => format!("the initials of {these} as one string"),
                _ => format!("the first letters of {these} joined together"),
            },
        }
    }
}
