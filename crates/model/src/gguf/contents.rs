//! Content of a GGUF file before the tensors' data: magic, version, metadata, tensor table.
//!
//! Everything is checked when a file is opened, so that later reads are within the file.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
};

use super::{
    dequantise::Encoding,
    value::{Cursor, Value, quoted},
};

/// Parsed content of a file before the tensors' data.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) is_powerinfer: bool,
    pub(super) values: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// Tensor and the location of its data.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) encoding: Encoding,
    /// Shape, rows first.
    pub(super) shape: Vec<usize>,
    /// Index of the part of the file that contains the data.
    pub(super) part: usize,
    /// Byte range within that part; its size is that required by the shape.
    pub(super) data: Range<usize>,
}

impl Contents {
    /// Parses everything before the data; the error describes the problem.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor::new(bytes);
        let is_powerinfer =
            read_magic(&mut cursor).map_err(|reason| match kind_of_file(bytes) {
                Some(kind) => format!("it is {kind}"),
                None => reason,
            })?;
        check_version(cursor.u32().map_err(context("the version"))?)?;
        let tensor_count = cursor
            .count(TensorEntry::MIN_BYTES)
            .map_err(context("the number of tensors"))?;
        let values = read_values(&mut cursor)?;
        let entries = read_entries(&mut cursor, tensor_count, is_powerinfer)?;
        let alignment = alignment(&values)?;
        let data_start = cursor.position().checked_next_multiple_of(alignment);
        let data_start = data_start.ok_or("its data would start past the end of the file")?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries {
            let data = entry
                .data(bytes.len(), data_start, alignment)
                .map_err(context(&format!("tensor {}", quoted(&name))))?;
            let tensor = Tensor {
                encoding: entry.encoding,
                shape: entry.shape,
                part: 0,
                data,
            };
            tensors.insert(name, tensor);
        }
        check_disjoint(&tensors)?;
        Ok(Self {
            is_powerinfer,
            values,
            tensors,
        })
    }
}

/// Prefixes an error with what was being read.
fn context(what: &str) -> impl Fn(String) -> String {
    move |reason| format!("{what}: {reason}")
}

/// Reads the magic; returns whether it is the original PowerInfer's.
fn read_magic(cursor: &mut Cursor) -> Result<bool, String> {
    let magic: [u8; 4] = cursor.array().map_err(context("the magic"))?;
    match &magic {
        b"GGUF" => Ok(false),
        b"PWRI" => Ok(true),
        b"FUGG" | b"IRWP" => Err(BIG_ENDIAN.to_owned()),
        // These were written as integers, so their bytes are reversed.
        b"lmgg" | b"fmgg" | b"tjgg" | b"algg" | b"ggml" | b"ggmf" | b"ggjt" | b"ggla" => {
            let mut name = magic;
            if !name.starts_with(b"gg") {
                name.reverse();
            }
            let name = String::from_utf8_lossy(&name);
            Err(format!(
                "it is in the format `{name}`, a predecessor of GGUF; convert the original model again"
            ))
        }
        other => {
            let found = other.escape_ascii();
            Err(format!("it starts with `{found}` instead of `GGUF`"))
        }
    }
}

const BIG_ENDIAN: &str = "it is big-endian; only little-endian files are supported";

fn check_version(version: u32) -> Result<(), String> {
    match version {
        2 | 3 => Ok(()),
        0 | 1 => Err(format!(
            "it has version {version}, supported are 2 and 3; \
              convert the original model again"
        )),
        _ if version.swap_bytes() <= 0xffff => Err(BIG_ENDIAN.to_owned()),
        _ => Err(format!("it has version {version}, supported are 2 and 3")),
    }
}

fn read_values(cursor: &mut Cursor) -> Result<BTreeMap<String, Value>, String> {
    const MIN_BYTES: usize = 8 + 4 + 1; // length of the key, type, value
    let count = cursor
        .count(MIN_BYTES)
        .map_err(context("the number of metadata entries"))?;
    let mut values = BTreeMap::new();
    for index in 0..count {
        let key = cursor
            .text()
            .map_err(context(&format!("the key of metadata entry {index}")))?;
        let value = Value::read(cursor).map_err(context(&format!("key {}", quoted(&key))))?;
        match values.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(value);
            }
            Entry::Occupied(entry) => {
                return Err(format!("key {} occurs twice", quoted(entry.key())));
            }
        }
    }
    Ok(values)
}

/// Alignment of the data's start and of every tensor's offset.
fn alignment(values: &BTreeMap<String, Value>) -> Result<usize, String> {
    const KEY: &str = "general.alignment";
    const DEFAULT: usize = 32;
    let Some(value) = values.get(KEY) else {
        return Ok(DEFAULT);
    };
    let number = value
        .as_u64()
        .ok_or_else(|| format!("key `{KEY}` is not an integer"))?;
    usize::try_from(number)
        .ok()
        .filter(|alignment| alignment.is_power_of_two() && *alignment >= 8)
        .ok_or_else(|| format!("key `{KEY}` is {number}, not a power of two of at least 8"))
}

/// Entry of the tensor table.
struct TensorEntry {
    encoding: Encoding,
    /// Shape, rows first, without zeros.
    shape: Vec<usize>,
    /// Size of the data in bytes.
    bytes: usize,
    /// Offset of the data from the start of all data.
    offset: u64,
}

