//! The `powerinfer` command: parses, calls, prints.

#![expect(
    rustdoc::invalid_html_tags,
    reason = "doc comments are help texts with `<placeholders>`"
)]

mod budget_arguments;
mod calibration_text;
mod certificate_table;
mod commands;
mod engine;
#[cfg(test)]
mod help_test;
mod hint;
mod model_argument;
mod output;
mod page_file;
mod plan_table;
mod predictor_table;
mod profile_stage;
mod progress;
mod training_stage;

use std::{io::ErrorKind, process::ExitCode};

use clap::{Parser, Subcommand};
use output::Output;
use powerinfer_artifact::ByteSize;
use powerinfer_pool::system;

use crate::commands::{
    bench, completions, doctor, eval, inspect, logits, merge, place, prepare, profile, pull, run,
    simulate, sweep, synth, tokenize, train_predictors,
};

/// Runs large language models on ordinary PCs, by computing only the neurons that fire.
///
/// A model goes through four stages, each of which reads and writes `./<model>.powerinfer/`:
/// `profile` measures which neurons fire, `train-predictors` learns to predict it, `place`
/// decides by an integer program what the GPU and what the CPU computes and packs a bundle,
/// `run` executes it. `prepare` does the first three in one go.
#[derive(Parser)]
#[command(
    name = "powerinfer",
    version,
    propagate_version = true,
    max_term_width = 100
)]
#[command(after_help = "Example:\n  powerinfer prepare demo --vram 24G && powerinfer run demo")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Say nothing but results and errors
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Say more; hides progress bars
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch a model from the hub
    Pull(pull::PullArguments),
    /// Measure which neurons fire
    Profile(profile::ProfileArguments),
    /// Put profiles of shards, or of different texts, together
    Merge(merge::MergeArguments),
    /// Train the predictors that predict which neurons fire
    TrainPredictors(train_predictors::TrainPredictorsArguments),
    /// Decide what the GPU and what the CPU computes, and pack a bundle
    Place(place::PlaceArguments),
    /// Profile, train and place in one go, skipping what is done
    Prepare(prepare::PrepareArguments),
    /// Generate text with a bundle
    Run(run::RunArguments),
    /// Measure quality and speed of a bundle
    Eval(eval::EvalArguments),
    /// Measure quality and speed over a grid of placements and policies, and draw what trades for what
    Sweep(sweep::SweepArguments),
    /// Time a bundle, stage by stage, against the memory's speed
    Bench(bench::BenchArguments),
    /// Explain an artifact
    Inspect(inspect::InspectArguments),
    /// Tell what this machine can do
    Doctor(doctor::DoctorArguments),
    /// Write the logits of a token sequence, to compare with another implementation
    Logits(logits::LogitsArguments),
    /// Turn text into token ids, or back
    Tokenize(tokenize::TokenizeArguments),
    /// Make a checkpoint of a real shape with random weights, for work on speed and memory
    Synth(synth::SynthArguments),
    /// Predict how fast a model would be on a machine, without its weights
    Simulate(simulate::SimulateArguments),
    /// Write shell completions to stdout
    Completions(completions::CompletionsArguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output {
        quiet: arguments.quiet,
        verbose: arguments.verbose,
    };
    progress::listen_for_interrupts();
    let result = match arguments.command {
        Command::Pull(arguments) => pull::run(&arguments, output),
        Command::Profile(arguments) => profile::run(&arguments, output),
        Command::Merge(arguments) => merge::run(&arguments, output),
        Command::TrainPredictors(arguments) => train_predictors::run(&arguments, output),
        Command::Place(arguments) => place::run(&arguments, output),
        Command::Prepare(arguments) => prepare::run(&arguments, output),
        Command::Run(arguments) => run::run(&arguments, output),
        Command::Eval(arguments) => eval::run(&arguments, output),
        Command::Sweep(arguments) => sweep::run(&arguments, output),
        Command::Bench(arguments) => bench::run(&arguments, output),
        Command::Inspect(arguments) => inspect::run(&arguments, output),
        Command::Doctor(arguments) => doctor::run(&arguments, output),
        Command::Logits(arguments) => logits::run(&arguments, output),
        Command::Tokenize(arguments) => tokenize::run(&arguments, output),
        Command::Synth(arguments) => synth::run(&arguments, output),
        Command::Simulate(arguments) => simulate::run(&arguments, output),
        Command::Completions(arguments) => completions::run::<Arguments>(&arguments),
    };
    if let Some(bytes) = system::peak_memory() {
        output.detail(format!("peak memory: {}", ByteSize(bytes)));
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Says what went wrong and what to do, and chooses the exit code.
fn fail(error: &anyhow::Error) -> ExitCode {
    use std::io::Write;
    if error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    }) {
        return ExitCode::SUCCESS; // the reader has seen enough
    }
    // Messages carry their causes already; one that does not is told below the first line.
    let mut told: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !told.iter().any(|line| line.contains(&cause)) {
            told.push(cause);
        }
    }
    let last = told.pop().unwrap_or_default();
    let (last, hint) = match (hint::of(error), last.rsplit_once("; ")) {
        (Some(hint), _) => (last, Some(hint.to_owned())),
        (None, Some((what, hint))) => (what.to_owned(), Some(hint.to_owned())),
        (None, None) => (last, None),
    };
    told.push(last);
    let (style, reset) = ("\u{1b}[1;31m", "\u{1b}[0m");
    let mut stderr = anstream::stderr();
    let _ = writeln!(stderr, "{style}error:{reset} {}", told.join("\n  "));
    if let Some(hint) = hint {
        let _ = writeln!(stderr, "hint: {hint}");
    }
    if progress::interrupted() {
        ExitCode::from(130)
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
