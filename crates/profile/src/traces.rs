//! Samples of FFN inputs and of the neurons they activate: the training data of predictors.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use half::bf16;
use powerinfer_artifact::{
    ArtifactError, Header, TensorFile,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};

use crate::{Column, Part, samples::Sampling};

/// Format name in the header of a trace file.
pub(crate) const FORMAT: &str = "powerinfer-traces";
/// Newest version of trace files that can be read.
pub(crate) const VERSION: u32 = 1;

/// Activity of neurons per token: one bit per neuron, least significant bit first; each token starts at a byte.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivityBits {
    neurons: usize,
    bytes: Column<u8>,
}

impl ActivityBits {
    /// Bytes per token.
    pub fn row_bytes(neurons: usize) -> usize {
        neurons.div_ceil(8)
    }

    /// An empty table.
    pub fn new(neurons: usize) -> Self {
        Self {
            neurons,
            bytes: Column::default(),
        }
    }

    /// Appends a token; a neuron is active if its value is not zero.
    pub fn push(&mut self, activations: &[f32]) {
        let bits = activations.chunks(8).map(|group| {
            let bits = group.iter().enumerate();
            bits.fold(0u8, |bits, (bit, value)| {
                bits | u8::from(*value != 0.0) << bit
            })
        });
        self.bytes.to_mut().extend(bits);
    }

    /// Appends the packed activity of a token.
    fn push_packed(&mut self, row: &[u8]) {
        self.bytes.to_mut().extend(row);
    }

    /// Packed activity of a token.
    fn packed(&self, token: usize) -> &[u8] {
        let row = Self::row_bytes(self.neurons);
        &self.bytes[token * row..][..row]
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.bytes
            .len()
            .checked_div(Self::row_bytes(self.neurons))
            .unwrap_or(0)
    }

    /// Number of neurons that were active on `token`.
    pub fn count(&self, token: usize) -> usize {
        let row = self.packed(token).iter();
        row.map(|byte| byte.count_ones() as usize).sum()
    }

    /// Number of neurons.
    pub fn neurons(&self) -> usize {
        self.neurons
    }

    /// Whether `neuron` was active on `token`.
    pub fn is_active(&self, token: usize, neuron: usize) -> bool {
        self.bytes[token * Self::row_bytes(self.neurons) + neuron / 8] >> (neuron % 8) & 1 == 1
    }

    /// Neurons that were active on `token`, ascending.
    pub fn active(&self, token: usize) -> impl Iterator<Item = usize> + '_ {
        // Inactive neurons are skipped 64 at a time.
        let words = self.packed(token).chunks(8).enumerate();
        let neurons = words.flat_map(|(index, bytes)| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let mut bits = u64::from_le_bytes(word);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(64 * index + bit)
            })
        });
        neurons.take_while(|neuron| *neuron < self.neurons)
    }
}

/// Samples of one part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct TracePart {
    /// Hidden size of the model.
    pub hidden_size: usize,
    /// FFN inputs after the norm, `[tokens, hidden]`.
    pub inputs: Column<bf16>,
    /// Inputs of the norm, `[tokens, hidden]`, in the held-out part only: the input of imported predictors.
    pub residuals: Column<bf16>,
    /// Activity of the neurons.
    pub active: ActivityBits,
    /// Contributions of the active neurons; empty for models without exact zeros, which have no predictors.
    pub contributions: Contributions,
}

/// `|h_i|·‖down_i‖` of the active neurons of each token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Contributions {
    values: Column<bf16>,
    /// End of each token's values.
    ends: Vec<usize>,
}

impl Contributions {
    /// Appends the contributions of a token.
    pub fn push(&mut self, contributions: impl IntoIterator<Item = f32>) {
        self.values
            .to_mut()
            .extend(contributions.into_iter().map(bf16::from_f32));
        self.ends.push(self.values.len());
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Contributions of `token`, in the order of its active neurons.
    fn of(&self, token: usize) -> &[bf16] {
        let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[start..self.ends[token]]
    }
}

impl TracePart {
    /// Empty samples.
    pub fn new(hidden_size: usize, neurons: usize) -> Self {
        Self {
            hidden_size,
            inputs: Column::default(),
            residuals: Column::default(),
            active: ActivityBits::new(neurons),
            contributions: Contributions::default(),
        }
    }

    /// Active neurons of `token` with their contributions, relative to the mean over the token's active neurons; 1 if
    /// contributions were not sampled.
    pub fn active(&self, token: usize) -> impl Iterator<Item = (usize, f32)> + '_ {
        let contributions = if self.contributions.is_empty() {
            &[][..]
        } else {
            self.contributions.of(token)
        };
        let sum: f32 = contributions.iter().map(|value| value.to_f32()).sum();
        let scale = if sum > 0.0 {
            contributions.len() as f32 / sum
        } else {
            0.0
        };
        let neurons = self.active.active(token).enumerate();
        neurons.map(move |(index, neuron)| {
            let relative = contributions.get(index).filter(|_| scale > 0.0);
            (neuron, relative.map_or(1.0, |value| value.to_f32() * scale))
        })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.active.tokens()
    }

