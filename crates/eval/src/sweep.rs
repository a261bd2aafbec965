//! Sweeps: quality and speed of a bundle over a grid of policy settings, placements, batch sizes and contexts.

mod audit;
pub mod csv;
mod document;
mod file;
mod grid;
mod measure;
mod planner;
mod quality;
mod rows;
mod setting;
mod speed;

pub use document::{comparisons, document};
pub use file::SweepFile;
pub use grid::{Grid, PlacementTarget, Point};
pub use measure::{Sweep, SweepOptions};
pub use planner::{AuditedPolicy, PlacedPoint, SweepPlanner};
pub use quality::SweepItems;
pub use rows::{
    Axes, FunctionResults, Identity, Latency, LayerSparsity, MeasuredSpeed, PlacementSummary,
    PlannedSpeed, PredictorQuality, Quality, Range, Sparsity, Speed, SweepRow,
};
pub use setting::{PolicySetting, parse_share};
pub use speed::BatchShape;
