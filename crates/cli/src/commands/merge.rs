//! `powerinfer merge`: one profile of several, the predictors of all layers, or the rows of all shards.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{
    ArtifactError, counted,
    predictor_file::{self, PredictorFile},
};
use powerinfer_profile::{Profile, ProfileError, merge};
use serde_json::json;

use crate::{
    hint::Advised,
    output::{Output, print, print_json},
    predictor_table, profile_stage,
};

/// Shards to merge, and the target.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer merge my-model.powerinfer/profile-*-of-16 --out my-model.powerinfer/profile\n  powerinfer merge my-model.powerinfer/predictors-*-of-8 --out my-model.powerinfer/predictors\n  powerinfer merge sweep-*-of-4.jsonl --out sweep.jsonl"
)]
pub(crate) struct MergeArguments {
    /// Profiles of one model: all shards of a text, or profiles of different texts. Or all shards of a training, of a
    /// certificate, of an evaluation or of a sweep
    #[arg(required = true, value_name = "SHARD|PROFILE")]
    parts: Vec<PathBuf>,
    /// Folder or file to write what is merged to, created if missing
    #[arg(long, value_name = "DIR|FILE")]
    out: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &MergeArguments, output: Output) -> Result<()> {
    let out = resolved(&arguments.out);
    for part in &arguments.parts {
        let part = resolved(part);
        if out.starts_with(&part) || part.starts_with(&out) {
            bail!(Advised::new(
                format!(
                    "`{}` is one of the folders to be merged, or holds one, or is in one",
                    arguments.out.display()
                ),
                "give another folder with `--out`"
            ));
        }
    }
    if arguments.parts[0].join(predictor_file::FILE).exists() {
        return merge_predictors(arguments, output);
    }
    if arguments.parts[0].is_file() {
        return merge_rows(arguments, output);
    }
    let profiles = arguments
        .parts
        .iter()
        .map(|path| Profile::open(path))
        .collect::<Result<Vec<_>, ProfileError>>()?;
    let merged = merge(&profiles, &arguments.out)?;
    if arguments.json {
        return print_json(&json!({ "header": merged.header(), "profile": merged.document() }));
    }
    print(profile_stage::report(merged.document()))?;
    profile_stage::say_result(&merged, output);
    Ok(())
}

fn merge_predictors(arguments: &MergeArguments, output: Output) -> Result<()> {
    let parts = arguments.parts.iter();
    let files = parts
        .map(|folder| PredictorFile::open_file(&folder.join(predictor_file::FILE)))
        .collect::<Result<Vec<_>, ArtifactError>>()?;
    let merged = powerinfer_predictor::merge(&files, &arguments.out)?;
    if arguments.json {
        return print_json(&json!({ "header": merged.header(), "layers": merged.layers() }));
    }
    print(predictor_table::summary(merged.layers()))?;
    output.say(format!(
        "merged {} of {}; written to `{}`",
        counted(merged.layers().len(), "layer"),
        counted(files.len(), "shard"),
        merged.path().display()
    ));
    Ok(())
}

fn merge_rows(arguments: &MergeArguments, output: Output) -> Result<()> {
    let rows = powerinfer_eval::merge(&arguments.parts, &arguments.out)?;
    if arguments.json {
        return print_json(&json!({ "rows": rows, "out": arguments.out }));
    }
    output.say(format!(
        "merged {} of {}; written to `{}`",
        counted(rows, "row"),
        counted(arguments.parts.len(), "shard"),
        arguments.out.display()
    ));
    Ok(())
}

/// `path` without links and detours, as far as it is there.
fn resolved(path: &Path) -> PathBuf {
    if let Ok(whole) = path.canonicalize() {
        return whole;
    }
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => resolved(parent),
        Some(_) => resolved(Path::new(".")),
        None => return path.to_owned(),
    };
    parent.join(path.file_name().unwrap_or_default())
}
