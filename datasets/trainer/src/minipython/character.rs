//! Classes of characters, and what can be done to one character.

use powerinfer_artifact::random::Random;

/// A class of characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
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
pub(super) enum Change {
    Repeat(i64),
    Follow(char),
    Mask(Class, char),
    RepeatClass(Class, i64),
    Next,
}

const MARKS: [char; 6] = ['*', '-', '_', '#', '.', '+'];

impl Class {
    /// Any of them; the common ones more often.
    pub(super) fn draw(random: &mut Random) -> Self {
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

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
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

    /// The Python test of the character `item`.
    pub(super) fn test(self, item: &str) -> String {
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

    /// The Python test that holds exactly where [`Self::test`] does not.
    pub(super) fn opposite_test(self, item: &str) -> String {
        match self {
            Self::Vowels => format!("{item} not in 'aeiouAEIOU'"),
            Self::Spaces => format!("{item} != ' '"),
            Self::Among(set) => format!("{item} not in '{set}'"),
            _ => format!("not {}", self.test(item)),
        }
    }

    /// What its members are called, in the plural.
    pub(super) fn told(self, random: &mut Random) -> String {
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
    /// Any of them; the common ones more often.
    pub(super) fn draw(random: &mut Random) -> Self {
        match random.below(7) {
            0..=1 => Self::Repeat(random.between(2, 4)),
            2 => Self::Follow(random.pick(&MARKS)),
            3..=4 => Self::Mask(Class::draw(random), random.pick(&MARKS)),
            5 => Self::RepeatClass(Class::draw(random), random.between(2, 3)),
            _ => Self::Next,
        }
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
        match self {
            Self::Repeat(count) => format!("repeat({count})"),
            Self::Follow(mark) => format!("follow({mark})"),
            Self::Mask(class, mark) => format!("mask({},{mark})", class.key()),
            Self::RepeatClass(class, count) => format!("repeat({},{count})", class.key()),
            Self::Next => "next".to_owned(),
        }
    }

    /// The Python expression of the changed character `item`.
    pub(super) fn expression(self, item: &str) -> String {
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

    /// An imperative about the string `object`: "double every character of s".
    pub(super) fn imperative(self, object: &str, random: &mut Random) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_and_its_opposite_are_told_apart() {
        assert_eq!(Class::Spaces.test("c"), "c == ' '");
        assert_eq!(Class::Spaces.opposite_test("c"), "c != ' '");
        assert_eq!(Class::Digits.opposite_test("c"), "not c.isdigit()");
    }
}
