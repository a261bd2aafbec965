//! The planner of a sweep: a trait, so that this crate places nothing itself.

use std::fmt;

use powerinfer_artifact::plan::{Plan, Threshold};
use powerinfer_runtime::LayerAudit;

use super::{BatchShape, PlacementSummary, PlannedSpeed, Point, PolicySetting};
use crate::EvalError;

/// Places the model of a sweep, on the sweep's target machine and on this one.
pub trait SweepPlanner {
    /// Error of a model that cannot be placed.
    type Error: From<EvalError> + fmt::Display;

    /// Threshold of every layer under `setting`; none if its policy has no thresholds.
    ///
    /// # Errors
    ///
    /// Fails if the bundle was not calibrated for the setting.
    fn thresholds(&self, setting: PolicySetting) -> Result<Option<Vec<Threshold>>, Self::Error>;

    /// Places the model at `point` on the target machine.
    ///
    /// # Errors
    ///
    /// Fails if it does not fit.
    fn place(&self, policy: &AuditedPolicy, point: &Point) -> Result<PlacedPoint, Self::Error>;

    /// The cost model's estimate for this machine, of `plan` or of everything on the CPU; none if this machine's GPU is
    /// not known.
    ///
    /// # Errors
    ///
    /// Fails if the model does not fit.
    fn predict_here(
        &self,
        policy: &AuditedPolicy,
        plan: Option<&Plan>,
        shape: BatchShape,
    ) -> Result<Option<PlannedSpeed>, Self::Error>;
}

/// A policy setting with the neurons it was observed to select.
#[derive(Debug, Clone)]
pub struct AuditedPolicy {
    /// The policy setting.
    pub setting: PolicySetting,
    /// Threshold of every layer, if the policy has such.
    pub thresholds: Option<Vec<Threshold>>,
    /// Active, predicted and computed neurons of every layer.
    pub audit: Vec<LayerAudit>,
}

/// A placement with its summary and the cost model's estimate.
#[derive(Debug, Clone)]
pub struct PlacedPoint {
    /// The plan.
    pub plan: Plan,
    /// Parts on the GPU.
    pub placement: PlacementSummary,
    /// Estimate for the machine that it is for.
    pub planned: PlannedSpeed,
}
