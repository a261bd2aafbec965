//! `pytorch_model.bin`: a zip of a pickle, which describes the tensors, and of their data.
//!
//! A pickle is a program, but nothing is executed here: it is parsed as data. A pickle that names anything but
//! tensors is refused, and so are offsets outside the file.

mod element;
mod machine;
mod tensors;

use std::{
    collections::BTreeMap,
    io::Cursor,
    ops::Range,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use powerinfer_artifact::{Digest, mapped_file::FileBytes};

use powerinfer_model::{
    Files, ModelError,
    container::{Container, sampled_digest},
};

use crate::ImportError;
use element::Element;
use tensors::PickledTensor;

/// One or more files written by `torch.save`.
#[derive(Debug)]
pub(crate) struct Pickles {
    files: Vec<PickleFile>,
}

impl Pickles {
    /// Opens `pytorch_model.bin`, or its shards; `None` if there is neither.
    pub(crate) fn open(files: &Files) -> Result<Option<Self>, ImportError> {
        let Some(shards) = files.shards("pytorch_model.bin")? else {
            return Ok(None);
        };
        let files = shards
            .into_iter()
            .map(|(path, bytes)| PickleFile::from_bytes(&path, bytes))
            .collect::<Result<_, _>>()?;
        Ok(Some(Self { files }))
    }

    /// Opens the file at `path`.
    pub(crate) fn open_file(path: &Path) -> Result<Self, ImportError> {
        let file = PickleFile::from_bytes(path, FileBytes::open(path)?)?;
        Ok(Self { files: vec![file] })
    }

    fn find(&self, name: &str) -> Option<(&PickleFile, &StoredTensor)> {
        self.files
            .iter()
            .find_map(|file| file.tensors.get(name).map(|tensor| (file, tensor)))
    }

    fn expect(&self, name: &str) -> Result<(&PickleFile, &StoredTensor), ModelError> {
        self.find(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.path(name),
            tensor: name.to_owned(),
        })
    }
}

impl Container for Pickles {
    fn names(&self) -> Vec<String> {
        self.files
            .iter()
            .flat_map(|file| file.tensors.keys().cloned())
            .collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.find(name)
            .map(|(_, tensor)| tensor.about.shape.clone())
    }

    fn path(&self, name: &str) -> PathBuf {
        match self.find(name) {
            Some((file, _)) => file.path.clone(),
            None => self
                .files
                .first()
                .map_or_else(PathBuf::new, |file| file.path.clone()),
        }
    }

    fn check_type(&self, name: &str) -> Result<(), ModelError> {
        let (file, tensor) = self.expect(name)?;
        file.check_type(name, tensor)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let (file, tensor) = self.expect(name)?;
        file.read(name, tensor, None)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let (file, tensor) = self.expect(name)?;
        file.read(name, tensor, Some(rows))
    }

    fn digest(&self, name: &str) -> Result<Digest, ModelError> {
        let (file, tensor) = self.expect(name)?;
        let PickledTensor { element, shape, .. } = &tensor.about;
        let kind = format!("{name} {element:?} {shape:?}");
        let digest = sampled_digest(&kind, &file.bytes[tensor.storage.clone()]);
        file.bytes.release(tensor.storage.clone()); // a page fault may map far more than was read
        Ok(digest)
    }
}

/// Tensor and the location of its storage in the file.
#[derive(Debug)]
struct StoredTensor {
    about: PickledTensor,
    storage: Range<usize>,
}

/// File written by `torch.save`.
#[derive(Debug)]
pub(crate) struct PickleFile {
    path: PathBuf,
    bytes: FileBytes,
    tensors: BTreeMap<String, StoredTensor>,
}

impl PickleFile {
    /// Parses the zip directory and the pickle; `path` is for messages.
    fn from_bytes(path: &Path, bytes: FileBytes) -> Result<Self, ImportError> {
        let bad = |reason: String| ImportError::BadPickle {
            path: path.to_owned(),
            reason,
        };
        let entries = entries(&bytes).map_err(bad)?;
        let Some((prefix, range)) = entries.pickle else {
            return Err(bad("it contains no `data.pkl`".to_owned()));
        };
        let mut tensors = BTreeMap::new();
        for (name, about) in tensors::tensors(&bytes[range]).map_err(bad)? {
            let entry = format!("{prefix}data/{}", about.storage);
            let Some(storage) = entries.others.get(&entry) else {
                return Err(bad(format!(
                    "tensor `{name}` refers to `{entry}`, which does not exist"
                )));
            };
            let held = storage.len() / about.element.bytes();
            // Overlapping elements could expand a small storage to a tensor of any size.
            let elements = about.elements();
            if about.last_element() >= held || elements > held {
                return Err(bad(format!(
                    "tensor `{name}` reaches beyond its storage `{entry}`"
                )));
            }
            let storage = storage.clone();
            tensors.insert(name, StoredTensor { about, storage });
        }
        Ok(Self {
            path: path.to_owned(),
            bytes,
            tensors,
        })
    }

