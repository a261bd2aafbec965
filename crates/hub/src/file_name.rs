//! Names of files in a repository: untrusted input that becomes a path.

use std::{fmt, path::PathBuf};

use crate::HubError;

/// Most bytes of a name, the limit of file systems for one component.
const LONGEST: usize = 255;

/// A relative path of plain components, such as `config.json` or `Q4_K_M/model.gguf`: it never leaves
/// the folder it is joined to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileName(String);

impl FileName {
    /// Parses an untrusted name.
    pub(crate) fn parse(text: &str) -> Result<Self, HubError> {
        let plain = |component: &str| {
            !["", ".", ".."].contains(&component)
                && !component
                    .chars()
                    .any(|c| c.is_control() || "\\:*?\"<>|".contains(c))
        };
        if text.len() <= LONGEST && text.split('/').all(plain) {
            Ok(Self(text.to_owned()))
        } else {
            Err(HubError::HostileName {
                // Control characters would reach the terminal.
                file: text.escape_debug().take(LONGEST).collect(),
            })
        }
    }

    /// The name with `/` between components.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Its components.
    pub(crate) fn components(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }

    /// The name as a relative path.
    pub(crate) fn to_path(&self) -> PathBuf {
        self.components().collect()
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_stay_inside_are_taken() {
        for good in ["config.json", "Q4/model-00001-of-00002.gguf", "a b", "..a"] {
            assert_eq!(FileName::parse(good).unwrap().as_str(), good);
        }
        let long = "a".repeat(256);
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a//b",
            "a/",
            "..\\x",
            "C:\\x",
            "C:x",
            "a\0b",
            "a\u{1b}[2Jb",
            &long,
        ] {
            let error = FileName::parse(bad).unwrap_err().to_string();
            assert!(error.contains("refusing"), "{bad}");
            assert!(!error.contains(char::is_control), "{bad}");
        }
    }
}
