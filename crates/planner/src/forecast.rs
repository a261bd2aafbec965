//! Forecast of a plan: tokens per second of decoding batches and of prompts.

use powerinfer_artifact::plan::{BatchSpeed, PROMPT_TOKENS, Plan};
use powerinfer_model::ModelConfig;
use powerinfer_solver::{Candidate, Problem};
use powerinfer_tensor::Format;

use crate::{
    expert_cache,
    simulate::{
        engine::Engine,
        step::{Estimator, Kind, Pass, Placed},
    },
};

/// Batch sizes of the forecast.
const BATCHES: [usize; 2] = [1, 8];

/// Adds the forecast to `plan`, whose layers have the candidates `chosen`. First [chooses](expert_cache::choose) the layers whose experts
/// are replaced while the model runs, from the reuse of experts in `hits`. The KV cache counts as full, all sequences together.
pub(crate) fn predict(
    plan: &mut Plan,
    problem: &Problem,
    config: &ModelConfig,
    quant: Format,
    chosen: &[&Candidate],
    hits: &[&[f32]],
) {
    let (cached, copying) = expert_cache::choose(plan, problem, config, quant, chosen, hits);
    let cached: Vec<&Candidate> = cached.iter().collect();
    let decoding = Placed::new(plan, problem, config, quant, &cached);
    let placed = Placed::new(plan, problem, config, quant, chosen);
    let engine = Engine::of_plan(plan, config);
    let estimator = Estimator {
        engine: &engine,
        hardware: &plan.hardware,
    };
    let context = plan.budget.context_tokens as f64;
    let decode = BATCHES.map(|batch| {
        let tokens = batch as f64;
        let pass = Pass {
            tokens,
            context,
            kind: Kind::Decode,
        };
        BatchSpeed {
            batch,
            tokens_per_second: tokens / (estimator.pass(&decoding, pass).total + tokens * copying),
        }
    });
    let prompt = PROMPT_TOKENS.min(plan.budget.context_tokens as usize);
    let prompt = prompt as f64 / estimator.prompt(&placed, prompt);
    if let Some(forecast) = &mut plan.forecast {
        forecast.decode = decode.to_vec();
        forecast.prompt_tokens_per_second = Some(prompt);
    }
}