    fn check_type(&self, name: &str, tensor: &StoredTensor) -> Result<(), ModelError> {
        match tensor.about.element {
            Element::Other(kind) => Err(ModelError::WrongType {
                path: self.path.clone(),
                tensor: name.to_owned(),
                found: kind.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Reads a tensor, or a range of its rows.
    fn read(
        &self,
        name: &str,
        tensor: &StoredTensor,
        rows: Option<Range<usize>>,
    ) -> Result<Vec<f32>, ModelError> {
        let PickledTensor {
            element,
            mut offset,
            mut shape,
            strides,
            ..
        } = tensor.about.clone();
        if let (Some(rows), Some(count)) = (rows, shape.first_mut()) {
            assert!(
                rows.start < rows.end && rows.end <= *count,
                "the rows exist"
            );
            offset += rows.start * strides[0];
            *count = rows.len();
        }
        let bytes = &self.bytes[tensor.storage.clone()];
        let at = |index: usize| -> f32 {
            match element {
                Element::F32 => bytemuck::pod_read_unaligned(&bytes[index * 4..][..4]),
                Element::F64 => {
                    bytemuck::pod_read_unaligned::<f64>(&bytes[index * 8..][..8]) as f32
                }
                Element::F16 => {
                    f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32()
                }
                Element::Bf16 => {
                    bf16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32()
                }
                Element::Other(_) => f32::NAN,
            }
        };
        self.check_type(name, tensor)?;
        let mut values = Vec::with_capacity(shape.iter().product());
        // Count through the indices, the last dimension fastest.
        let mut indices = vec![0usize; shape.len()];
        let mut place = offset;
        'all: loop {
            values.push(at(place));
            for dimension in (0..shape.len()).rev() {
                indices[dimension] += 1;
                place += strides[dimension];
                if indices[dimension] < shape[dimension] {
                    continue 'all;
                }
                place -= strides[dimension] * shape[dimension];
                indices[dimension] = 0;
            }
            self.bytes.release(tensor.storage.clone()); // models may be larger than memory
            return Ok(values);
        }
    }
}

/// Entries of a zip file.
#[derive(Default)]
struct Entries {
    /// The pickle's folder and byte range.
    pickle: Option<(String, Range<usize>)>,
    /// Byte ranges of all other entries by name.
    others: BTreeMap<String, Range<usize>>,
}

/// Locates the entries of a zip file, which must be uncompressed.
fn entries(bytes: &[u8]) -> Result<Entries, String> {
    let mut zip = zip::ZipArchive::new(Cursor::new(bytes)).map_err(|error| {
        format!("it is not a zip ({error}); files saved by PyTorch before 1.6 must be saved again by a newer version, or as safetensors")
    })?;
    let mut entries = Entries::default();
    for index in 0..zip.len() {
        let entry = zip.by_index_raw(index).map_err(|error| error.to_string())?;
        let name = entry
            .name()
            .map_err(|error| error.to_string())?
            .into_owned();
        if entry.compression() != zip::CompressionMethod::Stored {
            return Err(format!(
                "`{name}` in it is compressed, which PyTorch never does"
            ));
        }
        let range = entry.data_start().and_then(|start| {
            let start = usize::try_from(start).ok()?;
            let end = start.checked_add(usize::try_from(entry.size()).ok()?)?;
            (end <= bytes.len()).then_some(start..end)
        });
        let Some(range) = range else {
            return Err(format!("`{name}` in it reaches beyond the end of the file"));
        };
        match name.strip_suffix("data.pkl") {
            Some(prefix) => entries.pickle = Some((prefix.to_owned(), range)),
            None => {
                entries.others.insert(name, range);
            }
        }
    }
    Ok(entries)
}
