//! Measures which FFN neurons fire on calibration text.
//!
//! The model is streamed: one layer is loaded, all calibration text goes through it, its neurons
//! are counted, and the next layer takes its place. What is counted adds up: shards of one text,
//! profiled on different machines, [`merge`] to what one run would have counted.

mod activity;
mod calibration;
mod column;
mod error;
mod measure;
mod merge;
mod observe;
mod profile;
mod resume;
mod samples;
mod tally;
mod traces;

pub use activity::{Counts, HOT_SHARE, LOCALITY_WINDOWS, LayerActivity, Reuse, Skew};
pub use calibration::{Calibration, Part, RESERVED, Sequence, Shard, Source};
pub use column::Column;
pub use error::ProfileError;
pub use measure::{Amount, FIRST_ROUND, Settings, measure};
pub use merge::merge;
pub use profile::{LayerSummary, NeuronsFor, Profile, ProfileDocument, SourceSummary};
pub use traces::{ActivityBits, Contributions, TracePart, Traces};
