//! JSON formatted like Python's `json.dumps`, which chat templates expect.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, Value};

use crate::python_methods::invalid;

/// Maximum nesting depth of lists and mappings.
const MAX_DEPTH: usize = 100;

/// The `tojson` filter of transformers: separators `", "` and `": "`, or one item per line with `indent`.
///
/// Characters are not escaped for HTML, unlike in minijinja's own filter.
pub(crate) fn to_json(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    separators: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = ensure_ascii.or(options.get("ensure_ascii")?);
    let sorts_keys: Option<bool> = options.get("sort_keys")?;
    let some = |value: Option<Value>| value.filter(|value| !value.is_none());
    let indent = some(indent.or(options.get("indent")?));
    let separators = some(separators.or(options.get("separators")?));
    options.assert_all_used()?;

    let of_items = if indent.is_some() { "," } else { ", " };
    let (of_items, of_keys) = match separators {
        None => (of_items.to_owned(), ": ".to_owned()),
        Some(pair) => (
            pair.get_item_by_index(0)?.to_string(),
            pair.get_item_by_index(1)?.to_string(),
        ),
    };
    let mut writer = Writer {
        out: String::new(),
        is_ascii: ensure_ascii.unwrap_or(false),
        indent: indent.as_ref().map(margin).transpose()?,
        of_items,
        of_keys,
        sorts_keys: sorts_keys.unwrap_or(false),
    };
    writer.write(value, 0)?;
    Ok(writer.out)
}

/// Returns a margin that is given as a text or as a number of spaces.
pub(crate) fn margin(width: &Value) -> Result<String, Error> {
    if let Some(text) = width.as_str() {
        return Ok(text.to_owned());
    }
    match i64::try_from(width.clone())? {
        width @ ..=1024 => Ok(" ".repeat(usize::try_from(width).unwrap_or(0))),
        _ => Err(invalid("the indent is above 1024")),
    }
}

struct Writer {
    out: String,
    is_ascii: bool,
    indent: Option<String>,
    of_items: String,
    of_keys: String,
    sorts_keys: bool,
}

impl Writer {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("the value is nested too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                return self.write_all(['[', ']'], items.collect(), depth);
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    items.push((Some(text_of(&key)?), value.get_item(&key)?));
                }
                if self.sorts_keys {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                return self.write_all(['{', '}'], items, depth);
            }
            _ => self.out.push_str(&text_of(value)?),
        }
        Ok(())
    }

    /// Writes the items of a list, or those of a mapping with their keys.
    fn write_all(
        &mut self,
        brackets: [char; 2],
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(brackets[0]);
        let is_empty = items.is_empty();
        for (index, (key, value)) in items.into_iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.of_items);
            }
            self.start_line(depth + 1);
            if let Some(key) = key {
                self.write_text(&key);
                self.out.push_str(&self.of_keys);
            }
            self.write(&value, depth + 1)?;
        }
        if !is_empty {
            self.start_line(depth);
        }
        self.out.push(brackets[1]);
        Ok(())
    }

    fn start_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn write_text(&mut self, text: &str) {
        let quoted = serde_json::to_string(text).expect("a string is JSON");
        for letter in quoted.chars() {
            if self.is_ascii && (letter == '\x7f' || !letter.is_ascii()) {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    self.out.push_str(&format!("\\u{unit:04x}"));
                }
            } else {
                self.out.push(letter)
            }
        }
    }
}

/// A key, or a value that is neither a string, list nor mapping.
fn text_of(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => value.is_true().to_string(),
        ValueKind::Number | ValueKind::String => value.to_string(),
        kind => return Err(invalid(&format!("a value of type {kind} is not JSON"))),
    })
}
