//! Quoting of arguments for shell commands.

/// Returns `text` as one shell word, quoted only if necessary.
pub fn shell_quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,%+@".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_quoted_word_is_read_back_by_a_shell(text in "[^\0]{0,20}") {
            let line = format!("printf %s {}", shell_quoted(&text));
            let printed = Command::new("bash").args(["-c", &line]).output().unwrap();
            prop_assert_eq!(printed.stdout, text.as_bytes());
        }
    }
}
