//! Errors in the choice of an instruction set.

/// An instruction set that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// There is no instruction set with this name.
    #[error(
        "unknown instruction set `{name}`, expected one of scalar, avx2, avx512, avx512-vnni, neon"
    )]
    UnknownIsa {
        /// Requested name.
        name: String,
    },
    /// The processor lacks the instruction set.
    #[error("this processor does not support `{name}`, it supports {available}")]
    UnsupportedIsa {
        /// Requested name.
        name: String,
        /// Names of the supported instruction sets.
        available: String,
    },
}
