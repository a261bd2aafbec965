//! The stage that makes a profile: its options, its run, and its report.

use std::{path::Path, sync::Arc};

use anyhow::Result;
use powerinfer_artifact::{ByteSize, Shard, counted};
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_pipeline::{Stage, profile};
use powerinfer_predictor::Method;
use powerinfer_profile::{
    Amount, Calibration, ExpertPair, ExpertSummary, LOCALITY_WINDOWS, NeuronsFor, Profile,
    ProfileDocument, Settings,
};
use powerinfer_tensor::Format;

use crate::{
    engine::DeviceArgument,
    output::{Output, Table, percent, sparkline},
    progress::Bar,
};

/// Device, and samples to keep for training predictors.
#[derive(Debug, clap::Args)]
pub(crate) struct TraceArguments {
    /// Device that runs the layers
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceArgument,
    /// Tokens per layer to keep samples of, for training predictors [default: 16384; `prepare` keeps 8192 for
    /// `--method closed-form`]
    #[arg(long, value_name = "N")]
    pub(crate) trace_tokens: Option<usize>,
}

impl TraceArguments {
    /// The profile in `out`, measured unless it is up to date and `force` is not set.
    pub(crate) fn up_to_date(
        &self,
        checkpoint: &Checkpoint,
        calibration: &Calibration,
        settings: Settings,
        out: &Path,
        force: bool,
        output: Output,
    ) -> Result<Profile> {
        let (card, bar) = (self.card(checkpoint, output)?, Bar::new(output));
        let card = card.as_ref();
        let made = profile(checkpoint, calibration, settings, card, out, force, &bar)?;
        say_stage(&made, output);
        Ok(made.artifact)
    }

    /// The GPU that profiles `checkpoint`, if there is one.
    pub(crate) fn card(
        &self,
        checkpoint: &Checkpoint,
        output: Output,
    ) -> Result<Option<Arc<dyn Device>>> {
        let config = checkpoint.config();
        let family = &config.family;
        if let Some(obstacle) = config.device_obstacle() {
            output.say(format!(
                "{family} runs only on the CPU: GPUs do not support {obstacle}"
            ));
            return Ok(None);
        }
        if config.experts.is_some() {
            output.say(format!(
                "{family} is profiled on the CPU, which counts selections of experts"
            ));
            return Ok(None);
        }
        let card = self.device.open("the CPU profiles", output)?;
        if let Some(card) = &card {
            let name = &card.info().name;
            output.say(format!("{name}: layers run there, one after the other"));
        }
        Ok(card)
    }

    /// Number of tokens per layer to keep samples of, for predictors made by `method`.
    pub(crate) fn trace_tokens(&self, method: Method) -> usize {
        self.trace_tokens.unwrap_or(method.samples())
    }

    /// The settings of the stage.
    pub(crate) fn settings(&self, amount: Amount, shard: Shard, seed: u64) -> Settings {
        Settings {
            trace_tokens: self.trace_tokens(Method::default()),
            amount,
            shard,
            seed,
        }
    }
}

/// Says what a stage has measured, or that it was up to date.
pub(crate) fn say_stage(made: &Stage<Profile>, output: Output) {
    if made.is_new {
        say_result(&made.artifact, output);
    } else {
        let folder = made.artifact.folder().display();
        output.say(format!("profile: `{folder}` is up to date"));
    }
}

/// The share of zeros, and how few neurons the others come from.
pub(crate) fn zeros(profile: &ProfileDocument) -> String {
    format!(
        "{} of FFN activations are zero; the busiest {} of the neurons produce 80% of the non-zero ones",
        percent(profile.mean(|layer| layer.sparsity)),
        percent(profile.neurons_for.most),
    )
}

/// A row per layer, and what all layers have in common.
pub(crate) fn report(profile: &ProfileDocument) -> String {
    let mut table = Table::new(&[
        "layer",
        "zeros",
        "neurons for 50%",
        "80%",
        "95%",
        "never active",
        "halves overlap",
        "activations by tenths",
    ]);
    let mut row = |name: String, zeros, neurons: &NeuronsFor, dead, overlap, curve: &[f64]| {
        table.row(vec![
            name,
            percent(zeros),
            percent(neurons.half),
            percent(neurons.most),
            percent(neurons.nearly_all),
            percent(dead),
            percent(overlap),
            sparkline(curve),
        ]);
    };
    for layer in &profile.layers {
        row(
            layer.layer.to_string(),
            layer.sparsity,
            &layer.neurons_for,
            layer.dead,
            layer.half_overlap,
            &layer.cumulative,
        );
    }
    row(
        "all".to_owned(),
        profile.mean(|layer| layer.sparsity),
        &profile.neurons_for,
        profile.mean(|layer| layer.dead),
        profile.mean(|layer| layer.half_overlap),
        &[],
    );
    let mut text = table.to_string() + "\n" + &sources(profile);
    let shares = profile.locality();
    let known: Vec<String> = LOCALITY_WINDOWS
        .iter()
        .zip(shares)
        .filter_map(|(window, share)| Some(format!("{window}: {}", percent(share?))))
        .collect();
    if !known.is_empty() {
        text += &format!(
            "\nactive neurons that were active in the last tokens too: {}\n",
            known.join(", ")
        );
    }
    text += &experts(profile);
    if profile.sources.len() > 1 {
        text += "\noverlap of the most frequently active 20% between sources\n";
        text += &overlap(profile);
    }
    text
}

