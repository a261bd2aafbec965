//! `frequencies.safetensors`: what a bundle carries so that it can be placed again without the
//! profile and predictors that it was made from. Per layer it has how often each neuron is active, in
//! the order in which they are stored, and what a token reads under the layer's policy.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    ArtifactError, Header, TensorFile,
    plan::Policy,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-frequencies";
/// Newest version read here.
pub const VERSION: u32 = 2;
/// The file's name inside a bundle.
pub const FILE: &str = "frequencies.safetensors";
/// The setting under which the header keeps every layer's figures.
pub const LAYERS_SETTING: &str = "layers";

/// What a piece of work reads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadWork {
    /// Bytes of weights.
    pub bytes: f64,
    /// Rows of matrices that do not follow the one read before.
    pub rows: f64,
    /// Rows that are added to a sum.
    pub sums: f64,
}

/// What placing needs to know of a layer besides its neurons' frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerFigures {
    /// Which neurons are computed.
    pub policy: Policy,
    /// Read before any neuron.
    pub prediction: ReadWork,
    /// Read of every neuron.
    pub every: ReadWork,
    /// Read of a neuron besides, for each token on which it is active.
    pub active: ReadWork,
    /// Memory that finding its neurons takes.
    pub predictor_bytes: u64,
    /// What a token reads of attention's weights.
    pub attention_read_bytes: u64,
}

/// What placing needs to know of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlacing {
    /// What is read.
    pub figures: LayerFigures,
    /// Share of tokens for which each neuron is active, hottest first.
    pub frequencies: Vec<f32>,
}

fn tensor_name(layer: usize) -> String {
    format!("layers.{layer}.frequencies")
}

/// Writes the file at `path`; `header` says who made it, from what.
pub fn write(path: &Path, header: &Header, layers: &[LayerPlacing]) -> Result<(), ArtifactError> {
    let figures: Vec<_> = layers.iter().map(|layer| layer.figures).collect();
    let figures = serde_json::to_value(figures).expect("figures are plain JSON");
    let tensor = |(index, layer): (usize, &LayerPlacing)| {
        let bytes = layer.frequencies.iter().flat_map(|one| one.to_le_bytes());
        let shape = vec![layer.frequencies.len()];
        let source = TensorSource::owned(Dtype::F32, shape, bytes.collect());
        (tensor_name(index), source)
    };
    let tensors: BTreeMap<_, _> = layers.iter().enumerate().map(tensor).collect();
    let header = header.clone().with_setting(LAYERS_SETTING, figures);
    write_tensors(path, Some(&header), &tensors)
}

/// Reads the file at `path`, which must be of a model with so many layers of so many neurons.
pub fn read(
    path: &Path,
    layers: usize,
    neurons: usize,
) -> Result<(Header, Vec<LayerPlacing>), ArtifactError> {
    let file = TensorFile::open(path)?;
    let mut header = file.header(FORMAT, VERSION)?;
    let figures = header.settings.remove(LAYERS_SETTING).unwrap_or_default();
    let figures: Vec<LayerFigures> =
        serde_json::from_value(figures).map_err(|source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        })?;
    if figures.len() != layers {
        return Err(ArtifactError::WrongFormat {
            path: path.to_owned(),
            expected: format!("file with the figures of {layers} layers"),
            found: format!("one with those of {}", figures.len()),
        });
    }
    let read = |(layer, figures): (usize, LayerFigures)| {
        let bytes = file.expect(&tensor_name(layer), Dtype::F32, &[neurons])?;
        let (numbers, _) = bytes.as_chunks::<4>();
        let frequencies = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
        Ok(LayerPlacing {
            figures,
            frequencies: frequencies.collect(),
        })
    };
    let layers = figures.into_iter().enumerate().map(read);
    Ok((header, layers.collect::<Result<_, ArtifactError>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Digest, ModelIdentity};

    fn layers() -> Vec<LayerPlacing> {
        let work = |bytes: f64| ReadWork {
            bytes,
            rows: 0.1,
            sums: 0.2,
        };
        let layer = |policy, first: f32| LayerPlacing {
            figures: LayerFigures {
                policy,
                prediction: work(1.0 / 3.0),
                every: work(0.0),
                active: work(1e9),
                predictor_bytes: u64::MAX,
                attention_read_bytes: 7,
            },
            frequencies: vec![first, 0.1, 0.0],
        };
        vec![layer(Policy::Exact, 1.0), layer(Policy::SignBit, 0.3)]
    }

    #[test]
    fn a_file_reads_back_as_written_and_has_the_same_bytes_again() {
        let folder = tempfile::tempdir().unwrap();
        let model = ModelIdentity {
            name: "m".to_owned(),
            fingerprint: Digest::of(b"m"),
        };
        let header = Header::new(FORMAT, VERSION, model, 3);
        let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
        for path in [&first, &second] {
            write(path, &header, &layers()).unwrap();
        }
        let bytes = |path| std::fs::read(path).unwrap();
        assert_eq!(bytes(&first), bytes(&second));
        assert_eq!(read(&first, 2, 3).unwrap(), (header, layers()));
        let told = read(&first, 3, 3).unwrap_err().to_string();
        assert!(told.contains("3 layers"), "{told}");
        assert!(read(&first, 2, 4).is_err());
    }
}
