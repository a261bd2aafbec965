//! Measures the points of a grid, level by level.

use anyhow::Result;
use powerinfer_artifact::{Progress, hardware::Hardware, plan::Threshold, progress::Silent};
use powerinfer_kernels::Isa;
use powerinfer_planner::machine::{Thoroughness, measure};
use powerinfer_runtime::{LayerAudit, ReadProbe, Runtime};
use powerinfer_solver::{Candidate, SolveError};

use super::{
    Sweep, for_model,
    grid::Point,
    levels::Level,
    placing::{Extent, Found, Hot, candidates, place, price, to_run},
    quality::{self, Written, judged, layer_by_layer, write},
    rows::{Identity, LayerSparsity, Measured, Predictor, Quality, Row, Sparsity, Speed},
    speed::{Clock, Prediction},
};
use crate::{engine::DeviceArgument, progress::Bar};

impl Sweep<'_> {
    /// Refuses levels that the bundle cannot follow, before anything is measured.
    pub(super) fn check_levels(&self, points: &[Point]) -> Result<()> {
        let mut levels: Vec<Level> = points.iter().map(|point| point.level).collect();
        levels.dedup();
        for level in &levels {
            let thresholds = level.thresholds(&self.bundle)?;
            self.model(*level, thresholds.as_deref(), self.output.silent())?;
        }
        let raised = levels.iter().find(|level| level.is_raised());
        if let (Some(level), Some(device)) = (raised, &self.device) {
            self.output.say(format!(
                "`{level}` and the like run on the CPU alone, whatever {device} could hold"
            ));
        }
        Ok(())
    }

    /// Measures the points that `rows` lack; every one goes to `done` and to `rows`.
    pub(super) fn measure(
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
        let (here, _) = measure(self.threads, Thoroughness::Quick, &Bar::new(self.output))?;
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
        let mut bench = Bench {
            by_dense: write(&mut dense, &self.tokenizer, &self.items, &bar)?,
            dense,
            here: for_model(&here, &self.bundle),
            clock,
            identity: self.identity()?,
            run,
        };
        let mut levels: Vec<Level> = missing.iter().map(|(_, point)| point.level).collect();
        levels.dedup();
        for level in levels {
            let mut measured = self.at_level(level, &mut bench)?;
            for (number, point) in missing.iter().filter(|(_, point)| point.level == level) {
                let row = self.at_point(*number, point, &mut measured, &mut bench, rows)?;
                done(&row)?;
                rows.push(row);
            }
        }
        bar.end();
        Ok(())
    }

    /// Looks at `level` neuron by neuron and layer by layer.
    fn at_level(&self, level: Level, bench: &mut Bench<'_>) -> Result<AtLevel> {
        let bar = bench.clock.bar;
        let thresholds = level.thresholds(&self.bundle)?;
        let open = || self.model(level, thresholds.as_deref(), self.output.silent());
        let mut model = open()?;
        let audit = quality::audit(&mut model, &self.items, bar)?;
        let alone = match level.is_lossless() || self.items.alone.is_empty() {
            true => None,
            false => {
                let (dense, thresholds) = (&mut bench.dense, thresholds.as_deref());
                let (mut alone, items) = (open()?, &self.items);
                Some(layer_by_layer(
                    dense, &mut alone, level, thresholds, items, bar,
                )?)
            }
        };
        let of_level = thresholds.as_deref();
        Ok(AtLevel {
            modes: candidates(&self.bundle, &self.layers, level, of_level, &audit),
            sparsity: sparsity(&audit, alone.as_deref()),
            level,
            thresholds,
            model,
            audit,
        })
    }

    /// Places the model at a point, runs it, and judges it; `rows` have what the CPU did of the same level already.
    fn at_point(
        &self,
        number: usize,
        point: &Point,
        at: &mut AtLevel,
        bench: &mut Bench<'_>,
        rows: &[Row],
    ) -> Result<Row> {
        let placed = self.place(&at.modes, point);
        let mut trouble = placed.as_ref().err().map(ToString::to_string);
        let mut to_run = None;
        if let Some(found) = placed
            .as_ref()
            .ok()
            .filter(|found| self.is_run(at.level, found))
        {
            match self.placed_model(at.level, at.thresholds.as_deref(), found) {
                Ok(model) => to_run = Some((model, found)),
                // The other points may do better.
                Err(error) => trouble = Some(format!("{error:#}")),
            }
        }
        let (quality, timed) = match to_run {
            Some((mut model, found)) => (
                self.judge(&mut model, bench)?,
                self.time(&mut model, &at.modes, point, Some(found), bench)?,
            ),
            // On the CPU no placement changes anything, so it is measured once.
            None => (
                match on_cpu(rows, point).next() {
                    Some(row) => row.quality.clone(),
                    None => self.judge(&mut at.model, bench)?,
                },
                match earlier(rows, point) {
                    Some(timed) => timed,
                    None => self.time(&mut at.model, &at.modes, point, None, bench)?,
                },
            ),
        };
        let (placement, planned) = match placed {
            Ok(found) => (Some(found.placement), Some(found.planned)),
            Err(_) => (None, None),
        };
        Ok(Row {
            point: number,
            run: bench.run.to_owned(),
            axes: point.axes(),
            trouble,
            placement,
            sparsity: at.sparsity.clone(),
            predictor: timed
                .prediction
                .map(|prediction| predictor(&at.audit, prediction)),
            speed: Speed {
                measured: timed.measured,
                planned,
            },
            quality,
            identity: bench.identity.clone(),
        })
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
            let is_first = is_new((point.level, None));
            if is_first {
                steps += self.items.steps(point.level, self.layers.len());
            } else if self.may_run(point.level) {
                steps += self.items.judging();
            }
            if is_new((point.level, Some(point.extent))) || self.may_run(point.level) {
                steps += clock.steps(point.extent);
            }
        }
        steps
    }

    fn place(&self, modes: &[Candidate], point: &Point) -> Result<Found, SolveError> {
        place(&self.bundle, modes, &self.hardware, point.hot, point.extent)
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
        let policy = Some(level.policy());
        let mut model = Runtime::open(bundle, policy, &self.on(device)?, &Silent)?;
        if let Level::Predicted(by) = level
            && by != 0.0
        {
            model.raise_predictors(by);
        }
        Ok(model)
    }

    fn judge(&self, other: &mut Runtime, bench: &mut Bench<'_>) -> Result<Quality> {
        let (tokenizer, items) = (&self.tokenizer, &self.items);
        let (by_dense, bar) = (&bench.by_dense, bench.clock.bar);
        judged(&mut bench.dense, other, tokenizer, items, by_dense, bar)
    }

    /// Whether placements run, on a device or where each is asked for.
    fn may_run(&self, level: Level) -> bool {
        let on_device = self.device.is_some() && !level.is_raised();
        let on_cpu = self.device.is_none() && self.arguments.measures.run_placements;
        on_device || on_cpu
    }

    /// Whether `found` is what runs.
    fn is_run(&self, level: Level, found: &Found) -> bool {
        found.plan.uses_gpu() && self.may_run(level)
    }

    /// Times `model` beside what the cost model says of it; `found` is the placement, where that is what runs.
    fn time(
        &self,
        model: &mut Runtime,
        modes: &[Candidate],
        point: &Point,
        found: Option<&Found>,
        bench: &Bench<'_>,
    ) -> Result<Timed> {
        let (mut measured, prediction) = bench.clock.measure(model, point.extent)?;
        let here = &bench.here;
        measured.placement_ran = found.is_some();
        let predicted = match (&self.device, found) {
            (Some(device), Some(found)) => {
                measured.device.clone_from(device);
                measured.emulated = self.is_emulated();
                // The plan that ran, whatever would be best here.
                let known = here.gpu.is_some() && !measured.emulated;
                known.then(|| price(&self.bundle, modes, &found.plan, here, point.extent))
            }
            _ => Some(place(&self.bundle, modes, here, Hot::Within(0), point.extent)?.planned),
        };
        if let Some(predicted) = predicted {
            let median = measured.decode_microseconds.median;
            measured.predicted_microseconds = Some(predicted.decode_microseconds);
            measured.measured_over_predicted = Some(median / predicted.decode_microseconds);
        }
        let predicts = prediction.bytes_per_token > 0.0;
        Ok(Timed {
            measured,
            prediction: predicts.then_some(prediction),
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
}

/// Rows of the same level that the CPU computed, whatever their placement.
fn on_cpu<'a>(rows: &'a [Row], point: &Point) -> impl Iterator<Item = &'a Row> {
    let level = point.axes().level;
    let same = move |row: &&Row| row.axes.level == level && !row.speed.measured.placement_ran;
    rows.iter().filter(same)
}

