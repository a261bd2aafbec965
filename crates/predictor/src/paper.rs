//! The sizing of predictors in the paper (PowerInfer, SOSP'24, section 5.1), for comparison.
//!
//! Starting from a rank that follows from the layer's sparsity, a skewed layer's predictor is shrunk while its accuracy
//! holds, another one is grown until it is accurate. Accuracy is the recall at even odds (logit 0), as in the original.

use crate::{
    PredictorError,
    calibrate::recall_at_even_odds,
    search::{Search, Tried},
};

/// A layer is skewed if fewer neurons than this share have 80% of its activations: half of what uniform activity would
/// need.
const SKEWED: f64 = 0.4;

impl Search<'_> {
    /// The smallest accurate network that was found, or the largest within the budget.
    pub(crate) fn as_in_the_paper(&mut self) -> Result<Tried, PredictorError> {
        let mut index = self.guess(1.0);
        let mut best = self.try_rank(self.ladder[index], None)?;
        if self.known.most < SKEWED {
            while self.is_accurate(&best) && index > 0 {
                let smaller = self.try_rank(self.ladder[index - 1], Some(&best))?;
                if !self.is_accurate(&smaller) {
                    return Ok(best);
                }
                (best, index) = (smaller, index - 1);
            }
        }
        while !self.is_accurate(&best) && index + 1 < self.ladder.len() {
            index += 1;
            best = self.try_rank(self.ladder[index], Some(&best))?;
        }
        Ok(best)
    }

    fn is_accurate(&self, tried: &Tried) -> bool {
        let recall = recall_at_even_odds(&tried.network, &self.traces.held_out, self.isa);
        self.progress.detail(&format!(
            "layer {} rank {}: recall of {:.1}% at even odds",
            self.known.layer,
            tried.network.rank,
            100.0 * recall
        ));
        recall >= self.settings.targets.recall
    }
}
