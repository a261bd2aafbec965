//! What can be wrong with weights, or with a choice of instruction set.

use crate::{CacheFormat, Format};

/// Why a matrix, a format or an instruction set was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A plane of weights has not the length that the shape asks for.
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
        /// Entries that the shape asks for.
        expected: usize,
        /// Entries that were given.
        found: usize,
    },
    /// Signs have not the length that the shape asks for.
    #[error("signs of {rows} x {columns} numbers cannot be {bytes} bytes")]
    Signs {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
        /// Bytes that were given.
        bytes: usize,
    },
    /// No weight format has this name.
    #[error("unknown weight format `{name}`, expected one of {}", Format::names())]
    UnknownFormat {
        /// The name that was given.
        name: String,
    },
    /// No format of the KV cache has this name.
    #[error(
        "unknown KV cache format `{name}`, expected one of {}",
        CacheFormat::names()
    )]
    UnknownCacheFormat {
        /// The name that was given.
        name: String,
    },
    /// No instruction set has this name.
    #[error(
        "unknown instruction set `{name}`, expected one of scalar, avx2, avx512, avx512-vnni, neon"
    )]
    UnknownIsa {
        /// The name that was given.
        name: String,
    },
    /// The instruction set exists, but not on this processor.
    #[error("this processor has no `{name}`, it has {available}")]
    UnsupportedIsa {
        /// The name that was given.
        name: String,
        /// Names of the instruction sets that this processor has.
        available: String,
    },
}
