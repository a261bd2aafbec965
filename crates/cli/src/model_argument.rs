//! Arguments that name a model or a bundle, and the folder of its artifacts.

use std::{
    collections::BTreeMap,
    error::Error,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, shell_quoted};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_hub::{Hub, ModelName, Snapshot};
use powerinfer_model::{Checkpoint, Files, ModelConfig, gguf_model, gguf_name};
use powerinfer_runtime::SamplingSettings;
use powerinfer_text::Tokenizer;

use crate::{hint::Advised, output::Output, progress::Bar};

/// The word for the model that is embedded in the program.
pub(crate) const DEMO: &str = "demo";

/// Opens the checkpoint called `model`: a folder, a GGUF file, `org/name` on the hub, or the word
/// `demo`.
pub(crate) fn open_checkpoint(model: &str, output: Output) -> Result<Checkpoint> {
    let checkpoint = powerinfer_import::open_checkpoint(files(model, output)?)?;
    if !checkpoint.ignored_keys().is_empty() {
        output.detail(format!(
            "`config.json`: ignored as transformers ignores them: {}",
            checkpoint.ignored_keys().join(", ")
        ));
    }
    Ok(checkpoint)
}

/// Opens the checkpoint `model` and its tokenizer to make artifacts for `run` and `serve`.
///
/// # Errors
///
/// The checkpoint or tokenizer cannot be opened, or the model has settings that `run` would refuse.
pub(crate) fn open_model(model: &str, output: Output) -> Result<(Checkpoint, Tokenizer)> {
    let checkpoint = open_checkpoint(model, output)?;
    SamplingSettings::of_model(checkpoint.files())?;
    let tokenizer = powerinfer_pipeline::tokenizer(checkpoint.files())?;
    Ok((checkpoint, tokenizer))
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
            let hub = Hub::from_environment()?;
            let snapshot = hub.pull_checked(&name, &check_configuration, &Bar::new(output))?;
            if snapshot.files.iter().any(|file| file.fetched) {
                output.say(describe(&name, &snapshot));
            }
            Ok(Files::open(&snapshot.path)?.named(name.name()))
        }
        None => Ok(Files::open(folder)?),
    }
}

/// Refuses a model that is not supported before its weights are downloaded.
fn check_configuration(folder: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    // A missing file is reported when the model is opened.
    if let Some(bytes) = Files::Folder(folder.to_owned()).read("config.json")? {
        ModelConfig::parse(&bytes, &folder.join("config.json"))?;
    }
    Ok(())
}

/// The model on the hub that `argument` means: what is here goes before it.
fn hub_name(argument: &str) -> Option<ModelName> {
    let name = ModelName::parse(argument).ok()?;
    // Repositories may have such names, but a mistyped path must not reach the network; `pull` takes them.
    let is_path = |part: &str| {
        let part = part.to_ascii_lowercase();
        FILE_ENDINGS.iter().any(|ending| part.ends_with(ending))
    };
    let is_path = Path::new(argument).exists() || name.repository().split('/').any(is_path);
    (!is_path).then_some(name)
}

/// Endings of files and folders; what has one is a path, not a model on the hub.
const FILE_ENDINGS: [&str; 10] = [
    ".bin",
    ".gguf",
    ".json",
    ".jsonl",
    ".powerinfer",
    ".pt",
    ".pth",
    ".safetensors",
    ".txt",
    ".zip",
];

/// `argument`, if it means a model that is not at a path here: the demo, or one on the hub.
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

/// The work folder of the model meant by `argument`: of its name, whether that is given as a path or as one on the hub.
pub(crate) fn work_folder_of(argument: &str) -> PathBuf {
    let given = Path::new(argument);
    let in_folder = gguf_model(given).ok().flatten();
    let given = in_folder.as_deref().unwrap_or(given);
    match (hub_name(argument), given.file_name()) {
        (Some(name), _) => work_folder(name.name()), // without the revision
        (None, Some(name)) => {
            let name = name.to_string_lossy();
            work_folder(gguf_name(&name))
        }
        (None, None) => work_folder(argument),
    }
}

