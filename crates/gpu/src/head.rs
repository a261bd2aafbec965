//! The head on a device: from the last hidden state to the logits, the most probable token and its embedding.

use std::sync::{Arc, atomic::Ordering};

use powerinfer_kernels::cuda::{
    Buffer, Device, DeviceError, EmbeddingTable, Gpu, GpuLinear, GpuNorm, HostBuffer, HostMatrix,
};

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
    token: HostBuffer,
    scratch: Buffer<u32>,
    embedding: Option<DeviceEmbedding>,
}

/// Embedding of the token that the head has found, so that the next pass starts before the host knows the token.
#[derive(Debug)]
pub struct DeviceEmbedding {
    /// The rows; `None` if they are those of the head.
    pub table: Option<HostMatrix>,
    /// Factor by which every row is multiplied.
    pub scale: f32,
}

/// Contents of the hidden state between passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Embedded {
    /// Nothing that the next pass can use.
    No,
    /// The embedding of the token that the head finds; the host does not know that token yet.
    Launched,
    /// The embedding of this token.
    Token(u32),
}

impl DeviceHead {
    /// Head of the given weights; `project` precedes `head` in models with smaller embeddings. With an `embedding`, the search
    /// also sets the hidden state to the embedding of the token that it finds.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no room for the logits.
    pub fn new(
        norm: Option<GpuNorm>,
        project: Option<GpuLinear>,
        head: GpuLinear,
        embedding: Option<DeviceEmbedding>,
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
            token: HostBuffer::new(device, 1)?,
            scratch: Buffer::new(device, Gpu::ARG_MAX_WORDS)?,
            embedding,
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

    /// Bytes of the embedding's copy in pinned memory; 0 without a copy.
    pub(crate) fn pinned_bytes(&self) -> usize {
        let embedding = self.embedding.as_ref();
        let table = embedding.and_then(|embedding| embedding.table.as_ref());
        table.map_or(0, HostMatrix::bytes)
    }

    /// Sizes in bytes of the weights and of the results.
    pub(crate) fn bytes(&self) -> [usize; 2] {
        let [project, output] = match &self.project {
            Some((linear, output)) => [linear.bytes(), output.bytes()],
            None => [0; 2],
        };
        let results = self.logits.bytes() + self.scratch.bytes();
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
            self.write_hidden_of(batch)?;
            self.run_head()?;
            logits.extend(self.head().logits.to_vec()?);
        }
        Ok(logits)
    }

    /// Starts the search for the largest of the first `vocabulary` logits (the first of equal ones). The logits are those of `hidden`,
    /// `[hidden]`, or, if it is `None`, those of the token that runs. [`found_token`](Self::found_token) returns the result. The hidden
    /// state becomes the embedding of that token, if the device has the embedding.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the head is not on the device.
    pub fn find_largest(
        &mut self,
        hidden: Option<&[f32]>,
        vocabulary: usize,
    ) -> Result<(), DeviceError> {
        match hidden {
            Some(hidden) => self.write_hidden_of(hidden)?,
            None => self.end_segment()?,
        }
        self.run_head()?;
        let head = self.head.as_mut().expect("the head is on the device");
        let all = head.logits.len();
        head.logits.set_len(vocabulary.min(all));
        let launched = (self.gpu).arg_max(&head.logits, &head.token, &mut head.scratch);
        head.logits.set_len(all);
        launched?;
        if let Some(DeviceEmbedding { table, scale }) = &head.embedding {
            let table = match table {
                Some(table) => EmbeddingTable::Host(table),
                None => EmbeddingTable::Device(&head.head.matrix),
            };
            (self.gpu).embed(table, &head.token, *scale, &mut self.state.hidden)?;
            self.embedded = Embedded::Launched;
        }
        Ok(())
    }

    /// The token of the last [`find_largest`](Self::find_largest). Waits for the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the device fails.
    ///
    /// # Panics
    ///
    /// Panics if the head is not on the device.
    pub fn found_token(&mut self) -> Result<u32, DeviceError> {
        self.device().synchronise()?;
        let token = self.head().token.words()[0].load(Ordering::Acquire);
        if self.embedded == Embedded::Launched {
            self.embedded = Embedded::Token(token);
        }
        Ok(token)
    }

    /// Whether the hidden state is the embedding of `token`.
    pub fn has_embedding(&self, token: u32) -> bool {
        self.embedded == Embedded::Token(token)
    }

    /// Sets the hidden states, `[tokens, hidden]`, between passes.
    fn write_hidden_of(&mut self, hidden: &[f32]) -> Result<(), DeviceError> {
        self.set_tokens(hidden.len() / self.shape.hidden);
        self.write_hidden(hidden)
    }

    /// Computes the logits of the hidden states.
    fn run_head(&mut self) -> Result<(), DeviceError> {
        let (tokens, state) = (self.tokens, &self.state);
        let head = self.head.as_mut().expect("the head is on the device");
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
