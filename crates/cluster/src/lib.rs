//! Prepares a model on a cluster: the stages of `prepare` as array jobs, one shard a task.
//!
//! ```text
//! profile 1…n ──▶ merge ──▶ train 1…m ──▶ place ──▶ certify 1…k ──▶ finish
//! ```
//!
//! Every stage is a shell script that the scheduler runs once for each task. Tasks resume, so that a stage can be submitted
//! again at any time.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod error;
mod estimate;
mod jobs;
mod kubernetes;
mod slurm;
mod stages;
mod watch;

pub use error::ClusterError;
pub use estimate::{Needs, Rates, Workload};
pub use kubernetes::{Volume, write_kubernetes};
pub use slurm::write_slurm;
pub use stages::{Preparation, Shards, Stage, StageKind};
pub use watch::submit;
