//! Every supported kind of file gives the tokens of its documents; other files are skipped with a reason.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use powerinfer_corpus::{Corpus, CorpusError, Encoder, EndOfText, Format};
use powerinfer_text::{GenerationPrompt, Message, MessageTokens, Tokenizer};
use serde_json::{Value, json};

/// Texts with all characters that the formats escape.
const TEXTS: [&str; 5] = [
    "The first document.\n",
    "Ein zweites, mit Umlauten: äöü\n",
    "third\nwith lines\n",
    "fn main() {}\n",
    "a \"quoted\" one, with\ttabs, \\ and 𝄞\r\n",
];

fn golden(name: &str) -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
    Tokenizer::from_directory(&folder.join(name)).unwrap()
}

struct Sandbox {
    folder: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Sandbox {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            tokenizer: golden("llama-relu-gqa"),
        }
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn encoder(&self) -> Encoder<'_> {
        Encoder {
            tokenizer: &self.tokenizer,
            vocabulary_size: self.tokenizer.vocabulary_size(),
            end: EndOfText::Add,
        }
    }

    fn read(&self, path: &Path) -> Corpus {
        Corpus::read(path, &self.encoder(), 512, 100_000).unwrap()
    }

    fn ids(&self, texts: &[&str]) -> Vec<Vec<u32>> {
        let texts = texts.iter().map(|text| self.encoder().text(text).unwrap());
        texts.collect()
    }

    /// Returns the token ids of conversations, each with a question and an answer.
    fn chats(&self, chats: &[[&str; 2]]) -> Vec<Vec<u32>> {
        let message = |role: &str, content: &str| Message {
            role: role.to_owned(),
            content: content.to_owned(),
        };
        let ids = |[question, answer]: &[&str; 2]| {
            let messages = [message("user", question), message("assistant", answer)];
            let (prompt, tokens) = (GenerationPrompt::Omit, MessageTokens::Plain);
            let rendered = self
                .tokenizer
                .render_chat(&messages, prompt, tokens)
                .unwrap();
            self.tokenizer.encode_chat(&rendered).unwrap()
        };
        chats.iter().map(ids).collect()
    }

    /// Asserts that the file `name` has documents with these ids in `format`, and that nothing is skipped.
    #[track_caller]
    fn gives(&self, name: &str, bytes: impl AsRef<[u8]>, format: Format, ids: &[Vec<u32>]) {
        let corpus = self.read(&self.write(name, bytes));
        assert!(corpus.skipped.is_empty(), "{name}: {:?}", corpus.skipped);
        assert_eq!(corpus.documents, ids, "{name}");
        let formats: Vec<_> = corpus.formats.into_iter().collect();
        assert_eq!(formats, [(format, ids.len())], "{name}");
    }

    /// Asserts that the whole file `name` is skipped for a reason that contains `part`.
    #[track_caller]
    fn skips(&self, name: &str, bytes: impl AsRef<[u8]>, part: &str) {
        let corpus = self.read(&self.write(name, bytes));
        assert!(
            corpus.documents.is_empty(),
            "{name}: {:?}",
            corpus.documents
        );
        let [skipped] = &corpus.skipped[..] else {
            panic!("{name}: {:?}", corpus.skipped);
        };
        assert_eq!(skipped.records, None, "{name}");
        let message = skipped.to_string();
        assert!(
            message.contains(name) && message.contains(part),
            "{message}"
        );
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

fn data(name: &str) -> Vec<u8> {
    fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data")
            .join(name),
    )
    .unwrap()
}

