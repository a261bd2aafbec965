//! What computing fewer neurons costs, beside `dense` on the same items.

use anyhow::{Result, bail};
use powerinfer_artifact::{
    Digest, Progress,
    plan::{Policy, Threshold},
};
use powerinfer_datasets::minipython::Task;
use powerinfer_eval::{
    Ends, EvalError, Windows, complete, fidelity,
    function_tasks::{self, judge},
    human_eval::{self, Judge, Problem},
    statistics::{Paired, share},
};
use powerinfer_model::{LanguageModel, greedy_token};
use powerinfer_runtime::{LayerAudit, Runtime};
use powerinfer_text::Tokenizer;

use super::{
    levels::Level,
    rows::{Functions, Quality},
};
use crate::{commands::eval_text::Extent, progress::Bar};

/// Most tokens of a held-out task's solution.
const TASK_TOKENS: usize = 200;
/// Most tokens of a HumanEval completion.
const PROBLEM_TOKENS: usize = 512;

/// What models are judged on.
pub(crate) struct Items {
    pub(crate) texts: Vec<Vec<u32>>,
    /// Those that are looked at neuron by neuron, a part of the others.
    pub(crate) audited: Vec<Vec<u32>>,
    /// Those that every layer alone is judged on; none where that is not asked for.
    pub(crate) alone: Vec<Vec<u32>>,
    pub(crate) windows: Windows,
    /// How much of them is scored.
    pub(crate) extent: Extent,
    pub(crate) tasks: Vec<Task>,
    pub(crate) problems: Vec<Problem>,
    pub(crate) seed: u64,
}

/// Tokens of `texts` that are scored.
pub(crate) fn scored(texts: &[Vec<u32>]) -> u64 {
    let counts = texts.iter().map(|text| text.len().saturating_sub(1) as u64);
    counts.sum()
}

/// The beginning of `texts`, so many tokens of it.
pub(crate) fn beginning(texts: &[Vec<u32>], tokens: usize) -> Vec<Vec<u32>> {
    let mut left = tokens;
    let mut taken = Vec::new();
    for text in texts {
        let count = text.len().min(left);
        if left < 2 {
            break;
        }
        if count < 2 {
            continue;
        }
        taken.push(text[..count].to_vec());
        left -= count;
    }
    taken
}

impl Items {
    /// Digest of the tokens that are scored.
    pub(crate) fn digest(&self) -> Digest {
        powerinfer_artifact::token_texts::digest(&self.texts)
    }

    /// Steps of progress that looking at a level takes, and judging it once.
    pub(crate) fn steps(&self, level: Level, layers: usize) -> u64 {
        let alone = match level.is_lossless() {
            true => 0,
            false => scored(&self.alone) * layers as u64,
        };
        scored(&self.audited) + alone + self.judging()
    }

    /// Steps of progress that judging a model takes.
    pub(crate) fn judging(&self) -> u64 {
        scored(&self.texts) + self.written()
    }

    /// Steps of progress of what is written.
    pub(crate) fn written(&self) -> u64 {
        // Writing a function takes about as long as reading so many tokens.
        (self.tasks.len() + self.problems.len()) as u64 * FUNCTION_STEPS
    }
}

/// Steps of progress that a function counts.
const FUNCTION_STEPS: u64 = 60;

/// What a model wrote: whether each item passed, where that could be judged, and a digest of all completions.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    name: &'static str,
    passed: Vec<Option<bool>>,
    completions: Digest,
}

/// Lets `model` write every function.
pub(crate) fn write(
    model: &mut Runtime,
    tokenizer: &Tokenizer,
    items: &Items,
    bar: &Bar,
) -> Result<Vec<Written>> {
    let ends = |max_tokens: usize, texts: &'static [&'static str], context: usize| Ends {
        max_tokens,
        context,
        texts,
    };
    let context = model.context_limit();
    let mut all = Vec::new();
    let mut of_kind =
        |name, count, one: &mut dyn FnMut(usize) -> Result<(String, Option<bool>)>| {
            if count == 0 {
                return Ok(());
            }
            let (mut passed, mut texts) = (Vec::new(), String::new());
            for index in 0..count {
                let (text, verdict) = one(index)?;
                passed.push(verdict);
                texts += &format!("{}\n{text}\n", text.len());
                bar.advance(FUNCTION_STEPS)?;
            }
            all.push(Written {
                name,
                passed,
                completions: Digest::of(texts.as_bytes()),
            });
            anyhow::Ok(())
        };
    of_kind("held-out tasks", items.tasks.len(), &mut |index| {
        let task = &items.tasks[index];
        let ends = ends(TASK_TOKENS, &[], context);
        let written = complete(model, tokenizer, task.prompt(), ends, greedy_token, |_| ())?;
        let verdict = judge(task, &written.text, items.seed);
        Ok((
            written.text,
            Some(verdict == function_tasks::Verdict::Passed),
        ))
    })?;
    of_kind("HumanEval", items.problems.len(), &mut |index| {
        let problem = &items.problems[index];
        let ends = ends(PROBLEM_TOKENS, &human_eval::STOPS, context);
        let written = complete(
            model,
            tokenizer,
            &problem.prompt,
            ends,
            greedy_token,
            |_| (),
        );
        let text = match written {
            Ok(written) => written.text,
            // It is longer than the context: nobody can say how the model would have done.
            Err(EvalError::PromptLength { .. }) => return Ok((String::new(), None)),
            Err(error) => return Err(error.into()),
        };
        let verdict = match problem.judge(&text, &Judge::Embedded) {
            human_eval::Verdict::Unjudged(_) => None,
            verdict => Some(verdict == human_eval::Verdict::Passed),
        };
        Ok((text, verdict))
    })?;
    model.reset();
    Ok(all)
}

