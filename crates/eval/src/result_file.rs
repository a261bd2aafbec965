//! Results of numbered items, one per line, appended as they come, so that a stopped run can resume.

use std::{collections::BTreeMap, fs, io::BufReader, path::Path};

use serde::{
    Serialize,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::json;

use crate::{
    EvalError,
    journal::{Journal, Run, RunName, is_shard},
};

/// First characters of every line.
const BEGINNING: &str = "{\"item\":";

/// A file of results of one run, or nothing: results are then only kept in memory.
#[derive(Debug)]
pub struct ResultFile<Item> {
    journal: Option<(Journal, Run)>,
    found: BTreeMap<usize, Item>,
}

impl<Item: Serialize + DeserializeOwned> ResultFile<Item> {
    /// Opens or creates the file at `path` for `run`, if there is a path. An incomplete last line is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, is open in another process, or has anything but results of this run.
    pub fn open(path: Option<&Path>, run: &Run) -> Result<Self, EvalError> {
        let Some(path) = path else {
            return Ok(Self {
                journal: None,
                found: BTreeMap::new(),
            });
        };
        let name = RunName {
            beginning: BEGINNING,
            what: "line of results",
            run,
        };
        let (journal, rows) = Journal::open_rows(path, name, |row| {
            let item = row.get("result").cloned().unwrap_or_default();
            let item = serde_json::from_value(item)
                .map_err(|error| row.wrong(format!("it is not a result: {error}")))?;
            Ok((row.number("item")?, item))
        })?;
        Ok(Self {
            journal: Some((journal, run.clone())),
            found: rows.into_iter().collect(),
        })
    }

    /// As [`open`](Self::open), but results of another run are replaced.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), but for results of another run.
    pub fn open_or_replace(path: &Path, run: &Run) -> Result<Self, EvalError> {
        match Self::open(Some(path), run) {
            Err(EvalError::OtherContent { .. }) if is_results(path) => {
                // A link to the file stays.
                fs::write(path, "").map_err(|source| EvalError::Unwritable {
                    path: path.to_owned(),
                    source,
                })?;
                Self::open(Some(path), run)
            }
            other => other,
        }
    }

    /// Result of `item`: that of the file, or that of `measure`, which is appended.
    ///
    /// # Errors
    ///
    /// Fails if `measure` does, or if the file cannot be written.
    pub fn get_or<Failure: From<EvalError>>(
        &mut self,
        item: usize,
        measure: impl FnOnce() -> Result<Item, Failure>,
    ) -> Result<&Item, Failure> {
        if !self.found.contains_key(&item) {
            let result = measure()?;
            if let Some((journal, run)) = &mut self.journal {
                let value =
                    serde_json::to_value(&result).map_err(|_| EvalError::FigureNotFinite)?;
                // JSON writes what is not finite as null, which cannot be read back.
                serde_json::from_value::<Item>(value.clone())
                    .map_err(|_| EvalError::FigureNotFinite)?;
                journal.push(&json!({ "item": item, "result": value, "run": run.digest }))?;
            }
            self.found.insert(item, result);
        }
        Ok(&self.found[&item])
    }

    /// Whether there is a result of `item`.
    pub fn has(&self, item: usize) -> bool {
        self.found.contains_key(&item)
    }

    /// All results, in the order of the items.
    pub fn into_results(self) -> Vec<Item> {
        self.found.into_values().collect()
    }
}

/// Whether the file at `path` begins with a result of any run, or is a shard of results.
fn is_results(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    let rows = serde_json::Deserializer::from_reader(BufReader::new(file));
    let first = rows.into_iter::<BTreeMap<String, IgnoredAny>>().next();
    let is_row = matches!(first, Some(Ok(row)) if row.keys().eq(["item", "result", "run"]));
    is_row || is_shard(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_results_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        for (text, is_ours) in [
            ("{\"item\":0,\"result\":[1],\"run\":\"x\"}\n", true),
            ("{\"item\":0,\"result\":[1],\"run\":\"x\"}\n{\"it", true),
            ("{\"item\":0,\"price\":1}\n", false),
            ("{\"item\":0", false),
            ("", false),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(is_results(&path), is_ours, "{text}");
        }
    }
}
