//! The program's linear relaxation, solved by hand: sort the blocks by what a unit of memory earns,
//! fill until one does not fit. The value of memory at that point bounds every plan, and tells
//! which levels no better plan can use.

use std::ops::RangeInclusive;

use crate::program::{Levels, Program};

/// One step up in one layer's levels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) layer: usize,
    /// The level it leads to.
    pub(crate) level: usize,
    pub(crate) units: u64,
    /// Mass per unit.
    density: f64,
}

/// All blocks, most valuable unit first; within a layer always in the order of levels.
pub(crate) fn blocks_by_density(program: &Program) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (layer, Levels(levels)) in program.layers.iter().enumerate() {
        let mut before = f64::INFINITY;
        for (index, step) in levels.windows(2).enumerate() {
            let units = step[1].units - step[0].units;
            let density = (step[1].mass - step[0].mass) / units as f64;
            // Mass is concave, so this only undoes rounding, which must not disorder a layer.
            before = density.clamp(0.0, before);
            blocks.push(Block {
                layer,
                level: index + 1,
                units,
                density: before,
            });
        }
    }
    // Stable, so equal blocks stay in the order of layers and levels.
    blocks.sort_by(|a, b| b.density.total_cmp(&a.density));
    blocks
}

/// What the relaxation knows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Relaxation {
    /// No choice within the capacity has more mass.
    pub(crate) bound: f64,
    /// What one more unit of capacity would earn.
    multiplier: f64,
}

impl Relaxation {
    /// Solves the relaxation over `blocks`, the program's own.
    pub(crate) fn solve(program: &Program, blocks: &[Block]) -> Self {
        let mut left = program.capacity;
        let mut multiplier = 0.0;
        for block in blocks {
            match left.checked_sub(block.units) {
                Some(rest) => left = rest,
                None => {
                    multiplier = block.density;
                    break;
                }
            }
        }
        // Lagrange: charge the multiplier for every unit and let each layer choose freely.
        let profits = program
            .layers
            .iter()
            .map(|layer| most_profit(layer, multiplier));
        Self {
            bound: profits.sum::<f64>() + multiplier * program.capacity as f64,
            multiplier,
        }
    }

    /// The levels of a layer that a choice better than `bound − slack` can use.
    ///
    /// A level forgoes what the layer's best level would earn beyond it; a choice that forgoes
    /// more than the slack, in all layers together, is worth less than that.
    pub(crate) fn open_levels(&self, levels: &Levels, slack: f64) -> OpenLevels {
        let best = most_profit(levels, self.multiplier);
        let open = |level: usize| best - profit(levels, level, self.multiplier) < slack;
        // Profit is concave, so the open levels above 0 are a range.
        let mut hot = (1..levels.0.len()).filter(|&level| open(level));
        OpenLevels {
            none: open(0),
            hot: hot
                .next()
                .map(|first| first..=hot.next_back().unwrap_or(first)),
        }
    }
}

/// Which levels of a layer are still possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenLevels {
    /// Whether no neuron may be hot.
    pub(crate) none: bool,
    /// Which levels above 0 are possible.
    pub(crate) hot: Option<RangeInclusive<usize>>,
}

impl OpenLevels {
    /// Opens `level` too, and those between it and the levels that are open.
    pub(crate) fn open(&mut self, level: usize) {
        if level == 0 {
            self.none = true;
            return;
        }
        self.hot = Some(match &self.hot {
            None => level..=level,
            Some(hot) => level.min(*hot.start())..=level.max(*hot.end()),
        });
    }
}

fn profit(Levels(levels): &Levels, level: usize, multiplier: f64) -> f64 {
    levels[level].mass - multiplier * levels[level].units as f64
}

fn most_profit(levels: &Levels, multiplier: f64) -> f64 {
    (0..levels.0.len())
        .map(|level| profit(levels, level, multiplier))
        .fold(0.0, f64::max)
}
