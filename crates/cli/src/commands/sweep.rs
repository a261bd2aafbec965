//! `powerinfer sweep`: quality and speed over a grid of placements, policies, batches and contexts.

mod charts;
mod levels;
mod page;
mod placing;
mod quality;
mod report;
mod rows;
mod speed;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ByteSize, Digest, Progress,
    hardware::{Hardware, ModelShape},
    placing::LayerPlacing,
    plan::{Device, Policy, Threshold},
};
use powerinfer_bundle::{Bundle, Verification};
use powerinfer_datasets::minipython::{Split, distinct_tasks};
use powerinfer_eval::{Journal, RunName, human_eval::read_problems};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{LayerAudit, PolicyChoice, ReadProbe, Runtime};
use powerinfer_solver::{Candidate, SolveError};
use powerinfer_text::Tokenizer;
use serde_json::json;

pub(super) use self::report::told_rise;
use self::{
    levels::Level,
    placing::{Extent, Found, Hot, candidates, place, to_run},
    quality::{Items, Written, beginning, judged, layer_by_layer, write},
    rows::{
        Axes, Identity, LayerSparsity, Measured, Planned, Predictor, Quality, Row, Sparsity, Speed,
    },
    speed::{Clock, Foreseeing},
};
use super::place::{page::refuse_inside, request::read_hardware, search};
use crate::{
    calibration_text::{check_paths, texts},
    engine::{ActivationArgument, DeviceArgument, Execution, gpu, runtime},
    machine::{
        self,
        cores::usable_cores,
        measure::{Thoroughness, measure},
    },
    model_argument::{self, DEMO, bundle_folder},
    output::{Output, parse_percent, print, print_json},
    progress::Bar,
};

/// Which grid, and what is measured at its points.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Every point is a line of JSON in `--out`, and a sweep that was stopped goes on where it was; more points can be asked for with the same file. What a placement would do on `--hardware` is foreseen by the cost model and marked `simulated`; quality, and the speed of this machine, are measured.\n\nExamples:\n  powerinfer sweep demo --html demo.html\n  powerinfer sweep demo --vram 0G,2M,4M,8M --level exact,predicted,predicted:+2 --tasks 100\n  powerinfer sweep ./my-model.powerinfer --level dense,error:5%,error:10% --data held-out.txt --humaneval HumanEval.jsonl.gz"
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

/// The axes of the grid.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Grid")]
struct GridArguments {
    /// Budgets on the GPU, each of which is placed as well as it can be [default: none, and room for a quarter,
    /// half, three quarters and all of the layers]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    vram: Vec<ByteSize>,
    /// Instead of budgets: shares of tokens; neurons that fire on as many are hot and on the GPU, whatever
    /// memory that takes, with attention and the head
    #[arg(long, value_name = "SHARE", value_delimiter = ',', conflicts_with = "vram", value_parser = parse_share)]
    hot_threshold: Vec<f64>,
    /// Policies and how far they go: `dense`, `exact`, `sign-bit`, `predicted`, `predicted:+2` (predictors'
    /// thresholds raised by that logit), `error:10%` (the relative error of FFN outputs that thresholds allow),
    /// `gate:50%` (the share of the smallest gates that is dropped) [default: dense, exact and three of
    /// predicted, or dense and four errors]
    #[arg(
        long,
        value_name = "LEVEL",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    level: Vec<Level>,
    /// Sequences that decode together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: Vec<u32>,
    /// Tokens of each sequence, the decoded ones among them [default: the bundle's context, at most 256]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    context: Vec<usize>,
    /// Machine that placements are for: a name or a file, as `place --hardware` takes them [default: the
    /// bundle's]
    #[arg(long, value_name = "NAME|FILE")]
    hardware: Option<String>,
}

