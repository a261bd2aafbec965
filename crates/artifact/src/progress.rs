//! How long work tells a person about itself, and how a person stops it.

/// The user asked to stop; what was finished is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "interrupted; run the same command again: long work goes on where it stopped, short work begins anew"
)]
pub struct Interrupted;

/// Where long work reports. Libraries know this trait, the command line draws the bar.
pub trait Progress: Sync {
    /// A new piece of work begins: `total` units called `unit`, such as "tokens".
    fn begin(&self, title: &str, total: u64, unit: &'static str);
    /// `count` more units are done; an error means that the work should stop here.
    fn advance(&self, count: u64) -> Result<(), Interrupted>;
    /// One line a person may want to read, such as the result of a layer.
    fn note(&self, line: &str);
    /// One line for those who want to know more.
    fn detail(&self, _line: &str) {}
    /// The piece of work has ended.
    fn end(&self);
}

/// Says nothing and never interrupts.
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
