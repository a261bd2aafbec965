//! Statistics as text, for tables and pages.

use crate::{
    MIN_INTERVAL_TOKENS,
    statistics::{Interval, Paired, SIGNIFICANCE},
};

/// A share as a percentage.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A share with its interval, in percent.
pub fn share(interval: Interval) -> String {
    let Interval { value, low, high } = interval;
    format!(
        "{} ({:.1}–{:.1})",
        percent(value),
        100.0 * low,
        100.0 * high
    )
}

/// Formats a relative rise as a percentage, with its confidence interval if `tokens` is large enough for one.
pub fn rise(interval: Interval, tokens: u64) -> String {
    let [value, low, high] =
        [interval.value, interval.low, interval.high].map(|share| 100.0 * share);
    if tokens < MIN_INTERVAL_TOKENS {
        return format!("{value:+.2}%");
    }
    format!("{value:+.2}% ({low:+.2} to {high:+.2})")
}

/// A figure with about three digits.
pub fn figure(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

/// Comparison of `name` with `baseline` on the same items, in one line.
pub fn paired(name: &str, baseline: &str, paired: Paired) -> String {
    let (p, smallest) = (paired.p_value(), paired.minimum_detectable_effect());
    let p_value = if p < 0.001 {
        "p < 0.001".to_owned()
    } else {
        format!("p = {p:.3}")
    };
    let verdict = match (p < SIGNIFICANCE, smallest <= 1.0) {
        (true, _) => format!("a difference (McNemar, exact, {p_value})"),
        (false, true) => format!(
            "no difference shown (McNemar, exact, {p_value}; minimum detectable effect {:.1} points)",
            100.0 * smallest
        ),
        (false, false) => "too few items to show a difference".to_owned(),
    };
    format!(
        "{name} relative to {baseline}: {:+.1} points on {} items, {} lost and {} won; {verdict}",
        100.0 * paired.difference(),
        paired.items,
        paired.first_only,
        paired.second_only,
    )
}
