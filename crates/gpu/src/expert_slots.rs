//! Replacing experts on a device while a model runs: an expert is copied to the rows of another one while kernels run.

use std::ops::Range;

use powerinfer_kernels::cuda::{DeviceError, Router, StagingStream};

use crate::{ColdNeurons, DeviceFfn, DeviceModel};

/// Number of the staging stream for experts; those of prompts are 0 to 2.
const STAGING: usize = 3;
/// Maximum number of planes and biases of an expert: three matrices of three planes, two biases.
const PLANES: usize = 11;

/// Replacing experts. The rows of an expert are first [cleared](Self::set_expert), then [copied to](Self::copy_expert), and assigned to
/// another expert after [`finish_expert_copies`](Self::finish_expert_copies). Passes that multiply expert by expert, or that copy cold
/// neurons, need the experts of the plan.
///
/// # Errors
///
/// All methods return an error if the device fails.
///
/// # Panics
///
/// All methods panic if the layer has no experts on the device or fewer rows.
#[expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "stated once for all methods"
)]
impl DeviceModel {
    /// Allocates pinned memory for copies of up to `experts` experts with `bytes` bytes in all at a time.
    pub fn allocate_expert_copies(
        &mut self,
        experts: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let staging = StagingStream::new(self.device(), STAGING, experts * PLANES, bytes)?;
        self.expert_copies = Some(staging);
        Ok(())
    }

    /// Sets the expert whose neurons are at `rows` of layer `index`; `None` if these rows are not computed.
    pub fn set_expert(
        &mut self,
        index: usize,
        rows: &Range<usize>,
        expert: Option<u16>,
    ) -> Result<(), DeviceError> {
        let ffn = self.layers[index].ffn.as_mut();
        let ffn = ffn.expect("experts are on the device");
        let router: &mut Router = ffn.router.as_mut().expect("a router");
        let block = expert.unwrap_or(router.block_count as u16);
        router.blocks.write_at(rows.start, &vec![block; rows.len()])
    }

    /// Begins copies, once the kernels launched so far have finished.
    pub fn begin_expert_copies(&mut self) -> Result<(), DeviceError> {
        self.staging().begin()
    }

    /// Starts to copy `rows` of the neurons in `from` to the rows of layer `index` that begin at `first`; no kernel computes them until
    /// [`finish_expert_copies`](Self::finish_expert_copies).
    pub fn copy_expert(
        &mut self,
        index: usize,
        first: usize,
        from: &ColdNeurons<'_>,
        rows: &Range<usize>,
    ) -> Result<(), DeviceError> {
        let Self {
            layers,
            expert_copies,
            ..
        } = self;
        let staging = expert_copies.as_mut().expect("memory for copies");
        let found: Option<&mut DeviceFfn> = layers[index].ffn.as_mut();
        let ffn = &mut found.expect("experts are on the device").ffn;
        let copy = from.copy;
        let (matrix, bias) = from.gate;
        let gate = (
            matrix.rows_range(rows.clone()),
            bias.map(|bias| &bias[rows.clone()]),
        );
        ffn.gate.write_rows_async(first, gate, staging, copy)?;
        if let (Some(to), Some((matrix, bias))) = (&mut ffn.up, from.up) {
            let up = (
                matrix.rows_range(rows.clone()),
                bias.map(|bias| &bias[rows.clone()]),
            );
            to.write_rows_async(first, up, staging, copy)?;
        }
        let down = from.down.rows_range(rows.clone());
        ffn.down.write_rows_async(first, &down, staging, copy)
    }

    /// Waits until all copies have ended; kernels launched from here on read them.
    pub fn finish_expert_copies(&mut self) -> Result<(), DeviceError> {
        let device = std::sync::Arc::clone(self.device());
        self.staging().end()?;
        device.synchronise_copies(STAGING)
    }

    fn staging(&mut self) -> &mut StagingStream {
        self.expert_copies.as_mut().expect("memory for copies")
    }
}
