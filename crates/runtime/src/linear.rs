//! A linear projection and its product with some vectors, of which small values may be skipped.
//!
//! ```text
//! by output   out_i = W_i · x         every row is read, whatever x is
//! by input    out   = Σ_j x_j · W_j   a row is read only where |x_j| ≥ threshold
//! ```

use std::{cell::Cell, ops::Range};

use powerinfer_artifact::TensorFile;
use powerinfer_bundle::{Layout, StoredLinear};
use powerinfer_tensor::Matrix;

use crate::{
    Threads,
    input::{Input, InputBuffers, reaches},
    scratch::ThreadBuffer,
    threads::add,
};

thread_local! {
    /// Inputs that count, of a matrix stored by input: their rows and values.
    static ROWS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    static VALUES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A matrix and its bias, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) layout: Layout,
    /// `[outputs]`.
    pub(crate) bias: Option<&'a [f32]>,
}

impl<'a> Linear<'a> {
    /// The projection `stored` of the weights in `file`.
    pub(crate) fn new(stored: &'a StoredLinear, file: &'a TensorFile) -> Self {
        Self {
            matrix: stored.matrix.view(file),
            layout: stored.layout,
            bias: stored.bias.as_deref(),
        }
    }

    /// Input features.
    pub(crate) fn inputs(&self) -> usize {
        match self.layout {
            Layout::ByOutput => self.matrix.columns(),
            Layout::ByInput => self.matrix.rows(),
        }
    }

    /// Output features.
    pub(crate) fn outputs(&self) -> usize {
        match self.layout {
            Layout::ByOutput => self.matrix.rows(),
            Layout::ByInput => self.matrix.columns(),
        }
    }

