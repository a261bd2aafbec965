//! Request and answer of a simulation.

use powerinfer_artifact::{
    ByteSize,
    hardware::{Hardware, ModelShape},
    plan::{Budget, Plan, Policy},
};
use powerinfer_model::ModelConfig;
use powerinfer_tensor::Format;
use serde::Serialize;

use crate::PlannerError;

use super::{
    engine::{Engine, LLAMA_CPP, LLAMA_CPP_2023, LLAMA_CPP_KV_NUMBER_BYTES, ORIGINAL, OURS},
    published::Activity,
    step::{Estimator, Kind, Pass, Placed},
    subject::{Solved, Subject, model_bytes, rank},
};

/// Numbers of requests that decode together.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// A model's shape, a machine, and a workload.
pub struct Request {
    /// Name of the shape.
    pub name: String,
    /// Its configuration.
    pub config: ModelConfig,
    /// The machine.
    pub hardware: Hardware,
    /// Memory budget and context length.
    pub budget: Budget,
    /// Format of the weights.
    pub quant: Format,
    /// Activity of the neurons.
    pub activity: Activity,
    /// Whether the skew was given and must be kept.
    pub is_skew_given: bool,
    /// Policy of every layer; `None` for the fastest of each layer.
    pub policy: Option<Policy>,
    /// Share of every layer's neurons on the GPU; `None` for the solver's choice.
    pub hot: Option<f64>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens to generate.
    pub tokens: usize,
    /// Whether to estimate the llama.cpp of the paper's time, not the current one.
    pub is_of_2023: bool,
}

/// Estimates for a request.
#[derive(Debug, Clone, Serialize)]
pub struct Answer {
    /// The model.
    pub model: Model,
    /// Assumed activity of the neurons, with sources.
    pub activity: Activity,
    /// Quality of the placement.
    #[serde(flatten)]
    pub solver: Solver,
    /// Estimate for each engine.
    pub engines: Vec<EngineAnswer>,
    /// This engine's placement.
    pub plan: Plan,
    /// Given share of hot neurons; it affects the speed of this engine only.
    #[serde(skip)]
    pub hot: Option<f64>,
}

/// Sizes of the model.
#[derive(Debug, Clone, Serialize)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Bytes of its weights.
    pub bytes: u64,
    /// Format of the weights.
    pub quant: String,
    /// Hidden units of each layer's predictor; 0 for none.
    pub predictor_rank: usize,
}

/// Quality of the placement.
#[derive(Debug, Clone, Serialize)]
pub struct Solver {
    /// Solver that found it.
    pub backend: String,
    /// Value of the objective.
    pub objective: f64,
    /// Bound on the objective of every plan.
    pub bound: f64,
    /// Distance between objective and bound, as a share of the bound.
    pub gap: f64,
    /// Time to solve.
    pub solve_seconds: f64,
}

/// Estimates for one engine.
#[derive(Debug, Clone, Serialize)]
pub struct EngineAnswer {
    /// Name of the engine.
    pub name: &'static str,
    /// Reason why it cannot run the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Estimated speed, if it can.
    #[serde(flatten)]
    pub speed: Option<Speed>,
}

/// Estimated speed, and share of the model on the GPU.
#[derive(Debug, Clone, Serialize)]
pub struct Speed {
    /// Kind of placement: `neurons`, or the number of whole layers on the GPU.
    pub placement: String,
    /// Share of all FFN neurons that are on the GPU.
    pub hot_neurons: f64,
    /// Share of the activations of these neurons.
    pub hot_share: f64,
    /// Share of the weights that a token reads, attention included, on the GPU.
    pub gpu_load: f64,
    /// Decoding, by the number of requests that decode together.
    pub decode: Vec<Decode>,
    /// Throughput of the prompt.
    pub prompt_tokens_per_second: f64,
    /// One request, from prompt to last token.
    pub request: RequestTime,
}

