//! What an interrupted profile needs to go on: the counts of the layers that are done, and the
//! hidden states that go into the next.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use candle_core::{Device, Tensor};
use powerinfer_artifact::{
    Header, TensorFile,
    tensor_file::{Dtype, TensorSource, write_tensors},
};

use crate::{LayerActivity, ProfileError};

const FORMAT: &str = "powerinfer-profile-state";

/// The state between two layers.
pub(crate) struct State {
    pub(crate) activities: Vec<LayerActivity>,
    /// One `[tokens, hidden]` tensor a sequence.
    pub(crate) hidden: Vec<Tensor>,
}

fn path(folder: &Path) -> PathBuf {
    folder.join("state.safetensors")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Saves the state into `folder`.
pub(crate) fn save(folder: &Path, header: &Header, state: &State) -> Result<(), ProfileError> {
    let mut tensors = BTreeMap::new();
    let mut put = |name: String, dtype, shape, bytes: Vec<u8>| {
        tensors.insert(
            name,
            TensorSource::<ProfileError>::owned(dtype, shape, bytes),
        );
    };
    for (layer, activity) in state.activities.iter().enumerate() {
        let neurons = vec![activity.active.len()];
        let active = activity
            .active
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect();
        put(
            format!("{layer:04}.active"),
            Dtype::U64,
            neurons.clone(),
            active,
        );
        put(
            format!("{layer:04}.magnitude"),
            Dtype::F32,
            neurons.clone(),
            bytes(&activity.magnitude),
        );
        put(
            format!("{layer:04}.contribution"),
            Dtype::F32,
            neurons,
            bytes(&activity.contribution),
        );
    }
    let mut all = Vec::new();
    for hidden in &state.hidden {
        all.extend(hidden.flatten_all()?.to_vec1::<f32>()?);
    }
    put(
        "hidden".to_owned(),
        Dtype::F32,
        vec![all.len()],
        bytes(&all),
    );
    write_tensors(&path(folder), Some(&with_format(header)), &tensors)
}

/// Loads the state that a run with the same `header` left in `folder`; anything else, such as
/// the state of another model, is as good as nothing.
pub(crate) fn load(
    folder: &Path,
    header: &Header,
    lengths: &[usize],
    hidden_size: usize,
) -> Option<State> {
    let file = TensorFile::open(&path(folder)).ok()?;
    if file.header(FORMAT, header.version).ok()? != with_format(header) {
        return None;
    }
    let tokens: usize = lengths.iter().sum();
    let mut activities = Vec::new();
    while let Some(active) = file.find(&format!("{:04}.active", activities.len())) {
        let layer = activities.len();
        activities.push(LayerActivity {
            tokens: tokens as u64,
            active: active
                .bytes
                .chunks_exact(8)
                .map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()))
                .collect(),
            magnitude: floats(file.find(&format!("{layer:04}.magnitude"))?.bytes),
            contribution: floats(file.find(&format!("{layer:04}.contribution"))?.bytes),
        });
    }
    let all = floats(
        file.expect("hidden", Dtype::F32, &[tokens * hidden_size])
            .ok()?,
    );
    let mut rest = &all[..];
    let mut hidden = Vec::new();
    for length in lengths {
        let (sequence, after) = rest.split_at(length * hidden_size);
        hidden.push(Tensor::from_slice(sequence, (*length, hidden_size), &Device::Cpu).ok()?);
        rest = after;
    }
    Some(State { activities, hidden })
}

/// Forgets the state.
pub(crate) fn remove(folder: &Path) {
    // A state that cannot be removed does no harm.
    let _ = std::fs::remove_file(path(folder));
}

fn with_format(header: &Header) -> Header {
    Header {
        format: FORMAT.to_owned(),
        ..header.clone()
    }
}
