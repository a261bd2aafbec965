//! `powerinfer merge`: one profile of several.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_profile::{Profile, ProfileError, merge};
use serde_json::json;

use crate::{
    output::{Output, print, print_json},
    profile_stage,
};

/// What to merge, and where to.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  powerinfer merge my-model.powerinfer/profile-*-of-16 --out my-model.powerinfer/profile"
)]
pub(crate) struct MergeArguments {
    /// Profiles of one model: all shards of a text, or profiles of different texts
    #[arg(required = true, value_name = "PROFILE")]
    profiles: Vec<PathBuf>,
    /// Folder to write the merged profile to, created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &MergeArguments, output: Output) -> Result<()> {
    let out = resolved(&arguments.out);
    for profile in &arguments.profiles {
        let profile = resolved(profile);
        if out.starts_with(&profile) || profile.starts_with(&out) {
            bail!(
                "`{}` is one of the profiles to be merged, or holds one, or is in one; give another folder by `--out`",
                arguments.out.display()
            );
        }
    }
    let profiles = arguments
        .profiles
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
