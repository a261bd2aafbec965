//! Errors of shapes and format names.

use crate::{CacheFormat, Format};

/// Why a matrix or the name of a format was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The length of a plane does not fit the shape.
    #[error(
        "{format} matrix of {rows} x {columns}: `{plane}` holds {found} entries, expected {expected}"
    )]
    PlaneLength {
        /// Format of the matrix.
        format: Format,
        /// Which plane: `values`, `quants` or `scales`.
        plane: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
        /// Entries required by the shape.
        expected: usize,
        /// Entries given.
        found: usize,
    },
    /// The length of the signs does not fit the shape.
    #[error("signs of {rows} x {columns} numbers cannot be {bytes} bytes")]
    Signs {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// No weight format has this name.
    #[error("unknown weight format `{name}`, expected one of {}", Format::names())]
    UnknownFormat {
        /// The name given.
        name: String,
    },
    /// No format of the KV cache has this name.
    #[error(
        "unknown KV cache format `{name}`, expected one of {}",
        CacheFormat::names()
    )]
    UnknownCacheFormat {
        /// The name given.
        name: String,
    },
}
