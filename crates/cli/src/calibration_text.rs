//! Calibration text: files a person gives, or the demo's own calibration tasks.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};
use powerinfer_datasets::minipython::{Split, tasks};
use powerinfer_model::{Files, ModelConfig};
use powerinfer_profile::{Amount, Calibration, RESERVED, Source};
use powerinfer_text::{SpecialTokens, Tokenizer};

use crate::model_argument::DEMO;

/// Longest calibration sequence.
const SEQUENCE: usize = 512;

/// Most tokens taken where the amount is `auto`.
const AUTO_LIMIT: usize = 131_072;

/// A token is longer than this many bytes so rarely that no more text is read for one.
const BYTES_PER_TOKEN: usize = 16;

/// Which text to use, and how much.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Calibration text")]
pub(crate) struct CalibrationArguments {
    /// Text file, or folder of text files, to calibrate on; given several times, each is a source of its own in the
    /// report, and sources are interleaved in sequences of at most 512 tokens [default for `demo`: its own
    /// calibration tasks]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) data: Vec<PathBuf>,
    /// Calibration tokens; `auto` reads until `--settled` holds and there are enough samples for training, 131072
    /// at most
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub(crate) tokens: Tokens,
    /// With `--tokens auto`: overlap that the most frequently active 20 % of a layer must reach between two
    /// independent halves of the text (Jaccard, mean over layers)
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = share)]
    pub(crate) settled: f64,
}

/// How much text to profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tokens {
    /// So many tokens.
    Count(usize),
    /// As many as it takes.
    Auto,
}

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(count)) => Ok(Self::Count(count)),
            _ => Err("give a number of tokens, or `auto`".to_owned()),
        }
    }
}

/// A share above 0 and up to 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("give a share above 0 and up to 1, such as 0.9".to_owned()),
    }
}

impl CalibrationArguments {
    /// How much of the text is profiled.
    pub(crate) fn amount(&self) -> Amount {
        match self.tokens {
            Tokens::Count(_) => Amount::Everything,
            Tokens::Auto => Amount::UntilSettled {
                overlap: self.settled,
            },
        }
    }

    /// Most tokens that are needed.
    fn limit(&self) -> usize {
        match self.tokens {
            Tokens::Count(tokens) => tokens,
            Tokens::Auto => AUTO_LIMIT,
        }
    }
}

/// Reads and tokenises the text.
pub(crate) fn calibration(
    arguments: &CalibrationArguments,
    files: &Files,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    seed: u64,
) -> Result<Calibration> {
    let encode = |text: &str| document(tokenizer, config, text);
    let length = SEQUENCE.min(config.context_length);
    let limit = arguments.limit();
    // Held-out text is read in addition to the profiled text.
    let wanted = limit.saturating_add(RESERVED);
    let sources = if arguments.data.is_empty() {
        if files.name() != DEMO {
            bail!(
                "no calibration text for `{}`; give text like what the model will see: `--data FILE`",
                files.name()
            );
        }
        vec![Source {
            name: "calibration tasks of the demo".to_owned(),
            documents: demo_tasks(Split::Calibration, seed, wanted, &encode)?,
        }]
    } else {
        let sources = arguments.data.iter().map(|path| {
            let documents = documents(path, length, wanted, &encode)?;
            let name = path.file_name().unwrap_or(path.as_os_str());
            let name = name.to_string_lossy().into_owned();
            Ok(Source { name, documents })
        });
        sources.collect::<Result<_>>()?
    };
    Ok(Calibration::new(sources, length, limit)?)
}

/// Texts to judge a model by, at most `limit` tokens of them: documents at `paths`, or where there
/// are none, and the model is the demo, tasks that it was not trained on.
pub(crate) fn texts(
    paths: &[PathBuf],
    is_demo: bool,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    limit: usize,
) -> Result<Vec<Vec<u32>>> {
    let whole = |text: &str| document(tokenizer, config, text);
    let part = |text: &str| encode(tokenizer, config, text);
    let mut texts = Vec::new();
    if paths.is_empty() {
        if !is_demo {
            bail!("no text to judge by; give text that the profile has not seen: `--data FILE`");
        }
        texts = demo_tasks(Split::HeldOut, 1, limit, &whole)?;
    }
    for path in paths {
        texts.extend(documents(path, limit, limit, &part)?);
    }
    let mut left = limit;
    for text in &mut texts {
        text.truncate(left);
        left -= text.len();
    }
    texts.retain(|text| !text.is_empty());
    Ok(texts)
}

