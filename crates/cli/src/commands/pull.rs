//! `powerinfer pull`: a model from the hub.

use anyhow::{Result, bail};
use powerinfer_hub::{Hub, ModelName};
use serde_json::{Value, json};

use crate::{
    hint::Advised,
    model_argument::{DEMO, describe},
    output::{Output, print_data, print_json},
    progress::Bar,
};

/// Model to download.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer pull SparseLLM/prosparse-llama-2-7b\n  powerinfer pull org/name@refs/pr/3 --file model.Q8_0.gguf\n\nEnvironment, as for Hugging Face's own tools: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HUB_OFFLINE."
)]
pub(crate) struct PullArguments {
    /// Model on the hub, and its branch, tag or commit: `org/name` or `org/name@revision`
    model: String,
    /// Download only this file, such as one of several GGUF files
    #[arg(long, value_name = "NAME")]
    file: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &PullArguments, output: Output) -> Result<()> {
    if arguments.model == DEMO {
        bail!(Advised::new(
            "`demo` is part of the program, so there is nothing to download",
            "`powerinfer prepare demo` prepares it"
        ));
    }
    let name = ModelName::parse(&arguments.model)?;
    let hub = Hub::from_environment()?;
    let bar = Bar::new(output);
    let snapshot = match &arguments.file {
        Some(file) => hub.pull_file(&name, file, &bar)?,
        None => hub.pull(&name, &bar)?,
    };
    output.say(describe(&name, &snapshot));
    if arguments.json {
        let files: Vec<Value> = snapshot
            .files
            .iter()
            .map(|file| json!({ "name": file.name, "bytes": file.bytes, "fetched": file.fetched }))
            .collect();
        return print_json(&json!({
            "model": name.repository(),
            "revision": name.revision(),
            "commit": snapshot.commit,
            "folder": snapshot.folder,
            "path": snapshot.path,
            "files": files,
        }));
    }
    print_data(format!("{}\n", snapshot.path.display()))
}
