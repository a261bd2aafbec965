//! Time of a computation on a device: its bytes over the read bandwidth, plus a cost per row, per accumulated
//! row and per kernel.

use powerinfer_artifact::{hardware::Hardware, plan::Device};

use crate::{Work, cost::Cost};

/// Cost of computations on the devices of a machine.
pub(crate) struct Machine<'a>(pub(crate) &'a Hardware);

impl Machine<'_> {
    /// Cost of reading `bytes` of whole matrices on `device`, while the other device waits.
    pub(crate) fn serial(&self, device: Device, bytes: f64, kernels: f64) -> Cost {
        let work = Work {
            bytes,
            ..Work::default()
        };
        self.work(device, work, kernels)
    }

    /// Cost of a layer apart from matrices, where the hidden state is on the CPU; on a GPU it is part of the
    /// kernels.
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

    /// Cost of a token on the CPU apart from matrices and layers.
    pub(crate) fn token(&self) -> Cost {
        let seconds = self.0.cpu.token_seconds;
        Cost {
            cpu: seconds,
            total: seconds,
            ..Cost::default()
        }
    }

    /// Cost of `work` on `device`, while the other device waits.
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
