//! The `powerinfer` command: parses, calls, prints.

#![expect(
    rustdoc::invalid_html_tags,
    reason = "doc comments are help texts with `<placeholders>`"
)]

mod budget_arguments;
mod calibration_arguments;
mod certificate_table;
#[cfg(test)]
#[path = "../../../tests/support/command_lines.rs"]
mod command_lines;
mod commands;
mod earlier_settings;
mod engine;
mod estimate;
#[cfg(test)]
mod help_test;
mod hint;
mod model_argument;
mod model_name;
mod output;
mod page_file;
mod plan_table;
mod predictor_table;
mod profile_stage;
mod progress;
mod special_token_arguments;
mod thread_argument;
mod training_stage;
mod values;

use std::{
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Result, bail};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand, error::ContextKind};
use output::{Output, escaped};
use powerinfer_artifact::{ByteSize, mapped_file};
use powerinfer_guard::worker;
use powerinfer_pool::system;

use crate::commands::{
    bench, cluster, completions, doctor, eval, export, inspect, list, logits, merge, place,
    prepare, profile, pull, run, serve, simulate, sweep, synth, tokenize, train_predictors,
};
use crate::hint::Advised;

/// Runs large language models on ordinary PCs, by computing only the active neurons.
///
/// A model goes through four stages, each of which reads and writes `./<model>.powerinfer/`:
/// `profile` measures which neurons are active, `train-predictors` trains predictors of them, `place`
/// decides by an integer program what the GPU and what the CPU computes and packs a bundle,
/// `run` executes it. `prepare` does the first three.
#[derive(Parser)]
#[command(
    name = "powerinfer",
    version,
    propagate_version = true,
    max_term_width = 100,
    disable_help_subcommand = true
)]
#[command(after_help = "Example:\n  powerinfer prepare demo && powerinfer run demo")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print only results and errors
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print details; hides progress bars
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Download a model from the hub
    Pull(pull::PullArguments),
    /// Measure activations on calibration text
    Profile(profile::ProfileArguments),
    /// Merge the shards of a stage, or profiles of different texts
    Merge(merge::MergeArguments),
    /// Train the predictors of active neurons
    TrainPredictors(train_predictors::TrainPredictorsArguments),
    /// Place neurons on GPU and CPU, and pack a bundle
    Place(place::PlaceArguments),
    /// Profile, train and place, skipping what is up to date
    Prepare(prepare::PrepareArguments),
    /// Prepare a model on a cluster, or estimate what that takes
    Cluster(Box<cluster::ClusterArguments>),
    /// Generate text with a bundle
    Run(run::RunArguments),
    /// Serve a bundle to clients of OpenAI's and Ollama's APIs
    Serve(serve::ServeArguments),
    /// Measure quality and speed of a bundle
    Eval(eval::EvalArguments),
    /// Measure quality and speed over a grid of placements and policies
    Sweep(sweep::SweepArguments),
    /// Benchmark a bundle by stage, relative to the read bandwidth
    Bench(bench::BenchArguments),
    /// Write a model for llama.cpp, Ollama or the original PowerInfer
    Export(export::ExportArguments),
    /// List the prepared models in this folder
    #[command(visible_alias = "ls")]
    List(list::ListArguments),
    /// Describe an artifact
    #[command(visible_alias = "show")]
    Inspect(inspect::InspectArguments),
    /// Measure this machine
    Doctor(doctor::DoctorArguments),
    /// Write the logits of a token sequence, to compare with another implementation
    Logits(logits::LogitsArguments),
    /// Convert text to token ids, or back
    Tokenize(tokenize::TokenizeArguments),
    /// Make a checkpoint of a real shape with random weights
    Synth(synth::SynthArguments),
    /// Estimate a model's speed on a machine you do not have
    Simulate(simulate::SimulateArguments),
    /// Write shell completions to stdout
    Completions(completions::CompletionsArguments),
    /// Print the help of a command
    #[command(after_help = "Example:\n  powerinfer help eval perplexity")]
    Help {
        /// The command
        command: Vec<String>,
    },
}

/// Prints the long help of `path`, a command with its subcommands.
fn help(path: &[String]) -> Result<()> {
    let mut root = Arguments::command();
    root.build();
    let mut command = &mut root;
    for name in path {
        command = match command.find_subcommand_mut(name) {
            Some(found) => found,
            None => bail!(Advised::new(
                format!("there is no command `{name}`"),
                hint::of_command(name, None)
                    .unwrap_or_else(|| "`powerinfer help` lists them".to_owned())
            )),
        };
    }
    Ok(write!(
        anstream::stdout(),
        "{}",
        command.render_long_help().ansi()
    )?)
}

