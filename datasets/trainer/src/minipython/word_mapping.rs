//! What can be done to one word: how it is told and how it is computed.

use powerinfer_artifact::random::Random;

/// A change of every word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WordMapping {
    Upper,
    Lower,
    Capitalize,
    Reverse,
    First(i64),
    Last(i64),
    DropFirst(i64),
    DropLast(i64),
    Append(&'static str),
    Prepend(&'static str),
    Repeat(i64),
    Replace(char, char),
}

const LETTERS: [char; 12] = ['a', 'e', 'i', 'o', 'u', 'l', 'n', 'r', 's', 't', 'b', 'c'];

impl WordMapping {
    /// Any mapping.
    pub(super) fn draw(random: &mut Random) -> Self {
        let count = random.between(1, 4);
        let mark = random.pick(&["!", "s", "-", "?", "x", "ing", "_", "."]);
        match random.below(16) {
            0..=1 => Self::Upper,
            2 => Self::Lower,
            3..=4 => Self::Capitalize,
            5..=6 => Self::Reverse,
            7..=8 => Self::First(count),
            9 => Self::Last(count),
            10 => Self::DropFirst(count),
            11 => Self::DropLast(count),
            12 => Self::Append(mark),
            13 => Self::Prepend(mark),
            14 => Self::Repeat(random.between(2, 3)),
            _ => {
                let old = random.pick(&LETTERS);
                loop {
                    let new = random.pick(&LETTERS);
                    if new != old {
                        return Self::Replace(old, new);
                    }
                }
            }
        }
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
        match self {
            Self::Upper => "upper".to_owned(),
            Self::Lower => "lower".to_owned(),
            Self::Capitalize => "capitalize".to_owned(),
            Self::Reverse => "reverse-each".to_owned(),
            Self::First(count) => format!("first-letters({count})"),
            Self::Last(count) => format!("last-letters({count})"),
            Self::DropFirst(count) => format!("drop-first-letters({count})"),
            Self::DropLast(count) => format!("drop-last-letters({count})"),
            Self::Append(mark) => format!("append({mark})"),
            Self::Prepend(mark) => format!("prepend({mark})"),
            Self::Repeat(count) => format!("repeat({count})"),
            Self::Replace(old, new) => format!("replace({old},{new})"),
        }
    }

    /// The Python expression of the changed `value`.
    pub(super) fn expression(self, value: &str) -> String {
        match self {
            Self::Upper => format!("{value}.upper()"),
            Self::Lower => format!("{value}.lower()"),
            Self::Capitalize => format!("{value}.capitalize()"),
            Self::Reverse => format!("{value}[::-1]"),
            Self::First(count) => format!("{value}[:{count}]"),
            Self::Last(count) => format!("{value}[-{count}:]"),
            Self::DropFirst(count) => format!("{value}[{count}:]"),
            Self::DropLast(count) => format!("{value}[:-{count}]"),
            Self::Append(mark) => format!("{value} + '{mark}'"),
            Self::Prepend(mark) => format!("'{mark}' + {value}"),
            Self::Repeat(count) => format!("{value} * {count}"),
            Self::Replace(old, new) => format!("{value}.replace('{old}', '{new}')"),
        }
    }

    /// An imperative about `object`: "capitalize each word".
    pub(super) fn imperative(self, object: &str, random: &mut Random) -> String {
        let letters = |count: i64| match count {
            1 => "letter".to_owned(),
            _ => format!("{count} letters"),
        };
        match self {
            Self::Upper => match random.below(2) {
                0 => format!("turn {object} into upper case"),
                _ => format!("uppercase {object}"),
            },
            Self::Lower => match random.below(2) {
                0 => format!("turn {object} into lower case"),
                _ => format!("lowercase {object}"),
            },
            Self::Capitalize => format!("capitalize {object}"),
            Self::Reverse => match random.below(2) {
                0 => format!("spell {object} backwards"),
                _ => format!("reverse {object}"),
            },
            Self::First(count) => match random.below(2) {
                0 => format!("cut {object} to the first {}", letters(count)),
                _ => format!("take the first {} of {object}", letters(count)),
            },
            Self::Last(count) => match random.below(2) {
                0 => format!("cut {object} to the last {}", letters(count)),
                _ => format!("take the last {} of {object}", letters(count)),
            },
            Self::DropFirst(count) => match random.below(2) {
                0 => format!("remove the first {} of {object}", letters(count)),
                _ => format!("drop the first {} of {object}", letters(count)),
            },
            Self::DropLast(count) => match random.below(2) {
                0 => format!("remove the last {} of {object}", letters(count)),
                _ => format!("drop the last {} of {object}", letters(count)),
            },
            Self::Append(mark) => match random.below(2) {
                0 => format!("append '{mark}' to {object}"),
                _ => format!("add '{mark}' to the end of {object}"),
            },
            Self::Prepend(mark) => match random.below(2) {
                0 => format!("prepend '{mark}' to {object}"),
                _ => format!("put '{mark}' in front of {object}"),
            },
            Self::Repeat(2) => match random.below(2) {
                0 => format!("repeat {object} twice"),
                _ => format!("write {object} twice"),
            },
            Self::Repeat(count) => format!("repeat {object} {count} times"),
            Self::Replace(old, new) => match random.below(2) {
                0 => format!("change '{old}' to '{new}' in {object}"),
                _ => format!("replace '{old}' by '{new}' in {object}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_changes_the_letter() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            if let WordMapping::Replace(old, new) = WordMapping::draw(&mut random) {
                assert_ne!(old, new);
            }
        }
    }
}
