//! Where words go: data to stdout, talk to stderr, tables that line up.

use std::{
    borrow::Cow,
    io::{IsTerminal, Write},
};

use anyhow::Result;

/// How much to say, and whether a person or a program listens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Say nothing that was not asked for.
    pub(crate) quiet: bool,
    /// Say more than usual.
    pub(crate) verbose: bool,
}

impl Output {
    /// Whether progress bars make sense.
    pub(crate) fn shows_progress(self) -> bool {
        !self.quiet && !self.verbose && std::io::stderr().is_terminal()
    }

    /// The same, but silent.
    pub(crate) fn silent(self) -> Self {
        Self {
            quiet: true,
            verbose: false,
        }
    }

    /// A line of talk.
    pub(crate) fn say(self, line: impl AsRef<str>) {
        if !self.quiet {
            // A closed stderr is no error.
            let _ = writeln!(anstream::stderr(), "{}", escaped(line.as_ref()));
        }
    }

    /// If stdin is a terminal, prints that `what` is read from it.
    pub(crate) fn say_if_typed(self, what: &str) {
        if std::io::stdin().is_terminal() {
            self.say(format!(
                "reading {what} from standard input; Ctrl-D at the start of a line ends it"
            ));
        }
    }

    /// A line for `--verbose`.
    pub(crate) fn detail(self, line: impl AsRef<str>) {
        if self.verbose {
            self.say(line);
        }
    }
}

/// `text` with visible escapes in place of characters that would control a terminal: names in it may come from other people's
/// files. Line breaks and tabs are kept.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    // Characters that change the direction of text can disguise what it says.
    let is_escaped = |c: char| {
        c.is_control() && c != '\n' && c != '\t'
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::new();
    for c in text.chars() {
        if is_escaped(c) {
            safe.extend(c.escape_debug())
        } else {
            safe.push(c)
        }
    }
    Cow::Owned(safe)
}

/// Writes text for people to stdout, [`escaped`].
pub(crate) fn print(text: impl AsRef<str>) -> Result<()> {
    print_data(escaped(text.as_ref()).as_bytes())
}

/// Writes data to stdout as it is.
pub(crate) fn print_data(data: impl AsRef<[u8]>) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(data.as_ref())?;
    stdout.flush()?;
    Ok(())
}

/// Writes one JSON document to stdout.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    print_data(text)
}

/// A table: the first column is flush left, the others flush right.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self {
            rows: vec![
                headings
                    .iter()
                    .map(|heading| (*heading).to_owned())
                    .collect(),
            ],
        }
    }

    /// Adds a row with as many cells as there are headings.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        let cells = cells.iter().map(|cell| escaped(cell).into_owned());
        self.rows.push(cells.collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let padding = " ".repeat(width(column) - cell.chars().count());
                let cell = if column == 0 {
                    format!("{cell}{padding}")
                } else {
                    format!("  {padding}{cell}")
                };
                line.push_str(&cell);
            }
            writeln!(formatter, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The share that `text` gives in percent, such as `1%`; none if it gives none.
pub(crate) fn parse_percent(text: &str) -> Option<f64> {
    let percent: f64 = text.strip_suffix('%')?.trim().parse().ok()?;
    Some(percent / 100.0)
}

/// A share as a percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A curve of shares as a line of blocks, such as `▁▃▅▇█`.
pub(crate) fn sparkline(shares: &[f64]) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    shares
        .iter()
        .map(|share| BLOCKS[((share * 8.0) as usize).min(7)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["layer", "share"]);
        table.row(vec!["0".to_owned(), percent(0.5)]);
        table.row(vec!["10".to_owned(), percent(1.0)]);
        assert_eq!(
            table.to_string(),
            "layer   share\n0       50.0%\n10     100.0%\n"
        );
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert_eq!(escaped("a\n\tb – ▁é"), "a\n\tb – ▁é");
        assert_eq!(
            escaped("\u{1b}[2Jx\r\u{9b}1m\u{202e}y\u{7}"),
            "\\u{1b}[2Jx\\r\\u{9b}1m\\u{202e}y\\u{7}"
        );
        let mut table = Table::new(&["name", "n"]);
        table.row(vec!["\u{1b}".to_owned(), "1".to_owned()]);
        assert_eq!(table.to_string(), "name    n\n\\u{1b}  1\n");
    }

    #[test]
    fn a_sparkline_spans_its_range() {
        assert_eq!(sparkline(&[0.0, 0.5, 1.0]), "▁▅█");
    }
}
