//! What a plan is expected to do besides decoding one sequence: many at once, and prompts.

use powerinfer_artifact::plan::{BatchSpeed, PROMPT_TOKENS, Plan};
use powerinfer_model::ModelConfig;
use powerinfer_solver::{Candidate, Problem};
use powerinfer_tensor::Format;

use crate::simulate::{
    engine::OURS,
    step::{Estimator, Kind, Pass, Placed},
};

/// Sequences that are decoded at once.
const BATCHES: [usize; 2] = [1, 8];

/// Writes into `plan` how fast it is expected to be, its layers going the ways `chosen`. The KV cache
/// counts as full, of all sequences together.
pub(crate) fn predict(
    plan: &mut Plan,
    problem: &Problem,
    config: &ModelConfig,
    quant: Format,
    chosen: &[&Candidate],
) {
    let placed = Placed::of(plan, problem, config, quant, chosen);
    let estimator = Estimator {
        engine: &OURS,
        hardware: &plan.hardware,
    };
    let context = plan.budget.context_tokens as f64;
    let speed = |tokens: usize, context: f64, kind| {
        let tokens = tokens as f64;
        let pass = Pass {
            tokens,
            context,
            kind,
        };
        tokens / estimator.pass(&placed, pass).total
    };
    let decode = BATCHES.map(|batch| BatchSpeed {
        batch,
        tokens_per_second: speed(batch, context, Kind::Decode),
    });
    let prompt = PROMPT_TOKENS.min(plan.budget.context_tokens as usize);
    // Half of a prompt is behind a token of it on average.
    let prompt = speed(prompt, prompt as f64 / 2.0, Kind::Prompt);
    if let Some(forecast) = &mut plan.forecast {
        forecast.decode = decode.to_vec();
        forecast.prompt_tokens_per_second = Some(prompt);
    }
}
