//! The subject of an evaluation: a bundle under policies, or an unpacked model.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use powerinfer_artifact::{Digest, plan::Policy};
use powerinfer_bundle::{Bundle, IntegrityCheck, pack_plain};
use powerinfer_eval::{Subject, leading_tokens};
use powerinfer_model::{Checkpoint, Files};
use powerinfer_reference::ReferenceModel;
use powerinfer_runtime::SingleSession;
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::DeviceArgument;
use crate::{
    hint::Advised,
    model_argument::{self, DEMO, bundle_folder, open_bundle},
    output::Output,
    progress::Bar,
    thread_argument::ThreadArgument,
};

/// Which forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    /// candle, dense, float32; takes a model
    Reference,
    /// PowerInfer runtime; takes a bundle, or a model whose weights it packs as float32
    Runtime,
}

/// Model or bundle to evaluate, and the engine.
#[derive(Debug, clap::Args)]
pub(crate) struct SubjectArguments {
    /// Bundle, a folder with a bundle in it, or the name of a model prepared here; or an unpacked model (folder or
    /// GGUF file)
    #[arg(default_value = DEMO, value_name = "BUNDLE|MODEL")]
    model: String,
    /// Implementation of the forward pass [default: runtime for a bundle, reference for a model]
    #[arg(long)]
    engine: Option<EngineKind>,
    /// Device of the parts that a bundle's plan puts on a GPU
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: DeviceArgument,
    #[command(flatten)]
    threads: ThreadArgument,
}

/// The subject of an evaluation.
pub(crate) struct Evaluated {
    source: Source,
    tokenizer: Tokenizer,
    /// Digest of the tokenizer's files, which a model's digest does not cover.
    tokenizer_files: Digest,
    device: DeviceArgument,
    threads: usize,
}

enum Source {
    /// A bundle, or a model packed as one into a folder that goes when this goes.
    Bundle {
        folder: PathBuf,
        _scratch: Option<tempfile::TempDir>,
    },
    Reference(Box<Checkpoint>),
}

impl SubjectArguments {
    /// Opens the subject; a bundle prepared here takes precedence over the model it was made from.
    pub(crate) fn open(&self, output: Output) -> Result<Evaluated> {
        let given = Path::new(&self.model);
        let folder = bundle_folder(&self.model);
        let is_bundle = Bundle::is_bundle(&folder);
        let is_model =
            !Bundle::is_bundle(given) && (given.is_file() || given.join("config.json").exists());
        let (source, files) = match self.engine {
            Some(EngineKind::Reference) if is_model || self.model == DEMO => {
                self.reference(output)?
            }
            Some(EngineKind::Reference) => bail!(Advised::new(
                format!(
                    "`{}` is not a model, and the reference engine reads only models",
                    self.model
                ),
                "give the model that it was made from"
            )),
            None if is_model && !is_bundle => self.reference(output)?,
            Some(EngineKind::Runtime) if is_model && !is_bundle => {
                let checkpoint = model_argument::open_checkpoint(&self.model, output)?;
                packed(&checkpoint)?
            }
            _ => {
                let bundle = open_bundle(&self.model)?;
                let _scratch = None;
                (Source::Bundle { folder, _scratch }, bundle.files())
            }
        };
        Evaluated::new(source, &files, self.device, self.threads.count())
    }

    fn reference(&self, output: Output) -> Result<(Source, Files)> {
        let checkpoint = model_argument::open_checkpoint(&self.model, output)?;
        let files = checkpoint.files().clone();
        Ok((Source::Reference(Box::new(checkpoint)), files))
    }
}

/// `checkpoint` as a separate bundle, deleted on drop.
fn packed(checkpoint: &Checkpoint) -> Result<(Source, Files)> {
    let scratch =
        tempfile::tempdir().context("cannot make a temporary folder for the packed weights")?;
    let folder = scratch.path().join("bundle");
    pack_plain(checkpoint, checkpoint.config().context_length, &[], &folder)?;
    let _scratch = Some(scratch);
    Ok((
        Source::Bundle { folder, _scratch },
        checkpoint.files().clone(),
    ))
}

