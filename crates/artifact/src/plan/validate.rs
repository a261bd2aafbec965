//! Validation of plans: totals equal the sums of their terms, and every budget is kept.

use super::{
    BudgetLine, COLD_NEURONS, Device, GPU_PREFILL_BATCHES, HOT_NEURONS, LayerPlan, PREFILL_BATCH,
    Plan, PlanError,
};

impl Plan {
    /// Checks that the plan is consistent: layers in order, no more hot neurons than neurons, totals equal
    /// to their sums and within the budget.
    ///
    /// # Errors
    ///
    /// The first inconsistency.
    pub fn validate(&self) -> Result<(), PlanError> {
        for (position, layer) in self.layers.iter().enumerate() {
            layer.validate(position)?;
        }
        self.validate_values()?;
        let batches = [&[PREFILL_BATCH][..], &GPU_PREFILL_BATCHES].concat();
        if !batches.contains(&self.prompt_batch) {
            return Err(PlanError::InvalidValue {
                field: "prompt_batch".to_owned(),
                value: self.prompt_batch as f64,
            });
        }
        self.validate_lines()?;
        for device in [Device::Gpu, Device::Cpu] {
            self.validate_device(device)?;
        }
        self.validate_gpus()?;
        let neurons = |hot: bool| {
            let count = |layer: &LayerPlan| {
                if hot {
                    layer.hot_count
                } else {
                    layer.neuron_count - layer.hot_count
                }
            };
            self.layers
                .iter()
                .map(|layer| count(layer) as u128 * u128::from(layer.neuron_bytes))
                .sum()
        };
        check_sum(HOT_NEURONS, self.line(HOT_NEURONS), neurons(true))?;
        check_sum(COLD_NEURONS, self.line(COLD_NEURONS), neurons(false))?;
        let count = |of: fn(&LayerPlan) -> usize| self.layers.iter().map(|l| of(l) as u128).sum();
        check_sum(
            "totals.neuron_count",
            self.totals.neuron_count,
            count(|l| l.neuron_count),
        )?;
        check_sum(
            "totals.hot_count",
            self.totals.hot_count,
            count(|l| l.hot_count),
        )
    }

    fn validate_lines(&self) -> Result<(), PlanError> {
        for (index, line) in self.lines.iter().enumerate() {
            let is_same = |other: &&BudgetLine| {
                (&other.name, other.device, other.gpu) == (&line.name, line.device, line.gpu)
            };
            if self.lines[..index].iter().any(|other| is_same(&other)) {
                return Err(PlanError::DuplicateLine {
                    name: line.name.clone(),
                    device: line.device,
                });
            }
        }
        Ok(())
    }

    fn validate_device(&self, device: Device) -> Result<(), PlanError> {
        let stated = self.totals.bytes(device);
        let lines = self.lines.iter().filter(|line| line.device == device);
        let found = lines.map(|line| u128::from(line.bytes)).sum();
        check_sum(&format!("totals.{device}_bytes"), stated, found)?;
        let in_layers: u128 = self
            .layers
            .iter()
            .map(|layer| u128::from(layer.bytes(device)))
            .sum();
        if in_layers > found {
            return Err(PlanError::SumMismatch {
                what: format!("totals.{device}_bytes"),
                stated,
                found: in_layers,
            });
        }
        let budget = self.budget.bytes(device);
        if stated > budget {
            return Err(PlanError::OverBudget {
                device,
                needed: stated,
                budget,
            });
        }
        Ok(())
    }

    /// Checks that each GPU is within its budget and has one contiguous range of layers.
    fn validate_gpus(&self) -> Result<(), PlanError> {
        let budgets = self.budget.vram_per_gpu();
        let split: u128 = budgets.iter().map(|budget| u128::from(*budget)).sum();
        check_sum("budget.vram_bytes", self.budget.vram_bytes, split)?;
        for (gpu, budget) in budgets.iter().enumerate() {
            let lines = self.lines.iter();
            let here = lines.filter(|line| line.device == Device::Gpu && line.gpu == gpu);
            let needed = here.fold(0, |sum: u64, line| sum.saturating_add(line.bytes));
            if needed > *budget {
                return Err(PlanError::OverBudget {
                    device: Device::Gpu,
                    needed,
                    budget: *budget,
                });
            }
        }
        let of_layers = self.layers.iter().map(|layer| layer.gpu);
        let of_lines = self.lines.iter().map(|line| line.gpu);
        let known = |gpu: &usize| *gpu < budgets.len();
        let Some(gpu) = of_layers
            .clone()
            .chain(of_lines)
            .chain([self.head_gpu])
            .find(|gpu| !known(gpu))
        else {
            return if of_layers.is_sorted() {
                Ok(())
            } else {
                Err(PlanError::GpusNotContiguous)
            };
        };
        Err(PlanError::NoSuchGpu {
            gpu,
            count: budgets.len(),
        })
    }

