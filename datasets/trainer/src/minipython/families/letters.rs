//! One string, rewritten character by character or as a whole, then measured or returned.

use crate::minipython::arrangement::Arrangement;
use crate::minipython::character::{Change, Class};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::phrase::narrate;
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// A step from one string to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Keep(Class),
    Drop(Class),
    Each(Change),
    Upper,
    Lower,
    SwapCase,
    Arrange(Arrangement),
    Replace(char, char),
    Prefix(&'static str),
    Suffix(&'static str),
    ReverseWords,
    CapitalizeWords,
}

/// What is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reduction {
    Text,
    Length,
    CountOf(char),
    CountClass(Class),
    Palindrome,
    Characters,
    DistinctCount,
    Position(char),
}

use Operation::{
    Arrange, CapitalizeWords, Drop, Each, Keep, Lower, Prefix, Replace, ReverseWords, Suffix,
    SwapCase, Upper,
};

const LETTERS: [char; 16] = [
    'a', 'b', 'c', 'd', 'e', 'h', 'i', 'l', 'm', 'n', 'o', 'p', 'r', 's', 't', 'u',
];

/// Draws a task; the reduction counts as a step unless it is the string itself.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let reduction = match random.chance(50) {
        true => Reduction::Text,
        false => Reduction::draw(random),
    };
    let count = steps - usize::from(reduction != Reduction::Text);
    let mut operations: Vec<Operation> = Vec::with_capacity(count);
    while operations.len() < count {
        let operation = Operation::draw(random);
        let clash = operations.iter().any(|before| {
            std::mem::discriminant(before) == std::mem::discriminant(&operation)
                || (before.sets_case() && operation.sets_case())
        });
        if !clash {
            operations.push(operation);
        }
    }
    let subject = Subject::string(random);
    let mut keys: Vec<String> = operations.iter().map(|it| it.key()).collect();
    keys.push(reduction.key());
    Draft {
        combination: keys.join("|"),
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Str,
        }],
        docstring: docstring(&operations, reduction, subject.name, random),
        body: body(&operations, reduction, subject),
    }
}

fn docstring(
    operations: &[Operation],
    reduction: Reduction,
    name: &str,
    random: &mut Random,
) -> String {
    let clauses: Vec<String> = operations
        .iter()
        .enumerate()
        .map(|(index, operation)| {
            let object = match index {
                0 => name,
                _ => random.pick(&["it", "the result", "it"]),
            };
            operation.imperative(object, random)
        })
        .collect();
    if clauses.is_empty() {
        return format!("Return {}.", reduction.of(name, random));
    }
    let outcome = match reduction {
        Reduction::Text => random
            .pick(&["the result", "the new string", "the string"])
            .to_owned(),
        _ => {
            let this = random.pick(&["the result", "it", "what is left"]);
            reduction.of(this, random)
        }
    };
    let told_of = match reduction {
        Reduction::Text => Some(name.to_owned()),
        // "Or -1 after" would be read as an alternative.
        Reduction::Position(_) => None,
        _ => Some(reduction.of(name, random)),
    };
    narrate(&clauses, &outcome, told_of.as_deref(), random)
}

/// A loop where characters are dropped and changed, else one line for each step.
fn body(operations: &[Operation], reduction: Reduction, subject: Subject) -> Vec<String> {
    let Subject { name, item, .. } = subject;
    if let ([first @ (Keep(_) | Drop(_)), Each(change)], Reduction::Text) = (operations, reduction)
    {
        let test = match first {
            Keep(class) => class.test(item),
            Drop(class) => class.opposite_test(item),
            _ => unreachable!("the pattern admits no other step"),
        };
        return vec![
            "result = ''".to_owned(),
            format!("for {item} in {name}:"),
            format!("    if {test}:"),
            format!("        result += {}", change.expression(item)),
            "return result".to_owned(),
        ];
    }
    let mut body: Vec<String> = operations
        .iter()
        .map(|operation| format!("{name} = {}", operation.expression(name, item)))
        .collect();
    match (reduction, operations.last()) {
        (Reduction::Text, Some(last)) => {
            body.pop();
            body.push(format!("return {}", last.expression(name, item)));
        }
        _ => body.push(format!("return {}", reduction.expression(name, item))),
    }
    body
}

