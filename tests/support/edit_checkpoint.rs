//! Changes copies of golden checkpoints.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

/// Changes the tensor table and the data of a safetensors file.
pub(crate) fn edit_tensors(
    path: &Path,
    change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>),
) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut table: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    change(&mut table, &mut data);
    let table = serde_json::to_vec(&table).unwrap();
    let length = (table.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], &table, &data].concat()).unwrap();
}

/// Removes a tensor and its data.
pub(crate) fn remove_tensor(path: &Path, name: &str) {
    edit_tensors(path, |table, data| {
        let entry = table.remove(name).unwrap();
        let offset = |index: usize| entry["data_offsets"][index].as_u64().unwrap();
        let (start, end) = (offset(0), offset(1));
        data.drain(start as usize..end as usize);
        for (_, other) in table.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            for place in other["data_offsets"].as_array_mut().unwrap() {
                let old = place.as_u64().unwrap();
                *place = if old > start {
                    old - (end - start)
                } else {
                    old
                }
                .into();
            }
        }
    });
}

/// Adds an f32 tensor.
pub(crate) fn add_tensor(path: &Path, name: &str, shape: &[usize], values: &[f32]) {
    edit_tensors(path, |table, data| {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let about = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        table.insert(name.to_owned(), about);
    });
}

/// Sets keys of the `config.json` in `model`.
pub(crate) fn configure(model: &Path, keys: &Value) {
    let path = model.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.extend(keys.as_object().unwrap().clone());
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
}
