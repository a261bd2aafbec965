//! Errors of preparing a model on a cluster.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, progress::Interrupted};

/// Error of writing, submitting or watching the stages.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A file cannot be written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A folder that holds something else.
    #[error("`{folder}` was not made by this command; name another folder, or remove it")]
    Foreign {
        /// The folder.
        folder: PathBuf,
    },
    /// A path outside the volume that pods mount.
    #[error(
        "`{folder}` is not inside `{mount}`, where pods have the volume; run this command inside it"
    )]
    OutsideVolume {
        /// The folder.
        folder: PathBuf,
        /// Mount point of the volume.
        mount: PathBuf,
    },
    /// A program of the scheduler that is missing or fails.
    #[error("`{program}` failed: {reason}")]
    Scheduler {
        /// The program.
        program: String,
        /// Last line of its stderr, or why it could not be run.
        reason: String,
    },
    /// A task that failed, or that the scheduler no longer knows.
    #[error(
        "stage `{stage}`, task {task} {state}; its log is `{log}`. Once that is mended, submit again: finished tasks are skipped, others resume"
    )]
    TaskFailed {
        /// The stage.
        stage: &'static str,
        /// The task, from 1.
        task: usize,
        /// How it ended.
        state: String,
        /// The task's log.
        log: PathBuf,
    },
    /// The user asked to stop watching.
    #[error("no longer watched; the jobs go on: {jobs}")]
    Unwatched {
        /// Job ids.
        jobs: String,
    },
    /// The user asked to stop before anything was submitted.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}
