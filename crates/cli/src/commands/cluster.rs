//! `powerinfer cluster`: prepares a model on a cluster, or estimates what that takes.

use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, bail};
use clap::{ArgAction, ArgMatches, Command, CommandFactory, parser::ValueSource};
use powerinfer_artifact::{ByteSize, ModelIdentity, counted, shell_quoted};
use powerinfer_cluster::{
    Preparation, Rates, Shards, Stage, Volume, Workload, submit, write_kubernetes, write_slurm,
};
use powerinfer_corpus::STDIN;
use powerinfer_pipeline::{AUTO_LIMIT, Tokens, check_paths};
use powerinfer_planner::{machine::this_machine, read_hardware};
use powerinfer_pool::usable_cores;
use powerinfer_predictor::Method;
use powerinfer_synth::Shape;
use powerinfer_tensor::Format;
use serde_json::{Value, json};

use crate::{
    budget_arguments::BudgetArguments,
    calibration_arguments::CalibrationArguments,
    estimate::{certify_tokens, duration, training_work},
    hint::Advised,
    model_argument,
    output::{Output, Table, print, print_json},
    profile_stage::TraceArguments,
    progress::Bar,
    training_stage::TrainingArguments,
    values::{FORMATS, Offered},
};

/// Scheduler, or an estimate.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  powerinfer cluster slurm ./my-model --data text/ --tokens 1000000 --vram 24G --nodes 16 \\\n      --submit\n  powerinfer cluster --estimate --like llama-70b --nodes 8 --cores 32"
)]
pub(crate) struct ClusterArguments {
    #[command(subcommand)]
    scheduler: Option<Scheduler>,
    #[command(flatten)]
    estimate: EstimateArguments,
}

#[derive(Debug, clap::Subcommand)]
enum Scheduler {
    /// Write array jobs for Slurm that prepare a model, and submit them
    Slurm(SlurmArguments),
    /// Write Indexed Jobs for Kubernetes that prepare a model
    Kubernetes(KubernetesArguments),
}

/// Shape, machine and work.
#[derive(Debug, clap::Args)]
struct EstimateArguments {
    /// Estimate time, memory and traffic of every stage, without a model
    #[arg(long, requires = "like")]
    estimate: bool,
    /// Shape of the model: a name of `powerinfer synth`, or a folder with a `config.json`
    #[arg(long, value_name = "SHAPE", requires = "estimate")]
    like: Option<String>,
    /// Machine of the nodes: a name or a file, as `doctor --write` makes them [default: this machine, measured once]
    #[arg(long, value_name = "NAME|FILE", requires = "estimate")]
    hardware: Option<String>,
    /// Calibration tokens
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1_000_000,
        requires = "estimate"
    )]
    tokens: u64,
    /// Tokens per layer to keep samples of
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16_384,
        requires = "estimate"
    )]
    trace_tokens: u64,
    /// Share of the neurons that are active on a token: the larger, the larger the predictors
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, requires = "estimate", value_parser = density)]
    density: f64,
    /// Format of the bundle's weights
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Q4_0, requires = "estimate", value_parser = Offered(str::parse::<Format>, FORMATS), hide_possible_values = true)]
    quant: Format,
    #[command(flatten)]
    nodes: NodeArguments,
    /// Print one JSON document
    #[arg(long, requires = "estimate")]
    json: bool,
}

/// A share above 0 and up to 1.
fn density(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("give a share above 0 and up to 1, such as 0.1".to_owned()),
    }
}

/// Nodes, and how the stages are divided.
#[derive(Debug, clap::Args)]
struct NodeArguments {
    /// Tasks that run at once: shards of the text, and at most as many of the layers and of the certificate
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: u32,
    /// Cores of a task [default: as many as this machine has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    cores: Option<u32>,
    /// Shards of the text [default: --nodes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    profile_shards: Option<u32>,
    /// Shards of the layers [default: --nodes, at most the layers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    train_shards: Option<u32>,
    /// Shards of the certificate's windows [default: --nodes, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    certify_shards: Option<u32>,
}

impl NodeArguments {
    fn shards(&self, layers: usize) -> Shards {
        let or = |given: Option<u32>, most: usize| match given {
            Some(given) => given as usize,
            None => (self.nodes as usize).min(most.max(1)),
        };
        Shards {
            profile: or(self.profile_shards, usize::MAX),
            train: or(self.train_shards, layers),
            certify: or(self.certify_shards, 4),
        }
    }

