//! Gate and up for several tokens: groups of neurons whose rows are read once for all of them.

use std::{cell::Cell, ops::Range};

use powerinfer_bundle::Layout;
use powerinfer_kernels::Isa;

use super::{Ffn, Known, NONE, NeuronValue, ROWS, RowsRead, known};
use crate::{
    input::Input, linear::Linear, masks::Masks, memory::MOST_PROMPT_TOKENS, router::Routes,
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
            let mut tokens = GroupTokens::default();
            for (token, slots) in slots.chunks_exact_mut(group.len()).enumerate() {
                let wanted = match self.masks {
                    Some(masks) => masks.count_of(token, group.clone()),
                    None => group.len(),
                };
                tokens.push(token, wanted);
                slots[0] = NONE;
            }
            let gates = self.gate(&group, slots, products, &mut tokens);
            let ups = self.up(&group, slots, products, &mut tokens);
            read.add(gates.count_ones() as usize, ups.count_ones() as usize);
        });
    }

    /// Runs the gate stage for `tokens` and replaces the number of neurons that each needs with the number that passed. Returns a bit for
    /// each neuron whose row was read.
    fn gate(
        &self,
        group: &Range<usize>,
        slots: &mut [NeuronValue],
        products: &mut Vec<f32>,
        tokens: &mut GroupTokens,
    ) -> u64 {
        let (gate, width) = (&self.ffn.gate, group.len());
        let all = self.gemm(gate, group, tokens, products);
        let mut read = 0;
        ThreadBuffer(&ROWS).empty(|rows| {
            for (place, (token, passed)) in tokens.iter_mut().enumerate() {
                rows.clear();
                match self.masks {
                    Some(masks) => masks.list(token, group.clone(), rows),
                    None => rows.extend(group.start as u32..group.end as u32),
                }
                let of_group = all.place(place, token).map(|place| (place, &**products));
                let known = self.known(gate, of_group, self.gate_products, group, token);
                let (x, slots) = (self.x.vector(token), &mut slots[token * width..][..width]);
                *passed = self.ffn.gate_stage(self.isa, x, rows, known, slots) as u32;
                read |= bits(group, rows.iter().copied());
            }
        });
        if all == Multiplied::None {
            read
        } else {
            every(width)
        }
    }

    /// Runs the up stage for the neurons of `tokens` that passed the gate. Returns a bit for each neuron whose row was read.
    fn up(
        &self,
        group: &Range<usize>,
        slots: &mut [NeuronValue],
        products: &mut Vec<f32>,
        tokens: &mut GroupTokens,
    ) -> u64 {
        let width = group.len();
        tokens.drop_without_neurons();
        let read = tokens.iter_mut().fold(0, |read, (token, passed)| {
            let passed = &slots[token * width..][..*passed as usize];
            read | bits(group, passed.iter().map(|slot| slot.0))
        });
        let up = self.ffn.up.as_ref();
        let all = up.map_or(Multiplied::None, |up| {
            self.gemm(up, group, tokens, products)
        });
        for (place, (token, passed)) in tokens.iter_mut().enumerate() {
            let of_group = all.place(place, token).map(|place| (place, &**products));
            let known = up.and_then(|up| self.known(up, of_group, self.up_products, group, token));
            let (x, slots) = (self.x.vector(token), &mut slots[token * width..][..width]);
            let router = self.ffn.router.as_ref();
            let weights = router.map(|router| router.weights(self.routes, token));
            self.ffn
                .up_stage(self.isa, x, known, weights, *passed as usize, slots);
        }
        if all == Multiplied::None {
            read
        } else {
            every(width)
        }
    }

    /// Multiplies all rows of `group` with `tokens`, or with all tokens of the pass, if that is faster than multiplying only the rows that
    /// each token needs. Sets `products` to the results and returns the tokens that were multiplied.
    fn gemm(
        &self,
        linear: &Linear<'_>,
        group: &Range<usize>,
        tokens: &GroupTokens,
        products: &mut Vec<f32>,
    ) -> Multiplied {
        if linear.layout != Layout::ByOutput {
            return Multiplied::None;
        }
        let chooses = self.x.can_choose(&linear.matrix);
        let count = if chooses {
            tokens.count
        } else {
            self.x.tokens()
        };
        let all = (count * group.len()) as f64;
        let cost = self.x.relative_gemm_cost(&linear.matrix, count);
        if count < LEAST_TOKENS || (tokens.wanted() as f64) < cost * all {
            return Multiplied::None;
        }
        products.clear();
        products.reserve_exact(count * group.len());
        products.resize(count * group.len(), 0.0);
        let matrix = linear.matrix.rows_range(group.clone());
        if chooses {
            let listed = &tokens.listed[..tokens.count];
            self.x.gemm_of(self.isa, &matrix, listed, products);
            Multiplied::Listed
        } else {
            self.x.gemm(self.isa, &matrix, products);
            Multiplied::All
        }
    }

    /// Known products of `token`: from the group's GEMM, at the given place, or from a matrix stored by input.
    fn known<'a>(
        &self,
        linear: &Linear<'_>,
        of_group: Option<(usize, &'a [f32])>,
        of_all: &'a [f32],
        group: &Range<usize>,
        token: usize,
    ) -> Option<Known<'a>> {
        match of_group {
            Some((place, products)) => Some(Known {
                first: group.start,
                products: &products[place * group.len()..][..group.len()],
            }),
            None => {
                let products = of_all.get(token * linear.outputs()..)?;
                known(linear, products)
            }
        }
    }
}

/// Minimum number of tokens of a GEMM.
const LEAST_TOKENS: usize = 2;

/// The tokens with which the rows of a group have been multiplied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Multiplied {
    None,
    /// The tokens of a [`GroupTokens`].
    Listed,
    /// All tokens of the pass.
    All,
}

impl Multiplied {
    /// Place of a token's products, if they were computed; `place` is the token's place in the [`GroupTokens`].
    fn place(self, place: usize, token: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::Listed => Some(place),
            Self::All => Some(token),
        }
    }
}

/// The tokens that need neurons of a group.
struct GroupTokens {
    count: usize,
    listed: [u32; MOST_PROMPT_TOKENS],
    /// Number of neurons that each listed token needs.
    neurons: [u32; MOST_PROMPT_TOKENS],
}

impl Default for GroupTokens {
    fn default() -> Self {
        Self {
            count: 0,
            listed: [0; MOST_PROMPT_TOKENS],
            neurons: [0; MOST_PROMPT_TOKENS],
        }
    }
}

impl GroupTokens {
    /// Appends `token` if it needs any of the `neurons`.
    fn push(&mut self, token: usize, neurons: usize) {
        if neurons > 0 {
            self.listed[self.count] = token as u32;
            self.neurons[self.count] = neurons as u32;
            self.count += 1;
        }
    }

    /// Drops the tokens whose number of neurons is 0.
    fn drop_without_neurons(&mut self) {
        let count = std::mem::take(&mut self.count);
        for index in 0..count {
            self.push(self.listed[index] as usize, self.neurons[index] as usize);
        }
    }

    /// The tokens and the number of neurons that each needs.
    fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut u32)> {
        let neurons = self.neurons.iter_mut();
        let tokens = self.listed[..self.count].iter();
        tokens.map(|token| *token as usize).zip(neurons)
    }

    /// Number of neurons that all tokens together need.
    fn wanted(&self) -> usize {
        self.neurons[..self.count]
            .iter()
            .map(|count| *count as usize)
            .sum()
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
