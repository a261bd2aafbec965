//! Predictors, sign tests and thresholds in tables: bytes, quality, and time on this machine.

use std::time::Instant;

use powerinfer_artifact::{
    ByteSize, counted,
    predictor_file::{PredictorFile, PredictorSummary},
    threshold_curve::ERRORS,
};
use powerinfer_kernels::Isa;
use powerinfer_tensor::{Transposed, pack_signs, transpose};

use crate::output::{Table, percent};

/// Errors that the table of thresholds has a column for, as places in [`ERRORS`].
const SHOWN: [usize; 4] = [4, 7, 10, 13];
/// Passes that a time is the median of.
const PASSES: usize = 25;

/// One line about `layers`.
pub(crate) fn summary(layers: &[PredictorSummary]) -> String {
    let thresholds = layers.iter().filter(|layer| !layer.thresholds.is_empty());
    if let count @ 1.. = thresholds.count() {
        return format!(
            "  thresholds   of {}, at errors of the FFN's output from {} to {}\n",
            counted(count, "layer"),
            percent(ERRORS[0]),
            percent(ERRORS[ERRORS.len() - 1]),
        );
    }
    let trained: Vec<_> = layers.iter().filter(|layer| layer.rank > 0).collect();
    let mean = |of: &dyn Fn(&PredictorSummary) -> f64| {
        trained.iter().map(|layer| of(layer)).sum::<f64>() / trained.len().max(1) as f64
    };
    let ranks = trained.iter().map(|layer| layer.rank);
    match (ranks.clone().min(), ranks.max()) {
        (Some(least), Some(most)) => format!(
            "  predictors   {} for {}, rank {}, {}; mean recall {}, precision {}\n",
            trained.len(),
            counted(layers.len(), "layer"),
            if least == most {
                least.to_string()
            } else {
                format!("{least} to {most}")
            },
            ByteSize(layers.iter().map(|layer| layer.bytes).sum()),
            percent(mean(&|layer| layer.recall)),
            percent(mean(&|layer| layer.precision)),
        ),
        _ => format!(
            "  predictors   none for {}\n",
            counted(layers.len(), "layer")
        ),
    }
}

/// The tables of `file`; times are taken on one thread of this machine with `isa`.
pub(crate) fn tables(file: &PredictorFile, isa: Isa) -> String {
    let layers = file.layers();
    let mut text = String::new();
    if layers.iter().all(|layer| layer.thresholds.is_empty()) {
        text += &prediction(file, isa);
    }
    if layers.iter().any(|layer| !layer.thresholds.is_empty()) {
        text += &thresholds(layers);
    }
    text
}

/// A row per layer and method of prediction.
fn prediction(file: &PredictorFile, isa: Isa) -> String {
    let mut table = Table::new(&[
        "layer",
        "by",
        "bytes",
        "µs measured",
        "recall",
        "contribution recall",
        "precision",
        "predicted zeros",
        "true zeros",
    ]);
    let none = || "–".to_owned();
    let share = |share: Option<f64>| share.map_or_else(none, percent);
    for layer in file.layers() {
        if layer.rank == 0 {
            let mut row = vec![none(); 9];
            (row[0], row[1]) = (layer.layer.to_string(), "no predictor".to_owned());
            table.row(row);
        } else {
            table.row(vec![
                layer.layer.to_string(),
                format!("rank {}, {}", layer.rank, made(layer)),
                ByteSize(layer.bytes).to_string(),
                time_of_predictor(file, layer, isa).map_or_else(none, |us| format!("{us:.1}")),
                percent(layer.recall),
                share(layer.contribution_recall),
                percent(layer.precision),
                percent(layer.predicted_sparsity),
                percent(layer.sparsity),
            ]);
        }
        if let Some(signs) = &layer.sign_bit {
            table.row(vec![
                layer.layer.to_string(),
                format!("signs, α {:.3}", signs.alpha),
                ByteSize(signs.bytes).to_string(),
                time_of_signs(file, layer, isa).map_or_else(none, |us| format!("{us:.1}")),
                percent(signs.recall),
                share(signs.contribution_recall),
                percent(signs.precision),
                percent(signs.predicted_sparsity),
                match layer.rank {
                    0 => none(),
                    _ => percent(layer.sparsity),
                },
            ]);
        }
    }
    table.to_string()
}

/// How a network was made.
fn made(layer: &PredictorSummary) -> String {
    match (layer.is_linear, layer.steps) {
        (true, 0) => "calculated".to_owned(),
        (true, steps) => format!("calculated, then {steps} steps"),
        (false, 0) => "with ReLU".to_owned(),
        (false, steps) => format!("with ReLU, {steps} steps"),
    }
}

