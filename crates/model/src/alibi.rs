//! ALiBi (Press et al. 2022): attention scores with a per-head bias proportional to the key's position.

use powerinfer_tensor::bf16;

/// Bias on the attention score of the key at `position`, for a head with `slope`.
///
/// Rounded to bf16 as in the models' own code: first the position (from 257 on, not every position is a
/// bf16), then the product.
pub fn alibi_bias(slope: f32, position: usize) -> f32 {
    let position = bf16::from_f32(position as f32).to_f32();
    bf16::from_f32(slope * position).to_f32()
}

/// Slopes of `heads` heads times `strength`: a geometric series over the heads, rounded to bf16 as in
/// training.
pub(crate) fn slopes(heads: usize, strength: f64) -> Vec<f32> {
    let power = if heads.is_power_of_two() {
        heads
    } else {
        heads.next_power_of_two() / 2
    };
    let base = |count: usize| 2f64.powf(-8.0 / count as f64);
    let series = (1..=power).map(|head| base(power).powi(head as i32));
    // Heads beyond a power of two take every second slope of the series for twice as many heads.
    let rest = (0..heads - power).map(|head| base(2 * power).powi(2 * head as i32 + 1));
    series
        .chain(rest)
        .map(|slope| bf16::from_f64(slope * strength).to_f32())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_geometric_and_interleaved_beyond_a_power_of_two() {
        assert_eq!(slopes(8, 1.0)[..3], [0.5, 0.25, 0.125]);
        assert_eq!(slopes(4, 1.0), [0.25, 0.0625, 0.015_625, 0.003_906_25]);
        // Beyond four heads: the first and third slope of eight.
        assert_eq!(slopes(6, 2.0)[4..], [1.0, 0.25]);
    }

    #[test]
    fn biases_match_the_reference_implementation() {
        let slopes = slopes(32, 1.0); // not powers of two, as in falcon-rw-1b
        for (head, position, bias) in [
            (0, 1, 0.839_843_75),
            (0, 255, 214.0),
            (0, 257, 215.0),
            (1, 301, 212.0),
            (4, 399, 168.0),
            (12, 1001, 105.0),
            (30, 2047, 9.5),
        ] {
            assert_eq!(alibi_bias(slopes[head], position), bias, "{position}");
        }
    }
}
