//! A file of rows of one run, one JSON object per line, appended as they come, so that a stopped run can resume.
//!
//! The file of a shard has one more line, its first: the shard and the number of rows that it will have. [`merge`] puts the
//! rows of all shards into the file that a run without shards writes.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use powerinfer_artifact::{
    Shard,
    write::{FileLock, write_file},
};
use serde_json::{Value, json};

use crate::{
    EvalError,
    data_file::{self, Row},
};

/// A run, or one shard of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Digest of the settings, the model and the data: the field `run` of every row.
    pub digest: String,
    /// Shard of its items.
    pub shard: Shard,
    /// Rows that the shard has when it is done.
    pub rows: usize,
}

impl Run {
    /// First line of the file: none of a run without shards.
    fn first_line(&self) -> Option<Value> {
        (self.shard != Shard::WHOLE).then(
            || json!({ "shard": self.shard.to_string(), "rows": self.rows, "run": self.digest }),
        )
    }
}

/// Properties that all rows of a run share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunName<'a> {
    /// First characters of every line, such as `{"point":`.
    pub beginning: &'static str,
    /// Name of a line in messages, such as `line of completions`.
    pub what: &'static str,
    /// The run.
    pub run: &'a Run,
}

/// First characters of the first line of a shard.
const SHARD: &str = "{\"shard\":";

const OTHER_RUN: &str = "it is of a run with other settings, another bundle or other data";

/// A file of rows of one run, open for appending.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: FileLock,
}

impl Journal {
    /// Opens or creates the file at `path` and returns its rows, converted by `read`. An incomplete last line is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, is open in another process, or has other content than rows of this run.
    pub(crate) fn open_rows<Item>(
        path: &Path,
        name: RunName<'_>,
        read: impl Fn(Row) -> Result<Item, EvalError>,
    ) -> Result<(Self, Vec<Item>), EvalError> {
        let unwritable = |source| EvalError::Unwritable {
            path: path.to_owned(),
            source,
        };
        if path.exists() && !path.is_file() {
            return Err(unwritable(std::io::Error::other("it is not a file")));
        }
        let file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(unwritable)?;
        // Locked before it is read, so that no other run can append in between.
        let file = FileLock::new(file).map_err(|_| EvalError::Busy {
            path: path.to_owned(),
        })?;
        let mut bytes = Vec::new();
        file.file()
            .read_to_end(&mut bytes)
            .map_err(|source| EvalError::Unreadable {
                path: path.to_owned(),
                source,
            })?;
        let (lines, rest) = split(&bytes);
        let other = |line, reason| EvalError::OtherContent {
            path: path.to_owned(),
            line,
            reason,
        };
        if ![name.beginning, SHARD].iter().any(|beginning| {
            let length = rest.len().min(beginning.len());
            rest[..length] == beginning.as_bytes()[..length]
        }) {
            let line = lines.split(|byte| *byte == b'\n').count();
            return Err(other(line, format!("it is not a {}", name.what)));
        }
        let mut rows = if lines.is_empty() {
            Vec::new()
        } else {
            data_file::parse(path, lines)?
        };
        for row in &rows {
            if row.text("run")? != name.run.digest {
                return Err(other(row.line, OTHER_RUN.to_owned()));
            }
        }
        let is_new = rows.is_empty();
        let first = rows.first().filter(|row| row.get("shard").is_some());
        let (found, expected) = (first.map(Row::value).cloned(), name.run.first_line());
        match (&found, &expected) {
            _ if is_new || found == expected => {}
            (Some(found), None) => {
                let shard = &found["shard"].as_str().unwrap_or_default();
                let reason =
                    format!("it is shard {shard}; `powerinfer merge` puts shards together");
                return Err(other(1, reason));
            }
            (_, Some(_)) => {
                let reason = format!("it is not shard {} of this run", name.run.shard);
                return Err(other(1, reason));
            }
            (None, None) => {}
        }
        if found.is_some() {
            rows.remove(0);
        }
        let found = rows.into_iter().map(read).collect::<Result<_, _>>()?;
        // Truncated only now that it is known for a file of this run.
        file.file()
            .set_len(lines.len() as u64)
            .map_err(unwritable)?;
        let mut journal = Self {
            path: path.to_owned(),
            file,
        };
        if let Some(first) = expected.filter(|_| is_new) {
            journal.push(&first)?;
        }
        Ok((journal, found))
    }

