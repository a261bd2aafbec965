//! The stages of a preparation, and the shell script of each.

use std::fmt::Write;

use powerinfer_artifact::{Shard, shell_quoted};

use crate::{Needs, Workload};

/// Stage of a preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageKind {
    /// Measures activations, one shard of the text a task.
    Profile,
    /// Merges the profile's shards.
    Merge,
    /// Trains predictors, one shard of the layers a task.
    Train,
    /// Merges the predictors, places and packs.
    Place,
    /// Measures the certificate, one shard of its windows a task.
    Certify,
    /// Merges the certificate, and checks that all is there.
    Finish,
}

impl StageKind {
    /// All stages, in order.
    pub const ALL: [Self; 6] = [
        Self::Profile,
        Self::Merge,
        Self::Train,
        Self::Place,
        Self::Certify,
        Self::Finish,
    ];

    /// Name, as in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Profile => "1-profile",
            Self::Merge => "2-merge",
            Self::Train => "3-train",
            Self::Place => "4-place",
            Self::Certify => "5-certify",
            Self::Finish => "6-finish",
        }
    }
}

/// Number of tasks of the stages that have several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shards {
    /// Tasks of `profile`.
    pub profile: usize,
    /// Tasks of `train-predictors`.
    pub train: usize,
    /// Tasks of the certificate.
    pub certify: usize,
}

/// A model to prepare, with the options and shards of its stages.
#[derive(Debug, Clone)]
pub struct Preparation {
    /// Program: a name or a path.
    pub program: String,
    /// Folder that paths are relative to.
    pub directory: String,
    /// The model.
    pub model: String,
    /// Folder of profile, predictors and bundle.
    pub work: String,
    /// Options of `profile`, `train-predictors`, `place` and `prepare`.
    pub options: [Vec<String>; 4],
    /// Tasks of the stages.
    pub shards: Shards,
    /// Whether the bundle gets a certificate.
    pub certifies: bool,
    /// The work, from which what the stages take is estimated.
    pub workload: Workload,
}

/// A stage with its tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Its kind.
    pub kind: StageKind,
    /// Number of tasks.
    pub tasks: usize,
    /// Resources of a task.
    pub needs: Needs,
    /// Lines of shell; `$task` is the task, from 1.
    commands: Vec<String>,
}

impl Preparation {
    /// The stages, each of which follows the one before it.
    pub fn stages(&self) -> Vec<Stage> {
        StageKind::ALL
            .into_iter()
            .filter(|kind| self.certifies || *kind != StageKind::Certify)
            .map(|kind| self.stage(kind))
            .collect()
    }

    fn stage(&self, kind: StageKind) -> Stage {
        let Shards {
            profile,
            train,
            certify,
        } = self.shards;
        let [of_profile, of_train, of_place, of_prepare] = &self.options;
        let work = |name: &str| shell_quoted(&format!("{}/{name}", self.work));
        let made = |options: &[String]| {
            let given = options.iter().map(|option| shell_quoted(option));
            given.collect::<Vec<_>>().join(" ")
        };
        let (profiled, trained) = (work("profile"), work("predictors"));
        let inputs = format!(
            "{} --profile {profiled} --predictors {trained} --out {}",
            made(of_place),
            work("bundle")
        );
        let command = |name: &str, rest: &str| {
            let (program, model) = (shell_quoted(&self.program), shell_quoted(&self.model));
            format!("run {program} {name} {model} {rest}")
        };
        let (tasks, commands) = match kind {
            StageKind::Profile => {
                let out = sharded(&profiled, profile);
                let rest = format!("{} --shard $task/{profile} --out {out}", made(of_profile));
                (profile, vec![command("profile", &rest)])
            }
            StageKind::Merge => (1, self.merge("profile", profile).into_iter().collect()),
            StageKind::Train => {
                let out = sharded(&trained, train);
                let rest = format!(
                    "{} --profile {profiled} --shard $task/{train} --out {out}",
                    made(of_train)
                );
                (train, vec![command("train-predictors", &rest)])
            }
            StageKind::Place => {
                let mut commands: Vec<String> =
                    self.merge("predictors", train).into_iter().collect();
                commands.push(command("place", &format!("{inputs} --certify-later")));
                (1, commands)
            }
            StageKind::Certify => {
                let rest = format!("{inputs} --certify-shard $task/{certify}");
                (certify, vec![command("place", &rest)])
            }
            StageKind::Finish => {
                let mut commands = Vec::new();
                if let Some(merge) = self
                    .merge("bundle-certificate.jsonl", certify)
                    .filter(|_| self.certifies)
                {
                    // Once the bundle is certified, the measured windows have no use.
                    let certificate = work("bundle/certificate.json");
                    commands.push(format!("[ -e {certificate} ] || {merge}"));
                }
                let rest = format!("{} --out {}", made(of_prepare), shell_quoted(&self.work));
                commands.push(command("prepare", &rest));
                (1, commands)
            }
        };
        Stage {
            kind,
            tasks,
            needs: self.workload.needs(kind, tasks),
            commands,
        }
    }

    /// The command that merges the shards of `name` in the work folder, if there are several.
    fn merge(&self, name: &str, count: usize) -> Option<String> {
        let work = |name: &str| shell_quoted(&format!("{}/{name}", self.work));
        let shards = (1..=count).map(|index| work(&Shard { index, count }.file_name(name)));
        let shards: Vec<String> = shards.collect();
        (count > 1).then(|| {
            let (program, out) = (shell_quoted(&self.program), work(name));
            format!("run {program} merge {} --out {out}", shards.join(" "))
        })
    }
}

/// `name`, quoted, of the shard `$task` of `count`.
fn sharded(name: &str, count: usize) -> String {
    match count {
        1 => name.to_owned(),
        _ => format!("{name}-$task-of-{count}"),
    }
}

impl Stage {
    /// The script: `head` after its first line, then `folder`, which has `run.sh`, and the commands in `directory`.
    pub(crate) fn script(&self, head: &str, folder: &str, directory: &str) -> String {
        let mut text = format!("#!/usr/bin/env bash\n{head}set -euo pipefail\n");
        let name = self.kind.name();
        let _ = writeln!(text, "stage={name} folder={}", shell_quoted(folder));
        text += ". \"$folder/run.sh\"\n";
        let _ = writeln!(text, "cd {}", shell_quoted(directory));
        for command in &self.commands {
            text += command;
            text.push('\n');
        }
        text
    }
}

/// `run.sh`, which the scripts of all stages read.
pub(crate) const RUN: &str = r#"# Read by the stages. `run` runs a command; a task whose command was killed goes back into the queue, where it resumes.
task=${SLURM_ARRAY_TASK_ID:-$((${JOB_COMPLETION_INDEX:-0} + 1))}
status="$folder/status/$stage-$task"
rm -f "$status"
# How the task ended, for those who wait for it.
trap 'code=$?; [ "$code" = 75 ] || echo "$code" > "$status"' EXIT

run() {
  local code=0
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    export RAYON_NUM_THREADS=$SLURM_CPUS_PER_TASK
    srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@" || code=$?
    if [ "$code" -gt 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
      echo "stage $stage, task $task was killed (exit code $code); it goes back into the queue"
      scontrol requeue "$SLURM_JOB_ID"
      exit 75
    fi
  else
    "$@" || code=$?
  fi
  [ "$code" = 0 ] || exit "$code"
}
"#;