/// The folder of the bundle meant by `argument`: the bundle itself, a work folder with a bundle
/// in it, or the name of a model whose work folder is here.
pub(crate) fn bundle_folder(argument: &str) -> PathBuf {
    let given = PathBuf::from(argument);
    let named = work_folder_of(argument).join("bundle");
    [given.clone(), given.join("bundle"), named.clone()]
        .into_iter()
        .find(|folder| Bundle::is_bundle(folder))
        .unwrap_or_else(|| {
            if given.is_dir() && !is_model(&given) {
                given
            } else {
                named
            }
        })
}

/// Returns whether `path` is a file, or a folder that contains a model.
fn is_model(path: &Path) -> bool {
    let has_gguf = || gguf_model(path).is_ok_and(|file| file.is_some());
    path.is_file() || path.join("config.json").is_file() || has_gguf()
}

/// Opens the bundle meant by `argument`, as [`bundle_folder`] finds it.
///
/// # Errors
///
/// It cannot be opened, there is none, or `argument` is a model that is not prepared.
pub(crate) fn open_bundle(argument: &str) -> Result<Bundle> {
    let folder = bundle_folder(argument);
    if !Bundle::is_bundle(&folder) {
        let given = Path::new(argument);
        if let Some(own) = given
            .parent()
            .filter(|parent| given.is_file() && Bundle::is_bundle(parent))
        {
            bail!(Advised::new(
                format!("`{argument}` is a file of the bundle `{}`", own.display()),
                "give the folder of the bundle"
            ));
        }
        let is_demo = argument == DEMO;
        if is_demo || is_model(given) || hub_name(argument).is_some() {
            let text = if is_demo { "" } else { " --data TEXT" };
            bail!(Advised::new(
                format!(
                    "`{argument}` is a model, and there is no bundle of it in `{}`",
                    folder.display()
                ),
                format!(
                    "make one with `powerinfer prepare {}{text}`",
                    shell_quoted(argument)
                )
            ));
        }
        bail!(Advised::new(
            format!("there is no bundle in `{}`", folder.display()),
            bundles_here()
        ));
    }
    Ok(Bundle::open(&folder, IntegrityCheck::Quick)?)
}

/// The bundles in the work folders in `folder`, by name.
pub(crate) fn bundles_in(folder: &Path) -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bundles = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let name = name.strip_suffix(".powerinfer")?.to_owned();
        let bundle = entry.path().join("bundle");
        Bundle::is_bundle(&bundle).then_some((name, bundle))
    });
    bundles.collect()
}

/// The names of the bundles that are here, or how to make one.
fn bundles_here() -> String {
    let names = bundles_in(Path::new(".")).into_keys();
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() {
        "there are none here, `powerinfer prepare MODEL` makes one".to_owned()
    } else {
        format!("the bundles here are {}", names.join(", "))
    }
}

/// The folder of the bundle that `argument` is, that is in it, or that has this name; none if it is a model, as the
/// word `demo` and a name on the hub always are.
pub(crate) fn existing_bundle(argument: &str) -> Option<PathBuf> {
    let given = PathBuf::from(argument);
    if model_elsewhere(&given).is_some() || given.join("config.json").exists() {
        return None;
    }
    let folders = if given.exists() {
        vec![given.clone(), given.join("bundle")]
    } else {
        vec![work_folder_of(argument).join("bundle")]
    };
    folders.into_iter().find(|folder| Bundle::is_bundle(folder))
}

/// The artifact meant by `path`: what is there, or the work folder of the model of that name.
///
/// # Errors
///
/// There is neither.
pub(crate) fn artifact(path: &Path) -> Result<PathBuf> {
    let folder = work_folder_of(&path.to_string_lossy());
    match (path.exists(), folder.is_dir()) {
        (true, _) => Ok(path.to_owned()),
        (false, true) => Ok(folder),
        (false, false) => bail!(Advised::new(
            format!(
                "there is neither an artifact at `{}` nor a work folder `{}`",
                path.display(),
                folder.display()
            ),
            bundles_here()
        )),
    }
}

/// Fails if `argument` is neither a path, nor a model elsewhere.
///
/// # Errors
///
/// Nothing has this name.
pub(crate) fn check_model_or_bundle(argument: &str) -> Result<()> {
    let path = Path::new(argument);
    if !path.exists() && model_elsewhere(path).is_none() {
        bail!(Advised::new(
            format!("there is neither a model nor a bundle called `{argument}`"),
            bundles_here()
        ));
    }
    Ok(())
}
