//! Counts in a dictionary: numbers, words or characters, by themselves or by what they share.

use crate::minipython::condition::Condition;
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::phrase::indented;
use crate::minipython::subject::Subject;
use crate::minipython::word_condition::WordCondition;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// What is counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grouping {
    /// Equal ones.
    Itself,
    /// The same remainder.
    Modulo(i64),
    /// The same quotient.
    Quotient(i64),
    /// Words of one length.
    Length,
    /// Words with one first letter.
    FirstLetter,
    /// Words with one last letter.
    LastLetter,
    /// Characters that differ in case only.
    Lower,
}

/// What is returned of the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Counts,
    /// Keys counted more than so often, sorted.
    MoreThan(i64),
    /// Keys counted exactly so often, sorted.
    Exactly(i64),
    /// How many keys were counted at least so often.
    HowMany(i64),
    Highest,
    /// The smallest of the most frequent keys, or None.
    MostFrequent,
}

/// Draws a task: the counts, then a filter, a grouping and a question about them.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let (kind, subject) = match random.below(3) {
        0 => (Kind::Ints, Subject::numbers(random)),
        1 => (Kind::Strs, Subject::words(random)),
        _ => (Kind::Str, Subject::string(random)),
    };
    let asks = steps != 2 || random.chance(50);
    let filters = steps >= 3 || (steps == 2 && !asks);
    let groups = steps == 4 || (steps != 1 && random.chance(35));
    let grouping = match groups {
        true => Grouping::draw(kind, random),
        false => Grouping::Itself,
    };
    let answer = match (asks, steps) {
        (false, _) => Answer::Counts,
        (true, 1) => random.pick(&[Answer::Counts, Answer::Highest, Answer::MostFrequent]),
        (true, _) => Answer::draw(random),
    };
    let Subject {
        name,
        item,
        noun,
        nouns,
    } = subject;
    let of = format!("{nouns} in {name}");
    let (filter_key, these, test) = match (filters, kind) {
        (false, _) => (None, of, None),
        (true, Kind::Ints) => {
            let condition = match steps {
                4 => Condition::draw(random),
                _ => Condition::simple(random),
            };
            let these = condition.restrict(&of, random);
            (Some(condition.key()), these, Some(condition.test(item)))
        }
        (true, Kind::Strs) => {
            let condition = WordCondition::draw(random);
            let these = condition.restrict(&of, random);
            (Some(condition.key()), these, Some(condition.test(item)))
        }
        (true, _) => {
            let excluded = random.pick(&["aeiou", "aeiouAEIOU", " ", "xyz", "aeiou ", "abc"]);
            let told = match excluded {
                " " => format!("{of} other than spaces"),
                "aeiou" => format!("{of} not in 'aeiou'"),
                _ => format!("{of} not in '{excluded}'"),
            };
            let test = format!("{item} not in '{excluded}'");
            (Some(format!("not-in({excluded})")), told, Some(test))
        }
    };

    let mut keys = vec![match kind {
        Kind::Ints => "numbers".to_owned(),
        Kind::Strs => "words".to_owned(),
        _ => "characters".to_owned(),
    }];
    keys.extend(filter_key);
    keys.push(grouping.key());
    keys.push(answer.key());
    Draft {
        combination: keys.join("|"),
        parameters: vec![Parameter { name, kind }],
        docstring: docstring(grouping, answer, &these, noun, random),
        body: body(name, item, test, grouping, answer),
    }
}

fn docstring(
    grouping: Grouping,
    answer: Answer,
    these: &str,
    noun: &str,
    random: &mut Random,
) -> String {
    let (count, key, keys) = match grouping.told(random) {
        None => (
            match random.below(3) {
                0 => format!("Count how often each of the {these} occurs"),
                1 => format!("Tally the {these}"),
                _ => format!("Count the occurrences of each of the {these}"),
            },
            noun.to_owned(),
            match noun {
                "entry" => "entries".to_owned(),
                _ => format!("{noun}s"),
            },
        ),
        Some(group) => (
            match random.below(3) {
                0 => format!("Count the {these} by {group}"),
                1 => format!("Group the {these} by {group} and count each group"),
                _ => format!("For every {group}, count the {these}"),
            },
            group,
            "keys".to_owned(),
        ),
    };
    let answer = match answer {
        Answer::Counts => match random.below(3) {
            0 => "Return the dictionary".to_owned(),
            1 => "Return the counts as a dict".to_owned(),
            _ => format!("Return a dict from {key} to count"),
        },
        Answer::MoreThan(bound) => match random.below(2) {
            0 => format!("Return the sorted list of {keys} counted more than {bound} times"),
            _ => format!("Return the {keys} with a count above {bound}, sorted"),
        },
        Answer::Exactly(bound) => match random.below(2) {
            0 => format!("Return the sorted list of {keys} counted exactly {bound} times"),
            _ => format!("Return the {keys} whose count is {bound}, sorted"),
        },
        Answer::HowMany(bound) => match random.below(2) {
            0 => format!("Return how many {keys} are counted at least {bound} times"),
            _ => format!("Return the number of {keys} with a count of at least {bound}"),
        },
        Answer::Highest => match random.below(2) {
            0 => "Return the highest count or 0 if there is none".to_owned(),
            _ => "Return the largest of the counts or 0".to_owned(),
        },
        Answer::MostFrequent => match random.below(2) {
            0 => format!("Return the smallest of the most frequent {keys} or None"),
            _ => format!("Return the most common of the {keys}, the smallest if tied, or None"),
        },
    };
    format!("{count}. {answer}.")
}

