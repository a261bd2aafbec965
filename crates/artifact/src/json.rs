//! Parsing of JSON that was written by people or other programs.

use serde::de::DeserializeOwned;

/// Parses JSON, which may begin with a byte-order mark.
///
/// # Errors
///
/// The bytes are not JSON in UTF-8, or not of type `T`.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes))
}
