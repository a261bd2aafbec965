//! Quantisation of vectors to int8.

use super::{Operation, SPAN_COLUMNS, Simd, padded};
use crate::QuantisedActivations;
use crate::activations::ActivationSpan;
use powerinfer_tensor::BLOCK;

/// `out` = the vectors of `columns` elements in `x`, quantised to int8.
pub(crate) struct Quantise<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) out: &'a mut QuantisedActivations,
}

impl Quantise<'_> {
    /// The same code for every instruction set; the compiler vectorises it.
    #[inline(always)]
    fn quantise(self) {
        let Self { x, columns, out } = self;
        // Without columns the number of vectors is undefined; it counts as one.
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

    fn run_scalar(self) {
        self.quantise();
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, _simd: S) {
        self.quantise();
    }
}
