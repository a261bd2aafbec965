//! `frequencies.safetensors`: inputs of the planner, kept in a bundle so that it can be re-planned
//! without the profile and predictors it was made from: per layer the activation frequency of each neuron
//! (in storage order), and what a token reads under the layer's policy.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    ArtifactError, Header, TensorFile,
    layer_mode::LayerMode,
    mapped_file::FileBytes,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-frequencies";
/// Version that this program reads and writes.
pub const VERSION: u32 = 2;
/// File name inside a bundle.
pub const FILE: &str = "frequencies.safetensors";
/// Header setting with the [`LayerCosts`] of all layers.
pub const LAYERS_SETTING: &str = "layers";

/// Costs of a layer under its policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCosts {
    /// The policy and what a token reads under it.
    #[serde(flatten)]
    pub mode: LayerMode,
    /// Memory of the predictor, signs or scores.
    pub predictor_bytes: u64,
    /// Bytes of attention weights read per token.
    pub attention_read_bytes: u64,
}

/// Planner inputs of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerInputs {
    /// Costs under the layer's policy.
    pub costs: LayerCosts,
    /// Activation frequency of each neuron, in descending order.
    pub frequencies: Vec<f32>,
    /// In a mixture of experts, entry `n` is the share of selections with a reuse distance below `n` (`[experts + 1]`); empty if unknown.
    pub expert_hits: Vec<f32>,
}

fn tensor_name(layer: usize) -> String {
    format!("layers.{layer}.frequencies")
}

/// The optional tensor of [`LayerInputs::expert_hits`].
fn hits_name(layer: usize) -> String {
    format!("layers.{layer}.expert_hits")
}

/// Writes the file at `path`.
///
/// # Errors
///
/// [`ArtifactError::Write`].
#[expect(clippy::missing_panics_doc, reason = "costs are plain JSON")]
pub fn write(path: &Path, header: &Header, layers: &[LayerInputs]) -> Result<(), ArtifactError> {
    let costs: Vec<_> = layers.iter().map(|layer| layer.costs).collect();
    let costs = serde_json::to_value(costs).expect("costs are plain JSON");
    let tensor = |name: String, numbers: &[f32]| {
        let bytes = numbers.iter().flat_map(|one| one.to_le_bytes());
        let source = TensorSource::owned(Dtype::F32, vec![numbers.len()], bytes.collect());
        (name, source)
    };
    let mut tensors = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        tensors.extend([tensor(tensor_name(index), &layer.frequencies)]);
        if !layer.expert_hits.is_empty() {
            tensors.extend([tensor(hits_name(index), &layer.expert_hits)]);
        }
    }
    let header = header.clone().with_setting(LAYERS_SETTING, costs);
    write_tensors(path, Some(&header), &tensors)
}

/// Parses `bytes`, the file of a model with `layers` layers of `neurons` neurons; `path` is for messages.
///
/// # Errors
///
/// The bytes have another format or version, or belong to other dimensions.
pub fn parse(
    path: &Path,
    bytes: FileBytes,
    layers: usize,
    neurons: usize,
) -> Result<(Header, Vec<LayerInputs>), ArtifactError> {
    let file = TensorFile::from_bytes(path, bytes)?;
    let mut header = file.header(FORMAT, VERSION)?;
    let costs = header.settings.remove(LAYERS_SETTING).unwrap_or_default();
    let costs: Vec<LayerCosts> =
        serde_json::from_value(costs).map_err(|source| ArtifactError::NotJson {
            path: path.to_owned(),
            source,
        })?;
    if costs.len() != layers {
        return Err(ArtifactError::WrongFormat {
            path: path.to_owned(),
            expected: format!("file with the costs of {layers} layers"),
            found: format!("one with the costs of {}", costs.len()),
        });
    }
    let read = |(layer, costs): (usize, LayerCosts)| {
        let floats = |name: &str, length: usize| {
            let bytes = file.expect(name, Dtype::F32, &[length])?;
            let (values, _) = bytes.as_chunks::<4>();
            let values = values.iter().map(|bytes| f32::from_le_bytes(*bytes));
            Ok::<Vec<f32>, ArtifactError>(values.collect())
        };
        let hits = hits_name(layer);
        Ok(LayerInputs {
            costs,
            frequencies: floats(&tensor_name(layer), neurons)?,
            expert_hits: match file.find(&hits) {
                Some(found) => floats(&hits, found.bytes.len() / size_of::<f32>())?,
                None => Vec::new(),
            },
        })
    };
    let layers = costs.into_iter().enumerate().map(read);
    Ok((header, layers.collect::<Result<_, ArtifactError>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Digest, ModelIdentity, layer_mode::ReadCost, plan::Policy};

    fn layers() -> Vec<LayerInputs> {
        let work = |bytes: f64| ReadCost {
            bytes,
            scattered_rows: 0.1,
            axpy_rows: 0.2,
        };
        let layer = |policy, first: f32| LayerInputs {
            costs: LayerCosts {
                mode: LayerMode {
                    policy,
                    prediction: work(1.0 / 3.0),
                    per_neuron: work(0.0),
                    per_active_neuron: work(1e9),
                },
                predictor_bytes: u64::MAX,
                attention_read_bytes: 7,
            },
            frequencies: vec![first, 0.1, 0.0],
            expert_hits: match policy {
                Policy::Exact => Vec::new(),
                _ => vec![0.0, 0.75],
            },
        };
        vec![layer(Policy::Exact, 1.0), layer(Policy::SignBit, 0.3)]
    }

    #[test]
    fn writing_is_deterministic_and_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let model = ModelIdentity {
            name: "m".to_owned(),
            fingerprint: Digest::from_content(b"m"),
        };
        let header = Header::new(FORMAT, VERSION, model, 3);
        let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
        for path in [&first, &second] {
            write(path, &header, &layers()).unwrap();
        }
        let bytes = |path| std::fs::read(path).unwrap();
        assert_eq!(bytes(&first), bytes(&second));
        let read = |layers, neurons| {
            let bytes = FileBytes::open(&first).unwrap();
            parse(&first, bytes, layers, neurons)
        };
        assert_eq!(read(2, 3).unwrap(), (header, layers()));
        let error = read(3, 3).unwrap_err().to_string();
        assert!(error.contains("3 layers"), "{error}");
        assert!(read(2, 4).is_err());
    }

    #[test]
    fn costs_are_one_flat_object_without_other_keys() {
        let json = serde_json::to_string(&layers()[0].costs).unwrap();
        let read =
            |first: &str| format!(r#"{{"bytes":{first},"scattered_rows":0.1,"axpy_rows":0.2}}"#);
        let expected = format!(
            r#"{{"policy":"exact","prediction":{},"per_neuron":{},"per_active_neuron":{},"predictor_bytes":18446744073709551615,"attention_read_bytes":7}}"#,
            read("0.3333333333333333"),
            read("0.0"),
            read("1000000000.0")
        );
        assert_eq!(json, expected);
        let parsed: LayerCosts = serde_json::from_str(&json).unwrap();
        assert_eq!(parsed, layers()[0].costs);
        for more in [
            json.replacen('{', r#"{"more":1,"#, 1),
            json.replace(r#"{"bytes""#, r#"{"more":1,"bytes""#),
        ] {
            let error = serde_json::from_str::<LayerCosts>(&more).unwrap_err();
            assert!(
                error.to_string().contains("unknown field `more`"),
                "{error}"
            );
        }
    }
}
