//! `run --verify-every`: what verification has found, in words and as JSON.

use powerinfer_artifact::counted;
use powerinfer_runtime::{DRIFT_WINDOW, Engine, Observers, Session, Verification};
use serde_json::json;

use crate::output::{Output, percent};

/// Prints what verification finds while tokens are generated.
pub(super) struct Progress {
    tokens: usize,
    alarms: usize,
    output: Output,
}

impl Progress {
    /// Prints what is found from now on.
    pub(super) fn new(observers: &Observers, output: Output) -> Self {
        let found = observers.verification();
        Self {
            tokens: found.map_or(0, Verification::tokens),
            alarms: found.map_or(0, |found| found.alarms().len()),
            output,
        }
    }

    /// Prints the errors of the token that was verified last, with `-v`, and layers that have exceeded their error bound.
    pub(super) fn print(&mut self, (engine, session): (&Engine, &Session)) {
        let Some(found) = engine.observers().verification() else {
            return;
        };
        if found.tokens() > self.tokens
            && let Some(latest) = found.latest()
        {
            self.output.detail(format!(
                "token {}: relative FFN error {}, mean so far {}, contribution recall {}",
                session.position() - 1,
                percent(latest),
                percent(found.mean()),
                percent(found.contribution_recall()),
            ));
        }
        self.tokens = found.tokens();
        for alarm in found.alarms().get(self.alarms..).unwrap_or_default() {
            self.output.say(format!(
                "layer {}: relative FFN error {} over the last {DRIFT_WINDOW} verified tokens exceeds the certified {}, as this text differs from the profile's; it runs `{}` from token {} on",
                alarm.layer,
                percent(alarm.error),
                percent(alarm.certified),
                alarm.fallback,
                alarm.position + 1,
            ));
        }
        self.alarms = found.alarms().len();
    }
}

/// Prints the errors of all verified tokens, if verification is on.
pub(super) fn print_summary(verification: Option<&Verification>, output: Output) {
    let Some(verification) = verification else {
        return;
    };
    let Some(worst) = verification.worst_layer() else {
        output.say("no token was verified; fewer were generated than `--verify-every` asks for");
        return;
    };
    let drift = &verification.layers()[worst];
    output.say(format!(
        "verified {}: mean relative FFN error {}, contribution recall {}; layer {worst} has the largest error: mean {}, maximum {}",
        counted(verification.tokens(), "token"),
        percent(verification.mean()),
        percent(verification.contribution_recall()),
        percent(drift.mean()),
        percent(drift.worst()),
    ));
}

/// The errors of all verified tokens, for `--json`.
pub(super) fn to_json(verification: &Verification) -> serde_json::Value {
    let layers = verification.layers().iter();
    let layers: Vec<_> = layers
        .map(|drift| json!({ "mean_relative_error": drift.mean(), "worst_relative_error": drift.worst(), "contribution_recall": drift.contribution_recall() }))
        .collect();
    let alarms = verification.alarms().iter();
    let alarms: Vec<_> = alarms
        .map(|alarm| json!({ "layer": alarm.layer, "position": alarm.position, "relative_error": alarm.error, "certified": alarm.certified, "fallback": alarm.fallback }))
        .collect();
    json!({ "tokens": verification.tokens(), "contribution_recall": verification.contribution_recall(), "layers": layers, "alarms": alarms })
}
