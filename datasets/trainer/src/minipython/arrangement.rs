//! What is done to a list as a whole: order, duplicates, and which part to keep.

use super::phrase::count_word;
use powerinfer_artifact::random::Random;

/// A change of a list that looks at more than one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrangement {
    Ascending,
    Descending,
    Reverse,
    Distinct,
    First(i64),
    Last(i64),
    DropFirst(i64),
    DropLast(i64),
    EvenIndices,
    OddIndices,
}

use Arrangement::{
    Ascending, Descending, Distinct, DropFirst, DropLast, EvenIndices, First, Last, OddIndices,
    Reverse,
};

impl Arrangement {
    /// Any arrangement.
    pub(super) fn draw(random: &mut Random) -> Self {
        let count = random.between(2, 5);
        match random.below(14) {
            0..=1 => Ascending,
            2..=3 => Descending,
            4..=5 => Reverse,
            6..=7 => Distinct,
            8 => First(count),
            9 => Last(count),
            10 => DropFirst(random.between(1, 4)),
            11 => DropLast(random.between(1, 4)),
            12 => EvenIndices,
            _ => OddIndices,
        }
    }

    /// Whether it only changes the order, which a sum does not see.
    pub(super) fn is_order(self) -> bool {
        matches!(self, Ascending | Descending | Reverse)
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
        match self {
            Ascending => "ascending".to_owned(),
            Descending => "descending".to_owned(),
            Reverse => "reverse".to_owned(),
            Distinct => "distinct".to_owned(),
            First(count) => format!("first({count})"),
            Last(count) => format!("last({count})"),
            DropFirst(count) => format!("drop-first({count})"),
            DropLast(count) => format!("drop-last({count})"),
            EvenIndices => "even-indices".to_owned(),
            OddIndices => "odd-indices".to_owned(),
        }
    }

    /// The Python expression of the changed list `list`.
    pub(super) fn expression(self, list: &str) -> String {
        match self {
            Ascending => format!("sorted({list})"),
            Descending => format!("sorted({list}, reverse=True)"),
            Reverse => format!("{list}[::-1]"),
            Distinct => format!("list(dict.fromkeys({list}))"),
            First(count) => format!("{list}[:{count}]"),
            Last(count) => format!("{list}[-{count}:]"),
            DropFirst(count) => format!("{list}[{count}:]"),
            DropLast(count) => format!("{list}[:-{count}]"),
            EvenIndices => format!("{list}[::2]"),
            OddIndices => format!("{list}[1::2]"),
        }
    }

    /// An imperative about `object`, a list: "sort them in descending order".
    pub(super) fn imperative(self, object: &str, random: &mut Random) -> String {
        match self {
            Ascending => match random.below(4) {
                0 => format!("sort {object}"),
                1 => format!("put {object} in increasing order"),
                2 => format!("order {object} from smallest to largest"),
                _ => format!("sort {object} in ascending order"),
            },
            Descending => match random.below(4) {
                0 => format!("put {object} in decreasing order"),
                1 => format!("order {object} from largest to smallest"),
                2 => format!("sort {object} backwards"),
                _ => format!("sort {object} in descending order"),
            },
            Reverse => match random.below(3) {
                0 => format!("put {object} in reverse order"),
                1 => format!("turn {object} back to front"),
                _ => format!("reverse {object}"),
            },
            Distinct => match random.below(3) {
                0 => format!("drop repeats from {object}"),
                1 => format!("keep one of each of {object}"),
                _ => format!("remove duplicates from {object}"),
            },
            First(count) => {
                let count = count_word(count, random);
                let verb = random.pick(&["keep", "take"]);
                format!("{verb} the first {count} of {object}")
            }
            Last(count) => {
                let count = count_word(count, random);
                let verb = random.pick(&["keep", "take"]);
                format!("{verb} the last {count} of {object}")
            }
            DropFirst(1) => format!("drop the first of {object}"),
            DropFirst(count) => {
                let count = count_word(count, random);
                let verb = random.pick(&["drop", "skip", "remove"]);
                format!("{verb} the first {count} of {object}")
            }
            DropLast(1) => format!("drop the last of {object}"),
            DropLast(count) => {
                let count = count_word(count, random);
                let verb = random.pick(&["drop", "remove", "cut"]);
                format!("{verb} the last {count} of {object}")
            }
            EvenIndices => match random.below(2) {
                0 => format!("keep every second of {object} from the first"),
                _ => format!("keep the even indices of {object}"),
            },
            OddIndices => match random.below(2) {
                0 => format!("keep every second of {object} from the second"),
                _ => format!("keep the odd indices of {object}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_keep_what_the_words_say() {
        assert_eq!(First(3).expression("xs"), "xs[:3]");
        assert_eq!(DropLast(2).expression("xs"), "xs[:-2]");
        let told = Last(2).imperative("them", &mut Random::new(1));
        assert!(told.contains("the last"), "{told}");
    }
}
