//! Comparison with dense at run time: the FFNs of some tokens are also computed densely. A layer whose error exceeds
//! the bound that it was certified for changes to a fallback policy.

use std::collections::VecDeque;

use powerinfer_artifact::plan::Policy;
use powerinfer_bundle::Bundle;
use powerinfer_tensor::Matrix;

/// Verified tokens whose mean error is compared with the error bound, so that one outlier is no drift.
pub const DRIFT_WINDOW: usize = 16;

/// Share of the error bound by which the mean may exceed it.
const SLACK: f64 = 0.1;

/// Tokens to verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    /// Passes of decoded tokens, of one whose position is a multiple of this.
    Decoded(usize),
    /// All tokens of all passes.
    All,
}

/// Differences from dense of the verified tokens.
#[derive(Debug, Clone)]
pub struct Verification {
    which: Which,
    layers: Vec<Drift>,
    /// Per layer, `‖down_i‖` of every neuron; computed on first use.
    norms: Vec<Vec<f32>>,
    /// Per layer, the error bound on the mean of [`DRIFT_WINDOW`] tokens.
    bounds: Vec<f64>,
    /// Policy of layers that have exceeded their bound.
    fallback: Policy,
    alarms: Vec<DriftAlarm>,
}

/// A layer that exceeded its error bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DriftAlarm {
    /// The layer.
    pub layer: usize,
    /// Position of the token at which it did.
    pub position: usize,
    /// Mean relative error of the last [`DRIFT_WINDOW`] verified tokens.
    pub error: f64,
    /// The error bound.
    pub certified: f64,
    /// The layer's policy from then on.
    pub fallback: Policy,
}

/// Relative errors of a layer's FFN output, and its contribution recall.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Drift {
    /// Relative error `‖sparse − exact‖ / ‖exact‖` of every verified token.
    errors: Vec<f32>,
    /// The last [`DRIFT_WINDOW`] of them.
    recent: VecDeque<f64>,
    /// Share of `Σ|h_i|·‖down_i‖` of the computed neurons, of every verified token.
    recalls: Vec<f64>,
}

impl Drift {
    /// Drift of tokens with these relative errors and recalls, in order.
    pub fn from_errors(errors: Vec<f32>, recalls: Vec<f64>) -> Self {
        Self {
            errors,
            recalls,
            ..Self::default()
        }
    }

    /// Verified tokens.
    pub fn tokens(&self) -> usize {
        self.errors.len()
    }

    /// Relative error of every token.
    pub fn errors(&self) -> &[f32] {
        &self.errors
    }

    /// Share of `Σ|h_i|·‖down_i‖` of the computed neurons, of every token.
    pub fn recalls(&self) -> &[f64] {
        &self.recalls
    }

    /// Mean relative error.
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.errors.iter().copied().map(f64::from).sum();
        sum / self.tokens().max(1) as f64
    }

    /// The largest relative error.
    pub fn worst(&self) -> f64 {
        self.errors.iter().copied().fold(0.0, f32::max).into()
    }

    /// The 99th percentile of the relative errors.
    pub fn p99(&self) -> f64 {
        let mut sorted = self.errors.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
        sorted
            .get(rank.saturating_sub(1))
            .copied()
            .unwrap_or(0.0)
            .into()
    }

    /// The largest mean over [`DRIFT_WINDOW`] consecutive tokens, or over all of fewer tokens.
    pub fn worst_window(&self) -> f64 {
        let mean = |errors: &[f32]| {
            let sum: f64 = errors.iter().copied().map(f64::from).sum();
            sum / errors.len().max(1) as f64
        };
        let windows = self.errors.windows(DRIFT_WINDOW).map(mean);
        windows.fold(
            if self.tokens() < DRIFT_WINDOW {
                self.mean()
            } else {
                0.0
            },
            f64::max,
        )
    }

    /// Mean share of `Σ|h_i|·‖down_i‖` of the computed neurons.
    pub fn contribution_recall(&self) -> f64 {
        match self.tokens() {
            0 => 1.0,
            tokens => self.recalls.iter().sum::<f64>() / tokens as f64,
        }
    }
}

/// One layer's FFN under its policy and under dense, for some tokens.
pub(crate) struct Observation<'a> {
    /// Hidden states before the FFN, `[tokens, hidden]`.
    pub(crate) before: &'a [f32],
    /// Hidden states after the policy's FFN.
    pub(crate) sparse: &'a [f32],
    /// Hidden states after the dense FFN.
    pub(crate) exact: &'a [f32],
    /// Per token, the neurons that the policy computed, with their `h_i`.
    pub(crate) computed: &'a [Vec<(u32, f32)>],
    /// Per token, all neurons with their `h_i`.
    pub(crate) products: &'a [Vec<(u32, f32)>],
    /// Rows of down, `[neurons, hidden]`.
    pub(crate) down: &'a Matrix<'a>,
}

impl Verification {
    /// Verifies one of `every` decoded tokens, and those that are decoded together with it.
    pub fn of_decoded(every: usize, layers: usize) -> Self {
        Self::new(Which::Decoded(every.max(1)), layers)
    }

