//! Benchmarks: time of prompts, decoding, batches, speculation and single FFNs, stage by stage, with the memory probed next to each
//! repeat.

mod batches;
mod ceiling;
mod check;
mod densities;
mod hybrid;
mod measure;
mod parts;
mod speculation;

pub use batches::{BatchBench, BatchMeasured, kv_cache_bytes};
pub use check::{CHECKED_TOKENS, Check, Comparison, check};
pub use densities::{FfnTime, time_ffns};
pub use hybrid::{HybridLayer, HybridTimes, ReadRate, time_hybrid};
pub use measure::{Bench, BytesRead, Measured, Spread, StageCost, Work};
pub use parts::{PartTimes, StageParts, time_parts};
pub use speculation::{Completion, PassTime, SpeculationTimes, time_speculation};
