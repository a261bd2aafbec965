//! Rotary position embeddings of queries and keys.

/// Rotates the first `2 · pairs` values of every head in `heads`, in pairs (i, i + pairs); `rotations [pairs]` are
/// those of the token's position.
pub(crate) fn rotate(rotations: &[[f32; 2]], heads: &mut [f32], head_size: usize) {
    let pairs = rotations.len();
    for head in heads.chunks_exact_mut(head_size) {
        let (first, second) = head[..2 * pairs].split_at_mut(pairs);
        for ((a, b), [sine, cosine]) in first.iter_mut().zip(second).zip(rotations) {
            (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_model::Rotary;

    use super::*;

    #[test]
    fn rotation_keeps_lengths_and_dot_products_depend_on_distance_alone() {
        let rotary = Rotary {
            frequencies: vec![1.0, 0.1],
            magnitude: 1.0,
        };
        let rotated = |position| {
            let mut head = [1.0, 2.0, -3.0, 0.5, 9.0];
            let rotations: Vec<_> = rotary.rotations(position).collect();
            rotate(&rotations, &mut head, 5);
            head
        };
        let dot = |a: [f32; 5], b: [f32; 5]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert_eq!(rotated(0), [1.0, 2.0, -3.0, 0.5, 9.0]);
        assert_eq!(rotated(5)[4], 9.0, "values beyond the pairs stay");
        assert!((dot(rotated(9), rotated(9)) - dot(rotated(0), rotated(0))).abs() < 1e-4);
        assert!((dot(rotated(3), rotated(7)) - dot(rotated(10), rotated(14))).abs() < 1e-4);
    }
}
