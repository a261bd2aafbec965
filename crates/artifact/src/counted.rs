//! Counts and lists of numbers in words.

use std::fmt::Display;

/// `count` with its `noun`, which takes an `s` unless there is one: `1 layer`, `2 layers`.
pub fn counted(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    match count.as_str() {
        "1" => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// `noun` with the ascending `numbers` of those that are meant, ranges joined: `layer 3`, `layers 0–5, 7`.
pub fn numbered(noun: &str, numbers: &[usize]) -> String {
    let ranges = numbers.chunk_by(|number, next| next - number == 1);
    let ranges: Vec<String> = ranges
        .map(|range| match range {
            [number] => number.to_string(),
            _ => format!("{}–{}", range[0], range[range.len() - 1]),
        })
        .collect();
    match numbers {
        [_] => format!("{noun} {}", ranges.join(", ")),
        _ => format!("{noun}s {}", ranges.join(", ")),
    }
}

/// Maximum number of names in a list.
const MOST_NAMED: usize = 4;

/// The first of `names`, and the number of others: `` `a`, `b` and 3 more ``.
pub fn listed(names: &[String]) -> String {
    let named = &names[..names.len().min(MOST_NAMED)];
    let named: Vec<String> = named.iter().map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(MOST_NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        assert_eq!(counted(0, "layer"), "0 layers");
        assert_eq!(counted(1, "layer"), "1 layer");
        assert_eq!(counted(2, "GPU"), "2 GPUs");
        assert_eq!(numbered("layer", &[3]), "layer 3");
    }

    #[test]
    fn a_long_list_is_cut() {
        let names: Vec<String> = ('a'..='f').map(String::from).collect();
        assert_eq!(listed(&names[..2]), "`a`, `b`");
        assert_eq!(listed(&names), "`a`, `b`, `c`, `d` and 2 more");
    }

    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(numbered("layer", &[0, 1, 2, 5, 7, 8]), "layers 0–2, 5, 7–8");
    }
}
