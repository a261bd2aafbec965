//! Calibration text: given files, or the demo's own calibration tasks.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
};

use powerinfer_artifact::{Hint, Progress, counted};
use powerinfer_corpus::{Corpus, Encoder, EndOfText, STDIN, Skipped};
use powerinfer_datasets::minipython::{Split, tasks};
use powerinfer_model::{Files, ModelConfig};
use powerinfer_profile::{Amount, Calibration, RESERVED, Source};
use powerinfer_text::Tokenizer;

use crate::PipelineError;

/// Name of the embedded model, which comes with text.
const DEMO: &str = "demo";

/// Longest calibration sequence, in tokens.
pub const SEQUENCE: usize = 512;

/// Most tokens that are read if the amount is `auto`.
pub const AUTO_LIMIT: usize = 131_072;

/// Number of skipped files that are listed individually.
const LISTED: usize = 5;

/// Text to calibrate on.
#[derive(Debug, Clone)]
pub struct CalibrationText {
    /// Files and folders in any format that [`Corpus`] reads; `-` is standard input. If empty, the demo's own tasks.
    pub paths: Vec<PathBuf>,
    /// Amount to profile.
    pub tokens: Tokens,
    /// With [`Tokens::Auto`]: overlap that the most frequently active 20% of a layer must reach between two independent
    /// halves of the text (Jaccard index, mean over layers).
    pub settled: f64,
}

/// How much text to profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens {
    /// This many tokens.
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

impl CalibrationText {
    /// Whether there is text for the model in `files`.
    pub(crate) fn has_text(&self, files: &Files) -> bool {
        !self.paths.is_empty() || files.name() == DEMO
    }

    /// When profiling ends.
    pub fn amount(&self) -> Amount {
        match self.tokens {
            Tokens::Count(_) => Amount::Everything,
            Tokens::Auto => Amount::UntilSettled {
                overlap: self.settled,
            },
        }
    }

    /// Largest number of tokens that is needed.
    fn limit(&self) -> usize {
        match self.tokens {
            Tokens::Count(tokens) => tokens,
            Tokens::Auto => AUTO_LIMIT,
        }
    }

    /// Reads and tokenises the text for the model in `files`. Sources are interleaved in sequences of at most 512 tokens;
    /// `seed` orders the demo's tasks.
    ///
    /// # Errors
    ///
    /// There is no text, or it cannot be read or tokenised.
    pub fn read(
        &self,
        files: &Files,
        config: &ModelConfig,
        tokenizer: &Tokenizer,
        seed: u64,
        progress: &dyn Progress,
    ) -> Result<Calibration, PipelineError> {
        let encoder = encoder(tokenizer, config, EndOfText::Add);
        let length = SEQUENCE.min(config.context_length);
        let limit = self.limit();
        // Held-out text is read in addition to the profiled text.
        let wanted = limit.saturating_add(RESERVED);
        let sources = if !self.paths.is_empty() {
            let corpora = read(&self.paths, &encoder, length, wanted, progress)?;
            let source = |(name, corpus): (String, Corpus)| Source {
                name,
                formats: formats(&corpus),
                documents: corpus.documents,
            };
            corpora.into_iter().map(source).collect()
        } else if files.name() == DEMO {
            vec![Source {
                name: "calibration tasks of the demo".to_owned(),
                formats: BTreeMap::new(),
                documents: demo_tasks(Split::Calibration, seed, wanted, &encoder)?,
            }]
        } else {
            return Err(PipelineError::NoCalibrationText {
                model: files.name().to_owned(),
            });
        };
        Ok(Calibration::new(sources, length, limit)?)
    }
}

/// Texts to evaluate a model on, at most `limit` tokens in all: documents at `paths`, or, if there are
/// no paths and the model is the demo, tasks that it was not trained on.
///
/// # Errors
///
/// There is no text, or it cannot be read or tokenised.
pub fn texts(
    paths: &[PathBuf],
    is_demo: bool,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    limit: usize,
    progress: &dyn Progress,
) -> Result<Vec<Vec<u32>>, PipelineError> {
    let mut texts: Vec<Vec<u32>> = if paths.is_empty() {
        if !is_demo {
            return Err(PipelineError::NoHeldOutText);
        }
        let encoder = encoder(tokenizer, config, EndOfText::Add);
        demo_tasks(Split::HeldOut, 1, limit, &encoder)?
    } else {
        let encoder = encoder(tokenizer, config, EndOfText::Omit);
        let corpora = read(paths, &encoder, limit, limit, progress)?;
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

/// Tasks of the demo, until they have `limit` tokens.
fn demo_tasks(
    split: Split,
    seed: u64,
    limit: usize,
    encoder: &Encoder<'_>,
) -> Result<Vec<Vec<u32>>, PipelineError> {
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

/// Returns the name and the documents of each of `paths` that has documents; reports what was read and what was skipped.
fn read(
    paths: &[PathBuf],
    encoder: &Encoder<'_>,
    length: usize,
    limit: usize,
    progress: &dyn Progress,
) -> Result<Vec<(String, Corpus)>, PipelineError> {
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
        progress.note(&format!(
            "text: `{name}`, {} ({}), {} read",
            counted(corpus.documents.len(), "document"),
            formats(&corpus).into_keys().collect::<Vec<_>>().join(", "),
            counted(tokens, "token"),
        ));
        corpora.push((name.into_owned(), corpus));
    }
    if corpora.is_empty() {
        return Err(PipelineError::UnusableText {
            paths: paths.to_vec(),
            skipped,
        });
    }
    note_skipped(&skipped, progress);
    Ok(corpora)
}

/// Lists the formats and the number of documents in each.
fn formats(corpus: &Corpus) -> BTreeMap<String, u64> {
    let formats = corpus.formats.iter();
    formats
        .map(|(format, count)| (format.name().to_owned(), *count as u64))
        .collect()
}

/// Reports files and records that were not used: the first ones as notes, the others as details.
fn note_skipped(skipped: &[Skipped], progress: &dyn Progress) {
    for (index, one) in skipped.iter().enumerate() {
        let line = format!("skipped: {one}");
        if index < LISTED {
            progress.note(&line);
        } else {
            progress.detail(&line);
        }
    }
    if skipped.len() > 1 {
        let files = skipped.iter().filter(|one| one.records.is_none()).count();
        let line = format!(
            "{} skipped entirely, {} in part",
            counted(files, "file"),
            skipped.len() - files
        );
        if skipped.len() > LISTED {
            progress.advise(&line, Hint::ListAll);
        } else {
            progress.note(&line);
        }
    }
}

/// Reports paths that do not exist before any work begins.
///
/// # Errors
///
/// One of `paths` does not exist.
pub fn check_paths(paths: &[PathBuf]) -> Result<(), PipelineError> {
    let mut paths = paths.iter().filter(|path| *path != Path::new(STDIN));
    match paths.find(|path| !path.exists()) {
        Some(path) => Err(PipelineError::Missing { path: path.clone() }),
        None => Ok(()),
    }
}