#[test]
fn every_format_gives_the_same_documents_plain_and_compressed() {
    let sandbox = Sandbox::new();
    let ids = sandbox.ids(&TEXTS);
    let objects = |key: &str| TEXTS.map(|text| json!({"id": 1, key: text}));
    let array = json!(objects("text")).to_string();
    let pretty = serde_json::to_string_pretty(&objects("content")).unwrap();
    let table = |delimiter: u8| {
        let mut writer = csv::WriterBuilder::new();
        let mut writer = writer.delimiter(delimiter).from_writer(Vec::new());
        writer.write_record(["id", "text"]).unwrap();
        for text in TEXTS {
            writer.write_record(["1", text]).unwrap();
        }
        writer.into_inner().unwrap()
    };
    let stream = objects("text").map(|value| serde_json::to_string_pretty(&value).unwrap());
    for (name, bytes, format) in [
        (
            "docs.jsonl",
            lines(&objects("text")).into_bytes(),
            Format::JsonLines,
        ),
        (
            "docs.ndjson",
            lines(&objects("content")).into_bytes(),
            Format::JsonLines,
        ),
        (
            "named.json",
            lines(&objects("text")).into_bytes(),
            Format::JsonLines,
        ),
        (
            "exported.txt",
            lines(&objects("text")).into_bytes(),
            Format::JsonLines,
        ),
        (
            "exported",
            lines(&objects("text")).into_bytes(),
            Format::JsonLines,
        ),
        (
            "strings.jsonl",
            lines(&TEXTS.map(Value::from)).into_bytes(),
            Format::JsonLines,
        ),
        ("array.json", array.clone().into_bytes(), Format::Json),
        ("array.jsonl", array.into_bytes(), Format::Json),
        ("pretty.json", pretty.into_bytes(), Format::Json),
        ("stream.json", stream.concat().into_bytes(), Format::Json),
        (
            "strings.json",
            json!(TEXTS).to_string().into_bytes(),
            Format::Json,
        ),
        ("docs.csv", table(b','), Format::Csv),
        ("docs.tsv", table(b'\t'), Format::Csv),
    ] {
        sandbox.gives(name, &bytes, format, &ids);
        let marked = [&[0xef, 0xbb, 0xbf], &bytes[..]].concat();
        sandbox.gives(&format!("marked-{name}"), &marked, format, &ids);
        let packed = gzip(&marked);
        sandbox.gives(&format!("{name}.gz"), &packed, format, &ids);
        // Unpacked on the way, and not renamed.
        sandbox.gives(&format!("unpacked-{name}.gz"), &bytes, format, &ids);
        let packed = zstd::encode_all(&marked[..], 1).unwrap();
        sandbox.gives(&format!("{name}.zst"), packed, format, &ids);
    }
    let text = String::from_utf8(table(b',')).unwrap();
    let units = |text: &str| -> Vec<u16> {
        "\u{feff}"
            .encode_utf16()
            .chain(text.encode_utf16())
            .collect()
    };
    let little: Vec<u8> = units(&text)
        .into_iter()
        .flat_map(u16::to_le_bytes)
        .collect();
    let big: Vec<u8> = units(&text)
        .into_iter()
        .flat_map(u16::to_be_bytes)
        .collect();
    sandbox.gives("excel.csv", little, Format::Csv, &ids);
    sandbox.gives("big.csv", big, Format::Csv, &ids);
}

#[test]
fn parquet_gives_the_documents_of_all_row_groups() {
    // Written by pyarrow 26: three row groups, compressed with snappy.
    let sandbox = Sandbox::new();
    let texts = [&TEXTS[..4], &["five"]].concat();
    let ids = sandbox.ids(&texts);
    let bytes = data("text.parquet");
    sandbox.gives("text.parquet", &bytes, Format::Parquet, &ids);
    sandbox.gives("named-otherwise", &bytes, Format::Parquet, &ids);
    sandbox.gives("text.parquet.gz", gzip(&bytes), Format::Parquet, &ids);
    let packed = zstd::encode_all(&bytes[..], 1).unwrap();
    sandbox.gives("text.parquet.zst", packed, Format::Parquet, &ids);
    let chats = sandbox.chats(&[["Hello", "Hi!"], ["What is 2+2?", "4"]]);
    sandbox.gives(
        "chat.parquet",
        data("messages.parquet"),
        Format::Parquet,
        &chats,
    );
    let corpus = sandbox.read(&sandbox.write("x.parquet", data("conversations.parquet")));
    assert_eq!(corpus.documents, chats[..1]);
    assert_eq!(corpus.skipped[0].records, Some(1), "a row is null");
    sandbox.skips("other.parquet", data("other.parquet"), "`id`, `body`");
}

#[test]
fn truncated_parquet_is_skipped() {
    let sandbox = Sandbox::new();
    let bytes = data("text.parquet");
    for end in (4..bytes.len()).step_by(3) {
        sandbox.skips("cut.parquet", &bytes[..end], "Parquet");
    }
}

