//! One grammar per file; each draws a [`Draft`](super::draft::Draft) of a given number of steps.

pub(super) mod accumulate;
pub(super) mod branches;
pub(super) mod combinations;
pub(super) mod countdown;
pub(super) mod counting;
pub(super) mod letters;
pub(super) mod neighbours;
pub(super) mod numbers;
pub(super) mod ranges;
pub(super) mod scalars;
pub(super) mod search;
pub(super) mod words;
pub(super) mod zipped;
