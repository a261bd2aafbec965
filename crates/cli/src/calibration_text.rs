//! Calibration text: files a person gives, or the demo's own calibration tasks.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use powerinfer_datasets::minipython::{Split, tasks};
use powerinfer_model::{Files, ModelConfig};
use powerinfer_profile::Calibration;
use powerinfer_text::{SpecialTokens, Tokenizer};

use crate::model_argument::DEMO;

/// Longest calibration sequence.
const SEQUENCE: usize = 512;

/// Which text to use, and how much.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Calibration text")]
pub(crate) struct CalibrationArguments {
    /// Text file, or folder of text files, to calibrate on; may be given several times
    /// [default for `demo`: its own calibration tasks]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) data: Vec<PathBuf>,
    /// Calibration tokens
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    pub(crate) tokens: usize,
}

/// Reads and tokenises the text.
pub(crate) fn calibration(
    arguments: &CalibrationArguments,
    files: &Files,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    seed: u64,
) -> Result<Calibration> {
    let encode = |text: &str| -> Result<Vec<u32>> {
        let mut ids = tokenizer.encode(text, SpecialTokens::Add)?;
        if let Some(token) = ids
            .iter()
            .find(|token| **token as usize >= config.vocabulary_size)
        {
            bail!(
                "the tokenizer gives token {token}, the model has {} tokens; they do not belong together",
                config.vocabulary_size
            );
        }
        ids.extend(tokenizer.eos().map(|end| end.id));
        Ok(ids)
    };
    let length = SEQUENCE.min(config.context_length);
    let mut documents = Vec::new();
    let mut count = 0;
    if arguments.data.is_empty() {
        if files.name() != DEMO {
            bail!(
                "no calibration text for `{}`; give text like what the model will see: `--data FILE`",
                files.name()
            );
        }
        for task in tasks(Split::Calibration, seed) {
            if count >= arguments.tokens {
                break;
            }
            let ids = encode(&task.text())?;
            count += ids.len();
            documents.push(ids);
        }
    }
    for path in text_files(&arguments.data)? {
        if count >= arguments.tokens {
            break;
        }
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let Ok(text) = String::from_utf8(bytes) else {
            bail!(
                "`{}` is not UTF-8 text; convert it, or leave it out",
                path.display()
            );
        };
        if text.trim().is_empty() {
            bail!("`{}` is empty; give a file with text", path.display());
        }
        let ids = encode(&text)?;
        count += ids.len();
        documents.push(ids);
    }
    Ok(Calibration::new(documents, length, arguments.tokens)?)
}

/// The files meant: files as given, folders by the text files in them, sorted.
fn text_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    const ENDINGS: [&str; 6] = ["txt", "md", "py", "rs", "json", "jsonl"];
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries =
            std::fs::read_dir(path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let mut inside = Vec::new();
        for entry in entries {
            let file = entry
                .with_context(|| format!("cannot read `{}`", path.display()))?
                .path();
            let ending = file
                .extension()
                .map(|ending| ending.to_string_lossy().to_lowercase());
            if file.is_file() && ending.is_some_and(|ending| ENDINGS.contains(&&*ending)) {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            bail!(
                "`{}` has no text files ({}); give files by name",
                path.display(),
                ENDINGS.join(", ")
            );
        }
        inside.sort();
        files.extend(inside);
    }
    Ok(files)
}

/// Paths that do not exist, told before any work begins.
pub(crate) fn check_paths(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        if !Path::exists(path) {
            bail!(
                "`{}` does not exist; `--data` takes text files or folders of them",
                path.display()
            );
        }
    }
    Ok(())
}
