//! Verdicts on generated functions.

/// Outcome of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All assertions held.
    Passed,
    /// An assertion failed.
    Failed(String),
    /// A syntax error, an exception or too much memory.
    Error(String),
    /// The time limit was exceeded.
    Timeout,
    /// The program was not run, for this reason.
    Unjudged(String),
}

impl Verdict {
    /// Name in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::Error(_) => "error",
            Self::Timeout => "timeout",
            Self::Unjudged(_) => "unjudged",
        }
    }

    /// Message of the failure, if there is one.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Failed(detail) | Self::Error(detail) | Self::Unjudged(detail) => {
                (!detail.is_empty()).then_some(detail)
            }
            Self::Passed | Self::Timeout => None,
        }
    }

    /// Verdict of the given name.
    pub fn from_name(name: &str, detail: Option<&str>) -> Option<Self> {
        let detail = || detail.unwrap_or_default().to_owned();
        Some(match name {
            "passed" => Self::Passed,
            "failed" => Self::Failed(detail()),
            "error" => Self::Error(detail()),
            "timeout" => Self::Timeout,
            "unjudged" => Self::Unjudged(detail()),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read_back_by_name() {
        for verdict in [
            Verdict::Passed,
            Verdict::Timeout,
            Verdict::Failed("a".to_owned()),
            Verdict::Error(String::new()),
            Verdict::Unjudged("b".to_owned()),
        ] {
            let again = Verdict::from_name(verdict.name(), verdict.detail());
            assert_eq!(again, Some(verdict));
        }
        assert_eq!(Verdict::from_name("other", None), None);
    }
}