fn read_entries(
    cursor: &mut Cursor,
    count: usize,
    is_original: bool,
) -> Result<BTreeMap<String, TensorEntry>, String> {
    const LONGEST_NAME: usize = 64; // bytes, by the specification
    let mut entries = BTreeMap::new();
    for index in 0..count {
        let name = cursor
            .text()
            .map_err(context(&format!("the name of tensor {index}")))?;
        let tensor = format!("tensor {}", quoted(&name));
        if name.is_empty() {
            return Err(format!("tensor {index} has no name"));
        }
        if name.len() > LONGEST_NAME {
            return Err(format!("{tensor} has a name longer than {LONGEST_NAME}"));
        }
        let entry = TensorEntry::read(cursor, is_original).map_err(context(&tensor))?;
        if entries.insert(name, entry).is_some() {
            return Err(format!("{tensor} occurs twice"));
        }
    }
    Ok(entries)
}

impl TensorEntry {
    /// Minimum size: length of the name, number of dimensions, type and offset.
    const MIN_BYTES: usize = 8 + 4 + 4 + 8;

    /// Reads everything but the name. Integer tensors may be empty in the original PowerInfer's files (`is_original`).
    fn read(cursor: &mut Cursor, is_original: bool) -> Result<Self, String> {
        let dimensions = cursor.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(format!("it has {dimensions} dimensions, not 1 to 4"));
        }
        let mut sizes = (0..dimensions)
            .map(|_| cursor.u64())
            .collect::<Result<Vec<_>, _>>()?;
        let id = cursor.u32()?;
        let encoding = if is_original {
            Encoding::from_original_id(id)
        } else {
            Encoding::from_id(id)
        }?;
        let offset = cursor.u64()?;
        // The file lists the innermost dimension first.
        let (row, length) = (sizes[0], encoding.block_length as u64);
        sizes.reverse();
        let is_index = is_original && encoding.name == "I32";
        if sizes.contains(&0) && !is_index {
            return Err(format!("its shape {sizes:?} has a size of 0"));
        }
        if !row.is_multiple_of(length) {
            let name = encoding.name;
            return Err(format!(
                "its rows of {row} are not whole blocks of {length}, of which {name} consists"
            ));
        }
        let too_large = || format!("its shape {sizes:?} has more elements than fit in memory");
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

    /// Returns the range of its data in a file of `file_bytes` bytes.
    fn data(
        &self,
        file_bytes: usize,
        data_start: usize,
        alignment: usize,
    ) -> Result<Range<usize>, String> {
        let offset = self.offset;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(format!(
                "its offset {offset} is not a multiple of the alignment {alignment}"
            ));
        }
        let range = usize::try_from(offset).ok().and_then(|offset| {
            let start = data_start.checked_add(offset)?;
            let end = start.checked_add(self.bytes)?;
            (end <= file_bytes).then_some(start..end)
        });
        range.ok_or_else(|| {
            format!(
                "its {} bytes at offset {offset} of the data, which starts at byte {data_start}, \
                 reach beyond the end of the file of {file_bytes} bytes; download it again",
                self.bytes
            )
        })
    }
}

/// Size of a tensor in bytes; `None` if it, or that of its values as f32, overflows.
pub(super) fn bytes_of(shape: &[usize], encoding: Encoding) -> Option<usize> {
    let elements = shape
        .iter()
        .try_fold(1usize, |product, size| product.checked_mul(*size))?;
    isize::try_from(elements.checked_mul(size_of::<f32>())?).ok()?;
    (elements / encoding.block_length).checked_mul(encoding.block_bytes)
}

/// Checks that the data of tensors do not overlap.
fn check_disjoint(tensors: &BTreeMap<String, Tensor>) -> Result<(), String> {
    let tensors = tensors.iter();
    let mut sorted: Vec<_> = tensors
        .filter(|(_, tensor)| !tensor.data.is_empty())
        .collect();
    sorted.sort_by_key(|(_, tensor)| tensor.data.start);
    for pair in sorted.windows(2) {
        let ((name, tensor), (next_name, next)) = (pair[0], pair[1]);
        if tensor.data.end > next.data.start {
            return Err(format!(
                "tensors {} and {} overlap",
                quoted(name),
                quoted(next_name)
            ));
        }
    }
    Ok(())
}

/// Recognises the kind of the file that starts with `head`, unless it is GGUF or unknown.
fn kind_of_file(head: &[u8]) -> Option<&'static str> {
    let starts = |start: &[u8]| head.starts_with(start);
    if head.get(8) == Some(&b'{') {
        return Some("a safetensors file; give the folder that contains it");
    }
    Some(match head {
        _ if starts(b"PK\x03\x04") => {
            "a zip file, as PyTorch writes: give the folder that contains it, or unpack an archive"
        }
        _ if starts(b"\x80\x02") => "a Python pickle; give the folder that contains it",
        _ if starts(b"\x1f\x8b") || starts(b"\x28\xb5\x2f\xfd") || starts(b"7z\xbc\xaf") => {
            "a compressed file; unpack it"
        }
        _ if starts(b"{") => "a JSON file; give the folder that contains it",
        _ if starts(b"\x89HDF") => "a file of TensorFlow or Keras",
        _ if starts(b"\x7fELF") || starts(b"MZ") => "a program",
        _ => return None,
    })
}
