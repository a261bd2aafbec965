//! Certification: measures the quality of a bundle's policies on held-out text, window by window.
//!
//! Windows are measured independently of each other, so that shards of them can be measured on several machines. Each
//! measured window is a line of a file next to the bundle, from which a stopped certification resumes.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{
    Digest, Hint, Progress, Shard,
    certificate::{self, Certificate, LayerCertificate, Scoring, certified_settings},
    plan::Policy,
    progress::Silent,
    token_texts,
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::{EvalError, Fidelity, ResultFile, Run, WindowComparison, Windows};
use powerinfer_pool::usable_cores;
use powerinfer_runtime::{Drift, Execution, SingleSession, Verification};
use powerinfer_text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{PlannerError, machine, search::windows};

/// Floating-point operations of a certification by default; large models are certified on fewer tokens.
const WORK: f64 = 2e13;

/// Minimum number of tokens for a decision or a certificate: below it, confidence intervals are unreliable.
pub(crate) const FEWEST: usize = 100;

/// Default number of tokens for certifying a model with this number of parameters.
pub fn usual_tokens(parameters: u64) -> usize {
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

/// Remedy for too few tokens in `texts`, which [`split`] limited to `tokens` tokens.
pub(crate) fn more_text(texts: &[Vec<u32>], tokens: usize) -> Hint {
    let taken: usize = texts.iter().map(Vec::len).sum();
    if taken < tokens {
        Hint::ProfileMoreText // a larger limit would add nothing
    } else {
        Hint::MoreHeldOutText
    }
}

/// Begin, end and number of scored tokens of a window of a text.
type Window = (usize, usize, usize);

/// The measurement of a bundle's certificate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measurement<'a> {
    pub(crate) bundle: &'a Bundle,
    pub(crate) texts: &'a [Vec<u32>],
    pub(crate) windows: Windows,
}

/// Measures of a window, from which those of all windows are computed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeasuredWindow {
    comparison: WindowComparison,
    neurons_computed: u64,
    neurons: u64,
    /// Per layer, relative error and contribution recall of each of its tokens.
    layers: Vec<(Vec<f32>, Vec<f64>)>,
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
    let context = bundle.plan().budget.context_tokens;
    if written.scoring.window > context {
        return Err(PlannerError::ShortContext {
            window: written.scoring.window,
            folder: bundle.folder().to_owned(),
            context,
        });
    }
    let texts = bundle.certificate_texts()?;
    let measurement = Measurement {
        bundle,
        texts: &texts,
        windows: Windows {
            length: written.scoring.window as usize,
            stride: written.scoring.stride as usize,
        },
    };
    let measured = measurement.measure(Shard::WHOLE, None, progress)?;
    measurement.certificate(&measured, written.perplexity_budget)
}

/// File next to the bundle in `folder` with the measured windows of `shard`.
pub fn windows_file(folder: &Path, shard: Shard) -> PathBuf {
    let whole = folder.canonicalize();
    let folder = whole.as_deref().unwrap_or(folder);
    let bundle = folder.file_name().unwrap_or_default().to_string_lossy();
    folder.with_file_name(shard.file_name(&format!("{bundle}-certificate.jsonl")))
}

impl<'a> Measurement<'a> {
    /// Prepares the measurement of `bundle` on `texts`, in the default windows.
    pub(crate) fn new(bundle: &'a Bundle, texts: &'a [Vec<u32>]) -> Self {
        Self {
            bundle,
            texts,
            windows: windows(bundle),
        }
    }

