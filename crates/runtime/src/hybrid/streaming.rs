//! Cold neurons of a prompt on the device: where many tokens share the way, copying their weights there costs less than
//! computing them here.
//!
//! ```text
//! copy     cold · bytes of a neuron / PCIe
//! compute  tokens · the lesser of what the plan predicts for one
//!                            and  2 · cold · weights of a neuron / operations per second
//! ```

use std::sync::Arc;

use powerinfer_artifact::plan::{LayerPlan, Plan};
use powerinfer_bundle::memory::PREFILL_BATCH;
use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Ffn, GpuLinear, GpuMatrix};

use super::{DeviceChoice, DeviceLayer};
use crate::linear::Linear;

/// Neurons that are copied, and then multiplied, at a time.
pub(super) const PIECE: usize = 1024;

/// From how many tokens on the cold neurons of `layer` are copied, by the speeds that `plan` was made with; none where
/// that never pays, or where the device cannot choose among them.
pub(super) fn least_tokens(plan: &Plan, of_plan: &LayerPlan, layer: &DeviceLayer) -> Option<usize> {
    let (gpu, ffn) = (plan.hardware.gpu.as_ref()?, layer.ffn.as_ref()?);
    let cold = of_plan.neuron_count.checked_sub(of_plan.hot_count)?;
    // Numbers of each neuron that a rule needs are there for the hot ones alone.
    let is_chosen_here = !matches!(
        ffn.choice,
        DeviceChoice::ByContribution { .. } | DeviceChoice::ByGate(_, Some(_))
    );
    if cold == 0 || !is_chosen_here {
        return None;
    }
    let bytes = cold as f64 * of_plan.neuron_bytes as f64;
    let copy = gpu.pcie_latency_seconds + bytes / gpu.pcie_bandwidth_bytes_per_second;
    let matrices = 2 + usize::from(ffn.ffn.up.is_some());
    let products = 2.0 * (cold * matrices * ffn.ffn.down.columns()) as f64;
    let operations = plan.hardware.cpu.operations_per_second;
    let at_once = operations.map_or(f64::INFINITY, |speed| products / speed);
    let computing = at_once.min(of_plan.cpu_microseconds * 1e-6);
    // Of no number of tokens where computing takes no time.
    let least = (copy / computing).ceil();
    (least <= PREFILL_BATCH as f64).then_some((least as usize).max(2))
}

/// Room for neurons like those of `ffn`, of which a layer has `most` that are cold.
pub(super) fn room(device: &Arc<dyn Device>, ffn: &Ffn, most: usize) -> Result<Ffn, DeviceError> {
    let rows = most.min(PIECE);
    let matrix = |like: &GpuMatrix| GpuMatrix::room(device, like.format(), rows, like.columns());
    let linear = |like: &GpuLinear| -> Result<GpuLinear, DeviceError> {
        let bias = like.bias.as_ref().map(|_| Buffer::new(device, rows));
        Ok(GpuLinear {
            matrix: matrix(&like.matrix)?,
            bias: bias.transpose()?,
        })
    };
    Ok(Ffn {
        gate: linear(&ffn.gate)?,
        up: ffn.up.as_ref().map(linear).transpose()?,
        down: matrix(&ffn.down)?,
        bias: None,
        kind: ffn.kind,
        activation: ffn.activation,
    })
}

/// Bytes that a piece takes.
pub(super) fn bytes(piece: &Ffn) -> usize {
    let up = piece.up.as_ref().map_or(0, GpuLinear::bytes);
    piece.gate.bytes() + up + piece.down.bytes()
}

/// Where the cold neurons of a layer lie here.
#[derive(Clone, Copy)]
pub(crate) struct ColdWeights<'a> {
    pub(crate) gate: Linear<'a>,
    pub(crate) up: Option<Linear<'a>>,
    pub(crate) down: Linear<'a>,
}

impl ColdWeights<'_> {
    /// Copies the neurons from `first` on to `piece`, as many as it takes; returns how many they are.
    pub(super) fn copy(&self, first: usize, piece: &mut Ffn) -> Result<usize, DeviceError> {
        let neurons = self.down.matrix.rows();
        let rows = first..neurons.min(first + piece.down.capacity());
        let linear = |from: &Linear<'_>, to: &mut GpuLinear| -> Result<(), DeviceError> {
            to.matrix.write(&from.matrix.rows_range(rows.clone()))?;
            match (&mut to.bias, from.bias) {
                (Some(to), Some(from)) => to.write(&from[rows.clone()]),
                _ => Ok(()),
            }
        };
        linear(&self.gate, &mut piece.gate)?;
        if let (Some(from), Some(to)) = (&self.up, &mut piece.up) {
            linear(from, to)?;
        }
        piece
            .down
            .write(&self.down.matrix.rows_range(rows.clone()))?;
        Ok(rows.len())
    }
}
