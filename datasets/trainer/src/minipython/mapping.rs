//! What can be done to one number: how it is told and how it is computed.

use super::difficulty::LARGEST_CONSTANT;
use super::phrase::{bracketed, ten};
use powerinfer_artifact::random::Random;

/// A change of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapping {
    Times(i64),
    Add(i64),
    Subtract(i64),
    Square,
    Negate,
    Absolute,
    /// Rounding down.
    Divide(i64),
    Remainder(i64),
    /// At most the constant.
    Cap(i64),
    /// At least the constant.
    Raise(i64),
    /// The constant minus the number.
    SubtractFrom(i64),
    /// The absolute difference from the constant.
    Distance(i64),
}

use Mapping::{
    Absolute, Add, Cap, Distance, Divide, Negate, Raise, Remainder, Square, Subtract, SubtractFrom,
    Times,
};

impl Mapping {
    /// Any mapping; the common ones more often.
    pub(super) fn draw(random: &mut Random) -> Self {
        let constant = random.between(1, LARGEST_CONSTANT);
        match random.below(24) {
            0..=1 => Times(2),
            2..=4 => Times(random.between(3, 12)),
            5..=8 => Add(constant),
            9..=12 => Subtract(constant),
            13..=14 => Square,
            15 => Negate,
            16 => Absolute,
            17 => Divide(random.between(2, 9)),
            18..=19 => Remainder(random.between(2, 12)),
            20 => Cap(constant),
            21 => Raise(constant),
            22 => SubtractFrom(constant),
            _ => Distance(constant),
        }
    }

    /// A mapping that, done right after `before`, is neither undone by it nor merged with it.
    pub(super) fn draw_after(before: Option<Self>, random: &mut Random) -> Self {
        loop {
            let mapping = Self::draw(random);
            let clash = match (before, mapping) {
                (None, _) => false,
                (Some(Add(_) | Subtract(_) | SubtractFrom(_)), Add(_) | Subtract(_)) => true,
                (Some(Absolute | Square | Remainder(_) | Distance(_)), Absolute) => true,
                (Some(before), _) => {
                    std::mem::discriminant(&before) == std::mem::discriminant(&mapping)
                }
            };
            if !clash {
                return mapping;
            }
        }
    }

    /// The changed `value`, as Python computes it.
    pub(super) fn apply(self, value: i64) -> i64 {
        match self {
            Times(factor) => value * factor,
            Add(constant) => value + constant,
            Subtract(constant) => value - constant,
            Square => value * value,
            Negate => -value,
            Absolute => value.abs(),
            Divide(divisor) => value.div_euclid(divisor),
            Remainder(modulus) => value.rem_euclid(modulus),
            Cap(bound) => value.min(bound),
            Raise(bound) => value.max(bound),
            SubtractFrom(constant) => constant - value,
            Distance(constant) => (value - constant).abs(),
        }
    }

    /// Part of the key of a combination.
    pub(super) fn key(self) -> String {
        match self {
            Times(factor) => format!("times({factor})"),
            Add(constant) => format!("add({})", ten(constant)),
            Subtract(constant) => format!("subtract({})", ten(constant)),
            Square => "square".to_owned(),
            Negate => "negate".to_owned(),
            Absolute => "absolute".to_owned(),
            Divide(divisor) => format!("divide({divisor})"),
            Remainder(modulus) => format!("modulo({modulus})"),
            Cap(bound) => format!("cap({})", ten(bound)),
            Raise(bound) => format!("raise({})", ten(bound)),
            SubtractFrom(constant) => format!("subtract-from({})", ten(constant)),
            Distance(constant) => format!("distance({})", ten(constant)),
        }
    }

    /// The Python expression of the changed `value`.
    pub(super) fn expression(self, value: &str) -> String {
        let operand = bracketed(value);
        match self {
            Times(factor) => format!("{operand} * {factor}"),
            Add(constant) => format!("{value} + {constant}"),
            Subtract(constant) => format!("{value} - {constant}"),
            Square => format!("{operand} ** 2"),
            Negate => format!("-{operand}"),
            Absolute => format!("abs({value})"),
            Divide(divisor) => format!("{operand} // {divisor}"),
            Remainder(modulus) => format!("{operand} % {modulus}"),
            Cap(bound) => format!("min({value}, {bound})"),
            Raise(bound) => format!("max({value}, {bound})"),
            SubtractFrom(constant) => format!("{constant} - {operand}"),
            Distance(constant) => format!("abs({value} - {constant})"),
        }
    }