/// Token ids of `text`, with what the tokenizer puts before it.
fn encode(tokenizer: &Tokenizer, config: &ModelConfig, text: &str) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text, SpecialTokens::Add)?;
    let outside = |token: &&u32| **token as usize >= config.vocabulary_size;
    if let Some(token) = ids.iter().find(outside) {
        bail!(
            "the tokenizer gives token {token}, the model has {} tokens; they do not belong together",
            config.vocabulary_size
        );
    }
    Ok(ids)
}

/// The same with the end of text after it.
fn document(tokenizer: &Tokenizer, config: &ModelConfig, text: &str) -> Result<Vec<u32>> {
    let mut ids = encode(tokenizer, config, text)?;
    ids.extend(tokenizer.eos().map(|end| end.id));
    Ok(ids)
}

/// Tasks of the demo, until there are `limit` tokens of them.
fn demo_tasks(
    split: Split,
    seed: u64,
    limit: usize,
    encode: &dyn Fn(&str) -> Result<Vec<u32>>,
) -> Result<Vec<Vec<u32>>> {
    let mut documents = Vec::new();
    let mut count = 0;
    for task in tasks(split, seed) {
        if count >= limit {
            break;
        }
        let ids = encode(&task.text())?;
        count += ids.len();
        documents.push(ids);
    }
    Ok(documents)
}

/// The tokens of the documents at `path`: of each as many, and as many of them, as `limit` tokens
/// in sequences of `length` could need.
fn documents(
    path: &Path,
    length: usize,
    limit: usize,
    encode: &dyn Fn(&str) -> Result<Vec<u32>>,
) -> Result<Vec<Vec<u32>>> {
    let mut documents: Vec<Vec<u32>> = Vec::new();
    let mut sequences = 0;
    for file in text_files(path)? {
        if sequences >= limit {
            break;
        }
        let most = limit.saturating_mul(BYTES_PER_TOKEN);
        let text = read_text(&file, most)?;
        if text.trim().is_empty() {
            bail!("`{}` is empty; give a file with text", file.display());
        }
        let mut ids = encode(&text)?;
        ids.truncate(limit);
        // Documents are interleaved, so once each gives one full sequence, more documents are not read.
        sequences += ids.len().min(length);
        documents.push(ids);
    }
    Ok(documents)
}

/// The first `most` bytes of the text file at `path`, or all of it where it is shorter.
fn read_text(path: &Path, most: usize) -> Result<String> {
    let context = || format!("cannot read `{}`", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(context)?;
    let read = file.take(most as u64).read_to_end(&mut bytes);
    let read = read.with_context(context)?;
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text),
        // A character at the end may have been cut.
        Err(error) if read == most && error.utf8_error().error_len().is_none() => {
            let valid = error.utf8_error().valid_up_to();
            let mut bytes = error.into_bytes();
            bytes.truncate(valid);
            Ok(String::from_utf8(bytes).expect("this much is valid"))
        }
        Err(_) => bail!(
            "`{}` is not UTF-8 text; convert it, or leave it out",
            path.display()
        ),
    }
}

/// The file at `path`, or the text files in the folder there, sorted.
fn text_files(path: &Path) -> Result<Vec<PathBuf>> {
    const ENDINGS: [&str; 6] = ["txt", "md", "py", "rs", "json", "jsonl"];
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries =
        std::fs::read_dir(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry
            .with_context(|| format!("cannot read `{}`", path.display()))?
            .path();
        let ending = file
            .extension()
            .map(|ending| ending.to_string_lossy().to_lowercase());
        if file.is_file() && ending.is_some_and(|ending| ENDINGS.contains(&&*ending)) {
            files.push(file);
        }
    }
    if files.is_empty() {
        bail!(
            "`{}` has no text files ({}); give files by name",
            path.display(),
            ENDINGS.join(", ")
        );
    }
    files.sort();
    Ok(files)
}

/// Reports paths that do not exist before any work begins.
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
