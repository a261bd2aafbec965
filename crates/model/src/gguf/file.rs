//! A GGUF file: magic, version, metadata, a table of tensors, and their data.
//!
//! Everything is checked when the file is opened, so that what is read afterwards lies within it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{Digest, mapped_file::FileBytes};

use super::{
    dequantise::Encoding,
    value::{Cursor, Value, shown},
};
use crate::{
    ModelError,
    container::{Container, sampled_digest},
};

/// An open GGUF file, or one in the original PowerInfer's variety of the format.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    bytes: FileBytes,
    contents: Contents,
}

impl GgufFile {
    /// Opens the file at `path` and checks all but the tensors' data.
    ///
    /// # Errors
    ///
    /// Returns [`ModelError::BadGguf`] if the file is damaged or of an unsupported version.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::from_bytes(path, FileBytes::open(path)?)
    }

    /// Reads and checks all but the tensors' data; `path` is for messages.
    pub(crate) fn from_bytes(path: &Path, bytes: FileBytes) -> Result<Self, ModelError> {
        let contents = Contents::read(&bytes).map_err(|reason| ModelError::BadGguf {
            path: path.to_owned(),
            reason,
        })?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
            contents,
        })
    }

    /// Where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the original PowerInfer wrote it, whose files differ in the magic.
    pub(crate) fn is_powerinfer(&self) -> bool {
        self.contents.is_powerinfer
    }

    /// The metadata called `key`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.contents.values.get(key)
    }

    /// All metadata, by key.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        let values = self.contents.values.iter();
        values.map(|(key, value)| (key.as_str(), value))
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.contents.tensors.keys().cloned().collect()
    }

    /// Shape of the tensor called `name`, rows first; none where there is no such tensor.
    pub(crate) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.contents.tensors.get(name)?;
        Some(tensor.shape.clone())
    }

    /// The values of the tensor called `name`, row-major; fails where its type is not read.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.expect(name)?;
        let values = self.decode(name, tensor.encoding, tensor.data.clone());
        self.bytes.release(tensor.data.clone()); // a model may be larger than memory
        values
    }

    /// The values of some rows of a tensor; rows are whole blocks.
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let tensor = self.expect(name)?;
        let count = tensor.shape.first().copied().unwrap_or(1).max(1);
        let row = tensor.data.len() / count;
        let start = tensor.data.start;
        let data = start + rows.start * row..start + rows.end * row;
        let values = self.decode(name, tensor.encoding, data);
        self.bytes.release(tensor.data.clone());
        values
    }

    fn decode(
        &self,
        name: &str,
        encoding: Encoding,
        data: Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let decode = encoding.decode.ok_or_else(|| ModelError::BadGguf {
            path: self.path.clone(),
            reason: format!(
                "tensor {} is stored as {}, which is not read; quantise the model to another type",
                shown(name),
                encoding.name
            ),
        })?;
        let bytes = &self.bytes[data];
        let mut values = vec![0.0; bytes.len() / encoding.block_bytes * encoding.block_length];
        decode(bytes, &mut values);
        Ok(values)
    }

    /// The blocks of the tensor called `name`, where it is stored as Q4_K.
    pub(crate) fn q4_k(&self, name: &str) -> Option<&[u8]> {
        let tensor = self.contents.tensors.get(name)?;
        (tensor.encoding.name == "Q4_K").then(|| &self.bytes[tensor.data.clone()])
    }

    /// A digest of the tensor's name, type, shape and samples of its data.
    pub(crate) fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        let tensor = self.expect(name)?;
        let kind = format!("{name} {} {:?}", tensor.encoding.name, tensor.shape);
        let digest = sampled_digest(&kind, &self.bytes[tensor.data.clone()]);
        self.bytes.release(tensor.data.clone()); // a touch may map far more than it reads
        Ok(digest)
    }

    fn expect(&self, name: &str) -> Result<&Tensor, ModelError> {
        let tensor = self.contents.tensors.get(name);
        tensor.ok_or_else(|| ModelError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
        })
    }
}

impl Container for GgufFile {
    fn names(&self) -> Vec<String> {
        self.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shape(name)
    }

    fn path(&self, _: &str) -> PathBuf {
        self.path.clone()
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.read(name)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.read_rows(name, rows)
    }

    fn q4_k(&self, name: &str) -> Option<&[u8]> {
        self.q4_k(name)
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        self.digest(name)
    }
}

/// What stands before the tensors' data.
#[derive(Debug)]
struct Contents {
    is_powerinfer: bool,
    values: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
}

/// A tensor, and where in the file its data is.
#[derive(Debug)]
struct Tensor {
    encoding: Encoding,
    /// Rows first.
    shape: Vec<usize>,
    /// As many blocks as the shape needs, all within the file.
    data: Range<usize>,
}