/// Judges `other` beside `dense`, which has written `by_dense`.
pub(crate) fn judged(
    dense: &mut Runtime,
    other: &mut Runtime,
    tokenizer: &Tokenizer,
    items: &Items,
    by_dense: &[Written],
    bar: &Bar,
) -> Result<Quality> {
    let found = fidelity(dense, other, &items.texts, items.windows, |tokens| {
        bar.advance(tokens).map_err(anyhow::Error::from)
    })?;
    let rise = found.rise_interval(items.seed);
    if [rise.value, rise.low, rise.high]
        .iter()
        .any(|end| !end.is_finite())
    {
        bail!(
            "the model gives no probabilities that could be compared: some of its logits are no numbers, or far too large"
        );
    }
    let likelihood = found.other();
    let written = write(other, tokenizer, items, bar)?;
    let functions = by_dense.iter().zip(&written);
    Ok(Quality {
        tokens: found.tokens(),
        perplexity: likelihood.perplexity(),
        word_perplexity: Some(likelihood.word_perplexity(items.extent.words))
            .filter(|one| one.is_finite()),
        bits_per_byte: likelihood.bits_per_byte(items.extent.bytes),
        perplexity_rise: rise.into(),
        smallest_visible_rise: rise.half_width(),
        kl_divergence_mean: found.mean_divergence().value,
        kl_divergence_p99: found.divergence_p99(),
        top1_agreement: found.agreement(),
        tokens_to_first_divergence: found.first_divergence(),
        texts_without_divergence: found.undiverged(),
        largest_logit_difference: found.largest_difference(),
        functions: functions
            .map(|(dense, other)| other.beside(dense))
            .collect(),
    })
}

impl Written {
    /// Beside what `dense` wrote, on the items that both could be judged on.
    fn beside(&self, dense: &Self) -> Functions {
        let pairs = dense.passed.iter().zip(&self.passed);
        let (first, second): (Vec<bool>, Vec<bool>) =
            pairs.filter_map(|(dense, own)| (*dense).zip(*own)).unzip();
        let paired = Paired::of(&first, &second);
        let judged = self.passed.iter().flatten();
        let (items, passed) = (
            judged.clone().count() as u64,
            judged.filter(|passed| **passed).count() as u64,
        );
        Functions {
            name: self.name.to_owned(),
            items,
            passed,
            unjudged: self.passed.len() as u64 - items,
            pass_at_1: (items > 0).then(|| share(passed, items).into()),
            pairs: paired.items,
            difference: paired.difference(),
            lost: paired.first_only,
            won: paired.second_only,
            p_value: paired.p_value(),
            smallest_visible: paired.smallest_visible(),
            completions: self.completions,
        }
    }
}

/// What `model`, which runs on the CPU, chooses beside what fires.
pub(crate) fn audit(model: &mut Runtime, items: &Items, bar: &Bar) -> Result<Vec<LayerAudit>> {
    model.begin_audit();
    for text in &items.audited {
        for (begin, end, new) in items.windows.over(text.len()) {
            model.reset();
            model.forward(&text[begin..end - 1])?;
            bar.advance(new as u64)?;
        }
    }
    model.reset();
    Ok(model.end_audit())
}

/// By how much perplexity rises where each layer alone follows `level`, whose settings `alone` has; it comes back with
/// every layer dense.
pub(crate) fn layer_by_layer(
    dense: &mut Runtime,
    alone: &mut Runtime,
    level: Level,
    thresholds: Option<&[Threshold]>,
    items: &Items,
    bar: &Bar,
) -> Result<Vec<f64>> {
    let layers = alone.policies().len();
    for layer in 0..layers {
        alone.set_policy(layer, Policy::Dense, None)?;
    }
    let mut rises = Vec::new();
    for layer in 0..layers {
        alone.set_policy(layer, level.policy(), thresholds.map(|all| all[layer]))?;
        let found = fidelity(dense, alone, &items.alone, items.windows, |tokens| {
            bar.advance(tokens).map_err(anyhow::Error::from)
        })?;
        rises.push(found.rise().value);
        alone.set_policy(layer, Policy::Dense, None)?;
    }
    Ok(rises)
}
