//! Measurement of a sweep's points, policy setting by policy setting.

use powerinfer_artifact::{
    Progress,
    plan::{Plan, Policy, Threshold},
    progress::Silent,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_kernels::Isa;
use powerinfer_runtime::{DeviceChoice, Execution, ReadProbe, SingleSession};
use powerinfer_text::Tokenizer;

use super::{
    AuditedPolicy, BatchShape, Identity, MeasuredSpeed, PlacedPoint, Point, PolicySetting, Quality,
    Sparsity, Speed, SweepFile, SweepItems, SweepPlanner, SweepRow,
    audit::{predictor, sparsity},
    quality::{self, Generated, generate, judge_relative, layer_by_layer},
    speed::{PredictionCost, SpeedMeter},
};
use crate::EvalError;

/// Settings of a sweep's measurements.
#[derive(Debug, Clone)]
pub struct SweepOptions {
    /// Instruction set of the read probe.
    pub isa: Isa,
    /// CPU threads.
    pub threads: usize,
    /// How often each time is measured.
    pub repeats: usize,
    /// Bytes of the read probe.
    pub probe_bytes: usize,
    /// Name of the GPU that runs its part of placements; none if placements are only predicted.
    pub device: Option<String>,
    /// Whether that GPU is emulated.
    pub emulated: bool,
    /// Whether the CPU runs both parts of every placement if there is no GPU.
    pub run_placements: bool,
}

/// A sweep: everything that its points have in common.
pub struct Sweep<'a> {
    /// The bundle.
    pub bundle: &'a Bundle,
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Texts and tasks.
    pub items: SweepItems,
    /// Settings.
    pub options: SweepOptions,
    /// Identity of the rows.
    pub identity: Identity,
    /// Digest of the settings.
    pub run: String,
    /// How placements are executed.
    pub execution: Execution,
    /// Progress of the measurements.
    pub progress: &'a dyn Progress,
}

