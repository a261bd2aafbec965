//! Finds the resource that limits the speed of a layer.

use powerinfer_artifact::plan::Limit;

use crate::{Problem, cost, placement::Placement};

/// Copies of a problem's machine in each of which one resource takes no time.
pub(crate) struct Relieved(Vec<(Limit, Problem)>);

impl Relieved {
    pub(crate) fn new(problem: &Problem) -> Self {
        let with = |limit: Limit| {
            let mut machine = problem.without_layers();
            let (cpu, gpu) = (&mut machine.hardware.cpu, &mut machine.hardware.gpu);
            match (limit, gpu) {
                (Limit::CpuMemory, _) => cpu.read_bandwidth_bytes_per_second = f64::INFINITY,
                (Limit::Kernels, gpu) => {
                    (cpu.kernel_seconds, cpu.layer_seconds) = (0.0, 0.0);
                    (cpu.row_seconds, cpu.sum_row_seconds) = (0.0, 0.0);
                    if let Some(gpu) = gpu {
                        gpu.kernel_launch_seconds = 0.0;
                    }
                }
                (Limit::GpuMemory, Some(gpu)) => {
                    gpu.read_bandwidth_bytes_per_second = f64::INFINITY;
                }
                (Limit::SyncCost, Some(gpu)) => {
                    (gpu.sync_seconds, gpu.pcie_latency_seconds) = (0.0, 0.0);
                    gpu.pcie_bandwidth_bytes_per_second = f64::INFINITY;
                }
                (_, None) => {}
            }
            (limit, machine)
        };
        let limits = [
            Limit::CpuMemory,
            Limit::GpuMemory,
            Limit::SyncCost,
            Limit::Kernels,
        ];
        Self(limits.map(with).into())
    }

    /// The resource that limits layer `index`: the one without which the layer is the fastest.
    pub(crate) fn limit(&self, problem: &Problem, placement: &Placement, index: usize) -> Limit {
        let mut least = (f64::INFINITY, Limit::CpuMemory);
        for (limit, machine) in &self.0 {
            let seconds = cost::layer_on(machine, problem, placement, index).total;
            if seconds < least.0 {
                least = (seconds, *limit);
            }
        }
        least.1
    }
}