/// Decoding of several requests at once.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Decode {
    /// Requests that decode together.
    pub requests: u32,
    /// Throughput of all requests together.
    pub tokens_per_second: f64,
    /// Time between two tokens of a request.
    pub milliseconds: f64,
    /// Time during which the GPU works.
    pub gpu_milliseconds: f64,
    /// Time during which the CPU works.
    pub cpu_milliseconds: f64,
    /// Synchronisation.
    pub sync_milliseconds: f64,
}

/// One request, from prompt to last token.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RequestTime {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub tokens: usize,
    /// Time of the prompt.
    pub prompt_seconds: f64,
    /// Time of the whole request.
    pub seconds: f64,
    /// Generated tokens over all seconds.
    pub tokens_per_second: f64,
}

impl Request {
    /// Estimates the speed of this engine, of PowerInfer as published, and of llama.cpp.
    ///
    /// # Errors
    ///
    /// No power law has this sparsity and skew, the policy is not possible for the model, no placement keeps the budget, or
    /// the given share of hot neurons exceeds the VRAM.
    pub fn answer(mut self) -> Result<Answer, PlannerError> {
        let config = &self.config;
        let layers = config.layer_count;
        let selected = match &config.experts {
            Some(experts) => Some(self.activity.selections(experts, self.is_skew_given)?),
            None => None,
        };
        let frequencies = match &selected {
            Some(selected) => {
                let active = 1.0 - self.activity.sparsity.value;
                vec![selected.iter().map(|selected| selected * active).collect(); layers]
            }
            None => {
                let neurons = config.ffn_size;
                self.activity
                    .frequencies(layers, neurons, self.is_skew_given)?
            }
        };
        let subject = Subject {
            config,
            quant: self.quant,
            frequencies: &frequencies,
            selected: selected.as_deref(),
            rank: rank(config, self.activity.predictor_share.value),
            budget: &self.budget,
            hardware: &self.hardware,
        };
        let solved = subject.solve(self.policy)?;
        let mut placed = subject.placed(&solved);
        if let Some(share) = self.hot {
            self.redraw(&solved, &mut placed, share)?;
        }
        let mut engines = vec![EngineAnswer {
            name: OURS.name,
            warning: None,
            speed: Some(self.speed(
                &Engine::of_plan(&solved.decision.plan, config),
                &placed,
                "neurons".to_owned(),
            )),
        }];
        if config.activation.has_exact_zeros() && subject.rank > 0 {
            engines.push(match subject.solve_as_published() {
                Ok(solved) => {
                    let placed = subject.placed(&solved);
                    EngineAnswer {
                        name: ORIGINAL.name,
                        warning: None,
                        speed: Some(self.speed(&ORIGINAL, &placed, "neurons".to_owned())),
                    }
                }
                Err(error) => EngineAnswer {
                    name: ORIGINAL.name,
                    warning: Some(error.to_string()),
                    speed: None,
                },
            });
        }
        engines.push(self.llama_cpp(&subject));
        let decision = solved.decision;
        Ok(Answer {
            model: Model {
                name: self.name,
                parameters: config.parameters(),
                bytes: model_bytes(config, self.quant),
                quant: self.quant.to_string(),
                predictor_rank: subject.rank,
            },
            activity: self.activity,
            solver: Solver {
                backend: decision.plan.solver.backend.clone(),
                objective: decision.plan.solver.objective,
                bound: decision.plan.solver.bound,
                gap: decision.plan.solver.gap,
                solve_seconds: decision.report.solve_seconds,
            },
            engines,
            hot: self.hot,
            plan: decision.plan,
        })
    }

