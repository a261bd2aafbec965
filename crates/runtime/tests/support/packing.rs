//! Bundles packed for a test.

use std::{collections::BTreeMap, path::Path};

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
    let inputs = PackInputs {
        checkpoint,
        orders: &vec![order; plan.layers.len()],
        predictors,
        plan,
        placement_inputs: None,
        quant,
        companions: &[],
        inputs: BTreeMap::new(),
        request: serde_json::Value::Null,
        seed: 0,
    };
    pack(&inputs, out, &Silent).unwrap()
}
