//! Attention kernels as methods of an instruction set.

use std::ops::Range;

use crate::Isa;
use crate::cpu::{Exp2MinusMax, Prefetch, PrefetchNextPosition, Scores, WeightedValues};
use powerinfer_tensor::BLOCK;
use powerinfer_tensor::{CacheLayout, CachePlane};

/// A tile is 32 positions of a [`CachePlane`]. Queries are computed independently, so that they may be batched in any way.
/// Results have the same bits on every instruction set.
impl Isa {
    /// Prefetches the cache lines that the next position of `plane` is written to: stores wait for them one by one.
    pub fn prefetch_next_position(&self, plane: &CachePlane) {
        self.run(PrefetchNextPosition { plane });
    }

    /// Prefetches the cache lines of `bytes`.
    pub fn prefetch(&self, bytes: &[u8]) {
        self.run(Prefetch { bytes });
    }

    /// Attention scores: `out[q, p] = queries[q] · keys[head, p]` for the positions of `tiles`; each key is read once.
    ///
    /// `queries` is `[queries, width]`, `out` is `[queries, 32 · tiles]`. Scores of positions past the end are 0.
    ///
    /// # Panics
    ///
    /// A shape does not match, or `keys` is a plane of values.
    pub fn scores(
        &self,
        keys: &CachePlane,
        head: usize,
        tiles: Range<usize>,
        queries: &[f32],
        out: &mut [f32],
    ) {
        assert_eq!(keys.layout(), CacheLayout::Keys, "a plane of keys");
        check(keys, head, &tiles, queries, out);
        if !out.is_empty() {
            self.run(Scores {
                keys,
                head,
                tiles,
                queries,
                out,
            });
        }
    }

    /// The exponentials of a softmax: replaces the scores of `valid` by `2^(score - largest)`, all others by 0; returns the
    /// largest score and the sum of the exponentials.
    ///
    /// # Panics
    ///
    /// The length of `scores` is not a multiple of 32, or `valid` is empty or exceeds it.
    pub fn exp2_minus_max(&self, scores: &mut [f32], valid: Range<usize>) -> (f32, f32) {
        assert_eq!(scores.len() % BLOCK, 0, "whole blocks");
        assert!(
            valid.start < valid.end && valid.end <= scores.len(),
            "{valid:?} of {} scores",
            scores.len()
        );
        self.run(Exp2MinusMax { scores, valid })
    }

    /// `out[q] += Σ_p weights[q, p] · values[head, p]` for the positions of `tiles`, in order; each value is read once.
    ///
    /// `weights` is `[queries, 32 · tiles]`, `out` is `[queries, width]`.
    ///
    /// # Panics
    ///
    /// A shape does not match, or `values` is a plane of keys.
    pub fn weighted_values(
        &self,
        values: &CachePlane,
        head: usize,
        tiles: Range<usize>,
        weights: &[f32],
        out: &mut [f32],
    ) {
        assert_eq!(values.layout(), CacheLayout::Values, "a plane of values");
        check(values, head, &tiles, out, weights);
        if !weights.is_empty() {
            self.run(WeightedValues {
                values,
                head,
                tiles,
                weights,
                out,
            });
        }
    }
}

fn check(plane: &CachePlane, head: usize, tiles: &Range<usize>, heads: &[f32], scores: &[f32]) {
    assert!(head < plane.heads(), "head {head} of {}", plane.heads());
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
        "one score per query and position"
    );
}