impl Contents {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor::new(bytes);
        let is_powerinfer = read_magic(&mut cursor)?;
        check_version(cursor.u32().map_err(about("the version"))?)?;
        let tensor_count = cursor
            .count(TensorEntry::LEAST_BYTES)
            .map_err(about("the number of tensors"))?;
        let values = read_values(&mut cursor)?;
        let entries = read_entries(&mut cursor, tensor_count)?;
        let alignment = alignment(&values)?;
        let data_start = cursor.position().checked_next_multiple_of(alignment);
        let data_start = data_start.ok_or("its data would begin past the end of the file")?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries {
            let data = entry
                .data(bytes.len(), data_start, alignment)
                .map_err(about(&format!("tensor {}", shown(&name))))?;
            let tensor = Tensor {
                encoding: entry.encoding,
                shape: entry.shape,
                data,
            };
            tensors.insert(name, tensor);
        }
        check_apart(&tensors)?;
        Ok(Self {
            is_powerinfer,
            values,
            tensors,
        })
    }
}

/// Puts what is being read before a complaint.
fn about(what: &str) -> impl Fn(String) -> String {
    move |reason| format!("{what}: {reason}")
}

/// Whether the magic is the original PowerInfer's.
fn read_magic(cursor: &mut Cursor) -> Result<bool, String> {
    let magic: [u8; 4] = cursor.array().map_err(about("the magic"))?;
    match &magic {
        b"GGUF" => Ok(false),
        b"PWRI" => Ok(true),
        b"FUGG" | b"IRWP" => Err(BIG_ENDIAN.to_owned()),
        // These were written as numbers, and so lie in the file the other way round.
        b"lmgg" | b"fmgg" | b"tjgg" | b"algg" | b"ggml" | b"ggmf" | b"ggjt" | b"ggla" => {
            let mut name = magic;
            if !name.starts_with(b"gg") {
                name.reverse();
            }
            let name = String::from_utf8_lossy(&name);
            Err(format!(
                "it is in the format `{name}` that was before GGUF; convert the original model anew"
            ))
        }
        other => {
            let found = other.escape_ascii();
            Err(format!("it begins with `{found}` and not with `GGUF`"))
        }
    }
}

const BIG_ENDIAN: &str = "it is big-endian; only little-endian files are read";

fn check_version(version: u32) -> Result<(), String> {
    match version {
        2 | 3 => Ok(()),
        0 | 1 => Err(format!(
            "it is of version {version}, which is older than 2 and 3, which are read; \
             convert the original model anew"
        )),
        _ if version.swap_bytes() <= 0xffff => Err(BIG_ENDIAN.to_owned()),
        _ => Err(format!(
            "it is of version {version}, which is newer than 2 and 3, which are read"
        )),
    }
}

fn read_values(cursor: &mut Cursor) -> Result<BTreeMap<String, Value>, String> {
    const LEAST_BYTES: usize = 8 + 4 + 1; // length of the key, type, value
    let count = cursor
        .count(LEAST_BYTES)
        .map_err(about("the number of metadata entries"))?;
    let mut values = BTreeMap::new();
    for index in 0..count {
        let key = cursor
            .text()
            .map_err(about(&format!("the key of metadata entry {index}")))?;
        let value = Value::read(cursor).map_err(about(&format!("key {}", shown(&key))))?;
        match values.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(value);
            }
            Entry::Occupied(entry) => {
                return Err(format!("key {} is there twice", shown(entry.key())));
            }
        }
    }
    Ok(values)
}

/// What the data's start and every tensor's offset are multiples of.
fn alignment(values: &BTreeMap<String, Value>) -> Result<usize, String> {
    const KEY: &str = "general.alignment";
    const DEFAULT: usize = 32;
    let Some(value) = values.get(KEY) else {
        return Ok(DEFAULT);
    };
    let number = value
        .as_u64()
        .ok_or_else(|| format!("key `{KEY}` is no whole number"))?;
    usize::try_from(number)
        .ok()
        .filter(|alignment| alignment.is_power_of_two() && *alignment >= 8)
        .ok_or_else(|| format!("key `{KEY}` is {number}, no power of two from 8 on"))
}

/// What the table says about a tensor.
struct TensorEntry {
    encoding: Encoding,
    /// Rows first, nowhere 0.
    shape: Vec<usize>,
    /// Bytes of all its blocks.
    bytes: usize,
    /// Bytes of data before its own.
    offset: u64,
}

fn read_entries(
    cursor: &mut Cursor,
    count: usize,
) -> Result<BTreeMap<String, TensorEntry>, String> {
    const LONGEST_NAME: usize = 64; // bytes, says the format
    let mut entries = BTreeMap::new();
    for index in 0..count {
        let name = cursor
            .text()
            .map_err(about(&format!("the name of tensor {index}")))?;
        let tensor = format!("tensor {}", shown(&name));
        if name.is_empty() {
            return Err(format!("tensor {index} has no name"));
        }
        if name.len() > LONGEST_NAME {
            return Err(format!("{tensor} has a name longer than {LONGEST_NAME}"));
        }
        let entry = TensorEntry::read(cursor).map_err(about(&tensor))?;
        if entries.insert(name, entry).is_some() {
            return Err(format!("{tensor} is there twice"));
        }
    }
    Ok(entries)
}

