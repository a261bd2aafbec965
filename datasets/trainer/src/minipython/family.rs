//! The families of tasks, one grammar each.

use super::draft::Draft;
use super::families;
use powerinfer_artifact::random::Random;

/// A family of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Family {
    /// Filter, map and arrange a list of numbers, then reduce it.
    Numbers,
    /// Filter, map and arrange a list of strings, then reduce it.
    Words,
    /// Rewrite one string.
    Letters,
    /// A running score, changed by the first rule that fits each number.
    Accumulate,
    /// A new list, made by the first rule that fits each number.
    Branches,
    /// Walk a list and stop early.
    Search,
    /// Compare each number with the one before it.
    Neighbours,
    /// Walk two lists in parallel.
    Zipped,
    /// Count or group in a dictionary.
    Counting,
    /// Change one number until it is small or large enough.
    Countdown,
    /// Arithmetic on two or three numbers.
    Scalars,
    /// Every pair out of one list or two.
    Combinations,
    /// Sums and lists over ranges of integers.
    Ranges,
}

impl Family {
    /// The name under which reports group the tasks of this family.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Numbers => "numbers",
            Self::Words => "words",
            Self::Letters => "letters",
            Self::Accumulate => "accumulate",
            Self::Branches => "branches",
            Self::Search => "search",
            Self::Neighbours => "neighbours",
            Self::Zipped => "zipped",
            Self::Counting => "counting",
            Self::Countdown => "countdown",
            Self::Scalars => "scalars",
            Self::Combinations => "combinations",
            Self::Ranges => "ranges",
        }
    }

    /// Draws a task of `steps` steps, one to four.
    pub(super) fn draw(self, steps: usize, random: &mut Random) -> Draft {
        match self {
            Self::Numbers => families::numbers::draw(steps, random),
            Self::Words => families::words::draw(steps, random),
            Self::Letters => families::letters::draw(steps, random),
            Self::Accumulate => families::accumulate::draw(steps, random),
            Self::Branches => families::branches::draw(steps, random),
            Self::Search => families::search::draw(steps, random),
            Self::Neighbours => families::neighbours::draw(steps, random),
            Self::Zipped => families::zipped::draw(steps, random),
            Self::Counting => families::counting::draw(steps, random),
            Self::Countdown => families::countdown::draw(steps, random),
            Self::Scalars => families::scalars::draw(steps, random),
            Self::Combinations => families::combinations::draw(steps, random),
            Self::Ranges => families::ranges::draw(steps, random),
        }
    }
}