/// What was timed of the same on the CPU.
fn earlier(rows: &[Row], point: &Point) -> Option<Timed> {
    let axes = point.axes();
    let extent = (axes.batch, axes.context_tokens);
    let row =
        on_cpu(rows, point).find(|row| (row.axes.batch, row.axes.context_tokens) == extent)?;
    let prediction = row.predictor.as_ref().map(|predictor| Prediction {
        bytes_per_token: predictor.bytes_per_token,
        bytes_share: predictor.bytes_share,
        time_share: predictor.time_share,
    });
    Some(Timed {
        measured: row.speed.measured.clone(),
        prediction,
    })
}

/// What all points are measured with and beside.
struct Bench<'a> {
    dense: Runtime,
    /// What that has written.
    by_dense: Vec<Written>,
    /// This machine, as the model finds it.
    here: Hardware,
    clock: Clock<'a>,
    identity: Identity,
    run: &'a str,
}

/// A level that is looked at.
struct AtLevel {
    level: Level,
    thresholds: Option<Vec<Threshold>>,
    /// On the CPU.
    model: Runtime,
    audit: Vec<LayerAudit>,
    sparsity: Sparsity,
    modes: Vec<Candidate>,
}

/// What was timed.
#[derive(Debug, Clone)]
struct Timed {
    measured: Measured,
    /// Where anything was predicted.
    prediction: Option<Prediction>,
}

