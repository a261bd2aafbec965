//! What a person may write for a model or a bundle, and the folder where its artifacts live.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use powerinfer_bundle::Bundle;
use powerinfer_model::{Checkpoint, Files};
use powerinfer_text::Tokenizer;

/// The word for the model that is embedded in the program.
pub(crate) const DEMO: &str = "demo";

/// Opens the checkpoint called `model`: a folder, a GGUF file, or the word `demo`.
pub(crate) fn open_checkpoint(model: &str) -> Result<Checkpoint> {
    Ok(Checkpoint::from_files(files(model)?)?)
}

/// The files of the model called `model`.
pub(crate) fn files(model: &str) -> Result<Files> {
    let folder = Path::new(model);
    // A folder called `demo` right here is meant when it is there and holds a model.
    if model == DEMO && !folder.join("config.json").exists() {
        return Ok(Files::Embedded {
            name: DEMO,
            files: powerinfer_datasets::demo::FILES,
        });
    }
    Ok(Files::open(folder)?)
}

/// The folder for the artifacts of the model called `name`: `./<name>.powerinfer`.
pub(crate) fn work_folder(name: &str) -> PathBuf {
    PathBuf::from(format!("{name}.powerinfer"))
}

/// The folder of the bundle meant by `argument`: the bundle itself, a work folder with a bundle
/// in it, or the name of a model whose work folder is here.
pub(crate) fn bundle_folder(argument: &str) -> PathBuf {
    let given = PathBuf::from(argument);
    let name = given.file_name().map_or_else(
        || argument.to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    [
        given.clone(),
        given.join("bundle"),
        work_folder(&name).join("bundle"),
    ]
    .into_iter()
    .find(|folder| Bundle::is_bundle(folder))
    .unwrap_or_else(|| {
        if given.is_dir() {
            given
        } else {
            work_folder(&name).join("bundle")
        }
    })
}

/// The tokenizer among `files`.
pub(crate) fn tokenizer(files: &Files) -> Result<Tokenizer> {
    if let Files::Folder(folder) = files {
        return Ok(Tokenizer::from_directory(folder)?);
    }
    let read = |name: &str| {
        files
            .read(name)
            .ok()
            .flatten()
            .map(|bytes| bytes.to_vec().into())
    };
    Tokenizer::from_files(read).with_context(|| format!("the tokenizer of `{}`", files.name()))
}