    /// Appends `row`, which has the field `run`.
    pub(crate) fn push(&mut self, row: &Value) -> Result<(), EvalError> {
        // In one write, so that only a crash of the system can leave half a line.
        let written = self.file.file().write_all(format!("{row}\n").as_bytes());
        written.map_err(|source| EvalError::Unwritable {
            path: self.path.clone(),
            source,
        })
    }
}

/// The complete lines of a file, and what follows them.
fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    bytes.split_at(end.map_or(0, |at| at + 1))
}

/// Whether the file at `path` has the rows of a shard.
pub fn is_shard(path: &Path) -> bool {
    let mut beginning = vec![0; SHARD.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut beginning));
    read.is_ok() && beginning == SHARD.as_bytes()
}

/// Puts the rows of all shards of a run into the file `out`, in the order of the run; returns their number.
///
/// # Errors
///
/// A file is not a shard, belongs to another run, has too few or too many rows, a shard is missing or there twice, `out`
/// exists and belongs to another run, or a file cannot be read or written.
pub fn merge(paths: &[PathBuf], out: &Path) -> Result<usize, EvalError> {
    let unfit = |path: &Path, reason: String| EvalError::NotMergeable {
        path: path.to_owned(),
        reason,
    };
    let mut run = None;
    let mut shards = Vec::new();
    let mut contents = Vec::new();
    for path in paths {
        let bytes = fs::read(path).map_err(|source| EvalError::Unreadable {
            path: path.clone(),
            source,
        })?;
        let (lines, _) = split(&bytes);
        let rows = if lines.starts_with(SHARD.as_bytes()) {
            data_file::parse(path, lines)?
        } else {
            Vec::new()
        };
        let Some((first, rest)) = rows.split_first() else {
            return Err(unfit(path, "it is not a shard of rows".to_owned()));
        };
        let digest = first.text("run")?;
        let of_run: &String = run.get_or_insert_with(|| digest.clone());
        for row in &rows {
            if row.text("run")? != *of_run {
                return Err(unfit(
                    path,
                    format!(
                        "line {} is of another run than `{}`: of other settings, another bundle, other data or another version of the program",
                        row.line,
                        paths[0].display()
                    ),
                ));
            }
        }
        let shard = first.text("shard")?.parse();
        let shard: Shard = shard.map_err(|reason| first.wrong(reason))?;
        let expected = first.number("rows")?;
        if rest.len() != expected {
            return Err(unfit(
                path,
                format!(
                    "it has {} of its {expected} rows; run the command of shard {shard} again, which resumes",
                    rest.len()
                ),
            ));
        }
        let end = lines.iter().position(|byte| *byte == b'\n');
        let start = end.map_or(lines.len(), |at| at + 1);
        shards.push((shard, path.as_path()));
        contents.push((lines[start..].to_vec(), rest.len()));
    }
    let order = Shard::order(&shards, "items", "run")
        .map_err(|(place, reason)| unfit(shards[place].1, reason))?;
    refuse_other_run(out, run.as_deref().unwrap_or_default())?;
    let bytes: Vec<u8> = order
        .iter()
        .flat_map(|place| contents[*place].0.iter().copied())
        .collect();
    write_file(out, &bytes)?;
    Ok(contents.iter().map(|(_, rows)| rows).sum())
}

/// Refuses to replace a file with anything but rows of `run`.
fn refuse_other_run(out: &Path, run: &str) -> Result<(), EvalError> {
    if !out.exists() {
        return Ok(());
    }
    let refused = |line, reason: &str| EvalError::OtherContent {
        path: out.to_owned(),
        line,
        reason: reason.to_owned(),
    };
    let bytes = fs::read(out).map_err(|source| EvalError::Unreadable {
        path: out.to_owned(),
        source,
    })?;
    let (lines, rest) = split(&bytes);
    if lines.is_empty() {
        return if rest.is_empty() {
            Ok(())
        } else {
            Err(refused(1, "it is not a file of rows"))
        };
    }
    for row in data_file::parse(out, lines)? {
        if row.text("run")? != run {
            return Err(refused(row.line, OTHER_RUN));
        }
    }
    Ok(())
}