impl Operation {
    fn draw(random: &mut Random) -> Self {
        match random.below(26) {
            0..=2 => Keep(Class::draw(random)),
            3..=5 => Drop(Class::draw(random)),
            6..=10 => Each(Change::draw(random)),
            11 => Upper,
            12 => Lower,
            13 => SwapCase,
            14..=19 => Arrange(Arrangement::draw(random)),
            20..=21 => {
                let old = random.pick(&LETTERS);
                match random.pick(&LETTERS) {
                    new if new == old => Replace(old, '*'),
                    new => Replace(old, new),
                }
            }
            22 => Prefix(random.pick(&["<", "ab", "-", "x", "> "])),
            23 => Suffix(random.pick(&[">", "yz", "-", "!", "..."])),
            24 => ReverseWords,
            _ => CapitalizeWords,
        }
    }

    fn sets_case(self) -> bool {
        matches!(self, Upper | Lower | SwapCase | CapitalizeWords)
    }

    fn key(self) -> String {
        match self {
            Keep(class) => format!("keep:{}", class.key()),
            Drop(class) => format!("drop:{}", class.key()),
            Each(change) => change.key(),
            Upper => "upper".to_owned(),
            Lower => "lower".to_owned(),
            SwapCase => "swap-case".to_owned(),
            Arrange(arrangement) => arrangement.key(),
            Replace(old, new) => format!("replace({old},{new})"),
            Prefix(text) => format!("prefix({text})"),
            Suffix(text) => format!("suffix({text})"),
            ReverseWords => "reverse-words".to_owned(),
            CapitalizeWords => "capitalize-words".to_owned(),
        }
    }

    fn expression(self, text: &str, item: &str) -> String {
        match self {
            Keep(class) => format!(
                "''.join({item} for {item} in {text} if {})",
                class.test(item)
            ),
            Drop(class) => {
                let test = class.opposite_test(item);
                format!("''.join({item} for {item} in {text} if {test})")
            }
            Each(change) => {
                let value = change.expression(item);
                format!("''.join({value} for {item} in {text})")
            }
            Upper => format!("{text}.upper()"),
            Lower => format!("{text}.lower()"),
            SwapCase => format!("{text}.swapcase()"),
            Arrange(Arrangement::Ascending) => format!("''.join(sorted({text}))"),
            Arrange(Arrangement::Descending) => {
                format!("''.join(sorted({text}, reverse=True))")
            }
            Arrange(Arrangement::Distinct) => format!("''.join(dict.fromkeys({text}))"),
            Arrange(arrangement) => arrangement.expression(text),
            Replace(old, new) => format!("{text}.replace('{old}', '{new}')"),
            Prefix(prefix) => format!("'{prefix}' + {text}"),
            Suffix(suffix) => format!("{text} + '{suffix}'"),
            ReverseWords => format!("' '.join({text}.split()[::-1])"),
            CapitalizeWords => format!("' '.join(w.capitalize() for w in {text}.split())"),
        }
    }

