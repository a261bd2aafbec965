//! Methods and operators of Python's strings and lists that minijinja lacks, or has with fewer arguments.

use minijinja::{
    Error, ErrorKind, State, Value,
    formatting::{FormatStyle, format},
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat;

use crate::python_syntax::SLICE;

/// Calls a method of a Python value, for [`Environment::set_unknown_method_callback`](minijinja::Environment).
pub(crate) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if method == SLICE {
        let (start, stop, step) = from_args(arguments)?;
        return slice(value, start, stop, step);
    }
    let found = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, method, arguments)?,
        (None, ValueKind::Seq) => of_list(value, method, arguments)?,
        (None, ValueKind::Map) if method == "copy" => Some(value.clone()),
        _ => None,
    };
    match found {
        Some(found) => Ok(found),
        None => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// Calls a method of a string; `None` if minijinja provides it.
fn of_text(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "split" | "rsplit" => {
            let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) =
                from_args(arguments)?;
            let separator = separator
                .or(options.get("sep")?)
                .filter(|separator| !separator.is_none());
            let most = most.or(options.get("maxsplit")?).unwrap_or(-1);
            options.assert_all_used()?;
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let separator = separator.as_ref().map(text_of).transpose()?;
            if separator == Some("") {
                return Err(invalid("empty separator"));
            }
            Value::from(split(text, separator, most, method == "rsplit"))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let parts = match (
                method,
                text.split_once(separator),
                text.rsplit_once(separator),
            ) {
                ("partition", Some((head, tail)), _) | ("rpartition", _, Some((head, tail))) => {
                    [head, separator, tail]
                }
                ("partition", ..) => [text, "", ""],
                _ => ["", "", text],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "splitlines" => {
            let (keeps, options): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keeps = keeps.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            Value::from(lines(text, keeps))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "startswith" | "endswith" => {
            let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(arguments)?;
            let (part, _) = part_of(text, start, end);
            let affixes = if affix.is_tuple() {
                affix.try_iter()?.collect()
            } else {
                vec![affix.clone()]
            };
            let mut is_there = false;
            for affix in &affixes {
                let affix = text_of(affix)?;
                is_there |= match method {
                    "startswith" => part.starts_with(affix),
                    _ => part.ends_with(affix),
                };
            }
            Value::from(is_there)
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
            let (part, first) = part_of(text, start, end);
            let found = if method.starts_with('r') {
                part.rfind(wanted)
            } else {
                part.find(wanted)
            };
            match found {
                Some(found) => Value::from(first + part[..found].chars().count()),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(invalid("substring not found")),
            }
        }
        "count" => {
            let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
            Value::from(part_of(text, start, end).0.matches(wanted).count())
        }
        "title" => Value::from(title(text)),
        "swapcase" => {
            let swapped = text.chars().flat_map(|letter| {
                if letter.is_uppercase() {
                    letter.to_lowercase().collect::<Vec<_>>()
                } else {
                    letter.to_uppercase().collect()
                }
            });
            Value::from(swapped.collect::<String>())
        }
        "casefold" => Value::from(text.to_lowercase()),
        "isdigit" | "isdecimal" => {
            Value::from(!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
        }
        "zfill" => {
            let (width,): (usize,) = from_args(arguments)?;
            let digits = text.trim_start_matches(['-', '+']);
            let sign = &text[..text.len() - digits.len()];
            let zeros = missing(text, width)?;
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(arguments)?;
            let fill = fill.unwrap_or(" ");
            let all = missing(text, width)?;
            // Python's rule for an odd number of spaces.
            let half = all / 2 + (all & width & 1);
            let left = match method {
                "ljust" => 0,
                "rjust" => all,
                _ => half,
            };
            Value::from([&*fill.repeat(left), text, &*fill.repeat(all - left)].concat())
        }
        _ => return Ok(None),
    }))
}

/// Calls a method of a list or tuple; `None` if minijinja provides it.
fn of_list(list: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match method {
        "index" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = list.try_iter()?.position(|item| item == *wanted);
            Some(
                found
                    .map(Value::from)
                    .ok_or_else(|| invalid("the value is not in the list"))?,
            )
        }
        "copy" => Some(list.clone()),
        _ => None,
    })
}

