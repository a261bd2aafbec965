//! Samples of what went into an FFN and which neurons it woke: what predictors learn from.

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

/// Format name in a trace file's header.
pub(crate) const FORMAT: &str = "powerinfer-traces";
/// Newest version of trace files read here.
pub(crate) const VERSION: u32 = 1;

/// Activity of all neurons for a number of tokens, a bit each, lowest bit first; a token begins
/// at a byte.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivityBits {
    neurons: usize,
    bytes: Column<u8>,
}

impl ActivityBits {
    /// Bytes that one token takes.
    pub fn row_bytes(neurons: usize) -> usize {
        neurons.div_ceil(8)
    }

    /// No tokens yet.
    pub fn new(neurons: usize) -> Self {
        Self {
            neurons,
            bytes: Column::default(),
        }
    }

    /// Appends a token's activity: a neuron is active where its value is not zero.
    pub fn push(&mut self, activations: &[f32]) {
        let bits = activations.chunks(8).map(|group| {
            let bits = group.iter().enumerate();
            bits.fold(0u8, |bits, (bit, value)| {
                bits | u8::from(*value != 0.0) << bit
            })
        });
        self.bytes.to_mut().extend(bits);
    }

    /// Appends a token's activity as it is packed elsewhere.
    fn push_packed(&mut self, row: &[u8]) {
        self.bytes.to_mut().extend(row);
    }

    /// A token's activity as it is packed.
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

    /// How many neurons were active on `token`.
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

    /// The neurons that were active on `token`, upwards.
    pub fn active(&self, token: usize) -> impl Iterator<Item = usize> + '_ {
        // Silent neurons are passed by 64 at a time.
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

/// The samples of one part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct TracePart {
    /// Numbers per token.
    pub hidden_size: usize,
    /// FFN inputs after the norm, `[tokens, hidden]`.
    pub inputs: Column<bf16>,
    /// What went into the norm, `[tokens, hidden]`, of the part for judging alone: imported
    /// predictors see this.
    pub residuals: Column<bf16>,
    /// Who fired.
    pub active: ActivityBits,
    /// What each neuron that fired added to the hidden state; empty for models whose neurons all
    /// fire, since nobody learns from who fires there.
    pub contributions: Contributions,
}

/// `|h_i|·‖down_i‖` of the neurons that fired, token after token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Contributions {
    values: Column<bf16>,
    /// Where in the values each token ends.
    ends: Vec<usize>,
}

impl Contributions {
    /// Appends those of a token.
    pub fn push(&mut self, contributions: impl IntoIterator<Item = f32>) {
        self.values
            .to_mut()
            .extend(contributions.into_iter().map(bf16::from_f32));
        self.ends.push(self.values.len());
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Those of `token`, in the order of the neurons that fired.
    fn of(&self, token: usize) -> &[bf16] {
        let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[start..self.ends[token]]
    }
}

impl TracePart {
    /// No samples yet.
    pub fn new(hidden_size: usize, neurons: usize) -> Self {
        Self {
            hidden_size,
            inputs: Column::default(),
            residuals: Column::default(),
            active: ActivityBits::new(neurons),
            contributions: Contributions::default(),
        }
    }

    /// The neurons that fired on `token`, each with what it added, relative to the mean over the
    /// token's neurons; one where that was not sampled.
    pub fn fired(&self, token: usize) -> impl Iterator<Item = (usize, f32)> + '_ {
        let contributions = match self.contributions.is_empty() {
            true => &[][..],
            false => self.contributions.of(token),
        };
        let sum: f32 = contributions.iter().map(|value| value.to_f32()).sum();
        let scale = match sum > 0.0 {
            true => contributions.len() as f32 / sum,
            false => 0.0,
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

    /// The FFN's input for `token`, `[hidden]`.
    pub fn input(&self, token: usize) -> impl Iterator<Item = f32> + '_ {
        self.inputs[token * self.hidden_size..][..self.hidden_size]
            .iter()
            .map(|value| value.to_f32())
    }

    /// What went into the norm for `token`, `[hidden]`; none where that was not sampled.
    pub fn residual(&self, token: usize) -> Option<impl Iterator<Item = f32> + '_> {
        let values = self.residuals.get(token * self.hidden_size..)?;
        let values = values.get(..self.hidden_size)?;
        Some(values.iter().map(|value| value.to_f32()))
    }

    /// How often each neuron fired.
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

    /// The first token with a number that is none, or is infinite.
    pub fn first_not_finite(&self) -> Option<usize> {
        // All bits of the exponent are set in them and in nothing else.
        let spoilt = |values: &[bf16]| {
            let exponents = values.iter().map(|value| value.to_bits() & 0x7f80);
            exponents.fold(0, u16::max) == 0x7f80
        };
        (0..self.tokens()).find(|token| {
            let row = token * self.hidden_size..(token + 1) * self.hidden_size;
            let residual = self.residuals.get(row.clone()).unwrap_or_default();
            let contributions = match self.contributions.is_empty() {
                true => &[][..],
                false => self.contributions.of(*token),
            };
            self.release_after(*token);
            spoilt(&self.inputs[row]) || spoilt(residual) || spoilt(contributions)
        })
    }

    /// Gives the memory of samples that were read from a file back; they can be read again.
    pub fn release(&self) {
        self.inputs.release();
        self.residuals.release();
        self.active.bytes.release();
        self.contributions.values.release();
    }

    /// The same now and then, for who reads one token after the other.
    pub fn release_after(&self, token: usize) {
        const TOKENS: usize = 1 << 10;
        if token % TOKENS == TOKENS - 1 {
            self.release();
        }
    }

    /// Says that tokens are read here and there from now on.
    pub fn advise_random_access(&self) {
        self.inputs.advise_random_access();
    }
}

impl TracePart {
    /// Appends evenly spread samples of `other`, at most `wanted` of them.
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

/// The samples of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Traces {
    /// For training.
    pub training: TracePart,
    /// For judging.
    pub held_out: TracePart,
}

impl Traces {
    /// Format name in the header of their file.
    pub const FORMAT: &str = FORMAT;
    /// Newest version read here.
    pub const VERSION: u32 = VERSION;

    /// No samples yet.
    pub fn new(hidden_size: usize, neurons: usize) -> Self {
        Self {
            training: TracePart::new(hidden_size, neurons),
            held_out: TracePart::new(hidden_size, neurons),
        }
    }

    /// One part.
    pub fn part(&self, part: Part) -> &TracePart {
        match part {
            Part::Training => &self.training,
            Part::HeldOut => &self.held_out,
        }
    }

    /// One part, to be filled.
    pub fn part_mut(&mut self, part: Part) -> &mut TracePart {
        match part {
            Part::Training => &mut self.training,
            Part::HeldOut => &mut self.held_out,
        }
    }

    /// Joins samples of different texts, of each as many as its share of all tokens makes of
    /// `wanted` (per part); `texts` gives the samples of a text and its tokens per part.
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
            // Shares are cut at common edges, so that together they are just what is wanted.
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

    /// Where a profile in `folder` keeps the samples of `layer`.
    pub fn path(folder: &Path, layer: usize) -> PathBuf {
        folder.join(format!("traces/layer-{layer:03}.safetensors"))
    }

    /// Writes the samples.
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

    /// Reads the samples of a layer with these dimensions, which stay in the file until they are
    /// looked at.
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
            // Only held-out tokens have them.
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
