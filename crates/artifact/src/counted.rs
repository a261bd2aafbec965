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
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(numbered("layer", &[0, 1, 2, 5, 7, 8]), "layers 0–2, 5, 7–8");
    }
}
