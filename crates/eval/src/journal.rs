//! A file of rows of one run, one JSON object per line, appended as they come, so that a stopped run can resume.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    EvalError,
    data_file::{self, Row},
};

/// Properties that all rows of a run share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunName<'a> {
    /// First characters of every line, such as `{"point":`.
    pub beginning: &'static str,
    /// Name of a line in messages, such as `line of completions`.
    pub what: &'static str,
    /// Digest of the settings: the field `run` of every row.
    pub run: &'a str,
}

/// A file of rows of one run, open for appending.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or creates the file at `path` and returns its rows, converted by `read`. An incomplete last line is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, is open in another process, or has other content than rows of this run.
    pub(crate) fn open_rows<Item>(
        path: &Path,
        name: RunName<'_>,
        read: impl Fn(Row) -> Result<Item, EvalError>,
    ) -> Result<(Self, Vec<Item>), EvalError> {
        let unwritable = |source| EvalError::Unwritable {
            path: path.to_owned(),
            source,
        };
        if path.exists() && !path.is_file() {
            return Err(unwritable(std::io::Error::other("it is no file")));
        }
        let mut file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(unwritable)?;
        // Locked before it is read, so that no other run can append in between.
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => EvalError::Busy {
                path: path.to_owned(),
            },
            TryLockError::Error(error) => unwritable(error),
        })?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(|source| EvalError::Unreadable {
                path: path.to_owned(),
                source,
            })?;
        let whole = bytes
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        let (lines, rest) = bytes.split_at(whole);
        let beginning = name.beginning.as_bytes();
        let length = rest.len().min(beginning.len());
        if rest[..length] != beginning[..length] {
            return Err(EvalError::OtherContent {
                path: path.to_owned(),
                line: lines.split(|byte| *byte == b'\n').count(),
                reason: format!("it is no {}", name.what),
            });
        }
        let mut found = Vec::new();
        if whole > 0 {
            for row in data_file::parse(path, lines)? {
                if row.text("run")? != name.run {
                    return Err(EvalError::OtherContent {
                        path: path.to_owned(),
                        line: row.line,
                        reason: "it is of a run with other settings, another bundle or other data"
                            .to_owned(),
                    });
                }
                found.push(read(row)?);
            }
        }
        // Truncated only now that it is known for a file of this run.
        file.set_len(whole as u64).map_err(unwritable)?;
        let journal = Self {
            path: path.to_owned(),
            file,
        };
        Ok((journal, found))
    }

    /// Appends `row`, which has the field `run`.
    pub(crate) fn push(&mut self, row: &Value) -> Result<(), EvalError> {
        // In one write, so that only a crash of the system can leave half a line.
        let written = self.file.write_all(format!("{row}\n").as_bytes());
        written.map_err(|source| EvalError::Unwritable {
            path: self.path.clone(),
            source,
        })
    }
}
