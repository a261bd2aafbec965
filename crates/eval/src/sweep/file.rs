//! The file of a sweep's rows, to which every row is appended as soon as it is measured.

use std::path::Path;

use serde::Deserialize;

use super::SweepRow;
use crate::{
    EvalError,
    journal::{Journal, Run, RunName},
};

/// An open file of rows of one run.
#[derive(Debug)]
pub struct SweepFile {
    journal: Journal,
}

impl SweepFile {
    /// Opens or creates the file at `path` for `run`, and reads its rows.
    ///
    /// A last line that was not completed is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, is open in another process, or has anything but rows of this run.
    pub fn open(path: &Path, run: &Run) -> Result<(Self, Vec<SweepRow>), EvalError> {
        let name = RunName {
            beginning: "{\"point\":",
            what: "line of a sweep",
            run,
        };
        let (journal, rows) = Journal::open_rows(path, name, |row| {
            SweepRow::deserialize(row.value())
                .map_err(|error| row.wrong(format!("it is not a row of a sweep: {error}")))
        })?;
        Ok((Self { journal }, rows))
    }

    /// Appends `row`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, or if a figure of the row is not finite: JSON has no such number.
    pub fn push(&mut self, row: &SweepRow) -> Result<(), EvalError> {
        let value = serde_json::to_value(row).map_err(|_| EvalError::FigureNotFinite)?;
        // JSON writes what is not finite as null, which cannot be read back.
        SweepRow::deserialize(&value).map_err(|_| EvalError::FigureNotFinite)?;
        self.journal.push(&value)
    }
}
