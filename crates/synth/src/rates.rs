//! Activation frequencies: a power law with a given mean and skew.

use powerinfer_model::Experts;

use crate::SynthError;

/// Maximum activation frequency: in real models hardly any neuron is always active.
const MAX_RATE: f64 = 0.98;

/// Share of the activations that the skew refers to.
const CARRIED: f64 = 0.8;

/// Computes the activation frequencies of `neurons` neurons in descending order: `min(0.98, a·rank^−α)` with
/// `a` and `α` such that the share `sparsity` of the activations is zero and the most active share `skew` of
/// the neurons carries 80% of the others.
///
/// # Errors
///
/// [`SynthError::NoPowerLaw`] if no such `a` and `α` exist.
pub fn rates(neurons: usize, sparsity: f64, skew: f64) -> Result<Vec<f64>, SynthError> {
    const STEEPEST: f64 = 8.0;
    let density = 1.0 - sparsity;
    let ranks: Vec<f64> = (0..neurons).map(|rank| (rank as f64 + 0.5).ln()).collect();
    let [flat, steep] =
        [0.0, STEEPEST].map(|exponent| neurons_for(&law(&ranks, exponent, density)));
    let possible = density > 0.0 && density <= MAX_RATE;
    if !possible || !(steep..=flat).contains(&skew) {
        return Err(SynthError::NoPowerLaw {
            zeros: 100.0 * sparsity,
            skew: 100.0 * skew,
            lowest: 100.0 * steep,
            highest: 100.0 * flat,
        });
    }
    // A steeper law concentrates the activations on fewer neurons.
    let exponent = bisect(0.0, STEEPEST, |exponent| {
        neurons_for(&law(&ranks, exponent, density)) > skew
    });
    Ok(law(&ranks, exponent, density))
}

/// Selection frequencies of a layer's experts in descending order: [`rates`] with the closest possible skew to `skew`.
pub(crate) fn of_experts(experts: &Experts, skew: f64) -> Result<Vec<f64>, SynthError> {
    let skipped = 1.0 - experts.per_token as f64 / experts.count as f64;
    match rates(experts.count, skipped, skew) {
        Err(SynthError::NoPowerLaw {
            lowest, highest, ..
        }) if lowest <= highest => {
            let skew = (100.0 * skew).clamp(lowest, highest) / 100.0;
            rates(experts.count, skipped, skew)
        }
        other => other,
    }
}

/// Computes the power law with this exponent and mean.
fn law(ranks: &[f64], exponent: f64, density: f64) -> Vec<f64> {
    let rate = |scale: f64, rank: &f64| (scale - exponent * rank).exp().min(MAX_RATE);
    let mean = |scale: f64| {
        let sum: f64 = ranks.iter().map(|rank| rate(scale, rank)).sum();
        sum / ranks.len().max(1) as f64
    };
    let highest = exponent * ranks.last().copied().unwrap_or(0.0);
    let scale = bisect(density.max(1e-12).ln(), highest, |scale| {
        mean(scale) < density
    });
    ranks.iter().map(|rank| rate(scale, rank)).collect()
}

/// Finds the point between `low` and `high` where `is_below` turns from true to false, by bisection.
fn bisect(mut low: f64, mut high: f64, is_below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..48 {
        let middle = (low + high) / 2.0;
        if is_below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// Smallest share of neurons that carries 80% of the activations; `rates` are in descending order.
fn neurons_for(rates: &[f64]) -> f64 {
    let wanted = CARRIED * rates.iter().sum::<f64>();
    let mut carried = 0.0;
    let needed = rates.iter().take_while(|rate| {
        let more = carried < wanted;
        carried += *rate;
        more
    });
    needed.count() as f64 / rates.len().max(1) as f64
}

/// Computes the `z` with `P(normal > z) = rate`.
pub(crate) fn upper_quantile(rate: f64) -> f64 {
    bisect(-9.0, 9.0, |z| {
        0.5 * libm::erfc(z / std::f64::consts::SQRT_2) > rate
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn mean_and_skew_are_as_requested(neurons in 200usize..3000, sparsity in 0.6f64..0.97, skew in 0.1f64..0.7) {
            match rates(neurons, sparsity, skew) {
                Ok(rates) => {
                    let mean = rates.iter().sum::<f64>() / neurons as f64;
                    prop_assert!((mean - (1.0 - sparsity)).abs() < 1e-6, "{}", mean);
                    prop_assert!((neurons_for(&rates) - skew).abs() < 2.0 / neurons as f64);
                    prop_assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]));
                    prop_assert!(rates[0] <= MAX_RATE);
                }
                Err(SynthError::NoPowerLaw { lowest, .. }) => {
                    // Fewer neurons cannot carry 80%.
                    prop_assert!(100.0 * skew < lowest + 1e-9);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn quantiles_match_tables() {
        for (rate, z) in [
            (0.5, 0.0),
            (0.1, 1.281_551_6),
            (0.025, 1.959_964),
            (0.9, -1.281_551_6),
        ] {
            assert!((upper_quantile(rate) - z).abs() < 1e-6, "{rate}");
        }
    }

    #[test]
    fn impossible_requests_are_errors() {
        let error = rates(1000, 0.5, 0.2).unwrap_err().to_string();
        assert!(
            error.contains("50.0% zeros") && error.contains("can be from"),
            "{error}"
        );
        assert!(rates(1000, 1.0, 0.3).is_err());
        assert!(rates(1000, 0.9, 0.9).is_err());
    }
}
