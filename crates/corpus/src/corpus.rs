//! [`Corpus`]: the documents at a path.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    path::Path,
};

use crate::{
    CorpusError, Document, Encoder, Format, Skipped, Unusable, csv,
    files::Files,
    json, parquet,
    sink::{Sink, Stop},
    unpack::{Content, ending},
};

/// Path that means standard input.
pub const STDIN: &str = "-";

/// Encoded documents, the formats they were in, and what was skipped.
#[derive(Debug)]
pub struct Corpus {
    /// Token ids of each document.
    pub documents: Vec<Vec<u32>>,
    /// Number of documents in each format.
    pub formats: BTreeMap<Format, usize>,
    /// Files and records that were not used.
    pub skipped: Vec<Skipped>,
}

impl Corpus {
    /// Reads the file at `path`, all files in the folder there in sorted order, or standard input for [`STDIN`].
    ///
    /// Reading ends when the documents suffice for `limit` tokens in sequences of `length` tokens that alternate between
    /// documents. At most `limit` tokens of each document are kept. Memory holds these tokens, one record, and one batch of
    /// a Parquet file.
    ///
    /// # Errors
    ///
    /// The folder cannot be listed, or a text cannot be encoded for the model. Unusable files and records are not errors:
    /// they are listed in [`skipped`](Self::skipped).
    pub fn read(
        path: &Path,
        encoder: &Encoder<'_>,
        length: usize,
        limit: usize,
    ) -> Result<Self, CorpusError> {
        let is_folder = path.is_dir();
        let Files { files, mut skipped } = if is_folder {
            Files::new(path)?
        } else {
            Files {
                files: vec![path.to_owned()],
                skipped: Vec::new(),
            }
        };
        let mut sink = Sink::new(encoder, length, limit);
        let mut formats = BTreeMap::new();
        for path in files {
            if sink.is_full() {
                break;
            }
            let mut format = None;
            let rest = match read_file(&path, is_folder, &mut format, &mut sink) {
                Ok(()) | Err(Stop::Enough) => None,
                Err(Stop::Unusable(reason)) => Some(reason),
                Err(Stop::Failed(error)) => return Err(error),
            };
            let (records, unusable, first) = sink.end_file();
            let used = records - unusable;
            if let Some(format) = format.filter(|_| used > 0) {
                *formats.entry(format).or_default() += used;
            }
            let records = (used > 0).then_some(unusable);
            let reason = match (rest, first) {
                // A text file is a single record, so its reason is that of the file.
                (None, Some((_, reason))) if format == Some(Format::Text) => Some(reason),
                (None, Some((number, reason))) if used == 0 => Some(Unusable::NoRecord {
                    number,
                    reason: Box::new(reason),
                }),
                (None, Some((_, reason))) => Some(reason),
                (None, None) if used == 0 => Some(Unusable::Empty),
                (rest, _) => rest,
            };
            skipped.extend(reason.map(|reason| Skipped {
                path,
                records,
                reason,
            }));
        }
        Ok(Self {
            documents: sink.documents,
            formats,
            skipped,
        })
    }
}

/// Reads the file at `path`, and sets its format when it is known.
fn read_file(
    path: &Path,
    is_in_folder: bool,
    format: &mut Option<Format>,
    sink: &mut Sink<'_>,
) -> Result<(), Stop> {
    let content = if path == Path::new(STDIN) {
        Content::new(io::stdin(), Path::new(""))?
    } else {
        Content::open(path)?
    };
    let found = Format::new(&content, is_in_folder)?;
    *format = Some(found);
    match found {
        Format::Text => read_text(content, sink),
        Format::Json => json::read_values(content.reader(), sink),
        Format::JsonLines => json::read_lines(content.reader(), sink),
        Format::Csv => {
            let delimiter = match ending(&content.name).as_deref() {
                Some("tsv") => b'\t',
                _ => b',',
            };
            csv::read(content.reader(), delimiter, sink)
        }
        Format::Parquet if content.is_plain && path != Path::new(STDIN) => {
            parquet::read(path, sink)
        }
        Format::Parquet => {
            let mut file = tempfile::NamedTempFile::new()?;
            io::copy(&mut content.reader(), &mut file)?;
            parquet::read(file.path(), sink)
        }
    }
}

/// Reads a file that is one document.
fn read_text(content: Content, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let most = sink.most_bytes();
    let mut bytes = Vec::new();
    let read = content.reader().take(most as u64).read_to_end(&mut bytes)?;
    if bytes.contains(&0) {
        return Err(Unusable::Binary.into());
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        // The last character may have been cut off.
        Err(error) if read == most && error.utf8_error().error_len().is_none() => {
            let valid = error.utf8_error().valid_up_to();
            let mut bytes = error.into_bytes();
            bytes.truncate(valid);
            String::from_utf8(bytes).expect("this much is valid")
        }
        Err(_) => return Err(Unusable::NotUtf8.into()),
    };
    sink.take(if text.trim().is_empty() {
        Err(Unusable::Empty)
    } else {
        Ok(Document::Text(text))
    })
}