fn main() -> ExitCode {
    if worker::work_as_worker(&[
        powerinfer_corpus::PARQUET_WORK,
        powerinfer_profile::TABLE_WORK,
        powerinfer_text::TEMPLATE_WORK,
    ]) {
        return ExitCode::SUCCESS;
    }
    let (arguments, matches) = match parse() {
        Ok(parsed) => parsed,
        Err(error) => return misused(error),
    };
    mapped_file::exit_if_files_shrink(hint::of_changed_files(&matches));
    hint::remember(&matches);
    let output = Output {
        quiet: arguments.quiet,
        verbose: arguments.verbose,
    };
    progress::listen_for_interrupts();
    let data = hint::innermost(&matches).try_get_many::<PathBuf>("data");
    if let Ok(Some(mut paths)) = data
        && paths.any(|path| path == Path::new("-"))
    {
        output.say_if_typed("text");
    }
    let result = match arguments.command {
        Command::Pull(arguments) => pull::run(&arguments, output),
        Command::Profile(arguments) => profile::run(&arguments, &matches, output),
        Command::Merge(arguments) => merge::run(&arguments, output),
        Command::TrainPredictors(arguments) => train_predictors::run(&arguments, &matches, output),
        Command::Place(arguments) => place::run(&arguments, &matches, output),
        Command::Prepare(arguments) => prepare::run(&arguments, &matches, output),
        Command::Cluster(arguments) => cluster::run::<Arguments>(&arguments, output),
        Command::Run(arguments) => run::run(&arguments, output),
        Command::Serve(arguments) => serve::run(&arguments, output),
        Command::Eval(arguments) => eval::run(&arguments, output),
        Command::Sweep(arguments) => sweep::run(&arguments, output),
        Command::Bench(arguments) => bench::run(&arguments, output),
        Command::Export(arguments) => export::run(&arguments, output),
        Command::List(arguments) => list::run(&arguments, output),
        Command::Inspect(arguments) => inspect::run(&arguments, output),
        Command::Doctor(arguments) => doctor::run(&arguments, output),
        Command::Logits(arguments) => logits::run(&arguments, output),
        Command::Tokenize(arguments) => tokenize::run(&arguments, output),
        Command::Synth(arguments) => synth::run(&arguments, output),
        Command::Simulate(arguments) => simulate::run(&arguments, output),
        Command::Completions(arguments) => completions::run::<Arguments>(&arguments),
        Command::Help { command } => help(&command),
    };
    if let Some(bytes) = system::peak_memory() {
        output.detail(format!("peak memory: {}", ByteSize(bytes)));
    }
    match result.and_then(|()| Ok(mapped_file::check_all_unchanged()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Parses the command line.
fn parse() -> Result<(Arguments, ArgMatches), clap::Error> {
    let mut command = Arguments::command();
    let matches = command.try_get_matches_from_mut(std::env::args_os())?;
    let arguments = Arguments::from_arg_matches(&matches);
    let arguments = arguments.map_err(|error| error.format(&mut command))?;
    Ok((arguments, matches))
}

/// Prints what is wrong with the command line, or the help that it asks for.
fn misused(mut error: clap::Error) -> ExitCode {
    let arguments = std::env::args_os().skip(1);
    let arguments: Vec<String> = arguments
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let hint = hint::of_usage(&error, &arguments);
    if hint.is_some() {
        // The hint replaces suggestions of names that only look similar.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
    }
    // Clap suggests passing an unknown option as a value, but it is not meant as a prompt.
    error.remove(ContextKind::Suggested);
    let is_plain = |argument: &String| *escaped(argument) == **argument;
    // A closed stderr does not change the exit status.
    let _ = if !arguments.iter().all(is_plain) {
        write!(anstream::stderr(), "{}", escaped(&error.to_string()))
    } else if let Some((found, plain)) = hint::of_number(&error) {
        let text = error.render().ansi().to_string();
        write!(anstream::stderr(), "{}", text.replace(&found, plain))
    } else {
        error.print()
    };
    if let Some(hint) = hint {
        let _ = writeln!(anstream::stderr(), "hint: {hint}");
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
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
    // Most messages contain their causes; a cause that is not contained gets a line of its own.
    let mut lines: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !lines.iter().any(|line| line.contains(&cause)) {
            lines.push(cause);
        }
    }
    let hint = if progress::interrupted() {
        hint::of_interruption()
    } else {
        hint::of(error)
    };
    let (style, reset) = ("\u{1b}[1;31m", "\u{1b}[0m");
    let mut stderr = anstream::stderr();
    let lines = lines.join("\n  ");
    let _ = writeln!(stderr, "{style}error:{reset} {}", escaped(&lines));
    if let Some(hint) = hint {
        let _ = writeln!(stderr, "hint: {}", escaped(&hint));
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
