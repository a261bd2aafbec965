//! Verdicts on completions of HumanEval's problems, and pass@k.

use powerinfer_artifact::Progress;
use powerinfer_model::LanguageModel;
use powerinfer_runtime::{Sampler, SamplingSettings};
use powerinfer_text::Tokenizer;

use super::{Problem, STOPS};
use crate::{
    Ends, EvalError, PythonSandbox, Sample, SampleFile, Verdict, complete,
    statistics::{Interval, Paired, bootstrap_mean, pass_at, share},
};

/// Settings of generated completions.
#[derive(Debug, Clone, Copy)]
pub struct SolveOptions {
    /// Completions of each problem.
    pub samples: usize,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    /// Most tokens of a completion.
    pub max_tokens: usize,
    /// Most tokens of prompt and completion together.
    pub context: usize,
    /// Seed of the sampling.
    pub seed: u64,
    /// Problems of the data before those that are completed: each problem has separate random streams.
    pub before: usize,
}

/// Verdicts on completions, one list per problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Results {
    /// Verdicts in the order of problems and completions.
    pub verdicts: Vec<Vec<Verdict>>,
}

/// Completes every problem with `model` and judges the completions. Completions that `file` has are not generated again, new
/// ones are appended to it.
///
/// # Errors
///
/// Fails if the model does, if `file` cannot be written, or if the user asks to stop. A prompt longer than the context is
/// not an error: its verdict is `unjudged`.
pub fn solve<Model: LanguageModel + ?Sized>(
    model: &mut Model,
    tokenizer: &Tokenizer,
    problems: &[Problem],
    sandbox: &PythonSandbox,
    options: SolveOptions,
    mut file: Option<&mut SampleFile>,
    progress: &dyn Progress,
) -> Result<Results, EvalError> {
    let ends = Ends {
        max_tokens: options.max_tokens,
        context: options.context,
        texts: &STOPS,
    };
    let mut verdicts = vec![Vec::new(); problems.len()];
    for (index, problem) in problems.iter().enumerate() {
        for sample in 0..options.samples {
            let known = file
                .as_ref()
                .and_then(|file| file.find(&problem.task_id, sample));
            if let Some(known) = known {
                verdicts[index].push(known.verdict.clone());
                progress.advance(1)?;
                continue;
            }
            // A random stream per completion, so that a resumed run draws the same tokens.
            let index = options.before + index;
            let sampler = Sampler::new(SamplingSettings {
                temperature: options.temperature,
                seed: options.seed ^ ((((index << 16) | sample) as u64) << 20),
                ..SamplingSettings::default()
            })?;
            let prompt = &problem.prompt;
            let written = complete(model, tokenizer, prompt, ends, sampler, |_| ());
            let (completion, verdict) = match written {
                Ok(completion) => {
                    let verdict = problem.judge(&completion.text, sandbox);
                    (completion.text, verdict)
                }
                Err(error @ EvalError::PromptLength { .. }) => {
                    (String::new(), Verdict::Unjudged(error.to_string()))
                }
                Err(error) => return Err(error),
            };
            verdicts[index - options.before].push(verdict.clone());
            if let Some(file) = &mut file {
                file.push(Sample {
                    task_id: problem.task_id.clone(),
                    sample,
                    completion,
                    verdict,
                })?;
            }
            progress.advance(1)?;
        }
    }
    Ok(Results { verdicts })
}

impl Results {
    /// Judges `completions`, one list per problem.
    ///
    /// # Errors
    ///
    /// Fails if the user asks to stop.
    pub fn judge(
        problems: &[Problem],
        completions: &[Vec<String>],
        sandbox: &PythonSandbox,
        progress: &dyn Progress,
    ) -> Result<Self, EvalError> {
        let mut verdicts = vec![Vec::new(); problems.len()];
        for (index, (problem, completions)) in problems.iter().zip(completions).enumerate() {
            for completion in completions {
                verdicts[index].push(problem.judge(completion, sandbox));
                progress.advance(1)?;
            }
        }
        Ok(Self { verdicts })
    }

    /// Number of verdicts called `name`.
    pub fn count(&self, name: &str) -> usize {
        let all = self.verdicts.iter().flatten();
        all.filter(|verdict| verdict.name() == name).count()
    }

    /// pass@k of every problem with at least `k` completions that could be judged.
    pub fn pass_at(&self, k: u64) -> Vec<f64> {
        let of_problem = |verdicts: &Vec<Verdict>| {
            let judged = verdicts
                .iter()
                .filter(|verdict| !matches!(verdict, Verdict::Unjudged(_)));
            let passed = judged
                .clone()
                .filter(|verdict| **verdict == Verdict::Passed);
            pass_at(k, passed.count() as u64, judged.count() as u64)
        };
        self.verdicts.iter().filter_map(of_problem).collect()
    }

    /// Mean pass@k with its 95% interval and the number of its problems; none if no problem has `k` completions that
    /// could be judged. Wilson's interval if every problem has 0 or 1, else the bootstrap's, resampled with `seed`.
    pub fn mean_pass_at(&self, k: u64, seed: u64) -> Option<(Interval, usize)> {
        let values = self.pass_at(k);
        let is_binary = values.iter().all(|value| *value == 0.0 || *value == 1.0);
        let found = if is_binary {
            share(
                values.iter().sum::<f64>().round() as u64,
                values.len() as u64,
            )
        } else {
            bootstrap_mean(&values, seed)
        };
        (!values.is_empty()).then_some((found, values.len()))
    }

    /// Whether each problem's first completion passed; none if it could not be judged.
    fn first_passed(&self) -> impl Iterator<Item = Option<bool>> + '_ {
        self.verdicts.iter().map(|verdicts| match verdicts.first() {
            None | Some(Verdict::Unjudged(_)) => None,
            Some(verdict) => Some(*verdict == Verdict::Passed),
        })
    }

    /// Comparison with `baseline` by first completions, on the problems that could be judged for both.
    pub fn relative_to(&self, baseline: &Self) -> Paired {
        let pairs = baseline.first_passed().zip(self.first_passed());
        let (first, second): (Vec<bool>, Vec<bool>) = pairs.filter_map(|(a, b)| a.zip(b)).unzip();
        Paired::from_outcomes(&first, &second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_leaves_out_what_could_not_be_judged() {
        let unjudged = || Verdict::Unjudged("no module".to_owned());
        let results = Results {
            verdicts: vec![
                vec![Verdict::Passed, Verdict::Timeout],
                vec![unjudged(), Verdict::Passed],
                vec![unjudged(), unjudged()],
            ],
        };
        assert_eq!(results.pass_at(1), [0.5, 1.0]);
        assert_eq!(results.pass_at(2), [1.0]);
        let (mean, problems) = results.mean_pass_at(1, 0).unwrap();
        assert_eq!((mean.value, problems), (0.75, 2));
        assert_eq!(results.mean_pass_at(3, 0), None);
        assert_eq!(results.count("unjudged"), 3);
        // Only the first problem's first completion could be judged.
        assert_eq!(results.relative_to(&results).items, 1);
    }
}
