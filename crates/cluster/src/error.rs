//! Errors of preparing a model on a cluster.

use std::path::PathBuf;

use powerinfer_artifact::{ArtifactError, Hint, progress::Interrupted};

/// Error of writing, submitting or watching the stages.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A file cannot be written.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
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
        "stage `{stage}`, task {task} {state}; its log is `{log}`; fix the cause and submit again: finished tasks are skipped, others resume"
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

impl ClusterError {
    /// Remedy that takes a command or a flag.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Artifact(
                ArtifactError::NotAnArtifact { .. }
                | ArtifactError::Foreign { .. }
                | ArtifactError::NotAFolder { .. },
            ) => Some(Hint::OtherJobsFolder),
            Self::Artifact(error) => error.hint(),
            _ => None,
        }
    }
}