    fn validate_values(&self) -> Result<(), PlanError> {
        let solver = &self.solver;
        check_share("totals.hot_share", self.totals.hot_share)?;
        check_not_negative("solver.objective", solver.objective)?;
        check_not_negative("solver.bound", solver.bound)?;
        check_not_negative("solver.gap", solver.gap)?;
        check_not_negative(
            "totals.microseconds_per_token",
            self.totals.microseconds_per_token,
        )
    }
}

impl LayerPlan {
    fn validate(&self, position: usize) -> Result<(), PlanError> {
        let layer = self.layer;
        if layer != position {
            return Err(PlanError::LayerOrder { position, layer });
        }
        if self.hot_count > self.neuron_count {
            return Err(PlanError::TooManyHot {
                layer,
                hot_count: self.hot_count,
                neuron_count: self.neuron_count,
            });
        }
        if self.cached_experts > self.hot_count {
            return Err(PlanError::InvalidValue {
                field: format!("layers[{layer}].cached_experts"),
                value: self.cached_experts as f64,
            });
        }
        check_share(&format!("layers[{layer}].hot_share"), self.hot_share)?;
        if let Some(threshold) = self.threshold {
            let value = f64::from(threshold.value);
            check_not_negative(&format!("layers[{layer}].threshold.value"), value)?;
            check_not_negative(&format!("layers[{layer}].threshold.error"), threshold.error)?;
        }
        if let Some(thresholds) = self.input_thresholds {
            let field = |name: &str| format!("layers[{layer}].input_thresholds.{name}");
            check_share(&field("share"), thresholds.share)?;
            for (name, value) in [
                ("attention", thresholds.attention),
                ("output", thresholds.output),
                ("ffn", thresholds.ffn.unwrap_or_default()),
            ] {
                check_not_negative(&field(name), value.into())?;
            }
        }
        for (name, value) in [
            ("gpu_microseconds", self.gpu_microseconds),
            ("cpu_microseconds", self.cpu_microseconds),
            ("sync_microseconds", self.sync_microseconds),
            ("microseconds", self.microseconds),
        ] {
            check_not_negative(&format!("layers[{layer}].{name}"), value)?;
        }
        Ok(())
    }
}

fn check_sum(what: &str, stated: u64, found: u128) -> Result<(), PlanError> {
    if u128::from(stated) == found {
        return Ok(());
    }
    Err(PlanError::SumMismatch {
        what: what.to_owned(),
        stated,
        found,
    })
}

fn check_share(field: &str, value: f64) -> Result<(), PlanError> {
    check_value(field, value, (0.0..=1.0).contains(&value))
}

fn check_not_negative(field: &str, value: f64) -> Result<(), PlanError> {
    check_value(field, value, value.is_finite() && value >= 0.0)
}

fn check_value(field: &str, value: f64, good: bool) -> Result<(), PlanError> {
    if good {
        return Ok(());
    }
    Err(PlanError::InvalidValue {
        field: field.to_owned(),
        value,
    })
}

#[cfg(test)]
mod tests {
    use powerinfer_tensor::CacheFormat;

    use super::*;
    use crate::{
        hardware,
        plan::{Budget, InputThresholds, Objective, Policy, SolverSummary, Totals},
    };

    fn plan() -> Plan {
        let line = |name: &str, device, bytes| BudgetLine {
            name: name.to_owned(),
            device,
            gpu: 0,
            bytes,
        };
        Plan {
            objective: Objective::Impact,
            group_size: 2,
            solver: SolverSummary {
                backend: "microlp".to_owned(),
                objective: 1.5,
                bound: 1.5,
                gap: 0.0,
            },
            budget: Budget {
                vram_bytes: 60,
                ram_bytes: 50,
                context_tokens: 16,
                kv_cache: CacheFormat::F32,
                vram_split: Vec::new(),
            },
            lines: vec![
                line("attention", Device::Gpu, 40),
                line(HOT_NEURONS, Device::Gpu, 20),
                line(COLD_NEURONS, Device::Cpu, 20),
                line("KV cache", Device::Cpu, 8),
                line("embeddings", Device::Cpu, 16),
            ],
            totals: Totals {
                gpu_bytes: 60,
                cpu_bytes: 44,
                neuron_count: 4,
                hot_count: 2,
                hot_share: 0.75,
                microseconds_per_token: 3.0,
            },
            head: Device::Cpu,
            head_gpu: 0,
            prompt_batch: PREFILL_BATCH,
            forecast: None,
            layers: vec![LayerPlan {
                layer: 0,
                policy: Policy::Exact,
                reason: "no predictor".to_owned(),
                threshold: None,
                input_thresholds: None,
                neuron_count: 4,
                hot_count: 2,
                cached_experts: 0,
                hot_share: 0.75,
                neuron_bytes: 10,
                gpu: 0,
                attention: Device::Gpu,
                kv: Device::Cpu,
                predictor: None,
                gpu_bytes: 60,
                cpu_bytes: 28,
                gpu_microseconds: 1.0,
                cpu_microseconds: 2.0,
                sync_microseconds: 0.5,
                microseconds: 2.5,
                limit: None,
            }],
            hardware: hardware::named("pc-high").unwrap(),
        }
    }

