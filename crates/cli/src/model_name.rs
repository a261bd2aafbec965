//! Names of models on the command line: paths, `org/name` on the hub, and the word `demo`.

use std::path::{Path, PathBuf};

use powerinfer_hub::ModelName;
use powerinfer_model::{gguf_model, gguf_name};

/// The word for the model that is embedded in the program.
pub(crate) const DEMO: &str = "demo";

/// The model on the hub that `argument` means: what is here goes before it.
pub(crate) fn hub_name(argument: &str) -> Option<ModelName> {
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
    let name = untagged(argument.to_str().filter(|_| !argument.exists())?);
    (name == DEMO || hub_name(name).is_some()).then_some(name)
}

/// The work folder of the model `name`, `./<name>.powerinfer`. A `name` that ends in `.powerinfer` is the folder
/// itself.
pub(crate) fn work_folder(name: &str) -> PathBuf {
    let name = name.strip_suffix(".powerinfer").unwrap_or(name);
    PathBuf::from(format!("{name}.powerinfer"))
}

/// The work folder of the model meant by `argument`, which is a path or a name on the hub.
pub(crate) fn work_folder_of(argument: &str) -> PathBuf {
    let argument = untagged(argument);
    let given = Path::new(argument);
    let in_folder = gguf_model(given).ok().flatten();
    let given = in_folder.as_deref().unwrap_or(given);
    // The work folder next to what a path names; prepared models here have names without folders.
    let beside = work_folder(argument);
    let is_elsewhere = !given.exists() && given.components().count() > 1;
    match (hub_name(argument), given.file_name()) {
        (name, _) if is_elsewhere && (name.is_none() || beside.is_dir()) => beside,
        (Some(name), _) => work_folder(name.name()), // without the revision
        // If `demo.gguf` is missing, it does not stand for the prepared model `demo`.
        (None, Some(name)) if !given.exists() => work_folder(&name.to_string_lossy()),
        (None, Some(name)) => work_folder(gguf_name(&name.to_string_lossy())),
        (None, None) => work_folder(argument),
    }
}

/// `argument` without Ollama's default tag `:latest`, or `demo` if it is the name of the demo's work folder. An existing path is
/// returned unchanged.
pub(crate) fn untagged(argument: &str) -> &str {
    if Path::new(argument).exists() {
        return argument;
    }
    match argument.strip_suffix(":latest").unwrap_or(argument) {
        "demo.powerinfer" => DEMO,
        name => name,
    }
}

/// Whether `argument` means a model: one at a path, the demo, or one on the hub.
pub(crate) fn is_model(argument: &str) -> bool {
    let path = Path::new(argument);
    model_elsewhere(path).is_some() || holds_model(path)
}

/// Returns whether `path` is a GGUF file, or a folder that contains a model.
pub(crate) fn holds_model(path: &Path) -> bool {
    let has_gguf = || gguf_model(path).is_ok_and(|file| file.is_some());
    let is_gguf = || {
        path.extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
    };
    (path.is_file() && is_gguf()) || path.join("config.json").is_file() || has_gguf()
}