/// Shows how unevenly experts are selected, and the hit rates if some of them are kept in fast memory.
fn experts(profile: &ProfileDocument) -> String {
    let layers = profile.layers.iter().map(|layer| layer.experts.as_ref());
    let (Some(of_layers), Some(layers)) = (&profile.experts, layers.collect::<Option<Vec<_>>>())
    else {
        return String::new();
    };
    let mean = |of: &dyn Fn(&ExpertSummary) -> f64| {
        layers.iter().map(|layer| of(layer)).sum::<f64>() / layers.len().max(1) as f64
    };
    let mut text = format!(
        "\nexperts: a token selects {} of {} per layer; {} of the neurons in these experts are active\n",
        of_layers.per_token,
        of_layers.count,
        percent(mean(&|layer| layer.active)),
    );
    text += &format!(
        "the busiest {} of the experts get 50% of the selections, {} get 80%; the busiest 20% in each half of the text overlap by {}\n",
        percent(mean(&|layer| layer.experts_for.half)),
        percent(mean(&|layer| layer.experts_for.most)),
        percent(mean(&|layer| layer.half_overlap)),
    );
    let fixed = |index: usize| {
        let rates = layers.iter().map(|layer| layer.held[index].fixed);
        Some(rates.sum::<Option<f64>>()? / layers.len() as f64)
    };
    let mut table = Table::new(&["experts per layer", "q4_0 size", "fixed set", "cache"]);
    let row = Format::Q4_0.row_bytes(profile.hidden_size);
    for (index, held) in layers
        .first()
        .map_or(&[][..], |first| &first.held)
        .iter()
        .enumerate()
    {
        let neurons = held.experts * of_layers.size * layers.len();
        table.row(vec![
            held.experts.to_string(),
            // Gate, up and down.
            ByteSize((3 * neurons * row) as u64).to_string(),
            fixed(index).map_or_else(|| "–".to_owned(), percent),
            percent(mean(&|layer| layer.held[index].cached)),
        ]);
    }
    text += "\nhit rate if some experts of every layer are kept in fast memory\n";
    text += &table.to_string();
    text += "fixed set: the busiest experts of one half of the text, tested on the other\ncache: the most recently selected experts; it is empty at the start of each sequence, so the first selection of each expert is a miss\n";
    let pairs = profile.layers.iter().zip(&layers);
    let pairs = pairs.filter_map(|(layer, found)| Some((layer.layer, found.pair?)));
    // The share furthest above the expected one wins, as within a layer.
    let excess = |pair: &ExpertPair| pair.share * (1.0 - 1.0 / pair.lift);
    let most = pairs.max_by(|a, b| excess(&a.1).total_cmp(&excess(&b.1)));
    if let Some((layer, pair)) = most {
        let [a, b] = pair.experts;
        text += &format!(
            "experts {a} and {b} of layer {layer} are selected together by {} of the tokens, {:.1} times the share expected if they were independent\n",
            percent(pair.share),
            pair.lift,
        );
    }
    text
}

/// Lists what was read from each source, and how much of it was profiled.
fn sources(profile: &ProfileDocument) -> String {
    let mut text = String::new();
    for source in &profile.sources {
        let formats: Vec<&str> = source.formats.keys().map(String::as_str).collect();
        let formats = if formats.is_empty() {
            String::new()
        } else {
            format!(" ({})", formats.join(", "))
        };
        text += &format!(
            "text: `{}`, {}{formats}, {} profiled\n",
            source.name,
            counted(source.documents, "document"),
            counted(source.tokens, "token"),
        );
    }
    text
}

/// How alike the sources are.
fn overlap(profile: &ProfileDocument) -> String {
    let numbers: Vec<String> = (1..=profile.sources.len())
        .map(|number| number.to_string())
        .collect();
    let mut headings = vec!["source", "tokens"];
    headings.extend(numbers.iter().map(String::as_str));
    let mut table = Table::new(&headings);
    let rows = profile.sources.iter().zip(&profile.source_overlap);
    for (number, (source, row)) in numbers.iter().zip(rows) {
        let mut cells = vec![
            format!("{number} {}", source.name),
            source.tokens.to_string(),
        ];
        cells.extend(row.iter().map(|share| percent(*share)));
        table.row(cells);
    }
    table.to_string()
}

/// Reports the measurement, its uncertainty, its folder and the next step.
pub(crate) fn say_result(profile: &Profile, output: Output) {
    let document = profile.document();
    output.say(format!(
        "profiled `{}` on {}: {}; written to `{}`",
        profile.header().model.name,
        counted(document.tokens, "token"),
        zeros(document),
        profile.folder().display(),
    ));
    if !document.has_exact_zeros {
        output.say("this model's activation is never exactly zero, so no neuron can be skipped without loss; `powerinfer train-predictors` calibrates thresholds for those that add little");
        return;
    }
    let worst = document
        .layers
        .iter()
        .min_by(|a, b| a.half_overlap.total_cmp(&b.half_overlap));
    if let Some(worst) = worst {
        output.say(format!(
            "hot neurons: the most frequently active 20% overlap by {} between two halves of the text, by {} in layer {}",
            percent(document.mean(|layer| layer.half_overlap)),
            percent(worst.half_overlap),
            worst.layer,
        ));
    }
}
