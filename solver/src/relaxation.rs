//! The program's linear relaxation, solved by hand: sort the blocks by what a byte of memory earns,
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
    pub(crate) bytes: u64,
    /// Mass per unit.
    density: f64,
}

/// All blocks, most valuable unit first; within a layer always in the order of levels.
pub(crate) fn blocks_by_density(program: &Program) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (layer, Levels(levels)) in program.layers.iter().enumerate() {
        let mut before = f64::INFINITY;
        for (index, step) in levels.windows(2).enumerate() {
            let bytes = step[1].bytes - step[0].bytes;
            let density = (step[1].mass - step[0].mass) / bytes as f64;
            // Mass is concave, so this only undoes rounding, which must not disorder a layer.
            before = density.clamp(0.0, before);
            blocks.push(Block {
                layer,
                level: index + 1,
                bytes,
                density: before,
            });
        }
    }
    // Stable, so equal blocks stay in the order of layers and levels.
    blocks.sort_by(|a, b| b.density.total_cmp(&a.density));
    blocks
}

/// Differences below this share of the bound are rounding.
pub(crate) const ROUNDING: f64 = 1e-9;

/// What the relaxation knows, given a choice to beat.
#[derive(Debug, Clone)]
pub(crate) struct Relaxation {
    /// No choice within the capacity has more mass.
    pub(crate) bound: f64,
    /// The levels that a better choice can use, with those of the choice to beat.
    pub(crate) open: Vec<OpenLevels>,
    /// The part of the capacity that these can fill: the rest is less than any step, or a
    /// remainder that no sum of steps meets.
    pub(crate) capacity: u64,
    /// All open choices differ by multiples of this.
    pub(crate) step: u64,
}

impl Relaxation {
    /// Solves the relaxation over `blocks`, the program's own, for choices better than `start`.
    pub(crate) fn solve(program: &Program, blocks: &[Block], start: &[usize]) -> Self {
        let start_mass = program.mass(start);
        let mut capacity = program.capacity;
        loop {
            let multiplier = multiplier(blocks, capacity);
            // Lagrange: charge the multiplier for every byte and let each layer choose freely.
            let most = |levels: &Levels| most_profit(levels, multiplier);
            let profits: f64 = program.layers.iter().map(most).sum();
            let bound = profits + multiplier * capacity as f64;
            // A level forgoes what its layer's best level would earn beyond it. A choice that
            // forgoes more than the slack, in all layers together, does not beat the start.
            let slack = bound - start_mass - ROUNDING * bound;
            let open: Vec<OpenLevels> = program
                .layers
                .iter()
                .zip(start)
                .map(|(levels, &level)| OpenLevels::within(slack, levels, multiplier, level))
                .collect();
            // Fewer open levels mean a coarser grid of sizes, so less capacity that counts, so a
            // lower bound, and so on.
            let (least, step) = grid(program, &open);
            let usable = least + (capacity - least) / step * step;
            if usable == capacity {
                return Self {
                    // Rounding must not let the bound fall below a choice that exists.
                    bound: bound.max(start_mass),
                    open,
                    capacity,
                    step,
                };
            }
            capacity = usable;
        }
    }
}

/// What one more byte of capacity would earn: the density of the first block that does not fit.
fn multiplier(blocks: &[Block], capacity: u64) -> f64 {
    let mut left = capacity;
    for block in blocks {
        match left.checked_sub(block.bytes) {
            Some(rest) => left = rest,
            None => return block.density,
        }
    }
    0.0
}

/// The sizes of open choices: the least, and a step of which all others are multiples away.
fn grid(program: &Program, open: &[OpenLevels]) -> (u64, u64) {
    let (mut least, mut step) = (0, 0);
    for (Levels(levels), open) in program.layers.iter().zip(open) {
        let mut sizes = open.levels().map(|level| levels[level].bytes);
        let first = sizes.next().expect("the start's level is open");
        least += first;
        for size in sizes {
            step = greatest_common_divisor(step, size - first);
        }
    }
    (least, step.max(1))
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
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
    /// The levels whose profit is less than `slack` below the layer's best, and `start`.
    fn within(slack: f64, levels: &Levels, multiplier: f64, start: usize) -> Self {
        let best = most_profit(levels, multiplier);
        let is_open = |level: usize| best - profit(levels, level, multiplier) < slack;
        // Profit is concave, so the open levels above 0 are a range.
        let mut hot = (1..levels.0.len()).filter(|&level| is_open(level));
        let mut open = Self {
            none: is_open(0),
            hot: hot
                .next()
                .map(|first| first..=hot.next_back().unwrap_or(first)),
        };
        open.open(start);
        open
    }

    /// All open levels, coldest first.
    fn levels(&self) -> impl Iterator<Item = usize> {
        let none = self.none.then_some(0);
        none.into_iter()
            .chain(self.hot.clone().into_iter().flatten())
    }

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
    levels[level].mass - multiplier * levels[level].bytes as f64
}

fn most_profit(levels: &Levels, multiplier: f64) -> f64 {
    (0..levels.0.len())
        .map(|level| profit(levels, level, multiplier))
        .fold(0.0, f64::max)
}
