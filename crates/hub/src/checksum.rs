//! Comparison of downloaded bytes with the digest that the hub promises.

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The hub's tag for the content of a file: the SHA-256 of a large file, git's SHA-1 of a small
/// one; other tags are opaque.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Etag(String);

impl Etag {
    /// Parses the header; none if it is empty or not safe as a file name.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let text = header.strip_prefix("W/").unwrap_or(header);
        let text = text.trim_matches('"');
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let is_name = (1..=128).contains(&text.len()) && text.chars().all(plain);
        is_name.then(|| Self(text.to_owned()))
    }

    /// The tag, also the name of the blob in the cache.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Running count and digest of downloaded bytes.
#[derive(Debug)]
pub(crate) struct Checksum {
    etag: Etag,
    size: u64,
    length: u64,
    hasher: Hasher,
}

#[derive(Debug)]
enum Hasher {
    Sha256(Sha256),
    GitSha1(Sha1),
    Unknown,
}

/// A difference between the expected and the downloaded bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) kind: &'static str,
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl Checksum {
    /// A checksum of no bytes, to be compared with `etag` and `size` bytes in the end.
    pub(crate) fn new(etag: &Etag, size: u64) -> Self {
        let digits = etag.as_str().bytes().all(|byte| byte.is_ascii_hexdigit());
        let hasher = match etag.as_str().len() {
            64 if digits => Hasher::Sha256(Sha256::new()),
            // Git digests a header with the length before the file.
            40 if digits => Hasher::GitSha1(Sha1::new_with_prefix(format!("blob {size}\0"))),
            _ => Hasher::Unknown,
        };
        Self {
            etag: etag.clone(),
            size,
            length: 0,
            hasher,
        }
    }

    /// Adds the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        match &mut self.hasher {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::GitSha1(hasher) => hasher.update(bytes),
            Hasher::Unknown => {}
        }
    }

    /// Number of bytes added.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Compares length and digest with those expected.
    pub(crate) fn finish(self) -> Result<(), Mismatch> {
        let mismatch = |kind, expected: String, found: String| {
            if expected.eq_ignore_ascii_case(&found) {
                Ok(())
            } else {
                Err(Mismatch {
                    kind,
                    expected,
                    found,
                })
            }
        };
        mismatch("length", self.size.to_string(), self.length.to_string())?;
        let expected = self.etag.as_str().to_owned();
        match self.hasher {
            Hasher::Sha256(hasher) => mismatch("SHA-256", expected, hex(&hasher.finalize())),
            Hasher::GitSha1(hasher) => mismatch("git SHA-1", expected, hex(&hasher.finalize())),
            Hasher::Unknown => Ok(()),
        }
    }
}

/// Hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(etag: &str, parts: &[&[u8]], size: u64) -> Result<(), Mismatch> {
        let mut checksum = Checksum::new(&Etag::parse(etag).unwrap(), size);
        parts.iter().for_each(|part| checksum.update(part));
        checksum.finish()
    }

    #[test]
    fn digests_are_those_of_sha256sum_and_git_hash_object() {
        let sha256 = "\"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03\"";
        let git = "\"ce013625030ba8dba906f756967f9e9ca394464a\"";
        for etag in [sha256, git, &git.to_uppercase(), "W/\"whatever\""] {
            assert_eq!(check(etag, &[b"hel", b"lo\n"], 6), Ok(()));
            assert_eq!(check(etag, &[b"hello"], 6).unwrap_err().kind, "length");
        }
        assert_eq!(check(sha256, &[b"jello\n"], 6).unwrap_err().kind, "SHA-256");
        assert_eq!(check(git, &[b"jello\n"], 6).unwrap_err().kind, "git SHA-1");
    }

    #[test]
    fn a_tag_is_a_file_name_and_stays_in_its_folder() {
        let long = "a".repeat(129);
        for bad in [
            "", "\"\"", "\"../x\"", "a/b", "..", "a.b", "a\\b", "a\0", &long,
        ] {
            assert_eq!(Etag::parse(bad), None, "{bad}");
        }
        assert_eq!(Etag::parse("W/\"aB-9_\"").unwrap().as_str(), "aB-9_");
    }
}
