//! Measures the points of a grid, level by level.

use anyhow::Result;
use powerinfer_artifact::{Progress, hardware::Hardware, plan::Threshold};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{LayerAudit, PolicyChoice, ReadProbe, Runtime};
use powerinfer_solver::{Candidate, SolveError};

use super::{
    Sweep, for_model,
    grid::Point,
    levels::Level,
    placing::{Extent, Found, Hot, candidates, place, price, to_run},
    quality::{self, Written, judged, layer_by_layer, write},
    rows::{LayerSparsity, Measured, Predictor, Quality, Row, Sparsity, Speed},
    speed::{Clock, Foreseeing},
};
use crate::{
    engine::{DeviceArgument, runtime},
    machine::measure::{Thoroughness, measure},
    progress::Bar,
};

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
        let mut levels: Vec<Level> = missing.iter().map(|(_, point)| point.level).collect();
        levels.dedup();
        let thresholds = levels.iter().map(|level| level.thresholds(&self.bundle));
        let thresholds = thresholds.collect::<Result<Vec<_>>>()?;
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
            for (number, point) in missing.iter().filter(|(_, point)| point.level == *level) {
                let placed = self.place(&ways, point);
                let mut trouble = placed.as_ref().err().map(ToString::to_string);
                let planned = placed.as_ref().ok().map(|found| found.planned.clone());
                let to_run = placed
                    .as_ref()
                    .ok()
                    .filter(|found| self.is_run(*level, found));
                let mut placed_model = None;
                if let Some(found) = to_run {
                    match self.placed_model(*level, thresholds, found) {
                        Ok(model) => placed_model = Some((model, found)),
                        // The other points may do better.
                        Err(error) => trouble = Some(format!("{error:#}")),
                    }
                }
                let (quality, timed) = match placed_model {
                    Some((mut model, found)) => {
                        let quality = self.judge(&mut dense, &mut model, &by_dense, &bar)?;
                        let measured = clock.measure(&mut model, point.extent)?;
                        let timed = self.timed(measured, &ways, &here, point, Some(found))?;
                        (quality, timed)
                    }
                    // On the CPU no placement changes anything, so it is measured once.
                    None => {
                        let quality = match on_cpu(rows, point).next() {
                            Some(row) => row.quality.clone(),
                            None => self.judge(&mut dense, &mut model, &by_dense, &bar)?,
                        };
                        let timed = match earlier(rows, point) {
                            Some(timed) => timed,
                            None => {
                                let measured = clock.measure(&mut model, point.extent)?;
                                self.timed(measured, &ways, &here, point, None)?
                            }
                        };
                        (quality, timed)
                    }
                };
                let row = Row {
                    point: *number,
                    run: run.to_owned(),
                    axes: point.axes(),
                    trouble,
                    placement: placed.ok().map(|found| found.placement),
                    sparsity: sparsity.clone(),
                    predictor: timed
                        .foreseeing
                        .map(|foreseeing| predictor(&audit, foreseeing)),
                    speed: Speed {
                        measured: timed.measured,
                        planned,
                    },
                    quality,
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

    fn judge(
        &self,
        dense: &mut Runtime,
        other: &mut Runtime,
        by_dense: &[Written],
        bar: &Bar,
    ) -> Result<Quality> {
        judged(dense, other, &self.tokenizer, &self.items, by_dense, bar)
    }

    /// Whether `found` is what runs: on a device, or where each placement is asked for.
    fn is_run(&self, level: Level, found: &Found) -> bool {
        let on_device = self.device.is_some() && !level.is_raised();
        let on_cpu = self.device.is_none() && self.arguments.measures.run_placements;
        found.plan.uses_gpu() && (on_device || on_cpu)
    }

    /// What was measured, beside what the cost model says of it; `found` is the placement, where that is what ran.
    fn timed(
        &self,
        (mut measured, foreseeing): (Measured, Foreseeing),
        ways: &[Candidate],
        here: &Hardware,
        point: &Point,
        found: Option<&Found>,
    ) -> Result<Timed> {
        measured.placement_ran = found.is_some();
        let predicted = match (&self.device, found) {
            (Some(device), Some(found)) => {
                measured.device.clone_from(device);
                measured.emulated = self.is_emulated();
                // The plan that ran, whatever would be best here.
                let known = here.gpu.is_some() && !measured.emulated;
                known.then(|| price(&self.bundle, ways, &found.plan, here, point.extent))
            }
            _ => Some(place(&self.bundle, ways, here, Hot::Within(0), point.extent)?.planned),
        };
        if let Some(predicted) = predicted {
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

/// What was timed.
#[derive(Debug, Clone)]
struct Timed {
    measured: Measured,
    /// Where anything was foreseen.
    foreseeing: Option<Foreseeing>,
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
            of_all(|layer| layer.foreseen.unwrap_or(0)),
        ),
        bytes_per_token: foreseeing.bytes_per_token,
        bytes_share: foreseeing.bytes_share,
        time_share: foreseeing.time_share,
    }
}
