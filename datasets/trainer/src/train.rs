//! The training loop.

use std::{f64::consts::PI, io::Write, path::PathBuf, sync::Mutex, time::Instant};

use anyhow::{Context, anyhow};
use candle_core::backprop::GradStore;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use serde_json::json;
use tokenizers::Tokenizer;

use crate::{
    batch::Batch,
    export::export,
    minipython::{Split, distinct_tasks, tasks},
    model::{LAYERS, Model},
    muon::Muon,
    ops::{
        cross_entropy::cross_entropy,
        gated::{Activation, Activity, BANDS, Penalty},
    },
};

/// Micro-batches per step, each on a thread of its own; a fixed number, so that the result does
/// not depend on the machine.
const SHARDS: usize = 2;
/// Steps between two looks at the held-out tasks.
const REPORT_EVERY: usize = 100;
/// Steps over which the learning rate rises.
const WARM_UP: usize = 60;
/// Share of the training over which the sparsity asked for rises from a half to its goal.
const SPARSITY_RAMP: f64 = 0.4;
/// How much less often the neurons of a band fire than those of the band before.
const BAND_RATIO: f64 = 0.5;
/// Norm beyond which a gradient is shortened.
const GRADIENT_LIMIT: f64 = 1.0;

/// What shapes a training run.
pub(crate) struct Settings {
    pub(crate) out: PathBuf,
    /// Tokens that the schedules are laid out for.
    pub(crate) tokens: usize,
    /// Steps after which to stop.
    pub(crate) steps: usize,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f64,
    pub(crate) activation: Activation,
    pub(crate) sparsity: f64,
    pub(crate) seed: u64,
}

/// Trains the model and writes checkpoint and log.
pub(crate) fn train(tokenizer: &Tokenizer, settings: &Settings) -> anyhow::Result<()> {
    let model = Model::new(
        tokenizer.get_vocab_size(true),
        settings.activation,
        settings.seed,
    )?;
    let mut matrices = model
        .matrices()
        .into_iter()
        .map(|(weights, rows)| Muon::new(weights, &rows))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let adam = |weight_decay| ParamsAdamW {
        lr: 0.0,
        beta1: 0.9,
        beta2: 0.98,
        eps: 1e-8,
        weight_decay,
    };
    let mut others = [
        AdamW::new(vec![model.embedding.clone()], adam(0.1))?,
        AdamW::new(model.norms(), adam(0.0))?,
    ];
    let mut parameters = model.norms();
    parameters.push(model.embedding.clone());
    parameters.extend(
        model
            .matrices()
            .into_iter()
            .map(|(weights, _)| weights.clone()),
    );

    let held_out = {
        let mut batch = Batch::new();
        for task in distinct_tasks(Split::HeldOut, settings.seed, 200) {
            batch.push(tokenizer, &task)?;
        }
        batch
    };
    let log_path = settings.out.join("training-log.jsonl");
    let mut log = std::fs::File::create(&log_path)
        .with_context(|| format!("cannot write `{}`", log_path.display()))?;

    let mut stream = tasks(Split::Training, settings.seed);
    // λ per layer and band, moved by a controller until the band is as sparse as asked.
    let mut penalties = [[1e-7f32; BANDS]; LAYERS];
    let activity_goals = activity_goals(1.0 - settings.sparsity);
    let (mut seen, mut step, mut window_loss) = (0, 0, 0.0);
    let started = Instant::now();
    while seen < settings.tokens && step < settings.steps {
        let progress = seen as f64 / settings.tokens as f64;
        let rate = settings.learning_rate * schedule(step, progress);

        let shards = (0..SHARDS)
            .map(|_| Batch::fill(tokenizer, &mut stream, settings.batch / SHARDS))
            .collect::<anyhow::Result<Vec<_>>>()?;
        seen += shards.iter().map(|shard| shard.tokens.len()).sum::<usize>();
        let activity: [Mutex<Activity>; LAYERS] = Default::default();
        let (loss, gradients) = gradients(&model, &parameters, &shards, &penalties, &activity)?;
        for optimizer in &mut others {
            optimizer.set_learning_rate(rate);
            optimizer.step(&gradients)?;
        }
        step_all(&mut matrices, &gradients, rate)?;
        window_loss += loss;

        let ramp = (progress / SPARSITY_RAMP).min(1.0);
        for (penalty, activity) in penalties.iter_mut().zip(&activity) {
            let shares = activity.lock().expect("no thread panicked").by_band();
            for ((penalty, share), goal) in penalty.iter_mut().zip(shares).zip(activity_goals) {
                let goal = 0.5 + (goal - 0.5) * ramp;
                let correction = (0.1 * (share / goal - 1.0)).clamp(-0.05, 0.05);
                *penalty = (f64::from(*penalty) * correction.exp()).clamp(1e-10, 1e-4) as f32;
            }
        }

        step += 1;
        if step % REPORT_EVERY == 0 || seen >= settings.tokens || step == settings.steps {
            let report = evaluate(&model, &held_out)?;
            let steps = if step % REPORT_EVERY == 0 {
                REPORT_EVERY
            } else {
                step % REPORT_EVERY
            };
            let line = json!({
                "step": step,
                "tokens": seen,
                "seconds": started.elapsed().as_secs(),
                "learning_rate": rate,
                "training_loss": window_loss / steps as f64,
                "held_out_solution_loss": report.solution_loss,
                "held_out_exact_match": report.exact_match,
                "zeros_per_layer": report.zeros,
                "neurons_for_80_percent_per_layer": report.concentration,
                "dead_neurons_per_layer": report.dead,
                "penalty_per_layer_and_band": penalties,
            });
            window_loss = 0.0;
            writeln!(log, "{line}")?;
            writeln!(std::io::stderr(), "{line}")?;
            export(&model, tokenizer, &settings.out)?;
        }
    }
    Ok(())
}

