//! The grid of a sweep: its axes and its points.

use super::{Axes, BatchShape, PolicySetting};
use crate::EvalError;

/// Placement axis: what is on the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PlacementTarget {
    /// The best placement within a budget of bytes.
    Within(u64),
    /// Attention, the head, and every neuron with at least this activation frequency, whatever memory that takes.
    HotFrom(f64),
}

/// Axes of the grid.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Policy settings.
    pub settings: Vec<PolicySetting>,
    /// Batches of sequences and their tokens.
    pub shapes: Vec<BatchShape>,
    /// Placements.
    pub targets: Vec<PlacementTarget>,
}

/// A point of the grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Policy setting.
    pub setting: PolicySetting,
    /// Sequences and their tokens.
    pub shape: BatchShape,
    /// Placement.
    pub target: PlacementTarget,
}

impl Point {
    /// Coordinates as rows keep them.
    pub fn axes(self) -> Axes {
        let (vram_bytes, hot_threshold) = match self.target {
            PlacementTarget::Within(bytes) => (Some(bytes), None),
            PlacementTarget::HotFrom(share) => (None, Some(share)),
        };
        let parameter = self.setting.parameter();
        Axes {
            vram_bytes,
            hot_threshold,
            setting: self.setting.to_string(),
            policy: self.setting.policy().to_string(),
            parameter: parameter.map(|(name, _)| name.to_owned()),
            parameter_value: parameter.map(|(_, value)| value),
            batch: self.shape.batch,
            context_tokens: self.shape.context(),
        }
    }
}

impl Grid {
    /// Batches of all `batches` and `contexts`, with `decode_tokens` of each context decoded.
    ///
    /// # Errors
    ///
    /// Fails if a context is beyond `limit` tokens or leaves none for the prompt.
    pub fn shapes(
        batches: &[usize],
        contexts: &[usize],
        decode_tokens: usize,
        limit: usize,
    ) -> Result<Vec<BatchShape>, EvalError> {
        for context in contexts {
            if *context <= decode_tokens || *context > limit {
                return Err(EvalError::ContextOutOfRange {
                    context: *context,
                    least: decode_tokens + 1,
                    most: limit,
                });
            }
        }
        let shape = |batch: usize, context: usize| BatchShape {
            batch,
            prompt_tokens: context - decode_tokens,
            decode_tokens,
        };
        let of_batch = |batch: &usize| {
            let batch = *batch;
            contexts.iter().map(move |context| shape(batch, *context))
        };
        Ok(batches.iter().flat_map(of_batch).collect())
    }

    /// All points, those of a policy setting together.
    ///
    /// # Errors
    ///
    /// Fails if two points are equal.
    pub fn points(&self) -> Result<Vec<Point>, EvalError> {
        let mut points: Vec<Point> = Vec::new();
        for setting in &self.settings {
            for shape in &self.shapes {
                points.extend(self.targets.iter().map(|target| Point {
                    setting: *setting,
                    shape: *shape,
                    target: *target,
                }));
            }
        }
        for (place, point) in points.iter().enumerate() {
            let axes = point.axes();
            if points[..place].iter().any(|other| other.axes() == axes) {
                return Err(EvalError::EqualPoints {
                    setting: axes.setting,
                    batch: axes.batch,
                    context: axes.context_tokens,
                });
            }
        }
        Ok(points)
    }
}
