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
        let wanted = match self.masks {
            Some(masks) => masks.count(group.clone()),
            None => slots.len(),
        };
        let gemm = self.gemm_pays(gate, wanted, slots.len());
        if gemm {
            self.gemm(gate, group, products);
        }
        let mut read = 0;
        ThreadBuffer(&ROWS).empty(|rows| {
            for (token, slots) in slots.chunks_exact_mut(width).enumerate() {
                rows.clear();
                match self.masks {
                    Some(masks) => masks.list(token, group.clone(), rows),
                    None => rows.extend(group.start as u32..group.end as u32),
                }
                let products = products.as_slice();
                let known = self.known(
                    gate,
                    gemm.then_some(products),
                    self.gate_products,
                    group,
                    token,
                );
                let x = self.x.vector(token);
                passed[token] = self.ffn.gate_stage(self.isa, x, rows, known, slots);
                read |= bits(group, rows.iter().copied());
            }
        });
        if gemm { every(width) } else { read }
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
        let wanted = tokens().map(|(_, passed)| passed).sum();
        let up = self.ffn.up.as_ref();
        let gemm = up.filter(|up| self.gemm_pays(up, wanted, slots.len()));
        if let Some(up) = gemm {
            self.gemm(up, group, products);
        }
        let products = gemm.map(|_| products.as_slice());
        for (token, slots) in slots.chunks_exact_mut(width).enumerate() {
            let known = up.and_then(|up| self.known(up, products, self.up_products, group, token));
            let x = self.x.vector(token);
            let router = self.ffn.router.as_ref();
            let weights = router.map(|router| router.weights(self.routes, token));
            self.ffn
                .up_stage(self.isa, x, known, weights, passed[token], slots);
        }
        if gemm.is_some() { every(width) } else { read }
    }

    /// Whether a GEMM over all rows of a group takes less time than GEMVs over the `wanted` ones of `all`.
    fn gemm_pays(&self, linear: &Linear<'_>, wanted: usize, all: usize) -> bool {
        linear.layout == Layout::ByOutput
            && wanted as f64 >= self.x.relative_gemm_cost(&linear.matrix) * all as f64
    }

    /// Sets `products [tokens, group]` to those of all rows of `group`.
    fn gemm(&self, linear: &Linear<'_>, group: &Range<usize>, products: &mut Vec<f32>) {
        products.resize(self.x.tokens() * group.len(), 0.0);
        let matrix = linear.matrix.rows_range(group.clone());
        self.x.gemm(self.isa, &matrix, products);
    }

    /// Products of `token` that are known: those of the group's GEMM, or of a matrix stored by input.
    fn known<'a>(
        &self,
        linear: &Linear<'_>,
        of_group: Option<&'a [f32]>,
        of_all: &'a [f32],
        group: &Range<usize>,
        token: usize,
    ) -> Option<Known<'a>> {
        match of_group {
            Some(products) => Some(Known {
                first: group.start,
                products: &products[token * group.len()..][..group.len()],
            }),
            None => {
                let products = of_all.get(token * linear.outputs()..)?;
                known(linear, products)
            }
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