/// What is measured, on what.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Measures")]
struct MeasureArguments {
    /// Text file, or folder of text files, that the profile has not seen [default: for `demo` tasks it was not
    /// trained on, else the text of the bundle's certificate]
    #[arg(long, value_name = "FILE|DIR")]
    data: Vec<PathBuf>,
    /// Most tokens to score
    #[arg(long, value_name = "N", default_value_t = 8192)]
    tokens: usize,
    /// Most tokens of them on which every neuron is looked at, beside what is foreseen
    #[arg(long, value_name = "N", default_value_t = 2048)]
    audit_tokens: usize,
    /// Most tokens of them on which each layer follows a level alone; 0 leaves that out
    #[arg(long, value_name = "N", default_value_t = 1024)]
    layer_tokens: usize,
    /// Held-out function tasks of the demo to write too [default: 100 for `demo`, else 0]
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,
    /// HumanEval, or the like, to write too
    #[arg(long, value_name = "FILE")]
    humaneval: Option<PathBuf>,
    /// Take the first N of its problems alone
    #[arg(long, value_name = "N", requires = "humaneval")]
    problems: Option<usize>,
    /// Tokens to decode at each point, one by one
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    decode_tokens: u32,
    /// How often to time each
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Memory to read for the read bandwidth; several times the processor's caches
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    probe: ByteSize,
    /// Threads to compute with [default: one per physical core]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// What runs the parts that placements put on a GPU; without one, placements are foreseen
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceArgument,
    /// Run every placement where there is no GPU too: the CPU computes it in its two halves, and sums them as
    /// they would be
    #[arg(long)]
    run_placements: bool,
    /// Format of what quantised weights are multiplied with on the CPU; GPUs multiply with float32
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    activations: ActivationArgument,
    /// Seed of the tasks and of every draw
    #[arg(short, long, default_value_t = 1)]
    seed: u64,
}

/// A share, plain or in percent.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = match text.ends_with('%') {
        true => parse_percent(text),
        false => text.parse().ok(),
    };
    let share = share.filter(|share: &f64| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "give a share from 0 to 1, such as 0.1 or 10%".to_owned())
}

/// A point of the grid.
#[derive(Debug, Clone, Copy)]
struct Point {
    level: Level,
    extent: Extent,
    hot: Hot,
}

impl Point {
    fn axes(self) -> Axes {
        let (vram_bytes, hot_threshold) = match self.hot {
            Hot::Within(bytes) => (Some(bytes), None),
            Hot::From(share) => (None, Some(share)),
        };
        Axes {
            vram_bytes,
            hot_threshold,
            level: self.level.to_string(),
            policy: self.level.policy().to_string(),
            level_of: self.level.value().map(|(of, _)| of.to_owned()),
            level_value: self.level.value().map(|(_, value)| value),
            batch: self.extent.batch,
            context_tokens: self.extent.context(),
        }
    }
}

/// Everything that points have in common.
struct Sweep<'a> {
    arguments: &'a SweepArguments,
    folder: PathBuf,
    bundle: Bundle,
    layers: Vec<LayerPlacing>,
    tokenizer: Tokenizer,
    items: Items,
    /// The machine that placements are for, as the model finds it.
    hardware: Hardware,
    threads: usize,
    /// What runs what is on a GPU; none where that is foreseen.
    device: Option<String>,
    output: Output,
}

