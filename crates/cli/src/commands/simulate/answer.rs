//! What was asked for, resolved, and what is predicted for it.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ByteSize,
    hardware::{Hardware, ModelShape},
    plan::{Budget, Device, LayerPlan, Plan, Policy},
};
use powerinfer_model::ModelConfig;
use powerinfer_tensor::Format;
use serde::Serialize;

use super::{
    engine::{Engine, LLAMA_CPP, LLAMA_CPP_KV_NUMBER_BYTES, ORIGINAL, OURS},
    published::Activity,
    step::{Kind, Pass, Placed, Stage},
    subject::{Solved, Subject, model_bytes, parameters, rank},
};
use crate::{
    commands::place::beyond_the_card,
    output::{Output, Table, percent},
};

/// Requests that decode together.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// What was asked for.
pub(crate) struct Request {
    pub(super) name: String,
    pub(super) config: ModelConfig,
    pub(super) hardware: Hardware,
    pub(super) budget: Budget,
    pub(super) quant: Format,
    pub(super) activity: Activity,
    pub(super) is_skew_said: bool,
    pub(super) policy: Option<Policy>,
    pub(super) hot: Option<f64>,
    pub(super) prompt: usize,
    pub(super) tokens: usize,
}

/// What is predicted.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Answer {
    model: Model,
    /// How active neurons are taken to be, and who says so.
    activity: Activity,
    /// How good the placement is.
    #[serde(flatten)]
    solver: Solver,
    /// What each engine would do with this machine.
    engines: Vec<EngineAnswer>,
    /// Where this engine has what.
    plan: Plan,
    /// Share of hot neurons that was drawn by hand, for this engine's speed alone.
    #[serde(skip)]
    hot: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
struct Model {
    name: String,
    parameters: u64,
    /// Bytes of its weights.
    bytes: u64,
    quant: String,
    predictor_rank: usize,
}

#[derive(Debug, Clone, Serialize)]
struct Solver {
    backend: String,
    objective: f64,
    bound: f64,
    gap: f64,
    solve_seconds: f64,
}

/// What one engine would do.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EngineAnswer {
    pub(super) name: &'static str,
    /// Why it cannot run this at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
    #[serde(flatten)]
    pub(super) speed: Option<Speed>,
}

