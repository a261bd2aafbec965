//! Completions with their verdicts, one per line, appended as they come, so that a stopped run can resume.

use std::{collections::BTreeMap, path::Path};

use serde_json::json;

use crate::{
    EvalError, Verdict,
    journal::{Journal, Run, RunName},
};

/// A completion with its verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Name of the problem.
    pub task_id: String,
    /// Index among the problem's completions.
    pub sample: usize,
    /// Generated text.
    pub completion: String,
    /// Verdict on it.
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
    /// Opens or creates the file at `path` for `run`. An incomplete last line is dropped.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, is open in another process, or has anything but samples of this run.
    pub fn open(path: &Path, run: &Run) -> Result<Self, EvalError> {
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
            run: run.digest.clone(),
            found: samples
                .map(|sample| ((sample.task_id.clone(), sample.sample), sample))
                .collect(),
        })
    }

    /// Sample of `task_id` with the index `sample`, if the file has it.
    pub fn find(&self, task_id: &str, sample: usize) -> Option<&Sample> {
        self.found.get(&(task_id.to_owned(), sample))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Appends `sample`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
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
    use powerinfer_artifact::Shard;

    use super::*;

    fn run(digest: &str) -> Run {
        Run {
            digest: digest.to_owned(),
            shard: Shard::WHOLE,
            rows: 3,
        }
    }

    fn sample(task: usize, verdict: Verdict) -> Sample {
        Sample {
            task_id: format!("T/{task}"),
            sample: task % 2,
            completion: format!("    return {task}\n\"'\u{1f980}"),
            verdict,
        }
    }

    #[test]
    fn samples_are_read_back_without_an_incomplete_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let all = [
            sample(0, Verdict::Passed),
            sample(1, Verdict::Failed("no".to_owned())),
            sample(2, Verdict::Timeout),
        ];
        let mut file = SampleFile::open(&path, &run("a")).unwrap();
        assert!(file.is_empty());
        for sample in &all {
            file.push(sample.clone()).unwrap();
        }
        drop(file);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();
        let mut file = SampleFile::open(&path, &run("a")).unwrap();
        assert_eq!(file.len(), 2);
        assert_eq!(file.find("T/1", 1), Some(&all[1]));
        assert_eq!(file.find("T/2", 0), None);
        file.push(all[2].clone()).unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), text);
        let error = SampleFile::open(&path, &run("b")).unwrap_err();
        assert_eq!(error.hint(), Some(powerinfer_artifact::Hint::OtherFile));
        let error = error.to_string();
        assert!(error.contains("line 1"), "{error}");
        let none = SampleFile::open(folder.path(), &run("a"))
            .unwrap_err()
            .to_string();
        assert!(none.contains("it is not a file"), "{none}");
        // Foreign files stay unchanged.
        for foreign in ["{\"task_id\": 3}\n", "{\"a\": 1}", "x", "1\n2\n3"] {
            std::fs::write(&path, foreign).unwrap();
            assert!(SampleFile::open(&path, &run("a")).is_err(), "{foreign}");
            assert_eq!(std::fs::read(&path).unwrap(), foreign.as_bytes());
        }
        std::fs::remove_file(&path).unwrap();
        let one = SampleFile::open(&path, &run("a")).unwrap();
        let busy = SampleFile::open(&path, &run("a")).unwrap_err().to_string();
        assert!(busy.contains("another run has it open"), "{busy}");
        drop(one);
    }
}
