//! Calibration text: files a person gives, or the demo's own calibration tasks.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Error, Result, anyhow, bail};
use powerinfer_artifact::counted;
use powerinfer_corpus::{Corpus, Encoder, EndOfText, STDIN, Skipped};
use powerinfer_datasets::minipython::{Split, tasks};
use powerinfer_model::{Files, ModelConfig};
use powerinfer_profile::{Amount, Calibration, RESERVED, Source};
use powerinfer_text::Tokenizer;

use crate::{model_argument::DEMO, output::Output};

/// Longest calibration sequence.
const SEQUENCE: usize = 512;

/// Most tokens taken if the amount is `auto`.
const AUTO_LIMIT: usize = 131_072;

/// Number of skipped files that are listed individually.
const LISTED: usize = 5;

/// Which text to use, and how much.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Calibration text")]
pub(crate) struct CalibrationArguments {
    /// Text to calibrate on: a file, a folder with its subfolders, or `-` for stdin. Text, source code, JSON, JSON Lines, CSV
    /// and Parquet, also with gzip or zstd; records have `text`, `content`, `messages`, `conversations`, or `prompt` with
    /// `completion`. If given several times, the report lists each separately, and the sources are interleaved in sequences
    /// of at most 512 tokens [default for `demo`: its own calibration tasks]
    #[arg(long, value_name = "FILE|DIR|-")]
    pub(crate) data: Vec<PathBuf>,
    /// Calibration tokens; `auto` reads until `--settled` holds and there are enough samples for training, 131072
    /// at most
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub(crate) tokens: Tokens,
    /// With `--tokens auto`: overlap that the most frequently active 20% of a layer must reach between two
    /// independent halves of the text (Jaccard, mean over layers)
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = share)]
    pub(crate) settled: f64,
}

/// How much text to profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tokens {
    /// So many tokens.
    Count(usize),
    /// Until the counts are stable.
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
    output: Output,
) -> Result<Calibration> {
    let encoder = encoder(tokenizer, config, EndOfText::Add);
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
            formats: BTreeMap::new(),
            documents: demo_tasks(Split::Calibration, seed, wanted, &encoder)?,
        }]
    } else {
        let corpora = read(&arguments.data, &encoder, length, wanted, output)?;
        let source = |(name, corpus): (String, Corpus)| Source {
            name,
            formats: formats(&corpus),
            documents: corpus.documents,
        };
        corpora.into_iter().map(source).collect()
    };
    Ok(Calibration::new(sources, length, limit)?)
}

/// Texts to judge a model by, at most `limit` tokens of them: documents at `paths`, or if there
/// are none, and the model is the demo, tasks that it was not trained on.
pub(crate) fn texts(
    paths: &[PathBuf],
    is_demo: bool,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    limit: usize,
    output: Output,
) -> Result<Vec<Vec<u32>>> {
    let mut texts: Vec<Vec<u32>> = if paths.is_empty() {
        if !is_demo {
            bail!("no text to judge by; give text that the profile has not seen: `--data FILE`");
        }
        let encoder = encoder(tokenizer, config, EndOfText::Add);
        demo_tasks(Split::HeldOut, 1, limit, &encoder)?
    } else {
        let encoder = encoder(tokenizer, config, EndOfText::Omit);
        let corpora = read(paths, &encoder, limit, limit, output)?;
        let documents = corpora.into_iter().map(|(_, corpus)| corpus.documents);
        documents.flatten().collect()
    };
    let mut left = limit;
    for text in &mut texts {
        text.truncate(left);
        left -= text.len();
    }
    texts.retain(|text| !text.is_empty());
    Ok(texts)
}

fn encoder<'a>(tokenizer: &'a Tokenizer, config: &ModelConfig, end: EndOfText) -> Encoder<'a> {
    Encoder {
        tokenizer,
        vocabulary_size: config.vocabulary_size,
        end,
    }
}

/// Tasks of the demo, until there are `limit` tokens of them.
fn demo_tasks(
    split: Split,
    seed: u64,
    limit: usize,
    encoder: &Encoder<'_>,
) -> Result<Vec<Vec<u32>>> {
    let mut documents = Vec::new();
    let mut count = 0;
    for task in tasks(split, seed) {
        if count >= limit {
            break;
        }
        let ids = encoder.text(&task.text())?;
        count += ids.len();
        documents.push(ids);
    }
    Ok(documents)
}

/// Returns name and documents of each of `paths` that has documents; reports what was read and what was skipped.
fn read(
    paths: &[PathBuf],
    encoder: &Encoder<'_>,
    length: usize,
    limit: usize,
    output: Output,
) -> Result<Vec<(String, Corpus)>> {
    let mut corpora = Vec::new();
    let mut skipped = Vec::new();
    for path in paths {
        let mut corpus = Corpus::read(path, encoder, length, limit)?;
        skipped.append(&mut corpus.skipped);
        if corpus.documents.is_empty() {
            continue;
        }
        let name = match path.to_str() {
            Some(STDIN) => "standard input".into(),
            _ => path
                .file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy(),
        };
        let tokens: usize = corpus.documents.iter().map(Vec::len).sum();
        output.say(format!(
            "text: `{name}`, {} ({}), {}",
            counted(corpus.documents.len(), "document"),
            formats(&corpus).into_keys().collect::<Vec<_>>().join(", "),
            counted(tokens, "token"),
        ));
        corpora.push((name.into_owned(), corpus));
    }
    if corpora.is_empty() {
        return Err(no_text(paths, &skipped));
    }
    say_skipped(&skipped, output);
    Ok(corpora)
}

/// Returns the error for `paths` that contain no usable text.
fn no_text(paths: &[PathBuf], skipped: &[Skipped]) -> Error {
    if let [only] = skipped {
        return anyhow!("{only}");
    }
    let paths: Vec<String> = paths
        .iter()
        .map(|path| format!("`{}`", path.display()))
        .collect();
    let mut lines = vec![format!("there is no text in {}", paths.join(", "))];
    lines.extend(skipped.iter().take(LISTED).map(ToString::to_string));
    if skipped.len() > LISTED {
        lines.push(format!("and {} more", skipped.len() - LISTED));
    }
    anyhow!("{}; give other files with `--data`", lines.join("\n  "))
}

/// Lists the formats and the number of documents in each.
fn formats(corpus: &Corpus) -> BTreeMap<String, u64> {
    let formats = corpus.formats.iter();
    formats
        .map(|(format, count)| (format.name().to_owned(), *count as u64))
        .collect()
}

/// Reports files and records that were not used; `--verbose` shows a long list in full.
fn say_skipped(skipped: &[Skipped], output: Output) {
    let shown = match output.verbose {
        true => skipped.len(),
        false => LISTED,
    };
    for one in skipped.iter().take(shown) {
        output.say(format!("skipped: {one}"));
    }
    if skipped.len() > 1 {
        let files = skipped.iter().filter(|one| one.records.is_none()).count();
        output.say(format!(
            "{} skipped entirely, {} in part{}",
            counted(files, "file"),
            skipped.len() - files,
            match skipped.len() > shown {
                true => "; `-v` lists all",
                false => "",
            }
        ));
    }
}

/// Reports paths that do not exist before any work begins.
pub(crate) fn check_paths(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        if path != Path::new(STDIN) && !path.exists() {
            bail!(
                "`{}` does not exist; `--data` takes files, folders, or `-` for stdin",
                path.display()
            );
        }
    }
    Ok(())
}
