//! Writing safetensors files, from whole tensors or streamed in pieces, so that a file larger than memory
//! can be written in one pass over its inputs.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    fs::{File, OpenOptions},
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::{
    ArtifactError, Header,
    tensor_file::{CONTENT_SETTING, Dtype, HEADER_KEY, content_digest},
    write::write_with,
};

/// Element type and dimensions of every tensor of a file, by name.
pub type TensorShapes = BTreeMap<String, (Dtype, Vec<usize>)>;

/// Tensor to write, row-major and little-endian.
#[derive(Debug, Clone)]
pub struct TensorSource<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Elements; the length matches type and dimensions.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> TensorSource<'a> {
    /// Creates a tensor with borrowed bytes.
    pub fn borrowed(dtype: Dtype, shape: Vec<usize>, bytes: &'a [u8]) -> Self {
        Self {
            dtype,
            shape,
            bytes: Cow::Borrowed(bytes),
        }
    }

    /// Creates a tensor that owns its bytes.
    pub fn owned(dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>) -> Self {
        Self {
            dtype,
            shape,
            bytes: Cow::Owned(bytes),
        }
    }
}

/// Writes a safetensors file atomically, with `header` in its metadata.
///
/// # Errors
///
/// [`ArtifactError::Write`].
///
/// # Panics
///
/// If the bytes of a tensor do not match its dimensions.
pub fn write_tensors(
    path: &Path,
    header: Option<&Header>,
    tensors: &BTreeMap<String, TensorSource<'_>>,
) -> Result<(), ArtifactError> {
    let shapes = tensors
        .iter()
        .map(|(name, source)| (name.clone(), (source.dtype, source.shape.clone())))
        .collect();
    fill_tensors(path, header, &shapes, |writer| {
        tensors
            .iter()
            .try_for_each(|(name, source)| writer.append(name, &source.bytes))
    })
}

/// As [`write_tensors`], with the digest of header and tensors in the header's setting [`CONTENT_SETTING`].
///
/// # Errors
///
/// [`ArtifactError::Write`].
///
/// # Panics
///
/// If the bytes of a tensor do not match its dimensions.
pub fn write_sealed_tensors(
    path: &Path,
    header: &Header,
    tensors: &BTreeMap<String, TensorSource<'_>>,
) -> Result<(), ArtifactError> {
    let described = tensors.iter().map(|(name, source)| {
        let bytes: &[u8] = &source.bytes;
        (&name[..], source.dtype, &source.shape[..], vec![bytes])
    });
    let content = content_digest(header, described).to_string();
    let header = header.clone().with_setting(CONTENT_SETTING, content);
    write_tensors(path, Some(&header), tensors)
}

/// Writes a safetensors file atomically, with `header` in its metadata; `fill` appends the bytes of each
/// tensor of `shapes` in pieces, in any order across tensors.
///
/// # Errors
///
/// [`ArtifactError::Write`], or the error of `fill`.
///
/// # Panics
///
/// If `fill` does not append exactly the bytes that `shapes` declares.
pub fn fill_tensors<Failure: From<ArtifactError>>(
    path: &Path,
    header: Option<&Header>,
    shapes: &TensorShapes,
    fill: impl FnOnce(&mut TensorWriter) -> Result<(), Failure>,
) -> Result<(), Failure> {
    write_with(path, |temporary| {
        let mut writer = TensorWriter::create(path, temporary, header, shapes)?;
        fill(&mut writer)?;
        for (name, slot) in &writer.slots {
            assert_eq!(slot.next, slot.end, "`{name}` is filled");
        }
        Ok(())
    })
}

/// Safetensors file whose tensors are being appended to.
#[derive(Debug)]
pub struct TensorWriter {
    path: PathBuf,
    file: File,
    slots: HashMap<String, Slot>,
    /// File offset of the next write.
    position: u64,
    /// Length of the complete file.
    end: u64,
    /// Whether each page was written.
    page_written: Vec<bool>,
    /// Buffer of one page.
    page: Vec<u8>,
}