impl TensorEntry {
    /// Length of the name, number of dimensions, type and offset.
    const LEAST_BYTES: usize = 8 + 4 + 4 + 8;

    /// Reads all but the name.
    fn read(cursor: &mut Cursor) -> Result<Self, String> {
        let dimensions = cursor.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(format!("it has {dimensions} dimensions, not 1 to 4"));
        }
        let mut sizes = (0..dimensions)
            .map(|_| cursor.u64())
            .collect::<Result<Vec<_>, _>>()?;
        let encoding = Encoding::numbered(cursor.u32()?)?;
        let offset = cursor.u64()?;
        // The fastest dimension is first in the file.
        let (row, length) = (sizes[0], encoding.block_length as u64);
        sizes.reverse();
        if sizes.contains(&0) {
            return Err(format!("its shape {sizes:?} has a size of 0"));
        }
        if !row.is_multiple_of(length) {
            let name = encoding.name;
            return Err(format!(
                "its rows of {row} are not whole blocks of {length}, of which {name} consists"
            ));
        }
        let too_large = || format!("its shape {sizes:?} has more elements than any memory");
        let shape = sizes.iter().map(|size| usize::try_from(*size).ok());
        let shape = shape.collect::<Option<Vec<_>>>().ok_or_else(too_large)?;
        let bytes = bytes_of(&shape, encoding).ok_or_else(too_large)?;
        Ok(Self {
            encoding,
            shape,
            bytes,
            offset,
        })
    }

    /// Where in a file of `file_bytes` its data is.
    fn data(
        &self,
        file_bytes: usize,
        data_start: usize,
        alignment: usize,
    ) -> Result<Range<usize>, String> {
        let offset = self.offset;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(format!(
                "its offset {offset} is no multiple of the alignment {alignment}"
            ));
        }
        let range = usize::try_from(offset).ok().and_then(|offset| {
            let start = data_start.checked_add(offset)?;
            let end = start.checked_add(self.bytes)?;
            (end <= file_bytes).then_some(start..end)
        });
        range.ok_or_else(|| {
            format!(
                "its {} bytes at offset {offset} of the data, which begins at byte {data_start}, \
                 reach beyond the end of the file of {file_bytes} bytes; download it again",
                self.bytes
            )
        })
    }
}

/// Bytes of a tensor; none where those, or its values in float32, overflow.
fn bytes_of(shape: &[usize], encoding: Encoding) -> Option<usize> {
    let elements = shape
        .iter()
        .try_fold(1usize, |product, size| product.checked_mul(*size))?;
    isize::try_from(elements.checked_mul(size_of::<f32>())?).ok()?;
    (elements / encoding.block_length).checked_mul(encoding.block_bytes)
}

/// That no byte belongs to two tensors.
fn check_apart(tensors: &BTreeMap<String, Tensor>) -> Result<(), String> {
    let mut places: Vec<_> = tensors.iter().collect();
    places.sort_by_key(|(_, tensor)| tensor.data.start);
    for pair in places.windows(2) {
        let ((name, tensor), (next_name, next)) = (pair[0], pair[1]);
        if tensor.data.end > next.data.start {
            return Err(format!(
                "tensors {} and {} overlap",
                shown(name),
                shown(next_name)
            ));
        }
    }
    Ok(())
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

    /// Opens `bytes` and reads whatever is in them.
    fn read_all(bytes: Vec<u8>) -> Result<(), ModelError> {
        // Only static bytes need no file; a test may leak them.
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
    fn hostile_files_are_refused_and_the_control_is_read() {
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
    fn version_2_is_read_as_version_3_is() {
        let mut bytes = std::fs::read(golden("hostile/control-valid.gguf")).unwrap();
        assert_eq!(bytes[4], 3);
        bytes[4] = 2;
        read_all(bytes).unwrap();
    }

    #[test]
    fn refusals_name_the_offence() {
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
            ("array-of-arrays-deep", &["key `x`", "array of arrays"]),
            ("array-of-arrays", &["key `x`", "array of arrays"]),
            ("bool-2", &["key `x`", "truth value"]),
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
    fn every_type_is_dequantised_to_the_bits_of_ggml() {
        let file = open("quants.gguf").unwrap();
        let expected = TensorFile::open(&golden("quants.safetensors")).unwrap();
        assert_eq!(file.names().len(), 15);
        for name in file.names() {
            assert_eq!(file.shape(&name).unwrap(), [5, 512]);
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
    fn a_tensor_of_a_type_that_is_not_read_is_refused_by_the_name_of_the_type() {
        let file = open("quants-uncommon.gguf").unwrap();
        assert_eq!(file.names().len(), 5);
        for name in file.names() {
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
    fn no_field_of_the_header_can_make_it_panic() {
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