pub(crate) fn run(arguments: &SweepArguments, output: Output) -> Result<()> {
    let sweep = Sweep::of(arguments, output)?;
    let points = sweep.points()?;
    let out = sweep.out();
    if let Some(html) = &arguments.html {
        report::check_places(html, &out, &sweep.folder)?;
        refuse_inside(Some(html), &sweep.folder)?;
    }
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
        Ok(journal.push(&serde_json::to_value(row)?)?)
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
        let tasks = measures.tasks.unwrap_or(if is_demo { 100 } else { 0 });
        let mut items = Items {
            audited: beginning(&texts, measures.audit_tokens.max(2)),
            alone: beginning(&texts, measures.layer_tokens),
            texts,
            windows: search::windows(&bundle),
            words: 0,
            bytes: 0,
            tasks: distinct_tasks(Split::HeldOut, measures.seed, tasks),
            problems,
            seed: measures.seed,
        };
        items.measure(&tokenizer)?;
        let hardware = match &arguments.grid.hardware {
            Some(name) => for_model(&read_hardware(name)?, &bundle),
            // A plan has its machine as the model finds it already.
            None => bundle.plan().hardware.clone(),
        };
        let device = gpu::available(measures.device, output)?;
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

    /// The points, those of a level together.
    fn points(&self) -> Result<Vec<Point>> {
        let grid = &self.arguments.grid;
        let mut levels = grid.level.clone();
        if levels.is_empty() {
            levels = Level::usual(&self.bundle);
        }
        for (place, level) in levels.iter().enumerate() {
            if levels[..place].contains(level) {
                bail!("`--level` has `{level}` twice; leave one out");
            }
        }
        let limit = self.bundle.plan().budget.context_tokens as usize;
        let decode = self.arguments.measures.decode_tokens as usize;
        let mut contexts = grid.context.clone();
        if contexts.is_empty() {
            contexts.push(limit.min(256));
        }
        for context in &contexts {
            if *context <= decode || *context > limit {
                bail!(
                    "`--context` is {context}; with {decode} tokens to decode it can be {} to the bundle's {limit}",
                    decode + 1
                );
            }
        }
        let raised = |level: &&Level| matches!(level, Level::Predicted(by) if *by != 0.0);
        if let Some(level) = levels.iter().find(raised).filter(|_| self.device.is_some()) {
            bail!(
                "`{level}` runs on the CPU alone; give `--device cpu`, or `predicted` as it was trained"
            );
        }
        if self.device.is_some() && grid.batch.iter().any(|batch| *batch > 1) {
            bail!("`--batch` decodes on the CPU alone; give `--device cpu` with it");
        }
        let mut extents = Vec::new();
        for batch in &grid.batch {
            extents.extend(contexts.iter().map(|context| Extent {
                batch: *batch as usize,
                prompt_tokens: context - decode,
                decode_tokens: decode,
            }));
        }
        let hots: Vec<Hot> = match (grid.vram.is_empty(), grid.hot_threshold.is_empty()) {
            (false, _) => grid.vram.iter().map(|size| Hot::Within(size.0)).collect(),
            (true, false) => {
                let shares = grid.hot_threshold.iter();
                shares.map(|share| Hot::From(*share)).collect()
            }
            (true, true) => self.usual_budgets(extents[0])?,
        };
        let mut points = Vec::new();
        for level in levels {
            for extent in &extents {
                points.extend(hots.iter().map(|hot| Point {
                    level,
                    extent: *extent,
                    hot: *hot,
                }));
            }
        }
        Ok(points)
    }

    /// Nothing; and beside what a GPU takes before any layer, a quarter, half, three quarters and all of the model.
    fn usual_budgets(&self, extent: Extent) -> Result<Vec<Hot>> {
        const STEP: u64 = 64 << 10;
        let audit = vec![LayerAudit::default(); self.layers.len()];
        let dense = candidates(&self.bundle, &self.layers, Level::Dense, None, &audit);
        // More than any model takes.
        let most = Hot::Within(1 << 50);
        let plan = place(&self.bundle, &dense, &self.hardware, most, extent)?.plan;
        let of_layers = plan.layers.iter().map(|layer| layer.bytes(Device::Gpu));
        let of_layers: u64 = of_layers.sum();
        let fixed = plan.totals.gpu_bytes.saturating_sub(of_layers);
        let quarter = |count: u64| {
            let bytes = fixed + of_layers * count / 4;
            Hot::Within(bytes.div_ceil(STEP) * STEP)
        };
        let mut budgets = vec![Hot::Within(0)];
        budgets.extend((1..=4).map(quarter));
        Ok(budgets)
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
            processor: machine::processor(),
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
        let policy = PolicyChoice::Forced(policy);
        let mut model = runtime(self.open()?, policy, self.on(DeviceArgument::Cpu), output)?;
        level.apply(&mut model, thresholds)?;
        Ok(model)
    }

    /// Measures the points that `rows` lack; every one goes to `done` and to `rows`.
    fn measure(
        &self,
        points: &[Point],
        run: &str,
        rows: &mut Vec<Row>,
        done: &mut dyn FnMut(&Row) -> Result<()>,
    ) -> Result<()> {
        let is_there = |rows: &[Row], point: &Point| {
            let axes = point.axes();
            rows.iter().any(|row| row.axes == axes)
        };
        let missing: Vec<(usize, Point)> = points
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, point)| !is_there(rows, point))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let kept = points.len() - missing.len();
        if kept > 0 {
            self.output.say(format!(
                "{kept} of {} points are there already",
                points.len()
            ));
        }
        let mut levels: Vec<Level> = missing.iter().map(|(_, point)| point.level).collect();
        levels.dedup();
        // What a level cannot do is told before hours of another.
        let mut thresholds = Vec::new();
        for level in &levels {
            let found = level.thresholds(&self.bundle)?;
            self.model(*level, found.as_deref(), self.output.silent())?;
            thresholds.push(found);
        }
        let quiet = self.output.silent();
        let (here, _) = measure(self.threads, Thoroughness::Quick, &Bar::new(self.output))?;
        let here = for_model(&here, &self.bundle);
        let probe =
            ReadProbe::new(self.arguments.measures.probe.0.clamp(1 << 20, 1 << 34) as usize);
        let text: Vec<u32> = self.items.texts.concat();
        let bar = Bar::new(self.output);
        let clock = Clock {
            isa: Isa::detect()?,
            threads: self.threads,
            repeats: self.arguments.measures.repeats as usize,
            probe: &probe,
            ids: &text,
            bar: &bar,
        };
        let mut dense = self.model(Level::Dense, None, self.output)?;
        bar.begin("sweeping", self.steps(&missing, &clock), "tokens");
        let by_dense = write(&mut dense, &self.tokenizer, &self.items, &bar)?;
        let identity = self.identity()?;
        for (level, thresholds) in levels.iter().zip(&thresholds) {
            let thresholds = thresholds.as_deref();
            let mut model = self.model(*level, thresholds, quiet)?;
            let audit = quality::audit(&mut model, &self.items, &bar)?;
            let alone = match level.is_lossless() || self.items.alone.is_empty() {
                true => None,
                false => {
                    let mut alone = self.model(*level, thresholds, quiet)?;
                    let (dense, items) = (&mut dense, &self.items);
                    Some(layer_by_layer(
                        dense, &mut alone, *level, thresholds, items, &bar,
                    )?)
                }
            };
            let sparsity = sparsity(&audit, alone.as_deref());
            let ways = candidates(&self.bundle, &self.layers, *level, thresholds, &audit);
            let (mut quality, mut timed): (Option<Quality>, Vec<(Extent, Timed)>) =
                (None, Vec::new());
            for (number, point) in missing.iter().filter(|(_, point)| point.level == *level) {
                let placed = self.place(&ways, point);
                let planned = placed.as_ref().ok().map(|found| found.planned.clone());
                let speed_of = |model: &mut Runtime, found: Option<&Found>| -> Result<Timed> {
                    let (measured, foreseeing) = clock.measure(model, point.extent)?;
                    self.timed(measured, foreseeing, &ways, &here, point, found)
                };
                let runs = self.device.is_some() || self.arguments.measures.run_placements;
                let to_run = match &placed {
                    Ok(found) if runs && found.plan.uses_gpu() => Some(found),
                    _ => None,
                };
                let (own_quality, timed) = if let Some(found) = to_run {
                    let mut hybrid = self.placed_model(*level, thresholds, found)?;
                    let quality = self.judge(&mut dense, &mut hybrid, &by_dense, &bar)?;
                    (quality, speed_of(&mut hybrid, Some(found))?)
                } else {
                    // On the CPU no placement changes anything, so it is measured once.
                    let known = timed.iter().find(|(extent, _)| *extent == point.extent);
                    let found = match known {
                        Some((_, timed)) => timed.clone(),
                        None => {
                            let found = match self.earlier(rows, point) {
                                Some(found) => found,
                                None => speed_of(&mut model, None)?,
                            };
                            timed.push((point.extent, found.clone()));
                            found
                        }
                    };
                    if quality.is_none() {
                        quality = rows
                            .iter()
                            .find(|row| {
                                row.axes.level == level.to_string()
                                    && !row.speed.measured.placement_ran
                            })
                            .map(|row| row.quality.clone());
                    }
                    let quality = match &quality {
                        Some(quality) => quality.clone(),
                        None => quality
                            .insert(self.judge(&mut dense, &mut model, &by_dense, &bar)?)
                            .clone(),
                    };
                    (quality, found)
                };
                let row = Row {
                    point: *number,
                    run: run.to_owned(),
                    axes: point.axes(),
                    trouble: placed.as_ref().err().map(ToString::to_string),
                    placement: placed.ok().map(|found| found.placement),
                    sparsity: sparsity.clone(),
                    predictor: timed
                        .foreseeing
                        .map(|foreseeing| predictor(&audit, foreseeing)),
                    speed: Speed {
                        measured: timed.measured,
                        planned,
                    },
                    quality: own_quality,
                    identity: identity.clone(),
                };
                done(&row)?;
                rows.push(row);
            }
        }
        bar.end();
        Ok(())
    }
    /// Steps of progress that `missing` take.
    fn steps(&self, missing: &[(usize, Point)], clock: &Clock<'_>) -> u64 {
        let mut steps = self.items.written();
        let mut seen: Vec<(Level, Option<Extent>)> = Vec::new();
        let mut is_new = |one: (Level, Option<Extent>)| {
            let is_new = !seen.contains(&one);
            seen.push(one);
            is_new
        };
        for (_, point) in missing {
            if is_new((point.level, None)) {
                steps += self.items.steps(point.level, self.layers.len());
            }
            if is_new((point.level, Some(point.extent))) {
                steps += clock.steps(point.extent);
            }
        }
        steps
    }

    fn place(&self, ways: &[Candidate], point: &Point) -> Result<Found, SolveError> {
        place(&self.bundle, ways, &self.hardware, point.hot, point.extent)
    }

    /// The model under `level` in the two halves of `found`, one of them on a GPU where there is one.
    fn placed_model(
        &self,
        level: Level,
        thresholds: Option<&[Threshold]>,
        found: &Found,
    ) -> Result<Runtime> {
        let mut plan = to_run(found.plan.clone(), &self.bundle);
        for (layer, threshold) in plan.layers.iter_mut().zip(thresholds.unwrap_or_default()) {
            layer.threshold = Some(*threshold);
        }
        let bundle = self.open()?.with_plan(plan)?;
        let device = match self.device {
            Some(_) => self.arguments.measures.device,
            None => DeviceArgument::Cpu,
        };
        let policy = PolicyChoice::Forced(level.policy());
        let mut model = runtime(bundle, policy, self.on(device), self.output.silent())?;
        if let Level::Predicted(by) = level
            && by != 0.0
        {
            model.raise_predictors(by);
        }
        Ok(model)
    }

    fn on(&self, device: DeviceArgument) -> Execution {
        let activations = self.arguments.measures.activations;
        Execution::on(device, self.threads).with_activations(activations)
    }

    fn judge(
        &self,
        dense: &mut Runtime,
        other: &mut Runtime,
        by_dense: &[Written],
        bar: &Bar,
    ) -> Result<Quality> {
        judged(dense, other, &self.tokenizer, &self.items, by_dense, bar)
    }

    /// What was measured, beside what the cost model says of it; `found` is the placement, where that is what ran.
    fn timed(
        &self,
        mut measured: Measured,
        foreseeing: Foreseeing,
        ways: &[Candidate],
        here: &Hardware,
        point: &Point,
        found: Option<&Found>,
    ) -> Result<Timed> {
        measured.placement_ran = found.is_some();
        let mut hot = Hot::Within(0);
        if let (Some(device), Some(_)) = (&self.device, found) {
            measured.device.clone_from(device);
            measured.emulated = self.is_emulated();
            hot = point.hot;
        }
        if !measured.emulated {
            let predicted: Planned = place(&self.bundle, ways, here, hot, point.extent)?.planned;
            let median = measured.decode_microseconds.median;
            measured.predicted_microseconds = Some(predicted.decode_microseconds);
            measured.measured_over_predicted = Some(median / predicted.decode_microseconds);
        }
        let foresees = foreseeing.bytes_per_token > 0.0;
        Ok(Timed {
            measured,
            foreseeing: foresees.then_some(foreseeing),
        })
    }

    #[cfg(feature = "emulator")]
    fn is_emulated(&self) -> bool {
        self.arguments.measures.device == DeviceArgument::Emulated
    }

    #[cfg(not(feature = "emulator"))]
    fn is_emulated(&self) -> bool {
        false
    }

    /// What an earlier run has timed of the same on the CPU.
    fn earlier(&self, rows: &[Row], point: &Point) -> Option<Timed> {
        let axes = point.axes();
        let row = rows.iter().find(|row| {
            let same = (&row.axes.level, row.axes.batch, row.axes.context_tokens);
            same == (&axes.level, axes.batch, axes.context_tokens)
                && !row.speed.measured.placement_ran
        })?;
        let foreseeing = row.predictor.as_ref().map(|predictor| Foreseeing {
            bytes_per_token: predictor.bytes_per_token,
            bytes_share: predictor.bytes_share,
            time_share: predictor.time_share,
        });
        Some(Timed {
            measured: row.speed.measured.clone(),
            foreseeing,
        })
    }
}