impl Evaluated {
    fn new(source: Source, files: &Files, device: DeviceArgument, threads: usize) -> Result<Self> {
        let mut digests = Vec::new();
        for name in Tokenizer::FILES {
            let bytes = files.read(name)?;
            digests.push(bytes.map(|bytes| Digest::from_content(&bytes)));
        }
        Ok(Self {
            source,
            tokenizer: powerinfer_pipeline::tokenizer(files)?,
            tokenizer_files: Digest::from_content(json!(digests).to_string().as_bytes()),
            device,
            threads,
        })
    }

    /// The bundle; none if the reference engine runs a model.
    pub(crate) fn bundle(&self) -> Result<Option<Bundle>> {
        match &self.source {
            Source::Bundle { folder, .. } => Ok(Some(Bundle::open(folder, IntegrityCheck::Quick)?)),
            Source::Reference(_) => Ok(None),
        }
    }

    /// The model that the reference engine runs.
    pub(crate) fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::Reference(checkpoint) => Some(checkpoint),
            Source::Bundle { .. } => None,
        }
    }

    /// The same model packed as float32 for the runtime; none if it is a bundle already.
    pub(crate) fn packed(&self) -> Result<Option<Self>> {
        let Some(checkpoint) = self.checkpoint() else {
            return Ok(None);
        };
        let (source, files) = packed(checkpoint)?;
        let packed = Self::new(source, &files, self.device, self.threads)?;
        Ok(Some(packed))
    }

    /// Threads of the runtime.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Checks that every policy in `policies` can run, before evaluating the others takes hours.
    pub(crate) fn check_policies(
        &self,
        policies: impl IntoIterator<Item = Option<Policy>>,
        output: Output,
    ) -> Result<()> {
        let mut policies = policies.into_iter();
        // The first policy needs no check: if it is not possible, its evaluation fails at once.
        policies.next();
        policies.try_for_each(|policy| self.model(policy, output.silent()).map(drop))
    }

    /// Ready to run under `policy`.
    ///
    /// Fails if the reference engine is to follow any policy but `dense`.
    pub(crate) fn model(&self, policy: Option<Policy>, output: Output) -> Result<Subject> {
        match &self.source {
            Source::Bundle { folder, .. } => {
                let bundle = Bundle::open(folder, IntegrityCheck::Quick)?;
                let execution = self.device.execution(self.threads)?;
                let model = SingleSession::open(bundle, policy, &execution, &Bar::new(output))?;
                Ok(Subject::Engine(Box::new(model)))
            }
            Source::Reference(checkpoint) => {
                if !matches!(policy, None | Some(Policy::Dense)) {
                    bail!(Advised::new(
                        "the reference engine is dense",
                        "use `--engine runtime`, or a bundle, for another `--policy`"
                    ));
                }
                let model = ReferenceModel::load(checkpoint)?;
                Ok(Subject::Reference(Box::new(model)))
            }
        }
    }

    /// Distinguishes it from all others: its files, those of the tokenizer, and the device if the plan uses a GPU.
    pub(crate) fn identity(&self) -> Result<Value> {
        Ok(match &self.source {
            Source::Bundle { folder, .. } => {
                let bundle = Bundle::open(folder, IntegrityCheck::Quick)?;
                let mut device = None;
                if bundle.plan().uses_gpu() {
                    device = self.device.choice()?.open(|_| {})?;
                }
                json!({
                    "files": bundle.manifest_document().body.files,
                    "tokenizer": self.tokenizer_files,
                    "device": device.map(|device| device.info().name.clone()),
                })
            }
            Source::Reference(checkpoint) => json!({
                "reference": checkpoint.identity(),
                "tokenizer": self.tokenizer_files,
            }),
        })
    }
}

/// Token ids of the text of the certificate of `bundle`, at most `tokens`. `None` if there is no certificate, if `data` names other
/// text, or if the bundle is the demo, which has tasks instead.
pub(crate) fn certificate_texts(
    bundle: &Bundle,
    data: &[PathBuf],
    tokens: Option<usize>,
    output: Output,
) -> Result<Option<Vec<Vec<u32>>>> {
    let is_demo = bundle.header().model.name == DEMO;
    if bundle.certificate().is_none() || !data.is_empty() || is_demo {
        return Ok(None);
    }
    output.say("evaluating on the text of the bundle's certificate; use `--data` for other text");
    let texts = bundle.certificate_texts()?;
    Ok(Some(leading_tokens(&texts, tokens.unwrap_or(usize::MAX))))
}
