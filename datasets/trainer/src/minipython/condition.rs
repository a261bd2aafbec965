//! Conditions on one number: what they are called, how they are told, how they are tested.

use super::difficulty::{COMPOUND_CONDITION_PERCENT, LARGEST_CONSTANT};
use super::phrase::ten;
use powerinfer_artifact::random::Random;

/// A test of one number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    Even,
    Odd,
    Positive,
    Negative,
    Greater(i64),
    Less(i64),
    AtLeast(i64),
    AtMost(i64),
    /// Both bounds included.
    Between(i64, i64),
    /// Below the first or above the second.
    Outside(i64, i64),
    Divisible(i64),
    NotDivisible(i64),
    /// Modulo the first, equal to the second.
    Remainder(i64, i64),
    Differs(i64),
    Equals(i64),
    Both(Box<Condition>, Box<Condition>),
    Either(Box<Condition>, Box<Condition>),
}

/// The numbers over which a condition or a mapping has to make a difference.
pub(super) fn usual_numbers() -> Vec<i64> {
    (-40..=140).collect()
}

/// Whether a predicate speaks of one number or of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    One,
    Many,
}

use Condition::{
    AtLeast, AtMost, Between, Both, Differs, Divisible, Either, Equals, Even, Greater, Less,
    Negative, NotDivisible, Odd, Outside, Positive, Remainder,
};

impl Condition {
    /// A condition as hard as the difficulty table wants it.
    pub(super) fn draw(random: &mut Random) -> Self {
        match random.chance(COMPOUND_CONDITION_PERCENT) {
            true => Self::compound(random),
            false => Self::simple(random),
        }
    }

    /// A condition without `and` or `or`.
    pub(super) fn simple(random: &mut Random) -> Self {
        match random.below(20) {
            0..=9 => Self::magnitude(random),
            10..=17 => Self::modular(random),
            18 => {
                let (low, high) = interval(random);
                Outside(low, high)
            }
            _ => Differs(random.between(0, 20)),
        }
    }

    /// Two simple conditions, the second for what does not pass the first.
    pub(super) fn cascade(random: &mut Random) -> (Self, Self) {
        loop {
            let (first, second) = (Self::simple(random), Self::simple(random));
            let same_kind = std::mem::discriminant(&first) == std::mem::discriminant(&second);
            let mut rest = usual_numbers();
            rest.retain(|&value| !first.holds(value));
            if !same_kind && second.splits(&rest) {
                return (first, second);
            }
        }
    }

    /// How large the number is.
    pub(super) fn magnitude(random: &mut Random) -> Self {
        let constant = random.between(1, LARGEST_CONSTANT);
        match random.below(12) {
            0 => Positive,
            1 => Negative,
            2..=4 => Greater(constant),
            5..=7 => Less(constant),
            8 => AtLeast(constant),
            9 => AtMost(constant),
            _ => {
                let (low, high) = interval(random);
                Between(low, high)
            }
        }
    }

    /// What the number leaves after a division.
    pub(super) fn modular(random: &mut Random) -> Self {
        match random.below(8) {
            0..=1 => Even,
            2..=3 => Odd,
            4..=5 => Divisible(random.between(3, 12)),
            6 => NotDivisible(random.between(3, 9)),
            _ => {
                let modulus = random.between(3, 9);
                Remainder(modulus, random.between(1, modulus - 1))
            }
        }
    }

    fn compound(random: &mut Random) -> Self {
        loop {
            let (first, second, both) = match random.below(6) {
                0..=1 => {
                    let (divisor, other) = unrelated_divisors(random);
                    (Divisible(divisor), NotDivisible(other), true)
                }
                2..=3 => (Self::modular(random), Self::magnitude(random), true),
                4 => (Self::magnitude(random), Self::modular(random), false),
                _ => {
                    let (divisor, other) = unrelated_divisors(random);
                    (Divisible(divisor), Divisible(other), false)
                }
            };
            let compound = match both {
                true => Both(Box::new(first.clone()), Box::new(second)),
                false => Either(Box::new(first.clone()), Box::new(second)),
            };
            // The second part must matter among those that pass the first, and vice versa.
            let (passing, failing): (Vec<i64>, Vec<i64>) = usual_numbers()
                .into_iter()
                .partition(|&value| first.holds(value));
            if compound.splits(if both { &passing } else { &failing }) {
                return compound;
            }
        }
    }

    /// Whether `value` passes, as Python sees it.
    pub(super) fn holds(&self, value: i64) -> bool {
        match self {
            Even => value % 2 == 0,
            Odd => value % 2 != 0,
            Positive => value > 0,
            Negative => value < 0,
            Greater(bound) => value > *bound,
            Less(bound) => value < *bound,
            AtLeast(bound) => value >= *bound,
            AtMost(bound) => value <= *bound,
            Between(low, high) => (*low..=*high).contains(&value),
            Outside(low, high) => !(*low..=*high).contains(&value),
            Divisible(divisor) => value % divisor == 0,
            NotDivisible(divisor) => value % divisor != 0,
            Remainder(modulus, rest) => value.rem_euclid(*modulus) == *rest,
            Differs(constant) => value != *constant,
            Equals(constant) => value == *constant,
            Both(first, second) => first.holds(value) && second.holds(value),
            Either(first, second) => first.holds(value) || second.holds(value),
        }
    }