/// Computes the `%` operator: the remainder of numbers, with the sign of the divisor, or a formatted string.
pub(crate) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        return formatted(pattern, right).map(Value::from);
    }
    let by_zero = || invalid("a remainder of a division by zero");
    if left.is_integer() && right.is_integer() {
        let (a, b) = (
            i128::try_from(left.clone())?,
            i128::try_from(right.clone())?,
        );
        let remainder = a.checked_rem(b).ok_or_else(by_zero)?;
        let has_other_sign = remainder != 0 && (remainder < 0) != (b < 0);
        return Ok(Value::from(if has_other_sign {
            remainder + b
        } else {
            remainder
        }));
    }
    let (a, b) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if b == 0.0 {
        Err(by_zero())
    } else {
        Ok(Value::from(a - b * (a / b).floor()))
    }
}

/// Formats Python's `pattern % values`; the values are a tuple, a mapping or a single value.
fn formatted(pattern: &str, values: &Value) -> Result<String, Error> {
    let mut given: Vec<Value> = if values.is_tuple() {
        values.try_iter()?.collect()
    } else {
        vec![values.clone()]
    };
    let (mut plain, mut fields) = (String::with_capacity(pattern.len()), 0);
    let mut rest = pattern;
    while let Some(start) = rest.find('%') {
        let field = &rest[start + 1..];
        let conversion = match field.strip_prefix('(').and_then(|field| field.find(')')) {
            Some(end) => end + 2,
            None => 0,
        };
        let is_option = |letter: char| letter.is_ascii_digit() || "#0- +.lhL".contains(letter);
        let options = field[conversion..]
            .find(|letter| !is_option(letter))
            .unwrap_or(0);
        let conversion = start + 1 + conversion + options;
        plain.push_str(&rest[..conversion]);
        let kind = rest[conversion..].chars().next();
        plain.extend(kind.map(|kind| if kind == 'r' { 's' } else { kind }));
        if let (Some(kind), Some(value)) = (kind, given.get_mut(fields)) {
            match kind {
                // Writes the value as a Python expression.
                'r' => *value = Value::from(format!("{value:?}")),
                'd' | 'i' | 'u' if value.is_number() && !value.is_integer() => {
                    *value = Value::from(f64::try_from(value.clone())?.trunc() as i128);
                }
                _ => {}
            }
        }
        fields += usize::from(kind != Some('%'));
        rest = &rest[conversion + kind.map_or(0, char::len_utf8)..];
    }
    plain.push_str(rest);
    if values.kind() != ValueKind::Map && given.len() > fields {
        return Err(invalid(
            "not all arguments were converted in formatting a string",
        ));
    }
    format(FormatStyle::Printf, &plain, &given)
}

/// Takes a slice with a step from a string, list or tuple.
fn slice(
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("the step of a slice is 0"));
    }
    let letters: Vec<char> = value.as_str().into_iter().flat_map(str::chars).collect();
    let items: Vec<Value> = match value.as_str() {
        Some(_) => letters.iter().map(|letter| Value::from(*letter)).collect(),
        None => value.try_iter()?.collect(),
    };
    let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
    // The first and last positions that a slice may have.
    let (least, most) = if step > 0 {
        (0, length)
    } else {
        (-1, length - 1)
    };
    let position = |given: Option<i64>, default| match given {
        None => default,
        Some(given) if given < 0 => given.saturating_add(length).clamp(least, most),
        Some(given) => given.clamp(least, most),
    };
    let (first, last) = if step > 0 {
        (least, most)
    } else {
        (most, least)
    };
    let (mut at, stop) = (position(start, first), position(stop, last));
    let mut chosen = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        chosen.extend(
            usize::try_from(at)
                .ok()
                .and_then(|at| items.get(at).cloned()),
        );
        at = at.saturating_add(step);
    }
    Ok(match (value.as_str(), value.is_tuple()) {
        (Some(_), _) => chosen
            .iter()
            .map(Value::to_string)
            .collect::<String>()
            .into(),
        (None, true) => Value::from(Tuple::new(chosen)),
        (None, false) => Value::from(chosen),
    })
}