    /// The Python statement that changes `variable` in place.
    pub(super) fn statement(self, variable: &str) -> String {
        match self {
            Times(factor) => format!("{variable} *= {factor}"),
            Add(constant) => format!("{variable} += {constant}"),
            Subtract(constant) => format!("{variable} -= {constant}"),
            Divide(divisor) => format!("{variable} //= {divisor}"),
            Remainder(modulus) => format!("{variable} %= {modulus}"),
            _ => format!("{variable} = {}", self.expression(variable)),
        }
    }

    /// An imperative about `object`: "add 4 to each of them".
    pub(super) fn imperative(self, object: &str, random: &mut Random) -> String {
        match self {
            Times(2) => match random.below(3) {
                0 => format!("multiply {object} by 2"),
                _ => format!("double {object}"),
            },
            Times(3) if random.chance(50) => format!("triple {object}"),
            Times(factor) => match random.below(3) {
                0 => format!("scale {object} by {factor}"),
                _ => format!("multiply {object} by {factor}"),
            },
            Add(constant) => match random.below(3) {
                0 => format!("increase {object} by {constant}"),
                1 => format!("raise {object} by {constant}"),
                _ => format!("add {constant} to {object}"),
            },
            Subtract(constant) => match random.below(4) {
                0 => format!("decrease {object} by {constant}"),
                1 => format!("lower {object} by {constant}"),
                2 => format!("take {constant} away from {object}"),
                _ => format!("subtract {constant} from {object}"),
            },
            Square => match random.below(3) {
                0 => format!("raise {object} to the power 2"),
                _ => format!("square {object}"),
            },
            Negate => match random.below(3) {
                0 => format!("flip the sign of {object}"),
                1 => format!("change the sign of {object}"),
                _ => format!("negate {object}"),
            },
            Absolute => match random.below(3) {
                0 => format!("drop the sign of {object}"),
                1 => format!("make {object} absolute"),
                _ => format!("take the absolute value of {object}"),
            },
            Divide(2) if random.chance(50) => format!("halve {object} rounding down"),
            Divide(divisor) => match random.below(3) {
                0 => format!("floor-divide {object} by {divisor}"),
                _ => format!("divide {object} by {divisor} rounding down"),
            },
            Remainder(modulus) => match random.below(3) {
                0 => format!("reduce {object} modulo {modulus}"),
                1 => format!("replace {object} by the remainder modulo {modulus}"),
                _ => format!("take {object} modulo {modulus}"),
            },
            Cap(bound) => match random.below(3) {
                0 => format!("limit {object} to at most {bound}"),
                1 => format!("clip {object} to a maximum of {bound}"),
                _ => format!("cap {object} at {bound}"),
            },
            Raise(bound) => match random.below(3) {
                0 => format!("make {object} at least {bound}"),
                1 => format!("clip {object} to a minimum of {bound}"),
                _ => format!("raise {object} to at least {bound}"),
            },
            SubtractFrom(constant) => match random.below(2) {
                0 => format!("replace {object} by {constant} minus it"),
                _ => format!("subtract {object} from {constant}"),
            },
            Distance(constant) => match random.below(2) {
                0 => format!("replace {object} by the distance to {constant}"),
                _ => format!("take the distance of {object} to {constant}"),
            },
        }
    }

    /// The plural nouns changed: "squares of the numbers"; only where that has a name.
    pub(super) fn nominal(self, nouns: &str) -> Option<String> {
        Some(match self {
            Times(2) => format!("doubles of the {nouns}"),
            Times(factor) => format!("{factor}-fold values of the {nouns}"),
            Square => format!("squares of the {nouns}"),
            Negate => format!("negatives of the {nouns}"),
            Absolute => format!("absolute values of the {nouns}"),
            Remainder(modulus) => format!("remainders modulo {modulus} of the {nouns}"),
            Distance(constant) => format!("distances to {constant} of the {nouns}"),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_expressions_keep_their_order() {
        assert_eq!(Times(3).expression("x + 1"), "(x + 1) * 3");
        assert_eq!(Add(4).expression("x * 2"), "x * 2 + 4");
        assert_eq!(Square.expression("-x"), "(-x) ** 2");
        assert_eq!(SubtractFrom(9).expression("x - 1"), "9 - (x - 1)");
    }

    #[test]
    fn division_and_remainder_round_down_as_python_does() {
        assert_eq!(Divide(4).apply(-7), -2);
        assert_eq!(Remainder(4).apply(-7), 1);
    }

    #[test]
    fn neighbouring_mappings_do_not_merge() {
        let mut random = Random::new(5);
        for _ in 0..500 {
            assert!(!matches!(
                Mapping::draw_after(Some(Add(1)), &mut random),
                Add(_) | Subtract(_)
            ));
        }
    }
}