impl Sweep<'_> {
    /// Checks that the bundle can follow the policy settings of `points`.
    ///
    /// # Errors
    ///
    /// Fails for the first setting that it cannot follow.
    pub fn check<Failure: From<EvalError>>(
        &self,
        points: &[Point],
        thresholds: impl Fn(PolicySetting) -> Result<Option<Vec<Threshold>>, Failure>,
    ) -> Result<(), Failure> {
        for setting in settings(points) {
            let thresholds = thresholds(setting)?;
            self.cpu_model(setting, thresholds.as_deref())?;
        }
        Ok(())
    }

    /// Points that `rows` lack, with their indices in the grid.
    pub fn missing(&self, points: &[Point], rows: &[SweepRow]) -> Vec<(usize, Point)> {
        let is_measured = |point: &Point| {
            let axes = point.axes();
            rows.iter().any(|row| row.axes == axes)
        };
        let all = points.iter().copied().enumerate();
        all.filter(|(_, point)| !is_measured(point)).collect()
    }

    /// Measures the points `missing`; every row is appended to `rows` and to `file`.
    ///
    /// # Errors
    ///
    /// Fails if a model does, if `file` cannot be written, or if the user asks to stop. A placement that does not fit is
    /// not an error but a field of its row.
    pub fn measure<Planner: SweepPlanner>(
        &self,
        missing: &[(usize, Point)],
        planner: &Planner,
        rows: &mut Vec<SweepRow>,
        file: &mut SweepFile,
    ) -> Result<(), Planner::Error> {
        let options = &self.options;
        let probe = ReadProbe::new(options.probe_bytes).map_err(EvalError::Probe)?;
        let text: Vec<u32> = self.items.texts.concat();
        let meter = SpeedMeter {
            isa: options.isa,
            threads: options.threads,
            repeats: options.repeats,
            probe: &probe,
            ids: &text,
            progress: self.progress,
        };
        let mut dense = self.open(Policy::Dense, None)?;
        let steps = self.steps(missing, &meter);
        self.progress.begin("sweeping", steps, "steps");
        let by_dense = generate(&mut dense, self.tokenizer, &self.items, self.progress)?;
        let mut bench = Bench {
            planner,
            dense,
            by_dense,
            meter,
        };
        let points: Vec<Point> = missing.iter().map(|(_, point)| *point).collect();
        for setting in settings(&points) {
            let mut at = self.audit(setting, &mut bench)?;
            for (index, point) in missing.iter().filter(|(_, point)| point.setting == setting) {
                let row = self.at_point(*index, point, &mut at, &mut bench, rows)?;
                file.push(&row)?;
                rows.push(row);
            }
        }
        self.progress.end();
        Ok(())
    }

    /// Counts neurons under `setting`, and judges each layer alone.
    fn audit<Planner: SweepPlanner>(
        &self,
        setting: PolicySetting,
        bench: &mut Bench<'_, Planner>,
    ) -> Result<AtSetting, Planner::Error> {
        let thresholds = bench.planner.thresholds(setting)?;
        let of_layers = thresholds.as_deref();
        let mut model = self.cpu_model(setting, of_layers)?;
        let audit = quality::audit(&mut model, &self.items, self.progress)?;
        let alone = if setting.is_lossless() || self.items.alone.is_empty() {
            None
        } else {
            Some(layer_by_layer(
                &mut bench.dense,
                &mut self.cpu_model(setting, of_layers)?,
                setting,
                of_layers,
                &self.items,
                self.progress,
            )?)
        };
        Ok(AtSetting {
            sparsity: sparsity(&audit, alone.as_deref()),
            model,
            policy: AuditedPolicy {
                setting,
                thresholds,
                audit,
            },
        })
    }

    /// Places the model at a point, runs it, and judges it. `rows` may have measurements of the CPU that hold here too.
    fn at_point<Planner: SweepPlanner>(
        &self,
        index: usize,
        point: &Point,
        at: &mut AtSetting,
        bench: &mut Bench<'_, Planner>,
        rows: &[SweepRow],
    ) -> Result<SweepRow, Planner::Error> {
        let placed = bench.planner.place(&at.policy, point);
        let mut placement_error = placed.as_ref().err().map(ToString::to_string);
        let mut to_run = None;
        if let Ok(found) = &placed
            && found.plan.uses_gpu()
            && self.may_run(point.setting)
        {
            match self.placed_model(&at.policy, found) {
                Ok(model) => to_run = Some((model, found)),
                // Other points may still be measured.
                Err(error) => placement_error = Some(error.to_string()),
            }
        }
        let (quality, timed) = match to_run {
            Some((mut model, found)) => (
                self.judge(&mut model, bench)?,
                self.time(&mut model, &at.policy, point, Some(found), bench)?,
            ),
            // On the CPU the placement changes nothing, so one measurement holds for all.
            None => (
                match on_cpu(rows, point).next() {
                    Some(row) => row.quality.clone(),
                    None => self.judge(&mut at.model, bench)?,
                },
                match timed_before(rows, point) {
                    Some(timed) => timed,
                    None => self.time(&mut at.model, &at.policy, point, None, bench)?,
                },
            ),
        };
        let (placement, planned) = match placed {
            Ok(found) => (Some(found.placement), Some(found.planned)),
            Err(_) => (None, None),
        };
        Ok(SweepRow {
            point: index,
            run: self.run.clone(),
            axes: point.axes(),
            placement_error,
            placement,
            sparsity: at.sparsity.clone(),
            predictor: timed.cost.map(|cost| predictor(&at.policy.audit, cost)),
            speed: Speed {
                measured: timed.measured,
                planned,
            },
            quality,
            identity: self.identity.clone(),
        })
    }

    /// Steps of progress for `missing`.
    fn steps(&self, missing: &[(usize, Point)], meter: &SpeedMeter<'_>) -> u64 {
        let layers = self.bundle.config().layer_count;
        let mut steps = self.items.generation();
        let mut seen: Vec<(PolicySetting, Option<BatchShape>)> = Vec::new();
        let mut is_new = |one: (PolicySetting, Option<BatchShape>)| {
            let is_new = !seen.contains(&one);
            seen.push(one);
            is_new
        };
        for (_, point) in missing {
            if is_new((point.setting, None)) {
                steps += self.items.steps(point.setting, layers);
            } else if self.may_run(point.setting) {
                steps += self.items.judging();
            }
            if is_new((point.setting, Some(point.shape))) || self.may_run(point.setting) {
                steps += meter.steps(point.shape);
            }
        }
        steps
    }

    /// The bundle under `policy`: on the CPU, or as `plan` places it.
    fn open(&self, policy: Policy, plan: Option<Plan>) -> Result<SingleSession, EvalError> {
        let bundle = Bundle::open(self.bundle.folder(), IntegrityCheck::Quick)?;
        let policy = Some(policy);
        let open = |bundle, execution: &Execution| {
            Ok(SingleSession::open(bundle, policy, execution, &Silent)?)
        };
        match plan {
            Some(plan) => open(bundle.with_plan(plan)?, &self.execution),
            None => {
                let on_cpu = Execution {
                    device: DeviceChoice::Cpu,
                    ..self.execution.clone()
                };
                open(bundle, &on_cpu)
            }
        }
    }

    /// The model under `setting` on the CPU.
    fn cpu_model(
        &self,
        setting: PolicySetting,
        thresholds: Option<&[Threshold]>,
    ) -> Result<SingleSession, EvalError> {
        // Layers get thresholds one by one: the bundle's plan need not have any.
        let policy = match thresholds {
            Some(_) => Policy::Dense,
            None => setting.policy(),
        };
        let mut model = self.open(policy, None)?;
        setting.apply(&mut model, thresholds)?;
        Ok(model)
    }

    /// The model as `found` places it.
    fn placed_model(
        &self,
        policy: &AuditedPolicy,
        found: &PlacedPoint,
    ) -> Result<SingleSession, EvalError> {
        let mut plan = found.plan.clone();
        plan.clear_memory_use();
        let own = self.bundle.plan();
        // Thresholds and the KV cache stay those of the bundle.
        for (layer, before) in plan.layers.iter_mut().zip(&own.layers) {
            layer.threshold = before.threshold;
            layer.input_thresholds = before.input_thresholds;
        }
        plan.budget.context_tokens = own.budget.context_tokens;
        plan.budget.kv_cache = own.budget.kv_cache;
        let thresholds = policy.thresholds.as_deref().unwrap_or_default();
        for (layer, threshold) in plan.layers.iter_mut().zip(thresholds) {
            layer.threshold = Some(*threshold);
        }
        let mut model = self.open(policy.setting.policy(), Some(plan))?;
        if policy.setting.is_raised() {
            policy.setting.apply(&mut model, None)?;
        }
        Ok(model)
    }

    fn judge<Planner>(
        &self,
        other: &mut SingleSession,
        bench: &mut Bench<'_, Planner>,
    ) -> Result<Quality, EvalError> {
        judge_relative(
            &mut bench.dense,
            other,
            self.tokenizer,
            &self.items,
            &bench.by_dense,
            self.progress,
        )
    }

    /// Whether placements run under `setting`, on a device or by the CPU.
    fn may_run(&self, setting: PolicySetting) -> bool {
        match self.options.device {
            Some(_) => !setting.is_raised(),
            None => self.options.run_placements,
        }
    }

    /// Times `model` next to the cost model's estimate; `found` is the placement that runs, if any.
    fn time<Planner: SweepPlanner>(
        &self,
        model: &mut SingleSession,
        policy: &AuditedPolicy,
        point: &Point,
        found: Option<&PlacedPoint>,
        bench: &Bench<'_, Planner>,
    ) -> Result<Timed, Planner::Error> {
        let (mut measured, cost) = bench.meter.measure(model, point.shape)?;
        measured.placement_ran = found.is_some();
        let predicted = match (&self.options.device, found) {
            (Some(device), Some(found)) => {
                measured.device.clone_from(device);
                measured.emulated = self.options.emulated;
                // The plan that ran, which need not be the best one here.
                if measured.emulated {
                    None
                } else {
                    let plan = Some(&found.plan);
                    bench.planner.predict_here(policy, plan, point.shape)?
                }
            }
            _ => bench.planner.predict_here(policy, None, point.shape)?,
        };
        if let Some(predicted) = predicted {
            let median = measured.decode_microseconds.median;
            measured.predicted_microseconds = Some(predicted.decode_microseconds);
            measured.measured_over_predicted = Some(median / predicted.decode_microseconds);
        }
        let predicts = cost.bytes_per_token > 0.0;
        Ok(Timed {
            measured,
            cost: predicts.then_some(cost),
        })
    }
}

