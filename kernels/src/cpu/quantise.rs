//! Rounding vectors to bytes.

use super::{Operation, SPAN_COLUMNS, Simd, padded};
use crate::QuantisedActivations;
use crate::activations::ActivationSpan;
use powerinfer_tensor::BLOCK;

/// `out` = the vectors of `columns` numbers that `x` holds, rounded.
pub(crate) struct Quantise<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) out: &'a mut QuantisedActivations,
}

impl Quantise<'_> {
    /// The same code for all: what differs is how the compiler vectorises it.
    #[inline(always)]
    fn round(self) {
        let Self { x, columns, out } = self;
        // Without columns there is nothing that could say how many vectors there are.
        (out.tokens, out.columns) = (x.len().checked_div(columns).unwrap_or(1), columns);
        let spans = columns.div_ceil(SPAN_COLUMNS);
        out.spans.clear();
        out.spans.resize(out.tokens * spans, ActivationSpan::ZERO);
        let tokens = x.chunks_exact(columns.max(1));
        for (x, spans) in tokens.zip(out.spans.chunks_exact_mut(spans.max(1))) {
            for (x, span) in x.chunks(SPAN_COLUMNS).zip(spans) {
                let (blocks, rest) = x.as_chunks::<BLOCK>();
                for (block, values) in blocks.iter().enumerate() {
                    span.set(block, values);
                }
                if !rest.is_empty() {
                    span.set(blocks.len(), &padded(rest));
                }
            }
        }
    }
}

impl Operation for Quantise<'_> {
    type Output = ();

    fn specify(self) {
        self.round();
    }

    #[inline(always)]
    fn translate<S: Simd>(self, _simd: S) {
        self.round();
    }
}
