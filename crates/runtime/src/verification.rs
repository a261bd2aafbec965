//! A net at run time: some tokens' FFNs are computed in full too, and the difference is told; a
//! layer whose difference leaves the band that it was certified for is computed in full from then on.

use std::collections::VecDeque;

use powerinfer_artifact::plan::Policy;
use powerinfer_tensor::Matrix;

/// Verified tokens whose mean error is compared with the band: one odd token is no drift.
pub const WINDOW: usize = 16;

/// By how much of itself the mean may leave the band.
const SLACK: f64 = 0.1;

/// Which tokens are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    /// One in so many of those decoded alone, by position.
    Decoded(usize),
    /// Every token of every pass.
    All,
}

/// What recomputing found, over the tokens that were verified.
#[derive(Debug, Clone)]
pub struct Verification {
    which: Which,
    layers: Vec<Drift>,
    /// Per layer, `‖down_i‖` of every neuron; filled when it is first needed.
    norms: Vec<Vec<f32>>,
    /// Per layer, what the mean error of [`WINDOW`] tokens may be.
    bands: Vec<f64>,
    /// What layers fall back to.
    fallback: Policy,
    alarms: Vec<Alarm>,
}

/// A layer that left its band.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alarm {
    /// The layer.
    pub layer: usize,
    /// Position of the token at which it did.
    pub position: usize,
    /// Mean relative error over the last [`WINDOW`] verified tokens.
    pub error: f64,
    /// The largest that was certified.
    pub certified: f64,
    /// What the layer follows from now on.
    pub fallback: Policy,
}

/// How far a layer's FFN output was from the exact one, and what was missed of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Drift {
    /// Relative error `‖sparse − exact‖ / ‖exact‖` of every token verified.
    errors: Vec<f32>,
    /// The last of them.
    recent: VecDeque<f64>,
    /// Sum of the shares of `Σ|h_i|·‖down_i‖` that came from neurons that were computed.
    recalled: f64,
}

impl Drift {
    /// Tokens verified.
    pub fn tokens(&self) -> usize {
        self.errors.len()
    }

    /// Relative errors, token after token.
    pub fn errors(&self) -> &[f32] {
        &self.errors
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

    /// The error that 99 % of the tokens stay below.
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

    /// The largest mean over [`WINDOW`] consecutive tokens, or over all where there are fewer.
    pub fn worst_window(&self) -> f64 {
        let mean = |errors: &[f32]| {
            let sum: f64 = errors.iter().copied().map(f64::from).sum();
            sum / errors.len().max(1) as f64
        };
        let windows = self.errors.windows(WINDOW).map(mean);
        windows.fold(
            if self.tokens() < WINDOW {
                self.mean()
            } else {
                0.0
            },
            f64::max,
        )
    }

    /// Mean share of `Σ|h_i|·‖down_i‖` that came from neurons that were computed.
    pub fn contribution_recall(&self) -> f64 {
        match self.tokens() {
            0 => 1.0,
            tokens => self.recalled / tokens as f64,
        }
    }
}

/// One layer's FFN, as the policy has it and in full.
pub(crate) struct Observation<'a> {
    /// Hidden states before, `[tokens, hidden]`.
    pub(crate) before: &'a [f32],
    /// And after: the policy's.
    pub(crate) sparse: &'a [f32],
    /// And in full.
    pub(crate) exact: &'a [f32],
    /// Per token, neurons that the policy computed.
    pub(crate) computed: &'a [Vec<(u32, f32)>],
    /// Per token, all neurons with their `h_i`.
    pub(crate) products: &'a [Vec<(u32, f32)>],
    /// Row i is what neuron i adds.
    pub(crate) down: &'a Matrix<'a>,
}

