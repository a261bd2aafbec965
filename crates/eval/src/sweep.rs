//! Sweeps: quality and speed of a bundle over a grid of policy settings, placements, batch sizes and contexts.

pub mod csv;
mod document;
mod file;
mod grid;
mod measure;
mod quality;
mod rows;
mod setting;
mod speed;

pub use document::{comparisons, document};
pub use file::SweepFile;
pub use grid::{Grid, PlacementTarget, Point};
pub use measure::{AuditedPolicy, PlacedPoint, Sweep, SweepOptions, SweepPlanner};
pub use quality::SweepItems;
pub use rows::{
    Axes, FunctionResults, Identity, Latency, LayerSparsity, MeasuredSpeed, PlacementSummary,
    PlannedSpeed, PredictorQuality, Quality, Range, Sparsity, Speed, SweepRow,
};
pub use setting::{PolicySetting, parse_share};
pub use speed::BatchShape;