/// Splits at `separator` or at white space, up to `most` times from the left or right.
fn split(text: &str, separator: Option<&str>, most: usize, from_right: bool) -> Vec<String> {
    let mut parts = Vec::new();
    let mut rest = match (separator, from_right) {
        (Some(_), _) => text,
        (None, true) => text.trim_end(),
        (None, false) => text.trim_start(),
    };
    while parts.len() < most {
        let found = match (separator, from_right) {
            (Some(separator), true) => rest.rsplit_once(separator).map(|(head, tail)| (tail, head)),
            (Some(separator), false) => rest.split_once(separator),
            (None, true) => rest
                .rsplit_once(char::is_whitespace)
                .map(|(head, tail)| (tail, head.trim_end())),
            (None, false) => rest
                .split_once(char::is_whitespace)
                .map(|(head, tail)| (head, tail.trim_start())),
        };
        let Some((part, remaining)) = found else {
            break;
        };
        parts.push(part.to_owned());
        rest = remaining;
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(rest.to_owned());
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// Splits a text into lines at Python's line boundaries.
fn lines(text: &str, keeps_ends: bool) -> Vec<String> {
    const ENDS: [char; 10] = [
        '\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}',
    ];
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(ENDS) {
        let tail = &rest[end..];
        let first = tail.chars().next().map_or(1, char::len_utf8);
        let width = if tail.starts_with("\r\n") { 2 } else { first };
        let length = if keeps_ends { end + width } else { end };
        lines.push(rest[..length].to_owned());
        rest = &rest[end + width..];
    }
    if !rest.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

/// Capitalises every word; words consist only of letters.
fn title(text: &str) -> String {
    let mut title = String::with_capacity(text.len());
    let mut is_in_word = false;
    for letter in text.chars() {
        if is_in_word {
            title.extend(letter.to_lowercase())
        } else {
            title.extend(letter.to_uppercase())
        }
        is_in_word = letter.is_alphabetic();
    }
    title
}

/// Returns the characters from `start` to `end`, and the position of the first. Negative positions count from the end.
fn part_of(text: &str, start: Option<i64>, end: Option<i64>) -> (&str, usize) {
    if start.is_none() && end.is_none() {
        return (text, 0);
    }
    let length = text.chars().count();
    let position = |given: i64| match usize::try_from(given) {
        Ok(given) => given.min(length),
        Err(_) => {
            length.saturating_sub(usize::try_from(given.unsigned_abs()).unwrap_or(usize::MAX))
        }
    };
    let byte = |position| {
        text.char_indices()
            .nth(position)
            .map_or(text.len(), |(byte, _)| byte)
    };
    let start = position(start.unwrap_or(0));
    let end = end.map_or(length, position).max(start);
    (&text[byte(start)..byte(end)], start)
}

/// Maximum width to which a method pads a text.
const MAX_WIDTH: usize = 1 << 20;

/// Returns by how many characters `text` is shorter than `width`.
fn missing(text: &str, width: usize) -> Result<usize, Error> {
    if width <= MAX_WIDTH {
        Ok(width.saturating_sub(text.chars().count()))
    } else {
        Err(invalid("the width is above 1048576"))
    }
}

fn text_of(value: &Value) -> Result<&str, Error> {
    value
        .as_str()
        .ok_or_else(|| invalid(&format!("expected a string, not a {}", value.kind())))
}

pub(crate) fn invalid(reason: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.to_owned())
}
