//! Rewrites the parts of a template that minijinja reads differently from jinja2: `{% generation %}` blocks, the `%`
//! operator, which also formats strings, and slices with a step.

/// Name of the function that replaces the `%` operator.
pub(crate) const MODULO: &str = "__modulo__";

/// Name of the method that replaces slices with a step.
pub(crate) const SLICE: &str = "__slice__";

/// Keywords that end an operand.
const KEYWORDS: [&str; 12] = [
    "and",
    "elif",
    "else",
    "for",
    "if",
    "in",
    "is",
    "not",
    "or",
    "print",
    "recursive",
    "set",
];

/// Rewrites a template; line numbers do not change.
pub(crate) fn for_minijinja(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest
        .find("{{")
        .into_iter()
        .chain(rest.find("{%"))
        .chain(rest.find("{#"))
        .min()
    {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = match tag.as_bytes()[1] {
            b'#' => tag.find("#}").map(|end| end + 2),
            kind => end_of_tag(tag, if kind == b'%' { "%}" } else { "}}" }),
        };
        let Some(end) = end else {
            // The parser reports it.
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        let word = match tag.starts_with("{%") {
            true => tag.trim_matches(['{', '%', '}', '-', '+']).trim(),
            false => "",
        };
        rest = after;
        match word {
            _ if tag.starts_with("{#") => out.push_str(tag),
            // These blocks only mark training targets.
            "generation" => out.push_str(&tag.replace("generation", "with")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endwith")),
            "raw" => {
                let end = end_of_raw(after);
                // Jinja2 keeps a newline after this tag.
                out.push_str(tag.trim_end_matches("%}").trim_end_matches('+'));
                out.push_str(if tag.ends_with("-%}") { "%}" } else { "+%}" });
                out.push_str(&after[..end]);
                rest = &after[end..];
            }
            _ => expressions(tag, &mut out),
        }
    }
    out.push_str(rest);
    out
}

/// Returns the length of the tag at the start of `text`. Strings and mappings in the tag may contain `end`.
fn end_of_tag(text: &str, end: &str) -> Option<usize> {
    let (mut position, mut depth) = (2, 0_usize);
    while position < text.len() {
        let rest = &text[position..];
        if depth == 0 && rest.starts_with(end) {
            return Some(position + 2);
        }
        match rest.as_bytes()[0] {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        position += token_length(rest);
    }
    None
}

/// Returns the position of the tag that ends a raw block.
fn end_of_raw(text: &str) -> usize {
    let is_end = |(start, _): &(usize, &str)| {
        let tag = text[start + 2..]
            .trim_start_matches(['-', '+'])
            .trim_start();
        tag.starts_with("endraw")
    };
    text.match_indices("{%")
        .find(is_end)
        .map_or(text.len(), |(start, _)| start)
}

/// Returns the length of the string, word, operator or space at the start of `text`, which must not be empty.
fn token_length(text: &str) -> usize {
    let first = text.chars().next().map_or(0, char::len_utf8);
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    match text.as_bytes()[0] {
        quote @ (b'\'' | b'"') => {
            let mut is_escaped = true;
            let end = text.bytes().position(|byte| {
                let is_end = byte == quote && !is_escaped;
                is_escaped = byte == b'\\' && !is_escaped;
                is_end
            });
            end.map_or(text.len(), |end| end + 1)
        }
        _ if text.starts_with(is_word) => {
            text.find(|letter| !is_word(letter)).unwrap_or(text.len())
        }
        _ if ["**", "//", "==", "!=", "<=", ">="]
            .iter()
            .any(|operator| text.starts_with(operator)) =>
        {
            2
        }
        _ => first,
    }
}

/// State of the expression within one pair of brackets.
#[derive(Default)]
struct Level {
    /// Position in the output at which the operands of `*`, `/`, `//` and `%` begin.
    start: usize,
    /// Whether the right operand of a `%` is being read.
    is_modulo: bool,
    /// Position in the output at which a subscript begins, including its bracket.
    subscript: Option<usize>,
    /// Positions of the subscript's colons.
    colons: Vec<usize>,
}

/// Writes a tag to `out` with its expressions rewritten.
fn expressions(tag: &str, out: &mut String) {
    let mut levels = vec![Level::default()];
    let (mut position, body) = (3.min(tag.len() - 2), tag.len() - 2);
    if !tag[2..].starts_with(['-', '+']) {
        position = 2;
    }
    out.push_str(&tag[..position]);
    levels[0].start = out.len();
    let mut follows_operand = false;
    while position < body {
        let token = &tag[position..][..token_length(&tag[position..])];
        position += token.len();
        let depth = levels.len();
        let level = &mut levels[depth - 1];
        if token.trim().is_empty() {
            out.push_str(token);
            continue;
        }
        let is_sign = matches!(token, "-" | "+") && !follows_operand;
        let ends_modulo = match token {
            "-" | "+" => !is_sign,
            "*" | "/" | "//" | "%" | "~" | "==" | "!=" | "<" | ">" | "<=" | ">=" | "=" | ","
            | ":" => true,
            ")" | "]" | "}" => true,
            word => KEYWORDS.contains(&word) && !out.ends_with('.'),
        };
        if ends_modulo && std::mem::take(&mut level.is_modulo) {
            let end = out.trim_end().len();
            out.insert(end, ')');
        }
        follows_operand =
            !ends_modulo && !is_sign && !matches!(token, "(" | "[" | "{" | "|" | "." | "**");
        match token {
            "%" => {
                let spaces = out[level.start..].len() - out[level.start..].trim_start().len();
                out.insert_str(level.start + spaces, &format!("{MODULO}("));
                out.push(',');
                level.is_modulo = true;
            }
            "*" | "/" | "//" => out.push_str(token),
            "(" | "[" | "{" => {
                let is_subscript = token == "["
                    && out.ends_with(|last: char| {
                        last.is_alphanumeric() || matches!(last, '_' | ')' | ']' | '\'' | '"')
                    });
                let subscript = is_subscript.then_some(out.len());
                out.push_str(token);
                let start = out.len();
                levels.push(Level {
                    start,
                    subscript,
                    ..Level::default()
                });
            }
            ")" | "]" | "}" => {
                if let Some(Level {
                    subscript: Some(start),
                    colons,
                    ..
                }) = levels.pop_if(|_| depth > 1)
                    && let [first, second] = colons[..]
                {
                    let parts = [start + 1..first, first + 1..second, second + 1..out.len()];
                    let parts = parts.map(|part| match out[part].trim() {
                        "" => "none".to_owned(),
                        part => part.to_owned(),
                    });
                    out.truncate(start);
                    *out += &format!(".{SLICE}({})", parts.join(","));
                } else {
                    out.push_str(token);
                }
                follows_operand = true;
            }
            _ => {
                if token == ":" {
                    level.colons.push(out.len());
                }
                out.push_str(token);
                if ends_modulo {
                    level.start = out.len();
                }
            }
        }
    }
    if levels[0].is_modulo {
        // The parenthesis goes before a sign that strips white space.
        let end = out.trim_end_matches(['-', '+']).trim_end().len();
        out.insert(end, ')');
    }
    out.push_str(&tag[body.max(position)..]);
}

#[cfg(test)]
mod tests {
    use super::for_minijinja;

    #[test]
    fn only_what_minijinja_reads_differently_is_rewritten() {
        for same in [
            "",
            "100 % of {a} {{ '%' }}{{ \"%}}\" }} {% if a %}{#- a % b #}",
            "{% raw +%}{{ a % b }}{% generation %}{%- endraw %}{% raw -%}{% endraw %}",
            "{{ a[1:2] }}{{ a[:] }}{{ {'a': 1, 'b': 2} }}{{ '\\'%' ~ x }}",
            "{{ raw }}{{ generation }}{{ 1 }}",
            "{{ a",
            "{% if 'a",
            "{{-}}",
            "{{}}",
            "{{ {'a': {'b': {}}}['%'] }}",
        ] {
            assert_eq!(for_minijinja(same), same);
        }
        for (source, expected) in [
            (
                "{%- generation +%}a{% endgeneration %}",
                "{%- with +%}a{% endwith %}",
            ),
            ("{% raw %}\n{% endraw %}", "{% raw +%}\n{% endraw %}"),
            ("{{ a % b }}", "{{ __modulo__(a , b) }}"),
            ("{{-a%b-}}", "{{-__modulo__(a,b)-}}"),
            (
                "{{ 1 + 2 * a.b(c) % d | f ~ 3 }}",
                "{{ 1 + __modulo__(2 * a.b(c) , d | f) ~ 3 }}",
            ),
            (
                "{% if not a % 2 == 0 %}",
                "{% if not __modulo__(a , 2) == 0 %}",
            ),
            (
                "{{ [a % b, c] % d % -e }}",
                "{{ __modulo__(__modulo__([__modulo__(a , b), c] , d) , -e) }}",
            ),
            (
                "{{ {'a': {'b': a % b}} }}%",
                "{{ {'a': {'b': __modulo__(a , b)}} }}%",
            ),
            ("{{ -a % b - c }}", "{{ __modulo__(-a , b) - c }}"),
            ("{{ f(x='%' % a) }}", "{{ f(x=__modulo__('%' , a)) }}"),
            (
                "{{ a[::-1].b[1:c % 2:d][0] }}",
                "{{ a.__slice__(none,none,-1).b.__slice__(1,__modulo__(c , 2),d)[0] }}",
            ),
        ] {
            assert_eq!(for_minijinja(source), expected);
        }
    }
}
