//! JSON formatted like Python's `json.dumps`, which chat templates expect.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// The `tojson` filter: separators `", "` and `": "`, or one item per line with `indent`.
///
/// Characters are not escaped for HTML, unlike in minijinja's own filter.
pub(crate) fn to_json(
    value: Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    // Always false here; templates pass it to override Python's default.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;

    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent);
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, OneLine)),
    };
    written.map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot write as JSON").with_source(error)
    })?;
    Ok(String::from_utf8(bytes).expect("JSON is UTF-8"))
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        separate(out, first)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        separate(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

fn separate<W: ?Sized + Write>(out: &mut W, first: bool) -> io::Result<()> {
    out.write_all(if first { b"" } else { b", " })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(expression: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", to_json);
        environment.render_str(expression, ()).unwrap()
    }

    #[test]
    fn single_line_output_has_spaces_and_no_html_escapes() {
        assert_eq!(
            render(r#"{{ {"a": [1, "<é'>", true], "b": {}, "c": none} | tojson }}"#),
            r#"{"a": [1, "<é'>", true], "b": {}, "c": null}"#
        );
    }

    #[test]
    fn indented_output_has_one_item_per_line() {
        let expected = "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}";
        assert_eq!(
            render(r#"{{ {"a": [1, 2], "b": []} | tojson(indent=2) }}"#),
            expected
        );
        assert_eq!(
            render(r#"{{ {"a": [1, 2], "b": []} | tojson(2) }}"#),
            expected
        );
    }
}
