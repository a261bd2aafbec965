//! Functions that the estimates of `prepare` and `cluster` share.

use powerinfer_model::ModelConfig;
use powerinfer_planner::certify;
use powerinfer_predictor::Method;

/// Tokens of a certificate by default, if so many are profiled.
pub(crate) fn certify_tokens(config: &ModelConfig, profiled: u64) -> u64 {
    (certify::usual_tokens(config.parameters()) as u64).min(profiled)
}

/// Whether predictors are calculated, and the optimiser steps of training, at most `steps`.
pub(crate) fn training_work(method: Method, steps: usize) -> (bool, u64) {
    match method {
        Method::ClosedForm => (true, 0),
        Method::Auto => (true, steps as u64),
        Method::Trained => (false, steps as u64),
    }
}

/// A time as people say it.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 600.0 => format!("{:.1} min", s / 60.0),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
