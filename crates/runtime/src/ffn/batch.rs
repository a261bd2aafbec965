//! Gate and up for several tokens: groups of neurons whose rows are read once for all of them.

use std::{cell::Cell, ops::Range};

use powerinfer_bundle::Layout;
use powerinfer_kernels::Isa;

use super::{Ffn, Known, NeuronValue, ROWS, RowsRead, known};
use crate::{
    input::Input, linear::Linear, masks::Masks, memory::PREFILL_BATCH, router::Routes,
    scratch::ThreadBuffer,
};

thread_local! {
    /// Products of a group for all tokens.
    static GROUP_PRODUCTS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Gate and up for several tokens.
pub(super) struct Batch<'a> {
    pub(super) ffn: &'a Ffn<'a>,
    pub(super) isa: Isa,
    pub(super) x: &'a Input<'a>,
    /// Masks of the predicted neurons, or of those of the selected experts; `None` if there is neither a predictor nor a router.
    pub(super) masks: Option<&'a Masks>,
    /// Routing weights, in a mixture of experts.
    pub(super) routes: &'a Routes,
    /// Products of all neurons, if matrices are stored by input.
    pub(super) gate_products: &'a [f32],
    pub(super) up_products: &'a [f32],
}

impl Batch<'_> {
    /// Computes gate and up of the neurons `group` for all tokens; `slots` are `[tokens, group]`.
    pub(super) fn gate_up(&self, group: Range<usize>, slots: &mut [NeuronValue], read: &RowsRead) {
        ThreadBuffer(&GROUP_PRODUCTS).empty(|products| {
            let mut passed = [0; PREFILL_BATCH];
            let gates = self.gate(&group, slots, products, &mut passed);
            let ups = self.up(&group, slots, products, &passed);
            read.add(gates.count_ones() as usize, ups.count_ones() as usize);
        });
    }

    /// Runs the gate stage of all tokens and sets `passed`, one count a token; returns a bit for each neuron whose row
    /// was read.
    fn gate(
        &self,
        group: &Range<usize>,
        slots: &mut [NeuronValue],
        products: &mut Vec<f32>,
        passed: &mut [usize],
    ) -> u64 {
        let (gate, width) = (&self.ffn.gate, group.len());
        let wanted = |token: usize| match self.masks {
            Some(masks) => masks.count_of(token, group.clone()),
            None => width,
        };
        let gemm = self.gemm(gate, group, wanted, products);
        let mut read = 0;
        ThreadBuffer(&ROWS).empty(|rows| {
            for (token, slots) in slots.chunks_exact_mut(width).enumerate() {
                rows.clear();
                match self.masks {
                    Some(masks) => masks.list(token, group.clone(), rows),
                    None => rows.extend(group.start as u32..group.end as u32),
                }
                let products = products.as_slice();
                let of_group = gemm.as_ref().map(|gemm| (gemm, products));
                let known = self.known(gate, of_group, self.gate_products, group, token);
                let x = self.x.vector(token);
                passed[token] = self.ffn.gate_stage(self.isa, x, rows, known, slots);
                read |= bits(group, rows.iter().copied());
            }
        });
        if gemm.is_some() { every(width) } else { read }
    }

    /// Runs the up stage of all tokens for the neurons that passed the gate; returns a bit for each neuron whose row
    /// was read.
    fn up(
        &self,
        group: &Range<usize>,
        slots: &mut [NeuronValue],
        products: &mut Vec<f32>,
        passed: &[usize],
    ) -> u64 {
        let width = group.len();
        let tokens = || slots.chunks_exact(width).zip(passed);
        let read = tokens().fold(0, |read, (slots, passed)| {
            read | bits(group, slots[..*passed].iter().map(|slot| slot.0))
        });
        let up = self.ffn.up.as_ref();
        let gemm = up.and_then(|up| self.gemm(up, group, |token| passed[token], products));
        let of_group = gemm.as_ref().map(|gemm| (gemm, products.as_slice()));
        for (token, slots) in slots.chunks_exact_mut(width).enumerate() {
            let known = up.and_then(|up| self.known(up, of_group, self.up_products, group, token));
            let x = self.x.vector(token);
            let router = self.ffn.router.as_ref();
            let weights = router.map(|router| router.weights(self.routes, token));
            self.ffn
                .up_stage(self.isa, x, known, weights, passed[token], slots);
        }
        if gemm.is_some() { every(width) } else { read }
    }

    /// Multiplies all rows of `group` with the tokens that need at least one of them, if that is faster than multiplying only the `wanted`
    /// rows of each token. Sets `products` to the results and returns these tokens; otherwise returns `None`.
    fn gemm(
        &self,
        linear: &Linear<'_>,
        group: &Range<usize>,
        wanted: impl Fn(usize) -> usize,
        products: &mut Vec<f32>,
    ) -> Option<GroupTokens> {
        if linear.layout != Layout::ByOutput {
            return None;
        }
        let mut tokens = GroupTokens::default();
        let (mut alone, chooses) = (0, self.x.can_choose(&linear.matrix));
        for token in 0..self.x.tokens() {
            let rows = wanted(token);
            alone += rows;
            if rows > 0 || !chooses {
                tokens.places[token] = tokens.count as u32;
                tokens.listed[tokens.count] = token as u32;
                tokens.count += 1;
            }
        }
        let all = (tokens.count * group.len()) as f64;
        let cost = self.x.relative_gemm_cost(&linear.matrix, tokens.count);
        if tokens.count < LEAST_TOKENS || (alone as f64) < cost * all {
            return None;
        }
        products.resize(tokens.count * group.len(), 0.0);
        let matrix = linear.matrix.rows_range(group.clone());
        let listed = &tokens.listed[..tokens.count];
        self.x.gemm_of(self.isa, &matrix, listed, products);
        Some(tokens)
    }

    /// Products of `token` that are known: those of the group's GEMM, or of a matrix stored by input.
    fn known<'a>(
        &self,
        linear: &Linear<'_>,
        of_group: Option<(&GroupTokens, &'a [f32])>,
        of_all: &'a [f32],
        group: &Range<usize>,
        token: usize,
    ) -> Option<Known<'a>> {
        match of_group {
            Some((tokens, products)) => {
                let place = tokens.places[token] as usize * group.len();
                Some(Known {
                    first: group.start,
                    products: &products[place..][..group.len()],
                })
            }
            None => {
                let products = of_all.get(token * linear.outputs()..)?;
                known(linear, products)
            }
        }
    }
}

/// Minimum number of tokens of a GEMM.
const LEAST_TOKENS: usize = 2;

/// The tokens of a pass whose products with a group of neurons are computed together.
struct GroupTokens {
    count: usize,
    listed: [u32; PREFILL_BATCH],
    /// Index in `listed` of each listed token; 0 for others, for which no row is wanted.
    places: [u32; PREFILL_BATCH],
}

impl Default for GroupTokens {
    fn default() -> Self {
        Self {
            count: 0,
            listed: [0; PREFILL_BATCH],
            places: [0; PREFILL_BATCH],
        }
    }
}

/// A bit for each of `rows` of the group.
fn bits(group: &Range<usize>, rows: impl Iterator<Item = u32>) -> u64 {
    rows.fold(0, |bits, row| bits | 1 << (row as usize - group.start))
}

/// A bit for each neuron of a group.
fn every(width: usize) -> u64 {
    1u64.checked_shl(width as u32)
        .map_or(u64::MAX, |bit| bit - 1)
}
