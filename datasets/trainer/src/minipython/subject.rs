//! What a task is about: a parameter, the loop variable it determines, and its nouns.

use powerinfer_artifact::random::Random;

/// A list or string parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    /// Name of the parameter.
    pub name: &'static str,
    /// The loop variable over it; a function of the name, so that a reader can derive it.
    pub item: &'static str,
    /// What its elements are called in the docstring, in the plural.
    pub nouns: &'static str,
    /// The same in the singular.
    pub noun: &'static str,
}

const NUMBER_LISTS: [(&str, &str); 8] = [
    ("xs", "x"),
    ("nums", "n"),
    ("values", "v"),
    ("numbers", "num"),
    ("data", "d"),
    ("items", "item"),
    ("scores", "s"),
    ("array", "a"),
];
const WORD_LISTS: [(&str, &str); 6] = [
    ("words", "w"),
    ("names", "name"),
    ("strs", "s"),
    ("tokens", "t"),
    ("lines", "line"),
    ("labels", "label"),
];
const STRINGS: [&str; 6] = ["s", "text", "word", "line", "name", "phrase"];

impl Subject {
    /// A list of integers.
    pub(super) fn numbers(random: &mut Random) -> Self {
        let (name, item) = random.pick(&NUMBER_LISTS);
        let (noun, nouns) = random.pick(&[
            ("number", "numbers"),
            ("value", "values"),
            ("element", "elements"),
            ("number", "numbers"),
        ]);
        Self {
            name,
            item,
            nouns,
            noun,
        }
    }

    /// A list of strings.
    pub(super) fn words(random: &mut Random) -> Self {
        let (name, item) = random.pick(&WORD_LISTS);
        let (noun, nouns) = random.pick(&[
            ("word", "words"),
            ("string", "strings"),
            ("entry", "entries"),
        ]);
        Self {
            name,
            item,
            nouns,
            noun,
        }
    }

    /// A string; its elements are characters and the loop variable is `c`.
    pub(super) fn string(random: &mut Random) -> Self {
        Self {
            name: random.pick(&STRINGS),
            item: "c",
            nouns: "characters",
            noun: "character",
        }
    }
}
