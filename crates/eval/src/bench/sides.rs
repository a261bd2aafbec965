//! What a device and the host beside it take for a token, layer by layer, beside what the plan predicts.

use std::time::Duration;

use anyhow::Result;
use powerinfer_artifact::plan::Plan;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{Runtime, SideTimes};
use serde::Serialize;

use crate::output::{Table, percent};

/// Tokens that are timed, and those that come before, so that all is recorded and in the caches.
const TOKENS: usize = 16;
const BEFORE: usize = 4;

/// A layer, or all of them: microseconds a token.
#[derive(Debug, Serialize)]
struct LayerSides {
    gpu_microseconds: f64,
    cpu_microseconds: f64,
    waiting_microseconds: f64,
    planned_gpu_microseconds: f64,
    planned_cpu_microseconds: f64,
    planned_sync_microseconds: f64,
}

/// What a side reads for the layers of a token.
#[derive(Debug, Clone, Copy, Serialize)]
struct Reading {
    bytes_per_token: f64,
    /// While it works.
    bytes_per_second: Option<f64>,
    /// As measured in the same run.
    read_bandwidth: Option<f64>,
    bandwidth_share: Option<f64>,
}

impl Reading {
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

    /// In words.
    fn told(self) -> String {
        let mut told = format!("{:.1} MB a token", self.bytes_per_token / 1e6);
        if let Some(speed) = self.bytes_per_second {
            told += &format!(" at {:.1} GB/s", speed / 1e9);
        }
        if let (Some(share), Some(most)) = (self.bandwidth_share, self.read_bandwidth) {
            told += &format!(
                ", {} of the {:.1} GB/s measured",
                percent(share),
                most / 1e9
            );
        }
        told
    }
}

/// What both sides take.
#[derive(Debug, Serialize)]
pub(super) struct Sides {
    tokens: u64,
    /// Share of the computed neurons that were computed on the GPU.
    gpu_share_of_computed_neurons: f64,
    gpu: Reading,
    cpu: Reading,
    total: LayerSides,
    layers: Vec<LayerSides>,
}

/// Times decoding on both sides; none where everything runs on the CPU, whose memory is read so fast.
pub(super) fn measure(
    model: &mut Runtime,
    ids: &[u32],
    cpu_read_bandwidth: f64,
) -> Result<Option<Sides>> {
    if !model.uses_device() {
        return Ok(None);
    }
    model.reset();
    let ids = &ids[..ids.len().min(BEFORE + TOKENS)];
    let (before, timed) = ids.split_at(BEFORE.min(ids.len()));
    for id in before {
        model.forward_last(&[*id])?;
    }
    model.take_side_times(true);
    for id in timed {
        model.forward_last(&[*id])?;
    }
    let times = model.take_side_times(false);
    model.reset();
    let bandwidths = [model.device_read_bandwidth()?, Some(cpu_read_bandwidth)];
    Ok(times.map(|times| Sides::new(&times, model.bundle().plan(), bandwidths)))
}

impl Sides {
    /// `bandwidths` are those of the GPU and of the CPU.
    fn new(times: &SideTimes, plan: &Plan, bandwidths: [Option<f64>; 2]) -> Self {
        let tokens = times.tokens.max(1) as f64;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / tokens;
        let layers = times.layers.iter().zip(&plan.layers);
        let layers: Vec<LayerSides> = layers
            .map(|(found, planned)| LayerSides {
                gpu_microseconds: each(found.device),
                cpu_microseconds: each(found.host),
                waiting_microseconds: each(found.waiting),
                planned_gpu_microseconds: planned.gpu_microseconds,
                planned_cpu_microseconds: planned.cpu_microseconds,
                planned_sync_microseconds: planned.sync_microseconds,
            })
            .collect();
        let sum = |figure: fn(&LayerSides) -> f64| layers.iter().map(figure).sum();
        let total = LayerSides {
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
            gpu: Reading::new(of_gpu, total.gpu_microseconds, bandwidths[0]),
            cpu: Reading::new(of_cpu, total.cpu_microseconds, bandwidths[1]),
            total,
            layers,
        }
    }

    /// A row a layer.
    pub(super) fn table(&self) -> Table {
        let mut table = Table::new(&[
            "layer",
            "GPU µs",
            "planned",
            "CPU µs",
            "planned",
            "waiting µs",
            "planned",
        ]);
        let rows = self.layers.iter().enumerate();
        let rows = rows.map(|(index, layer)| (index.to_string(), layer));
        for (name, layer) in rows.chain([("all".to_owned(), &self.total)]) {
            let figures = [
                layer.gpu_microseconds,
                layer.planned_gpu_microseconds,
                layer.cpu_microseconds,
                layer.planned_cpu_microseconds,
                layer.waiting_microseconds,
                layer.planned_sync_microseconds,
            ];
            let figures = figures.map(|figure| format!("{figure:.1}"));
            table.row([&[name][..], &figures].concat());
        }
        table
    }

    /// The GPU's half in a line.
    pub(super) fn describe_gpu(&self) -> String {
        format!(
            "{} of the computed neurons, {}; kernels of layers without a synchronisation between them count to the last",
            percent(self.gpu_share_of_computed_neurons),
            self.gpu.told()
        )
    }

    /// The CPU's half in a line.
    pub(super) fn describe_cpu(&self) -> String {
        self.cpu.told()
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::plan::Policy;
    use powerinfer_runtime::LayerTimes;

    use super::*;

    #[test]
    fn layers_add_up_beside_what_was_planned() {
        let mut plan = Plan::unplaced(2, 8, Policy::Exact, 16);
        plan.layers[1].gpu_microseconds = 7.0;
        let layer = |device, host| LayerTimes {
            device: Duration::from_micros(device),
            host: Duration::from_micros(host),
            waiting: Duration::from_micros(3),
        };
        let times = SideTimes {
            tokens: 2,
            layers: vec![layer(10, 4), layer(20, 0)],
            neurons_on_device: 3,
            neurons: 4,
            device_bytes: 3_000_000,
            host_bytes: 8_000,
        };
        let sides = Sides::new(&times, &plan, [Some(200e9), None]);
        assert_eq!(sides.total.gpu_microseconds, 15.0);
        assert_eq!(sides.total.cpu_microseconds, 2.0);
        assert_eq!(sides.total.waiting_microseconds, 3.0);
        assert_eq!(sides.total.planned_gpu_microseconds, 7.0);
        let table = sides.table().to_string();
        assert_eq!(table.lines().count(), 4, "{table}");
        assert!(
            sides.describe_gpu().starts_with(
                "75.0 % of the computed neurons, 1.5 MB a token at 100.0 GB/s, 50.0 % of the 200.0 GB/s measured;"
            ),
            "{}",
            sides.describe_gpu()
        );
        assert_eq!(sides.describe_cpu(), "0.0 MB a token at 2.0 GB/s");
    }
}
