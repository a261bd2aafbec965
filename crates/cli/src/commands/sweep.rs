//! `powerinfer sweep`: quality and speed over a grid of placements, policies, batches and contexts.

mod arguments;
mod report;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    Digest, Shard,
    hardware::{EngineRates, Hardware, ModelShape},
};
use powerinfer_bundle::Bundle;
use powerinfer_datasets::minipython::{Split, distinct_tasks};
use powerinfer_eval::{
    EvalError, PythonSandbox, Run, TextSize, Windows,
    human_eval::read_problems,
    leading_tokens, scored_tokens,
    sweep::{
        BatchShape, Grid, Identity, PlacementTarget, Point, PolicySetting, Sweep, SweepFile,
        SweepItems, SweepOptions, SweepRow, document,
    },
};
use powerinfer_kernels::Isa;
use powerinfer_pipeline::{check_paths, texts};
use powerinfer_planner::{
    Vram, default_hardware,
    machine::{Thoroughness, measure},
    read_hardware,
    sweep::{BundlePlanner, default_budgets, thresholds},
};
use powerinfer_pool::system;
use powerinfer_runtime::{ActivationFormat, Execution};
use powerinfer_text::Tokenizer;
use serde_json::json;

use self::arguments::{GridArguments, MeasureArguments};
use crate::{
    engine::{DeviceArgument, evaluated::certificate_texts},
    hint::Advised,
    model_argument::{DEMO, open_bundle},
    output::{Output, print, print_json},
    progress::Bar,
};

