//! GGUF files: access to metadata and tensors.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{Digest, mapped_file::FileBytes};
use rayon::prelude::*;

use super::{
    contents::{Contents, Tensor},
    dequantise::Encoding,
    value::{Value, quoted},
    writer::{Dialect, Metadata},
};
use crate::{
    ModelError,
    container::{Container, PART, sampled_digest},
};

/// Open GGUF file. It may be split, or in the original PowerInfer's variant of the format.
#[derive(Debug)]
pub struct GgufFile {
    /// Parts of a split file; an unsplit file has one.
    parts: Vec<Part>,
    contents: Contents,
}

/// File on disk.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    bytes: FileBytes,
}

impl GgufFile {
    /// Opens the file at `path` alone.
    pub(super) fn open_part(path: &Path) -> Result<Self, ModelError> {
        Self::from_bytes(path, FileBytes::open(path)?)
    }

    /// Adds the tensors of the next part.
    pub(super) fn with_part(mut self, part: Self) -> Result<Self, ModelError> {
        let index = self.parts.len();
        for (name, mut tensor) in part.contents.tensors {
            tensor.part = index;
            if self.contents.tensors.contains_key(&name) {
                return Err(ModelError::BadGguf {
                    path: part.parts[0].path.clone(),
                    reason: format!("tensor {} is in an earlier part too", quoted(&name)),
                });
            }
            self.contents.tensors.insert(name, tensor);
        }
        self.parts.extend(part.parts);
        Ok(self)
    }

    /// Parses and checks everything except the tensors' data; `path` is for messages.
    pub(crate) fn from_bytes(path: &Path, bytes: FileBytes) -> Result<Self, ModelError> {
        let contents = Contents::read(&bytes).map_err(|reason| ModelError::BadGguf {
            path: path.to_owned(),
            reason,
        })?;
        Ok(Self::from_contents(path, bytes, contents))
    }

    fn from_contents(path: &Path, bytes: FileBytes, contents: Contents) -> Self {
        let path = path.to_owned();
        Self {
            parts: vec![Part { path, bytes }],
            contents,
        }
    }

    /// A file that is to be written, without data but that of the tensor `divisors`: its metadata and shapes are read
    /// as those of a file.
    pub(super) fn planned(
        path: &Path,
        dialect: Dialect,
        metadata: &Metadata,
        shapes: &[(String, Vec<usize>)],
        divisors: &[f32],
    ) -> Self {
        let bytes: Vec<u8> = divisors.iter().flat_map(|v| v.to_le_bytes()).collect();
        let encoding = Encoding::from_id(0).expect("F32 is known");
        let tensor = |shape: &[usize]| Tensor {
            encoding,
            shape: shape.to_vec(),
            part: 0,
            data: 0..bytes.len(),
        };
        let contents = Contents {
            is_powerinfer: dialect == Dialect::PowerInfer,
            values: metadata.entries().iter().cloned().collect(),
            tensors: (shapes.iter())
                .map(|(name, shape)| (name.clone(), tensor(shape)))
                .collect(),
        };
        Self::from_contents(path, FileBytes::Owned(bytes.into()), contents)
    }

    /// Returns the path of the file, or of its first part.
    pub(crate) fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// Returns whether the original PowerInfer wrote the file; its files have another magic.
    pub(crate) fn is_powerinfer(&self) -> bool {
        self.contents.is_powerinfer
    }

