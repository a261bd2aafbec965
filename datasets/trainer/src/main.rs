//! Makes `datasets/demo`: the tasks, and a small Llama with a ReLU-gated, truly sparse FFN that
//! solves them. Deterministic: the same seed gives the same tasks and the same checkpoint.

mod batch;
mod export;
mod minipython;
mod model;
mod muon;
mod ops;
mod task_files;
mod tokenizer;
mod train;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;

use ops::gated::Activation;

/// Makes the demo's tasks and its checkpoint.
#[derive(Parser)]
enum Arguments {
    /// Trains the checkpoint from nothing.
    Train(TrainArguments),
    /// Generates the calibration and held-out tasks.
    Tasks {
        /// Folder to write the task files to.
        #[arg(long, default_value = "datasets/demo")]
        out: PathBuf,
    },
}

#[derive(clap::Args)]
struct TrainArguments {
    /// Folder to write the checkpoint and `training-log.jsonl` to.
    #[arg(long, default_value = "datasets/demo")]
    out: PathBuf,
    /// Training tokens that the schedules of learning rate and sparsity are laid out for.
    #[arg(long, default_value_t = 7_000_000)]
    tokens: usize,
    /// Steps after which to stop. The default is early: a model that never fails would not show
    /// what skipping neurons costs.
    #[arg(long, default_value_t = 1400)]
    steps: usize,
    /// Tokens per optimiser step.
    #[arg(long, default_value_t = 3072)]
    batch: usize,
    /// Largest learning rate of the schedule.
    #[arg(long, default_value_t = 5e-3)]
    learning_rate: f64,
    /// What neurons make of their gates; the penalty is on ReLU's alone.
    #[arg(long, value_enum, default_value_t = Activation::Relu)]
    activation: Activation,
    /// Share of FFN activations that the penalty drives to zero.
    #[arg(long, default_value_t = 0.93)]
    sparsity: f64,
    /// Seed of initialisation and data.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse() {
        Arguments::Train(arguments) => train(arguments),
        Arguments::Tasks { out } => task_files::write(&out),
    }
}

fn train(arguments: TrainArguments) -> anyhow::Result<()> {
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("cannot create `{}`", arguments.out.display()))?;
    let tokenizer = tokenizer::train(arguments.seed)?;
    train::train(
        &tokenizer,
        &train::Settings {
            out: arguments.out,
            tokens: arguments.tokens,
            steps: arguments.steps,
            batch: arguments.batch,
            learning_rate: arguments.learning_rate,
            activation: arguments.activation,
            sparsity: arguments.sparsity,
            seed: arguments.seed,
        },
    )
}
