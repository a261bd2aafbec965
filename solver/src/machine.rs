//! How long a device takes for a piece of work: its bytes over its bandwidth, and what its rows and
//! kernels cost beside.

use powerinfer_artifact::{hardware::Hardware, plan::Device};

use crate::{Work, cost::Cost};

/// What work costs on each side of a machine.
pub(crate) struct Machine<'a>(pub(crate) &'a Hardware);

impl Machine<'_> {
    /// `device` reads `bytes` of whole matrices, while the other one waits.
    pub(crate) fn serial(&self, device: Device, bytes: f64, kernels: f64) -> Cost {
        let work = Work {
            bytes,
            ..Work::default()
        };
        self.work(device, work, kernels)
    }

    /// What the CPU does for a layer at home on it beside matrices; on a GPU it is part of kernels.
    pub(crate) fn layer(&self, layer_device: Device) -> Cost {
        let seconds = match layer_device {
            Device::Cpu => self.0.cpu.layer_seconds,
            Device::Gpu => 0.0,
        };
        Cost {
            cpu: seconds,
            total: seconds,
            ..Cost::default()
        }
    }

    /// What the CPU does for a token beside matrices and layers, whoever does the rest.
    pub(crate) fn token(&self) -> Cost {
        let seconds = self.0.cpu.token_seconds;
        Cost {
            cpu: seconds,
            total: seconds,
            ..Cost::default()
        }
    }

    /// `device` does `work`, while the other one waits.
    pub(crate) fn work(&self, device: Device, work: Work, kernels: f64) -> Cost {
        let bytes = work.bytes;
        match (device, &self.0.gpu) {
            (Device::Gpu, Some(gpu)) => {
                let seconds = bytes / gpu.read_bandwidth_bytes_per_second
                    + kernels * gpu.kernel_launch_seconds;
                Cost {
                    gpu: seconds,
                    total: seconds,
                    ..Cost::default()
                }
            }
            _ => {
                let cpu = &self.0.cpu;
                let seconds = bytes / cpu.read_bandwidth_bytes_per_second
                    + work.rows * cpu.row_seconds
                    + work.sums * cpu.sum_row_seconds
                    + kernels * cpu.kernel_seconds;
                Cost {
                    cpu: seconds,
                    total: seconds,
                    ..Cost::default()
                }
            }
        }
    }
}
