//! Settings of earlier runs on the same model: an option that is not given again keeps its value.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use clap::{Arg, ArgMatches, Args, Command, parser::ValueSource};
use powerinfer_artifact::{
    ArtifactError, Header, ModelIdentity, document::Document, shell_quoted, write::write_file,
};
use serde::{Deserialize, Serialize};

use crate::{output::Output, progress::interrupted};

/// File in the work folder of a model: options by name, with their values.
const FILE: &str = "settings.json";

/// Format name in the file's header.
const FORMAT: &str = "powerinfer-settings";
/// Version of the format.
const VERSION: u32 = 1;

/// Options of a single run.
const NOT_KEPT: [&str; 14] = [
    "certify-later",
    "certify-shard",
    "data",
    "device",
    "dry-run",
    "force",
    "html",
    "json",
    "out",
    "predictors",
    "profile",
    "quick",
    "reset",
    "shard",
];

/// Values of options, by the option's name.
type Values = BTreeMap<String, Vec<String>>;

/// Content of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Settings {
    options: Values,
}

/// The option that starts afresh.
#[derive(Debug, clap::Args)]
pub(crate) struct ResetArgument {
    /// Forget the options of earlier runs, which are otherwise kept if they are not given again
    #[arg(long)]
    pub(crate) reset: bool,
}

/// Calls `run` with `arguments`, filling in options kept in the work `folder`. `matches` are the top-level parsed arguments. The
/// given options are kept for later runs, except in a dry run or if the run fails; an interrupted or killed run keeps them. Without a
/// folder, no options are filled in or kept. Kept options that `check` refuses are not filled in.
///
/// # Errors
///
/// The settings file cannot be read or written, or `run` fails.
pub(crate) fn with_earlier<A: Args>(
    arguments: &A,
    matches: &ArgMatches,
    folder: Option<&PathBuf>,
    model: &ModelIdentity,
    output: Output,
    check: impl Fn(&A) -> Result<()>,
    run: impl FnOnce(&A) -> Result<()>,
) -> Result<()> {
    let (Some(folder), Some((_, given))) = (folder, matches.subcommand()) else {
        return run(arguments);
    };
    let command = A::augment_args(Command::new("powerinfer").no_binary_name(true));
    let path = folder.join(FILE);
    // Read even with `--reset`, so that a file not written by powerinfer is never replaced.
    let earlier = read(&path, model)?;
    let earlier = earlier.filter(|_| !given.get_flag("reset"));
    let earlier = earlier.unwrap_or_default();
    let mut line = words_of(&command, given);
    let (mut kept, mut dropped) = (Vec::new(), Vec::new());
    let mut all = earlier.clone();
    for (name, values) in &earlier {
        let is_new = |option: &&Arg| !is_given(option, given);
        let mut known = options(&command);
        let option = known.find_map(|(known, option)| (known == name).then_some(option));
        let Some(option) = option.filter(is_new) else {
            continue;
        };
        let more = words(option, values.iter().map(OsStr::new));
        let both = [line.clone(), more.clone()].concat();
        let parsed = command.clone().try_get_matches_from(&both);
        let parsed = parsed.and_then(|both| A::from_arg_matches(&both));
        let words = more.iter().map(|word| shown(&word.to_string_lossy()));
        match parsed {
            // Its values are no longer valid, or it cannot be combined with those given.
            Err(_) => {
                dropped.extend(words);
                all.remove(name);
            }
            Ok(parsed) if check(&parsed).is_ok() => {
                kept.extend(words);
                line = both;
            }
            Ok(_) => {}
        }
    }
    all.extend(given_values(&command, given));
    if !kept.is_empty() {
        output.say(format!(
            "as in earlier runs: {} (`--reset` forgets them)",
            kept.join(" ")
        ));
    }
    if !dropped.is_empty() {
        output.say(format!(
            "no longer kept, because this version rejects them or they conflict with the options you gave: {}",
            dropped.join(" ")
        ));
    }
    let arguments = A::from_arg_matches(&command.get_matches_from(line))?;
    if matches!(given.try_get_one("dry_run"), Ok(Some(true))) {
        return run(&arguments);
    }
    // Before the run, so that a killed one is resumed with its settings, as an interrupted one is.
    let before = fs::read(&path).ok();
    let is_new_folder = !folder.exists();
    write(&path, model, all)?;
    let result = run(&arguments);
    if result.is_err() && !interrupted() {
        match before {
            Some(bytes) => write_file(&path, &bytes)?,
            None if path.exists() => fs::remove_file(&path).map_err(ArtifactError::write(&path))?,
            None => {}
        }
        if is_new_folder {
            let _ = fs::remove_dir(folder); // fails if there is anything in it
        }
    }
    result
}

/// The options of `matches` that later runs keep.
fn given_values(command: &Command, matches: &ArgMatches) -> Values {
    let given = options(command).filter(|(_, option)| is_given(option, matches));
    let values = given.map(|(name, option)| {
        let values = raw_values(option, matches).map(|value| value.to_string_lossy().into_owned());
        (name.to_owned(), values.collect())
    });
    values.collect()
}

/// Reads the settings of `model` from `path`. `None` if the file does not exist or belongs to another model.
fn read(path: &Path, model: &ModelIdentity) -> Result<Option<Values>, ArtifactError> {
    if !path.exists() {
        return Ok(None);
    }
    let document = Document::<Settings>::read(path, FORMAT, VERSION)?;
    let is_same = document.header.model.fingerprint == model.fingerprint;
    Ok(is_same.then_some(document.body.options))
}

fn write(path: &Path, model: &ModelIdentity, options: Values) -> Result<(), ArtifactError> {
    if options.is_empty() && !path.exists() {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(ArtifactError::write(folder))?;
    }
    let header = Header::new(FORMAT, VERSION, model.clone(), 0);
    let body = Settings { options };
    Document { header, body }.write(path)
}

/// The options of `command` that later runs keep, with their names.
fn options(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let named = command
        .get_arguments()
        .filter_map(|option| Some((option.get_long()?, option)));
    named.filter(|(name, _)| !NOT_KEPT.contains(name))
}

/// Whether `option` is on the command line.
fn is_given(option: &Arg, matches: &ArgMatches) -> bool {
    matches.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine)
}

/// Command-line words for the arguments given in `matches`.
fn words_of(command: &Command, matches: &ArgMatches) -> Vec<OsString> {
    let given = command
        .get_arguments()
        .filter(|option| is_given(option, matches));
    given
        .flat_map(|option| words(option, raw_values(option, matches)))
        .collect()
}

/// Values of an option as they were given.
fn raw_values<'a>(option: &Arg, matches: &'a ArgMatches) -> impl Iterator<Item = &'a OsStr> {
    matches
        .get_raw(option.get_id().as_str())
        .into_iter()
        .flatten()
}

/// The option `word`, `--name=value`, as users write it.
fn shown(word: &str) -> String {
    match word.split_once('=') {
        Some((name, value)) => format!("{name} {}", shell_quoted(value)),
        None => word.to_owned(),
    }
}

/// Command-line words that give `option` these values; a positional argument has no name.
fn words<'a>(option: &Arg, values: impl Iterator<Item = &'a OsStr>) -> Vec<OsString> {
    match option.get_long() {
        None => values.map(OsStr::to_owned).collect(),
        Some(name) if !option.get_action().takes_values() => vec![format!("--{name}").into()],
        Some(name) => values
            .map(|value| {
                let mut word = OsString::from(format!("--{name}="));
                word.push(value);
                word
            })
            .collect(),
    }
}