    /// All windows, each with its text.
    fn all_windows(&self) -> Vec<(&'a [u32], Window)> {
        let of_text = |text: &'a Vec<u32>| {
            let windows = self.windows.over(text.len()).into_iter();
            windows.map(|window| (text.as_slice(), window))
        };
        self.texts.iter().flat_map(of_text).collect()
    }

    /// Measures the windows of `shard` and keeps them in its [`windows_file`]; returns their number and that of all.
    pub(crate) fn measure_shard(
        &self,
        shard: Shard,
        progress: &dyn Progress,
    ) -> Result<(usize, usize), PlannerError> {
        let all = self.all_windows().len();
        if shard.range(all).is_empty() {
            return Err(PlannerError::EmptyShard {
                shard,
                windows: all,
            });
        }
        let file = windows_file(self.bundle.folder(), shard);
        let measured = self.measure(shard, Some(&file), progress)?;
        Ok((measured.len(), all))
    }

    /// Measures all windows that are in no file yet, and computes the certificate.
    pub(crate) fn measure_all(
        &self,
        perplexity_budget: f64,
        progress: &dyn Progress,
    ) -> Result<Certificate, PlannerError> {
        let file = windows_file(self.bundle.folder(), Shard::WHOLE);
        let measured = self.measure(Shard::WHOLE, Some(&file), progress)?;
        self.certificate(&measured, perplexity_budget)
    }

    /// Measures the bundle under its plan, and `dense`, in the windows of `shard`; resumes from `file`.
    fn measure(
        &self,
        shard: Shard,
        file: Option<&Path>,
        progress: &dyn Progress,
    ) -> Result<Vec<MeasuredWindow>, PlannerError> {
        let all = self.all_windows();
        let range = shard.range(all.len());
        let run = Run {
            digest: self.digest(),
            shard,
            rows: range.len(),
        };
        let mut results = match file {
            None => ResultFile::open(None, &run)?,
            Some(file) => match ResultFile::open_or_replace(file, &run) {
                // Another run certifies under this name: this one keeps its windows in memory.
                Err(EvalError::Busy { .. }) if shard == Shard::WHOLE => {
                    ResultFile::open(None, &run)?
                }
                results => results?,
            },
        };
        let mine = || range.clone().zip(&all[range.clone()]);
        let left = mine().filter(|(index, _)| !results.has(*index));
        let tokens: usize = left.map(|(_, (_, window))| window.2).sum();
        if tokens > 0 {
            if let Some(seconds) = seconds(self.bundle, tokens) {
                progress.note(&format!(
                    "certifying on {tokens} reserved tokens, about {seconds:.0} s"
                ));
            }
            progress.begin("certifying", tokens as u64, "tokens");
            let mut dense = self.open(Some(Policy::Dense))?;
            let mut planned = self.open(None)?;
            planned.verify(Verification::of_all(self.bundle.config().layer_count));
            for (index, (text, window)) in mine() {
                if results.has(index) {
                    continue;
                }
                results.get_or(index, || measure(&mut dense, &mut planned, text, *window))?;
                progress.advance(window.2 as u64)?;
            }
            progress.end();
        }
        Ok(results.into_results())
    }

    fn open(&self, policy: Option<Policy>) -> Result<SingleSession, PlannerError> {
        let execution = Execution::on_cpu(usable_cores());
        let check = powerinfer_bundle::IntegrityCheck::Quick;
        let bundle = Bundle::open(self.bundle.folder(), check)?;
        Ok(SingleSession::open(bundle, policy, &execution, &Silent)?)
    }

    /// Digest of everything that the measures depend on.
    fn digest(&self) -> String {
        let mut files = self.bundle.manifest_document().body.files.clone();
        files.retain(|name, _| ![certificate::FILE, certificate::TEXT_FILE].contains(&&**name));
        let settings = json!({
            "bundle": files,
            "text": token_texts::digest(self.texts),
            "window": self.windows.length,
            "stride": self.windows.stride,
            "version": env!("CARGO_PKG_VERSION"),
        });
        Digest::from_content(settings.to_string().as_bytes()).to_string()
    }

    /// The certificate that all windows, `measured` in order, make.
    fn certificate(
        &self,
        measured: &[MeasuredWindow],
        perplexity_budget: f64,
    ) -> Result<Certificate, PlannerError> {
        let (bundle, texts) = (self.bundle, self.texts);
        let mut found = Fidelity::default();
        let mut rest = measured.iter();
        for text in texts {
            found.begin_text();
            for window in rest.by_ref().take(self.windows.over(text.len()).len()) {
                found.push(&window.comparison);
            }
        }
        let sum = |count: fn(&MeasuredWindow) -> u64| measured.iter().map(count).sum::<u64>();
        let [computed, neurons] = [sum(|w| w.neurons_computed), sum(|w| w.neurons)];
        let files = bundle.files();
        let read = |name: &str| Some(files.read(name).ok()??.to_vec().into());
        let tokenizer = Tokenizer::from_files(read)?;
        let bos_token = tokenizer.bos().map(|bos| bos.id);
        let layers = bundle.plan().layers.iter().enumerate();
        Ok(Certificate {
            scoring: Scoring {
                texts: texts.len() as u64,
                tokens: found.tokens(),
                window: self.windows.length as u64,
                stride: self.windows.stride as u64,
                bos_token: bos_token
                    .filter(|bos| texts.iter().all(|text| text.first() == Some(bos))),
                digest: token_texts::digest(texts),
            },
            decisions: certified_settings(bundle.plan()),
            perplexity_budget,
            dense_perplexity: found.dense().perplexity(),
            perplexity: found.other().perplexity(),
            perplexity_rise: found.perplexity_rise(),
            kl_divergence_mean: found.mean_divergence(),
            kl_divergence_p99: found.divergence_p99(),
            top1_agreement: found.top1_agreement(),
            texts_without_divergence: found.texts_without_divergence(),
            tokens_to_first_divergence: found.tokens_to_first_divergence(),
            ffn_neurons_computed: match neurons {
                0 => 0.0,
                _ => computed as f64 / neurons as f64,
            },
            layers: layers
                .map(|(index, layer)| {
                    let windows = measured
                        .iter()
                        .filter_map(|window| window.layers.get(index));
                    let drift = Drift::from_errors(
                        windows
                            .clone()
                            .flat_map(|(errors, _)| errors)
                            .copied()
                            .collect(),
                        windows.flat_map(|(_, recalls)| recalls).copied().collect(),
                    );
                    LayerCertificate {
                        layer: layer.layer,
                        policy: layer.policy,
                        relative_error: drift.mean(),
                        relative_error_p99: drift.p99(),
                        error_bound: drift.worst_window(),
                        contribution_recall: drift.contribution_recall(),
                    }
                })
                .collect(),
        })
    }
}

