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
use powerinfer_model::{Checkpoint, Files, ModelConfig};
use powerinfer_runtime::SamplingSettings;
use powerinfer_text::Tokenizer;

pub(crate) use crate::model_name::{DEMO, model_elsewhere, work_folder, work_folder_of};
use crate::{
    hint::Advised,
    model_name::{holds_model, hub_name, is_model, untagged},
    output::Output,
    progress::Bar,
};

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
    let model = untagged(model);
    let folder = Path::new(model);
    let is_work_folder = folder.is_dir()
        && folder
            .extension()
            .is_some_and(|ending| ending == "powerinfer")
        && !holds_model(folder);
    let is_demo = is_work_folder && folder.file_name() == work_folder(DEMO).file_name();
    // A folder called `demo` right here is meant when it is there and holds a model.
    if is_demo || (model == DEMO && !folder.join("config.json").exists()) {
        return Ok(Files::Embedded {
            name: DEMO,
            files: powerinfer_datasets::demo::FILES,
        });
    }
    if is_work_folder {
        bail!(Advised::new(
            format!("`{model}` is the folder of a prepared model, not a model"),
            "give the model that it was prepared from"
        ));
    }
    if folder.file_name().is_some_and(|name| name == "Modelfile") {
        bail!(Advised::new(
            "Modelfiles are not supported",
            "give the model that its `FROM` names"
        ));
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

/// The command that prepares the model `argument`, in backquotes.
pub(crate) fn prepare_command(argument: &str) -> String {
    let text = match argument {
        DEMO => "",
        _ => " --data TEXT",
    };
    format!("`powerinfer prepare {}{text}`", shell_quoted(argument))
}

/// The folder of the bundle meant by `argument`: the bundle itself, a work folder with a bundle
/// in it, or the name of a model whose work folder is here.
pub(crate) fn bundle_folder(argument: &str) -> PathBuf {
    let given = PathBuf::from(untagged(argument));
    let named = work_folder_of(argument).join("bundle");
    [given.clone(), given.join("bundle"), named.clone()]
        .into_iter()
        .find(|folder| Bundle::is_bundle(folder))
        .unwrap_or_else(|| {
            if given.is_dir() && !holds_model(&given) {
                given
            } else {
                named
            }
        })
}

/// The name of the prepared model whose bundle is in `folder`, as `list` shows it; `None` if `folder` is neither a work folder nor
/// `bundle` in one.
pub(crate) fn prepared_name(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    work_name(&folder)
        .or_else(|| work_name(folder.parent().filter(|_| folder.ends_with("bundle"))?))
}

/// The name of the work folder `folder`: without its ending, or as it is if `prepare --out` made it; `None` if it is not one.
fn work_name(folder: &Path) -> Option<String> {
    let name = folder.file_name()?.to_str()?;
    let named = name.strip_suffix(".powerinfer");
    let own = || folder.join("profile").is_dir().then_some(name);
    named.or_else(own).map(str::to_owned)
}

/// Opens the bundle meant by `argument`, as [`bundle_folder`] finds it.
///
/// # Errors
///
/// It cannot be opened, there is none, or `argument` is a model that is not prepared.
pub(crate) fn open_bundle(argument: &str) -> Result<Bundle> {
    let argument = untagged(argument);
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
        if argument == DEMO || is_model(argument) {
            bail!(Advised::new(
                format!(
                    "`{argument}` is a model, and there is no bundle of it in `{}`",
                    folder.display()
                ),
                format!("{} makes one", prepare_command(argument))
            ));
        }
        bail!(Advised::new(
            if argument.ends_with(".gguf") && !given.exists() {
                format!("there is no file `{argument}`")
            } else {
                format!("there is no bundle in `{}`", folder.display())
            },
            bundles_here()
        ));
    }
    let bundle = Bundle::open(&folder, IntegrityCheck::Quick)?;
    check_origin(argument, &bundle)?;
    Ok(bundle)
}

/// Checks that `bundle`, which was found by name, was made from the model that `argument` names, if `argument` is a model path or a
/// hub name.
pub(crate) fn check_origin(argument: &str, bundle: &Bundle) -> Result<()> {
    let path = Path::new(argument);
    let is_path = path.components().count() > 1 || path.is_file();
    // `folder/name` is also the path of a prepared model.
    let name = hub_name(argument).filter(|_| !work_folder(argument).is_dir());
    let files = match name {
        // Only the cache is searched: running a bundle must not need the network.
        Some(name) => {
            let hub = Hub::from_environment().ok();
            let cached = hub.and_then(|hub| hub.in_cache(&name));
            cached.map(|snapshot| Files::open(&snapshot.path))
        }
        None if is_path && is_model(argument) && path.exists() => Some(Files::open(path)),
        None => return Ok(()),
    };
    let made_from = &bundle.header().model;
    let what = match files.map(|files| files.map(powerinfer_import::open_checkpoint)) {
        Some(Ok(Ok(model))) if model.identity().fingerprint != made_from.fingerprint => {
            format!("not of `{argument}`")
        }
        // A model that cannot be opened has no identity; the bundle runs without it.
        Some(_) => return Ok(()),
        None => format!(
            "and `{argument}` may be a different model: it was not fetched, so the two were not compared"
        ),
    };
    let work = bundle.folder().parent().unwrap_or(bundle.folder());
    bail!(Advised::new(
        format!(
            "`{}` is a bundle of {made_from}, {what}",
            bundle.folder().display()
        ),
        format!(
            "run that bundle with `powerinfer run {}`, or prepare this model in another folder: `powerinfer prepare {} --data TEXT --out FOLDER`",
            shell_quoted(&work.to_string_lossy()),
            shell_quoted(argument)
        )
    ))
}

/// The bundles in the work folders in `folder`, by name.
pub(crate) fn bundles_in(folder: &Path) -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bundles = entries.filter_map(|entry| {
        let (name, bundle) = (work_name(&entry.path())?, entry.path().join("bundle"));
        Bundle::is_bundle(&bundle).then_some((name, bundle))
    });
    // What `run NAME` runs comes last: a folder of that name goes before one with the ending.
    let mut bundles: Vec<_> = bundles.collect();
    bundles.sort_by_key(|(name, bundle)| bundle.parent().is_some_and(|work| work.ends_with(name)));
    bundles.into_iter().collect()
}

/// The names of the bundles that are here, or how to make one.
fn bundles_here() -> String {
    let names = bundles_in(Path::new(".")).into_keys();
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() {
        "no model is prepared in this folder; `powerinfer prepare MODEL` prepares one, and `powerinfer prepare demo` the built-in one".to_owned()
    } else {
        format!("prepared in this folder: {}", names.join(", "))
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

/// The work folder here of the model called `name`, if there is a finished artifact in it.
pub(crate) fn existing_work_folder(name: &str) -> Option<PathBuf> {
    let folder = work_folder_of(name);
    let mut artifacts = ["profile", "predictors", "bundle"].into_iter();
    artifacts
        .any(|artifact| folder.join(artifact).is_dir())
        .then_some(folder)
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
            if path == folder {
                format!("there is no folder `{}`", folder.display())
            } else {
                format!(
                    "there is neither an artifact at `{}` nor a work folder `{}`",
                    path.display(),
                    folder.display()
                )
            },
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
