//! Why no CUDA device can be used.

/// Why no CUDA device can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaUnavailable {
    /// The driver library is missing.
    #[error("no NVIDIA driver is installed on this machine")]
    NoDriver,
    /// The driver library lacks a function.
    #[error("the NVIDIA driver lacks `{function}`; install version 550 or newer")]
    MissingFunction {
        /// The first missing function.
        function: &'static str,
    },
    /// The driver fails to initialise.
    #[error("the NVIDIA driver fails to initialise: {reason}")]
    Initialisation {
        /// Error code of the driver.
        reason: String,
    },
    /// The driver is too old for the PTX of the kernels.
    #[error(
        "the NVIDIA driver supports CUDA {found}, the kernels need {needed}; install version 550 or newer"
    )]
    DriverTooOld {
        /// CUDA version that the driver supports.
        found: String,
        /// CUDA version that the kernels need.
        needed: String,
    },
    /// There is no device with this index.
    #[error("the NVIDIA driver sees {count} devices, index {index} was requested")]
    NoDevice {
        /// Number of devices.
        count: usize,
        /// Requested index, from 0.
        index: usize,
    },
    /// The device is older than the target of the kernels.
    #[error("{name} has compute capability {found}, the kernels need {needed}")]
    ComputeCapability {
        /// Name of the device.
        name: String,
        /// Its compute capability.
        found: String,
        /// The compute capability that the kernels need.
        needed: String,
    },
    /// A module of kernels does not load.
    #[error("{name} cannot load the kernels of `{module}`: {reason}")]
    ModuleLoad {
        /// Name of the device.
        name: String,
        /// Name of the module.
        module: String,
        /// Error code and log of the driver.
        reason: String,
    },
}