/// Huge page size of most processors. The page cache keeps a file in the units in which it was first
/// written, so every page is first written as a whole: reads from the mapped file are then 10 to 25%
/// faster.
const PAGE: u64 = 2 << 20;

/// Unwritten range of a tensor in the file.
#[derive(Debug)]
struct Slot {
    next: u64,
    end: u64,
}

impl TensorWriter {
    /// Writes the tensor table into `temporary`; `path` is for messages.
    fn create(
        path: &Path,
        temporary: &Path,
        header: Option<&Header>,
        shapes: &TensorShapes,
    ) -> Result<Self, ArtifactError> {
        // Like the safetensors library: widest elements first, so that each is aligned.
        let mut order: Vec<_> = shapes.iter().collect();
        order.sort_by(|(a, (a_type, _)), (b, (b_type, _))| b_type.cmp(a_type).then(a.cmp(b)));
        let mut end = 0;
        let mut infos = Vec::with_capacity(order.len());
        for (name, (dtype, shape)) in order {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            infos.push((
                name.clone(),
                TensorInfo {
                    dtype: *dtype,
                    shape: shape.clone(),
                    data_offsets: (start, end),
                },
            ));
        }
        let metadata = header.map(|header| {
            let text = serde_json::to_string(header).expect("a header is plain JSON");
            HashMap::from([(HEADER_KEY.to_owned(), text)])
        });
        let ranges: Vec<_> = infos
            .iter()
            .map(|(name, info)| (name.clone(), info.data_offsets))
            .collect();
        let metadata = Metadata::new(metadata, infos).expect("tensors are contiguous");
        let mut table = serde_json::to_vec(&metadata).expect("the tensor table is plain JSON");
        table.resize(table.len().next_multiple_of(8), b' ');
        let file = OpenOptions::new()
            .write(true)
            .open(temporary)
            .map_err(ArtifactError::write(path))?;
        let data_start = (8 + table.len()) as u64;
        let slot = |(start, end)| Slot {
            next: data_start + start as u64,
            end: data_start + end as u64,
        };
        let mut writer = Self {
            path: path.to_owned(),
            file,
            slots: ranges
                .into_iter()
                .map(|(name, range)| (name, slot(range)))
                .collect(),
            position: 0,
            end: data_start + end as u64,
            page_written: Vec::new(),
            page: Vec::new(),
        };
        let length = (table.len() as u64).to_le_bytes();
        writer.write_at(0, &length)?;
        writer.write_at(8, &table)?;
        Ok(writer)
    }