/// How often the neurons of each band are to fire: a geometric series whose mean is `mean`.
fn activity_goals(mean: f64) -> [f64; BANDS] {
    let shares: [f64; BANDS] = std::array::from_fn(|band| BAND_RATIO.powi(band as i32));
    let sum: f64 = shares.iter().sum();
    shares.map(|share| mean * share * BANDS as f64 / sum)
}

/// Steps all `matrices`, on as many threads as there are micro-batches.
fn step_all(matrices: &mut [Muon], gradients: &GradStore, rate: f64) -> anyhow::Result<()> {
    let share = matrices.len().div_ceil(SHARDS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = matrices
            .chunks_mut(share)
            .map(|matrices| {
                scope.spawn(move || {
                    matrices
                        .iter_mut()
                        .try_for_each(|matrix| matrix.step(gradients, rate))
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .map_err(|_| anyhow!("a training thread panicked"))?
        })
    })
}

/// Warm-up, then a cosine down to nothing.
fn schedule(step: usize, progress: f64) -> f64 {
    let warm = ((step + 1) as f64 / WARM_UP as f64).min(1.0);
    warm * (0.5 + 0.5 * (PI * progress).cos()).max(0.01)
}

/// Share of neurons that fire, over all tokens counted.
fn mean_activity(activity: &Activity) -> f64 {
    let fired: u64 = activity.active.iter().sum();
    fired as f64 / (activity.tokens as f64 * activity.active.len() as f64)
}

/// Loss and mean gradient over `shards`, summed in their order.
fn gradients(
    model: &Model,
    parameters: &[candle_core::Var],
    shards: &[Batch],
    penalties: &[Penalty],
    activity: &[Mutex<Activity>],
) -> anyhow::Result<(f64, GradStore)> {
    let results: Vec<anyhow::Result<(f64, GradStore)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = shards
            .iter()
            .map(|shard| {
                scope.spawn(move || {
                    let logits = model.logits(shard, penalties, activity)?;
                    let loss = cross_entropy(&logits, &shard.targets, &shard.weights)?;
                    Ok((f64::from(loss.to_scalar::<f32>()?), loss.backward()?))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .map_err(|_| anyhow!("a training thread panicked"))?
            })
            .collect()
    });
    let mut results = results.into_iter();
    let (mut loss, mut total) = results.next().ok_or_else(|| anyhow!("no shard"))??;
    for result in results {
        let (shard_loss, gradients) = result?;
        loss += shard_loss;
        for parameter in parameters {
            let sum = match (total.get(parameter), gradients.get(parameter)) {
                (Some(a), Some(b)) => (a + b)?,
                _ => anyhow::bail!("a parameter has no gradient"),
            };
            total.insert(parameter, sum);
        }
    }
    let mut square = 0f64;
    for parameter in parameters {
        let gradient = total
            .get(parameter)
            .ok_or_else(|| anyhow!("a parameter has no gradient"))?;
        square += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    let norm = square.sqrt() / shards.len() as f64;
    anyhow::ensure!(
        norm.is_finite(),
        "the gradient is not finite; lower the learning rate"
    );
    let scale = (GRADIENT_LIMIT / norm).min(1.0) / shards.len() as f64;
    for parameter in parameters {
        let scaled = total
            .get(parameter)
            .map(|gradient| gradient * scale)
            .transpose()?;
        if let Some(scaled) = scaled {
            total.insert(parameter, scaled);
        }
    }
    Ok((loss / shards.len() as f64, total))
}

/// What the model does on texts it was not trained on.
struct Report {
    /// Mean cross-entropy of the solutions' tokens, in nats.
    solution_loss: f64,
    /// Share of tasks whose solution greedy decoding writes token for token.
    exact_match: f64,
    /// Share of FFN activations that are exactly zero.
    zeros: Vec<f64>,
    /// Smallest share of neurons that makes 80 % of the activations.
    concentration: Vec<f64>,
    /// Share of neurons that never fired.
    dead: Vec<f64>,
}

/// Judges the model on `batch` by one forward pass: where the largest logit is the right token
/// all along the solution, greedy decoding writes just that solution.
fn evaluate(model: &Model, batch: &Batch) -> anyhow::Result<Report> {
    let activity: [Mutex<Activity>; LAYERS] = Default::default();
    let logits = model
        .logits(batch, &[[0.0; BANDS]; LAYERS], &activity)?
        .to_vec2::<f32>()?;
    let (mut loss, mut tokens, mut matches) = (0f64, 0, 0);
    for (text, solution) in batch.bounds.windows(2).zip(&batch.solutions) {
        let mut exact = true;
        let range = *solution..text[1];
        for (row, target) in logits[range.clone()].iter().zip(&batch.targets[range]) {
            let target = *target as usize;
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = row.iter().map(|x| (x - largest).exp()).sum();
            loss += f64::from(largest + sum.ln() - row[target]);
            tokens += 1;
            exact &= row[target] >= largest;
        }
        matches += usize::from(exact);
    }
    let mut report = Report {
        solution_loss: loss / tokens as f64,
        exact_match: matches as f64 / batch.solutions.len() as f64,
        zeros: Vec::new(),
        concentration: Vec::new(),
        dead: Vec::new(),
    };
    for activity in &activity {
        let activity = activity.lock().map_err(|_| anyhow!("a thread panicked"))?;
        let mut counts = activity.active.clone();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let total: u64 = counts.iter().sum();
        let mut covered = 0;
        let needed = counts
            .iter()
            .take_while(|count| {
                let go = covered * 10 < total * 8;
                covered += **count;
                go
            })
            .count();
        let silent = counts.iter().filter(|count| **count == 0).count();
        let round = |share: f64| (share * 1e4).round() / 1e4;
        report.zeros.push(round(1.0 - mean_activity(&activity)));
        report
            .concentration
            .push(round(needed as f64 / counts.len() as f64));
        report.dead.push(round(silent as f64 / counts.len() as f64));
    }
    Ok(report)
}
