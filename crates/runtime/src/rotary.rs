//! Rotation of queries and keys by their positions.

use powerinfer_model::Rotary;

/// Rotates every head in `heads` as at `position`; of each head's `head_size` numbers the first
/// are rotated, in pairs (i, i + pairs), as many as there are frequencies for.
pub(crate) fn rotate(rotary: &Rotary, heads: &mut [f32], head_size: usize, position: usize) {
    let pairs = rotary.frequencies.len();
    let rotations = rotations(rotary, position);
    for head in heads.chunks_exact_mut(head_size) {
        let (first, second) = head[..2 * pairs].split_at_mut(pairs);
        for ((a, b), [sine, cosine]) in first.iter_mut().zip(second).zip(&rotations) {
            (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
        }
    }
}

/// Sine and cosine of each pair's angle at `position`.
pub(crate) fn rotations(rotary: &Rotary, position: usize) -> Vec<[f32; 2]> {
    let turn = |frequency: &f64| {
        // The angle is rounded to float32 before its sine is taken, as the standard does.
        let (sine, cosine) = ((position as f64 * frequency) as f32).sin_cos();
        [sine * rotary.magnitude, cosine * rotary.magnitude]
    };
    rotary.frequencies.iter().map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_lengths_and_depends_on_distance_alone() {
        let rotary = Rotary {
            frequencies: vec![1.0, 0.1],
            magnitude: 1.0,
        };
        let turned = |position| {
            let mut head = [1.0, 2.0, -3.0, 0.5, 9.0];
            rotate(&rotary, &mut head, 5, position);
            head
        };
        let dot = |a: [f32; 5], b: [f32; 5]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert_eq!(turned(0), [1.0, 2.0, -3.0, 0.5, 9.0]);
        assert_eq!(turned(5)[4], 9.0, "what is not rotated stays");
        assert!((dot(turned(9), turned(9)) - dot(turned(0), turned(0))).abs() < 1e-4);
        assert!((dot(turned(3), turned(7)) - dot(turned(10), turned(14))).abs() < 1e-4);
    }
}
