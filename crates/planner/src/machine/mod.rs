//! Measures this machine: memory, kernels, the graphics card and its link.

pub(crate) mod gpu;
mod measure;

pub use measure::{Thoroughness, measure, speed_test};

/// Version of the graphics card's driver, or why there is none, in words that fit after a colon.
pub fn gpu_status() -> String {
    match gpu::driver() {
        Err(reason) => reason,
        Ok(driver) => format!("NVIDIA driver {driver}"),
    }
}
