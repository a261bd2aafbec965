//! `powerinfer logits`: what a model says to a token sequence, for comparison with others.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ByteSize, counted,
    plan::Policy,
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
};
use powerinfer_bundle::pack_plain;
use powerinfer_model::LanguageModel;
use powerinfer_reference::ReferenceModel;
use powerinfer_runtime::SingleSession;

use crate::{
    engine::{EngineArguments, PolicyArgument, evaluated::EngineKind, open_engine},
    hint::Advised,
    model_argument::{self, bundle_folder},
    output::Output,
    progress::Bar,
};

/// Which logits to write, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  powerinfer logits ./my-model --ids 1,15,27 --engine reference --out logits.safetensors"
)]
pub(crate) struct LogitsArguments {
    /// Model (a folder, a GGUF file, `org/name` on the hub, or `demo`), or a bundle
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Token ids, comma-separated
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// Implementation of the forward pass [default: runtime for a bundle, reference for a model]
    #[arg(long)]
    engine: Option<EngineKind>,
    #[command(flatten)]
    execution: EngineArguments,
    /// File to write: tensor `logits`, float32, [tokens, vocabulary]
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    out: PathBuf,
}

pub(crate) fn run(arguments: &LogitsArguments, output: Output) -> Result<()> {
    let is_bundle = model_argument::existing_bundle(&arguments.model).is_some();
    if !is_bundle {
        model_argument::check_model_or_bundle(&arguments.model)?;
    }
    let engine = arguments.engine.unwrap_or(if is_bundle {
        EngineKind::Runtime
    } else {
        EngineKind::Reference
    });
    let policy = arguments.execution.policy;
    let (logits, vocabulary) = match (engine, is_bundle) {
        (EngineKind::Runtime, true) => forward(
            SingleSession::new(open_engine(&arguments.model, &arguments.execution, output)?)?,
            &arguments.ids,
        )?,
        (EngineKind::Runtime, false) => {
            let checkpoint = model_argument::open_checkpoint(&arguments.model, output)?;
            let policy: Policy = policy.unwrap_or(PolicyArgument::Dense).into();
            if policy == Policy::Predicted {
                bail!(Advised::new(
                    "a model has no predictors",
                    "prepare it and give the bundle for `--policy predicted`"
                ));
            }
            let folder = tempfile::tempdir()
                .context("cannot make a temporary folder for the packed weights")?;
            let bundle = pack_plain(
                &checkpoint,
                arguments.ids.len(),
                &[],
                &folder.path().join("bundle"),
            )?;
            let (policy, bar) = (Some(policy), Bar::new(output));
            let model =
                SingleSession::open(bundle, policy, &arguments.execution.execution()?, &bar)?;
            forward(model, &arguments.ids)?
        }
        (EngineKind::Reference, false) => {
            if policy.is_some_and(|policy| policy != PolicyArgument::Dense) {
                bail!(Advised::new(
                    "the reference engine is dense",
                    "use `--engine runtime` for a policy"
                ));
            }
            forward(
                ReferenceModel::load(&model_argument::open_checkpoint(&arguments.model, output)?)?,
                &arguments.ids,
            )?
        }
        (EngineKind::Reference, true) => bail!(Advised::new(
            format!(
                "`{}` is a bundle, which the reference engine cannot read",
                bundle_folder(&arguments.model).display()
            ),
            "give the model it was made from"
        )),
    };
    let bytes: Vec<u8> = logits
        .iter()
        .flat_map(|logit| logit.to_le_bytes())
        .collect();
    let shape = vec![arguments.ids.len(), vocabulary];
    let tensors = BTreeMap::from([(
        "logits".to_owned(),
        TensorSource::owned(Dtype::F32, shape, bytes),
    )]);
    write_tensors(&arguments.out, None, &tensors)?;
    output.say(format!(
        "logits of {} written to `{}`, {}",
        counted(arguments.ids.len(), "token"),
        arguments.out.display(),
        ByteSize(logits.len() as u64 * 4)
    ));
    Ok(())
}

/// All logits of one sequence, and the size of the vocabulary.
fn forward(mut model: impl LanguageModel, ids: &[u32]) -> Result<(Vec<f32>, usize)> {
    let logits = model.forward(ids)?;
    Ok((logits, model.config().vocabulary_size))
}
