//! `--data` reads the same documents from every kind of file, and skips unreadable files.

use std::{fs, io::Write};

use serde_json::{Value, json};

use crate::sandbox::{Run, Sandbox, golden_model, words};

/// Forty documents.
fn texts() -> Vec<String> {
    let text = |number: usize| {
        let body = "    total += \"näher\" * value\n".repeat(number % 7 + 1);
        format!("def answer_{number}(values):\n{body}")
    };
    (0..40).map(text).collect()
}

fn lines(rows: impl Iterator<Item = Value>) -> String {
    rows.map(|row| format!("{row}\n")).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

impl Sandbox {
    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn profile(&self, data: &str, stdin: &[u8]) -> Run {
        let model = golden_model("llama-relu-gqa");
        let model = model.to_str().unwrap();
        let more = ["--tokens", "2000", "--trace-tokens", "100", "--json"];
        let arguments = ["profile", model, "--data", data, "--out", "profile"];
        let _ = fs::remove_dir_all(self.path("profile"));
        self.run_with(&[&arguments[..], &more].concat(), stdin)
    }

    /// The same as [`Self::counted`] for data that are too short alone.
    #[track_caller]
    fn counted_with_more(&self, data: &str) -> (Value, Value) {
        self.write("more.txt", "some words to calibrate on, ".repeat(60));
        let model = golden_model("llama-relu-gqa");
        let arguments = ["profile", model.to_str().unwrap(), "--data", data];
        let more = [
            "--data", "more.txt", "--out", "profile", "--force", "--json",
        ];
        counted(self.run(&[&arguments[..], &more].concat()))
    }

    /// Profiles `data`; returns what was counted and reserved, and the source's documents and formats.
    #[track_caller]
    fn counted(&self, data: &str) -> (Value, Value) {
        counted(self.profile(data, b""))
    }
}

#[track_caller]
fn counted(run: Run) -> (Value, Value) {
    let profile = run.good().json()["profile"].clone();
    let files = &profile["files"];
    let counted = json!([
        profile["tokens"],
        files["neurons.parquet"],
        files["reserved.safetensors"]
    ]);
    let source = &profile["sources"][0];
    (counted, json!([source["documents"], source["formats"]]))
}

#[test]
fn the_same_documents_are_profiled_from_every_kind_of_file() {
    let sandbox = Sandbox::new();
    let texts = texts();
    for (number, text) in texts.iter().enumerate() {
        sandbox.write(&format!("folder/{}/{number:03}.py", number / 10), text);
    }
    let rows = || texts.iter().map(|text| json!({"id": 7, "text": text}));
    let records = lines(rows());
    sandbox.write("docs.jsonl", &records);
    sandbox.write("docs.json", json!(rows().collect::<Vec<_>>()).to_string());
    let cells = texts.iter().map(|text| text.replace('"', "\"\""));
    let cells: String = cells.map(|cell| format!("7,\"{cell}\"\n")).collect();
    sandbox.write("docs.csv", format!("\u{feff}id,content\n{cells}"));
    sandbox.write("docs.jsonl.gz", gzip(records.as_bytes()));
    sandbox.write(
        "docs.jsonl.zst",
        zstd::encode_all(records.as_bytes(), 1).unwrap(),
    );
    let (expected, source) = sandbox.counted("folder");
    assert_eq!(source, json!([40, {"text": 40}]));
    for (name, format) in [
        ("docs.jsonl", "JSON Lines"),
        ("docs.json", "JSON"),
        ("docs.csv", "CSV"),
        ("docs.jsonl.gz", "JSON Lines"),
        ("docs.jsonl.zst", "JSON Lines"),
    ] {
        let (found, source) = sandbox.counted(name);
        assert_eq!(found, expected, "{name}");
        assert_eq!(source, json!([40, {format: 40}]), "{name}");
    }
    let (found, _) = counted(sandbox.profile("-", records.as_bytes()));
    assert_eq!(found, expected, "stdin");
    // It is as reproducible as before.
    let again = ["profile", "x", "--data", "docs.jsonl", "--tokens", "2000"];
    let model = golden_model("llama-relu-gqa");
    let mut again = again.to_vec();
    again[1] = model.to_str().unwrap();
    sandbox.run(&again).good();
    sandbox.run(&again).good().stderr_contains(&[
        "text: `docs.jsonl`, 40 documents (JSON Lines), ",
        "up to date",
    ]);
}

#[test]
fn conversations_are_the_same_in_both_conventions_and_from_parquet() {
    let sandbox = Sandbox::new();
    let pairs = [["Hello", "Hi!"], ["What is 2+2?", "4"]];
    let of_roles = pairs.map(|[question, answer]| {
        json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    });
    let shared = pairs.map(|[question, answer]| {
        json!({"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]})
    });
    sandbox.write("messages.jsonl", lines(of_roles.into_iter()));
    sandbox.write("shared.json", json!(shared).to_string());
    let parquet = env!("CARGO_MANIFEST_DIR").to_owned() + "/../corpus/tests/data/messages.parquet";
    let (expected, _) = sandbox.counted_with_more("messages.jsonl");
    assert_eq!(sandbox.counted_with_more("shared.json").0, expected);
    let (found, source) = sandbox.counted_with_more(&parquet);
    assert_eq!(found, expected);
    assert_eq!(source, json!([2, {"Parquet": 2}]));
    let rendered: usize = pairs.iter().flatten().map(|text| text.len()).sum();
    assert!(expected[0].as_u64().unwrap() as usize > rendered / 4);
    // The demo has no chat template.
    let run = sandbox.run(&["profile", "demo", "--data", "messages.jsonl"]);
    run.bad(
        1,
        &[
            "`messages.jsonl` has no usable record: record 1 is a conversation",
            "no chat template",
        ],
    );
}

#[test]
fn files_that_cannot_be_read_are_skipped_and_counted() {
    let sandbox = Sandbox::new();
    let text = texts().concat();
    sandbox.write("plain/a.txt", &text);
    let (expected, _) = sandbox.counted("plain");
    for (folder, bytes, message) in [
        (
            "with-empty",
            &b""[..],
            "skipped: `with-empty/b.txt` is empty",
        ),
        (
            "with-latin1",
            b"caf\xe9",
            "skipped: `with-latin1/b.txt` is not UTF-8",
        ),
        (
            "with-zip",
            b"PK\x03\x04",
            "skipped: `with-zip/b.txt` is a ZIP archive",
        ),
        (
            "with-pointer",
            b"version https://git-lfs.github.com/spec/v1\n",
            "skipped: `with-pointer/b.txt` is a Git LFS pointer",
        ),
        (
            "with-keys",
            b"{\"question\": 1}\n",
            "`with-keys/b.txt` has no usable record: record 1 has the keys `question`, but none of `text`",
        ),
    ] {
        sandbox.write(&format!("{folder}/a.txt"), &text);
        sandbox.write(&format!("{folder}/b.txt"), bytes);
        let run = sandbox.profile(folder, b"");
        run.stderr_contains(&[message]);
        assert_eq!(counted(run).0, expected, "{folder}");
    }
    sandbox.write("nested/sub/a.txt", &text);
    sandbox.write("only-js/a.js", &text);
    sandbox.write("bom.txt", format!("\u{feff}{text}"));
    for data in ["nested", "only-js", "bom.txt"] {
        assert_eq!(sandbox.counted(data).0, expected, "{data}");
    }
    assert_eq!(counted(sandbox.profile("-", text.as_bytes())).0, expected);
    for number in 0..7 {
        sandbox.write(&format!("none/{number}.bin"), b"\0");
    }
    sandbox.profile("none", b"").bad(
        1,
        &[
            "there is no text in `none`",
            "`none/0.bin` has an unknown extension",
            "and 2 more",
        ],
    );
    sandbox.profile("-", b"").bad(1, &["`-` is empty"]);
}

#[test]
fn every_command_reads_the_texts_of_records() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for (number, text) in texts().iter().enumerate() {
        sandbox.write(&format!("folder/{number:03}.txt"), text);
    }
    let rows = texts().into_iter().map(|text| json!({"text": text}));
    sandbox.write("docs.jsonl", lines(rows));
    let perplexity = |data: &str| {
        let line = words("eval perplexity demo --policy exact --json --data");
        let run = sandbox.run(&[&line[..], &[data]].concat()).good();
        run.json()["dense_perplexity"].clone()
    };
    let expected = perplexity("folder");
    assert!(expected.as_f64().unwrap() > 1.0);
    assert_eq!(perplexity("docs.jsonl"), expected);
}

#[test]
fn text_that_is_too_short_is_an_error_before_profiling() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "short.jsonl",
        "{\"text\": \"a few words of text, and no more\"}\n",
    );
    let model = golden_model("llama-relu-gqa");
    let run = sandbox.run(&["prepare", model.to_str().unwrap(), "--data", "short.jsonl"]);
    assert!(!run.stderr.contains("profiled"), "{}", run.stderr);
    run.bad(1, &["give at least 80 in all", "hint: give more text"]);
    assert!(!sandbox.path("llama-relu-gqa.powerinfer").exists());
}

#[test]
fn commands_in_messages_can_be_pasted_into_a_shell() {
    let sandbox = Sandbox::new();
    fs::rename(
        sandbox.copy_model("llama-relu-gqa"),
        sandbox.path("my model's v1.0"),
    )
    .unwrap();
    sandbox.write("text.txt", texts().concat());
    let options = ["--steps", "5", "--certify", "none", "--hardware", "laptop"];
    let prepare = ["prepare", "my model's v1.0", "--data", "text.txt"];
    let run = sandbox.run(&[&prepare[..], &options].concat()).good();
    let ready = r"powerinfer run 'my model'\''s v1.0'";
    run.stderr_contains(&[&format!("ready: `{ready}`")]);
    #[cfg(unix)]
    {
        let program = env!("CARGO_BIN_EXE_powerinfer");
        let line = ready.replacen("powerinfer", program, 1) + " -p def -n 2";
        let mut shell = std::process::Command::new("sh");
        shell.current_dir(sandbox.path("")).args(["-c", &line]);
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}