    /// FFN input of `token`, `[hidden]`.
    pub fn input(&self, token: usize) -> impl Iterator<Item = f32> + '_ {
        self.inputs[token * self.hidden_size..][..self.hidden_size]
            .iter()
            .map(|value| value.to_f32())
    }

    /// Norm input of `token`, `[hidden]`; `None` if it was not sampled.
    pub fn residual(&self, token: usize) -> Option<impl Iterator<Item = f32> + '_> {
        let values = self.residuals.get(token * self.hidden_size..)?;
        let values = values.get(..self.hidden_size)?;
        Some(values.iter().map(|value| value.to_f32()))
    }

    /// Number of tokens on which each neuron was active.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.active.neurons()];
        for token in 0..self.tokens() {
            for neuron in self.active.active(token) {
                counts[neuron] += 1;
            }
            self.release_after(token);
        }
        counts
    }

    /// First token with a NaN or infinite value.
    pub fn first_not_finite(&self) -> Option<usize> {
        // NaN and infinity are the values with all exponent bits set.
        let has_not_finite = |values: &[bf16]| {
            let exponents = values.iter().map(|value| value.to_bits() & 0x7f80);
            exponents.fold(0, u16::max) == 0x7f80
        };
        (0..self.tokens()).find(|token| {
            let row = token * self.hidden_size..(token + 1) * self.hidden_size;
            let residual = self.residuals.get(row.clone()).unwrap_or_default();
            let contributions = if self.contributions.is_empty() {
                &[][..]
            } else {
                self.contributions.of(*token)
            };
            self.release_after(*token);
            has_not_finite(&self.inputs[row])
                || has_not_finite(residual)
                || has_not_finite(contributions)
        })
    }

    /// Releases the pages of mapped samples; they are read again on access.
    pub fn release(&self) {
        self.inputs.release();
        self.residuals.release();
        self.active.bytes.release();
        self.contributions.values.release();
    }

    /// [`Self::release`] every 1024 tokens, for sequential reads.
    pub fn release_after(&self, token: usize) {
        const TOKENS: usize = 1 << 10;
        if token % TOKENS == TOKENS - 1 {
            self.release();
        }
    }

    /// Advises the system of random access to the inputs.
    pub fn advise_random_access(&self) {
        self.inputs.advise_random_access();
    }
}

impl TracePart {
    /// Appends at most `wanted` samples of `other`, evenly spread.
    fn take_from(&mut self, other: &Self, wanted: usize) {
        let sampling = Sampling {
            wanted,
            total: other.tokens(),
            first: 0,
        };
        for token in (0..other.tokens()).filter(|token| sampling.takes(*token)) {
            let row = token * self.hidden_size..(token + 1) * self.hidden_size;
            self.inputs.to_mut().extend(&other.inputs[row.clone()]);
            if let Some(residual) = other.residuals.get(row) {
                self.residuals.to_mut().extend(residual);
            }
            self.active.push_packed(other.active.packed(token));
            if !other.contributions.is_empty() {
                let contributions = other.contributions.of(token).iter();
                self.contributions
                    .push(contributions.map(|value| value.to_f32()));
            }
            other.release_after(token);
        }
    }
}

/// Samples of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Traces {
    /// Samples for training.
    pub training: TracePart,
    /// Samples for evaluation.
    pub held_out: TracePart,
}

impl Traces {
    /// Format name in the file header.
    pub const FORMAT: &str = FORMAT;
    /// Newest version that can be read.
    pub const VERSION: u32 = VERSION;

    /// Empty samples.
    pub fn new(hidden_size: usize, neurons: usize) -> Self {
        Self {
            training: TracePart::new(hidden_size, neurons),
            held_out: TracePart::new(hidden_size, neurons),
        }
    }

    /// Samples of a part.
    pub fn part(&self, part: Part) -> &TracePart {
        match part {
            Part::Training => &self.training,
            Part::HeldOut => &self.held_out,
        }
    }

    /// Mutable samples of a part.
    pub fn part_mut(&mut self, part: Part) -> &mut TracePart {
        match part {
            Part::Training => &mut self.training,
            Part::HeldOut => &mut self.held_out,
        }
    }

    /// Joins samples of several texts in proportion to their tokens, `wanted` in total per part. `texts` holds the samples
    /// and the tokens per part of each text.
    pub(crate) fn join(
        hidden_size: usize,
        neurons: usize,
        texts: &[(Self, [usize; 2])],
        wanted: [usize; 2],
    ) -> Self {
        let mut all = Self::new(hidden_size, neurons);
        for part in Part::ALL {
            let index = part as usize;
            let total: usize = texts.iter().map(|(_, tokens)| tokens[index]).sum();
            let wanted = wanted[index].min(total) as u128;
            let mut before = 0u128;
            // Cumulative rounding, so that the shares add up to `wanted`.
            let edge = |tokens: u128| (tokens * wanted / total.max(1) as u128) as usize;
            for (traces, tokens) in texts {
                let after = before + tokens[index] as u128;
                let share = edge(after) - edge(before);
                all.part_mut(part).take_from(traces.part(part), share);
                before = after;
            }
        }
        all
    }

