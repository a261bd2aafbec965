//! [`Format`]: recognised by the file's content if possible, otherwise by its extension.

use serde_json::Value;

use crate::{
    Unusable,
    unpack::{Content, ending},
};

/// Format of a file, after decompression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// Text, source code or Markdown: the file is one document.
    Text,
    /// JSON: an array of records, or a sequence of records.
    Json,
    /// One JSON record per line.
    JsonLines,
    /// Comma- or tab-separated values with a header.
    Csv,
    /// Apache Parquet.
    Parquet,
}

/// File extensions of text and source code.
const TEXT: &[&str] = &[
    "adoc", "asm", "bash", "bat", "bib", "c", "cc", "cfg", "cjs", "clj", "cmake", "cmd", "conf",
    "cpp", "cs", "css", "cu", "cuh", "cxx", "dart", "diff", "ebnf", "el", "erl", "ex", "exs",
    "f90", "fs", "glsl", "go", "gradle", "graphql", "groovy", "h", "hh", "hpp", "hrl", "hs", "htm",
    "html", "hxx", "ini", "java", "jl", "js", "jsx", "kt", "kts", "latex", "less", "lisp", "log",
    "lua", "m", "markdown", "md", "mdx", "mjs", "ml", "mli", "mm", "nim", "nix", "org", "pas",
    "patch", "php", "pl", "pm", "proto", "ps1", "py", "pyi", "pyx", "r", "rb", "rkt", "rs", "rst",
    "s", "sass", "scala", "scm", "scss", "sh", "sol", "sql", "sv", "svelte", "swift", "tcl", "tex",
    "text", "tf", "toml", "ts", "tsx", "txt", "v", "vb", "vhd", "vim", "vue", "wgsl", "xhtml",
    "xml", "yaml", "yml", "zig", "zsh",
];

/// First bytes and names of formats that are not supported.
const FOREIGN: &[(&[u8], &str)] = &[
    (b"PK\x03\x04", "a ZIP archive"),
    (b"%PDF-", "a PDF"),
    (b"BZh9", "compressed with bzip2"),
    (b"\xfd7zXZ\0", "compressed with xz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4"),
    (b"ARROW1", "an Arrow file"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"GGUF", "a GGUF file"),
    (b"{\\rtf", "an RTF document"),
];

/// Offset of a tar archive's magic.
const TAR: usize = 257;

impl Format {
    /// Returns the format's name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "JSON",
            Self::JsonLines => "JSON Lines",
            Self::Csv => "CSV",
            Self::Parquet => "Parquet",
        }
    }

    /// Recognises the format of `content`. A file that was found in a folder must have a known extension or none.
    pub(crate) fn new(content: &Content, is_in_folder: bool) -> Result<Self, Unusable> {
        let head = &content.head[..];
        if head.starts_with(b"PAR1") {
            return Ok(Self::Parquet);
        }
        if head.starts_with(b"version https://git-lfs.github.com/spec/") {
            return Err(Unusable::LfsPointer);
        }
        let mut foreign = FOREIGN.iter();
        if let Some((_, kind)) = foreign.find(|(magic, _)| head.starts_with(magic)) {
            return Err(Unusable::Foreign(kind));
        }
        if head
            .get(TAR..)
            .is_some_and(|rest| rest.starts_with(b"ustar"))
        {
            return Err(Unusable::Foreign("a tar archive"));
        }
        if head.trim_ascii().is_empty() {
            return Err(Unusable::Empty);
        }
        match ending(&content.name).as_deref() {
            Some("jsonl" | "ndjson" | "jsonlines") => Ok(match head.trim_ascii_start()[0] {
                b'[' => Self::Json,
                _ => Self::JsonLines,
            }),
            Some("json") => Ok(if are_lines_objects(content) {
                Self::JsonLines
            } else {
                Self::Json
            }),
            Some("csv" | "tsv") => Ok(Self::Csv),
            Some("parquet") => Err(Unusable::Invalid {
                format: Self::Parquet,
                reason: "it does not begin with `PAR1`".to_owned(),
            }),
            // Exported JSON records are often named `.txt`; lines of source code are not JSON objects.
            Some("txt") | None => Ok(Self::of_content(content)),
            Some(ending) if TEXT.contains(&ending) => Ok(Self::Text),
            Some(_) if is_in_folder => Err(Unusable::UnknownKind),
            Some(_) => Ok(Self::of_content(content)),
        }
    }

    fn of_content(content: &Content) -> Self {
        if are_lines_objects(content) {
            Self::JsonLines
        } else {
            Self::Text
        }
    }
}

/// Returns whether every line in the head of `content` is a JSON object. If the head is one incomplete line, its
/// beginning decides.
fn are_lines_objects(content: &Content) -> bool {
    let is_object = |line: &[u8]| {
        line.trim_ascii_start().starts_with(b"{")
            && serde_json::from_slice::<Value>(line).is_ok_and(|value| value.is_object())
    };
    let mut lines = content.head.split(|byte| *byte == b'\n').peekable();
    let mut count = 0;
    while let Some(line) = lines.next() {
        let is_last = lines.peek().is_none();
        if line.trim_ascii().is_empty() {
            continue;
        }
        match is_object(line) {
            true => count += 1,
            // The last line may continue beyond the head.
            false if is_last && !content.is_whole => {
                return count > 0 || line.trim_ascii_start().starts_with(b"{\"");
            }
            false => return false,
        }
    }
    count > 0
}
