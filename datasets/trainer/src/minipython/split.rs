//! Which combinations are trained on, which calibrate, and which are kept unseen.

use sha2::{Digest, Sha256};

/// Which part of the task space a combination belongs to.
///
/// Decided by a hash of the combination alone, so neither names nor phrasing nor the seed can
/// move a combination from one part to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Split {
    /// Nine combinations in ten: the model is trained on these.
    Training,
    /// One in twenty: profiles and predictors are calibrated on these.
    Calibration,
    /// One in twenty: examinations draw from these only.
    HeldOut,
}

impl Split {
    /// The part that `combination` belongs to.
    pub(crate) fn of(combination: &str) -> Self {
        let digest = Sha256::digest(combination.as_bytes());
        match u16::from_be_bytes([digest[0], digest[1]]) % 20 {
            0 => Self::HeldOut,
            1 => Self::Calibration,
            _ => Self::Training,
        }
    }
}
