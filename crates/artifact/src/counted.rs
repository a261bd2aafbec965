//! Counts in words.

use std::fmt::Display;

/// `count` with its `noun`, which takes an `s` unless there is one: `1 layer`, `2 layers`.
pub fn counted(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    match count.as_str() {
        "1" => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_is_singular() {
        assert_eq!(counted(0, "layer"), "0 layers");
        assert_eq!(counted(1, "layer"), "1 layer");
        assert_eq!(counted(2, "GPU"), "2 GPUs");
    }
}
