//! Human-readable sizes: `24G` and `24GiB` are 24·2³⁰ bytes, `24GB` is 24·10⁹ (as in GNU). Only 0 needs no unit.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Number of bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Creates a size of `count` GiB.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }
}

/// Error of parsing a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ByteSizeError {
    /// The text is not a number followed by a unit.
    #[error(
        "`{0}` is not a size; write a number and a unit, such as `24G`, `24GiB` (2³⁰ bytes each) or `24GB` (10⁹)"
    )]
    Malformed(String),
    /// The number has no unit, and is not 0.
    #[error("`{0}` has no unit; did you mean `{0}G`? Bytes are `{0}B`")]
    NoUnit(String),
    /// The size exceeds 2⁶⁴−1 bytes.
    #[error("`{0}` exceeds the largest size, 2⁶⁴−1 bytes")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let malformed = || ByteSizeError::Malformed(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number: f64 = number.parse().map_err(|_| malformed())?;
        let unit = unit.trim_start().to_ascii_uppercase();
        if unit.is_empty() && number != 0.0 {
            return Err(ByteSizeError::NoUnit(trimmed.to_owned()));
        }
        let (prefix, base) = match unit.strip_suffix('B') {
            None => (unit.as_str(), 1024f64),
            Some(prefix) => match prefix.strip_suffix('I') {
                Some("") => return Err(malformed()),
                Some(prefix) => (prefix, 1024.0),
                None => (prefix, 1000.0),
            },
        };
        let power = match prefix {
            "" => 0,
            "K" => 1,
            "M" => 2,
            "G" => 3,
            "T" => 4,
            _ => return Err(malformed()),
        };
        let bytes = number * base.powi(power);
        if bytes >= u64::MAX as f64 {
            return Err(ByteSizeError::TooLarge(text.to_owned()));
        }
        Ok(Self(bytes.round() as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        if self.0 < 1024 {
            return formatter.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        formatter.pad(&format!("{value:.1} {}", UNITS[unit]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_follow_gnu() {
        for (text, bytes) in [
            ("0", 0),
            ("24G", 24 << 30),
            ("24GiB", 24 << 30),
            ("24g", 24 << 30),
            ("24GB", 24_000_000_000),
            ("1.5K", 1536),
            ("512 MiB", 512 << 20),
            ("7B", 7),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in [
            "", "24X", "G", "-1G", "1..2G", "inf", "NaN", "1e9", "24GiBB", "24IB",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert_eq!(
            "24".parse::<ByteSize>().unwrap_err().to_string(),
            "`24` has no unit; did you mean `24G`? Bytes are `24B`"
        );
        assert!(matches!(
            "99999999T".parse::<ByteSize>(),
            Err(ByteSizeError::TooLarge(_))
        ));
    }

    proptest! {
        #[test]
        fn display_round_trips_within_its_precision(bytes in 0u64..1 << 60) {
            let shown = ByteSize(bytes).to_string();
            let read = shown.parse::<ByteSize>().unwrap().0;
            prop_assert!(read.abs_diff(bytes) as f64 <= 0.051 * (bytes as f64).max(1.0), "{}", shown);
        }
    }
}