    /// `x [tokens, inputs]` with 0 for values below `threshold` in magnitude, prepared for products with this matrix
    /// and others of its format.
    pub(crate) fn input<'x>(
        &self,
        threads: &Threads,
        x: &'x [f32],
        threshold: f32,
        buffers: &'x mut InputBuffers,
    ) -> Input<'x> {
        Input::sparse(threads, x, threshold, self.inputs(), &self.matrix, buffers)
    }

    /// Sets `out [tokens, outputs]` to `x · Wᵀ + b` for an input prepared with the same `threshold`, and returns the
    /// bytes read. A token's result does not depend on batching.
    pub(crate) fn product(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        threshold: f32,
        out: &mut Vec<f32>,
    ) -> usize {
        out.resize(x.tokens() * self.outputs(), 0.0);
        self.product_into(threads, x, threshold, out)
    }

    /// Adds [`Self::product`] to `sum [tokens, outputs]`; `buffer` is scratch memory.
    pub(crate) fn add_product(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        threshold: f32,
        buffer: &mut Vec<f32>,
        sum: &mut [f32],
    ) -> usize {
        if x.tokens() == 1 && self.is_by_output() {
            threads.add_gemv(&self.matrix, self.bias, x, sum);
            return self.bytes();
        }
        let read = self.product(threads, x, threshold, buffer);
        add(sum, buffer);
        read
    }

    /// Sets `out [tokens, outputs]` to [`Self::product`].
    fn product_into(
        &self,
        threads: &Threads,
        x: &Input<'_>,
        threshold: f32,
        out: &mut [f32],
    ) -> usize {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let bytes_read = match self.layout {
            Layout::ByOutput => {
                threads.gemm(&self.matrix, x, out);
                self.bytes()
            }
            Layout::ByInput => {
                out.fill(0.0);
                let vectors = x.exact().chunks_exact(inputs);
                let vectors = vectors.zip(out.chunks_exact_mut(outputs));
                let read = vectors.map(|(x, out)| self.axpy(threads, x, threshold, out));
                read.sum::<usize>() + self.bias.map_or(0, size_of_val)
            }
        };
        for out in out.chunks_exact_mut(outputs) {
            self.add_bias(out);
        }
        bytes_read
    }

    /// Sets `out` to [`Self::product`] of each of `linears` with the same `x`, one after the other. Returns the bytes read.
    pub(crate) fn products<const N: usize>(
        linears: &[Self; N],
        threads: &Threads,
        x: &Input<'_>,
        threshold: f32,
        out: &mut Vec<f32>,
    ) -> usize {
        if x.tokens() == 1 && linears.iter().all(Self::is_by_output) {
            let nothing: (&mut [()], usize) = (&mut [], 0);
            return Self::products_then(linears, threads, x, out, |_| (), nothing, |_, _, ()| ());
        }
        let all: usize = linears.iter().map(Self::outputs).sum();
        out.resize(x.tokens() * all, 0.0);
        let mut out = &mut out[..];
        let mut read = 0;
        for linear in linears {
            let (own, rest) = out.split_at_mut(x.tokens() * linear.outputs());
            out = rest;
            read += linear.product_into(threads, x, threshold, own);
        }
        read
    }

    /// Like [`Self::products`] for one vector and matrices stored by output, but the same job then calls `link` with all products, and then
    /// `next_kernel` with ranges of `next` and the result of `link`. `next` includes the number of bytes that `next_kernel` reads in all.
    pub(crate) fn products_then<'o, const N: usize, Link: Send + Sync, U: Send>(
        linears: &[Self; N],
        threads: &Threads,
        x: &Input<'_>,
        out: &'o mut Vec<f32>,
        link: impl FnOnce(&'o mut [f32]) -> Link + Send,
        next: (&mut [U], usize),
        next_kernel: impl Fn(Range<usize>, &mut [U], &Link) + Sync,
    ) -> usize {
        out.resize(linears.iter().map(Self::outputs).sum(), 0.0);
        let matrices = linears.each_ref().map(|linear| &linear.matrix);
        let link = |products: &'o mut [f32]| {
            let mut rest = &mut *products;
            for linear in linears {
                let own;
                (own, rest) = rest.split_at_mut(linear.outputs());
                linear.add_bias(own);
            }
            link(products)
        };
        threads.gemv_each_then(&matrices, x, out, link, next, next_kernel);
        linears.iter().map(Self::bytes).sum()
    }

    /// Whether the matrix is stored by output.
    pub(crate) fn is_by_output(&self) -> bool {
        self.layout == Layout::ByOutput
    }

    /// Bytes of the matrix and of the biases.
    fn bytes(&self) -> usize {
        self.matrix.rows() * self.matrix.row_bytes() + self.bias.map_or(0, size_of_val)
    }

    /// `out += Σ_j x_j · W_j` over the inputs that reach `threshold`, of a matrix stored by input; returns the bytes
    /// read.
    fn axpy(&self, threads: &Threads, x: &[f32], threshold: f32, out: &mut [f32]) -> usize {
        ThreadBuffer(&ROWS).empty(|rows| {
            ThreadBuffer(&VALUES).empty(|values| {
                for (row, x) in (0..).zip(x) {
                    if reaches(*x, threshold) {
                        rows.push(row);
                        values.push(*x);
                    }
                }
                threads.add_rows_of(&self.matrix, rows, values, out);
                rows.len() * self.matrix.row_bytes()
            })
        })
    }

    /// Bytes of one row of a matrix stored by output, and of its bias.
    pub(crate) fn row_bytes(&self) -> usize {
        self.matrix.row_bytes() + self.bias.map_or(0, |_| size_of::<f32>())
    }

    /// Adds the biases of all outputs.
    fn add_bias(&self, products: &mut [f32]) {
        if let Some(bias) = self.bias {
            let products = products.iter_mut().zip(bias);
            products.for_each(|(product, bias)| *product += bias);
        }
    }

    /// Adds the biases of the outputs `rows` to their products.
    pub(crate) fn add_bias_of(&self, rows: &[u32], products: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (product, row) in products.iter_mut().zip(rows) {
                *product += bias[*row as usize];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_kernels::Isa;
    use powerinfer_tensor::{Format, pack};
    use proptest::prelude::*;

    use super::*;
    use crate::ActivationFormat;

    /// `Σ_j x_j · w_ij + b_i` over the inputs that reach the threshold, in float64.
    fn oracle(weights: &[f64], bias: &[f32], x: &[f32], threshold: f32) -> Vec<f64> {
        let row = |(row, bias): (&[f64], &f32)| {
            let terms = row.iter().zip(x).filter(|(_, x)| x.abs() >= threshold);
            terms.map(|(w, x)| w * f64::from(*x)).sum::<f64>() + f64::from(*bias)
        };
        weights.chunks_exact(x.len()).zip(bias).map(row).collect()
    }

    proptest! {
        #[test]
        fn inputs_below_the_threshold_count_as_zero_in_either_layout(
            inputs in 1usize..90, outputs in 1usize..90, tokens in 1usize..4,
            format in prop::sample::select(vec![Format::F32, Format::Q8_0, Format::Q4_0]),
            threshold in prop::sample::select(vec![0.0f32, 0.3, 0.8, 9.0]),
            seed in 0u64..1000,
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            let weights = normal(outputs * inputs);
            let (x, bias) = (normal(tokens * inputs), normal(outputs));
            let threads = Threads::new(Isa::detect().unwrap(), 2).unwrap();
            let threads = threads.with_activations(ActivationFormat::F32);
            for layout in [Layout::ByOutput, Layout::ByInput] {
                let packed = match layout {
                    Layout::ByOutput => pack(format, outputs, inputs, &weights),
                    Layout::ByInput => {
                        let turned = (0..inputs).flat_map(|j| {
                            weights.iter().skip(j).step_by(inputs).copied()
                        });
                        pack(format, inputs, outputs, &turned.collect::<Vec<_>>())
                    }
                };
                // The weights as they were packed, by output.
                let mut as_packed = vec![0.0; outputs * inputs];
                let view = packed.as_view();
                let mut row = vec![0.0; view.columns()];
                for index in 0..view.rows() {
                    view.dequantise_row(index, &mut row);
                    for (place, weight) in row.iter().enumerate() {
                        let (i, j) = match layout {
                            Layout::ByOutput => (index, place),
                            Layout::ByInput => (place, index),
                        };
                        as_packed[i * inputs + j] = f64::from(*weight);
                    }
                }
                let linear = Linear { matrix: view, layout, bias: Some(&bias) };
                prop_assert_eq!((linear.inputs(), linear.outputs()), (inputs, outputs));
                let mut buffers = InputBuffers::default();
                let input = linear.input(&threads, &x, threshold, &mut buffers);
                let mut found = Vec::new();
                let bytes_read = linear.product(&threads, &input, threshold, &mut found);
                let mut alone = Vec::new();
                let mut kept = 0;
                for (x, found) in x.chunks_exact(inputs).zip(found.chunks_exact(outputs)) {
                    let want = oracle(&as_packed, &bias, x, threshold);
                    for (found, want) in found.iter().zip(&want) {
                        prop_assert!((f64::from(*found) - want).abs() < 2e-4, "{found} {want}");
                    }
                    kept += x.iter().filter(|x| x.abs() >= threshold).count();
                    let input = linear.input(&threads, x, threshold, &mut buffers);
                    let mut own = Vec::new();
                    linear.product(&threads, &input, threshold, &mut own);
                    let mut sum = vec![2.0; outputs];
                    linear.add_product(&threads, &input, threshold, &mut Vec::new(), &mut sum);
                    let expected: Vec<f32> = own.iter().map(|own| 2.0 + own).collect();
                    prop_assert_eq!(sum, expected);
                    alone.extend(own);
                }
                prop_assert_eq!(&alone, &found);
                let read = match layout {
                    Layout::ByOutput => outputs,
                    Layout::ByInput => kept,
                };
                prop_assert_eq!(bytes_read, read * view.row_bytes() + 4 * outputs);
            }
        }
    }
}