    /// Path of the samples of `layer` in a profile folder.
    pub fn path(folder: &Path, layer: usize) -> PathBuf {
        folder.join(format!("traces/layer-{layer:03}.safetensors"))
    }

    /// Writes the samples to a safetensors file.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, path: &Path, header: &Header) -> Result<(), ArtifactError> {
        let mut tensors = BTreeMap::new();
        for part in Part::ALL {
            let (samples, name) = (self.part(part), part.name());
            let (tokens, neurons) = (samples.tokens(), samples.active.neurons());
            for (what, values) in [
                ("inputs", &samples.inputs),
                ("residuals", &samples.residuals),
            ] {
                if values.len() == tokens * samples.hidden_size {
                    let shape = vec![tokens, samples.hidden_size];
                    let bytes = bytemuck::cast_slice(&values[..]);
                    tensors.insert(
                        format!("{name}.{what}"),
                        TensorSource::borrowed(Dtype::BF16, shape, bytes),
                    );
                }
            }
            if !samples.contributions.is_empty() {
                let values = &samples.contributions.values;
                tensors.insert(
                    format!("{name}.contributions"),
                    TensorSource::borrowed(
                        Dtype::BF16,
                        vec![values.len()],
                        bytemuck::cast_slice(&values[..]),
                    ),
                );
            }
            let shape = vec![tokens, ActivityBits::row_bytes(neurons)];
            tensors.insert(
                format!("{name}.active"),
                TensorSource::borrowed(Dtype::U8, shape, &samples.active.bytes),
            );
        }
        write_tensors(path, Some(header), &tensors)
    }

    /// Maps the samples of a layer with these dimensions; pages are read on access.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has other dimensions.
    pub fn read(
        path: &Path,
        hidden_size: usize,
        neurons: usize,
    ) -> Result<(Self, Header), ArtifactError> {
        let file = Arc::new(TensorFile::open(path)?);
        let header = file.header(FORMAT, VERSION)?;
        let mut traces = Self::new(hidden_size, neurons);
        for part in Part::ALL {
            let name = part.name();
            let (inputs, active) = (format!("{name}.inputs"), format!("{name}.active"));
            let tokens = file
                .find(&inputs)
                .and_then(|view| view.shape.first().copied())
                .unwrap_or(0);
            let values = |tensor: &str| -> Result<Column<bf16>, ArtifactError> {
                Column::mapped(&file, tensor, Dtype::BF16, &[tokens, hidden_size])
            };
            // Only the held-out part has residuals.
            let residuals = format!("{name}.residuals");
            let residuals = match file.find(&residuals) {
                Some(_) => values(&residuals)?,
                None => Column::default(),
            };
            let shape = [tokens, ActivityBits::row_bytes(neurons)];
            let active = ActivityBits {
                neurons,
                bytes: Column::mapped(&file, &active, Dtype::U8, &shape)?,
            };
            let name = format!("{name}.contributions");
            let contributions = match file.find(&name) {
                None => Contributions::default(),
                Some(_) => {
                    let mut end = 0;
                    let ends = (0..active.tokens()).map(|token| {
                        end += active.count(token);
                        end
                    });
                    let ends: Vec<usize> = ends.collect();
                    Contributions {
                        values: Column::mapped(&file, &name, Dtype::BF16, &[end])?,
                        ends,
                    }
                }
            };
            *traces.part_mut(part) = TracePart {
                hidden_size,
                inputs: values(&inputs)?,
                residuals,
                active,
                contributions,
            };
            traces.part(part).release();
        }
        Ok((traces, header))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packed_activity_reads_back(rows in prop::collection::vec(prop::collection::vec(prop::bool::ANY, 75), 0..9)) {
            let mut bits = ActivityBits::new(75);
            for row in &rows {
                bits.push(&row.iter().map(|active| f32::from(u8::from(*active)) * -0.5).collect::<Vec<_>>());
            }
            prop_assert_eq!(bits.tokens(), rows.len());
            for (token, row) in rows.iter().enumerate() {
                let active: Vec<usize> = bits.active(token).collect();
                let expected: Vec<usize> = (0..75).filter(|neuron| row[*neuron]).collect();
                prop_assert_eq!(bits.count(token), active.len());
                prop_assert_eq!(active, expected);
                for (neuron, active) in row.iter().enumerate() {
                    prop_assert_eq!(bits.is_active(token, neuron), *active);
                }
            }
        }
    }
}