    fn cores(&self) -> usize {
        self.cores.map_or_else(usable_cores, |cores| cores as usize)
    }
}

/// The model, the options of all stages, and the nodes.
#[derive(Debug, clap::Args)]
struct StageArguments {
    /// Model: a folder, a GGUF file, `org/name` on the hub, or `demo`
    model: String,
    /// Folder for profile, predictors and bundle, on storage that all nodes share [default: ./<model>.powerinfer]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Folder for the job scripts, their logs and status [default: `cluster` in --out]
    #[arg(long, value_name = "DIR")]
    jobs: Option<PathBuf>,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    nodes: NodeArguments,
    #[command(flatten)]
    calibration: CalibrationArguments,
    #[command(flatten)]
    tracing: TraceArguments,
    #[command(flatten)]
    training: TrainingArguments,
    #[command(flatten)]
    budget: BudgetArguments,
}

/// Array jobs for Slurm.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "All nodes must see the same paths. `submit.sh` in the folder of the jobs submits them, each after the one before it; arguments go to sbatch. Tasks that were stopped resume when they are submitted again.\n\nExample:\n  powerinfer cluster slurm ./my-model --data text/ --tokens 1000000 --vram 24G --nodes 16 \\\n      --cores 32"
)]
struct SlurmArguments {
    #[command(flatten)]
    stages: StageArguments,
    /// Submit the jobs, show progress, and wait for the bundle
    #[arg(long)]
    submit: bool,
    /// With --submit: argument for sbatch, such as `--partition=long`; may be given several times
    #[arg(
        long,
        value_name = "ARGUMENT",
        requires = "submit",
        allow_hyphen_values = true
    )]
    sbatch: Vec<String>,
}

/// Indexed Jobs for Kubernetes.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Model, text and folders are on a volume that all pods mount at the same path as here. `submit.sh` in the folder of the jobs runs them one after the other; arguments go to kubectl.\n\nExample:\n  cd /shared\n  powerinfer cluster kubernetes ./my-model --data text/ --tokens 1000000 --vram 24G --nodes 16 \\\n      --image registry/powerinfer:0.1 --claim shared --mount /shared"
)]
struct KubernetesArguments {
    #[command(flatten)]
    stages: StageArguments,
    /// Image with `powerinfer` and `bash` in it
    #[arg(long)]
    image: String,
    /// Claim of the volume
    #[arg(long)]
    claim: String,
    /// Where the volume is mounted, here and in the pods
    #[arg(long, value_name = "DIR")]
    mount: PathBuf,
}

pub(crate) fn run<Arguments: CommandFactory>(
    arguments: &ClusterArguments,
    output: Output,
) -> Result<()> {
    match &arguments.scheduler {
        None => estimate(&arguments.estimate, output),
        Some(Scheduler::Slurm(arguments)) => slurm::<Arguments>(arguments, output),
        Some(Scheduler::Kubernetes(arguments)) => kubernetes::<Arguments>(arguments, output),
    }
}

fn estimate(arguments: &EstimateArguments, output: Output) -> Result<()> {
    let Some(like) = arguments.like.as_ref().filter(|_| arguments.estimate) else {
        bail!(Advised::new(
            "give a scheduler, `slurm` or `kubernetes`, or `--estimate --like SHAPE`",
            "see `powerinfer cluster --help`"
        ));
    };
    let shape = Shape::find(like)?;
    let config = shape.describe()?;
    let hardware = match &arguments.hardware {
        Some(name) => read_hardware(name)?,
        None => this_machine(&Bar::new(output))?,
    };
    let nodes = &arguments.nodes;
    let shards = nodes.shards(config.layer_count);
    let mut workload = Workload::new(
        &config,
        arguments.quant,
        nodes.cores(),
        Rates::new(&hardware),
    );
    workload.tokens = arguments.tokens;
    workload.certify_tokens = certify_tokens(&config, arguments.tokens);
    workload.trace_tokens = arguments.trace_tokens;
    workload.density = arguments.density;
    let stages = Preparation {
        program: String::new(),
        directory: String::new(),
        model: shape.name.clone(),
        work: String::new(),
        options: Default::default(),
        shards,
        certifies: true,
        workload,
    }
    .stages();
    if arguments.json {
        return print_json(&to_json(&stages));
    }
    print(table(&stages))?;
    let seconds: f64 = stages.iter().map(|stage| stage.needs.seconds).sum();
    output.say(format!(
        "{} in all with one node per task; {} on one node",
        duration(seconds),
        duration(stages.iter().map(of_one_node).sum())
    ));
    output.say(format!(
        "rates of `{}`, on {} a task; time is that of arithmetic and of reading, without queueing",
        hardware.name,
        counted(nodes.cores(), "core")
    ));
    Ok(())
}