/// Bundle, grid and measures.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Every point is a line of JSON in `--out`; a stopped sweep resumes, and the same file takes more points. The speed of a placement on `--hardware` is estimated by the cost model and marked `simulated`; quality, and the speed of this machine, are measured.\n\nExamples:\n  powerinfer sweep demo --html demo.html\n  powerinfer sweep demo --vram 0,69M,24G --policy exact,predicted,predicted:+2 --tasks 100\n  powerinfer sweep ./my-model.powerinfer --policy dense,error:5%,error:10% \\\n      --data held-out.txt --humaneval HumanEval.jsonl.gz"
)]
pub(crate) struct SweepArguments {
    /// Name of a model prepared here, a folder with a bundle in it, or a bundle
    #[arg(default_value = DEMO, value_name = "MODEL|BUNDLE")]
    model: String,
    #[command(flatten)]
    grid: GridArguments,
    #[command(flatten)]
    measures: MeasureArguments,
    /// File of the rows, from which a stopped sweep resumes [default: sweep.jsonl next to the bundle, or
    /// sweep-2.jsonl and so on if that has results for other settings]
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    out: Option<PathBuf>,
    /// Measure one of n shards of the grid's points, as `3/16`, to a file named after it; `powerinfer merge` puts the files
    /// together, and this command without the option reports on them
    #[arg(long, value_name = "I/N", default_value_t = Shard::WHOLE, hide_default_value = true)]
    shard: Shard,
    /// Write a self-contained page with charts, and `.csv` and `.json` files next to it
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    html: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The file of rows that is asked for, or the default file of this `number` next to the bundle in `folder`.
fn out_file(arguments: &SweepArguments, folder: &Path, number: usize) -> PathBuf {
    let mut out = arguments.out.clone().unwrap_or_else(|| {
        let name = match number {
            1 => "sweep.jsonl".to_owned(),
            _ => format!("sweep-{number}.jsonl"),
        };
        folder.parent().unwrap_or(Path::new(".")).join(name)
    });
    if let Some(name) = out.file_name() {
        out.set_file_name(arguments.shard.file_name(&name.to_string_lossy()));
    }
    out
}

pub(crate) fn run(arguments: &SweepArguments, output: Output) -> Result<()> {
    let measures = &arguments.measures;
    let bundle = open_bundle(&arguments.model)?;
    let folder = bundle.folder().to_owned();
    let tokenizer = powerinfer_pipeline::tokenizer(&bundle.files())?;
    let items = items(measures, &bundle, &tokenizer, output)?;
    let grid = &arguments.grid;
    let plans_gpu = grid.hot_threshold.is_empty() && grid.vram.iter().any(|size| size.0 > 0);
    let hardware = match &grid.hardware {
        Some(name) => for_model(&read_hardware(name)?, &bundle),
        None if plans_gpu && bundle.plan().hardware.gpu.is_none() => {
            let vram = Vram::Sizes(grid.vram.clone());
            for_model(&default_hardware(&vram, &Bar::new(output))?, &bundle)
        }
        // A plan's machine is measured for the model already.
        None => bundle.plan().hardware.clone(),
    };
    let device = measures
        .device
        .open("placements are not run, but predicted", output)?;
    let options = SweepOptions {
        isa: Isa::detect()?,
        threads: measures.threads.count(),
        repeats: measures.repeats as usize,
        probe_bytes: measures.probe.0.clamp(1 << 20, 1 << 34) as usize,
        device: device.map(|device| device.info().name.clone()),
        emulated: is_emulated(measures.device),
        run_placements: measures.run_placements,
    };
    let layers = bundle.placement_inputs()?;
    let mut grid = Grid {
        settings: arguments.grid.settings(&bundle),
        shapes: arguments.grid.shapes(
            measures.decode_tokens as usize,
            bundle.plan().budget.context_tokens as usize,
            options.device.is_some(),
        )?,
        targets: arguments.grid.targets(),
    };
    if grid.targets.is_empty() {
        grid.targets = default_budgets(&bundle, &layers, &hardware, grid.shapes[0])?;
    }
    let all = grid.points()?;
    let range = arguments.shard.range(all.len());
    if range.is_empty() {
        bail!(Advised::new(
            format!(
                "shard {} has no points: the grid has {}",
                arguments.shard,
                all.len()
            ),
            "use fewer shards"
        ));
    }
    let points = &all[range.clone()];
    let mut out = out_file(arguments, &folder, 1);
    report::check_paths(arguments.html.as_deref(), &out, &folder)?;
    let bar = Bar::new(output);
    let sweep = Sweep {
        identity: identity(&bundle, &items, options.isa),
        run: run_digest(measures, &bundle, &items, &options, &hardware)?,
        execution: Execution {
            activations: measures.activations.into(),
            ..measures.device.execution(options.threads)?
        },
        bundle: &bundle,
        tokenizer: &tokenizer,
        items,
        options,
        progress: &bar,
    };
    sweep.check(points, |setting| thresholds(&bundle, setting))?;
    note_raised(points, sweep.options.device.as_deref(), output);
    let run = Run {
        digest: sweep.run.clone(),
        shard: arguments.shard,
        rows: points.len(),
    };
    let mut opened = SweepFile::open(&out, &run);
    // Results of other settings are kept.
    let mut number = 1;
    while arguments.out.is_none() && matches!(opened, Err(EvalError::OtherContent { .. })) {
        number += 1;
        out = out_file(arguments, &folder, number);
        report::check_paths(arguments.html.as_deref(), &out, &folder)?;
        opened = SweepFile::open(&out, &run);
    }
    let (mut file, mut rows) = opened?;
    if number > 1 {
        output.say(format!(
            "writing results to `{}`, because earlier results are for other settings or another bundle",
            out.display()
        ));
    }
    let mut missing = sweep.missing(points, &rows);
    for (index, _) in &mut missing {
        *index += range.start;
    }
    if !missing.is_empty() {
        if missing.len() < points.len() {
            let found = points.len() - missing.len();
            output.say(format!(
                "{found} of {} points are measured already",
                points.len()
            ));
        }
        let here = measure(Some(sweep.options.threads), Thoroughness::Quick, &bar)?.hardware;
        let planner = BundlePlanner {
            bundle: &bundle,
            layers: &layers,
            hardware: &hardware,
            here: for_model(&here, &bundle),
        };
        sweep.measure(&missing, &planner, &mut rows, &mut file)?;
    }
    // The grid of this call, in its order: the file may have other points too.
    let asked: Vec<SweepRow> = points
        .iter()
        .filter_map(|point| rows.iter().find(|row| row.axes == point.axes()).cloned())
        .collect();
    if let Some(html) = &arguments.html {
        report::write(html, &out, &asked, output)?;
    }
    if arguments.json {
        return print_json(&document(&asked));
    }
    // The page has it all.
    if arguments.html.is_none() || output.verbose {
        print(report::table(&asked))?;
        report::report(&asked, &out, output);
    }
    Ok(())
}

impl GridArguments {
    fn settings(&self, bundle: &Bundle) -> Vec<PolicySetting> {
        if self.policy.is_empty() {
            PolicySetting::defaults(bundle)
        } else {
            self.policy.clone()
        }
    }

    fn shapes(
        &self,
        decode_tokens: usize,
        limit: usize,
        runs_on_device: bool,
    ) -> Result<Vec<BatchShape>> {
        if runs_on_device && self.batch.iter().any(|batch| *batch > 1) {
            bail!(Advised::new(
                "`--batch` decodes only on the CPU",
                "add `--device cpu`"
            ));
        }
        let mut contexts = self.context.clone();
        if contexts.is_empty() {
            contexts.push(limit.min(256));
        }
        let batches: Vec<usize> = self.batch.iter().map(|batch| *batch as usize).collect();
        Ok(Grid::shapes(&batches, &contexts, decode_tokens, limit)?)
    }