    /// Puts the hottest `share` of every layer's neurons on the GPU instead.
    fn redraw(
        &self,
        solved: &Solved,
        placed: &mut Placed<'_>,
        share: f64,
    ) -> Result<(), PlannerError> {
        let plan = &solved.decision.plan;
        let dense: u64 = plan.totals.gpu_bytes
            - plan
                .layers
                .iter()
                .map(|layer| layer.hot_count as u64 * layer.neuron_bytes)
                .sum::<u64>();
        let mut hot = 0;
        for layer in &mut placed.layers {
            let count = (share * layer.frequencies.len() as f64).round() as usize;
            let group = solved.problem.group_size;
            layer.hot_count = (count.div_ceil(group) * group).min(layer.frequencies.len());
            hot += layer.hot_count as u64 * layer.neuron_bytes;
        }
        if dense + hot > self.budget.vram_bytes {
            return Err(PlannerError::HotShare {
                share,
                hot,
                dense,
                budget: self.budget.vram_bytes,
            });
        }
        Ok(())
    }

    fn llama_cpp(&self, subject: &Subject<'_>) -> EngineAnswer {
        let engine = if self.is_of_2023 {
            &LLAMA_CPP_2023
        } else {
            &LLAMA_CPP
        };
        let all_active = match subject.selected {
            Some(selected) => selected.to_vec(),
            None => vec![1.0; self.config.ffn_size],
        };
        let (placed, count) = subject.by_layers(LLAMA_CPP_KV_NUMBER_BYTES, &all_active);
        let on_cpu = subject.cpu_bytes(&placed);
        if on_cpu > self.budget.ram_bytes {
            return EngineAnswer {
                name: LLAMA_CPP.name,
                warning: Some(format!(
                    "the parts on the CPU take {}, the budget is {}",
                    ByteSize(on_cpu),
                    ByteSize(self.budget.ram_bytes)
                )),
                speed: None,
            };
        }
        let what = match subject.selected {
            Some(_) => "experts of ",
            None => "",
        };
        let placement = format!("{what}{count} of {} layers", self.config.layer_count);
        EngineAnswer {
            name: LLAMA_CPP.name,
            warning: None,
            speed: Some(self.speed(engine, &placed, placement)),
        }
    }

    fn speed(&self, engine: &Engine, placed: &Placed<'_>, placement: String) -> Speed {
        let shape = ModelShape {
            format: self.quant,
            hidden: self.config.hidden_size,
            neurons: self.config.ffn_size,
            vocabulary: self.config.vocabulary_size,
        };
        let hardware = self.hardware.for_model(shape, &engine.rates);
        let estimator = Estimator {
            engine,
            hardware: &hardware,
        };
        // Mean context while decoding.
        let context = self.prompt as f64 + self.tokens as f64 / 2.0;
        let decode = |requests: u32| {
            let time = estimator.pass(
                placed,
                Pass {
                    tokens: f64::from(requests),
                    context: f64::from(requests) * context,
                    kind: Kind::Decode,
                },
            );
            Decode {
                requests,
                tokens_per_second: f64::from(requests) / time.total,
                milliseconds: 1e3 * time.total,
                gpu_milliseconds: 1e3 * time.gpu,
                cpu_milliseconds: 1e3 * time.cpu,
                sync_milliseconds: 1e3 * time.sync,
            }
        };
        let prompt_seconds = estimator.prompt(placed, self.prompt);
        let decode: Vec<Decode> = BATCHES.into_iter().map(decode).collect();
        let seconds = prompt_seconds + self.tokens as f64 / decode[0].tokens_per_second;
        let [hot_neurons, hot_share] = placed.hot();
        Speed {
            placement,
            hot_neurons,
            hot_share,
            gpu_load: placed.load_on_gpu(),
            prompt_tokens_per_second: self.prompt as f64 / prompt_seconds,
            request: RequestTime {
                prompt_tokens: self.prompt,
                tokens: self.tokens,
                prompt_seconds,
                seconds,
                tokens_per_second: self.tokens as f64 / seconds,
            },
            decode,
        }
    }
}

#[cfg(test)]
impl Answer {
    pub(super) fn of(&self, engine: &Engine) -> &EngineAnswer {
        let found = self.engines.iter().find(|found| found.name == engine.name);
        found.expect("the engine answered")
    }
}
