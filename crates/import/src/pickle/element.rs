//! Element types of storages.

/// Element type of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    F16,
    Bf16,
    /// Integers and Booleans: buffers, never weights.
    Other(&'static str),
}

impl Element {
    /// Size of an element in bytes.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::Other("LongStorage") => 8,
            Self::F32 | Self::Other("IntStorage") => 4,
            Self::F16 | Self::Bf16 | Self::Other("ShortStorage") => 2,
            Self::Other(_) => 1,
        }
    }

    /// Returns the element type of a storage class of PyTorch.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "FloatStorage" => Self::F32,
            "DoubleStorage" => Self::F64,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::Bf16,
            "LongStorage" => Self::Other("LongStorage"),
            "IntStorage" => Self::Other("IntStorage"),
            "ShortStorage" => Self::Other("ShortStorage"),
            "CharStorage" => Self::Other("CharStorage"),
            "ByteStorage" => Self::Other("ByteStorage"),
            "BoolStorage" => Self::Other("BoolStorage"),
            _ => return None,
        })
    }
}
