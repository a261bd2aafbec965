//! LayerNorm and RMSNorm in float32, summed in order.

use powerinfer_bundle::StoredNorm;
use powerinfer_model::NormKind;

/// Normalises each vector of `x [vectors, size]` in place.
pub(crate) fn norm_all(kind: NormKind, epsilon: f32, norm: &StoredNorm, x: &mut [f32]) {
    let size = norm.weight.len();
    for x in x.chunks_exact_mut(size) {
        if kind == NormKind::Layer {
            let mean = x.iter().sum::<f32>() / size as f32;
            x.iter_mut().for_each(|x| *x -= mean);
        }
        let mean_square = x.iter().map(|x| x * x).sum::<f32>() / size as f32;
        let scale = 1.0 / (mean_square + epsilon).sqrt();
        for (x, weight) in x.iter_mut().zip(&norm.weight) {
            *x = *x * scale * weight;
        }
        if let Some(bias) = &norm.bias {
            x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_norm_centres_and_an_rms_norm_does_not() {
        let norm = StoredNorm {
            weight: vec![2.0, 2.0],
            bias: Some(vec![0.5, 0.5]),
        };
        let mut x = [1.0, 3.0, -4.0, -4.0];
        norm_all(NormKind::Layer, 0.0, &norm, &mut x[..2]);
        assert_eq!(x[..2], [-1.5, 2.5]);
        norm_all(NormKind::RootMeanSquare, 0.0, &norm, &mut x[2..]);
        assert_eq!(x[2..], [-1.5, -1.5]);
    }
}
