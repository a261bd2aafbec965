//! Content digests: BLAKE3, because it runs at memory bandwidth; `b3sum` computes the same.

use std::{fmt, fs::File, io::Read, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ArtifactError;

/// BLAKE3 digest, displayed as `b3:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Computes the digest of `bytes`.
    pub fn from_content(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Computes the digest of the file at `path`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Read`].
    pub fn of_file(path: &Path) -> Result<Self, ArtifactError> {
        // Read, not mapped: a bundle larger than memory must not evict other pages.
        let mut file = File::open(path).map_err(ArtifactError::read(path))?;
        let mut digest = DigestBuilder::default();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(ArtifactError::read(path))? {
                0 => return Ok(digest.finish()),
                length => digest.add(&buffer[..length]),
            }
        }
    }

    /// Computes the digest of several byte strings; it depends on where each one ends.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the first 64 bits, from which seeds are derived.
    pub fn leading_bits(&self) -> u64 {
        self.0[..8]
            .iter()
            .fold(0, |bits, byte| bits << 8 | u64::from(*byte))
    }
}

/// Incremental digest of one byte string; it does not depend on how the bytes are split.
#[derive(Debug, Clone, Default)]
pub struct DigestBuilder(blake3::Hasher);

impl DigestBuilder {
    /// Appends `bytes`.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest of all bytes so far.
    pub fn finish(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("b3:")?;
        self.0
            .iter()
            .try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "a digest is `b3:` and 64 hexadecimal digits in lower case";
        let digits = text.strip_prefix("b3:").ok_or(WRONG)?.as_bytes();
        // Upper case would let a flipped bit pass.
        let is_digit = |digit: &u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        if digits.len() != 64 || !digits.iter().all(is_digit) {
            return Err(WRONG);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| WRONG)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| WRONG)?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_parse_round_trip() {
        let digest = Digest::from_content(b"neuron");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert!("b3:+1".parse::<Digest>().is_err());
        let upper = format!("b3:{}", digest.to_string()[3..].to_uppercase());
        assert!(upper.parse::<Digest>().is_err());
    }

    #[test]
    fn digests_depend_on_the_ends_of_byte_strings() {
        assert_ne!(
            Digest::of_parts([&b"ab"[..], b"c"]),
            Digest::of_parts([&b"a"[..], b"bc"])
        );
    }
}