/// The mean of a figure of all layers.
fn mean(audit: &[LayerAudit], figure: impl Fn(&LayerAudit) -> f64) -> f64 {
    audit.iter().map(figure).sum::<f64>() / audit.len().max(1) as f64
}

fn sparsity(audit: &[LayerAudit], alone: Option<&[f64]>) -> Sparsity {
    let predicts = audit.iter().any(|layer| layer.predicted.is_some());
    let predicted = |layer: &LayerAudit| layer.predicted_sparsity().unwrap_or(0.0);
    let layers = audit
        .iter()
        .enumerate()
        .map(|(index, layer)| LayerSparsity {
            true_share: layer.sparsity(),
            predicted_share: layer.predicted_sparsity(),
            computed_share: layer.computed_share(),
            relative_error: layer.relative_error(),
            perplexity_rise_alone: alone.map(|rises| rises[index]),
        });
    Sparsity {
        true_share: mean(audit, LayerAudit::sparsity),
        predicted_share: predicts.then(|| mean(audit, predicted)),
        computed_share: mean(audit, LayerAudit::computed_share),
        relative_error: mean(audit, LayerAudit::relative_error),
        layers: layers.collect(),
        tokens: audit.first().map_or(0, |layer| layer.tokens),
    }
}

fn predictor(audit: &[LayerAudit], prediction: Prediction) -> Predictor {
    let of_all = |count: fn(&LayerAudit) -> u64| audit.iter().map(count).sum::<u64>();
    let share = |part: u64, all: u64| match all {
        0 => 1.0,
        all => part as f64 / all as f64,
    };
    Predictor {
        count_recall: share(of_all(|layer| layer.found), of_all(|layer| layer.fired)),
        contribution_recall: mean(audit, LayerAudit::contribution_recall),
        precision: share(
            of_all(|layer| layer.found),
            of_all(|layer| layer.predicted.unwrap_or(0)),
        ),
        bytes_per_token: prediction.bytes_per_token,
        bytes_share: prediction.bytes_share,
        time_share: prediction.time_share,
    }
}
