//! What a person may write for a model or a bundle, and the folder where its artifacts live.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::ByteSize;
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_hub::{Hub, ModelName, Snapshot};
use powerinfer_model::{Checkpoint, Files};
use powerinfer_text::Tokenizer;

use crate::{output::Output, progress::Bar};

/// The word for the model that is embedded in the program.
pub(crate) const DEMO: &str = "demo";

/// Opens the checkpoint called `model`: a folder, a GGUF file, `org/name` on the hub, or the word
/// `demo`.
pub(crate) fn open_checkpoint(model: &str, output: Output) -> Result<Checkpoint> {
    Ok(powerinfer_import::open_checkpoint(files(model, output)?)?)
}

/// The files of the model called `model`; they are fetched if they are on the hub alone.
pub(crate) fn files(model: &str, output: Output) -> Result<Files> {
    let folder = Path::new(model);
    // A folder called `demo` right here is meant when it is there and holds a model.
    if model == DEMO && !folder.join("config.json").exists() {
        return Ok(Files::Embedded {
            name: DEMO,
            files: powerinfer_datasets::demo::FILES,
        });
    }
    match hub_name(model) {
        Some(name) => {
            let snapshot = Hub::from_environment()?.pull(&name, &Bar::new(output))?;
            if snapshot.files.iter().any(|file| file.fetched) {
                output.say(describe(&name, &snapshot));
            }
            Ok(Files::open(&snapshot.path)?.named(name.name()))
        }
        None => Ok(Files::open(folder)?),
    }
}

/// The model on the hub that `argument` means: what is here goes before it.
fn hub_name(argument: &str) -> Option<ModelName> {
    if Path::new(argument).exists() {
        return None;
    }
    ModelName::parse(argument).ok()
}

/// `argument`, where it means a model that is not at a path here: the demo, or one on the hub.
pub(crate) fn model_elsewhere(argument: &Path) -> Option<&str> {
    let name = argument.to_str().filter(|_| !argument.exists())?;
    (name == DEMO || hub_name(name).is_some()).then_some(name)
}

/// One line about what was fetched.
pub(crate) fn describe(name: &ModelName, snapshot: &Snapshot) -> String {
    let fetched = snapshot.files.iter().filter(|file| file.fetched);
    let bytes = fetched.clone().map(|file| file.bytes);
    format!(
        "fetched `{name}`: {} of {} files, {}; commit {}",
        fetched.count(),
        snapshot.files.len(),
        ByteSize(bytes.fold(0, u64::saturating_add)),
        snapshot.commit,
    )
}

/// The folder for the artifacts of the model called `name`, `./<name>.powerinfer`; a name that ends so is that of the
/// folder.
pub(crate) fn work_folder(name: &str) -> PathBuf {
    let name = name.strip_suffix(".powerinfer").unwrap_or(name);
    PathBuf::from(format!("{name}.powerinfer"))
}

/// The folder of the bundle meant by `argument`: the bundle itself, a work folder with a bundle
/// in it, or the name of a model whose work folder is here.
pub(crate) fn bundle_folder(argument: &str) -> PathBuf {
    let given = PathBuf::from(argument);
    let name = match (hub_name(argument), given.file_name()) {
        (Some(name), _) => name.name().to_owned(), // without the revision
        (None, Some(name)) => {
            let name = name.to_string_lossy();
            name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
        }
        (None, None) => argument.to_owned(),
    };
    [
        given.clone(),
        given.join("bundle"),
        work_folder(&name).join("bundle"),
    ]
    .into_iter()
    .find(|folder| Bundle::is_bundle(folder))
    .unwrap_or_else(
        || match given.is_dir() && !given.join("config.json").is_file() {
            true => given,
            false => work_folder(&name).join("bundle"),
        },
    )
}

/// Opens the bundle meant by `argument`, as [`bundle_folder`] finds it.
///
/// # Errors
///
/// It cannot be opened, or `argument` is a model that is not prepared.
pub(crate) fn open_bundle(argument: &str) -> Result<Bundle> {
    let folder = bundle_folder(argument);
    if !Bundle::is_bundle(&folder) {
        let path = Path::new(argument);
        let is_file = |name: &str| path.join(name).is_file();
        if argument == DEMO || path.is_file() || is_file("config.json") {
            bail!(
                "`{argument}` is a model, and there is no bundle of it in `{}`; make one with `powerinfer prepare {argument}`",
                folder.display()
            );
        }
    }
    Ok(Bundle::open(&folder, IntegrityCheck::Quick)?)
}

/// The folder of the bundle that `argument` is, or that is in it; none where it is a model, as the word
/// `demo` always is.
pub(crate) fn existing_bundle(argument: &str) -> Option<PathBuf> {
    let given = PathBuf::from(argument);
    if argument == DEMO || given.join("config.json").exists() {
        return None;
    }
    let inside = given.join("bundle");
    [given, inside]
        .into_iter()
        .find(|folder| Bundle::is_bundle(folder))
}

/// The tokenizer among `files`.
pub(crate) fn tokenizer(files: &Files) -> Result<Tokenizer> {
    if let Some(folder) = files.as_folder() {
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