    /// Returns the metadata value under `key`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.contents.values.get(key)
    }

    /// Iterates over all metadata by key.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        let values = self.contents.values.iter();
        values.map(|(key, value)| (key.as_str(), value))
    }

    /// Reads the tensor called `name`, of signed integers of 32 bits.
    ///
    /// # Errors
    ///
    /// The tensor is missing or of another type.
    pub fn integers(&self, name: &str) -> Result<Vec<i32>, ModelError> {
        let tensor = self.expect(name)?;
        if tensor.encoding.name != "I32" {
            return Err(ModelError::WrongType {
                path: Container::path(self, name),
                tensor: name.to_owned(),
                found: tensor.encoding.name.to_owned(),
            });
        }
        let (numbers, _) = self.bytes(tensor).as_chunks::<4>();
        Ok(numbers.iter().map(|n| i32::from_le_bytes(*n)).collect())
    }

    /// Returns the type in ggml and the stored bytes of the tensor called `name`, for comparisons.
    ///
    /// # Errors
    ///
    /// The tensor is missing.
    pub fn stored(&self, name: &str) -> Result<(&'static str, &[u8]), ModelError> {
        let tensor = self.expect(name)?;
        Ok((tensor.encoding.name, self.bytes(tensor)))
    }

    /// Stored bytes of a tensor.
    fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.parts[tensor.part].bytes[tensor.data.clone()]
    }

    /// Releases the memory of a tensor. Models may be larger than memory, and a page fault may map far more than was
    /// read.
    fn release(&self, tensor: &Tensor) {
        self.parts[tensor.part].bytes.release(tensor.data.clone());
    }

    /// Decodes `bytes`, which are whole blocks of the tensor called `name`.
    fn decode(&self, name: &str, encoding: Encoding, bytes: &[u8]) -> Result<Vec<f32>, ModelError> {
        let decode = encoding.decode.ok_or_else(|| ModelError::BadGguf {
            path: Container::path(self, name),
            reason: format!(
                "tensor {} is stored as {}, which is not supported; quantise the model to another type",
                quoted(name),
                encoding.name
            ),
        })?;
        let blocks = PART / encoding.block_length;
        let mut values = vec![0.0; bytes.len() / encoding.block_bytes * encoding.block_length];
        let parts = values.par_chunks_mut(blocks * encoding.block_length);
        let parts = parts.zip(bytes.par_chunks(blocks * encoding.block_bytes));
        parts.for_each(|(values, bytes)| decode(bytes, values));
        Ok(values)
    }

    fn expect(&self, name: &str) -> Result<&Tensor, ModelError> {
        let tensor = self.contents.tensors.get(name);
        tensor.ok_or_else(|| ModelError::MissingTensor {
            path: self.path().to_owned(),
            tensor: name.to_owned(),
        })
    }
}

impl Container for GgufFile {
    fn names(&self) -> Vec<String> {
        self.contents.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.contents.tensors.get(name)?;
        Some(tensor.shape.clone())
    }

    fn path(&self, name: &str) -> PathBuf {
        let part = self
            .contents
            .tensors
            .get(name)
            .map_or(0, |tensor| tensor.part);
        self.parts[part].path.clone()
    }

    fn check_type(&self, name: &str) -> Result<(), ModelError> {
        let tensor = self.expect(name)?;
        self.decode(name, tensor.encoding, &[]).map(drop)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.expect(name)?;
        let values = self.decode(name, tensor.encoding, self.bytes(tensor));
        self.release(tensor);
        values
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let tensor = self.expect(name)?;
        let count = tensor.shape.first().copied().unwrap_or(1).max(1);
        let row = tensor.data.len() / count;
        let bytes = &self.bytes(tensor)[rows.start * row..rows.end * row];
        let values = self.decode(name, tensor.encoding, bytes);
        self.release(tensor);
        values
    }

    fn q4_k(&self, name: &str) -> Option<&[u8]> {
        let tensor = self.contents.tensors.get(name)?;
        (tensor.encoding.name == "Q4_K").then(|| self.bytes(tensor))
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        let tensor = self.expect(name)?;
        let kind = format!("{name} {} {:?}", tensor.encoding.name, tensor.shape);
        let digest = sampled_digest(&kind, self.bytes(tensor));
        self.release(tensor);
        Ok(digest)
    }
}

