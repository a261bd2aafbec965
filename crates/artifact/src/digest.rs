//! Content digests: BLAKE3, because it reads at the speed of memory; `b3sum` checks them.

use std::{fmt, fs::File, io::Read, path::Path, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ArtifactError;

/// The BLAKE3 digest of some bytes, shown as `b3:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The digest of the file at `path`.
    pub fn of_file(path: &Path) -> Result<Self, ArtifactError> {
        // Read, not mapped: a bundle larger than memory should not fill it.
        let mut file = File::open(path).map_err(ArtifactError::read(path))?;
        let mut digest = DigestBuilder::default();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece).map_err(ArtifactError::read(path))? {
                0 => return Ok(digest.finish()),
                length => digest.add(&piece[..length]),
            }
        }
    }

    /// The digest of several byte strings; their boundaries count.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The first 64 bits as a number, for seeds derived from content.
    pub fn leading_bits(&self) -> u64 {
        self.0[..8]
            .iter()
            .fold(0, |bits, byte| bits << 8 | u64::from(*byte))
    }
}

/// A digest of bytes that come in pieces; where one ends does not count.
#[derive(Debug, Clone, Default)]
pub struct DigestBuilder(blake3::Hasher);

impl DigestBuilder {
    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them.
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
        const WRONG: &str = "a digest is `b3:` and 64 hexadecimal digits";
        let digits = text.strip_prefix("b3:").ok_or(WRONG)?.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
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
    fn text_form_reads_back() {
        let digest = Digest::of(b"neuron");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert!("b3:+1".parse::<Digest>().is_err());
    }

    #[test]
    fn boundaries_between_parts_count() {
        assert_ne!(
            Digest::of_parts([&b"ab"[..], b"c"]),
            Digest::of_parts([&b"a"[..], b"bc"])
        );
    }
}