    fn imperative(self, object: &str, random: &mut Random) -> String {
        match self {
            Keep(class) => {
                let verb = random.pick(&["keep only", "keep just", "take only"]);
                format!("{verb} the {} of {object}", class.told(random))
            }
            Drop(class) => {
                let verb = random.pick(&["remove", "drop", "delete", "leave out"]);
                format!("{verb} the {} in {object}", class.told(random))
            }
            Each(change) => change.imperative(object, random),
            Upper => match random.below(2) {
                0 => format!("turn {object} into upper case"),
                _ => format!("uppercase {object}"),
            },
            Lower => match random.below(2) {
                0 => format!("turn {object} into lower case"),
                _ => format!("lowercase {object}"),
            },
            SwapCase => match random.below(2) {
                0 => format!("flip the case of {object}"),
                _ => format!("swap upper and lower case in {object}"),
            },
            Arrange(Arrangement::Ascending) => format!("sort the characters of {object}"),
            Arrange(Arrangement::Descending) => {
                format!("sort the characters of {object} in descending order")
            }
            Arrange(Arrangement::Distinct) => match random.below(2) {
                0 => format!("drop repeated characters from {object}"),
                _ => format!("keep the first of each character in {object}"),
            },
            Arrange(Arrangement::Reverse) => match random.below(2) {
                0 => format!("turn {object} back to front"),
                _ => format!("reverse {object}"),
            },
            Arrange(arrangement) => {
                arrangement.imperative(&format!("the characters of {object}"), random)
            }
            Replace(old, new) => match random.below(2) {
                0 => format!("change '{old}' to '{new}' in {object}"),
                _ => format!("replace every '{old}' in {object} by '{new}'"),
            },
            Prefix(prefix) => match random.below(2) {
                0 => format!("put '{prefix}' in front of {object}"),
                _ => format!("prepend '{prefix}' to {object}"),
            },
            Suffix(suffix) => match random.below(2) {
                0 => format!("add '{suffix}' to the end of {object}"),
                _ => format!("append '{suffix}' to {object}"),
            },
            ReverseWords => match random.below(2) {
                0 => format!("put the words of {object} in reverse order"),
                _ => format!("reverse the order of the words in {object}"),
            },
            CapitalizeWords => format!("capitalize each word of {object}"),
        }
    }
}

impl Reduction {
    fn draw(random: &mut Random) -> Self {
        let letter = random.pick(&LETTERS);
        match random.below(10) {
            0..=1 => Self::Length,
            2..=3 => Self::CountOf(letter),
            4..=5 => Self::CountClass(Class::draw(random)),
            6 => Self::Palindrome,
            7 => Self::Characters,
            8 => Self::DistinctCount,
            _ => Self::Position(letter),
        }
    }

    fn key(self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Length => "length".to_owned(),
            Self::CountOf(letter) => format!("count({letter})"),
            Self::CountClass(class) => format!("count({})", class.key()),
            Self::Palindrome => "palindrome".to_owned(),
            Self::Characters => "characters".to_owned(),
            Self::DistinctCount => "distinct-count".to_owned(),
            Self::Position(letter) => format!("position({letter})"),
        }
    }

    fn expression(self, text: &str, item: &str) -> String {
        match self {
            Self::Text => text.to_owned(),
            Self::Length => format!("len({text})"),
            Self::CountOf(letter) => format!("{text}.count('{letter}')"),
            Self::CountClass(class) => {
                format!("len([{item} for {item} in {text} if {}])", class.test(item))
            }
            Self::Palindrome => format!("{text} == {text}[::-1]"),
            Self::Characters => format!("list({text})"),
            Self::DistinctCount => format!("len(set({text}))"),
            Self::Position(letter) => format!("{text}.find('{letter}')"),
        }
    }

    fn of(self, this: &str, random: &mut Random) -> String {
        match self {
            Self::Text => this.to_owned(),
            Self::Length => match random.below(2) {
                0 => format!("the number of characters in {this}"),
                _ => format!("the length of {this}"),
            },
            Self::CountOf(letter) => match random.below(2) {
                0 => format!("how often '{letter}' occurs in {this}"),
                _ => format!("the number of '{letter}' in {this}"),
            },
            Self::CountClass(class) => {
                let class = class.told(random);
                match random.below(2) {
                    0 => format!("how many {class} are in {this}"),
                    _ => format!("the number of {class} in {this}"),
                }
            }
            Self::Palindrome => match random.below(2) {
                0 => format!("whether {this} is a palindrome"),
                _ => format!("whether {this} reads the same backwards"),
            },
            Self::Characters => format!("the list of characters of {this}"),
            Self::DistinctCount => format!("the number of different characters in {this}"),
            Self::Position(letter) => match random.below(2) {
                0 => format!("the index of the first '{letter}' in {this} or -1"),
                _ => format!("where '{letter}' first occurs in {this}, or -1"),
            },
        }
    }
}