/// Measures one window; `planned` verifies all tokens.
fn measure(
    dense: &mut SingleSession,
    planned: &mut SingleSession,
    text: &[u32],
    window: Window,
) -> Result<MeasuredWindow, EvalError> {
    let before = planned
        .observers()
        .verification()
        .map_or(0, Verification::tokens);
    let comparison = WindowComparison::measure(dense, planned, text, window)?;
    let counts = planned.observers_mut().take_statistics();
    let layers = planned
        .observers()
        .verification()
        .map_or(&[][..], Verification::layers);
    Ok(MeasuredWindow {
        comparison,
        neurons_computed: counts.neurons_computed,
        neurons: counts.neurons,
        layers: layers
            .iter()
            .map(|drift| {
                let errors = drift.errors().get(before..).unwrap_or_default();
                let recalls = drift.recalls().get(before..).unwrap_or_default();
                (errors.to_vec(), recalls.to_vec())
            })
            .collect(),
    })
}

/// Removes the file with the measured windows of a bundle that was certified.
pub(crate) fn remove_windows(folder: &Path) {
    let file = windows_file(folder, Shard::WHOLE);
    // Anything that remains, such as a user's link, is not used by other certificates.
    if fs::symlink_metadata(&file).is_ok_and(|found| found.is_file()) {
        let _ = fs::remove_file(file);
    }
}

/// Predicted time of two passes over `tokens` tokens on this machine's CPU; `None` if it is below two seconds or the machine was not
/// measured.
fn seconds(bundle: &Bundle, tokens: usize) -> Option<f64> {
    let operations = 2.0 * 2.0 * bundle.config().parameters_per_token() as f64 * tokens as f64;
    let hardware = machine::kept().ok()??;
    let rate = hardware.cpu.gemm_operations_per_second(bundle.quant())?;
    // Passes that compute all logits reach about this share of the rate.
    let seconds = operations / (0.6 * rate);
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