    /// Appends `bytes` to the tensor called `name`.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    ///
    /// # Panics
    ///
    /// If the tensor was not declared, or is full.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), ArtifactError> {
        let slot = self.slots.get_mut(name).expect("the tensor was declared");
        let start = slot.next;
        slot.next += bytes.len() as u64;
        assert!(slot.next <= slot.end, "`{name}` has room");
        self.write_at(start, bytes)
    }

    /// Writes `bytes` at `start`; the first write to a page fills the rest of it with zeros.
    fn write_at(&mut self, start: u64, mut bytes: &[u8]) -> Result<(), ArtifactError> {
        let mut start = start;
        while !bytes.is_empty() {
            let first = start / PAGE * PAGE;
            let room = (first + PAGE).min(self.end) - first;
            let within = start - first;
            let (now, later) = bytes.split_at(bytes.len().min((room - within) as usize));
            let index = (first / PAGE) as usize;
            if index >= self.page_written.len() {
                self.page_written.resize(index + 1, false);
            }
            let is_written = std::mem::replace(&mut self.page_written[index], true);
            if is_written || now.len() as u64 == room {
                self.write_piece(start, now)?;
            } else {
                let mut page = std::mem::take(&mut self.page);
                page.clear();
                page.resize(room as usize, 0);
                page[within as usize..][..now.len()].copy_from_slice(now);
                self.write_piece(first, &page)?;
                self.page = page;
            }
            (start, bytes) = (start + now.len() as u64, later);
        }
        Ok(())
    }

    fn write_piece(&mut self, start: u64, bytes: &[u8]) -> Result<(), ArtifactError> {
        let write = |file: &mut File| {
            if self.position != start {
                file.seek(SeekFrom::Start(start))?;
            }
            file.write_all(bytes)
        };
        write(&mut self.file).map_err(ArtifactError::write(&self.path))?;
        self.position = start + bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorFile;

    #[test]
    fn pieces_in_any_order_give_the_file_of_the_safetensors_library() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..48).collect();
        let tensors = BTreeMap::from([
            (
                "narrow".to_owned(),
                TensorSource::borrowed(Dtype::U8, vec![4, 2], &bytes[..8]),
            ),
            (
                "wide".to_owned(),
                TensorSource::owned(Dtype::F32, vec![10], bytes[8..].to_vec()),
            ),
        ]);
        let whole = folder.path().join("whole.safetensors");
        write_tensors(&whole, None, &tensors).unwrap();
        let pieces = folder.path().join("pieces.safetensors");
        let shapes = tensors
            .iter()
            .map(|(name, source)| (name.clone(), (source.dtype, source.shape.clone())))
            .collect();
        fill_tensors(&pieces, None, &shapes, |writer| {
            writer.append("wide", &bytes[8..20])?;
            writer.append("narrow", &bytes[..3])?;
            writer.append("wide", &bytes[20..])?;
            writer.append("narrow", &bytes[3..8])
        })
        .unwrap();
        let views = tensors.iter().map(|(name, source)| {
            let view = safetensors::tensor::TensorView::new(
                source.dtype,
                source.shape.clone(),
                &source.bytes,
            );
            (name, view.unwrap())
        });
        let expected = safetensors::serialize(views, None).unwrap();
        assert_eq!(std::fs::read(&whole).unwrap(), expected);
        assert_eq!(std::fs::read(&pieces).unwrap(), expected);
        let file = TensorFile::open(&pieces).unwrap();
        assert_eq!(file.find("wide").unwrap().bytes, &bytes[8..]);
    }

    #[test]
    fn pieces_across_pages_give_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let byte = |index: usize| (index % 251) as u8;
        let lengths = [5 << 20, 3, (2 << 20) + 77];
        let named = |index: usize| format!("tensor{index}");
        let shapes: TensorShapes = (lengths.iter().enumerate())
            .map(|(index, &length)| (named(index), (Dtype::U8, vec![length])))
            .collect();
        let path = folder.path().join("pages.safetensors");
        fill_tensors(&path, None, &shapes, |writer| {
            let mut filled = [0; 3];
            // Short and long pieces, of which some span a whole page.
            let mut sizes = [1, (2 << 20) + 5, 100_000].into_iter().cycle();
            while filled != lengths {
                let size = sizes.next().expect("the sizes repeat");
                for (index, &length) in lengths.iter().enumerate().rev() {
                    let end = length.min(filled[index] + size);
                    let piece: Vec<u8> = (filled[index]..end).map(byte).collect();
                    writer.append(&named(index), &piece)?;
                    filled[index] = end;
                }
            }
            Ok::<(), ArtifactError>(())
        })
        .unwrap();
        let file = TensorFile::open(&path).unwrap();
        for (index, &length) in lengths.iter().enumerate() {
            let expected: Vec<u8> = (0..length).map(byte).collect();
            assert!(
                file.find(&named(index)).unwrap().bytes == expected,
                "{index}"
            );
        }
    }

    #[test]
    fn a_failure_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        let shapes = BTreeMap::from([("t".to_owned(), (Dtype::U8, vec![4]))]);
        let result = fill_tensors(&path, None, &shapes, |writer| {
            writer.append("t", &[1, 2])?;
            Err(ArtifactError::MissingTensor {
                path: path.clone(),
                tensor: "t".to_owned(),
            })
        });
        assert!(result.is_err());
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}
