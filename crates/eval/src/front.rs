//! Pareto front of two objectives, and its knee.

/// Indices of the points that no other point dominates, by ascending gain, equal points once.
///
/// `points` are pairs of a gain (higher is better) and a loss (lower is better); those that are not finite are left out.
pub fn front(points: &[(f64, f64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len())
        .filter(|place| points[*place].0.is_finite() && points[*place].1.is_finite())
        .collect();
    // The highest gain first; of equals the lowest loss.
    order.sort_by(|a, b| {
        let (a, b) = (points[*a], points[*b]);
        b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1))
    });
    let mut least = f64::INFINITY;
    order.retain(|place| {
        let loss = points[*place].1;
        let is_better = loss < least;
        least = least.min(loss);
        is_better
    });
    order.reverse();
    order
}

/// Knee of a front: the index of its point farthest from the line between its ends, both axes scaled to the front's range.
///
/// None if no point lies between the ends, or none on the better side of that line.
pub fn knee(points: &[(f64, f64)], front: &[usize]) -> Option<usize> {
    let [first, .., last] = front else {
        return None;
    };
    let (from, to) = (points[*first], points[*last]);
    let scaled = |point: (f64, f64)| {
        let along = |at: f64, from: f64, to: f64| (at - from) / (to - from);
        (along(point.0, from.0, to.0), along(point.1, from.1, to.1))
    };
    let gain = |place: &usize| {
        let (gain, loss) = scaled(points[*place]);
        gain - loss
    };
    let between = front[1..front.len() - 1].iter();
    let best = between.max_by(|a, b| gain(a).total_cmp(&gain(b)))?;
    (gain(best) > 1e-9).then_some(*best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_front_is_what_no_point_dominates(
            points in prop::collection::vec((0u8..20, 0u8..20), 0..40),
        ) {
            let points: Vec<(f64, f64)> = points.into_iter().map(|(a, b)| (f64::from(a), f64::from(b))).collect();
            let found = front(&points);
            let beats = |a: (f64, f64), b: (f64, f64)| a.0 >= b.0 && a.1 <= b.1 && a != b;
            for place in 0..points.len() {
                let is_beaten = points.iter().any(|other| beats(*other, points[place]));
                let is_there = found.iter().any(|one| points[*one] == points[place]);
                prop_assert_eq!(is_there, !is_beaten);
            }
            for pair in found.windows(2) {
                prop_assert!(points[pair[0]].0 < points[pair[1]].0);
                prop_assert!(points[pair[0]].1 < points[pair[1]].1);
            }
        }
    }

    #[test]
    fn the_knee_is_farthest_from_the_line_between_the_ends() {
        let points = [
            (1.0, 0.0),
            (2.0, 0.1),
            (3.0, 0.3),
            (3.5, 5.0),
            (2.0, 3.0),
            (f64::NAN, 0.0),
        ];
        let found = front(&points);
        assert_eq!(found, [0, 1, 2, 3]);
        assert_eq!(knee(&points, &found), Some(2));
        assert_eq!(knee(&points, &found[..2]), None);
        // All on the wrong side: the ends are better.
        let bent = [(0.0, 0.0), (0.1, 0.9), (1.0, 1.0)];
        assert_eq!(knee(&bent, &front(&bent)), None);
    }
}