#[test]
fn conversations_are_rendered_by_the_chat_template() {
    let sandbox = Sandbox::new();
    let chats = [["Hello", "Hi!"], ["What is </s>?", "A token.\n"]];
    let ids = sandbox.chats(&chats);
    let messages = chats.map(|[question, answer]| {
        json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    });
    let shared = chats.map(|[question, answer]| {
        json!([{"from": "human", "value": question}, {"from": "gpt", "value": answer}])
    });
    let parts = chats.map(|[question, answer]| {
        json!([{"role": "user", "content": [{"type": "text", "text": question}]}, {"role": "assistant", "content": answer}])
    });
    let rows = |key: &str, values: &[Value; 2]| {
        values
            .clone()
            .map(|value| json!({"id": 1, "prompt": "x", key: value}))
    };
    for (name, rows) in [
        ("messages.jsonl", rows("messages", &messages)),
        ("parts.jsonl", rows("messages", &parts)),
        ("conversations.jsonl", rows("conversations", &shared)),
        ("mixed.jsonl", rows("messages", &shared)),
    ] {
        sandbox.gives(name, lines(&rows), Format::JsonLines, &ids);
    }
    sandbox.gives(
        "sharegpt.json",
        json!(rows("conversations", &shared)).to_string(),
        Format::Json,
        &ids,
    );
    let halves =
        messages.map(|messages| json!({"prompt": [messages[0]], "completion": [messages[1]]}));
    sandbox.gives("halves.jsonl", lines(&halves), Format::JsonLines, &ids);
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record(["messages"]).unwrap();
    let cells = rows("messages", &shared).map(|row| row["messages"].to_string());
    cells
        .iter()
        .for_each(|cell| table.write_record([cell]).unwrap());
    sandbox.gives(
        "messages.csv",
        table.into_inner().unwrap(),
        Format::Csv,
        &ids,
    );
}

#[test]
fn prompts_and_completions_are_one_text() {
    let sandbox = Sandbox::new();
    let rows = lines(&[json!({"prompt": "2+2=", "completion": "4\n"})]);
    sandbox.gives(
        "a.jsonl",
        rows,
        Format::JsonLines,
        &sandbox.ids(&["2+2=4\n"]),
    );
    let table = "prompt,completion\n2+2=,4\n";
    sandbox.gives("a.csv", table, Format::Csv, &sandbox.ids(&["2+2=4"]));
}

#[test]
fn files_that_cannot_be_read_are_skipped_with_the_reason() {
    let sandbox = Sandbox::new();
    for (name, bytes, part) in [
        ("empty.txt", &b""[..], "is empty"),
        ("blank.md", b" \n\t\n", "is empty"),
        ("empty.jsonl", b"\n\n", "is empty"),
        ("latin1.txt", b"caf\xe9", "not UTF-8"),
        ("latin1.py", b"# caf\xe9 \n", "not UTF-8"),
        ("binary.txt", b"ab\0cd", "binary"),
        ("a.zip", b"PK\x03\x04....", "ZIP"),
        ("paper.pdf", b"%PDF-1.7\n", "PDF"),
        (
            "a.tar.gz",
            &gzip(&[&[b'a'; 257][..], b"ustar\0", &[0; 249]].concat()),
            "tar archive",
        ),
        (
            "text.gz",
            &gzip(TEXTS[0].as_bytes())[..20],
            "cannot be read",
        ),
        (
            "text.zst",
            &[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3],
            "cannot be read",
        ),
        (
            "lfs.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
            "git lfs pull",
        ),
        (
            "lfs.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
            "git lfs pull",
        ),
        (
            "keys.jsonl",
            b"{\"instruction\": \"a\", \"output\": \"b\"}\n",
            "the keys `instruction`, `output`",
        ),
        ("numbers.jsonl", b"1\n2\n", "record 1 is a number"),
        ("cut.json", b"[{\"text\": \"a", "not valid JSON"),
        ("not.json", b"hello", "not valid JSON"),
        ("not.jsonl", b"hello\nyou\n", "not valid JSON"),
        ("columns.csv", b"a,b\n1,2\n", "the keys `a`, `b`"),
        ("no-rows.csv", b"id,text\n", "is empty"),
        ("not.parquet", b"hello", "PAR1"),
        (
            "role.jsonl",
            b"{\"messages\": [{\"content\": \"a\"}]}\n",
            "without `role`",
        ),
        (
            "deep.json",
            "[".repeat(100_000).as_bytes(),
            "not valid JSON",
        ),
    ] {
        sandbox.skips(name, bytes, part);
    }
    let tokenizer = golden("opt-preln");
    assert!(tokenizer.chat_template().is_none());
    let other = Sandbox {
        tokenizer,
        ..sandbox
    };
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    other.skips("chat.jsonl", lines(&[chat]), "no chat template");
}

