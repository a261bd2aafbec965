//! Rows of one run, a JSON object a line, written as they come: a run that was stopped goes on where it was.

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

/// What tells a run's rows from those of others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunName<'a> {
    /// How every line begins, such as `{"point":`.
    pub beginning: &'static str,
    /// What a line is, such as `line of completions`.
    pub what: &'static str,
    /// The settings, digested; the field `run` of every row.
    pub run: &'a str,
}

/// A file of rows of one run, open for more.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the file at `path`, or begins it, and returns the rows that are there, as read by `read`.
    ///
    /// Fails where it has rows of another run, or is none of ours. A last line that was not written to its end is
    /// dropped.
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
        // Who is alone with it reads it: nobody adds a row between that and the first of ours.
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
        // Only what is known for ours is shortened.
        file.set_len(whole as u64).map_err(unwritable)?;
        let journal = Self {
            path: path.to_owned(),
            file,
        };
        Ok((journal, found))
    }

    /// Adds a row, which begins as the file's rows do and has the field `run`.
    pub(crate) fn push(&mut self, row: &Value) -> Result<(), EvalError> {
        // In one piece, so that nobody reads half of it but where the system itself stopped.
        let written = self.file.write_all(format!("{row}\n").as_bytes());
        written.map_err(|source| EvalError::Unwritable {
            path: self.path.clone(),
            source,
        })
    }
}
