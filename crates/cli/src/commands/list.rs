//! `powerinfer list`: the prepared models in this folder.

use std::{fs, path::Path, time::SystemTime};

use anyhow::Result;
use powerinfer_artifact::{ByteSize, counted};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use serde_json::json;

use crate::{
    certificate_table,
    model_argument::bundles_in,
    output::{Output, Table, print, print_json},
    plan_table::policies,
};

/// The folder and the form of the list.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer list")]
pub(crate) struct ListArguments {
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &ListArguments, output: Output) -> Result<()> {
    let mut table = Table::new(&[
        "name",
        "size",
        "weights",
        "VRAM",
        "policies",
        "certificate",
        "prepared",
    ]);
    let mut models = Vec::new();
    let mut is_incomplete = false;
    let bundles = bundles_in(Path::new("."));
    if bundles.is_empty() && !arguments.json {
        output.say(
            "there are no prepared models in this folder; `powerinfer prepare MODEL` makes one",
        );
        return Ok(());
    }
    for (name, folder) in bundles {
        let bundle = match Bundle::open(&folder, IntegrityCheck::Quick) {
            Ok(bundle) => bundle,
            Err(error) => {
                output.say(format!("`{name}` cannot be opened: {error}"));
                continue;
            }
        };
        let bytes = bundle.bytes_on_disk();
        let (plan, quant) = (bundle.plan(), bundle.quant());
        let certificate = certificate_table::state(&bundle);
        is_incomplete |= certificate == certificate_table::INCOMPLETE;
        let changed = fs::metadata(&folder).and_then(|found| found.modified());
        let age = changed
            .ok()
            .and_then(|time| SystemTime::now().duration_since(time).ok());
        table.row(vec![
            name.clone(),
            ByteSize(bytes).to_string(),
            quant.to_string(),
            ByteSize(plan.totals.gpu_bytes).to_string(),
            policies(plan),
            certificate.to_owned(),
            age.map_or("-".to_owned(), |age| ago(age.as_secs())),
        ]);
        models.push(json!({
            "name": name,
            "folder": folder,
            "bytes": bytes,
            "weights": quant.to_string(),
            "gpu_bytes": plan.totals.gpu_bytes,
            "policies": policies(plan),
            "certificate": certificate,
            "seconds_ago": age.map(|age| age.as_secs()),
        }));
    }
    if arguments.json {
        return print_json(&json!({ "models": models }));
    }
    if !models.is_empty() {
        print(table.to_string())?;
    }
    if is_incomplete {
        output.say("a certificate is incomplete because certification was interrupted; to complete it, run the same `powerinfer prepare` again");
    }
    Ok(())
}

/// `seconds` as a person would say it.
fn ago(seconds: u64) -> String {
    let (count, unit) = match seconds {
        0..60 => return "just now".to_owned(),
        60..3600 => (seconds / 60, "minute"),
        3600..86400 => (seconds / 3600, "hour"),
        _ => (seconds / 86400, "day"),
    };
    format!(
        "{} ago",
        counted(usize::try_from(count).unwrap_or(usize::MAX), unit)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_unit() {
        let ages = [0, 59, 60, 7199, 7200, 86399, 86400, 400_000_000].map(ago);
        let words = [
            "just now",
            "just now",
            "1 minute ago",
            "1 hour ago",
            "2 hours ago",
            "23 hours ago",
            "1 day ago",
            "4629 days ago",
        ];
        assert_eq!(ages, words);
    }
}