#[test]
fn unusable_records_are_counted_and_the_others_used() {
    let sandbox = Sandbox::new();
    let text =
        "{\"text\": \"one\"}\nnot JSON\n\n{\"text\": \" \"}\n{\"text\": \"two\"}\n{\"text\": \"th";
    let corpus = sandbox.read(&sandbox.write("a.jsonl", text));
    assert_eq!(corpus.documents, sandbox.ids(&["one", "two"]));
    assert_eq!(corpus.skipped[0].records, Some(3));
    assert!(corpus.skipped[0].to_string().contains("not valid JSON"));
    // What follows the damage of an array is lost, what came before is used.
    let corpus = sandbox.read(&sandbox.write("a.json", "[{\"text\": \"one\"}, {\"text\": \"tw"));
    assert_eq!(corpus.documents, sandbox.ids(&["one"]));
    assert!(
        corpus.skipped[0].to_string().contains("not valid JSON"),
        "{:?}",
        corpus.skipped
    );
    let corpus = sandbox.read(&sandbox.write("a.csv", b"id,text\n1,one\n2\n3,two\n4,\xff\n"));
    assert_eq!(corpus.documents, sandbox.ids(&["one", "two"]));
    assert_eq!(corpus.skipped[0].records, Some(2));
}

#[test]
fn folders_are_read_with_their_subfolders_in_sorted_order() {
    let sandbox = Sandbox::new();
    let names = ["a/1.txt", "a/b/c.js", "a/b/d.html", "b.md", "z/LICENSE"];
    for (name, text) in names.iter().zip(TEXTS).rev() {
        sandbox.write(&format!("folder/{name}"), text);
    }
    sandbox.write("folder/.git/config", "hidden");
    sandbox.write("folder/.hidden.txt", "hidden");
    sandbox.write("folder/image.xyz", "something");
    let folder = sandbox.folder.path().join("folder");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&folder, folder.join("circle")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.join("dangling.txt")).unwrap();
    }
    let corpus = sandbox.read(&folder);
    assert_eq!(corpus.documents, sandbox.ids(&TEXTS));
    assert_eq!(corpus.skipped.len(), 1, "{:?}", corpus.skipped);
    assert!(
        corpus.skipped[0]
            .to_string()
            .contains("image.xyz` has an unknown extension")
    );
    // By name, its content decides.
    sandbox.gives(
        "image.xyz",
        "something",
        Format::Text,
        &sandbox.ids(&["something"]),
    );
}

#[test]
fn reading_ends_when_there_is_enough_text() {
    let sandbox = Sandbox::new();
    let row = json!({"text": "some words to read ".repeat(50)});
    // The damage is after what is needed.
    let rows = lines(&[row.clone(), row.clone(), row]) + "not JSON\n";
    let path = sandbox.write("a.jsonl", rows);
    let corpus = Corpus::read(&path, &sandbox.encoder(), 16, 32).unwrap();
    assert_eq!(corpus.documents.len(), 2);
    assert!(corpus.documents.iter().all(|ids| ids.len() == 32));
    assert!(corpus.skipped.is_empty());
}

#[test]
fn bombs_are_not_unpacked() {
    let sandbox = Sandbox::new();
    let megabyte = vec![b' '; 1 << 20];
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    (0..80).for_each(|_| encoder.write_all(&megabyte).unwrap());
    encoder.write_all(b"x").unwrap();
    let bomb = encoder.finish().unwrap();
    for name in ["bomb.jsonl.zst", "bomb.csv.zst"] {
        let text = [
            &zstd::encode_all(&b"{\"text\": \"\n"[..], 1).unwrap()[..],
            &bomb,
        ]
        .concat();
        let text = if name.contains("csv") {
            [
                &zstd::encode_all(&b"id,text\n1,\""[..], 1).unwrap()[..],
                &bomb,
            ]
            .concat()
        } else {
            text
        };
        sandbox.skips(name, text, "64 MiB");
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_an_error() {
    let sandbox = Sandbox::new();
    let path = sandbox.write("a.txt", "some text");
    let encoder = Encoder {
        vocabulary_size: 5,
        ..sandbox.encoder()
    };
    let error = Corpus::read(&path, &encoder, 512, 1000).unwrap_err();
    assert!(
        matches!(error, CorpusError::OtherTokenizer { .. }),
        "{error}"
    );
}
