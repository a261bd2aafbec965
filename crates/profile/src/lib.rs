//! Measures how often each FFN neuron is active on calibration text, and samples FFN inputs for training predictors.
//!
//! The model is streamed: one layer is loaded, all calibration text runs through it, its neurons are counted, and the next
//! layer takes its place. Counts are additive: shards of one text, profiled on different machines, [`merge`] to what a single
//! run would have counted.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.
mod activity;
mod calibration;
mod column;
mod error;
mod experts;
mod measure;
mod merge;
mod observe;
mod profile;
mod resume;
mod samples;
mod table;
mod tally;
mod times;
mod traces;

pub use activity::{Counts, HOT_SHARE, LOCALITY_WINDOWS, LayerActivity, Reuse, Skew};
pub use calibration::{Calibration, Part, RESERVED, Sequence, Source};
pub use column::Column;
pub use error::ProfileError;
pub use experts::{ExpertActivity, ExpertPair, ExpertSummary, Held};
pub use measure::{Amount, FIRST_ROUND, Settings, measure};
pub use merge::merge;
pub use profile::{LayerSummary, NeuronsFor, Profile, ProfileDocument, SourceSummary};
pub use table::WORK as TABLE_WORK;
pub use traces::{ActivityBits, Contributions, TracePart, Traces};
