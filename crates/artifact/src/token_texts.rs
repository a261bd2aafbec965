//! Token ids of texts in a safetensors file: `tokens` of all texts concatenated, and `lengths`.

use std::{collections::BTreeMap, path::Path};

use crate::{
    ArtifactError, Digest, TensorFile,
    mapped_file::FileBytes,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};

/// Writes the token ids of `texts` to `path`.
///
/// # Errors
///
/// [`ArtifactError::Write`].
pub fn write(path: &Path, texts: &[Vec<u32>]) -> Result<(), ArtifactError> {
    let tensor = |values: &mut dyn Iterator<Item = u32>| {
        let bytes: Vec<u8> = values.flat_map(u32::to_le_bytes).collect();
        TensorSource::owned(Dtype::U32, vec![bytes.len() / 4], bytes)
    };
    let tokens = tensor(&mut texts.iter().flatten().copied());
    let lengths = tensor(&mut texts.iter().map(|text| text.len() as u32));
    let tensors = BTreeMap::from([
        ("tokens".to_owned(), tokens),
        ("lengths".to_owned(), lengths),
    ]);
    write_tensors(path, None, &tensors)
}

/// Digest of the token ids of `texts`.
pub fn digest(texts: &[Vec<u32>]) -> Digest {
    let parts = texts.iter().map(|text| {
        let tokens = text.iter().copied().flat_map(u32::to_le_bytes);
        tokens.collect::<Vec<u8>>()
    });
    let parts: Vec<Vec<u8>> = parts.collect();
    Digest::of_parts(parts.iter().map(Vec::as_slice))
}

/// Reads a file written by [`write()`].
///
/// # Errors
///
/// The file cannot be read, or its tensors are missing or inconsistent.
pub fn read(path: &Path) -> Result<Vec<Vec<u32>>, ArtifactError> {
    parse(path, FileBytes::open(path)?)
}

/// Parses `bytes`, a file written by [`write()`]; `path` is for messages.
///
/// # Errors
///
/// The bytes are not token texts.
pub fn parse(path: &Path, bytes: FileBytes) -> Result<Vec<Vec<u32>>, ArtifactError> {
    let file = TensorFile::from_bytes(path, bytes)?;
    let read_u32 = |name: &str| -> Result<Vec<u32>, ArtifactError> {
        let shape = file
            .find(name)
            .map_or(Vec::new(), |view| view.shape.to_vec());
        let bytes = file.expect(name, Dtype::U32, &[shape.first().copied().unwrap_or(0)])?;
        let (values, _) = bytes.as_chunks::<4>();
        Ok(values.iter().map(|n| u32::from_le_bytes(*n)).collect())
    };
    let tokens = read_u32("tokens")?;
    let mut remaining = tokens.as_slice();
    let mut texts = Vec::new();
    for length in read_u32("lengths")? {
        let Some((text, rest)) = remaining.split_at_checked(length as usize) else {
            return Err(ArtifactError::WrongTensor {
                path: path.to_owned(),
                tensor: "lengths".to_owned(),
                expected: format!("lengths that add up to {}", tokens.len()),
                found: "more".to_owned(),
            });
        };
        texts.push(text.to_vec());
        remaining = rest;
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts.safetensors");
        for texts in [vec![], vec![vec![1, 2, 3], vec![], vec![u32::MAX]]] {
            write(&path, &texts).unwrap();
            assert_eq!(read(&path).unwrap(), texts);
        }
    }
}