    /// Placements asked for; none for the defaults.
    fn targets(&self) -> Vec<PlacementTarget> {
        let budgets = self.vram.iter().map(|size| PlacementTarget::Within(size.0));
        let shares = self.hot_threshold.iter().copied();
        budgets
            .chain(shares.map(PlacementTarget::HotFrom))
            .collect()
    }
}

/// Texts and tasks to judge every point on.
fn items(
    measures: &MeasureArguments,
    bundle: &Bundle,
    tokenizer: &Tokenizer,
    output: Output,
) -> Result<SweepItems> {
    check_paths(&measures.data)?;
    let mut problems = match &measures.humaneval {
        Some(path) => read_problems(path)?,
        None => Vec::new(),
    };
    problems.truncate(measures.problems.unwrap_or(usize::MAX));
    let is_demo = bundle.header().model.name == DEMO;
    let tasks = measures.tasks.unwrap_or(if is_demo { 100 } else { 0 });
    let needs_sandbox = tasks > 0 || !problems.is_empty();
    let sandbox = match needs_sandbox.then(PythonSandbox::find).transpose() {
        Err(error) if measures.tasks.is_none() && problems.is_empty() => {
            output.say(format!("{error}; only text is judged"));
            None
        }
        found => found?,
    };
    let tasks = sandbox.as_ref().map_or(0, |_| tasks);
    let certified = certificate_texts(bundle, &measures.data, Some(measures.tokens), output)?;
    let texts = match certified {
        Some(texts) => texts,
        None => texts(
            &measures.data,
            is_demo,
            bundle.config(),
            tokenizer,
            measures.tokens,
            &Bar::new(output),
        )?,
    };
    if scored_tokens(&texts) < 2 {
        bail!(Advised::new(
            "the text has no tokens to score",
            "give more text with `--data`, or raise `--tokens`"
        ));
    }
    Ok(SweepItems {
        audited: leading_tokens(&texts, measures.audit_tokens.max(2)),
        alone: leading_tokens(&texts, measures.layer_tokens),
        size: TextSize::new(&texts, tokenizer)?,
        texts,
        windows: Windows::for_context(bundle.plan().budget.context_tokens as usize),
        sandbox,
        tasks: distinct_tasks(Split::HeldOut, measures.seed, tasks)?,
        problems,
        seed: measures.seed,
    })
}

/// Digest of everything that rows depend on but their place in the grid.
fn run_digest(
    measures: &MeasureArguments,
    bundle: &Bundle,
    items: &SweepItems,
    options: &SweepOptions,
    hardware: &Hardware,
) -> Result<String> {
    let problems = measures.humaneval.as_deref().map(Digest::of_file);
    let settings = json!({
        "row_format": 2,
        "bundle": bundle.manifest_document().body.files,
        "text": items.digest(),
        "audited": scored_tokens(&items.audited),
        "alone": scored_tokens(&items.alone),
        "tasks": items.tasks.len(),
        "judge": items.sandbox.as_ref().map(PythonSandbox::name),
        "problems": [problems.transpose()?.map(|digest| digest.to_string()), Some(items.problems.len().to_string())],
        "hardware": hardware,
        "processor": system::processor(),
        "instruction_set": options.isa.name(),
        "probe": measures.probe.0,
        "threads": options.threads,
        "decode_tokens": measures.decode_tokens,
        "repeats": options.repeats,
        "device": options.device,
        "run_placements": options.run_placements,
        "activations": ActivationFormat::from(measures.activations).name(),
        "seed": measures.seed,
        "version": env!("CARGO_PKG_VERSION"),
    });
    Ok(Digest::from_content(settings.to_string().as_bytes()).to_string())
}

fn identity(bundle: &Bundle, items: &SweepItems, isa: Isa) -> Identity {
    let header = bundle.header();
    Identity {
        model: header.model.name.clone(),
        fingerprint: header.model.fingerprint,
        bundle: Digest::from_content(&bundle.manifest_document().to_bytes()),
        quant: bundle.quant().to_string(),
        text: items.digest(),
        seed: items.seed,
        tool: concat!("powerinfer ", env!("CARGO_PKG_VERSION")).to_owned(),
        processor: system::processor(),
        instruction_set: isa.name().to_owned(),
    }
}

/// Reports policy settings that a device cannot run.
fn note_raised(points: &[Point], device: Option<&str>, output: Output) {
    let raised = points.iter().find(|point| point.setting.is_raised());
    if let (Some(point), Some(device)) = (raised, device) {
        output.say(format!(
            "`{}` and other raised thresholds run only on the CPU, not on {device}",
            point.setting
        ));
    }
}

/// Whether `device` is the emulator.
fn is_emulated(device: DeviceArgument) -> bool {
    #[cfg(feature = "emulator")]
    return device == DeviceArgument::Emulated;
    #[cfg(not(feature = "emulator"))]
    {
        let _ = device;
        false
    }
}

/// `hardware` measured for the model of `bundle`.
fn for_model(hardware: &Hardware, bundle: &Bundle) -> Hardware {
    let config = bundle.config();
    hardware.for_model(
        ModelShape {
            format: bundle.quant(),
            hidden: config.hidden_size,
            neurons: config.ffn_size,
            vocabulary: config.vocabulary_size,
        },
        &EngineRates::CURRENT,
    )
}