    /// Verifies one of `every` decoded tokens, within the error bounds of the certificate of `bundle`, if it has a valid
    /// one.
    pub fn certified(every: usize, bundle: &Bundle) -> Self {
        let config = bundle.config();
        let verification = Self::of_decoded(every, config.layer_count);
        let certificate = bundle.certificate();
        let Some(certificate) = certificate.filter(|_| bundle.certificate_matches()) else {
            return verification;
        };
        let layers = certificate.layers.iter();
        let fallback = if config.activation.has_exact_zeros() {
            Policy::Exact
        } else {
            Policy::Dense
        };
        verification.within(layers.map(|layer| layer.error_bound).collect(), fallback)
    }

    /// Verifies all tokens.
    pub fn of_all(layers: usize) -> Self {
        Self::new(Which::All, layers)
    }

    fn new(which: Which, layers: usize) -> Self {
        Self {
            which,
            layers: vec![Drift::default(); layers],
            norms: vec![Vec::new(); layers],
            bounds: vec![f64::INFINITY; layers],
            fallback: Policy::Dense,
            alarms: Vec::new(),
        }
    }

    /// Changes the policy of a layer to `fallback` once the mean error of [`DRIFT_WINDOW`] verified tokens exceeds its
    /// entry of `bounds`.
    #[must_use]
    pub fn within(mut self, bounds: Vec<f64>, fallback: Policy) -> Self {
        (self.bounds, self.fallback) = (bounds, fallback);
        self
    }

    /// Whether a pass over the tokens at `positions` is to be verified; in one of decoded tokens each is of another
    /// session.
    pub(crate) fn wants(&self, positions: &[usize], is_decode: bool) -> bool {
        let is_kth = |every| move |position: &usize| position.is_multiple_of(every);
        match self.which {
            Which::Decoded(every) => is_decode && positions.iter().any(is_kth(every)),
            Which::All => true,
        }
    }

    /// Adds the errors of `layer` for the tokens at `positions`; returns the layer's new policy if it exceeds its
    /// bound.
    pub(crate) fn observe(
        &mut self,
        layer: usize,
        positions: &[usize],
        observation: &Observation<'_>,
    ) -> Option<Policy> {
        let norms = &mut self.norms[layer];
        if norms.is_empty() {
            *norms = row_norms(observation.down);
        }
        let Observation {
            before,
            sparse,
            exact,
            ..
        } = *observation;
        let size = before.len() / positions.len();
        let states = before.chunks_exact(size).zip(sparse.chunks_exact(size));
        let states = states.zip(exact.chunks_exact(size));
        let drift = &mut self.layers[layer];
        let mut fallback = None;
        for (token, ((before, sparse), exact)) in states.enumerate() {
            let error = relative_error(before, sparse, exact);
            drift.errors.push(error as f32);
            let computed = observation
                .computed
                .get(token)
                .map_or(&[][..], Vec::as_slice);
            let products = observation
                .products
                .get(token)
                .map_or(&[][..], Vec::as_slice);
            drift.recalls.push(recalled(computed, products, norms));
            drift.recent.push_back(error);
            if drift.recent.len() > DRIFT_WINDOW {
                drift.recent.pop_front();
            }
            let mean = drift.recent.iter().sum::<f64>() / DRIFT_WINDOW as f64;
            let certified = self.bounds[layer];
            if drift.recent.len() == DRIFT_WINDOW && mean > certified * (1.0 + SLACK) {
                self.bounds[layer] = f64::INFINITY; // reported once
                fallback = Some(self.fallback);
                self.alarms.push(DriftAlarm {
                    layer,
                    position: positions[token],
                    error: mean,
                    certified,
                    fallback: self.fallback,
                });
            }
        }
        fallback
    }

    /// Verified tokens.
    pub fn tokens(&self) -> usize {
        self.layers.iter().map(Drift::tokens).max().unwrap_or(0)
    }

    /// Drift of every layer.
    pub fn layers(&self) -> &[Drift] {
        &self.layers
    }

    /// Layers that exceeded their error bound, in order.
    pub fn alarms(&self) -> &[DriftAlarm] {
        &self.alarms
    }

