//! The table that sets how hard the tasks are: which families, how many steps, and how
//! often the awkward forms occur. The grammar itself never has to change for that.

use super::family::Family;

/// How often each family is drawn, relative to the others.
pub(super) const FAMILY_WEIGHTS: [(Family, u32); 13] = [
    (Family::Numbers, 22),
    (Family::Words, 12),
    (Family::Letters, 12),
    (Family::Accumulate, 8),
    (Family::Branches, 8),
    (Family::Search, 7),
    (Family::Neighbours, 6),
    (Family::Zipped, 7),
    (Family::Counting, 7),
    (Family::Countdown, 6),
    (Family::Scalars, 7),
    (Family::Combinations, 4),
    (Family::Ranges, 6),
];

/// How often a task has one, two, three or four steps.
pub(super) const STEP_WEIGHTS: [u32; 4] = [34, 38, 21, 7];

/// Percentage of number conditions that join two: "divisible by 3 but not by 7".
pub(super) const COMPOUND_CONDITION_PERCENT: u32 = 22;

/// Percentage of filters described by what to drop instead of what to keep.
pub(super) const COMPLEMENT_PERCENT: u32 = 20;

/// Largest threshold or addend that has to be copied from the docstring.
pub(super) const LARGEST_CONSTANT: i64 = 99;