/// A row per layer and score: the share of neurons computed at some relative FFN errors.
fn thresholds(layers: &[PredictorSummary]) -> String {
    let errors = SHOWN.map(|level| format!("at {}", percent(ERRORS[level])));
    let mut headings = vec!["layer", "score", "centred"];
    headings.extend(errors.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    for layer in layers {
        for curve in &layer.thresholds {
            let mut row = vec![
                layer.layer.to_string(),
                curve.score.to_string(),
                if curve.centred { "yes" } else { "no" }.to_owned(),
            ];
            row.extend(SHOWN.map(|level| percent(curve.levels[level].density)));
            table.row(row);
        }
    }
    format!("neurons computed, by relative error of the FFN's output\n{table}")
}

/// Microseconds that the predictor of a layer takes for a token.
fn time_of_predictor(file: &PredictorFile, layer: &PredictorSummary, isa: Isa) -> Option<f64> {
    let (hidden, neurons) = sizes(file, layer)?;
    let stored = file.find(layer.layer, hidden, neurons).ok()??;
    let (a, b) = (stored.a.view(file.tensors()), stored.b.view(file.tensors()));
    // As a bundle stores it; hidden units that are zero after ReLU are not read.
    let order: Vec<u32> = (0..neurons as u32).collect();
    let Transposed { units, .. } = transpose(&b, &order);
    let x = input(hidden);
    let (mut middle, mut logits) = (vec![0.0; layer.rank], vec![0.0; neurons]);
    Some(median_microseconds(|| {
        isa.gemv(&a, &x, &mut middle);
        let active =
            (0..layer.rank as u32).filter(|unit| layer.is_linear || middle[*unit as usize] > 0.0);
        let active: Vec<u32> = active.collect();
        let values: Vec<f32> = active.iter().map(|unit| middle[*unit as usize]).collect();
        logits.fill(0.0);
        isa.axpy_rows(&units.as_view(), &active, &values, 0..neurons, &mut logits);
        let words = logits.chunks(64).map(|logits| {
            let bits = logits.iter().enumerate();
            bits.fold(0u64, |word, (bit, logit)| {
                word | u64::from(*logit >= layer.threshold) << bit
            })
        });
        std::hint::black_box(words.fold(0, |all, word| all ^ word));
    }))
}

/// Microseconds that counting the signs of a layer takes for a token.
fn time_of_signs(file: &PredictorFile, layer: &PredictorSummary, isa: Isa) -> Option<f64> {
    let name = powerinfer_artifact::predictor_file::signs_name(layer.layer);
    let shape = file.tensors().find(&name)?.shape.to_vec();
    let [neurons, row_bytes] = shape[..] else {
        return None;
    };
    // Signs fill whole words; how many of the last one count makes no difference here.
    let hidden = row_bytes * 8;
    let signs = file.signs(layer.layer, hidden, neurons).ok()??;
    let view = signs.view(file.tensors());
    let x = input(hidden);
    let mut out = vec![0; neurons];
    Some(median_microseconds(|| {
        isa.sign_agreements(&view, &pack_signs(&x).collect::<Vec<_>>(), &mut out);
        std::hint::black_box(&out);
    }))
}

/// Numbers in and neurons out of a layer's predictor.
fn sizes(file: &PredictorFile, layer: &PredictorSummary) -> Option<(usize, usize)> {
    let tensors = file.tensors();
    let name = |part: &str| powerinfer_artifact::predictor_file::tensor_name(layer.layer, part);
    let neurons = *tensors.find(&name("bias"))?.shape.first()?;
    let widths = ["a", "a.quants"]
        .iter()
        .find_map(|part| tensors.find(&name(part)));
    let stored = widths?.shape.get(1).copied()?;
    let hidden = match file.weights() {
        powerinfer_tensor::Format::Q4K | powerinfer_tensor::Format::Q4_0 => 2 * stored,
        _ => stored,
    };
    Some((hidden, neurons))
}

/// Something to compute with.
fn input(length: usize) -> Vec<f32> {
    (0..length)
        .map(|i| ((i * 37) % 19) as f32 / 9.0 - 1.0)
        .collect()
}

/// The median time of `work`, after one pass that warms the caches.
fn median_microseconds(mut work: impl FnMut()) -> f64 {
    work();
    let mut times: Vec<f64> = (0..PASSES)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[PASSES / 2]
}
