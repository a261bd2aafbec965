//! One string, rewritten character by character or as a whole, then measured or returned.

use crate::minipython::argument::Kind;
use crate::minipython::arrangement::Arrangement;
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::phrase::narrate;
use crate::minipython::subject::Subject;
use crate::random::Random;

/// A class of characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Vowels,
    Digits,
    Letters,
    UpperCase,
    LowerCase,
    Spaces,
    Among(&'static str),
}

/// A change of every character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Repeat(i64),
    Follow(char),
    Mask(Class, char),
    RepeatClass(Class, i64),
    Next,
}

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
const MARKS: [char; 6] = ['*', '-', '_', '#', '.', '+'];

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

impl Class {
    fn draw(random: &mut Random) -> Self {
        random.pick(&[
            Self::Vowels,
            Self::Vowels,
            Self::Vowels,
            Self::Digits,
            Self::Letters,
            Self::UpperCase,
            Self::LowerCase,
            Self::Spaces,
            Self::Among("abc"),
            Self::Among("xyz"),
            Self::Among("lmnr"),
            Self::Among("st"),
            Self::Among("aeo"),
        ])
    }

    fn key(self) -> String {
        match self {
            Self::Vowels => "vowels".to_owned(),
            Self::Digits => "digits".to_owned(),
            Self::Letters => "letters".to_owned(),
            Self::UpperCase => "upper-case".to_owned(),
            Self::LowerCase => "lower-case".to_owned(),
            Self::Spaces => "spaces".to_owned(),
            Self::Among(set) => format!("among({set})"),
        }
    }

    fn test(self, item: &str) -> String {
        match self {
            Self::Vowels => format!("{item} in 'aeiouAEIOU'"),
            Self::Digits => format!("{item}.isdigit()"),
            Self::Letters => format!("{item}.isalpha()"),
            Self::UpperCase => format!("{item}.isupper()"),
            Self::LowerCase => format!("{item}.islower()"),
            Self::Spaces => format!("{item} == ' '"),
            Self::Among(set) => format!("{item} in '{set}'"),
        }
    }

    fn opposite_test(self, item: &str) -> String {
        match self {
            Self::Vowels => format!("{item} not in 'aeiouAEIOU'"),
            Self::Spaces => format!("{item} != ' '"),
            Self::Among(set) => format!("{item} not in '{set}'"),
            _ => format!("not {}", self.test(item)),
        }
    }

    fn told(self, random: &mut Random) -> String {
        match self {
            Self::Vowels => "vowels".to_owned(),
            Self::Digits => "digits".to_owned(),
            Self::Letters => "letters".to_owned(),
            Self::UpperCase => random
                .pick(&["upper-case letters", "capital letters"])
                .to_owned(),
            Self::LowerCase => random
                .pick(&["lower-case letters", "small letters"])
                .to_owned(),
            Self::Spaces => "spaces".to_owned(),
            Self::Among(set) => match random.below(2) {
                0 => format!("characters in '{set}'"),
                _ => format!("characters among '{set}'"),
            },
        }
    }
}

impl Change {
    fn draw(random: &mut Random) -> Self {
        match random.below(7) {
            0..=1 => Self::Repeat(random.between(2, 4)),
            2 => Self::Follow(random.pick(&MARKS)),
            3..=4 => Self::Mask(Class::draw(random), random.pick(&MARKS)),
            5 => Self::RepeatClass(Class::draw(random), random.between(2, 3)),
            _ => Self::Next,
        }
    }

    fn key(self) -> String {
        match self {
            Self::Repeat(count) => format!("repeat({count})"),
            Self::Follow(mark) => format!("follow({mark})"),
            Self::Mask(class, mark) => format!("mask({},{mark})", class.key()),
            Self::RepeatClass(class, count) => format!("repeat({},{count})", class.key()),
            Self::Next => "next".to_owned(),
        }
    }

    fn expression(self, item: &str) -> String {
        match self {
            Self::Repeat(count) => format!("{item} * {count}"),
            Self::Follow(mark) => format!("{item} + '{mark}'"),
            Self::Mask(class, mark) => format!("'{mark}' if {} else {item}", class.test(item)),
            Self::RepeatClass(class, count) => {
                format!("{item} * {count} if {} else {item}", class.test(item))
            }
            Self::Next => format!("chr(ord({item}) + 1)"),
        }
    }

    fn imperative(self, object: &str, random: &mut Random) -> String {
        match self {
            Self::Repeat(2) => match random.below(2) {
                0 => format!("double every character of {object}"),
                _ => format!("write each character of {object} twice"),
            },
            Self::Repeat(count) => match random.below(2) {
                0 => format!("repeat each character of {object} {count} times"),
                _ => format!("write every character of {object} {count} times"),
            },
            Self::Follow(mark) => match random.below(2) {
                0 => format!("put '{mark}' after every character of {object}"),
                _ => format!("add '{mark}' after each character of {object}"),
            },
            Self::Mask(class, mark) => {
                let class = class.told(random);
                match random.below(2) {
                    0 => format!("mask the {class} of {object} by '{mark}'"),
                    _ => format!("replace the {class} in {object} with '{mark}'"),
                }
            }
            Self::RepeatClass(class, count) => {
                let class = class.told(random);
                match count {
                    2 => format!("double the {class} in {object}"),
                    _ => format!("triple the {class} in {object}"),
                }
            }
            Self::Next => match random.below(2) {
                0 => format!("shift every character of {object} to the next code"),
                _ => format!("raise each character code of {object} by 1"),
            },
        }
    }
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
