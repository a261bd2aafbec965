//! Time of the device and of the host per token, layer by layer, next to the plan's estimate.

use std::time::Duration;

use powerinfer_artifact::plan::Plan;
use powerinfer_runtime::{PassTimes, SingleSession, Wanted};
use serde::Serialize;

use crate::EvalError;

/// Tokens that are timed.
const TOKENS: usize = 16;
/// Tokens before them, to record graphs and fill caches.
const WARM_UP: usize = 4;

/// Time of a layer, or of all, in microseconds per token.
#[derive(Debug, Serialize)]
pub struct HybridLayer {
    /// The device's computation.
    pub gpu_microseconds: f64,
    /// The host's computation.
    pub cpu_microseconds: f64,
    /// The host's wait for the device.
    pub waiting_microseconds: f64,
    /// The plan's estimate of the device's computation.
    pub planned_gpu_microseconds: f64,
    /// The plan's estimate of the host's computation.
    pub planned_cpu_microseconds: f64,
    /// The plan's estimate of host–device synchronisation.
    pub planned_sync_microseconds: f64,
}

/// Memory traffic of the device or of the host, over all layers.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadRate {
    /// Bytes read per token, without the head.
    pub bytes_per_token: f64,
    /// Bytes read over the time of computation.
    pub bytes_per_second: Option<f64>,
    /// Read bandwidth measured in the same run, in bytes per second.
    pub read_bandwidth: Option<f64>,
    /// Achieved fraction of that bandwidth.
    pub bandwidth_share: Option<f64>,
}

impl ReadRate {
    fn new(bytes_per_token: f64, microseconds: f64, read_bandwidth: Option<f64>) -> Self {
        let bytes_per_second =
            (microseconds > 0.0).then(|| bytes_per_token / (microseconds * 1e-6));
        let shared = bytes_per_second.zip(read_bandwidth);
        Self {
            bytes_per_token,
            bytes_per_second,
            read_bandwidth,
            bandwidth_share: shared.map(|(speed, most)| speed / most),
        }
    }
}

/// Times of device and host.
#[derive(Debug, Serialize)]
pub struct HybridTimes {
    /// Tokens timed.
    pub tokens: u64,
    /// Share of the computed neurons that were computed on the GPU.
    pub gpu_share_of_computed_neurons: f64,
    /// Memory traffic of the GPU.
    pub gpu: ReadRate,
    /// Memory traffic of the CPU.
    pub cpu: ReadRate,
    /// Sum over the layers.
    pub total: HybridLayer,
    /// One entry per layer.
    pub layers: Vec<HybridLayer>,
}

/// Times decoding of `ids` on device and host; none if everything runs on the CPU.
///
/// `cpu_read_bandwidth` is in bytes per second.
///
/// # Errors
///
/// Fails if the model does.
pub fn time_hybrid(
    model: &mut SingleSession,
    ids: &[u32],
    cpu_read_bandwidth: f64,
) -> Result<Option<HybridTimes>, EvalError> {
    if !model.uses_device() {
        return Ok(None);
    }
    let SingleSession { engine, session } = model;
    session.truncate(0);
    let ids = &ids[..ids.len().min(WARM_UP + TOKENS)];
    let (warm_up, timed) = ids.split_at(WARM_UP.min(ids.len()));
    for id in warm_up {
        engine.prefill(session, &[*id], Wanted::Last)?;
    }
    engine.take_pass_times(true);
    for id in timed {
        engine.prefill(session, &[*id], Wanted::Last)?;
    }
    let times = engine.take_pass_times(false);
    session.truncate(0);
    let bandwidths = [engine.device_read_bandwidth()?, Some(cpu_read_bandwidth)];
    Ok(times.map(|times| HybridTimes::new(&times, engine.bundle().plan(), bandwidths)))
}

impl HybridTimes {
    /// Times relative to `plan`; `bandwidths` are those of GPU and CPU.
    fn new(times: &PassTimes, plan: &Plan, bandwidths: [Option<f64>; 2]) -> Self {
        let tokens = times.tokens.max(1) as f64;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / tokens;
        let layers = times.layers.iter().zip(&plan.layers);
        let layers: Vec<HybridLayer> = layers
            .map(|(found, planned)| HybridLayer {
                gpu_microseconds: each(found.device),
                cpu_microseconds: each(found.host),
                waiting_microseconds: each(found.waiting),
                planned_gpu_microseconds: planned.gpu_microseconds,
                planned_cpu_microseconds: planned.cpu_microseconds,
                planned_sync_microseconds: planned.sync_microseconds,
            })
            .collect();
        let sum = |figure: fn(&HybridLayer) -> f64| layers.iter().map(figure).sum();
        let total = HybridLayer {
            gpu_microseconds: sum(|layer| layer.gpu_microseconds),
            cpu_microseconds: sum(|layer| layer.cpu_microseconds),
            waiting_microseconds: sum(|layer| layer.waiting_microseconds),
            planned_gpu_microseconds: sum(|layer| layer.planned_gpu_microseconds),
            planned_cpu_microseconds: sum(|layer| layer.planned_cpu_microseconds),
            planned_sync_microseconds: sum(|layer| layer.planned_sync_microseconds),
        };
        let read = |bytes: u64| bytes as f64 / tokens;
        let (of_gpu, of_cpu) = (read(times.device_bytes), read(times.host_bytes));
        Self {
            tokens: times.tokens,
            gpu_share_of_computed_neurons: times.device_share(),
            gpu: ReadRate::new(of_gpu, total.gpu_microseconds, bandwidths[0]),
            cpu: ReadRate::new(of_cpu, total.cpu_microseconds, bandwidths[1]),
            total,
            layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;
    use powerinfer_runtime::LayerTimes;

    use super::*;

    #[test]
    fn layers_add_up_next_to_the_plan() {
        let mut plan = Plan::unplaced(2, 8, Policy::Exact, 16);
        plan.layers[1].gpu_microseconds = 7.0;
        let layer = |device, host| LayerTimes {
            device: Duration::from_micros(device),
            host: Duration::from_micros(host),
            waiting: Duration::from_micros(3),
        };
        let times = PassTimes {
            tokens: 2,
            layers: vec![layer(10, 4), layer(20, 0)],
            neurons_on_device: 3,
            neurons: 4,
            device_bytes: 3_000_000,
            host_bytes: 8_000,
        };
        let found = HybridTimes::new(&times, &plan, [Some(200e9), None]);
        assert_eq!(found.total.gpu_microseconds, 15.0);
        assert_eq!(found.total.cpu_microseconds, 2.0);
        assert_eq!(found.total.waiting_microseconds, 3.0);
        assert_eq!(found.total.planned_gpu_microseconds, 7.0);
        assert_eq!(found.layers.len(), 2);
        assert_eq!(found.gpu_share_of_computed_neurons, 0.75);
        let gpu = found.gpu;
        assert_eq!(gpu.bytes_per_token, 1.5e6);
        assert!((gpu.bytes_per_second.unwrap() - 100e9).abs() < 1.0);
        assert!((gpu.bandwidth_share.unwrap() - 0.5).abs() < 1e-9);
        assert!((found.cpu.bytes_per_second.unwrap() - 2e9).abs() < 1.0);
        assert_eq!(found.cpu.bandwidth_share, None);
    }
}
