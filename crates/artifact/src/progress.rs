//! Progress reports and interruption of long work.

use crate::Hint;

/// The user interrupted the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Receiver of progress reports, implemented by the command line.
pub trait Progress: Sync {
    /// Starts a task of `total` units, such as "tokens".
    fn begin(&self, title: &str, total: u64, unit: &'static str);
    /// Reports that `count` more units are done.
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if the work is to stop here.
    fn advance(&self, count: u64) -> Result<(), Interrupted>;
    /// Reports that `count` units were done by an earlier run, which says nothing about the speed of this one.
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if the work is to stop here.
    fn skip(&self, count: u64) -> Result<(), Interrupted> {
        self.advance(count)
    }
    /// Reports that the following tasks belong to stage `number` of `count`; the first stage is 1.
    fn stage(&self, _number: usize, _count: usize) {}
    /// Reports one line of general interest, such as the result of a layer.
    fn note(&self, line: &str);
    /// Reports one line of general interest with a remedy.
    fn advise(&self, line: &str, _hint: Hint) {
        self.note(line);
    }
    /// Reports one line for verbose output.
    fn detail(&self, _line: &str) {}
    /// Ends the task.
    fn end(&self);
}

/// Progress that is neither shown nor interrupted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _title: &str, _total: u64, _unit: &'static str) {}
    fn advance(&self, _count: u64) -> Result<(), Interrupted> {
        Ok(())
    }
    fn note(&self, _line: &str) {}
    fn end(&self) {}
}
