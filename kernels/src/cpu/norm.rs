//! LayerNorm and RMSNorm. Values are added in a fixed order, in [`LANES`] partial sums. The scalar code is compiled for every instruction
//! set, and the compiler keeps the partial sums in vector registers.

use super::{Operation, Simd};
use crate::Norm;
use powerinfer_tensor::NormKind;

/// Number of partial sums.
const LANES: usize = 32;

/// Normalises each vector of `x` in place.
pub(crate) struct Normalise<'a> {
    pub(crate) norm: Norm<'a>,
    pub(crate) x: &'a mut [f32],
}

impl Operation for Normalise<'_> {
    type Output = ();

    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run_simd<S: Simd>(self, _simd: S) {
        self.run();
    }
}

impl Normalise<'_> {
    #[inline(always)]
    fn run(self) {
        let Norm {
            kind,
            epsilon,
            weight,
            bias,
        } = self.norm;
        let count = weight.len() as f32;
        for x in self.x.chunks_exact_mut(weight.len().max(1)) {
            let centre = match kind {
                NormKind::Layer => sum(x, |x| x) / count,
                NormKind::RootMeanSquare => 0.0,
            };
            let mean_square = sum(x, |x| (x - centre) * (x - centre)) / count;
            let scale = 1.0 / (mean_square + epsilon).sqrt();
            for (x, weight) in x.iter_mut().zip(weight) {
                *x = (*x - centre) * scale * weight;
            }
            if let Some(bias) = bias {
                x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
        }
    }
}

/// Sum of `term(x)` over all values. Lane `i` sums the values `i + k · LANES` in order. Then the upper half of the lanes is added to the
/// lower half, until one lane is left.
#[inline(always)]
fn sum(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let (blocks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for block in blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane += term(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += term(*x);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut()
            .zip(high)
            .for_each(|(low, high)| *low += *high);
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn every_value_is_in_the_sum_once() {
        for length in 0..200u16 {
            // Whole numbers, so that every order gives the same sum.
            let x: Vec<f32> = (0..length).map(f32::from).collect();
            let squares: u32 = (0..u32::from(length)).map(|x| x * x).sum();
            assert_eq!(sum(&x, |x| x * x), squares as f32, "{length}");
        }
    }

    #[test]
    fn a_layer_norm_centres_and_an_rms_norm_does_not() {
        for (kind, x, expected) in [
            (
                NormKind::Layer,
                [1.0, 3.0, -4.0, -4.0],
                [-1.5, 2.5, 0.5, 0.5],
            ),
            (
                NormKind::RootMeanSquare,
                [4.0, -4.0, -4.0, -4.0],
                [2.5, -1.5, -1.5, -1.5],
            ),
        ] {
            let norm = Norm {
                kind,
                epsilon: 1e-30, // avoids division by zero if all values are equal
                weight: &[2.0, 2.0],
                bias: Some(&[0.5, 0.5]),
            };
            let mut found = x;
            Isa::SCALAR.normalise(norm, &mut found);
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn all_instruction_sets_normalise_to_the_same_bits() {
        for size in [1, 7, 32, 33, 100, 4096] {
            let x: Vec<f32> = (0..3 * size)
                .map(|index| (index as f32 * 0.7).sin() * 3.0 + 0.2)
                .collect();
            let weight: Vec<f32> = x[..size].iter().map(|x| x * x - 0.5).collect();
            for (kind, bias) in [
                (NormKind::RootMeanSquare, None),
                (NormKind::Layer, Some(&x[size..2 * size])),
            ] {
                let norm = Norm {
                    kind,
                    epsilon: 1e-5,
                    weight: &weight,
                    bias,
                };
                let normalised = |isa: Isa| {
                    let mut x = x.clone();
                    isa.normalise(norm, &mut x);
                    x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                };
                let expected = normalised(Isa::SCALAR);
                for isa in Isa::available() {
                    assert_eq!(normalised(isa), expected, "{} {size}", isa.name());
                }
            }
        }
    }
}