/// Time of all tasks of a stage, one after the other.
fn of_one_node(stage: &Stage) -> f64 {
    stage.needs.seconds * stage.tasks as f64
}

fn table(stages: &[Stage]) -> String {
    let mut table = Table::new(&[
        "stage",
        "tasks",
        "time of a task",
        "memory of a task",
        "written by all",
        "read by all",
    ]);
    for stage in stages {
        let (needs, tasks) = (stage.needs, stage.tasks as u64);
        table.row(vec![
            stage.kind.name().to_owned(),
            tasks.to_string(),
            duration(needs.seconds),
            ByteSize(needs.memory_bytes).to_string(),
            ByteSize(tasks * needs.written_bytes).to_string(),
            ByteSize(tasks * needs.read_bytes).to_string(),
        ]);
    }
    table.to_string()
}

fn to_json(stages: &[Stage]) -> Value {
    let stages = stages.iter().map(|stage| {
        let needs = stage.needs;
        json!({
            "stage": stage.kind.name(), "tasks": stage.tasks, "cores": needs.cores,
            "seconds": needs.seconds, "memory_bytes": needs.memory_bytes,
            "written_bytes": needs.written_bytes, "read_bytes": needs.read_bytes,
        })
    });
    json!({ "stages": stages.collect::<Vec<_>>() })
}

fn slurm<Arguments: CommandFactory>(arguments: &SlurmArguments, output: Output) -> Result<()> {
    let program = std::env::current_exe().context("the path of this program is not known")?;
    let program = program.to_string_lossy().into_owned();
    let stages = &arguments.stages;
    let (preparation, model, folder) = stages.preparation::<Arguments>("slurm", program, output)?;
    let written = write_slurm(&preparation, &model, &folder)?;
    say_written(&written, &folder, output)?;
    if !arguments.submit {
        output.say(format!(
            "submit them: `{}`",
            shell_quoted(&folder.join("submit.sh").to_string_lossy())
        ));
        return Ok(());
    }
    submit(&written, &folder, &arguments.sbatch, &Bar::new(output))?;
    output.say(format!(
        "ready: `powerinfer run {}`",
        shell_quoted(&preparation.work)
    ));
    Ok(())
}

fn kubernetes<Arguments: CommandFactory>(
    arguments: &KubernetesArguments,
    output: Output,
) -> Result<()> {
    let volume = Volume {
        image: arguments.image.clone(),
        claim: arguments.claim.clone(),
        mount: absolute(&arguments.mount)?,
    };
    let program = "powerinfer".to_owned();
    let stages = &arguments.stages;
    let (preparation, model, folder) =
        stages.preparation::<Arguments>("kubernetes", program, output)?;
    let written = write_kubernetes(&preparation, &model, &volume, &folder)?;
    say_written(&written, &folder, output)?;
    output.say(format!(
        "run them: `{}`",
        shell_quoted(&folder.join("submit.sh").to_string_lossy())
    ));
    Ok(())
}

fn say_written(stages: &[Stage], folder: &Path, output: Output) -> Result<()> {
    print(table(stages))?;
    output.say(format!(
        "{} written to `{}`; they request 1.5 times the estimated memory and 3 times the time",
        counted(stages.len(), "job"),
        folder.display()
    ));
    Ok(())
}

