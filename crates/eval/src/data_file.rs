//! JSON-lines files, plain or compressed.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::EvalError;

/// Size limit of a data file after decompression, in bytes.
const LARGEST: u64 = 1 << 30;

/// A line of a data file.
#[derive(Debug)]
pub(crate) struct Row {
    path: PathBuf,
    pub(crate) line: usize,
    value: Value,
}

impl Row {
    /// Error about this row.
    pub(crate) fn wrong(&self, reason: impl Into<String>) -> EvalError {
        wrong(&self.path, self.line, reason)
    }

    /// The whole object.
    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    /// A field, if the row has it.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.value.get(field)
    }

    fn field(&self, field: &'static str) -> Result<&Value, EvalError> {
        self.get(field)
            .ok_or_else(|| self.wrong(format!("there is no field `{field}`")))
    }

    /// A field that is a string.
    pub(crate) fn text(&self, field: &'static str) -> Result<String, EvalError> {
        match self.field(field)? {
            Value::String(text) => Ok(text.clone()),
            other => Err(self.wrong(format!("`{field}` is {}, not a text", kind(other)))),
        }
    }

    /// A field that is a list of strings.
    pub(crate) fn texts(&self, field: &'static str) -> Result<Vec<String>, EvalError> {
        let found = self.field(field)?;
        let items = found.as_array().map(|items| {
            let texts = items.iter().map(|item| item.as_str().map(str::to_owned));
            texts.collect::<Option<Vec<String>>>()
        });
        match items.flatten() {
            Some(texts) => Ok(texts),
            None => Err(self.wrong(format!("`{field}` is {}, not a list of texts", kind(found)))),
        }
    }

    /// A field that is a whole number from 0 on.
    pub(crate) fn number(&self, field: &'static str) -> Result<usize, EvalError> {
        let found = self.field(field)?;
        let number = found
            .as_u64()
            .and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| {
            self.wrong(format!(
                "`{field}` is {}, not a whole number from 0 on",
                kind(found)
            ))
        })
    }
}

fn wrong(path: &Path, line: usize, reason: impl Into<String>) -> EvalError {
    EvalError::Data {
        path: path.to_owned(),
        line,
        reason: reason.into(),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Rows of the file at `path`, without empty lines.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>, EvalError> {
    let unreadable = |source| EvalError::Unreadable {
        path: path.to_owned(),
        source,
    };
    // Bounded: `path` may name a device, or decompress to more than the memory holds.
    let bytes = powerinfer_corpus::unpacked(path, LARGEST).map_err(unreadable)?;
    parse(path, &bytes)
}

/// Rows of `bytes`, the content of the file at `path`.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Row>, EvalError> {
    let mut rows = Vec::new();
    for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line_number = index + 1;
        let text = std::str::from_utf8(line)
            .map_err(|_| wrong(path, line_number, "it is not UTF-8 text"))?;
        if text.trim().is_empty() {
            continue;
        }
        let value: Value = serde_json::from_str(text)
            .map_err(|error| wrong(path, line_number, format!("it is not JSON: {error}")))?;
        if !value.is_object() {
            let reason = format!("it is {}, not an object", kind(&value));
            return Err(wrong(path, line_number, reason));
        }
        rows.push(Row {
            path: path.to_owned(),
            line: line_number,
            value,
        });
    }
    if rows.is_empty() {
        Err(wrong(path, 1, "there is no row in the file"))
    } else {
        Ok(rows)
    }
}
