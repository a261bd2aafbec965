//! Arguments of functions: Python literals, drawn where the task's constants matter.

use std::fmt;

use powerinfer_artifact::random::Random;
use serde::Deserialize;

/// One argument of a test call; displays as a Python literal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    /// An integer.
    Int(i64),
    /// A string of printable ASCII.
    Str(String),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A list of strings.
    Strs(Vec<String>),
}

impl fmt::Display for Argument {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(formatter, "{value}"),
            Self::Str(value) => write_string(formatter, value),
            Self::Ints(values) => write_list(formatter, values, |formatter, value| {
                write!(formatter, "{value}")
            }),
            Self::Strs(values) => write_list(formatter, values, |formatter, value| {
                write_string(formatter, value)
            }),
        }
    }
}

fn write_list<T>(
    formatter: &mut fmt::Formatter<'_>,
    values: &[T],
    write_value: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    formatter.write_str("[")?;
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            formatter.write_str(", ")?;
        }
        write_value(formatter, value)?;
    }
    formatter.write_str("]")
}

fn write_string(formatter: &mut fmt::Formatter<'_>, value: &str) -> fmt::Result {
    formatter.write_str("'")?;
    for character in value.chars() {
        if matches!(character, '\'' | '\\') {
            formatter.write_str("\\")?;
        }
        write!(formatter, "{character}")?;
    }
    formatter.write_str("'")
}

/// What a parameter accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An integer within bounds.
    Int {
        /// The smallest.
        low: i64,
        /// The largest.
        high: i64,
    },
    /// A string.
    Str,
    /// A list of integers.
    Ints,
    /// A list of strings.
    Strs,
}

/// The constants of a program, round which its behaviour changes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Landmarks {
    numbers: Vec<i64>,
    texts: Vec<String>,
}

impl Landmarks {
    /// Collects the integers and the quoted strings of `source`.
    pub(crate) fn new(source: &str) -> Self {
        let mut landmarks = Self::default();
        let mut pieces = source.split('\'');
        while let Some(code) = pieces.next() {
            for token in code.split(|character: char| !character.is_ascii_alphanumeric()) {
                // 0 and 1 start totals and steps; they are no thresholds.
                if let Some(number) = token.parse().ok().filter(|&number| number >= 2) {
                    landmarks.numbers.push(number);
                }
            }
            if let Some(text) = pieces.next().filter(|text| !text.is_empty()) {
                landmarks.texts.push(text.to_owned());
            }
        }
        landmarks
    }

    /// An argument of `kind`; the first cases of a series are the smallest ones there are.
    pub(crate) fn argument(&self, kind: Kind, case: usize, random: &mut Random) -> Argument {
        match kind {
            Kind::Int { low, high } => Argument::Int(self.bounded(low, high, case, random)),
            Kind::Str => Argument::Str(self.sentence(case, random)),
            Kind::Ints => {
                let count = list_length(case, random);
                Argument::Ints(self.numbers_of_one_sort(count, random))
            }
            Kind::Strs => {
                let count = list_length(case, random);
                let mut words: Vec<String> = Vec::with_capacity(count);
                for _ in 0..count {
                    let word = match words.len() {
                        earlier @ 1.. if random.chance(20) => words[random.below(earlier)].clone(),
                        _ => self.word(random),
                    };
                    words.push(word);
                }
                Argument::Strs(words)
            }
        }
    }

    fn bounded(&self, low: i64, high: i64, case: usize, random: &mut Random) -> i64 {
        if case == 0 {
            return 0.clamp(low, high);
        }
        let near = self.number(random);
        // In a wide range there is more to see than what lies round the constants.
        let wide = high > 1000 && random.chance(70);
        if !wide && (low..=high).contains(&near) {
            near
        } else {
            random.between(low, high)
        }
    }

