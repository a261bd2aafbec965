//! LayerNorm and RMSNorm in float32. Sums are taken in a fixed order, in [`LANES`] partial sums.

use powerinfer_bundle::StoredNorm;
use powerinfer_model::NormKind;

/// Number of partial sums, which the compiler keeps in vector registers.
const LANES: usize = 32;

/// Sum of `term(x)` over all values. Lane `i` sums values `i + k · LANES` in order; then the upper half of the lanes is added to the
/// lower half until one is left.
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

/// Centre to subtract from the values of `x`, and factor for the differences.
fn centre_and_scale(kind: NormKind, epsilon: f32, x: &[f32]) -> (f32, f32) {
    let count = x.len() as f32;
    let centre = match kind {
        NormKind::Layer => sum(x, |x| x) / count,
        NormKind::RootMeanSquare => 0.0,
    };
    let mean_square = sum(x, |x| (x - centre) * (x - centre)) / count;
    (centre, 1.0 / (mean_square + epsilon).sqrt())
}

/// Adds the bias of `norm` to a normalised vector.
fn add_bias(norm: &StoredNorm, x: &mut [f32]) {
    if let Some(bias) = &norm.bias {
        x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
    }
}

/// Sets `out` to the normalised vectors of `x [vectors, size]`.
pub(crate) fn norm_of(
    kind: NormKind,
    epsilon: f32,
    norm: &StoredNorm,
    x: &[f32],
    out: &mut Vec<f32>,
) {
    let size = norm.weight.len();
    out.resize(x.len(), 0.0);
    for (x, out) in x.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
        let (centre, scale) = centre_and_scale(kind, epsilon, x);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(&norm.weight) {
            *out = (x - centre) * scale * weight;
        }
        add_bias(norm, out);
    }
}

/// Normalises each vector of `x [vectors, size]` in place.
pub(crate) fn norm_all(kind: NormKind, epsilon: f32, norm: &StoredNorm, x: &mut [f32]) {
    for x in x.chunks_exact_mut(norm.weight.len()) {
        let (centre, scale) = centre_and_scale(kind, epsilon, x);
        for (x, weight) in x.iter_mut().zip(&norm.weight) {
            *x = (*x - centre) * scale * weight;
        }
        add_bias(norm, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let norm = StoredNorm {
            weight: vec![2.0, 2.0],
            bias: Some(vec![0.5, 0.5]),
        };
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
            let epsilon = 1e-30; // for the variance of equal values
            let (mut in_place, mut out) = (x, vec![9.0; 7]);
            norm_all(kind, epsilon, &norm, &mut in_place);
            norm_of(kind, epsilon, &norm, &x, &mut out);
            assert_eq!((&in_place[..], &out[..]), (&expected[..], &expected[..]));
        }
    }
}