/// What was timed.
#[derive(Debug, Clone)]
struct Timed {
    measured: Measured,
    /// Where anything was foreseen.
    foreseeing: Option<Foreseeing>,
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

/// The mean of a figure of all layers.
fn mean(audit: &[LayerAudit], figure: impl Fn(&LayerAudit) -> f64) -> f64 {
    audit.iter().map(figure).sum::<f64>() / audit.len().max(1) as f64
}

fn sparsity(audit: &[LayerAudit], alone: Option<&[f64]>) -> Sparsity {
    let foresees = audit.iter().any(|layer| layer.foreseen.is_some());
    let foreseen = |layer: &LayerAudit| layer.foreseen_sparsity().unwrap_or(0.0);
    let layers = audit
        .iter()
        .enumerate()
        .map(|(index, layer)| LayerSparsity {
            true_share: layer.sparsity(),
            predicted_share: layer.foreseen_sparsity(),
            computed_share: layer.computed_share(),
            relative_error: layer.relative_error(),
            perplexity_rise_alone: alone.map(|rises| rises[index]),
        });
    Sparsity {
        true_share: mean(audit, LayerAudit::sparsity),
        predicted_share: foresees.then(|| mean(audit, foreseen)),
        computed_share: mean(audit, LayerAudit::computed_share),
        relative_error: mean(audit, LayerAudit::relative_error),
        layers: layers.collect(),
        tokens: audit.first().map_or(0, |layer| layer.tokens),
    }
}

fn predictor(audit: &[LayerAudit], foreseeing: Foreseeing) -> Predictor {
    Predictor {
        count_recall: mean(audit, LayerAudit::recall),
        contribution_recall: mean(audit, LayerAudit::contribution_recall),
        precision: mean(audit, |layer| layer.precision().unwrap_or(1.0)),
        bytes_per_token: foreseeing.bytes_per_token,
        bytes_share: foreseeing.bytes_share,
        time_share: foreseeing.time_share,
    }
}
