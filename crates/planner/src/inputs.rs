//! Input sparsity: calibrates on held-out text the magnitude below which inputs of projections are skipped.

use powerinfer_artifact::{
    Progress,
    plan::{InputThresholds, LayerPlan, Policy},
    progress::Silent,
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::format::percent;
use powerinfer_model::LanguageModel;
use powerinfer_pool::usable_cores;
use powerinfer_runtime::{Execution, SingleSession};

use crate::PlannerError;

/// Calibrates, per layer, the thresholds below which `share` of the inputs are on `texts`, with `bundle` run `dense`.
pub(crate) fn calibrate(
    bundle: Bundle,
    texts: &[Vec<u32>],
    share: f64,
    progress: &dyn Progress,
) -> Result<Vec<InputThresholds>, PlannerError> {
    let policy = Some(Policy::Dense);
    let execution = Execution::on_cpu(usable_cores());
    let mut model = SingleSession::open(bundle, policy, &execution, &Silent)?;
    model.observers_mut().count_inputs();
    let tokens: usize = texts.iter().map(Vec::len).sum();
    progress.begin("calibrating inputs", tokens as u64, "tokens");
    let window = model.context_limit();
    for part in texts.iter().flat_map(|text| text.chunks(window)) {
        model.reset();
        model.forward_last(part)?;
        progress.advance(part.len() as u64)?;
    }
    progress.end();
    let found = model.observers_mut().take_input_magnitudes();
    Ok(found.iter().map(|layer| layer.thresholds(share)).collect())
}

/// Describes the share of its inputs that `layer` reads; `None` if it reads all.
pub(crate) fn reason(layer: &LayerPlan) -> Option<String> {
    let thresholds = layer.input_thresholds?;
    let read = percent(1.0 - thresholds.share);
    Some(match thresholds.ffn {
        Some(_) => format!("attention, gate and up read {read} of their inputs' channels"),
        None => format!("attention reads {read} of its inputs' channels"),
    })
}
