//! Job scripts for Slurm.

use std::{fmt::Write, fs, path::Path};

use powerinfer_artifact::{ArtifactError, write::write_file};

use crate::{
    ClusterError, Preparation, Stage,
    stages::{RUN, quoted},
};

/// Name of the script that submits all stages.
pub(crate) const SUBMIT: &str = "submit.sh";

/// Writes the stages of `preparation` as array jobs, and `submit.sh`, into `folder`.
///
/// # Errors
///
/// The folder has something else in it, or a file cannot be written.
pub fn write_slurm(preparation: &Preparation, folder: &Path) -> Result<Vec<Stage>, ClusterError> {
    let stages = preparation.stages();
    write_folder(folder, preparation, &stages, |stage| head(stage, folder))?;
    write_script(&folder.join(SUBMIT), &submit(&stages))?;
    Ok(stages)
}

/// Writes `run.sh` and the scripts of `stages`, with the lines of `head` at their beginning.
pub(crate) fn write_folder(
    folder: &Path,
    preparation: &Preparation,
    stages: &[Stage],
    head: impl Fn(&Stage) -> String,
) -> Result<(), ClusterError> {
    let is_ours = folder.join("run.sh").exists();
    let mut entries = folder.read_dir().into_iter().flatten();
    if !is_ours && entries.next().is_some() {
        return Err(ClusterError::Foreign {
            folder: folder.to_owned(),
        });
    }
    for name in ["logs", "status"] {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).map_err(ArtifactError::write(&folder))?;
    }
    write_file(&folder.join("run.sh"), RUN.as_bytes())?;
    for stage in stages {
        let path = folder.join(format!("{}.sh", stage.kind.name()));
        let script = stage.script(
            &head(stage),
            &folder.to_string_lossy(),
            &preparation.directory,
        );
        write_script(&path, &script)?;
    }
    Ok(())
}

pub(crate) fn write_script(path: &Path, text: &str) -> Result<(), ClusterError> {
    write_file(path, text.as_bytes())?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let permissions = fs::Permissions::from_mode(0o755);
        fs::set_permissions(path, permissions).map_err(ArtifactError::write(path))?;
    }
    Ok(())
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
        quoted(&log.to_string_lossy()),
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
rm -f status/*
after=()
for stage in {}; do
  job=$(sbatch --parsable "${{after[@]}}" "$@" "$stage.sh")
  job=${{job%%;*}}
  echo "$job $stage"
  after=("--dependency=afterok:$job" --kill-on-invalid-dep=yes)
done
"#,
        names.join(" ")
    )
}
