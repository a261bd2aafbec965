//! Quality of a policy setting relative to `dense`, on the same texts and tasks.

use powerinfer_artifact::{
    Digest, Progress,
    plan::{Policy, Threshold},
};
use powerinfer_datasets::minipython::Task;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{LayerAudit, Sampler, SingleSession};
use powerinfer_text::Tokenizer;

use super::{FunctionResults, PolicySetting, Quality};
use crate::{
    Ends, EvalError, PythonSandbox, TextSize, Verdict, Windows, complete, fidelity,
    function_tasks::is_solved,
    human_eval::{self, Problem},
    scored_tokens,
    statistics::{Paired, share},
};

/// Token limit of a held-out task's solution.
const TASK_TOKENS: usize = 200;
/// Token limit of a HumanEval completion.
const PROBLEM_TOKENS: usize = 512;

/// Texts and tasks that every point of a sweep is judged on.
pub struct SweepItems {
    /// Texts to score, token ids each.
    pub texts: Vec<Vec<u32>>,
    /// The beginning of them, on which every neuron is counted.
    pub audited: Vec<Vec<u32>>,
    /// The beginning of them, on which each layer alone is judged; empty to leave that out.
    pub alone: Vec<Vec<u32>>,
    /// Windows that texts are scored in.
    pub windows: Windows,
    /// Size of the scored text.
    pub size: TextSize,
    /// Judge of tasks and problems; without it, both are left out.
    pub sandbox: Option<PythonSandbox>,
    /// Held-out function tasks to solve.
    pub tasks: Vec<Task>,
    /// HumanEval problems to solve.
    pub problems: Vec<Problem>,
    /// Seed of the tasks' inputs.
    pub seed: u64,
}

impl SweepItems {
    /// Digest of the texts.
    pub fn digest(&self) -> Digest {
        powerinfer_artifact::token_texts::digest(&self.texts)
    }

    /// Steps of progress to audit a policy setting and to judge it once.
    pub(super) fn steps(&self, setting: PolicySetting, layers: usize) -> u64 {
        let alone = if setting.is_lossless() {
            0
        } else {
            scored_tokens(&self.alone) * layers as u64
        };
        scored_tokens(&self.audited) + alone + self.judging()
    }

    /// Steps of progress to judge a model.
    pub(super) fn judging(&self) -> u64 {
        scored_tokens(&self.texts) + self.generation()
    }

    /// Steps of progress to generate all functions.
    pub(super) fn generation(&self) -> u64 {
        (self.tasks.len() + self.problems.len()) as u64 * FUNCTION_STEPS
    }
}

/// Steps of progress per function: about the tokens that could be scored in that time.
const FUNCTION_STEPS: u64 = 60;

/// Functions of one kind that a model generated: verdicts, none if they could not be judged, and a digest of all
/// completions.
#[derive(Debug, Clone)]
pub(super) struct Generated {
    name: &'static str,
    passed: Vec<Option<bool>>,
    completions: Digest,
}

/// Generates every function of `items` with `model`, greedily.
pub(super) fn generate(
    model: &mut SingleSession,
    tokenizer: &Tokenizer,
    items: &SweepItems,
    progress: &dyn Progress,
) -> Result<Vec<Generated>, EvalError> {
    let mut all = Vec::new();
    let Some(sandbox) = &items.sandbox else {
        return Ok(all);
    };
    if !items.tasks.is_empty() {
        let tasks = items.tasks.iter().map(|task| {
            let text = solution(model, tokenizer, task.prompt(), TASK_TOKENS, &[])?;
            let is_solved = is_solved(task, &text, items.seed, sandbox)?;
            Ok((text, Some(is_solved)))
        });
        all.push(Generated::collect("held-out tasks", tasks, progress)?);
    }
    if !items.problems.is_empty() {
        let problems = items.problems.iter().map(|problem| {
            let stops = &human_eval::STOPS;
            let text = match solution(model, tokenizer, &problem.prompt, PROBLEM_TOKENS, stops) {
                // A prompt longer than the context cannot be judged.
                Err(EvalError::PromptLength { .. }) => return Ok((String::new(), None)),
                text => text?,
            };
            let passed = match problem.judge(&text, sandbox) {
                Verdict::Unjudged(_) => None,
                verdict => Some(verdict == Verdict::Passed),
            };
            Ok((text, passed))
        });
        all.push(Generated::collect("HumanEval", problems, progress)?);
    }
    model.reset();
    Ok(all)
}

/// Greedy completion of `prompt`, at most `max_tokens` tokens and up to the first of `stops`.
fn solution(
    model: &mut SingleSession,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
    stops: &[&str],
) -> Result<String, EvalError> {
    let ends = Ends {
        max_tokens,
        context: model.context_limit(),
        texts: stops,
    };
    Ok(complete(model, tokenizer, prompt, ends, Sampler::greedy(), |_| ())?.text)
}

