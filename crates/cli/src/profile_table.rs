//! A profile as tables and sentences.

use powerinfer_profile::{LOCALITY_WINDOWS, NeuronsFor, Profile, ProfileDocument};

use crate::output::{Output, Table, percent, sparkline};

/// A row per layer and one for all layers; reuse over time, and the overlap of sources if there are several.
pub(crate) fn table(profile: &ProfileDocument) -> String {
    let mut table = Table::new(&[
        "layer",
        "zeros",
        "neurons for 50 %",
        "80 %",
        "95 %",
        "never fired",
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
    let mut text = table.to_string();
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
    if profile.sources.len() > 1 {
        text += "\noverlap of the hot sets (top 20 %) of the sources\n";
        text += &overlap(profile);
    }
    text
}

/// Overlap of the hot sets of every two sources.
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

/// Prints a summary of the measurement, its certainty and its path.
pub(crate) fn say_result(profile: &Profile, output: Output) {
    let document = profile.document();
    output.say(format!(
        "profiled `{}` on {} tokens: {} of FFN activations are zero, {} of the neurons carry 80 % of the others; written to `{}`",
        profile.header().model.name,
        document.tokens,
        percent(document.mean(|layer| layer.sparsity)),
        percent(document.neurons_for.most),
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
            "how sure: the hot sets of two independent halves of the text overlap by {} on average, by {} in layer {}",
            percent(document.mean(|layer| layer.half_overlap)),
            percent(worst.half_overlap),
            worst.layer,
        ));
    }
}
