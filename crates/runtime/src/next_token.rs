//! From tokens to the one that follows, with as little as possible on the way between device and host.

use powerinfer_model::ModelError;

use crate::{Runtime, Sampler, Stage, forward::executor};

/// The logits of the last token, wherever they are.
#[derive(Debug, Clone, PartialEq)]
pub enum LastLogits {
    /// One a token of the vocabulary.
    Here(Vec<f32>),
    /// On the device, until the next token.
    OnDevice,
}

impl Runtime {
    /// Appends `tokens`, of which there is one at least, for `sampler` to choose what follows: logits stay on a device
    /// that has the head, where the largest of them is all that counts.
    ///
    /// Fails as [`forward_last`](powerinfer_model::LanguageModel::forward_last) does.
    pub fn forward_for(
        &mut self,
        sampler: &Sampler,
        tokens: &[u32],
    ) -> Result<LastLogits, ModelError> {
        let last = self.last_hidden(tokens)?;
        match self.hybrid.as_mut().filter(|hybrid| hybrid.has_head()) {
            Some(hybrid) if sampler.takes_the_largest() => {
                let launched = hybrid.run_head(&last);
                launched.map_err(|error| executor(error.into()))?;
                self.statistics.mark(Stage::Head);
                Ok(LastLogits::OnDevice)
            }
            _ => Ok(LastLogits::Here(self.head(&last).map_err(executor)?)),
        }
    }

    /// Lets `sampler` choose a token, of the first `known` ones, by the logits that were computed last.
    pub fn sample(
        &mut self,
        sampler: &mut Sampler,
        logits: &LastLogits,
        known: usize,
    ) -> Result<u32, ModelError> {
        match (logits, &mut self.hybrid) {
            (LastLogits::OnDevice, Some(hybrid)) => {
                let token = hybrid.largest_logit(known);
                let token = token.map_err(|error| executor(error.into()))?;
                sampler.remember(token);
                Ok(token)
            }
            (LastLogits::OnDevice, None) => unreachable!("logits of a device there is none of"),
            (LastLogits::Here(logits), _) => Ok(sampler.sample(&logits[..known.min(logits.len())])),
        }
    }
}