/// Creates an error about `file`.
pub(super) fn bad(file: &GgufFile, reason: String) -> ModelError {
    ModelError::BadGguf {
        path: file.path().to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::TensorFile;
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    fn golden(name: &str) -> PathBuf {
        let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let mut folders = folders.map(|folder| folder.join("tests/golden/gguf"));
        let folder = folders.find(|folder| folder.is_dir()).unwrap();
        folder.join(name)
    }

    fn open(name: &str) -> Result<GgufFile, ModelError> {
        let path = golden(name);
        GgufFile::from_bytes(&path, FileBytes::open(&path).unwrap())
    }

    /// Opens `bytes` and reads all tensors.
    fn read_all(bytes: Vec<u8>) -> Result<(), ModelError> {
        let bytes = FileBytes::Owned(bytes.into());
        let file = GgufFile::from_bytes(Path::new("mutated.gguf"), bytes)?;
        for name in file.names() {
            let elements = file.shape(&name).unwrap().iter().product::<usize>();
            if let Ok(values) = file.read(&name) {
                assert_eq!(values.len(), elements);
            }
            file.digest(&name)?;
        }
        Ok(())
    }

    #[test]
    fn hostile_files_are_refused_and_the_valid_one_is_read() {
        let list = std::fs::read(golden("hostile/hostile.json")).unwrap();
        let list: serde_json::Map<_, _> = serde_json::from_slice(&list).unwrap();
        assert!(list.len() > 40);
        for (name, about) in &list {
            let opened = open(&format!("hostile/{name}"));
            match about["expect"].as_str().unwrap() {
                "error" => {
                    let message = opened.expect_err(name).to_string();
                    assert!(message.contains(name), "{message}");
                }
                "ok" => {
                    let file = opened.expect(name);
                    assert_eq!(file.names(), ["a.weight", "b.weight"]);
                    assert_eq!(file.shape("a.weight").unwrap(), [4, 8]);
                    let value = f32::from_le_bytes([1; 4]);
                    assert_eq!(file.read("b.weight").unwrap(), [value; 32]);
                }
                "either" => {
                    let bytes = std::fs::read(golden(&format!("hostile/{name}"))).unwrap();
                    assert_eq!(read_all(bytes).is_ok(), opened.is_ok());
                }
                other => panic!("{name}: {other}"),
            }
        }
    }

    #[test]
    fn arrays_inside_each_other_are_refused_without_recursion() {
        // 12,000 nested arrays of one element each.
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend([0u64, 1, 1].iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(b"x\x09\0\0\0");
        bytes.extend(b"\x09\0\0\0\x01\0\0\0\0\0\0\0".repeat(12_000));
        let message = read_all(bytes).unwrap_err().to_string();
        assert!(message.contains("array of arrays"), "{message}");
    }

    #[test]
    fn version_2_is_supported() {
        let mut bytes = std::fs::read(golden("hostile/control-valid.gguf")).unwrap();
        assert_eq!(bytes[4], 3);
        bytes[4] = 2;
        read_all(bytes).unwrap();
    }

    #[test]
    fn errors_name_the_problem() {
        for (name, words) in [
            ("empty", &["magic"][..]),
            ("magic-ggml-old", &["`ggml`"]),
            ("magic-wrong", &["`GGUX`"]),
            ("magic-big-endian", &["big-endian"]),
            ("version-0", &["version 0"]),
            ("version-1", &["version 1"]),
            ("version-99", &["version 99"]),
            ("header-truncated", &["number of tensors"]),
            ("tensor-count-2e60", &["tensors", "1152921504606846976"]),
            ("kv-count-2e60", &["metadata", "1152921504606846976"]),
            ("string-past-end", &["metadata entry 0", "1099511627776"]),
            ("string-not-utf8", &["UTF-8"]),
            ("key-not-utf8", &["UTF-8"]),
            ("value-type-unknown", &["key `x`", "type 77"]),
            ("array-len-2e60", &["key `x`", "1152921504606846976"]),
            ("array-len-wraps", &["key `x`", "2305843009213693952"]),
            ("array-of-strings-2e60", &["key `x`", "1152921504606846976"]),
            ("array-of-arrays", &["key `x`", "array of arrays"]),
            ("bool-2", &["key `x`", "Boolean"]),
            ("key-twice", &["`general.architecture`", "twice"]),
            ("alignment-0", &["`general.alignment` is 0"]),
            ("alignment-3", &["`general.alignment` is 3"]),
            ("alignment-string", &["`general.alignment`"]),
            ("alignment-2e31", &["2147483648", "beyond the end"]),
            ("tensor-name-twice", &["`a.weight`", "twice"]),
            ("tensor-type-unknown", &["`a.weight`", "type 999"]),
            ("tensor-type-removed", &["`a.weight`", "type 4", "removed"]),
            ("tensor-offset-past-end", &["`b.weight`", "beyond the end"]),
            ("tensor-offset-wraps", &["`b.weight`", "beyond the end"]),
            ("tensor-data-truncated", &["`b.weight`", "beyond the end"]),
            ("tensor-offset-unaligned", &["`b.weight`", "offset 129"]),
            ("tensors-overlap", &["`a.weight`", "`b.weight`", "overlap"]),
            ("tensor-dims-0", &["`a.weight`", "0 dimensions"]),
            ("tensor-dim-zero", &["`a.weight`", "size of 0"]),
            ("tensor-dims-2e9", &["`a.weight`", "2000000000 dimensions"]),
            ("tensor-dims-5", &["`a.weight`", "5 dimensions"]),
            ("tensor-dims-overflow", &["`a.weight`", "more elements"]),
            ("tensor-bytes-overflow", &["`a.weight`", "more elements"]),
            ("tensor-row-not-blocks", &["`a.weight`", "rows of 40"]),
            ("tensor-name-empty", &["no name"]),
            ("tensor-name-long", &["longer than 64"]),
        ] {
            let message = open(&format!("hostile/{name}.gguf")).unwrap_err();
            let message = message.to_string();
            assert!(message.len() < 500, "{message}");
            for word in words {
                assert!(message.contains(word), "{name}: {message}");
            }
        }
    }

    #[test]
    fn dequantised_values_are_bit_identical_to_ggml() {
        let names = |file: &GgufFile| file.names();
        let common = open("quants.gguf").unwrap();
        assert_eq!(common.names().len(), 15);
        let uncommon = open("quants-uncommon.gguf").unwrap();
        let both = [
            (names(&common), &common, "quants.safetensors"),
            (
                vec!["mxfp4.weight".to_owned()],
                &uncommon,
                "quants-uncommon.safetensors",
            ),
        ];
        let tensors = both.into_iter().flat_map(|(names, file, expected)| {
            names.into_iter().map(move |name| (name, file, expected))
        });
        for (name, file, expected) in tensors {
            let expected = TensorFile::open(&golden(expected)).unwrap();
            let values = file.read(&name).unwrap();
            let expected = expected.find(name.strip_suffix(".weight").unwrap());
            let expected = expected.unwrap().bytes.as_chunks::<4>().0;
            assert_eq!(values.len(), expected.len());
            for (index, (value, expected)) in values.iter().zip(expected).enumerate() {
                let expected = f32::from_le_bytes(*expected);
                let equal = value.to_bits() == expected.to_bits();
                assert!(equal, "{name} at {index}: {value} for {expected}");
            }
        }
    }

    #[test]
    fn unsupported_types_are_refused_by_name() {
        let file = open("quants-uncommon.gguf").unwrap();
        assert_eq!(file.names().len(), 5);
        let is_supported = |name: &String| name == "mxfp4.weight";
        for name in file.names().into_iter().filter(|name| !is_supported(name)) {
            let message = file.read(&name).unwrap_err().to_string();
            let encoding = name.strip_suffix(".weight").unwrap().to_uppercase();
            assert!(message.contains(&format!("`{name}`")), "{message}");
            assert!(
                message.contains(&format!("stored as {encoding},")),
                "{message}"
            );
            file.digest(&name).unwrap();
        }
    }

    #[test]
    fn a_file_of_the_original_powerinfer_is_read() {
        let file = open("tiny.powerinfer.f16.gguf").unwrap();
        assert!(file.is_powerinfer());
        assert!(!open("quants.gguf").unwrap().is_powerinfer());
        let architecture = file.value("general.architecture");
        assert_eq!(architecture.and_then(Value::as_text), Some("llama"));
        assert_eq!(file.shape("blk.0.attn_k.weight").unwrap(), [32, 64]);
        assert_eq!(file.read("blk.1.fc2.weight").unwrap().len(), 1024 * 32);
        assert_eq!(file.read("output_norm.weight").unwrap(), [1.0; 64]);
        let error = file.read("blk.2.fc2.weight").unwrap_err();
        assert!(matches!(error, ModelError::MissingTensor { .. }));
        assert_ne!(
            file.digest("blk.0.fc1.weight").unwrap(),
            file.digest("blk.1.fc1.weight").unwrap()
        );
    }

    #[test]
    fn extreme_values_in_the_header_do_not_panic() {
        let valid = std::fs::read(golden("hostile/control-valid.gguf")).unwrap();
        read_all(valid.clone()).unwrap();
        let extremes = [0, 1, 5, 9, 255, 1 << 31, 1 << 32, 1 << 60, 1 << 63, !31, !0];
        for place in 0..200 {
            for extreme in extremes {
                for width in [1, 4, 8] {
                    let mut bytes = valid.clone();
                    let number = u64::to_le_bytes(extreme);
                    bytes[place..place + width].copy_from_slice(&number[..width]);
                    let _ = read_all(bytes);
                }
            }
        }
        for length in 0..valid.len() {
            assert!(read_all(valid[..length].to_vec()).is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(
            control in any::<bool>(),
            changes in vec((0usize..2048, any::<u8>()), 1..4),
            cut in option::weighted(0.2, any::<proptest::sample::Index>()),
        ) {
            let name = if control { "hostile/control-valid.gguf" } else { "quants.gguf" };
            let mut bytes = std::fs::read(golden(name)).unwrap();
            for (place, byte) in changes {
                let place = place % bytes.len();
                bytes[place] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            let _ = read_all(bytes);
        }
    }
}
