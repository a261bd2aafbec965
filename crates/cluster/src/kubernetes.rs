//! Indexed Jobs for Kubernetes.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use powerinfer_artifact::ModelIdentity;

use crate::{ClusterError, Preparation, Stage, jobs::Scripts};

/// Image and shared volume of the pods.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Image with the program in it.
    pub image: String,
    /// Claim of a volume that all pods can write.
    pub claim: String,
    /// Where the volume is mounted, here and in the pods.
    pub mount: PathBuf,
}

/// Writes the stages of `preparation` of `model` as Indexed Jobs, and `submit.sh`, into `folder`.
///
/// # Errors
///
/// The folder is not on the volume, it has something else in it, or a file cannot be written.
pub fn write_kubernetes(
    preparation: &Preparation,
    model: &ModelIdentity,
    volume: &Volume,
    folder: &Path,
) -> Result<Vec<Stage>, ClusterError> {
    for path in [folder, Path::new(&preparation.directory)] {
        if !path.starts_with(&volume.mount) {
            return Err(ClusterError::OutsideVolume {
                folder: path.to_owned(),
                mount: volume.mount.clone(),
            });
        }
    }
    let stages = preparation.stages();
    let head = |_: &Stage| String::new();
    let mut scripts = Scripts::new(preparation, &stages, folder, head, submit(&stages));
    for stage in &stages {
        let name = format!("{}.yaml", stage.kind.name());
        scripts.insert(name, job(stage, volume, folder));
    }
    scripts.write(folder, model)?;
    Ok(stages)
}

/// A string of YAML.
fn string(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The manifest of a stage.
fn job(stage: &Stage, volume: &Volume, folder: &Path) -> String {
    let name = stage.kind.name();
    let script = folder.join(format!("{name}.sh"));
    let (tasks, memory) = (stage.tasks, stage.needs.memory_limit() >> 20);
    let mut text = String::new();
    let _ = write!(
        text,
        r#"apiVersion: batch/v1
kind: Job
metadata:
  name: powerinfer-{name}
spec:
  completionMode: Indexed
  completions: {tasks}
  parallelism: {tasks}
  backoffLimitPerIndex: 5
  maxFailedIndexes: 0
  activeDeadlineSeconds: {seconds}
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: powerinfer
          image: {image}
          command: ["bash", {script}]
          resources:
            requests: {{ cpu: "{cores}", memory: {memory}Mi }}
            limits: {{ memory: {memory}Mi }}
          volumeMounts:
            - {{ name: shared, mountPath: {mount} }}
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: {claim}
"#,
        seconds = 60 * stage.needs.minutes_limit(),
        image = string(&volume.image),
        script = string(&script.to_string_lossy()),
        cores = stage.needs.cores,
        mount = string(&volume.mount.to_string_lossy()),
        claim = string(&volume.claim),
    );
    text
}

/// The script that runs `stages` one after the other: Jobs know no dependencies.
fn submit(stages: &[Stage]) -> String {
    let stages = stages.iter().map(|stage| {
        format!(
            "run {} {}m\n",
            stage.kind.name(),
            stage.needs.minutes_limit()
        )
    });
    format!(
        r#"#!/usr/bin/env bash
# Runs all stages, each after the one before it. Arguments go to kubectl: submit.sh --namespace=models
# Finished tasks are quick and stopped ones resume, so this can be run again at any time.
set -euo pipefail
cd "$(dirname "$0")"
namespace=("$@")
run() {{
  kubectl "${{namespace[@]}}" delete --ignore-not-found "job/powerinfer-$1"
  kubectl "${{namespace[@]}}" apply -f "$1.yaml"
  kubectl "${{namespace[@]}}" wait --for=condition=complete --timeout="$2" "job/powerinfer-$1" &
  local complete=$!
  kubectl "${{namespace[@]}}" wait --for=condition=failed --timeout="$2" "job/powerinfer-$1" && exit 1 &
  local failed=$!
  wait -n "$complete" "$failed"
  kill "$complete" "$failed" 2> /dev/null || true
}}
{}"#,
        stages.collect::<String>()
    )
}