impl Verification {
    /// Verifies one decoded token in `every`.
    pub fn of_decoded(every: usize, layers: usize) -> Self {
        Self::new(Which::Decoded(every.max(1)), layers)
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
            bands: vec![f64::INFINITY; layers],
            fallback: Policy::Dense,
            alarms: Vec::new(),
        }
    }

    /// From now on a layer follows `fallback` once the mean error of [`WINDOW`] verified tokens
    /// is more than its entry of `bands` allows.
    #[must_use]
    pub fn within(mut self, bands: Vec<f64>, fallback: Policy) -> Self {
        (self.bands, self.fallback) = (bands, fallback);
        self
    }

    /// Whether a pass over the tokens at `positions` is verified.
    pub(crate) fn wants(&self, positions: &[usize]) -> bool {
        match self.which {
            Which::Decoded(every) => {
                matches!(positions, [position] if position.is_multiple_of(every))
            }
            Which::All => true,
        }
    }

    /// Takes in what `layer` gave for the tokens at `positions`; returns what the layer is to
    /// follow from now on, where that changes.
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
            drift.recalled += recalled(computed, products, norms);
            drift.recent.push_back(error);
            if drift.recent.len() > WINDOW {
                drift.recent.pop_front();
            }
            let mean = drift.recent.iter().sum::<f64>() / WINDOW as f64;
            let certified = self.bands[layer];
            if drift.recent.len() == WINDOW && mean > certified * (1.0 + SLACK) {
                self.bands[layer] = f64::INFINITY; // told once
                fallback = Some(self.fallback);
                self.alarms.push(Alarm {
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

    /// Tokens that were verified.
    pub fn tokens(&self) -> usize {
        self.layers.iter().map(Drift::tokens).max().unwrap_or(0)
    }

    /// The layers, by index.
    pub fn layers(&self) -> &[Drift] {
        &self.layers
    }

    /// Layers that left their band, in the order in which they did.
    pub fn alarms(&self) -> &[Alarm] {
        &self.alarms
    }

    /// Mean relative error over the layers.
    pub fn mean(&self) -> f64 {
        self.layers.iter().map(Drift::mean).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// Mean over the layers of the relative errors of the token verified last; none before that.
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

    /// The layer that is furthest off on average; none where nothing was verified.
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

/// Share of `Σ|h_i|·‖down_i‖` of `products` that is of neurons in `computed`, both in order within
/// each side of the layer.
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

    /// Two neurons whose rows of down have the lengths 1 and 2.
    fn down() -> OwnedMatrix {
        pack(Format::F32, 2, 2, &[1.0, 0.0, 0.0, 2.0])
    }

    /// Shows layer 1 a token whose FFN adds `[3, 4]`, of which the policy leaves out `missed`.
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
    fn errors_are_relative_to_what_the_ffn_adds() {
        let mut verification = Verification::of_decoded(3, 2);
        assert!(verification.wants(&[6]) && !verification.wants(&[7]));
        assert!(!verification.wants(&[6, 7]), "a prompt");
        assert!(Verification::of_all(2).wants(&[0, 1, 2, 3, 4]));
        assert_eq!(verification.worst_layer(), None);
        observe(&mut verification, 6, 0.5);
        observe(&mut verification, 9, 0.0);
        let drift = &verification.layers()[1];
        assert!((drift.worst() - 0.1).abs() < 1e-7 && (drift.mean() - 0.05).abs() < 1e-7);
        // |3|·1 of |3|·1 + |2|·2 was left out.
        assert!((drift.contribution_recall() - 4.0 / 7.0).abs() < 1e-7);
        let found = (verification.tokens(), verification.worst_layer());
        assert_eq!(found, (2, Some(1)));
    }

    #[test]
    fn a_layer_that_leaves_its_band_falls_back_once() {
        let verification = Verification::of_decoded(1, 2);
        let mut verification = verification.within(vec![0.05, 0.05], Policy::Exact);
        for token in 0..WINDOW {
            assert_eq!(
                observe(&mut verification, token, 0.25),
                None,
                "5 % is within"
            );
        }
        let mut told = Vec::new();
        for token in WINDOW..3 * WINDOW {
            told.extend(observe(&mut verification, token, 1.0).map(|policy| (token, policy)));
        }
        assert_eq!(
            told,
            [(WINDOW, Policy::Exact)],
            "one token of 20 % among 16"
        );
        let [alarm] = verification.alarms() else {
            panic!("one alarm expected")
        };
        assert_eq!((alarm.layer, alarm.position), (1, WINDOW));
        assert!(alarm.error > alarm.certified && alarm.certified == 0.05);
    }

    #[test]
    fn figures_of_a_drift_are_those_of_its_errors() {
        let drift = Drift {
            errors: (0..200).map(|token| (token % 100) as f32 / 100.0).collect(),
            ..Drift::default()
        };
        assert!((drift.p99() - 0.98).abs() < 1e-6);
        // 84 … 99.
        assert!((drift.worst_window() - 0.915).abs() < 1e-6);
    }
}
