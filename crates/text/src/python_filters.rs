//! Filters, tests and functions of jinja2 that minijinja lacks, or has with fewer arguments.

use minijinja::{
    Environment, Error, State, Value, filters,
    value::{Kwargs, Rest, ValueKind},
};
use minijinja_contrib::{filters as more, globals};

use crate::{
    python_json::{margin, to_json},
    python_methods::{self, modulo},
    python_syntax::MODULO,
};

/// Adds to an environment the methods of Python's values and what jinja2 defines.
pub(crate) fn add(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(python_methods::call);
    environment.add_function(MODULO, |left: &Value, right: &Value| modulo(left, right));
    environment.add_function("cycler", |items: Rest<Value>| {
        globals::cycler(items.to_vec())
    });
    environment.add_function("joiner", globals::joiner);
    environment.add_function("dict", dict);
    environment.add_filter("tojson", to_json);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("replace", replace);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("indent", indent);
    environment.add_filter("wordcount", |text: String| text.split_whitespace().count());
    environment.add_filter("striptags", more::striptags);
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("int", int);
    environment.add_test("sequence", |value: &Value| {
        let kinds = [
            ValueKind::Undefined,
            ValueKind::Seq,
            ValueKind::Map,
            ValueKind::String,
        ];
        kinds.contains(&value.kind())
    });
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("callable", |value: &Value| {
        matches!(value.kind(), ValueKind::Plain)
    });
}

/// Returns the number of items or characters; 0 for an undefined value.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        Ok(0)
    } else {
        filters::length(value)
    }
}

fn default(
    value: &Value,
    instead: Option<Value>,
    boolean: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let instead = instead.or(options.get("default_value")?);
    let boolean = boolean.or(options.get("boolean")?).unwrap_or(false);
    options.assert_all_used()?;
    if value.is_undefined() || (boolean && !value.is_true()) {
        Ok(instead.unwrap_or_else(|| Value::from("")))
    } else {
        Ok(value.clone())
    }
}

fn replace(text: String, from: String, to: String, count: Option<usize>) -> String {
    text.replacen(&from, &to, count.unwrap_or(usize::MAX))
}

fn dictsort(
    mapping: &Value,
    case_sensitive: Option<bool>,
    by: Option<String>,
    reverse: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let case_sensitive = case_sensitive.or(options.get("case_sensitive")?);
    let by = by.or(options.get("by")?);
    let reverse = reverse.or(options.get("reverse")?);
    options.assert_all_used()?;
    let options = [
        (
            "case_sensitive",
            Value::from(case_sensitive.unwrap_or(false)),
        ),
        ("by", Value::from(by.unwrap_or_else(|| "key".to_owned()))),
        ("reverse", Value::from(reverse.unwrap_or(false))),
    ];
    filters::dictsort(mapping, options.into_iter().collect())
}

/// Converts a text or number to a whole number; otherwise returns `default`, or 0 without one.
fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Value {
    let otherwise = default.clone().or(options.get("default").ok().flatten());
    let trimmed = value.as_str().map(|text| Value::from(text.trim()));
    let value = trimmed.as_ref().unwrap_or(value);
    let found = filters::int(state, value, default, base, options);
    found.unwrap_or_else(|_| otherwise.unwrap_or_else(|| Value::from(0)))
}

fn escape(text: String) -> String {
    let escapes = [
        ("&", "&amp;"),
        (">", "&gt;"),
        ("<", "&lt;"),
        ("'", "&#39;"),
        ("\"", "&#34;"),
    ];
    escapes
        .iter()
        .fold(text, |text, (letter, escape)| text.replace(letter, escape))
}

/// Indents all lines but the first and empty ones; `width` is a number of spaces or a text.
fn indent(
    text: String,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width
        .or(options.get("width")?)
        .unwrap_or_else(|| Value::from(4));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let margin = margin(&width)?;
    let mut indented = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            indented.push('\n');
        }
        let has_margin = match index {
            0 => first,
            _ => blank || !line.is_empty(),
        };
        if has_margin {
            indented.push_str(&margin);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// Creates a mapping from a mapping or a list of pairs, and from named values.
fn dict(given: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    if let Some(given) = given {
        for item in given.try_iter()? {
            pairs.push(match given.kind() {
                ValueKind::Map => (item.clone(), given.get_item(&item)?),
                _ => (item.get_item_by_index(0)?, item.get_item_by_index(1)?),
            });
        }
    }
    for name in named.args() {
        pairs.push((Value::from(name), named.get(name)?));
    }
    Ok(Value::from_pairs(pairs))
}
