//! Measures what a bundle's policies do on text that nothing was fitted to, and writes it down.

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

/// Floating-point operations that a certificate may take unless told otherwise; large models are
/// certified on fewer tokens.
const WORK: f64 = 2e13;

/// Fewest tokens that decide or certify anything: of fewer, no interval can be believed.
pub(crate) const FEWEST: usize = 100;

/// Tokens to certify a model of so many parameters on, unless told otherwise.
pub(crate) fn usual_tokens(parameters: usize) -> usize {
    ((WORK / (2 * parameters.max(1)) as f64) as usize).clamp(1024, 8192)
}

/// The texts of `reserved` that decisions are made on, and those they are certified on; at most
/// `tokens` tokens of each.
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

/// Measures `bundle` as planned on `texts`, in the usual windows.
pub(crate) fn measure(
    bundle: &Bundle,
    texts: &[Vec<u32>],
    perplexity_budget: f64,
    progress: &dyn Progress,
) -> Result<Certificate, PlannerError> {
    measure_in(bundle, windows(bundle), texts, perplexity_budget, progress)
}

/// Measures again what `written` says.
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
    progress.begin("certifying", scored(texts) as u64, "tokens");
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

/// What differs between a certificate and the same measured again, in words; none where nothing does.
pub fn difference(written: &Certificate, found: &Certificate) -> Option<String> {
    let [written, found] = [written, found].map(|certificate| json!(certificate));
    differs("", &written, &found)
}

/// The first place at which two documents differ by more than rounding in text.
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
