//! The paper's way to a predictor's size (PowerInfer, SOSP'24, section 5.1), to compare with.
//!
//! Begun at a size that the layer's sparsity suggests, the hidden layer of a skewed layer is made
//! smaller for as long as accuracy holds, that of another larger until accuracy is reached. Accuracy
//! is the share of firing neurons that are predicted at even odds, as the original decides.

use crate::{
    PredictorError,
    calibrate::recall_at_even_odds,
    train::{Search, Tried},
};

/// A layer is skewed where fewer neurons than this share carry 80 % of its activations: half of
/// what they would be if all fired alike.
const SKEWED: f64 = 0.4;

impl Search<'_> {
    /// The smallest network found that is accurate, or the largest within the budget.
    pub(crate) fn as_the_paper_does(&mut self) -> Result<Tried, PredictorError> {
        let mut place = self.guess();
        let mut best = self.try_rank(self.ladder[place], None)?;
        if self.known.most < SKEWED {
            while self.is_accurate(&best) && place > 0 {
                let smaller = self.try_rank(self.ladder[place - 1], Some(&best))?;
                if !self.is_accurate(&smaller) {
                    return Ok(best);
                }
                (best, place) = (smaller, place - 1);
            }
        }
        while !self.is_accurate(&best) && place + 1 < self.ladder.len() {
            place += 1;
            best = self.try_rank(self.ladder[place], Some(&best))?;
        }
        Ok(best)
    }

    fn is_accurate(&self, tried: &Tried) -> bool {
        let recall = recall_at_even_odds(&tried.network, &self.traces.held_out, self.isa);
        self.progress.detail(&format!(
            "layer {} rank {}: {:.1} % of the neurons predicted at even odds",
            self.known.layer,
            tried.network.rank,
            100.0 * recall
        ));
        recall >= self.settings.targets.recall
    }
}
