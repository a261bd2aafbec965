//! Conditions on one word: how they are told and how they are tested.

use super::difficulty::COMPOUND_CONDITION_PERCENT;
use powerinfer_artifact::random::Random;

/// A test of one string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WordCondition {
    Longer(i64),
    Shorter(i64),
    LengthIs(i64),
    EvenLength,
    OddLength,
    StartsWith(char),
    EndsWith(char),
    Contains(char),
    Lacks(char),
    StartsWithVowel,
    EndsWithVowel,
    Both(Box<WordCondition>, Box<WordCondition>),
    Either(Box<WordCondition>, Box<WordCondition>),
}

use WordCondition::{
    Both, Contains, Either, EndsWith, EndsWithVowel, EvenLength, Lacks, LengthIs, Longer,
    OddLength, Shorter, StartsWith, StartsWithVowel,
};

/// Letters that English words really start with, end with and contain.
const LETTERS: [char; 20] = [
    'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'k', 'l', 'm', 'n', 'o', 'p', 'r', 's', 't', 'u',
    'w',
];

impl WordCondition {
    /// A condition as hard as the difficulty table wants it.
    pub(super) fn draw(random: &mut Random) -> Self {
        if !random.chance(COMPOUND_CONDITION_PERCENT) {
            return match random.chance(45) {
                true => Self::length(random),
                false => Self::letter(random),
            };
        }
        let (length, letter) = (Self::length(random), Self::letter(random));
        match random.below(4) {
            0 => Both(Box::new(letter), Box::new(length)),
            1 => Either(Box::new(length), Box::new(letter)),
            _ => Both(Box::new(length), Box::new(letter)),
        }
    }

    fn length(random: &mut Random) -> Self {
        match random.below(8) {
            0..=2 => Longer(random.between(1, 8)),
            3..=4 => Shorter(random.between(3, 8)),
            5 => LengthIs(random.between(2, 7)),
            6 => EvenLength,
            _ => OddLength,
        }
    }

    fn letter(random: &mut Random) -> Self {
        let letter = random.pick(&LETTERS);
        match random.below(10) {
            0..=2 => StartsWith(letter),
            3..=4 => EndsWith(letter),
            5..=6 => Contains(letter),
            7 => Lacks(letter),
            8 => StartsWithVowel,
            _ => EndsWithVowel,
        }
    }

    /// Whether the length of the string matters.
    pub(super) fn measures_length(&self) -> bool {
        match self {
            Longer(_) | Shorter(_) | LengthIs(_) | EvenLength | OddLength => true,
            Both(first, second) | Either(first, second) => {
                first.measures_length() || second.measures_length()
            }
            _ => false,
        }
    }

    /// Part of the key of a combination.
    pub(super) fn key(&self) -> String {
        match self {
            Longer(length) => format!("longer({length})"),
            Shorter(length) => format!("shorter({length})"),
            LengthIs(length) => format!("length({length})"),
            EvenLength => "even-length".to_owned(),
            OddLength => "odd-length".to_owned(),
            StartsWith(letter) => format!("starts({letter})"),
            EndsWith(letter) => format!("ends({letter})"),
            Contains(letter) => format!("contains({letter})"),
            Lacks(letter) => format!("lacks({letter})"),
            StartsWithVowel => "starts-with-vowel".to_owned(),
            EndsWithVowel => "ends-with-vowel".to_owned(),
            Both(first, second) => format!("{}&{}", first.key(), second.key()),
            Either(first, second) => format!("{}/{}", first.key(), second.key()),
        }
    }

