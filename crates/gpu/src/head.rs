//! The head on a device: from the last hidden state to logits and the most probable token.

use std::sync::Arc;

use powerinfer_kernels::cuda::{Buffer, Device, DeviceError, Gpu, GpuLinear, GpuNorm};

use crate::{DeviceModel, layer::norm_bytes};

/// Final norm, projections and logits.
#[derive(Debug)]
pub struct DeviceHead {
    norm: Option<GpuNorm>,
    /// Projection to the embedding's size, and its output.
    project: Option<(GpuLinear, Buffer<f32>)>,
    head: GpuLinear,
    logits: Buffer<f32>,
    /// Token with the largest logit, and scratch space of the search.
    token: Buffer<u32>,
    scratch: Buffer<u32>,
}

impl DeviceHead {
    /// Head of the given weights; `project` precedes `head` in models with smaller embeddings.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for the logits.
    pub fn new(
        norm: Option<GpuNorm>,
        project: Option<GpuLinear>,
        head: GpuLinear,
        gpu: &Gpu,
    ) -> Result<Self, DeviceError> {
        let device = gpu.device();
        let with_output = |linear: GpuLinear| -> Result<_, DeviceError> {
            let output = Buffer::new(device, linear.matrix.rows())?;
            Ok((linear, output))
        };
        Ok(Self {
            norm,
            project: project.map(with_output).transpose()?,
            logits: Buffer::new(device, head.matrix.rows())?,
            head,
            token: Buffer::new(device, 1)?,
            scratch: Buffer::new(device, Gpu::ARG_MAX_WORDS)?,
        })
    }

    /// Bytes of the results of a token.
    pub(crate) fn bytes_per_token(&self) -> usize {
        let project = self.project.as_ref();
        let projected = project.map_or(0, |(linear, _)| linear.matrix.rows());
        (projected + self.head.matrix.rows()) * size_of::<f32>()
    }

    /// Makes room for the logits of `tokens` tokens.
    pub(crate) fn allocate(
        &mut self,
        tokens: usize,
        device: &Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let logits = Buffer::new(device, tokens * self.head.matrix.rows())?;
        if let Some((linear, output)) = &mut self.project {
            *output = Buffer::new(device, tokens * linear.matrix.rows())?;
        }
        self.logits = logits;
        Ok(())
    }

    /// Sizes in bytes of the weights and of the results.
    pub(crate) fn bytes(&self) -> [usize; 2] {
        let [project, output] = match &self.project {
            Some((linear, output)) => [linear.bytes(), output.bytes()],
            None => [0; 2],
        };
        let results = self.logits.bytes() + self.token.bytes() + self.scratch.bytes();
        [
            norm_bytes(&self.norm) + project + self.head.bytes(),
            output + results,
        ]
    }
}

impl DeviceModel {
    /// Whether logits are computed on the device.
    pub fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Logits of hidden states `[tokens, hidden]`: `[tokens, vocabulary]`.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the head is not on the device.
    pub fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let mut logits = Vec::new();
        for batch in hidden.chunks(self.batch_tokens() * self.shape.hidden) {
            self.run_head(batch)?;
            logits.extend(self.head().logits.to_vec()?);
        }
        Ok(logits)
    }

    /// Computes the logits of hidden states, `[tokens, hidden]` of at most a batch, and keeps them on the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the head is not on the device.
    pub fn run_head(&mut self, hidden: &[f32]) -> Result<(), DeviceError> {
        let tokens = hidden.len() / self.shape.hidden;
        self.set_tokens(tokens);
        let state = &mut self.state;
        let head = self.head.as_mut().expect("the head is on the device");
        state.hidden.write(hidden)?;
        head.logits.set_len(tokens * head.head.matrix.rows());
        let norm = head.norm.as_ref();
        let (x, norm) = match &mut head.project {
            Some((project, out)) => {
                out.set_len(tokens * project.matrix.rows());
                self.gpu
                    .project(&state.hidden, norm, &mut [(&*project, &mut *out)], false)?;
                (&*out, None)
            }
            None => (&state.hidden, norm),
        };
        self.gpu
            .project(x, norm, &mut [(&head.head, &mut head.logits)], false)
    }

    /// Index of the largest of the first `vocabulary` logits of [`run_head`](Self::run_head), the first of equal ones.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the head is not on the device.
    pub fn largest_logit(&mut self, vocabulary: usize) -> Result<u32, DeviceError> {
        let head = self.head.as_mut().expect("the head is on the device");
        let all = head.logits.len();
        head.logits.set_len(vocabulary.min(all));
        let launched = (self.gpu).arg_max(&head.logits, &mut head.token, &mut head.scratch);
        head.logits.set_len(all);
        launched?;
        Ok(head.token.to_vec()?[0])
    }

    /// Bytes of weights that the head reads for the logits of `tokens` tokens; 0 if it is not on the device.
    pub fn head_bytes_read(&self, tokens: usize) -> u64 {
        let passes = tokens.div_ceil(self.batch_tokens());
        self.head.as_ref().map_or(0, |head| {
            let project = head.project.as_ref();
            let project = project.map_or(0, |(linear, _)| linear.bytes());
            (passes * (head.head.bytes() + project)) as u64
        })
    }

    fn head(&self) -> &DeviceHead {
        self.head.as_ref().expect("the head is on the device")
    }
}
