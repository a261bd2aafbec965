//! `powerinfer sweep`: quality and speed over a grid of placements, policies, batches and contexts.

mod csv;
mod grid;
mod levels;
mod measure;
mod placing;
mod quality;
mod report;
mod rows;
mod speed;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    Digest,
    hardware::{Hardware, ModelShape},
    placement_inputs::LayerInputs,
    plan::{Policy, Threshold},
};
use powerinfer_bundle::{Bundle, Verification};
use powerinfer_datasets::minipython::{Split, distinct_tasks};
use powerinfer_eval::{Journal, RunName, human_eval::read_problems};
use powerinfer_kernels::Isa;
use powerinfer_planner::{read_hardware, search::windows};
use powerinfer_pool::{system, usable_cores};
use powerinfer_runtime::{Execution, Runtime};
use powerinfer_text::Tokenizer;
use serde::Deserialize;
use serde_json::json;

pub(super) use self::report::{FEW_TOKENS, told_rise};
use self::{
    grid::{GridArguments, MeasureArguments},
    levels::Level,
    quality::{Items, beginning},
    rows::{Identity, Row},
};
use super::eval_text::Extent;
use crate::{
    calibration_text::{check_paths, texts},
    engine::DeviceArgument,
    model_argument::{self, DEMO, bundle_folder},
    output::{Output, print, print_json},
    progress::Bar,
};

/// Which grid, and what is measured at its points.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Every point is a line of JSON in `--out`, and a sweep that was stopped goes on where it was; more points can be asked for with the same file. What a placement would do on `--hardware` is predicted by the cost model and marked `simulated`; quality, and the speed of this machine, are measured.\n\nExamples:\n  powerinfer sweep demo --html demo.html\n  powerinfer sweep demo --vram 0G,2M,4M,8M --level exact,predicted,predicted:+2 --tasks 100\n  powerinfer sweep ./my-model.powerinfer --level dense,error:5%,error:10% --data held-out.txt --humaneval HumanEval.jsonl.gz"
)]
pub(crate) struct SweepArguments {
    /// Name of a model prepared here, a folder with a bundle in it, or a bundle
    #[arg(default_value = DEMO, value_name = "MODEL|BUNDLE")]
    model: String,
    #[command(flatten)]
    grid: GridArguments,
    #[command(flatten)]
    measures: MeasureArguments,
    /// File for what is found, a line a point; it is gone on with where it is there [default: sweep.jsonl
    /// beside the bundle]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw what was found as a page that needs nothing from elsewhere, with `.csv` and `.json` beside it
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Everything that points have in common.
struct Sweep<'a> {
    arguments: &'a SweepArguments,
    folder: PathBuf,
    bundle: Bundle,
    layers: Vec<LayerInputs>,
    tokenizer: Tokenizer,
    items: Items,
    /// The machine that placements are for, as the model finds it.
    hardware: Hardware,
    threads: usize,
    /// What runs what is on a GPU; none where that is predicted.
    device: Option<String>,
    output: Output,
}

pub(crate) fn run(arguments: &SweepArguments, output: Output) -> Result<()> {
    let sweep = Sweep::of(arguments, output)?;
    let points = arguments.grid.points(
        &sweep.bundle,
        &sweep.layers,
        &sweep.hardware,
        arguments.measures.decode_tokens as usize,
        sweep.device.is_some(),
    )?;
    let out = sweep.out();
    report::check_places(arguments.html.as_deref(), &out, &sweep.folder)?;
    sweep.check_levels(&points)?;
    let run = sweep.run_digest()?;
    let name = RunName {
        beginning: "{\"point\":",
        what: "line of a sweep",
        run: &run,
    };
    let (mut journal, found) = Journal::open(&out, name)?;
    let mut rows = Vec::new();
    for (line, row) in found.into_iter().enumerate() {
        let row: Row = serde_json::from_value(row).with_context(|| {
            format!(
                "`{}`, line {}, is no point of a sweep; name another file by `--out`",
                out.display(),
                line + 1
            )
        })?;
        rows.push(row);
    }
    sweep.measure(&points, &run, &mut rows, &mut |row| {
        let row = serde_json::to_value(row)?;
        // What is no number is written as nothing, and could not be read back.
        Row::deserialize(&row).context("a figure of this point is no number")?;
        Ok(journal.push(&row)?)
    })?;
    // The grid that was asked for, in its order, whoever measured it.
    let asked: Vec<Row> = points
        .iter()
        .filter_map(|point| rows.iter().find(|row| row.axes == point.axes()).cloned())
        .collect();
    if let Some(html) = &arguments.html {
        report::write(html, &asked, output)?;
    }
    match arguments.json {
        true => print_json(&report::document(&asked)),
        false => {
            print(report::table(&asked))?;
            report::say(&asked, &out, output);
            Ok(())
        }
    }
}