    /// The Python test of the variable `variable`; never fails, not even for an empty string.
    pub(super) fn test(&self, variable: &str) -> String {
        match self {
            Longer(length) => format!("len({variable}) > {length}"),
            Shorter(length) => format!("len({variable}) < {length}"),
            LengthIs(length) => format!("len({variable}) == {length}"),
            EvenLength => format!("len({variable}) % 2 == 0"),
            OddLength => format!("len({variable}) % 2 == 1"),
            StartsWith(letter) => format!("{variable}.startswith('{letter}')"),
            EndsWith(letter) => format!("{variable}.endswith('{letter}')"),
            Contains(letter) => format!("'{letter}' in {variable}"),
            Lacks(letter) => format!("'{letter}' not in {variable}"),
            StartsWithVowel => format!("{variable} and {variable}[0] in 'aeiou'"),
            EndsWithVowel => format!("{variable} and {variable}[-1] in 'aeiou'"),
            Both(first, second) => {
                format!("{} and {}", first.test(variable), second.test(variable))
            }
            Either(first, second) => {
                format!("{} or {}", first.test(variable), second.test(variable))
            }
        }
    }

    /// The plural `nouns` restricted to those that pass: "words starting with 'a'".
    pub(super) fn restrict(&self, nouns: &str, random: &mut Random) -> String {
        match random.below(2) {
            0 => format!("{nouns} that {}", self.verb(random)),
            _ => format!("{nouns} {}", self.participle(random)),
        }
    }

    fn verb(&self, random: &mut Random) -> String {
        match self {
            Longer(length) => match random.below(2) {
                0 => format!("are longer than {length}"),
                _ => format!("have more than {length} letters"),
            },
            Shorter(length) => match random.below(2) {
                0 => format!("are shorter than {length}"),
                _ => format!("have fewer than {length} letters"),
            },
            LengthIs(length) => match random.below(2) {
                0 => format!("are {length} long"),
                _ => format!("have exactly {length} letters"),
            },
            EvenLength => "have an even length".to_owned(),
            OddLength => "have an odd length".to_owned(),
            StartsWith(letter) => match random.below(2) {
                0 => format!("begin with '{letter}'"),
                _ => format!("start with '{letter}'"),
            },
            EndsWith(letter) => format!("end with '{letter}'"),
            Contains(letter) => match random.below(2) {
                0 => format!("have '{letter}' in them"),
                _ => format!("contain '{letter}'"),
            },
            Lacks(letter) => match random.below(2) {
                0 => format!("do not contain '{letter}'"),
                _ => format!("lack '{letter}'"),
            },
            StartsWithVowel => "start with one of 'aeiou'".to_owned(),
            EndsWithVowel => "end with one of 'aeiou'".to_owned(),
            Both(first, second) => format!("{} and {}", first.verb(random), second.verb(random)),
            Either(first, second) => format!("{} or {}", first.verb(random), second.verb(random)),
        }
    }

    fn participle(&self, random: &mut Random) -> String {
        match self {
            Longer(length) => match random.below(2) {
                0 => format!("longer than {length}"),
                _ => format!("with more than {length} letters"),
            },
            Shorter(length) => match random.below(2) {
                0 => format!("shorter than {length}"),
                _ => format!("with fewer than {length} letters"),
            },
            LengthIs(length) => format!("of length {length}"),
            EvenLength => "of even length".to_owned(),
            OddLength => "of odd length".to_owned(),
            StartsWith(letter) => match random.below(2) {
                0 => format!("beginning with '{letter}'"),
                _ => format!("starting with '{letter}'"),
            },
            EndsWith(letter) => format!("ending in '{letter}'"),
            Contains(letter) => match random.below(2) {
                0 => format!("with '{letter}' in them"),
                _ => format!("containing '{letter}'"),
            },
            Lacks(letter) => match random.below(2) {
                0 => format!("not containing '{letter}'"),
                _ => format!("without '{letter}'"),
            },
            StartsWithVowel => "starting with one of 'aeiou'".to_owned(),
            EndsWithVowel => "ending in one of 'aeiou'".to_owned(),
            Both(first, second) => {
                format!(
                    "{} and {}",
                    first.participle(random),
                    second.participle(random)
                )
            }
            Either(first, second) => {
                format!(
                    "{} or {}",
                    first.participle(random),
                    second.participle(random)
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_join_in_the_order_they_are_told() {
        let both = Both(Box::new(Longer(3)), Box::new(StartsWith('a')));
        assert_eq!(both.test("w"), "len(w) > 3 and w.startswith('a')");
        assert_eq!(both.key(), "longer(3)&starts(a)");
    }
}
