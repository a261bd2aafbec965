//! Input sparsity: from which magnitude on the inputs of projections are read, calibrated on text
//! that was held back.

use anyhow::Result;
use powerinfer_artifact::{
    Progress,
    plan::{InputThresholds, LayerPlan, Plan, Policy},
};
use powerinfer_bundle::Bundle;
use powerinfer_model::LanguageModel;

use crate::{
    engine::runtime,
    output::{Output, parse_percent, percent},
    progress::Bar,
};

/// A share of inputs to leave out, given in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InputSparsity(pub(crate) f64);

impl std::str::FromStr for InputSparsity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse_percent(text) {
            Some(share) if share > 0.0 && share < 1.0 => Ok(Self(share)),
            _ => Err(
                "give a share above 0 % and below 100 %, such as `25%`; without the option all inputs are read"
                    .to_owned(),
            ),
        }
    }
}

/// Per layer, thresholds that `share` of the inputs stay below on `texts`, as `bundle` has them when
/// everything is computed.
pub(crate) fn calibrate(
    bundle: Bundle,
    texts: &[Vec<u32>],
    share: f64,
    output: Output,
) -> Result<Vec<InputThresholds>> {
    let threads = crate::machine::cores::usable_cores();
    let quiet = Output {
        quiet: true,
        ..output
    };
    let mut model = runtime(bundle, Some(Policy::Dense), threads, quiet)?;
    model.observe_inputs();
    let bar = Bar::new(output);
    let tokens: usize = texts.iter().map(Vec::len).sum();
    bar.begin("calibrating inputs", tokens as u64, "tokens");
    let window = model.context_limit();
    for part in texts.iter().flat_map(|text| text.chunks(window)) {
        model.reset();
        model.forward_last(part)?;
        bar.advance(part.len() as u64)?;
    }
    bar.end();
    let found = model.take_input_magnitudes();
    Ok(found.iter().map(|layer| layer.thresholds(share)).collect())
}

/// What `layer` reads of its inputs, in words; none where it reads all.
pub(crate) fn reason(layer: &LayerPlan) -> Option<String> {
    let thresholds = layer.input_thresholds?;
    let who = match thresholds.ffn {
        Some(_) => "attention, gate and up read",
        None => "attention reads",
    };
    let read = percent(1.0 - thresholds.share);
    let whose = if thresholds.ffn.is_some() {
        "their"
    } else {
        "its"
    };
    Some(format!("{who} {read} of {whose} inputs' channels"))
}

/// What the layers of `plan` read of their inputs, in words; none where they read all.
pub(crate) fn describe(plan: &Plan) -> Option<String> {
    let with: Vec<InputThresholds> = plan
        .layers
        .iter()
        .filter_map(|layer| layer.input_thresholds)
        .collect();
    let share = with.first()?.share;
    let ffns = with.iter().filter(|found| found.ffn.is_some()).count();
    Some(format!(
        "{} of the channels are read in the attention of {} layers, and by gate and up of {ffns}",
        percent(1.0 - share),
        with.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_share_is_taken() {
        assert_eq!("25%".parse(), Ok(InputSparsity(0.25)));
        assert_eq!("0.5 %".parse(), Ok(InputSparsity(0.005)));
        for bad in ["0%", "100%", "-1%", "NaN%", "25", "x", ""] {
            let told = bad.parse::<InputSparsity>().unwrap_err();
            assert!(told.contains("such as `25%`"), "{told}");
        }
    }
}
