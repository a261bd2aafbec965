//! Command lines in documentation.

/// The lines of `text` as a shell reads them: joined if one ends in `\`, without prompts and comments.
pub(crate) fn command_lines(text: &str) -> Vec<String> {
    let whole = text.replace("\\\n", " ");
    let lines = whole.lines().map(str::trim);
    let lines = lines.map(|line| line.strip_prefix("$ ").unwrap_or(line));
    let lines = lines.map(|line| line.split(" #").next().unwrap_or(line).trim());
    lines.map(str::to_owned).collect()
}