    #[test]
    fn a_consistent_plan_is_accepted_and_survives_json() {
        let plan = plan();
        plan.validate().unwrap();
        let json = serde_json::to_string_pretty(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        assert!(json.contains("\"policy\": \"exact\""), "{json}");
    }

    /// Returns the error of validating `plan()` after `edit`.
    fn error_after(edit: fn(&mut Plan)) -> PlanError {
        let mut plan = plan();
        edit(&mut plan);
        plan.validate().unwrap_err()
    }

    #[test]
    fn a_plan_without_memory_use_is_consistent_and_not_placed() {
        let mut plan = plan();
        assert!(plan.is_placed());
        assert_eq!(plan.line("attention"), 40);
        plan.clear_memory_use();
        plan.validate().unwrap();
        assert!(!plan.is_placed());
        assert!(!Plan::unplaced(2, 8, Policy::Dense, 16).is_placed());
    }

    #[test]
    fn inconsistent_edits_are_refused() {
        assert!(matches!(
            error_after(|plan| plan.layers[0].hot_count = 5),
            PlanError::TooManyHot {
                layer: 0,
                hot_count: 5,
                neuron_count: 4
            }
        ));
        assert!(matches!(
            error_after(|plan| plan.layers[0].hot_count = 3),
            PlanError::SumMismatch { what, stated: 20, found: 30 } if what == HOT_NEURONS
        ));
        assert!(matches!(
            error_after(|plan| plan.lines[0].bytes += 1),
            PlanError::SumMismatch { what, .. } if what == "totals.gpu_bytes"
        ));
        assert!(matches!(
            error_after(|plan| plan.lines[2].bytes = u64::MAX),
            PlanError::SumMismatch { what, .. } if what == "totals.cpu_bytes"
        ));
        assert!(matches!(
            error_after(|plan| plan.layers[0].cpu_bytes = 45),
            PlanError::SumMismatch { what, .. } if what == "totals.cpu_bytes"
        ));
        assert!(matches!(
            error_after(|plan| plan.budget.vram_bytes = 59),
            PlanError::OverBudget {
                device: Device::Gpu,
                needed: 60,
                budget: 59
            }
        ));
        assert!(matches!(
            error_after(|plan| plan.layers[0].layer = 1),
            PlanError::LayerOrder {
                position: 0,
                layer: 1
            }
        ));
        assert!(matches!(
            error_after(|plan| plan.layers[0].hot_share = 1.5),
            PlanError::InvalidValue { .. }
        ));
        assert!(matches!(
            error_after(|plan| plan.layers[0].microseconds = f64::NAN),
            PlanError::InvalidValue { .. }
        ));
        for thresholds in [(1.5, 0.0, 0.0), (0.5, f32::NAN, 0.0), (0.5, 0.0, -1.0)] {
            let mut plan = plan();
            plan.layers[0].input_thresholds = Some(InputThresholds {
                share: thresholds.0,
                attention: 0.0,
                output: thresholds.1,
                ffn: Some(thresholds.2),
            });
            let error = plan.validate().unwrap_err().to_string();
            assert!(error.contains("layers[0].input_thresholds."), "{error}");
        }
        assert!(matches!(
            error_after(|plan| {
                plan.lines[0].bytes -= 20;
                let line = plan.lines[0].clone();
                plan.lines.push(line);
            }),
            PlanError::DuplicateLine {
                device: Device::Gpu,
                ..
            }
        ));
        assert!(matches!(
            error_after(|plan| plan.totals.hot_count = 3),
            PlanError::SumMismatch { .. }
        ));
    }
}