    /// Mean relative error over the layers.
    pub fn mean(&self) -> f64 {
        self.layers.iter().map(Drift::mean).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// Mean over the layers of the relative error of the token verified last; none before the first.
    pub fn latest(&self) -> Option<f64> {
        let last = self.layers.iter().map(|drift| drift.errors.last().copied());
        let errors: Vec<f64> = last.flatten().map(f64::from).collect();
        (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
    }

    /// Mean contribution recall over the layers.
    pub fn contribution_recall(&self) -> f64 {
        let recalls = self.layers.iter().map(Drift::contribution_recall);
        recalls.sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// The layer with the largest mean error; none before the first verified token.
    pub fn worst_layer(&self) -> Option<usize> {
        let mean = |layer: &usize| self.layers[*layer].mean();
        (0..self.layers.len())
            .filter(|layer| self.layers[*layer].tokens() > 0)
            .max_by(|a, b| mean(a).total_cmp(&mean(b)))
    }
}

/// `‖sparse − exact‖ / ‖exact − before‖`.
pub(crate) fn relative_error(before: &[f32], sparse: &[f32], exact: &[f32]) -> f64 {
    let (mut error, mut size) = (0f64, 0f64);
    for ((before, sparse), exact) in before.iter().zip(sparse).zip(exact) {
        error += f64::from(sparse - exact).powi(2);
        size += f64::from(exact - before).powi(2);
    }
    if error == 0.0 {
        0.0
    } else {
        (error / size.max(f64::MIN_POSITIVE)).sqrt()
    }
}

/// Share of `Σ|h_i|·‖down_i‖` of `products` that belongs to neurons in `computed`.
fn recalled(computed: &[(u32, f32)], products: &[(u32, f32)], norms: &[f32]) -> f64 {
    let mut is_computed = vec![false; norms.len()];
    for (neuron, _) in computed {
        is_computed[*neuron as usize] = true;
    }
    let (mut all, mut found) = (0f64, 0f64);
    for (neuron, product) in products {
        let neuron = *neuron as usize;
        let added = f64::from(product.abs() * norms[neuron]);
        all += added;
        found += f64::from(u8::from(is_computed[neuron])) * added;
    }
    if all > 0.0 { found / all } else { 1.0 }
}

/// L2 norm of every row.
pub(crate) fn row_norms(matrix: &Matrix<'_>) -> Vec<f32> {
    let mut row = vec![0.0; matrix.columns()];
    let norm = |index| {
        matrix.dequantise_row(index, &mut row);
        row.iter().map(|x| x * x).sum::<f32>().sqrt()
    };
    (0..matrix.rows()).map(norm).collect()
}

#[cfg(test)]
mod tests {
    use powerinfer_tensor::{Format, OwnedMatrix, pack};

    use super::*;

    /// Two neurons whose rows of down have the norms 1 and 2.
    fn down() -> OwnedMatrix {
        pack(Format::F32, 2, 2, &[1.0, 0.0, 0.0, 2.0])
    }

    /// Verifies a token of layer 1 whose dense FFN adds `[3, 4]`, of which the policy misses `missed`.
    fn observe(verification: &mut Verification, position: usize, missed: f32) -> Option<Policy> {
        let down = down();
        verification.observe(
            1,
            &[position],
            &Observation {
                before: &[1.0, 1.0],
                sparse: &[4.0 - missed, 5.0],
                exact: &[4.0, 5.0],
                computed: &[vec![(1, 2.0)]],
                products: &[vec![(0, 3.0), (1, 2.0)]],
                down: &down.as_view(),
            },
        )
    }

    #[test]
    fn errors_are_relative_to_the_output_of_the_ffn() {
        let mut verification = Verification::of_decoded(3, 2);
        assert!(verification.wants(&[6], true) && !verification.wants(&[7], true));
        assert!(verification.wants(&[7, 6], true), "one of a batch");
        assert!(!verification.wants(&[6, 7], false), "a prompt");
        assert!(Verification::of_all(2).wants(&[0, 1, 2, 3, 4], false));
        assert_eq!(verification.worst_layer(), None);
        observe(&mut verification, 6, 0.5);
        observe(&mut verification, 9, 0.0);
        let drift = &verification.layers()[1];
        assert!((drift.worst() - 0.1).abs() < 1e-7 && (drift.mean() - 0.05).abs() < 1e-7);
        // |3|·1 of |3|·1 + |2|·2 was skipped.
        assert!((drift.contribution_recall() - 4.0 / 7.0).abs() < 1e-7);
        let found = (verification.tokens(), verification.worst_layer());
        assert_eq!(found, (2, Some(1)));
    }

    #[test]
    fn a_layer_that_exceeds_its_error_bound_falls_back_once() {
        let verification = Verification::of_decoded(1, 2);
        let mut verification = verification.within(vec![0.05, 0.05], Policy::Exact);
        for token in 0..DRIFT_WINDOW {
            assert_eq!(
                observe(&mut verification, token, 0.25),
                None,
                "5% is within"
            );
        }
        let mut fallbacks = Vec::new();
        for token in DRIFT_WINDOW..3 * DRIFT_WINDOW {
            fallbacks.extend(observe(&mut verification, token, 1.0).map(|policy| (token, policy)));
        }
        assert_eq!(
            fallbacks,
            [(DRIFT_WINDOW, Policy::Exact)],
            "one token of 20% among 16"
        );
        let [alarm] = verification.alarms() else {
            panic!("one alarm expected")
        };
        assert_eq!((alarm.layer, alarm.position), (1, DRIFT_WINDOW));
        assert!(alarm.error > alarm.certified && alarm.certified == 0.05);
    }

    #[test]
    fn drift_summarises_its_errors() {
        let drift = Drift {
            errors: (0..200).map(|token| (token % 100) as f32 / 100.0).collect(),
            ..Drift::default()
        };
        assert!((drift.p99() - 0.98).abs() < 1e-6);
        // 84 … 99.
        assert!((drift.worst_window() - 0.915).abs() < 1e-6);
    }
}
