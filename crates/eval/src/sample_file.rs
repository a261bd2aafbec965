//! Completions and their verdicts, a line each, written as they come: a run that was stopped goes on where it was.

use std::{collections::BTreeMap, path::Path};

use serde_json::json;

use crate::{
    EvalError,
    human_eval::Verdict,
    journal::{Journal, RunName},
};

/// A completion, and what it is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The problem's name.
    pub task_id: String,
    /// Which of the problem's completions, from 0 on.
    pub sample: usize,
    /// What the model wrote.
    pub completion: String,
    /// What it is worth.
    pub verdict: Verdict,
}

/// A file of samples of one run.
#[derive(Debug)]
pub struct SampleFile {
    journal: Journal,
    run: String,
    found: BTreeMap<(String, usize), Sample>,
}

impl SampleFile {
    /// Opens the file at `path`, or begins it; `run` tells the settings of this run from those of others.
    ///
    /// Fails where it has samples of another run, or is none of ours. A last line that was not written to its end is
    /// dropped.
    pub fn open(path: &Path, run: &str) -> Result<Self, EvalError> {
        let name = RunName {
            beginning: "{\"task_id\":",
            what: "line of completions",
            run,
        };
        let (journal, samples) = Journal::open_rows(path, name, |row| {
            let (name, detail) = (row.text("verdict")?, row.text("detail")?);
            let verdict = Verdict::from_name(&name, Some(&detail))
                .ok_or_else(|| row.wrong(format!("no verdict is called `{name}`")))?;
            Ok(Sample {
                task_id: row.text("task_id")?,
                sample: row.number("sample")?,
                completion: row.text("completion")?,
                verdict,
            })
        })?;
        let samples = samples.into_iter();
        Ok(Self {
            journal,
            run: run.to_owned(),
            found: samples
                .map(|sample| ((sample.task_id.clone(), sample.sample), sample))
                .collect(),
        })
    }

    /// A sample that is there.
    pub fn find(&self, task_id: &str, sample: usize) -> Option<&Sample> {
        self.found.get(&(task_id.to_owned(), sample))
    }

    /// How many are there.
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// Whether none is there.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Adds a sample.
    pub fn push(&mut self, sample: Sample) -> Result<(), EvalError> {
        let row = json!({
            "task_id": sample.task_id,
            "sample": sample.sample,
            "completion": sample.completion,
            "verdict": sample.verdict.name(),
            "detail": sample.verdict.detail().unwrap_or_default(),
            "run": self.run,
        });
        self.journal.push(&row)?;
        self.found
            .insert((sample.task_id.clone(), sample.sample), sample);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(task: usize, verdict: Verdict) -> Sample {
        Sample {
            task_id: format!("T/{task}"),
            sample: task % 2,
            completion: format!("    return {task}\n\"'\u{1f980}"),
            verdict,
        }
    }

    #[test]
    fn samples_come_back_and_half_a_line_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let all = [
            sample(0, Verdict::Passed),
            sample(1, Verdict::Failed("no".to_owned())),
            sample(2, Verdict::Timeout),
        ];
        let mut file = SampleFile::open(&path, "a").unwrap();
        assert!(file.is_empty());
        for sample in &all {
            file.push(sample.clone()).unwrap();
        }
        drop(file);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();
        let mut file = SampleFile::open(&path, "a").unwrap();
        assert_eq!(file.len(), 2);
        assert_eq!(file.find("T/1", 1), Some(&all[1]));
        assert_eq!(file.find("T/2", 0), None);
        file.push(all[2].clone()).unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), text);
        let error = SampleFile::open(&path, "b").unwrap_err();
        assert_eq!(error.hint(), Some(powerinfer_artifact::Hint::OtherFile));
        let error = error.to_string();
        assert!(error.contains("line 1"), "{error}");
        let none = SampleFile::open(folder.path(), "a")
            .unwrap_err()
            .to_string();
        assert!(none.contains("it is no file"), "{none}");
        // What is not ours stays what it is.
        for foreign in ["{\"task_id\": 3}\n", "{\"a\": 1}", "x", "1\n2\n3"] {
            std::fs::write(&path, foreign).unwrap();
            assert!(SampleFile::open(&path, "a").is_err(), "{foreign}");
            assert_eq!(std::fs::read(&path).unwrap(), foreign.as_bytes());
        }
        std::fs::remove_file(&path).unwrap();
        let one = SampleFile::open(&path, "a").unwrap();
        let busy = SampleFile::open(&path, "a").unwrap_err().to_string();
        assert!(busy.contains("another run has it open"), "{busy}");
        drop(one);
    }
}