    /// Mixed numbers mostly; now and then all of them in a narrow band, which repeats itself, or
    /// all multiples of one constant: what counting, comparing and `all` need.
    fn numbers_of_one_sort(&self, count: usize, random: &mut Random) -> Vec<i64> {
        let landmark = if self.numbers.is_empty() {
            3
        } else {
            random.pick(&self.numbers)
        };
        let sort = random.below(8);
        let offset = random.between(-3, 30);
        (0..count)
            .map(|_| match sort {
                0 => offset + random.between(0, 4),
                1 => landmark + random.between(-3, 3),
                2 if landmark <= 12 => landmark * random.between(-3, 12),
                _ => self.number(random),
            })
            .collect()
    }

    fn number(&self, random: &mut Random) -> i64 {
        if self.numbers.is_empty() || random.chance(25) {
            return if random.chance(50) {
                random.between(-12, 20)
            } else {
                random.between(-60, 130)
            };
        }
        let landmark = random.pick(&self.numbers);
        let other = random.pick(&self.numbers);
        match random.below(10) {
            0..=3 => landmark + random.between(-1, 1),
            4 if landmark <= 20 => landmark * random.between(-3, 9),
            5 => landmark / 2 + random.between(-1, 1),
            6 => landmark + other + random.between(-1, 1),
            7 => landmark - other + random.between(-1, 1),
            8 => landmark / other + random.between(-1, 1),
            _ => -landmark + random.between(-1, 1),
        }
    }

    fn word(&self, random: &mut Random) -> String {
        if random.chance(4) {
            return String::new();
        }
        let longest = self.numbers.iter().copied().filter(|&number| number < 15);
        let longest = longest.max().unwrap_or(0).max(5) + 2;
        let length = random.between(1, longest);
        let mut word = String::new();
        for index in 0..length {
            word.push(self.letter(index == 0, random));
        }
        match random.below(12) {
            0 => word.to_uppercase(),
            1 => word.chars().rev().chain(word.chars()).collect(),
            _ => word,
        }
    }

    fn letter(&self, first: bool, random: &mut Random) -> char {
        let landmark = if self.texts.is_empty() || random.chance(65) {
            ""
        } else {
            &self.texts[random.below(self.texts.len())]
        };
        let characters: Vec<char> = landmark.chars().filter(char::is_ascii_graphic).collect();
        if !characters.is_empty() {
            return random.pick(&characters);
        }
        let alphabet: &[u8] = match random.below(20) {
            0 => b"0123456789",
            1..=2 => b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            3 if first => b"AEIOU",
            4..=7 => b"aeiou",
            _ => b"abcdefghijklmnopqrstuvwxyz",
        };
        char::from(random.pick(alphabet))
    }

    fn sentence(&self, case: usize, random: &mut Random) -> String {
        let words = match case {
            0 => return String::new(),
            1 => 1,
            _ => random.between(1, 4),
        };
        let mut sentence = String::new();
        for index in 0..words {
            if index > 0 {
                sentence.push(' ');
            }
            sentence.push_str(&self.word(random));
        }
        sentence
    }
}

fn list_length(case: usize, random: &mut Random) -> usize {
    match case {
        0 => 0,
        1 => 1,
        2 => 2,
        _ => 3 + random.below(12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_display_as_python_literals() {
        let display = |argument: Argument| argument.to_string();
        assert_eq!(display(Argument::Int(-3)), "-3");
        assert_eq!(display(Argument::Str("it's \\".into())), r"'it\'s \\'");
        assert_eq!(display(Argument::Ints(vec![])), "[]");
        assert_eq!(display(Argument::Ints(vec![1, -2])), "[1, -2]");
        let words = vec!["a".to_owned(), String::new()];
        assert_eq!(display(Argument::Strs(words)), "['a', '']");
    }

    #[test]
    fn landmarks_are_the_constants_of_the_source() {
        let landmarks = Landmarks::new("x2 = [w for w in xs if len(w) > 17 and 'ab' in w]");
        assert_eq!(landmarks.numbers, [17]);
        assert_eq!(landmarks.texts, ["ab"]);
    }
}
