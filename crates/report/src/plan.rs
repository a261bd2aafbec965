//! The page of a plan: neurons, predicted times and memory of every layer. It runs no scripts.

use powerinfer_artifact::{ModelIdentity, plan::Plan};
use serde_json::json;

use crate::{ReportError, page::Templates};

/// The page of `plan` for `model`; `predictions` are sentences on its speed and on more memory.
///
/// # Errors
///
/// If the plan lacks what the page shows.
pub fn plan_page(
    model: &ModelIdentity,
    plan: &Plan,
    predictions: &[String],
) -> Result<String, ReportError> {
    let tool = concat!("powerinfer ", env!("CARGO_PKG_VERSION"));
    Templates::new()?.render(
        "plan.html",
        json!({ "tool": tool, "model": model, "plan": plan, "predictions": predictions }),
    )
}
