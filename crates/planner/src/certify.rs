//! Certification: measures the quality of a bundle's policies on held-out text.

use std::collections::BTreeSet;

use powerinfer_artifact::{
    Progress,
    certificate::{Certificate, LayerCertificate, Scoring, decisions},
    plan::Policy,
    progress::Silent,
    token_texts,
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::{Windows, fidelity};
use powerinfer_pool::usable_cores;
use powerinfer_runtime::{Execution, Runtime, Verification};
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use crate::{
    PlannerError,
    search::{scored, windows},
};

/// Floating-point operations of a certification by default; large models are certified on fewer tokens.
const WORK: f64 = 2e13;

/// Minimum number of tokens for a decision or a certificate: below it, confidence intervals are unreliable.
pub(crate) const FEWEST: usize = 100;

/// Default number of tokens for certifying a model with this number of parameters.
pub(crate) fn usual_tokens(parameters: u64) -> usize {
    ((WORK / (2 * parameters.max(1)) as f64) as usize).clamp(1024, 8192)
}

/// Splits `reserved` into texts for decisions and texts for certification, at most `tokens` tokens each.
pub(crate) fn split(reserved: &[Vec<u32>], tokens: usize) -> [Vec<Vec<u32>>; 2] {
    [0, 1].map(|half| {
        let mut left = tokens;
        let texts = reserved.iter().skip(half).step_by(2);
        let mut taken = Vec::new();
        for text in texts.filter(|text| text.len() > 1) {
            let text = &text[..text.len().min(left)];
            left -= text.len();
            if text.len() > 1 {
                taken.push(text.to_vec());
            }
        }
        taken
    })
}

/// Measures `bundle` under its plan on `texts`, in the default windows.
pub(crate) fn measure(
    bundle: &Bundle,
    texts: &[Vec<u32>],
    perplexity_budget: f64,
    progress: &dyn Progress,
) -> Result<Certificate, PlannerError> {
    measure_in(bundle, windows(bundle), texts, perplexity_budget, progress)
}

/// Repeats the measurement of the certificate `written`, on the same texts and windows.
///
/// # Errors
///
/// The context is shorter than the windows, the bundle cannot be read or run, or `progress` interrupts.
pub fn measure_again(
    bundle: &Bundle,
    written: &Certificate,
    progress: &dyn Progress,
) -> Result<Certificate, PlannerError> {
    let windows = Windows {
        length: written.scoring.window as usize,
        stride: written.scoring.stride as usize,
    };
    let context = bundle.plan().budget.context_tokens;
    if written.scoring.window > context {
        return Err(PlannerError::ShortContext {
            window: written.scoring.window,
            folder: bundle.folder().to_owned(),
            context,
        });
    }
    let texts = bundle.certificate_texts()?;
    measure_in(bundle, windows, &texts, written.perplexity_budget, progress)
}

fn measure_in(
    bundle: &Bundle,
    windows: Windows,
    texts: &[Vec<u32>],
    perplexity_budget: f64,
    progress: &dyn Progress,
) -> Result<Certificate, PlannerError> {
    let execution = Execution::on_cpu(usable_cores());
    let open = |policy: Option<Policy>| -> Result<Runtime, PlannerError> {
        let again = Bundle::open(bundle.folder(), powerinfer_bundle::IntegrityCheck::Quick)?;
        Ok(Runtime::open(again, policy, &execution, &Silent)?)
    };
    let mut dense = open(Some(Policy::Dense))?;
    let mut planned = open(None)?;
    planned.verify(Verification::of_all(bundle.config().layer_count));
    let tokens = scored(texts);
    if let Some(seconds) = seconds(bundle, tokens) {
        progress.note(&format!(
            "certifying on {tokens} held-out tokens, about {seconds:.0} s"
        ));
    }
    progress.begin("certifying", tokens as u64, "tokens");
    let found = fidelity(&mut dense, &mut planned, texts, windows, |tokens| {
        progress.advance(tokens).map_err(PlannerError::from)
    })?;
    progress.end();
    let computed = planned.take_statistics().computed_share();
    let drifts = planned.verification().map_or(&[][..], Verification::layers);
    let layers = drifts.iter().zip(&bundle.plan().layers);
    let tokenizer = Tokenizer::from_directory(bundle.folder())?;
    let bos_token = tokenizer.bos().map(|bos| bos.id);
    Ok(Certificate {
        scoring: Scoring {
            texts: texts.len() as u64,
            tokens: found.tokens(),
            window: windows.length as u64,
            stride: windows.stride as u64,
            bos_token: bos_token.filter(|bos| texts.iter().all(|text| text.first() == Some(bos))),
            digest: token_texts::digest(texts),
        },
        decisions: decisions(&bundle.plan().layers),
        perplexity_budget,
        dense_perplexity: found.dense().perplexity(),
        perplexity: found.other().perplexity(),
        perplexity_rise: found.perplexity_rise(),
        kl_divergence_mean: found.mean_divergence(),
        kl_divergence_p99: found.divergence_p99(),
        top1_agreement: found.top1_agreement(),
        texts_without_divergence: found.texts_without_divergence(),
        tokens_to_first_divergence: found.tokens_to_first_divergence(),
        ffn_neurons_computed: computed,
        layers: layers
            .map(|(drift, layer)| LayerCertificate {
                layer: layer.layer,
                policy: layer.policy,
                relative_error: drift.mean(),
                relative_error_p99: drift.p99(),
                error_bound: drift.worst_window(),
                contribution_recall: drift.contribution_recall(),
            })
            .collect(),
    })
}

/// Predicted time of two passes over `tokens` tokens on the CPU; `None` below two seconds, and if the plan's hardware has
/// no speed of GEMMs.
fn seconds(bundle: &Bundle, tokens: usize) -> Option<f64> {
    let operations = 2.0 * 2.0 * bundle.config().parameters() as f64 * tokens as f64;
    let seconds = operations / bundle.plan().hardware.cpu.operations_per_second?;
    (seconds >= 2.0).then_some(seconds)
}

/// First difference between a certificate and a new measurement, in words; `None` if they agree.
pub fn difference(written: &Certificate, found: &Certificate) -> Option<String> {
    let [written, found] = [written, found].map(|certificate| json!(certificate));
    differs("", &written, &found)
}

/// First difference of two JSON values beyond the rounding of their text form.
fn differs(place: &str, written: &Value, found: &Value) -> Option<String> {
    let inside = |name: &str| match place {
        "" => name.to_owned(),
        place => format!("{place}.{name}"),
    };
    match (written, found) {
        (Value::Object(a), Value::Object(b)) => {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            names.into_iter().find_map(|name| {
                let none = &Value::Null;
                let [a, b] = [a, b].map(|object| object.get(name).unwrap_or(none));
                differs(&inside(name), a, b)
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let pairs = a.iter().zip(b).enumerate();
            pairs.fold(None, |first, (index, (a, b))| {
                first.or_else(|| differs(&format!("{place}[{index}]"), a, b))
            })
        }
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64()?, b.as_f64()?);
            let is_near = (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-3);
            (!is_near).then(|| format!("`{place}` is {b}, the certificate says {a}"))
        }
        (a, b) => (a != b).then(|| format!("`{place}` is {b}, the certificate says {a}")),
    }
}
