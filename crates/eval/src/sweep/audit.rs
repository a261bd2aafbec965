//! Sparsity and prediction quality of a policy setting, from the neurons that were counted.

use powerinfer_runtime::LayerAudit;

use super::{LayerSparsity, PredictorQuality, Sparsity, speed::PredictionCost};

/// Mean of `figure` over all layers.
fn mean(audit: &[LayerAudit], figure: impl Fn(&LayerAudit) -> f64) -> f64 {
    audit.iter().map(figure).sum::<f64>() / audit.len().max(1) as f64
}

/// Shares of neurons over all layers; `alone` has each layer's own rise of perplexity.
pub(super) fn sparsity(audit: &[LayerAudit], alone: Option<&[f64]>) -> Sparsity {
    let predicts = audit.iter().any(|layer| layer.predicted.is_some());
    let predicted = |layer: &LayerAudit| layer.predicted_sparsity().unwrap_or(0.0);
    let layers = audit
        .iter()
        .enumerate()
        .map(|(index, layer)| LayerSparsity {
            true_share: layer.sparsity(),
            predicted_share: layer.predicted_sparsity(),
            computed_share: layer.computed_share(),
            relative_error: layer.relative_error(),
            perplexity_rise_alone: alone.map(|rises| rises[index]),
        });
    Sparsity {
        true_share: mean(audit, LayerAudit::sparsity),
        predicted_share: predicts.then(|| mean(audit, predicted)),
        computed_share: mean(audit, LayerAudit::computed_share),
        relative_error: mean(audit, LayerAudit::relative_error),
        layers: layers.collect(),
        tokens: audit.first().map_or(0, |layer| layer.tokens),
    }
}

/// Recall and precision over all layers, with the cost of prediction.
pub(super) fn predictor(audit: &[LayerAudit], cost: PredictionCost) -> PredictorQuality {
    let of_all = |count: fn(&LayerAudit) -> u64| audit.iter().map(count).sum::<u64>();
    let share = |part: u64, all: u64| match all {
        0 => 1.0,
        all => part as f64 / all as f64,
    };
    PredictorQuality {
        count_recall: share(of_all(|layer| layer.found), of_all(|layer| layer.active)),
        contribution_recall: mean(audit, LayerAudit::contribution_recall),
        precision: share(
            of_all(|layer| layer.found),
            of_all(|layer| layer.predicted.unwrap_or(0)),
        ),
        bytes_per_token: cost.bytes_per_token,
        bytes_share: cost.bytes_share,
        time_share: cost.time_share,
    }
}
