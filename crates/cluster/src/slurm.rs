//! Job scripts for Slurm.

use std::{fmt::Write, path::Path};

use powerinfer_artifact::{ModelIdentity, shell_quoted};

use crate::{ClusterError, Preparation, Stage, jobs::Scripts};

/// Writes the stages of `preparation` of `model` as array jobs, and `submit.sh`, into `folder`.
///
/// # Errors
///
/// The folder has something else in it, or a file cannot be written.
pub fn write_slurm(
    preparation: &Preparation,
    model: &ModelIdentity,
    folder: &Path,
) -> Result<Vec<Stage>, ClusterError> {
    let stages = preparation.stages();
    let head = |stage: &Stage| head(stage, folder);
    Scripts::new(preparation, &stages, folder, head, submit(&stages)).write(folder, model)?;
    Ok(stages)
}

/// Lines for `sbatch`.
fn head(stage: &Stage, folder: &Path) -> String {
    let name = stage.kind.name();
    let (needs, mut text) = (stage.needs, String::new());
    let task = match stage.tasks {
        1 => String::new(),
        tasks => {
            let _ = writeln!(text, "#SBATCH --array=1-{tasks}");
            "-%a".to_owned()
        }
    };
    let log = folder.join("logs").join(format!("{name}{task}.log"));
    let _ = write!(
        text,
        "#SBATCH --job-name=powerinfer-{name}\n#SBATCH --ntasks=1\n#SBATCH --cpus-per-task={}\n#SBATCH --mem={}M\n#SBATCH --time={}\n#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --output={}\n",
        needs.cores,
        needs.memory_limit() >> 20,
        needs.minutes_limit(),
        shell_quoted(&log.to_string_lossy()),
    );
    text
}

/// The script that submits `stages`.
fn submit(stages: &[Stage]) -> String {
    let names: Vec<&str> = stages.iter().map(|stage| stage.kind.name()).collect();
    format!(
        r#"#!/usr/bin/env bash
# Submits all stages, each after the one before it, and prints their job ids. Arguments go to sbatch: submit.sh --partition=long
# Finished tasks are quick and stopped ones resume, so this can be run again at any time.
set -euo pipefail
cd "$(dirname "$0")"
after=()
for stage in {}; do
  rm -f "status/$stage-"[0-9]*
  job=$(sbatch --parsable "${{after[@]}}" "$@" "$stage.sh")
  job=${{job%%;*}}
  echo "$job $stage"
  after=("--dependency=afterok:$job" --kill-on-invalid-dep=yes)
done
"#,
        names.join(" ")
    )
}