impl<'a> Sweep<'a> {
    /// Resolves what was asked for.
    fn of(arguments: &'a SweepArguments, output: Output) -> Result<Self> {
        let measures = &arguments.measures;
        check_paths(&measures.data)?;
        let problems = match &measures.humaneval {
            Some(path) => {
                let mut problems = read_problems(path)?;
                problems.truncate(measures.problems.unwrap_or(usize::MAX));
                problems
            }
            None => Vec::new(),
        };
        let folder = bundle_folder(&arguments.model);
        let bundle = Bundle::open(&folder, Verification::Quick)?;
        let tokenizer = model_argument::tokenizer(&bundle.files())?;
        let is_demo = bundle.header().model.name == DEMO;
        let mut texts = match bundle.certificate() {
            Some(_) if measures.data.is_empty() && !is_demo => bundle.certificate_texts()?,
            _ => texts(
                &measures.data,
                is_demo,
                bundle.config(),
                &tokenizer,
                measures.tokens,
            )?,
        };
        texts = beginning(&texts, measures.tokens);
        if quality::scored(&texts) < 2 {
            bail!(
                "the text has no tokens to score; give more text by `--data`, or raise `--tokens`"
            );
        }
        let extent = Extent::of(&texts, &tokenizer)?;
        let tasks = measures.tasks.unwrap_or(if is_demo { 100 } else { 0 });
        let items = Items {
            audited: beginning(&texts, measures.audit_tokens.max(2)),
            alone: beginning(&texts, measures.layer_tokens),
            texts,
            windows: windows(&bundle),
            extent,
            tasks: distinct_tasks(Split::HeldOut, measures.seed, tasks)?,
            problems,
            seed: measures.seed,
        };
        let hardware = match &arguments.grid.hardware {
            Some(name) => for_model(&read_hardware(name)?, &bundle),
            // A plan has its machine as the model finds it already.
            None => bundle.plan().hardware.clone(),
        };
        let device = measures
            .device
            .open("placements are not run, but predicted", output)?;
        let device = device.map(|device| device.info().name.clone());
        Ok(Self {
            layers: bundle.placing()?,
            threads: measures.threads.unwrap_or_else(usable_cores).clamp(1, 1024),
            arguments,
            folder,
            bundle,
            tokenizer,
            items,
            hardware,
            device,
            output,
        })
    }

    /// Where what is found goes.
    fn out(&self) -> PathBuf {
        let beside = || {
            self.folder
                .parent()
                .unwrap_or(Path::new("."))
                .join("sweep.jsonl")
        };
        self.arguments.out.clone().unwrap_or_else(beside)
    }

    fn open(&self) -> Result<Bundle> {
        Ok(Bundle::open(&self.folder, Verification::Quick)?)
    }

    /// What rows of this run have in common, and those of no other: everything but the grid.
    fn run_digest(&self) -> Result<String> {
        let measures = &self.arguments.measures;
        let problems = measures.humaneval.as_deref().map(Digest::of_file);
        let settings = json!({
            "bundle": self.bundle.manifest_document().body.files,
            "text": self.items.digest(),
            "audited": quality::scored(&self.items.audited),
            "alone": quality::scored(&self.items.alone),
            "tasks": self.items.tasks.len(),
            "problems": [problems.transpose()?.map(|digest| digest.to_string()), Some(self.items.problems.len().to_string())],
            "hardware": self.hardware,
            "processor": system::processor(),
            "instruction_set": Isa::detect()?.name(),
            "probe": measures.probe.0,
            "threads": self.threads,
            "decode_tokens": measures.decode_tokens,
            "repeats": measures.repeats,
            "device": self.device,
            "run_placements": measures.run_placements,
            "activations": measures.activations.name(),
            "seed": measures.seed,
            "version": env!("CARGO_PKG_VERSION"),
        });
        Ok(Digest::of(settings.to_string().as_bytes()).to_string())
    }

    fn identity(&self) -> Result<Identity> {
        let header = self.bundle.header();
        Ok(Identity {
            model: header.model.name.clone(),
            fingerprint: header.model.fingerprint,
            bundle: Digest::of(&self.bundle.manifest_document().to_bytes()),
            quant: self.bundle.quant().to_string(),
            text: self.items.digest(),
            seed: self.items.seed,
            tool: concat!("powerinfer ", env!("CARGO_PKG_VERSION")).to_owned(),
            processor: system::processor(),
            instruction_set: Isa::detect()?.name().to_owned(),
        })
    }

    /// The model under `level`, on the CPU.
    fn model(
        &self,
        level: Level,
        thresholds: Option<&[Threshold]>,
        output: Output,
    ) -> Result<Runtime> {
        // Layers take their thresholds one by one: a plan need not have any.
        let policy = match thresholds {
            Some(_) => Policy::Dense,
            None => level.policy(),
        };
        let policy = Some(policy);
        let execution = self.on(DeviceArgument::Cpu)?;
        let mut model = Runtime::open(self.open()?, policy, &execution, &Bar::new(output))?;
        level.apply(&mut model, thresholds)?;
        Ok(model)
    }

    fn on(&self, device: DeviceArgument) -> Result<Execution> {
        Ok(Execution {
            activations: self.arguments.measures.activations.into(),
            ..device.execution(self.threads)?
        })
    }
}

/// `hardware` as the model of `bundle` finds it.
fn for_model(hardware: &Hardware, bundle: &Bundle) -> Hardware {
    let config = bundle.config();
    hardware.for_model(ModelShape {
        format: bundle.quant(),
        hidden: config.hidden_size,
        neurons: config.ffn_size,
        vocabulary: config.vocabulary_size,
    })
}
