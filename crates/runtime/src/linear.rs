//! A projection and its product with some inputs, those left out that are near zero.
//!
//! ```text
//! by output   out_i = W_i · x         every row is read, whatever x is
//! by input    out   = Σ_j x_j · W_j   a row is read only where |x_j| ≥ threshold
//! ```

use std::borrow::Cow;

use powerinfer_artifact::TensorFile;
use powerinfer_bundle::{Layout, StoredLinear};
use powerinfer_tensor::Matrix;

use crate::{Threads, input::Input};

/// A matrix and its bias, borrowed for a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) layout: Layout,
    /// One number an output.
    pub(crate) bias: Option<&'a [f32]>,
}

/// Products of some inputs, and what they took.
pub(crate) struct Arithmetic {
    /// `[tokens, outputs]`.
    pub(crate) values: Vec<f32>,
    pub(crate) bytes_read: usize,
}

impl<'a> Linear<'a> {
    /// The matrix that `stored` says lies in `file`.
    pub(crate) fn of(stored: &'a StoredLinear, file: &'a TensorFile) -> Self {
        Self {
            matrix: stored.matrix.view(file),
            layout: stored.layout,
            bias: stored.bias.as_deref(),
        }
    }

    /// Numbers that go in.
    pub(crate) fn inputs(&self) -> usize {
        match self.layout {
            Layout::ByOutput => self.matrix.columns(),
            Layout::ByInput => self.matrix.rows(),
        }
    }

    /// Numbers that come out.
    pub(crate) fn outputs(&self) -> usize {
        match self.layout {
            Layout::ByOutput => self.matrix.rows(),
            Layout::ByInput => self.matrix.columns(),
        }
    }

    /// Those of `x [tokens, inputs]` that are not below `threshold` in magnitude, ready to be
    /// multiplied with this matrix and others that lie in its format.
    pub(crate) fn input<'x>(&self, threads: &Threads, x: &'x [f32], threshold: f32) -> Input<'x> {
        Input::new(threads, masked(x, threshold), self.inputs(), &self.matrix)
    }

    /// `x · Wᵀ + b` for an input made with the same `threshold`; tokens have the bits of one at a
    /// time.
    pub(crate) fn product(&self, threads: &Threads, x: &Input<'_>, threshold: f32) -> Arithmetic {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let tokens = x.tokens();
        let mut values = vec![0.0; tokens * outputs];
        let mut bytes_read = self.bias.map_or(0, size_of_val);
        match self.layout {
            Layout::ByOutput => {
                threads.gemm(&self.matrix, x, &mut values);
                bytes_read += self.matrix.rows() * self.matrix.row_bytes();
            }
            Layout::ByInput => {
                let (mut rows, mut kept) = (Vec::new(), Vec::new());
                for (x, out) in x
                    .exact()
                    .chunks_exact(inputs)
                    .zip(values.chunks_exact_mut(outputs))
                {
                    rows.clear();
                    kept.clear();
                    for (row, x) in x
                        .iter()
                        .enumerate()
                        .filter(|(_, x)| reaches(**x, threshold))
                    {
                        rows.push(row as u32);
                        kept.push(*x);
                    }
                    threads.axpy_rows(&self.matrix, &rows, &kept, out);
                    bytes_read += rows.len() * self.matrix.row_bytes();
                }
            }
        }
        for out in values.chunks_exact_mut(outputs) {
            self.add_bias(out);
        }
        Arithmetic { values, bytes_read }
    }

    /// Bytes that one row of a matrix by output and its bias take.
    pub(crate) fn row_bytes(&self) -> usize {
        self.matrix.row_bytes() + self.bias.map_or(0, |_| size_of::<f32>())
    }

    /// Adds the biases to the products of all outputs.
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

/// Whether an input counts; what is no number does, so that it shows.
fn reaches(x: f32, threshold: f32) -> bool {
    x.abs() >= threshold || x.is_nan()
}

/// `x` with 0 for what does not count.
pub(crate) fn masked(x: &[f32], threshold: f32) -> Cow<'_, [f32]> {
    if threshold == 0.0 {
        return Cow::Borrowed(x);
    }
    let kept = |x: &f32| if reaches(*x, threshold) { *x } else { 0.0 };
    Cow::Owned(x.iter().map(kept).collect())
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_kernels::Isa;
    use powerinfer_tensor::{Format, pack};
    use proptest::prelude::*;

    use super::*;
    use crate::ActivationFormat;

    /// `Σ_j x_j · w_ij + b_i` over the inputs that count, in float64.
    fn oracle(weights: &[f64], bias: &[f32], x: &[f32], threshold: f32) -> Vec<f64> {
        let row = |(row, bias): (&[f64], &f32)| {
            let terms = row.iter().zip(x).filter(|(_, x)| x.abs() >= threshold);
            terms.map(|(w, x)| w * f64::from(*x)).sum::<f64>() + f64::from(*bias)
        };
        weights.chunks_exact(x.len()).zip(bias).map(row).collect()
    }

    proptest! {
        #[test]
        fn small_inputs_count_as_nothing_in_either_layout(
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
                let input = linear.input(&threads, &x, threshold);
                let found = linear.product(&threads, &input, threshold);
                let mut alone = Vec::new();
                let mut kept = 0;
                for (x, found) in x.chunks_exact(inputs).zip(found.values.chunks_exact(outputs)) {
                    let want = oracle(&as_packed, &bias, x, threshold);
                    for (found, want) in found.iter().zip(&want) {
                        prop_assert!((f64::from(*found) - want).abs() < 2e-4, "{found} {want}");
                    }
                    kept += x.iter().filter(|x| x.abs() >= threshold).count();
                    let input = linear.input(&threads, x, threshold);
                    alone.extend(linear.product(&threads, &input, threshold).values);
                }
                prop_assert_eq!(&alone, &found.values);
                let read = match layout {
                    Layout::ByOutput => outputs,
                    Layout::ByInput => kept,
                };
                prop_assert_eq!(found.bytes_read, read * view.row_bytes() + 4 * outputs);
            }
        }
    }
}
