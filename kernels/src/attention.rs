//! Attention's kernels as methods of an instruction set.

use std::ops::Range;

use crate::Isa;
use crate::cpu::{Powers, Scores, WeightedValues};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{CacheLayout, CachePlane};

/// A tile is 32 positions of a [`CachePlane`]. Queries are computed independently, so they may be
/// taken together in any way; results have the same bits on every instruction set.
impl Isa {
    /// `out[q, p] = queries[q] · keys[p]` for the positions of `tiles`; each key is read once.
    ///
    /// `queries` is `[queries, width]`, `out` is `[queries, 32 · tiles]`. Scores of positions that are
    /// not there are 0.
    pub fn scores(&self, keys: &CachePlane, tiles: Range<usize>, queries: &[f32], out: &mut [f32]) {
        assert_eq!(keys.layout(), CacheLayout::Keys, "a plane of keys");
        check(keys, &tiles, queries, out);
        if !out.is_empty() {
            self.run(Scores {
                keys,
                tiles,
                queries,
                out,
            });
        }
    }

    /// Replaces the scores of `valid` by `2^(score - largest)` and all others by 0; returns the
    /// largest and the sum.
    ///
    /// `scores` are whole blocks of 32, `valid` is not empty.
    pub fn exp2_minus_max(&self, scores: &mut [f32], valid: Range<usize>) -> (f32, f32) {
        assert_eq!(scores.len() % BLOCK, 0, "whole blocks");
        assert!(
            valid.start < valid.end && valid.end <= scores.len(),
            "{valid:?} of {} scores",
            scores.len()
        );
        self.run(Powers { scores, valid })
    }

    /// `out[q] += Σ_p weights[q, p] · values[p]` for the positions of `tiles`, in order; each value is
    /// read once.
    ///
    /// `weights` is `[queries, 32 · tiles]`, `out` is `[queries, width]`.
    pub fn weighted_values(
        &self,
        values: &CachePlane,
        tiles: Range<usize>,
        weights: &[f32],
        out: &mut [f32],
    ) {
        assert_eq!(values.layout(), CacheLayout::Values, "a plane of values");
        check(values, &tiles, out, weights);
        if !weights.is_empty() {
            self.run(WeightedValues {
                values,
                tiles,
                weights,
                out,
            });
        }
    }
}

fn check(plane: &CachePlane, tiles: &Range<usize>, heads: &[f32], scores: &[f32]) {
    assert!(
        tiles.start <= tiles.end && tiles.end <= plane.tiles(),
        "tiles {tiles:?} of {}",
        plane.tiles()
    );
    let count = heads.len() / plane.width().max(1);
    assert_eq!(heads.len(), count * plane.width(), "whole heads");
    assert_eq!(
        scores.len(),
        count * tiles.len() * BLOCK,
        "a score for each query and position"
    );
}