/// Policy settings of `points`, in their order.
fn settings(points: &[Point]) -> Vec<PolicySetting> {
    let mut settings: Vec<PolicySetting> = points.iter().map(|point| point.setting).collect();
    settings.dedup();
    settings
}

/// Rows of the point's policy setting that the CPU computed, whatever their placement.
fn on_cpu<'a>(rows: &'a [SweepRow], point: &Point) -> impl Iterator<Item = &'a SweepRow> {
    let setting = point.axes().setting;
    let same =
        move |row: &&SweepRow| row.axes.setting == setting && !row.speed.measured.placement_ran;
    rows.iter().filter(same)
}

/// Time that `rows` have of the same setting and shape on the CPU.
fn timed_before(rows: &[SweepRow], point: &Point) -> Option<Timed> {
    let axes = point.axes();
    let shape = (axes.batch, axes.context_tokens);
    let row = on_cpu(rows, point).find(|row| (row.axes.batch, row.axes.context_tokens) == shape)?;
    let cost = row.predictor.as_ref().map(|predictor| PredictionCost {
        bytes_per_token: predictor.bytes_per_token,
        bytes_share: predictor.bytes_share,
        time_share: predictor.time_share,
    });
    Some(Timed {
        measured: row.speed.measured.clone(),
        cost,
    })
}

/// Models and tools that all points are measured with.
struct Bench<'a, Planner> {
    planner: &'a Planner,
    dense: SingleSession,
    /// Functions that `dense` generated.
    by_dense: Vec<Generated>,
    meter: SpeedMeter<'a>,
}

/// A policy setting's model and neuron counts.
struct AtSetting {
    /// On the CPU.
    model: SingleSession,
    sparsity: Sparsity,
    policy: AuditedPolicy,
}

/// Measured time with the cost of prediction, if neurons are predicted.
#[derive(Debug, Clone)]
struct Timed {
    measured: MeasuredSpeed,
    cost: Option<PredictionCost>,
}