impl StageArguments {
    /// The work of the jobs, their model, and their folder; `scheduler` is the subcommand's name.
    fn preparation<Arguments: CommandFactory>(
        &self,
        scheduler: &str,
        program: String,
        output: Output,
    ) -> Result<(Preparation, ModelIdentity, PathBuf)> {
        check_paths(&self.calibration.data)?;
        if self
            .calibration
            .data
            .iter()
            .any(|path| path == Path::new(STDIN))
        {
            bail!(Advised::new(
                "jobs cannot read this command's stdin",
                "pass files or folders with `--data`"
            ));
        }
        let (checkpoint, _) = model_argument::open_model(&self.model, output)?;
        let config = checkpoint.config();
        let options = self.budget.options()?;
        options.check(config)?;
        let shards = self.nodes.shards(config.layer_count);
        let tokens = match self.calibration.tokens {
            Tokens::Count(tokens) => tokens as u64,
            Tokens::Auto if shards.profile > 1 => bail!(Advised::new(
                "shards need a number of tokens, because none of them knows how much the others have read",
                "give `--tokens N`, such as `--tokens 1000000`"
            )),
            Tokens::Auto => AUTO_LIMIT as u64,
        };
        let hardware = this_machine(&Bar::new(output))?;
        let mut workload = Workload::new(
            config,
            self.budget.quant(),
            self.nodes.cores(),
            Rates::new(&hardware),
        );
        workload.tokens = tokens;
        workload.certify_tokens = certify_tokens(config, tokens);
        workload.trace_tokens = self.tracing.trace_tokens(Method::default()) as u64;
        let training = &self.training;
        (workload.calculates, workload.steps) = training_work(training.method()?, training.steps);
        let name = &checkpoint.identity().name;
        let work = self.out.clone();
        let work = work.unwrap_or_else(|| model_argument::work_folder(name));
        let folder = self.jobs.clone().unwrap_or_else(|| work.join("cluster"));
        let given = given::<Arguments>(scheduler)?;
        let stages = ["profile", "train-predictors", "place", "prepare"];
        let directory = std::env::current_dir().context("there is no current folder")?;
        let preparation = Preparation {
            program,
            directory: directory.to_string_lossy().into_owned(),
            model: self.model.clone(),
            work: work.to_string_lossy().into_owned(),
            options: stages.map(|stage| options_of::<Arguments>(stage, &given)),
            shards,
            certifies: options.certifies(),
            workload,
        };
        Ok((
            preparation,
            checkpoint.identity().clone(),
            absolute(&folder)?,
        ))
    }
}

/// Options on the command line of `powerinfer cluster SCHEDULER`, as they were given.
fn given<Arguments: CommandFactory>(scheduler: &str) -> Result<Vec<(String, Vec<String>)>> {
    let mut root = Arguments::command();
    let matches = root.try_get_matches_from_mut(std::env::args_os())?;
    let matches = matches.subcommand_matches("cluster");
    let matches = matches.and_then(|matches| matches.subcommand_matches(scheduler));
    let matches = matches.context("this is not a call of `powerinfer cluster`")?;
    let command = root.find_subcommand("cluster");
    let command = command.and_then(|command| command.find_subcommand(scheduler));
    let command = command.context("there is no such scheduler")?;
    let options = command.get_arguments().filter_map(|argument| {
        let (id, long) = (argument.get_id().as_str(), argument.get_long()?);
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            return None;
        }
        let values = match argument.get_action() {
            ArgAction::Set | ArgAction::Append => values(matches, id),
            _ => Vec::new(),
        };
        Some((long.to_owned(), values))
    });
    Ok(options.collect())
}

fn values(matches: &ArgMatches, id: &str) -> Vec<String> {
    let values = matches.get_raw(id).into_iter().flatten();
    values
        .map(|value| value.to_string_lossy().into_owned())
        .collect()
}

/// Options among `given` that the command `stage` has too, less its folders.
fn options_of<Arguments: CommandFactory>(
    stage: &str,
    given: &[(String, Vec<String>)],
) -> Vec<String> {
    let root = Arguments::command();
    let has = |command: &Command, long: &str| {
        command
            .get_arguments()
            .any(|argument| argument.get_long() == Some(long))
    };
    let stage = root.find_subcommand(stage).expect("it is a command");
    let mut options = Vec::new();
    for (long, values) in given
        .iter()
        .filter(|(long, _)| long != "out" && has(stage, long))
    {
        let long = format!("--{long}");
        if values.is_empty() {
            options.push(long)
        } else {
            options.extend(values.iter().map(|value| format!("{long}={value}")))
        }
    }
    options
}
