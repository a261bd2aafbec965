//! Errors of hardware files.

use std::path::PathBuf;

use crate::Hint;

/// Error of a hardware file or of one of its values.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HardwareError {
    /// A size or speed is below one, infinite or NaN.
    #[error("hardware `{hardware}`: `{field}` is {value}, it must be a number of 1 or more")]
    NotPositive {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the key.
        field: String,
        /// Its value.
        value: f64,
    },
    /// A value is so large that sums and times would overflow.
    #[error("hardware `{hardware}`: `{field}` is {value:e}, it must be at most {most:e}")]
    TooLarge {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the key.
        field: String,
        /// Its value.
        value: f64,
        /// Largest accepted value.
        most: f64,
    },
    /// A delay is negative, infinite or NaN.
    #[error("hardware `{hardware}`: `{field}` is {value}, it must be 0 or more")]
    Negative {
        /// Name of the machine.
        hardware: String,
        /// Dotted name of the key.
        field: String,
        /// Its value.
        value: f64,
    },
    /// More device memory is free than exists.
    #[error(
        "hardware `{hardware}`: `gpu.free_bytes` is {free}, more than `gpu.vram_bytes` with {total}"
    )]
    FreeExceedsTotal {
        /// Name of the machine.
        hardware: String,
        /// Free bytes.
        free: u64,
        /// Size of device memory in bytes.
        total: u64,
    },
    /// The file cannot be read.
    #[error("cannot read `{path}`: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Message of the operating system.
        reason: String,
    },
    /// The file does not describe a machine.
    #[error("`{path}` does not describe a machine: {reason}")]
    NotHardware {
        /// The file.
        path: PathBuf,
        /// Line, column and field.
        reason: String,
    },
    /// The file name does not end in `.toml` or `.json`.
    #[error("`{path}` ends in neither `.toml` nor `.json`; name the file after its format")]
    UnknownExtension {
        /// The file.
        path: PathBuf,
    },
}

impl HardwareError {
    /// Returns the remedy, if it is a command or flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::NotPositive { .. }
            | Self::TooLarge { .. }
            | Self::Negative { .. }
            | Self::FreeExceedsTotal { .. } => Some(Hint::MeasureHardware),
            Self::NotHardware { .. } => Some(Hint::WriteHardwareFile),
            Self::Read { .. } | Self::UnknownExtension { .. } => None,
        }
    }
}