    /// Whether some of `values` pass and some do not; otherwise the condition asks nothing.
    pub(super) fn splits(&self, values: &[i64]) -> bool {
        let passing = values.iter().filter(|&&value| self.holds(value)).count();
        0 < passing && passing < values.len()
    }

    /// Part of the key of a combination.
    pub(super) fn key(&self) -> String {
        match self {
            Even => "even".to_owned(),
            Odd => "odd".to_owned(),
            Positive => "positive".to_owned(),
            Negative => "negative".to_owned(),
            Greater(bound) => format!("greater({})", ten(*bound)),
            Less(bound) => format!("less({})", ten(*bound)),
            AtLeast(bound) => format!("at-least({})", ten(*bound)),
            AtMost(bound) => format!("at-most({})", ten(*bound)),
            Between(low, high) => format!("between({},{})", ten(*low), ten(*high)),
            Outside(low, high) => format!("outside({},{})", ten(*low), ten(*high)),
            Divisible(divisor) => format!("divisible({divisor})"),
            NotDivisible(divisor) => format!("not-divisible({divisor})"),
            Remainder(modulus, rest) => format!("remainder({modulus},{rest})"),
            Differs(constant) => format!("differs({})", ten(*constant)),
            Equals(constant) => format!("equals({})", ten(*constant)),
            Both(first, second) => format!("{}&{}", first.key(), second.key()),
            Either(first, second) => format!("{}/{}", first.key(), second.key()),
        }
    }

    /// The Python test of the variable `variable`.
    pub(super) fn test(&self, variable: &str) -> String {
        match self {
            Even => format!("{variable} % 2 == 0"),
            Odd => format!("{variable} % 2 == 1"),
            Positive => format!("{variable} > 0"),
            Negative => format!("{variable} < 0"),
            Greater(bound) => format!("{variable} > {bound}"),
            Less(bound) => format!("{variable} < {bound}"),
            AtLeast(bound) => format!("{variable} >= {bound}"),
            AtMost(bound) => format!("{variable} <= {bound}"),
            Between(low, high) => format!("{low} <= {variable} <= {high}"),
            Outside(low, high) => format!("{variable} < {low} or {variable} > {high}"),
            Divisible(divisor) => format!("{variable} % {divisor} == 0"),
            NotDivisible(divisor) => format!("{variable} % {divisor} != 0"),
            Remainder(modulus, rest) => format!("{variable} % {modulus} == {rest}"),
            Differs(constant) => format!("{variable} != {constant}"),
            Equals(constant) => format!("{variable} == {constant}"),
            Both(first, second) => {
                format!("{} and {}", first.test(variable), second.test(variable))
            }
            Either(first, second) => {
                format!("{} or {}", first.test(variable), second.test(variable))
            }
        }
    }

    /// The condition that holds exactly where this one does not, if it is as short.
    pub(super) fn complement(&self) -> Option<Self> {
        Some(match *self {
            Even => Odd,
            Odd => Even,
            Greater(bound) => AtMost(bound),
            AtMost(bound) => Greater(bound),
            Less(bound) => AtLeast(bound),
            AtLeast(bound) => Less(bound),
            Between(low, high) => Outside(low, high),
            Outside(low, high) => Between(low, high),
            Divisible(divisor) => NotDivisible(divisor),
            NotDivisible(divisor) => Divisible(divisor),
            Differs(constant) => Equals(constant),
            _ => return None,
        })
    }

