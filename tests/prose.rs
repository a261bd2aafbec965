//! Patterns of English that slow a reader down, in documents, doc comments and messages.

use std::{fs, path::Path};

use regex::{Regex, RegexSet};

use crate::files_below;

/// Patterns, each with the wording to use instead.
const RULES: &[(&str, &str)] = &[
    (
        r"\b(?:[Nn]one|null|[Ff]ails?|empty) where\b|, where (?:there|they|that|this|none|several)\b|\bwhere there (?:is|are)\b",
        "`if` states a condition, `where` names a place",
    ),
    (
        r"[0-9}] %(?:[ ,.;:)]|$)",
        "a percent sign follows without a space",
    ),
    (
        r"\b[Bb]esides?\b",
        "`compared with`, `next to` or `in addition to`",
    ),
    (
        r"\b(?:two|three|four|five|six|seven|eight|nine) (?:tenths|fifths|sixths|sevenths|eighths)\b",
        "a number: `30% less`",
    ),
    (
        r"\b(?:a|one) (?:tenth|fifth|sixth|seventh|eighth|twentieth) (?:slower|faster|fewer|more|less|to)\b",
        "a number: `10% slower`",
    ),
    (
        r"(?:^|[.!?] )(?:What|Those|Of|That of) [^?]*$",
        "a sentence begins with its subject: the thing itself, not a riddle",
    ),
    (
        r"(?:^|[.!?] )As (?:many|much|of|they|the|a|those)\b",
        "a sentence begins with its subject",
    ),
    (r"\bmeanwhile\b", "`at the same time`, or nothing"),
    (r"\banew\b", "`again`"),
    (r"\bof (?:its|their) own\b", "`separate`, or nothing"),
    (
        r"\bby (?:itself|themselves)\b",
        "`separately`, `on its own`, or nothing",
    ),
    (r"\bas well(?:[.,;:)]|$)", "`too` or `also`"),
    (
        r"(?:[^e]|[^r]e) (?:is|are|was|were|be) no (?:multiple|prefix|artifact|file|folder|number|model|bundle|profile|row|shard|object|index|error|JSON|listing|result|call|permutation|group)\b",
        "`is not a …`",
    ),
    (
        r"\bplac(?:e|es|ing) (?:it|them|a bundle|the bundle) again\b|\bplaced again\b",
        "`re-plan`",
    ),
    (r"\btaken for\b", "`treated as`"),
    (r"\bmend(?:ed|s)?\b", "`fix`"),
];

/// Text of a paragraph, a doc comment or a message, with the number of its first line.
struct Passage {
    line: usize,
    text: String,
}

/// Appends `line` without code in backticks.
fn append(text: &mut String, line: &str) {
    for (index, part) in line.split('`').enumerate() {
        match index % 2 {
            0 => text.push_str(part),
            _ => text.push_str("`x`"),
        }
    }
    text.push(' ');
}

/// Joins lines, numbered from 1, to passages; `None` ends a passage, as do headings, tables and lists.
fn passages<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<Passage> {
    let (mut found, mut text, mut first, mut is_code) = (Vec::new(), String::new(), 1, false);
    for (index, line) in lines.enumerate() {
        let line = line.unwrap_or_default().trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        let is_prose = !(is_code || is_fence || line.is_empty() || line.starts_with('#'));
        if !is_prose || line.starts_with(['|', '*', '-']) {
            let text = std::mem::take(&mut text);
            found.push(Passage { line: first, text });
            first = index + 1;
        }
        if is_prose {
            if text.is_empty() {
                first = index + 1;
            }
            append(&mut text, line.trim_start_matches(['*', '-', '|', ' ']));
        }
    }
    found.push(Passage { line: first, text });
    found
}

/// Text of a doc comment's line.
fn doc_comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///")
        .or_else(|| line.strip_prefix("//!"))
}

/// Messages of a source file outside its tests and invariants: string literals with a space.
fn messages(source: &str, literal: &Regex) -> Vec<Passage> {
    let lines = source
        .lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]"));
    let code = lines.enumerate().filter(|(_, line)| {
        !["//", "expect(", "unreachable!("]
            .iter()
            .any(|other| line.contains(other))
    });
    let literals = code.flat_map(|(index, line)| {
        literal
            .captures_iter(line)
            .map(move |found| (index + 1, found))
    });
    let texts = literals.map(|(line, found)| (line, found.get(1).unwrap().as_str()));
    texts
        .filter(|(_, text)| text.contains(' '))
        .map(|(line, literal)| {
            let mut text = String::new();
            append(&mut text, literal);
            Passage { line, text }
        })
        .collect()
}

#[test]
fn prose_has_no_pattern_that_slows_a_reader_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().unwrap();
    let rules = RegexSet::new(RULES.iter().map(|(pattern, _)| pattern)).unwrap();
    let literal = Regex::new(r#""((?:[^"\\]|\\.)*)""#).unwrap();
    let mut files = vec![
        root.join("README.md"),
        root.join("CONTRIBUTING.md"),
        root.join("CHANGELOG.md"),
    ];
    for folder in ["docs", "crates", "solver", "kernels", "tests"] {
        files.extend(files_below(&root.join(folder)));
    }
    files.sort();
    let mut faults = Vec::new();
    for file in &files {
        let name = file.strip_prefix(&root).unwrap().to_str().unwrap();
        let is_skipped = [
            "docs/reports",
            "kernels/emulator",
            "tests/golden",
            "tests/prose.rs",
        ];
        if is_skipped.iter().any(|skipped| name.starts_with(skipped)) {
            continue;
        }
        let mut found = Vec::new();
        if name.ends_with(".md") {
            let text = fs::read_to_string(file).unwrap();
            found.extend(passages(text.lines().map(Some)));
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(file).unwrap();
            found.extend(passages(text.lines().map(doc_comment)));
            if name.contains("/src/") {
                found.extend(messages(&text, &literal));
            }
        }
        for Passage { line, text } in &found {
            for rule in &rules.matches(text) {
                let (pattern, instead) = RULES[rule];
                let fault = Regex::new(pattern).unwrap().find(text).unwrap().as_str();
                faults.push(format!("{name}:{line}: `{}`: {instead}", fault.trim()));
            }
        }
    }
    let count = faults.len();
    assert!(count == 0, "{count} faults:\n{}", faults.join("\n"));
}
