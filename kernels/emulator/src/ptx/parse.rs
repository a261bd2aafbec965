//! The text of a PTX module, split into functions and statements.

use super::PtxError;

/// A parameter or result of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variable<'a> {
    pub(crate) name: &'a str,
    pub(crate) bytes: usize,
    pub(crate) alignment: usize,
}

/// A kernel or a function.
#[derive(Debug)]
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    pub(crate) is_kernel: bool,
    pub(crate) parameters: Vec<Variable<'a>>,
    pub(crate) result: Option<Variable<'a>>,
    pub(crate) max_threads: u32,
    /// Statements and labels, each with its line; without the `;`.
    pub(crate) statements: Vec<(u32, String)>,
}

/// A module.
#[derive(Debug)]
pub(crate) struct Module<'a> {
    pub(crate) file: &'a str,
    pub(crate) functions: Vec<Function<'a>>,
    /// Name of the dynamic shared memory.
    pub(crate) shared: Option<&'a str>,
}

impl<'a> Module<'a> {
    /// Splits `text`.
    ///
    /// # Errors
    ///
    /// A directive or header is not known.
    pub(crate) fn parse(file: &'a str, text: &'a str) -> Result<Self, PtxError> {
        let mut module = Self {
            file,
            functions: Vec::new(),
            shared: None,
        };
        let error = |line: u32, reason: &str, statement: &str| PtxError {
            file: file.to_owned(),
            line,
            statement: statement.to_owned(),
            reason: reason.to_owned(),
        };
        let mut rest = 0;
        let mut lines = (1..).zip(text.split('\n').map(move |line| {
            let start = rest;
            rest += line.len() + 1;
            (start, without_comment(line))
        }));
        while let Some((line, (start, code))) = lines.next() {
            let mut words = code.split_whitespace();
            match words.next() {
                // Variables are the constants of the source, which instructions have as immediates: a use is an error.
                None | Some(".version" | ".target" | ".address_size" | ".global") => {}
                Some(".extern") => {
                    let name = words.next_back().and_then(|name| name.strip_suffix("[];"));
                    module.shared = name.filter(|_| code.contains(".shared"));
                    if module.shared.is_none() {
                        return Err(error(line, "unknown external variable", code));
                    }
                }
                Some(".visible" | ".entry" | ".func") => {
                    let mut header_end = start + code.len();
                    for (_, (start, code)) in &mut lines {
                        if code == "{" {
                            break;
                        }
                        header_end = start + code.len();
                    }
                    let header = &text[start..header_end];
                    let mut function = parse_header(header)
                        .ok_or_else(|| error(line, "unknown form of function header", header))?;
                    let mut depth = 1;
                    let mut pending = String::new();
                    let mut first_line = 0;
                    for (line, (_, code)) in &mut lines {
                        match code {
                            "" => {}
                            "{" => depth += 1,
                            "}" if depth == 1 => {
                                depth = 0;
                                break;
                            }
                            "}" => depth -= 1,
                            label if pending.is_empty() && label.ends_with(':') => {
                                function.statements.push((line, label.to_owned()));
                            }
                            code => {
                                for part in code.split_inclusive(';').map(str::trim) {
                                    if pending.is_empty() {
                                        first_line = line;
                                    }
                                    pending += part;
                                    if pending.ends_with(';') {
                                        pending.pop();
                                        function
                                            .statements
                                            .push((first_line, std::mem::take(&mut pending)));
                                    }
                                }
                            }
                        }
                    }
                    if depth != 0 || !pending.is_empty() {
                        return Err(error(line, "function without an end", header));
                    }
                    module.functions.push(function);
                }
                Some(_) => return Err(error(line, "unknown directive", code)),
            }
        }
        Ok(module)
    }
}

fn without_comment(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code).trim()
}

/// Parses what precedes the body of a function.
fn parse_header(header: &str) -> Option<Function<'_>> {
    let (kind, mut rest) = header
        .split_once(".entry")
        .map(|(_, rest)| (true, rest))
        .or_else(|| header.split_once(".func").map(|(_, rest)| (false, rest)))?;
    let mut result = None;
    if let Some(inner) = rest.trim_start().strip_prefix('(') {
        let (variable, after) = inner.split_once(')')?;
        result = Some(parse_variable(variable)?);
        rest = after;
    }
    let (name, after) = rest.split_once('(')?;
    let (parameters, tail) = after.split_once(')')?;
    let parameters = parameters.split(',').filter(|text| !text.trim().is_empty());
    let max_threads = match tail.split_once(".maxntid") {
        Some((_, tail)) => {
            let end = tail
                .find(|c: char| c != ',' && c != ' ' && !c.is_ascii_digit())
                .unwrap_or(tail.len());
            let sizes = tail[..end]
                .split(',')
                .map(|size| size.trim().parse::<u32>());
            sizes.product::<Result<u32, _>>().ok()?
        }
        None => 1024,
    };
    Some(Function {
        name: name.trim(),
        is_kernel: kind,
        parameters: parameters.map(parse_variable).collect::<Option<_>>()?,
        result,
        max_threads,
        statements: Vec::new(),
    })
}

/// Parses `.param .align 8 .b8 name[72]` or `.param .b32 name`.
fn parse_variable(text: &str) -> Option<Variable<'_>> {
    let mut words = text.split_whitespace();
    (words.next()? == ".param").then_some(())?;
    let mut word = words.next()?;
    let mut alignment = None;
    if word == ".align" {
        alignment = Some(words.next()?.parse().ok()?);
        word = words.next()?;
    }
    let size: usize = word.get(2..)?.parse::<usize>().ok()? / 8;
    let (name, count) = match words.next()?.split_once('[') {
        Some((name, count)) => (name, count.strip_suffix(']')?.parse().ok()?),
        None => (text.split_whitespace().next_back()?, 1),
    };
    Some(Variable {
        name,
        bytes: size * count,
        alignment: alignment.unwrap_or(size),
    })
}