/// How fast, and with what on the GPU.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Speed {
    /// How the model lies, in words.
    placement: String,
    /// Share of all FFN neurons that are on the GPU.
    hot_neurons: f64,
    /// Share of the activations that they carry.
    hot_share: f64,
    /// Share of what a token computes with, attention included, that is on the GPU.
    pub(super) gpu_load: f64,
    /// For each number of requests that decode together.
    pub(super) decode: Vec<Decode>,
    pub(super) prompt_tokens_per_second: f64,
    /// One request, from prompt to last token.
    pub(super) request: Whole,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Decode {
    pub(super) requests: u32,
    pub(super) tokens_per_second: f64,
    /// From one token of a request to its next.
    milliseconds: f64,
    gpu_milliseconds: f64,
    cpu_milliseconds: f64,
    sync_milliseconds: f64,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Whole {
    prompt_tokens: usize,
    tokens: usize,
    prompt_seconds: f64,
    seconds: f64,
    /// Generated tokens over all seconds.
    pub(super) tokens_per_second: f64,
}

impl Request {
    /// Predicts what was asked for.
    pub(crate) fn answer(mut self) -> Result<Answer> {
        let config = &self.config;
        let frequencies =
            self.activity
                .frequencies(config.layer_count, config.ffn_size, self.is_skew_said)?;
        let subject = Subject {
            config,
            quant: self.quant,
            frequencies: &frequencies,
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
            trouble: None,
            speed: Some(self.speed(&OURS, &placed, "neurons".to_owned())),
        }];
        if config.activation.has_exact_zeros() && subject.rank > 0 {
            engines.push(match subject.solve_as_published() {
                Ok(solved) => {
                    let placed = subject.placed(&solved);
                    EngineAnswer {
                        name: ORIGINAL.name,
                        trouble: None,
                        speed: Some(self.speed(&ORIGINAL, &placed, "neurons".to_owned())),
                    }
                }
                Err(error) => EngineAnswer {
                    name: ORIGINAL.name,
                    trouble: Some(error.to_string()),
                    speed: None,
                },
            });
        }
        engines.push(self.llama_cpp(&subject));
        let decision = solved.decision;
        Ok(Answer {
            model: Model {
                name: self.name,
                parameters: parameters(config),
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
    fn redraw(&self, solved: &Solved, placed: &mut Placed<'_>, share: f64) -> Result<()> {
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
            bail!(
                "`--hot {share}` takes {} on the GPU beside the {} of attention and the like, of {}; lower it, or raise `--vram`",
                ByteSize(hot),
                ByteSize(dense),
                ByteSize(self.budget.vram_bytes)
            );
        }
        Ok(())
    }

    fn llama_cpp(&self, subject: &Subject<'_>) -> EngineAnswer {
        let all_active = vec![1.0; self.config.ffn_size];
        let (placed, count) = subject.by_whole_layers(LLAMA_CPP_KV_NUMBER_BYTES, &all_active);
        let on_cpu = subject.cpu_bytes(&placed);
        if on_cpu > self.budget.ram_bytes {
            return EngineAnswer {
                name: LLAMA_CPP.name,
                trouble: Some(format!(
                    "what is not on the GPU takes {}, of {}",
                    ByteSize(on_cpu),
                    ByteSize(self.budget.ram_bytes)
                )),
                speed: None,
            };
        }
        let placement = format!("{count} of {} layers", self.config.layer_count);
        EngineAnswer {
            name: LLAMA_CPP.name,
            trouble: None,
            speed: Some(self.speed(&LLAMA_CPP, &placed, placement)),
        }
    }

    fn speed(&self, engine: &Engine, placed: &Placed<'_>, placement: String) -> Speed {
        let hardware = self.hardware.for_model(ModelShape {
            format: self.quant,
            hidden: self.config.hidden_size,
            neurons: self.config.ffn_size,
            vocabulary: self.config.vocabulary_size,
        });
        let stage = Stage {
            engine,
            hardware: &hardware,
        };
        // Of the contexts that a request has while it decodes, the mean.
        let context = self.prompt as f64 + self.tokens as f64 / 2.0;
        let decode = |requests: u32| {
            let time = stage.pass(
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
        let prompt_seconds = stage.prompt(placed, self.prompt);
        let decode: Vec<Decode> = BATCHES.into_iter().map(decode).collect();
        let seconds = prompt_seconds + self.tokens as f64 / decode[0].tokens_per_second;
        let [hot_neurons, hot_share] = placed.hot();
        Speed {
            placement,
            hot_neurons,
            hot_share,
            gpu_load: placed.load_on_gpu(),
            prompt_tokens_per_second: self.prompt as f64 / prompt_seconds,
            request: Whole {
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

impl Answer {
    #[cfg(test)]
    pub(super) fn of(&self, engine: &Engine) -> &EngineAnswer {
        let found = self.engines.iter().find(|found| found.name == engine.name);
        found.expect("the engine answered")
    }

    /// The answer as tables.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!(
            "{}: {:.1} billion parameters, {} as {}; on {}\n\n",
            self.model.name,
            self.model.parameters as f64 / 1e9,
            ByteSize(self.model.bytes),
            self.model.quant,
            self.plan.hardware.description,
        );
        let mut assumed = Table::new(&["assumed", "value", "source"]);
        let Activity {
            sparsity,
            skew,
            predictor_share,
            first_half_density,
        } = &self.activity;
        for (what, figure) in [
            ("zeros among FFN activations", Some(sparsity)),
            ("neurons that carry 80 %", Some(skew)),
            ("predictors, of the model", Some(predictor_share)),
            ("active in the first half", first_half_density.as_ref()),
        ] {
            if let Some(figure) = figure {
                assumed.row(vec![
                    what.to_owned(),
                    percent(figure.value),
                    figure.source.clone(),
                ]);
            }
        }
        text += &format!("{assumed}\n{}\n{}\n", self.layers(), self.memory());
        let mut speeds = Table::new(&[
            "tokens/s",
            "on GPU",
            "load",
            "decode",
            "8 at once",
            "32 at once",
            "prompt",
            "request",
        ]);
        for engine in &self.engines {
            let cells = match &engine.speed {
                None => vec!["–".to_owned(); 7],
                Some(speed) => {
                    let at = |requests: u32| {
                        let found = speed.decode.iter().find(|at| at.requests == requests);
                        found.map_or(String::new(), |at| number(at.tokens_per_second))
                    };
                    let on_gpu = match &speed.placement[..] {
                        "neurons" => format!("{} of neurons", percent(speed.hot_neurons)),
                        placement => placement.to_owned(),
                    };
                    vec![
                        on_gpu,
                        percent(speed.gpu_load),
                        at(1),
                        at(8),
                        at(32),
                        number(speed.prompt_tokens_per_second),
                        number(speed.request.tokens_per_second),
                    ]
                }
            };
            speeds.row([vec![engine.name.to_owned()], cells].concat());
        }
        text += &speeds.to_string();
        let forecast = self.plan.forecast.as_ref();
        let baselines = forecast.map_or(&[][..], |forecast| &forecast.baselines);
        if !baselines.is_empty() {
            let mut others = Table::new(&["this engine, placed otherwise", "decode"]);
            for baseline in baselines {
                let note = match baseline.fits_ram {
                    true => "",
                    false => " (more than the RAM allowed)",
                };
                others.row(vec![
                    format!("{}{note}", baseline.name),
                    number(1e6 / baseline.microseconds_per_token),
                ]);
            }
            text += &format!("\n{others}");
        }
        for engine in &self.engines {
            if let Some(trouble) = &engine.trouble {
                text += &format!("{}: {trouble}\n", engine.name);
            }
        }
        text
    }

    /// The layers, those that are alike in one row.
    fn layers(&self) -> Table {
        let mut table = Table::new(&[
            "layers",
            "policy",
            "hot neurons",
            "carry",
            "attention",
            "KV",
            "GPU µs",
            "CPU µs",
            "sync µs",
            "layer µs",
        ]);
        let rest = |layer: &LayerPlan| {
            let place = |device: Device| device.to_string();
            vec![
                layer.policy.to_string(),
                format!("{}/{}", layer.hot_count, layer.neuron_count),
                percent(layer.hot_share),
                place(layer.attention),
                place(layer.kv),
                format!("{:.0}", layer.gpu_microseconds),
                format!("{:.0}", layer.cpu_microseconds),
                format!("{:.0}", layer.sync_microseconds),
                format!("{:.0}", layer.microseconds),
            ]
        };
        let rows: Vec<Vec<String>> = self.plan.layers.iter().map(rest).collect();
        let mut first = 0;
        for last in 0..rows.len() {
            if rows.get(last + 1) == Some(&rows[last]) {
                continue;
            }
            let range = match first == last {
                true => first.to_string(),
                false => format!("{first}–{last}"),
            };
            table.row([vec![range], rows[last].clone()].concat());
            first = last + 1;
        }
        table
    }

    fn memory(&self) -> Table {
        let mut table = Table::new(&["memory", "GPU", "CPU"]);
        let mut lines: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
        let place = |device: Device| usize::from(device == Device::Cpu);
        for line in &self.plan.lines {
            lines.entry(&line.name).or_default()[place(line.device)] += line.bytes;
        }
        let told = |bytes: u64| match bytes {
            0 => "–".to_owned(),
            bytes => ByteSize(bytes).to_string(),
        };
        for (name, bytes) in lines {
            table.row([vec![name.to_owned()], bytes.map(told).to_vec()].concat());
        }
        let totals = [Device::Gpu, Device::Cpu].map(|device| {
            format!(
                "{} of {}",
                ByteSize(self.plan.totals.bytes(device)),
                ByteSize(self.plan.budget.bytes(device))
            )
        });
        table.row([vec!["total".to_owned()], totals.to_vec()].concat());
        table
    }

    /// Says how good the plan is.
    pub(crate) fn say_result(&self, output: Output) {
        let Solver {
            backend,
            objective,
            bound,
            gap,
            solve_seconds,
        } = &self.solver;
        output.say(format!(
            "objective {}: {objective:.3}, proven bound {bound:.3}, gap {:.3} %; {backend} solved it in {solve_seconds:.3} s",
            self.plan.objective,
            100.0 * gap,
        ));
        if let Some(share) = self.hot {
            output.say(format!(
                "the layers and memories shown are the solver's; `this engine` is rated with the hottest {} of every layer on the GPU, as `--hot` says",
                percent(share)
            ));
        }
        if let Some(warning) = beyond_the_card(&self.plan) {
            output.say(warning);
        }
    }
}

/// Three digits at most, for what is predicted to no more than that.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
