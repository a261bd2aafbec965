//! Attacks every reader with mutated inputs, in child processes with a counting allocator, and prints a table of tries and
//! findings. A finding is a panic, the end of a process, too much memory or time, and what a target says it is.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for a terminal"
)]

use std::{
    alloc::System,
    collections::BTreeMap,
    fs,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use cap::Cap;
use clap::Parser;
use powerinfer_attack::{
    arena::Arena,
    target::{Sources, TARGETS, find},
};
use powerinfer_guard::worker::{NoAnswer, Worker, work_as_worker};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes that one try may allocate.
const MEMORY: usize = 256 << 20;

/// Time of one try.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time of one request to a child process.
const ROUND: Duration = Duration::from_secs(2);

/// Findings per target whose inputs are kept.
const KEPT: usize = 20;

#[derive(Parser)]
#[command(about = "Attacks every reader with mutated inputs")]
struct Arguments {
    /// Folder with the repository's golden files
    #[arg(long)]
    golden: PathBuf,
    /// Folder with a `bundle`, `profile`, `predictors` and a `cache/prompt.safetensors`
    #[arg(long)]
    made: PathBuf,
    /// Folder for inputs that were found
    #[arg(long)]
    out: PathBuf,
    /// Time of all targets together
    #[arg(long)]
    seconds: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Targets; all if none
    #[arg(long = "target")]
    targets: Vec<String>,
    /// Repeat one try of one target, without a child process
    #[arg(long)]
    index: Option<u64>,
}

/// Task of a child process.
#[derive(Serialize, Deserialize)]
struct Round {
    target: String,
    golden: PathBuf,
    made: PathBuf,
    scratch: PathBuf,
    seed: u64,
    first: u64,
    milliseconds: u64,
}

/// Result of the task.
#[derive(Default, Serialize, Deserialize)]
struct Outcome {
    tries: u64,
    accepted: u64,
    /// Indices of tries, with what was found.
    findings: Vec<(u64, String)>,
    /// Most bytes allocated at a time.
    peak: usize,
}

/// All rounds of a target.
#[derive(Default)]
struct Total {
    outcome: Outcome,
    kinds: BTreeMap<String, (u64, u64)>,
    next: u64,
    elapsed: Duration,
    worker: Option<Worker>,
}

/// Message and place of the last panic that was not caught where it is expected.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn main() -> ExitCode {
    if work_as_worker(&[
        ("attack", work),
        powerinfer_profile::TABLE_WORK,
        powerinfer_text::TEMPLATE_WORK,
    ]) {
        return ExitCode::SUCCESS;
    }
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<u64> {
    let memory = Path::new("/dev/shm");
    let scratch = if memory.is_dir() {
        tempfile::tempdir_in(memory)?
    } else {
        tempfile::tempdir()?
    };
    let names: Vec<&str> = if arguments.targets.is_empty() {
        TARGETS.iter().map(|target| target.name).collect()
    } else {
        arguments.targets.iter().map(String::as_str).collect()
    };
    let round = |name: &str, first: u64| Round {
        target: name.to_owned(),
        golden: arguments.golden.clone(),
        made: arguments.made.clone(),
        scratch: scratch.path().join(name),
        seed: arguments.seed,
        first,
        milliseconds: ROUND.as_millis() as u64,
    };
    if let Some(index) = arguments.index {
        let round = round(names[0], index);
        fs::create_dir_all(&round.scratch)?;
        let arena = arena(&round)?;
        let (path, bytes) = arena.mutated(round.seed, index);
        let name = path.file_name().unwrap_or_default();
        fs::create_dir_all(&arguments.out)?;
        fs::write(arguments.out.join(name), bytes)?;
        let accepted = arena.attempt(round.seed, index)?;
        let peak = ALLOCATOR.max_allocated() >> 20;
        println!("accepted: {accepted}, most memory: {peak} MiB");
        return Ok(0);
    }
    let mut totals: Vec<(&str, Total)> =
        names.iter().map(|name| (*name, Total::default())).collect();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(arguments.seconds) {
        for (name, total) in &mut totals {
            step(&round(name, total.next), total, arguments)
                .with_context(|| format!("target `{name}`"))?;
        }
    }
    println!("| input | tries | accepted | findings | most memory |");
    println!("|---|--:|--:|--:|--:|");
    for (name, total) in &totals {
        let Outcome {
            tries,
            accepted,
            findings,
            peak,
        } = &total.outcome;
        let peak = peak >> 20;
        println!(
            "| {name} | {tries} | {accepted} | {} | {peak} MiB |",
            findings.len()
        );
    }
    println!();
    for (name, total) in &totals {
        for (kind, (count, index)) in &total.kinds {
            println!(
                "* {name}: {count}× `{kind}` (first: `--target '{name}' --seed {} --index {index}`)",
                arguments.seed
            );
        }
    }
    Ok(totals
        .iter()
        .map(|(_, total)| total.outcome.findings.len() as u64)
        .sum())
}

/// One round of one target, in its child process.
fn step(round: &Round, total: &mut Total, arguments: &Arguments) -> Result<()> {
    let started = Instant::now();
    let mut worker = match total.worker.take() {
        Some(worker) => worker,
        None => {
            if round.scratch.exists() {
                fs::remove_dir_all(&round.scratch)?;
            }
            fs::create_dir_all(&round.scratch)?;
            Worker::start("attack")?.context("this program starts workers")?
        }
    };
    let answer = worker.ask(&serde_json::to_vec(round)?, ROUND + 2 * PATIENCE);
    let outcome = match answer {
        Ok(answer) => {
            total.worker = Some(worker);
            match serde_json::from_slice::<Result<Outcome, String>>(&answer)? {
                Ok(outcome) => outcome,
                Err(reason) => bail!("{reason}"),
            }
        }
        Err(reason) => {
            let last = fs::read(round.scratch.join("last"))?;
            let last = u64::from_le_bytes(last[..8].try_into()?);
            let found = match reason {
                NoAnswer::Timeout => "no end",
                NoAnswer::Ended(_) => "the process ended",
            };
            Outcome {
                tries: last + 1 - round.first,
                findings: vec![(last, found.to_owned())],
                ..Outcome::default()
            }
        }
    };
    total.elapsed += started.elapsed();
    total.next += outcome.tries;
    total.outcome.tries += outcome.tries;
    total.outcome.accepted += outcome.accepted;
    total.outcome.peak = total.outcome.peak.max(outcome.peak);
    for (index, found) in outcome.findings {
        eprintln!("{} {index}: {found}", round.target);
        if total.outcome.findings.len() < KEPT {
            let scratch = tempfile::tempdir()?;
            let round = Round {
                scratch: scratch.path().to_owned(),
                target: round.target.clone(),
                golden: round.golden.clone(),
                made: round.made.clone(),
                ..*round
            };
            let (path, bytes) = arena(&round)?.mutated(round.seed, index);
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            fs::create_dir_all(&arguments.out)?;
            let kept = format!("{}-{index}-{name}", round.target.replace(' ', "-"));
            fs::write(arguments.out.join(kept), bytes)?;
        }
        let kind = total.kinds.entry(found.clone()).or_insert((0, index));
        kind.0 += 1;
        total.outcome.findings.push((index, found));
    }
    Ok(())
}

fn arena(round: &Round) -> Result<Arena> {
    let target = find(&round.target).context("there is no such target")?;
    let sources = Sources {
        golden: round.golden.clone(),
        made: round.made.clone(),
    };
    Ok(Arena::new(target, &sources, &round.scratch)?)
}

/// A round, in a child process.
fn work(request: &[u8]) -> Vec<u8> {
    let outcome = attacked(request).map_err(|error| format!("{error:#}"));
    serde_json::to_vec(&outcome).unwrap_or_default()
}

fn attacked(request: &[u8]) -> Result<Outcome> {
    static ARENA: Mutex<Option<Arena>> = Mutex::new(None);
    let round: Round = serde_json::from_slice(request)?;
    let mut kept = ARENA.lock().expect("tries are caught");
    let arena = match &*kept {
        Some(arena) => arena,
        None => {
            panic::set_hook(Box::new(|info| {
                let place = info.location().map(ToString::to_string);
                let message = info.payload_as_str().unwrap_or_default();
                let message = message.lines().next().unwrap_or_default();
                let found = format!("{message} at {}", place.unwrap_or_default());
                *PANIC.lock().expect("a text is replaced") = Some(found);
            }));
            kept.insert(arena(&round)?)
        }
    };
    let mut outcome = Outcome {
        peak: ALLOCATOR.max_allocated(),
        ..Outcome::default()
    };
    let end = Instant::now() + Duration::from_millis(round.milliseconds);
    let last = round.scratch.join("last");
    while outcome.tries == 0 || Instant::now() < end {
        let index = round.first + outcome.tries;
        outcome.tries += 1;
        fs::write(&last, index.to_le_bytes())?;
        let started = Instant::now();
        let before = ALLOCATOR.allocated();
        let tried = panic::catch_unwind(AssertUnwindSafe(|| arena.attempt(round.seed, index)));
        if let Ok(tried) = tried {
            outcome.accepted += u64::from(tried?);
        }
        // Also of other threads, and those that a library has caught.
        if let Some(found) = PANIC.lock().expect("a text is replaced").take() {
            outcome.findings.push((index, found));
        }
        if ALLOCATOR.max_allocated() > outcome.peak.max(before + MEMORY) {
            let found = format!("more than {} MiB", MEMORY >> 20);
            outcome.findings.push((index, found));
        }
        if started.elapsed() > PATIENCE {
            let found = format!("more than {} s", PATIENCE.as_secs());
            outcome.findings.push((index, found));
        }
        outcome.peak = ALLOCATOR.max_allocated();
    }
    Ok(outcome)
}
