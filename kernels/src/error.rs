//! Errors of choosing an instruction set.

/// Why an instruction set was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
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
