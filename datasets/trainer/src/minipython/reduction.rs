//! How a list of numbers becomes the value that is returned.

use super::phrase::count_word;
use powerinfer_artifact::random::Random;

/// What is returned of a list of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    /// The list itself.
    List,
    Sum,
    Count,
    Product,
    /// 0 of an empty list.
    Largest,
    /// 0 of an empty list.
    Smallest,
    /// Largest minus smallest, 0 of an empty list.
    Spread,
    SumOfLargest(i64),
    SumOfSmallest(i64),
    DistinctCount,
    /// -1 of an empty list.
    First,
    /// -1 of an empty list.
    Last,
    /// Rounded down, 0 of an empty list.
    Mean,
}

use Reduction::{
    Count, DistinctCount, First, Largest, Last, List, Mean, Product, Smallest, Spread, Sum,
    SumOfLargest, SumOfSmallest,
};

/// The variable that a loop gathers into, and how.
pub(super) struct Gathering {
    /// Name of the variable.
    pub variable: &'static str,
    /// The statement before the loop.
    pub start: &'static str,
    /// The statement that takes in one value.
    pub step: String,
}

impl Reduction {
    /// Any reduction but the list itself.
    pub(super) fn draw(random: &mut Random) -> Self {
        let count = random.between(2, 4);
        match random.below(24) {
            0..=5 => Sum,
            6..=9 => Count,
            10..=11 => Product,
            12..=13 => Largest,
            14..=15 => Smallest,
            16 => Spread,
            17..=18 => SumOfLargest(count),
            19 => SumOfSmallest(count),
            20 => DistinctCount,
            21 => First,
            22 => Last,
            _ => Mean,
        }
    }

    /// A reduction that a loop gathers value by value.
    pub(super) fn gathered(random: &mut Random) -> Self {
        random.pick(&[Sum, Sum, Sum, Count, Count, Product, List, List])
    }

    /// Whether the order of the list changes the result.
    pub(super) fn sees_order(self) -> bool {
        matches!(self, List | First | Last)
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
        match self {
            List => "list".to_owned(),
            Sum => "sum".to_owned(),
            Count => "count".to_owned(),
            Product => "product".to_owned(),
            Largest => "largest".to_owned(),
            Smallest => "smallest".to_owned(),
            Spread => "spread".to_owned(),
            SumOfLargest(count) => format!("sum-of-largest({count})"),
            SumOfSmallest(count) => format!("sum-of-smallest({count})"),
            DistinctCount => "distinct-count".to_owned(),
            First => "first".to_owned(),
            Last => "last".to_owned(),
            Mean => "mean".to_owned(),
        }
    }

    /// The Python expression over a comprehension, where one is enough.
    pub(super) fn over_comprehension(self, comprehension: &str) -> Option<String> {
        Some(match self {
            List => format!("[{comprehension}]"),
            Sum => format!("sum({comprehension})"),
            Count => format!("len([{comprehension}])"),
            Largest => format!("max(({comprehension}), default=0)"),
            Smallest => format!("min(({comprehension}), default=0)"),
            SumOfLargest(count) => format!("sum(sorted({comprehension})[-{count}:])"),
            SumOfSmallest(count) => format!("sum(sorted({comprehension})[:{count}])"),
            DistinctCount => format!("len(set({comprehension}))"),
            Product | Spread | First | Last | Mean => return None,
        })
    }

    /// The last lines of a body, over the list called `list`.
    pub(super) fn over_list(self, list: &str, item: &str) -> Vec<String> {
        let value = match self {
            List => list.to_owned(),
            Sum => format!("sum({list})"),
            Count => format!("len({list})"),
            Product => {
                return vec![
                    "product = 1".to_owned(),
                    format!("for {item} in {list}:"),
                    format!("    product *= {item}"),
                    "return product".to_owned(),
                ];
            }
            Largest => format!("max({list}, default=0)"),
            Smallest => format!("min({list}, default=0)"),
            Spread => format!("max({list}) - min({list}) if {list} else 0"),
            SumOfLargest(count) => format!("sum(sorted({list})[-{count}:])"),
            SumOfSmallest(count) => format!("sum(sorted({list})[:{count}])"),
            DistinctCount => format!("len(set({list}))"),
            First => format!("{list}[0] if {list} else -1"),
            Last => format!("{list}[-1] if {list} else -1"),
            Mean => format!("sum({list}) // len({list}) if {list} else 0"),
        };
        vec![format!("return {value}")]
    }

    /// How a loop gathers `value`, where it can.
    pub(super) fn gathering(self, value: &str) -> Option<Gathering> {
        let (variable, start, step) = match self {
            List => ("result", "result = []", format!("result.append({value})")),
            Sum => ("total", "total = 0", format!("total += {value}")),
            Count => ("count", "count = 0", "count += 1".to_owned()),
            Product => ("product", "product = 1", format!("product *= {value}")),
            _ => return None,
        };
        Some(Gathering {
            variable,
            start,
            step,
        })
    }

    /// A noun phrase about `these`, such as "the sum of the even numbers in xs".
    pub(super) fn of(self, these: &str, random: &mut Random) -> String {
        match self {
            List => format!("{} of {these}", random.pick(&["the list", "a list"])),
            Sum => format!("{} of {these}", random.pick(&["the sum", "the total"])),
            Count => format!("{} of {these}", random.pick(&["the number", "the count"])),
            Product => format!("the product of {these}"),
            Largest => {
                let word = random.pick(&["largest", "biggest", "greatest"]);
                format!("the {word} of {these} or 0 if there is none")
            }
            Smallest => {
                let word = random.pick(&["smallest", "least", "lowest"]);
                format!("the {word} of {these} or 0 if there is none")
            }
            Spread => match random.below(2) {
                0 => format!("the largest minus the smallest of {these} or 0 if there is none"),
                _ => format!("the spread from smallest to largest of {these} or 0 if empty"),
            },
            SumOfLargest(count) => {
                let count = count_word(count, random);
                format!("the sum of the largest {count} of {these}")
            }
            SumOfSmallest(count) => {
                let count = count_word(count, random);
                format!("the sum of the smallest {count} of {these}")
            }
            DistinctCount => match random.below(2) {
                0 => format!("the number of different values among {these}"),
                _ => format!("how many distinct values are among {these}"),
            },
            First => format!("the first of {these} or -1 if there is none"),
            Last => format!("the last of {these} or -1 if there is none"),
            Mean => {
                let word = random.pick(&["average", "mean"]);
                format!("the {word} of {these} rounded down or 0 if there is none")
            }
        }
    }

    /// A noun phrase about what the steps before have left.
    pub(super) fn of_the_rest(self, random: &mut Random) -> String {
        match self {
            List => random
                .pick(&["the result", "the list", "the resulting list"])
                .to_owned(),
            Sum => random
                .pick(&[
                    "the sum",
                    "their sum",
                    "the total",
                    "the sum of the results",
                ])
                .to_owned(),
            Count => random
                .pick(&["how many are left", "their number", "how many there are"])
                .to_owned(),
            Product => random.pick(&["the product", "their product"]).to_owned(),
            _ => {
                let these = random.pick(&["them", "the results", "what is left", "them"]);
                self.of(these, random)
            }
        }
    }
}