/// Quality of `other` relative to `dense`, which generated `by_dense`.
pub(super) fn judge_relative(
    dense: &mut SingleSession,
    other: &mut SingleSession,
    tokenizer: &Tokenizer,
    items: &SweepItems,
    by_dense: &[Generated],
    progress: &dyn Progress,
) -> Result<Quality, EvalError> {
    let found = fidelity(dense, other, &items.texts, items.windows, |tokens| {
        progress.advance(tokens).map_err(EvalError::from)
    })?;
    let rise = found.perplexity_rise();
    if [rise.value, rise.low, rise.high]
        .iter()
        .any(|end| !end.is_finite())
    {
        return Err(EvalError::NoProbabilities);
    }
    let likelihood = found.other();
    let written = generate(other, tokenizer, items, progress)?;
    let functions = by_dense.iter().zip(&written);
    Ok(Quality {
        tokens: found.tokens(),
        perplexity: likelihood.perplexity(),
        word_perplexity: Some(likelihood.word_perplexity(items.size.words))
            .filter(|one| one.is_finite()),
        bits_per_byte: likelihood.bits_per_byte(items.size.bytes),
        perplexity_rise: rise,
        minimum_detectable_rise: rise.half_width(),
        kl_divergence_mean: found.mean_divergence().value,
        kl_divergence_p99: found.divergence_p99(),
        top1_agreement: found.top1_agreement(),
        tokens_to_first_divergence: found.tokens_to_first_divergence(),
        texts_without_divergence: found.texts_without_divergence(),
        largest_logit_difference: found.largest_difference(),
        functions: functions
            .map(|(dense, other)| other.relative_to(dense))
            .collect(),
    })
}

impl Generated {
    /// Functions with their verdicts, as they are generated.
    fn collect(
        name: &'static str,
        functions: impl Iterator<Item = Result<(String, Option<bool>), EvalError>>,
        progress: &dyn Progress,
    ) -> Result<Self, EvalError> {
        let (mut passed, mut texts) = (Vec::new(), String::new());
        for function in functions {
            let (text, verdict) = function?;
            passed.push(verdict);
            texts += &format!("{}\n{text}\n", text.len());
            progress.advance(FUNCTION_STEPS)?;
        }
        Ok(Self {
            name,
            passed,
            completions: Digest::from_content(texts.as_bytes()),
        })
    }

    /// Comparison with dense's functions, on the items that could be judged for both.
    fn relative_to(&self, dense: &Self) -> FunctionResults {
        let pairs = dense.passed.iter().zip(&self.passed);
        let (first, second): (Vec<bool>, Vec<bool>) =
            pairs.filter_map(|(dense, own)| (*dense).zip(*own)).unzip();
        let paired = Paired::from_outcomes(&first, &second);
        let judged = self.passed.iter().flatten();
        let (items, passed) = (
            judged.clone().count() as u64,
            judged.filter(|passed| **passed).count() as u64,
        );
        FunctionResults {
            name: self.name.to_owned(),
            items,
            passed,
            unjudged: self.passed.len() as u64 - items,
            pass_at_1: (items > 0).then(|| share(passed, items)),
            pairs: paired.items,
            difference: paired.difference(),
            lost: paired.first_only,
            won: paired.second_only,
            p_value: paired.p_value(),
            minimum_detectable_effect: paired.minimum_detectable_effect(),
            completions: self.completions,
        }
    }
}

/// Counts active, predicted and computed neurons of `model`, which runs on the CPU, layer by layer.
pub(super) fn audit(
    model: &mut SingleSession,
    items: &SweepItems,
    progress: &dyn Progress,
) -> Result<Vec<LayerAudit>, EvalError> {
    model.experiments().begin_audit();
    for text in &items.audited {
        for (begin, end, new) in items.windows.over(text.len()) {
            model.reset();
            model.forward(&text[begin..end - 1])?;
            progress.advance(new as u64)?;
        }
    }
    model.reset();
    Ok(model.experiments().end_audit())
}

/// Relative rise of perplexity if each layer alone follows `setting`, one value per layer.
///
/// `alone` is opened with the setting and ends with every layer `dense`.
pub(super) fn layer_by_layer(
    dense: &mut SingleSession,
    alone: &mut SingleSession,
    setting: PolicySetting,
    thresholds: Option<&[Threshold]>,
    items: &SweepItems,
    progress: &dyn Progress,
) -> Result<Vec<f64>, EvalError> {
    let layers = alone.policies().len();
    for layer in 0..layers {
        alone.experiments().set_policy(layer, Policy::Dense, None)?;
    }
    let mut rises = Vec::new();
    for layer in 0..layers {
        alone.experiments().set_policy(
            layer,
            setting.policy(),
            thresholds.map(|all| all[layer]),
        )?;
        let found = fidelity(dense, alone, &items.alone, items.windows, |tokens| {
            progress.advance(tokens).map_err(EvalError::from)
        })?;
        rises.push(found.perplexity_rise().value);
        alone.experiments().set_policy(layer, Policy::Dense, None)?;
    }
    Ok(rises)
}
