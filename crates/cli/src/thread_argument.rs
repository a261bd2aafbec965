//! `--threads`.

use clap::builder::RangedU64ValueParser;
use powerinfer_planner::machine::usual_threads;

/// How many threads compute.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct ThreadArgument {
    /// Threads to compute with [default: the number that decoded fastest on this machine, or one per physical core]
    #[arg(short, long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    threads: Option<usize>,
}

impl ThreadArgument {
    pub(crate) fn count(self) -> usize {
        self.threads.unwrap_or_else(|| usual_threads().min(1024))
    }
}
