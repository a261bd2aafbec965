//! Bundles packed for a test.

use std::path::Path;

use powerinfer_artifact::{plan::Plan, predictor_file::PredictorFile, progress::Silent};
use powerinfer_bundle::{Bundle, PackInputs, pack};
use powerinfer_model::Checkpoint;
use powerinfer_tensor::Format;

/// Packs `checkpoint` as `plan` has it into `out`, the neurons of every layer in `order`.
pub(crate) fn pack_bundle(
    checkpoint: &Checkpoint,
    order: impl Iterator<Item = u32>,
    predictors: Option<&PredictorFile>,
    plan: Plan,
    quant: Format,
    out: &Path,
) -> Bundle {
    let order: Vec<u32> = order.collect();
    let orders = vec![order; plan.layers.len()];
    let inputs = PackInputs {
        predictors,
        ..PackInputs::new(checkpoint, &orders, plan, quant)
    };
    pack(&inputs, out, &Silent).unwrap()
}
