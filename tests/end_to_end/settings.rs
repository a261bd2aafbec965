//! Settings next to the weights: unusual values with a clear meaning are accepted, others are errors before any work starts.
//! Prompts and settings may have byte-order marks.

use std::{fs, path::PathBuf};

use crate::sandbox::{Sandbox, assert_contains, copy_folder, golden_model, words};

const MODEL: &str = "llama-relu-gqa";

/// A copy of the model that a test may change, and a text to profile.
fn model(sandbox: &Sandbox) -> PathBuf {
    let text = "some words to calibrate on ".repeat(40);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    sandbox.copy_model(MODEL)
}

fn prepare(sandbox: &Sandbox) -> crate::sandbox::Run {
    let command = format!(
        "prepare {MODEL} --vram 0 --data text.txt --tokens 600 --trace-tokens 128 --steps 1 --certify none"
    );
    sandbox.run(&command.split(' ').collect::<Vec<_>>())
}

#[test]
fn unusual_settings_with_a_clear_meaning_are_read() {
    let sandbox = Sandbox::new();
    let folder = model(&sandbox);
    fs::remove_file(folder.join("special_tokens_map.json")).unwrap();
    // Unusual values with a clear meaning, and byte-order marks in every file.
    for (name, text) in [
        (
            "tokenizer_config.json",
            r#"{"bos_token": "", "eos_token": "", "model_max_length": 1000000000000000019884624838656, "unk_token": ""}"#,
        ),
        (
            "generation_config.json",
            r#"{"do_sample": true, "temperature": 1, "top_k": 50.0, "top_p": 1, "bos_token_id": [1], "eos_token_id": [2.0, -1]}"#,
        ),
    ] {
        fs::write(folder.join(name), format!("\u{feff}{text}")).unwrap();
    }
    for name in ["config.json", "tokenizer.json"] {
        let text = fs::read_to_string(folder.join(name)).unwrap();
        fs::write(folder.join(name), format!("\u{feff}{text}")).unwrap();
    }
    prepare(&sandbox).good();
    let run = sandbox.run(&["run", MODEL, "--prompt", "x", "-n", "2", "--json"]);
    run.good();
}

#[test]
fn what_a_prepared_model_was_made_from_is_not_mistaken() {
    let sandbox = Sandbox::new();
    let folder = model(&sandbox);
    prepare(&sandbox).good();
    // Without text, the profile stays as it is.
    let kept = sandbox
        .run(&words("prepare llama-relu-gqa --tokens 300 --seed 2"))
        .good();
    kept.stderr_contains(&["another `--tokens` and `--seed`; give `--data`"]);
    let path = format!("./{MODEL}");
    let run = |model: &str| sandbox.run(&["run", model, "--prompt", "x", "-n", "2"]);
    run(&path).good();
    fs::remove_dir_all(&folder).unwrap();
    copy_folder(&golden_model("mistral-swa-relu"), &folder);
    let other = &[
        "is a bundle of llama-relu-gqa @ ",
        "powerinfer run llama-relu-gqa.powerinfer",
    ];
    run(&path).bad(1, other);
    sandbox
        .run(&["eval", "perplexity", &path, "--data", "text.txt"])
        .bad(1, other);
    for name in [MODEL, "llama-relu-gqa.powerinfer"] {
        run(name).good();
    }
    // The settings of another model are not those of this one, and its profile is not replaced.
    let prepared = sandbox
        .run(&["prepare", &path])
        .bad(1, &["is a profile of another model (llama-relu-gqa @ "]);
    let said = &prepared.stderr;
    assert!(!said.contains("earlier runs"), "{said}");
}

#[test]
fn settings_that_run_would_refuse_are_refused_before_any_work() {
    let sandbox = Sandbox::new();
    let folder = model(&sandbox);
    for (file, text, expected) in [
        (
            "generation_config.json",
            r#"{"do_sample": true, "top_p": 2}"#,
            &["`top_p` is 2", "at most 1"][..],
        ),
        (
            "generation_config.json",
            r#"{"repetition_penalty": 0}"#,
            &["`repetition_penalty` is 0", "above 0"],
        ),
        (
            "generation_config.json",
            r#"{"top_k": "many"}"#,
            &["`top_k` is \"many\", expected a whole number"],
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": [-5]}"#,
            &["`eos_token_id` is [-5], expected a token id"],
        ),
        (
            "generation_config.json",
            r#"{"bos_token_id": [1, 2]}"#,
            &["`bos_token_id` is [1,2], expected one token id"],
        ),
        (
            "tokenizer_config.json",
            r#"{"eos_token": "<nowhere>"}"#,
            &["sets `eos_token` to `<nowhere>`"],
        ),
        (
            "tokenizer_config.json",
            r#"{"chat_template": 7}"#,
            &["`chat_template`"],
        ),
        ("tokenizer_config.json", "[]", &["is not a JSON object"]),
        (
            "tokenizer_config.json",
            r#"{"chat_template": "{% for %}"}"#,
            &["chat template", "cannot be parsed"],
        ),
        (
            "chat_template.jinja",
            "{{ 1 +",
            &["chat template", "cannot be parsed"],
        ),
    ] {
        let path = folder.join(file);
        let original = fs::read(&path).ok();
        fs::write(&path, text).unwrap();
        let refused = [
            prepare(&sandbox),
            sandbox.run(&["profile", MODEL, "--data", "text.txt"]),
            sandbox.run(&["train-predictors", MODEL]),
            sandbox.run(&["place", MODEL]),
        ];
        for run in refused {
            let run = run.bad(1, &[file]);
            assert_contains(&run.stderr, expected);
            for word in ["usize", "untagged", "invalid type", "u32"] {
                assert!(!run.stderr.contains(word), "{}", run.stderr);
            }
        }
        match original {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
    }
    assert!(!sandbox.path(&format!("{MODEL}.powerinfer")).exists());
}

#[test]
fn a_prompt_on_stdin_has_no_byte_order_mark_and_no_last_line_end() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let prompt = |arguments: &[&str], stdin: &[u8]| {
        let arguments = [&["run", "-n", "1", "--json"], arguments].concat();
        let run = sandbox.run_with(&arguments, stdin).good();
        run.json()["prompt"].as_str().unwrap().to_owned()
    };
    for (stdin, expected) in [
        ("x = 1", "x = 1"),
        ("x = 1\n", "x = 1"),
        ("x = 1\r\n", "x = 1"),
        ("\u{feff}x = 1\r\n", "x = 1"),
        ("\u{feff}\u{feff}a\r\nb\r\n\r\n", "\u{feff}a\r\nb\r\n"),
        ("x = 1\r", "x = 1\r"),
    ] {
        assert_eq!(prompt(&[], stdin.as_bytes()), expected);
    }
    // The text on stdin comes first, then `--prompt`.
    for (stdin, expected) in [
        ("text of a file\n", "text of a file\n\nSummarise:"),
        ("\u{feff}two\r\nlines\r\n", "two\r\nlines\n\nSummarise:"),
        ("", "Summarise:"),
        ("\u{feff}\n", "Summarise:"),
    ] {
        assert_eq!(
            prompt(&["--prompt", "Summarise:"], stdin.as_bytes()),
            expected
        );
    }
    let chat = |stdin: &[u8]| {
        sandbox
            .run_with(&["run", "-n", "4", "-i"], stdin)
            .good()
            .text()
    };
    assert_eq!(chat(b"\xef\xbb\xbfx = 1\r\n"), chat(b"x = 1\n"));
}
