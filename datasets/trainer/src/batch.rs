//! Batches: whole texts laid end to end, without padding; attention stays inside each text.

use anyhow::anyhow;
use powerinfer_datasets::minipython::Task;
use tokenizers::Tokenizer;

use crate::tokenizer::{BEGIN, END};

/// Weight of a prompt's tokens in the loss, where a solution's weigh 1: what a task asks cannot
/// be predicted, and a small model should not spend itself on it.
const PROMPT_WEIGHT: f32 = 0.2;

/// Texts laid end to end.
#[derive(Clone, Default)]
pub(crate) struct Batch {
    /// Token ids.
    pub(crate) tokens: Vec<u32>,
    /// The token after each, what the model should say.
    pub(crate) targets: Vec<u32>,
    /// What each target weighs in the loss.
    pub(crate) weights: Vec<f32>,
    /// Where each text begins, and the end of the last.
    pub(crate) bounds: Vec<usize>,
    /// Where each text's solution begins among the targets.
    pub(crate) solutions: Vec<usize>,
}

impl Batch {
    /// An empty batch.
    pub(crate) fn new() -> Self {
        Self {
            bounds: vec![0],
            ..Self::default()
        }
    }

    /// Appends a task's text. Its prompt's tokens are a prefix of the whole text's tokens.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, task: &Task) -> anyhow::Result<()> {
        let encode = |text: &str| -> anyhow::Result<Vec<u32>> {
            let encoding = tokenizer
                .encode_fast(text, false)
                .map_err(|error| anyhow!("{error}"))?;
            Ok(encoding.get_ids().to_vec())
        };
        let prompt = encode(task.prompt())?.len() + 1;
        let mut ids = vec![BEGIN];
        ids.extend(encode(&task.text())?);
        ids.push(END);
        let start = self.tokens.len();
        self.tokens.extend(&ids[..ids.len() - 1]);
        self.targets.extend(&ids[1..]);
        self.weights
            .extend((1..ids.len()).map(|index| if index < prompt { PROMPT_WEIGHT } else { 1.0 }));
        self.bounds.push(self.tokens.len());
        self.solutions.push(start + prompt - 1);
        Ok(())
    }

    /// Fills a batch with about `tokens` tokens.
    pub(crate) fn fill(
        tokenizer: &Tokenizer,
        tasks: &mut impl Iterator<Item = Task>,
        tokens: usize,
    ) -> anyhow::Result<Self> {
        let mut batch = Self::new();
        while batch.tokens.len() < tokens {
            let task = tasks
                .next()
                .ok_or_else(|| anyhow!("the task generator ended"))?;
            batch.push(tokenizer, &task)?;
        }
        Ok(batch)
    }
}