    /// What follows "is" or "are": "greater than 17".
    pub(super) fn predicate(&self, count: Count, random: &mut Random) -> String {
        match self {
            Even => "even".to_owned(),
            Odd => "odd".to_owned(),
            Positive => random
                .pick(&["positive", "above zero", "positive"])
                .to_owned(),
            Negative => random
                .pick(&["negative", "below zero", "negative"])
                .to_owned(),
            Greater(bound) => {
                let words = [
                    "greater than",
                    "above",
                    "over",
                    "larger than",
                    "bigger than",
                    "more than",
                ];
                format!("{} {bound}", random.pick(&words))
            }
            Less(bound) => {
                let words = ["less than", "below", "under", "smaller than", "lower than"];
                format!("{} {bound}", random.pick(&words))
            }
            AtLeast(bound) => {
                let words = ["at least", "not below", "no less than", "not less than"];
                format!("{} {bound}", random.pick(&words))
            }
            AtMost(bound) => {
                let words = ["at most", "not above", "no more than", "not over"];
                format!("{} {bound}", random.pick(&words))
            }
            Between(low, high) => match random.below(4) {
                0 => format!("between {low} and {high} inclusive"),
                1 => format!("from {low} to {high}"),
                2 => format!("at least {low} and at most {high}"),
                _ => format!("in the range {low} to {high}"),
            },
            Outside(low, high) => match random.below(3) {
                0 => format!("below {low} or above {high}"),
                1 => format!("less than {low} or greater than {high}"),
                _ => format!("outside {low} to {high}"),
            },
            Divisible(divisor) => match (random.below(3), count) {
                (0, Count::One) => format!("a multiple of {divisor}"),
                (0, Count::Many) => format!("multiples of {divisor}"),
                _ => format!("divisible by {divisor}"),
            },
            NotDivisible(divisor) => match (random.below(3), count) {
                (0, Count::One) => format!("not a multiple of {divisor}"),
                (0, Count::Many) => format!("not multiples of {divisor}"),
                _ => format!("not divisible by {divisor}"),
            },
            Remainder(modulus, rest) => match random.below(3) {
                0 => format!("{rest} more than a multiple of {modulus}"),
                1 => format!("congruent to {rest} modulo {modulus}"),
                _ => format!("equal to {rest} modulo {modulus}"),
            },
            Differs(constant) => {
                let words = ["different from", "not equal to", "other than"];
                format!("{} {constant}", random.pick(&words))
            }
            Equals(constant) => format!("equal to {constant}"),
            Both(first, second) => match (&**first, &**second) {
                (Divisible(divisor), NotDivisible(other)) => match random.below(3) {
                    0 => format!("divisible by {divisor} and not by {other}"),
                    1 => format!("divisible by {divisor} but not divisible by {other}"),
                    _ => format!("divisible by {divisor} but not by {other}"),
                },
                _ => {
                    let joint = random.pick(&["and", "and also", "and"]);
                    let first = first.predicate(count, random);
                    format!("{first} {joint} {}", second.predicate(count, random))
                }
            },
            Either(first, second) => match (&**first, &**second) {
                (Divisible(divisor), Divisible(other)) => match random.below(2) {
                    0 => format!("divisible by {divisor} or {other}"),
                    _ => format!("divisible by {divisor} or by {other}"),
                },
                _ => {
                    let first = first.predicate(count, random);
                    format!("{first} or {}", second.predicate(count, random))
                }
            },
        }
    }

    /// The plural `nouns` restricted to those that pass: "even numbers", "values above 17".
    pub(super) fn restrict(&self, nouns: &str, random: &mut Random) -> String {
        let predicate = self.predicate(Count::Many, random);
        let adjective = !predicate.contains(' ');
        match random.below(3) {
            0 if adjective => format!("{nouns} that are {predicate}"),
            0 => format!("{nouns} which are {predicate}"),
            1 if adjective => format!("{predicate} {nouns}"),
            1 => format!("{nouns} that are {predicate}"),
            _ if adjective => format!("{predicate} {nouns}"),
            _ if predicate.starts_with("multiples") || predicate.starts_with("not multiples") => {
                format!("{nouns} that are {predicate}")
            }
            _ => format!("{nouns} {predicate}"),
        }
    }
}

fn interval(random: &mut Random) -> (i64, i64) {
    let low = random.between(1, LARGEST_CONSTANT - 30);
    let high = random.between(low + 3, LARGEST_CONSTANT.min(low + 45));
    (low, high)
}

/// Two divisors of which neither divides the other.
fn unrelated_divisors(random: &mut Random) -> (i64, i64) {
    let divisor = random.between(2, 9);
    let others: Vec<i64> = (2..=9)
        .filter(|other| other % divisor != 0 && divisor % other != 0)
        .collect();
    (divisor, random.pick(&others))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complement_of_a_complement_is_the_condition() {
        let mut random = Random::new(3);
        for _ in 0..500 {
            let condition = Condition::simple(&mut random);
            if let Some(complement) = condition.complement()
                && !matches!(condition, Differs(_))
            {
                assert_eq!(complement.complement(), Some(condition));
            }
        }
    }

    #[test]
    fn a_complement_holds_exactly_where_the_condition_does_not() {
        let mut random = Random::new(4);
        for _ in 0..500 {
            let condition = Condition::simple(&mut random);
            if let Some(complement) = condition.complement() {
                for value in usual_numbers() {
                    assert_ne!(condition.holds(value), complement.holds(value));
                }
            }
        }
    }

    #[test]
    fn every_compound_can_pass_and_fail() {
        let mut random = Random::new(5);
        for _ in 0..500 {
            assert!(Condition::compound(&mut random).splits(&usual_numbers()));
        }
    }

    #[test]
    fn tests_and_keys_name_the_constant() {
        assert_eq!(Greater(17).test("x"), "x > 17");
        assert_eq!(Greater(17).key(), "greater(10s)");
        let both = Both(Box::new(Even), Box::new(Less(4)));
        assert_eq!(both.test("n"), "n % 2 == 0 and n < 4");
    }
}
