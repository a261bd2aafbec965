//! Opens files, decompresses them, and removes a byte-order mark.

use std::{
    cell::Cell,
    fs::File,
    io::{self, BufReader, Cursor, Read},
    path::{Path, PathBuf},
    rc::Rc,
};

use flate2::read::MultiGzDecoder;

/// Bytes at the beginning of a file from which its format is recognised.
pub(crate) const HEAD: usize = 64 << 10;

/// Size limit of a record, and of UTF-16 text, in bytes.
pub(crate) const MAX_RECORD: u64 = 64 << 20;

/// Size limit of a compressed file after decompression, in bytes.
const MAX_UNPACKED: u64 = 64 << 30;

/// Maximum number of nested compressions.
const MAX_LAYERS: usize = 2;

const UTF8_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// Returns the last extension of `name`, in lower case.
pub(crate) fn ending(name: &Path) -> Option<String> {
    let ending = name.extension()?;
    Some(ending.to_string_lossy().to_ascii_lowercase())
}

/// Content of a file.
pub(crate) struct Content {
    /// The first [`HEAD`] bytes, or all of a shorter file.
    pub(crate) head: Vec<u8>,
    /// Whether `head` is the whole content.
    pub(crate) is_whole: bool,
    rest: Box<dyn Read>,
    /// The file's name without compression extensions, such as `.gz`.
    pub(crate) name: PathBuf,
    /// Whether the file is neither compressed nor re-encoded.
    pub(crate) is_plain: bool,
}

impl Content {
    /// Opens the file at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::new(File::open(path)?, path)
    }

    /// Opens the content of `file`, whose name is `name`.
    pub(crate) fn new(file: impl Read + 'static, name: &Path) -> io::Result<Self> {
        let mut content = Self::beginning(Box::new(file), name.to_owned(), true)?;
        for _ in 0..MAX_LAYERS {
            let name = content.name.clone();
            let decoder: Box<dyn Read> = match content.head[..] {
                [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(BufReader::new(content.reader()))),
                [0x28, 0xb5, 0x2f, 0xfd, ..] => {
                    Box::new(zstd::stream::read::Decoder::new(content.reader())?)
                }
                _ => break,
            };
            let limited = Limited::new(decoder, MAX_UNPACKED);
            content = Self::beginning(Box::new(limited), name, false)?;
        }
        // Some downloads are decompressed on the way but keep their names.
        while matches!(
            ending(&content.name).as_deref(),
            Some("gz" | "zst" | "zstd")
        ) {
            content.name.set_extension("");
        }
        match content.head[..] {
            [0xef, 0xbb, 0xbf, ..] => drop(content.head.drain(..UTF8_MARK.len())),
            [0xff, 0xfe, ..] => return content.utf16_decoded(u16::from_le_bytes),
            [0xfe, 0xff, ..] => return content.utf16_decoded(u16::from_be_bytes),
            _ => {}
        }
        Ok(content)
    }

    fn beginning(mut rest: Box<dyn Read>, name: PathBuf, is_plain: bool) -> io::Result<Self> {
        let mut head = Vec::new();
        (&mut rest).take(HEAD as u64).read_to_end(&mut head)?;
        Ok(Self {
            is_whole: head.len() < HEAD,
            head,
            rest,
            name,
            is_plain,
        })
    }

    /// Returns a reader that starts at the beginning of the content.
    pub(crate) fn reader(self) -> impl Read {
        Cursor::new(self.head).chain(self.rest)
    }

    fn utf16_decoded(self, unit: fn([u8; 2]) -> u16) -> io::Result<Self> {
        let name = self.name.clone();
        let mut bytes = Vec::new();
        Limited::new(self.reader(), MAX_RECORD).read_to_end(&mut bytes)?;
        let units = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]]));
        let text: Result<String, _> = char::decode_utf16(units.skip(1)).collect();
        match text {
            Ok(text) => Self::beginning(Box::new(Cursor::new(text)), name, false),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }
}

/// Reads the file at `path`, decompresses gzip and zstd, and removes a byte-order mark.
///
/// # Errors
///
/// The file cannot be read, is damaged, or has more than `most` bytes.
pub fn unpacked(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Limited::new(Content::open(path)?.reader(), most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reader that fails once a byte limit is exceeded.
pub(crate) struct Limited<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R> Limited<R> {
    pub(crate) fn new(inner: R, most: u64) -> Self {
        Self {
            inner,
            left: Rc::new(Cell::new(most)),
        }
    }

    /// Returns the number of bytes that may still be read; the caller can raise it.
    pub(crate) fn left(&self) -> Rc<Cell<u64>> {
        Rc::clone(&self.left)
    }
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        match self.left.get().checked_sub(read as u64) {
            Some(left) => self.left.set(left),
            None => {
                let message = "it exceeds the size limit";
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
            }
        }
        Ok(read)
    }
}