fn body(
    name: &str,
    item: &str,
    test: Option<String>,
    grouping: Grouping,
    answer: Answer,
) -> Vec<String> {
    let mut inner = Vec::new();
    let key = match grouping.expression(item) {
        None => item.to_owned(),
        Some(expression) => {
            inner.push(format!("key = {expression}"));
            "key".to_owned()
        }
    };
    inner.push(format!("counts[{key}] = counts.get({key}, 0) + 1"));
    if let Some(test) = test {
        inner = std::iter::once(format!("if {test}:"))
            .chain(indented(inner))
            .collect();
    }
    let mut body = vec!["counts = {}".to_owned(), format!("for {item} in {name}:")];
    body.extend(indented(inner));
    body.push(match answer {
        Answer::Counts => "return counts".to_owned(),
        Answer::MoreThan(bound) => {
            format!("return sorted(k for k in counts if counts[k] > {bound})")
        }
        Answer::Exactly(bound) => {
            format!("return sorted(k for k in counts if counts[k] == {bound})")
        }
        Answer::HowMany(bound) => {
            format!("return len([k for k in counts if counts[k] >= {bound}])")
        }
        Answer::Highest => "return max(counts.values(), default=0)".to_owned(),
        Answer::MostFrequent => {
            "return max(sorted(counts), key=lambda k: counts[k], default=None)".to_owned()
        }
    });
    body
}

impl Grouping {
    fn draw(kind: Kind, random: &mut Random) -> Self {
        match kind {
            Kind::Ints => match random.below(2) {
                0 => Self::Modulo(random.between(2, 12)),
                _ => Self::Quotient(random.between(5, 20)),
            },
            Kind::Strs => random.pick(&[Self::Length, Self::FirstLetter, Self::LastLetter]),
            _ => Self::Lower,
        }
    }

    fn key(self) -> String {
        match self {
            Self::Itself => "itself".to_owned(),
            Self::Modulo(modulus) => format!("modulo({modulus})"),
            Self::Quotient(divisor) => format!("quotient({divisor})"),
            Self::Length => "length".to_owned(),
            Self::FirstLetter => "first-letter".to_owned(),
            Self::LastLetter => "last-letter".to_owned(),
            Self::Lower => "lower".to_owned(),
        }
    }

    fn told(self, random: &mut Random) -> Option<String> {
        Some(match self {
            Self::Itself => return None,
            Self::Modulo(modulus) => match random.below(2) {
                0 => format!("value modulo {modulus}"),
                _ => format!("remainder modulo {modulus}"),
            },
            Self::Quotient(divisor) => match random.below(2) {
                0 => format!("quotient by {divisor} rounded down"),
                _ => format!("value floor-divided by {divisor}"),
            },
            Self::Length => "length".to_owned(),
            Self::FirstLetter => random.pick(&["first letter", "initial"]).to_owned(),
            Self::LastLetter => random.pick(&["last letter", "final letter"]).to_owned(),
            Self::Lower => random
                .pick(&["lower-case form", "letter ignoring case"])
                .to_owned(),
        })
    }

    fn expression(self, item: &str) -> Option<String> {
        Some(match self {
            Self::Itself => return None,
            Self::Modulo(modulus) => format!("{item} % {modulus}"),
            Self::Quotient(divisor) => format!("{item} // {divisor}"),
            Self::Length => format!("len({item})"),
            Self::FirstLetter => format!("{item}[:1]"),
            Self::LastLetter => format!("{item}[-1:]"),
            Self::Lower => format!("{item}.lower()"),
        })
    }
}

impl Answer {
    fn draw(random: &mut Random) -> Self {
        let bound = random.between(1, 4);
        match random.below(8) {
            0..=1 => Self::MoreThan(bound),
            2..=3 => Self::Exactly(bound),
            4..=5 => Self::HowMany(bound),
            6 => Self::Highest,
            _ => Self::MostFrequent,
        }
    }

    fn key(self) -> String {
        match self {
            Self::Counts => "counts".to_owned(),
            Self::MoreThan(bound) => format!("more-than({bound})"),
            Self::Exactly(bound) => format!("exactly({bound})"),
            Self::HowMany(bound) => format!("how-many({bound})"),
            Self::Highest => "highest".to_owned(),
            Self::MostFrequent => "most-frequent".to_owned(),
        }
    }
}
