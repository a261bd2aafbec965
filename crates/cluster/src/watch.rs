//! Submission to Slurm, and progress of the tasks.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use powerinfer_artifact::{Progress, counted};

use crate::{ClusterError, Stage, StageKind, jobs::SUBMIT};

/// Time between two queries of the queue.
const INTERVAL: Duration = Duration::from_secs(2);

/// Queries after which a task that is neither in the queue nor has a status counts as lost: shared storage may show a status late.
const PATIENCE: usize = 15;

/// A submitted stage.
struct Job<'a> {
    id: String,
    stage: &'a Stage,
}

/// Submits the `stages` in `folder` by its `submit.sh`, with `arguments` for `sbatch`, and waits until all are done.
///
/// # Errors
///
/// Slurm refuses a stage, a task fails or is lost, or `progress` interrupts, upon which the jobs go on.
pub fn submit(
    stages: &[Stage],
    folder: &Path,
    arguments: &[String],
    progress: &dyn Progress,
) -> Result<(), ClusterError> {
    let mut command = Command::new(folder.join(SUBMIT));
    let printed = output(command.args(arguments))?;
    let jobs: Vec<Job<'_>> = printed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(id, name)| {
            let stage = stages.iter().find(|stage| stage.kind.name() == name)?;
            let id = id.to_owned();
            Some(Job { id, stage })
        })
        .collect();
    let tasks: usize = stages.iter().map(|stage| stage.tasks).sum();
    progress.note(&format!(
        "submitted {} in {}: {}",
        counted(tasks, "task"),
        counted(jobs.len(), "job"),
        ids(&jobs)
    ));
    progress.begin("preparing", tasks as u64, "tasks");
    let mut last = String::new();
    let (mut done, mut absent) = (0, HashMap::new());
    loop {
        // The queue before the status: a task that ends in between is in one of them.
        let queue = queue(&jobs)?;
        let found = look(&jobs, folder, &queue, &mut absent)?;
        let line = found.line();
        if line != last {
            progress.note(&line);
            last = line;
        }
        let is_interrupted = progress.advance((found.done - done) as u64).is_err();
        done = found.done;
        if done == tasks {
            progress.end();
            return Ok(());
        }
        let begun = Instant::now();
        while begun.elapsed() < INTERVAL {
            if is_interrupted || progress.advance(0).is_err() {
                return Err(ClusterError::Unwatched { jobs: ids(&jobs) });
            }
            sleep(Duration::from_millis(100));
        }
    }
}

fn ids(jobs: &[Job<'_>]) -> String {
    let ids: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
    ids.join(", ")
}

/// Tasks by state.
#[derive(Default)]
struct Found {
    done: usize,
    running: usize,
    queued: usize,
    /// Stages that have running tasks.
    stages: Vec<StageKind>,
}

impl Found {
    fn line(&self) -> String {
        let stages: Vec<&str> = self.stages.iter().map(|kind| kind.name()).collect();
        let running = if stages.is_empty() {
            String::new()
        } else {
            format!(" ({})", stages.join(", "))
        };
        let Self {
            done,
            running: count,
            queued,
            ..
        } = self;
        format!("{done} done, {count} running{running}, {queued} queued")
    }
}

/// Counts tasks by state; `absent` counts the queries in which a task was neither in the queue nor had a status.
fn look(
    jobs: &[Job<'_>],
    folder: &Path,
    queue: &BTreeMap<(String, usize), String>,
    absent: &mut HashMap<(String, usize), usize>,
) -> Result<Found, ClusterError> {
    let mut found = Found::default();
    for Job { id, stage } in jobs {
        let name = stage.kind.name();
        for task in 1..=stage.tasks {
            let failed = |state: String| {
                let log = match stage.tasks {
                    1 => format!("{name}.log"),
                    _ => format!("{name}-{task}.log"),
                };
                ClusterError::TaskFailed {
                    stage: name,
                    task,
                    state,
                    log: folder.join("logs").join(log),
                }
            };
            let status = fs::read_to_string(folder.join("status").join(format!("{name}-{task}")));
            let status = status.unwrap_or_default();
            let key = (id.clone(), task);
            match (status.trim(), queue.get(&key).map(String::as_str)) {
                ("0", _) => found.done += 1,
                ("", Some("RUNNING" | "COMPLETING")) => {
                    found.running += 1;
                    if found.stages.last() != Some(&stage.kind) {
                        found.stages.push(stage.kind);
                    }
                    absent.remove(&key);
                }
                ("", Some(_)) => {
                    found.queued += 1;
                    absent.remove(&key);
                }
                ("", None) => {
                    let looks = absent.entry(key).or_insert(0);
                    *looks += 1;
                    if *looks > PATIENCE {
                        return Err(failed(
                            "is no longer in the queue and has not ended".to_owned(),
                        ));
                    }
                }
                (code, _) => return Err(failed(format!("failed with exit code {code}"))),
            }
        }
    }
    Ok(found)
}

/// State of every task in the queue, by job and task.
fn queue(jobs: &[Job<'_>]) -> Result<BTreeMap<(String, usize), String>, ClusterError> {
    let wanted = jobs.iter().map(|job| job.id.as_str());
    let wanted: Vec<&str> = wanted.collect();
    let mut command = Command::new("squeue");
    command.args(["--noheader", "--array", "--format=%F %K %T", "--jobs"]);
    let printed = match output(command.arg(wanted.join(","))) {
        // Slurm forgets jobs some minutes after they have ended.
        Err(ClusterError::Scheduler { reason, .. }) if reason.contains("Invalid job id") => {
            String::new()
        }
        printed => printed?,
    };
    let tasks = printed.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (job, task, state) = (words.next()?, words.next()?, words.next()?);
        // A job that is no array has one task.
        Some((
            (job.to_owned(), task.parse().unwrap_or(1)),
            state.to_owned(),
        ))
    });
    Ok(tasks.collect())
}

/// Output of `command`.
fn output(command: &mut Command) -> Result<String, ClusterError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |reason: String| ClusterError::Scheduler {
        program: program.clone(),
        reason,
    };
    let output = command
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(failed(
            said.trim()
                .lines()
                .last()
                .unwrap_or("it printed no error")
                .to_owned(),
        ))
    }
}
