//! Tokenizers without `tokenizer.json`: ids compared with those of a converted file, settings, and damaged files.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::io::Write as _;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use powerinfer_text::{
    GenerationPrompt, Message, MessageTokens, SpecialText, SpecialTokens, TextError, Tokenizer,
};
use serde_json::{Value, json};

/// Returns the root of the repository.
fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads the tokenizer in `folder` as if it had no `tokenizer.json`.
fn without_json(folder: PathBuf) -> Tokenizer {
    let read = move |name: &str| match name {
        "tokenizer.json" => None,
        _ => std::fs::read(folder.join(name)).ok().map(Into::into),
    };
    Tokenizer::from_files(read).unwrap()
}

#[test]
fn older_files_give_the_ids_of_the_converted_one() {
    let workspace = workspace();
    let models = workspace.join("tests/golden/models");
    let cases = golden("tok-sp-legacy", "tokenizer_golden.json");
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    let texts = cases["cases"].as_array().unwrap().iter();
    let texts: Vec<&str> = texts.map(|case| case["text"].as_str().unwrap()).collect();
    for folder in [
        models.join("llama-relu-gqa"),
        models.join("gemma"),
        models.join("llama-tied-headdim"),
        workspace.join("../shared/golden/tok-sp-llama2-32k"),
    ] {
        if !folder.is_dir() {
            drop(writeln!(
                std::io::stderr(),
                "skipped: {} is not there",
                folder.display()
            ));
            continue;
        }
        let tokenizer = without_json(folder.clone());
        let converted = Tokenizer::from_directory(&folder).unwrap();
        for text in &texts {
            let about = format!("{}: {text:?}", folder.display());
            let ids = tokenizer.encode(text, SpecialTokens::Add).unwrap();
            assert_eq!(
                ids,
                converted.encode(text, SpecialTokens::Add).unwrap(),
                "{about}"
            );
            let decoded = tokenizer.decode(&ids, SpecialText::Keep).unwrap();
            assert_eq!(
                decoded,
                converted.decode(&ids, SpecialText::Keep).unwrap(),
                "{about}"
            );
        }
    }
}

#[test]
fn prompts_of_models_have_their_ids() {
    for name in ["relullama-spm", "sparsellama-fatrelu"] {
        let folder = workspace().join("../shared/golden").join(name);
        let Ok(expected) = std::fs::read(folder.join("expected.json")) else {
            drop(writeln!(
                std::io::stderr(),
                "skipped: {} is not there",
                folder.display()
            ));
            continue;
        };
        let tokenizer = Tokenizer::from_directory(&folder).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        for prompt in expected["prompts"].as_array().unwrap() {
            let text = prompt["text"].as_str().unwrap();
            let ids = tokenizer.encode(text, SpecialTokens::Add).unwrap();
            assert_eq!(json!(ids), prompt["input_ids"], "{name}: {text:?}");
        }
        assert_eq!(tokenizer.bos().unwrap().id, 1);
        assert_eq!(tokenizer.stop_ids(), [2]);
    }
}

/// Files of a tokenizer by name.
type Files = BTreeMap<&'static str, Vec<u8>>;

fn open(files: &Files) -> Result<Tokenizer, TextError> {
    let files = files.clone();
    Tokenizer::from_files_in(Path::new("model"), move |name| {
        files.get(name).cloned().map(Into::into)
    })
}

fn refusal(files: &Files) -> String {
    match open(files) {
        Ok(_) => panic!("{:?} were accepted", files.keys()),
        Err(error) => error.to_string(),
    }
}

fn golden(name: &str, file: &str) -> Vec<u8> {
    let folder = workspace().join("tests/golden/tokenizers");
    std::fs::read(folder.join(name).join(file)).unwrap()
}

#[test]
fn tokenizer_json_comes_first_unless_the_settings_say_otherwise() {
    let json = golden("tok-sp-legacy", "tokenizer.json");
    let mut files = Files::from([
        ("tokenizer.json", json),
        ("tokenizer.model", golden("tok-spm-user", "tokenizer.model")),
    ]);
    assert_eq!(open(&files).unwrap().vocabulary_size(), 640);
    files.insert("tokenizer_config.json", br#"{"use_fast": false}"#.to_vec());
    assert_eq!(open(&files).unwrap().vocabulary_size(), 860);
    files.remove("tokenizer.model");
    assert_eq!(open(&files).unwrap().vocabulary_size(), 640);
}

#[test]
fn a_model_file_alone_is_enough() {
    let files = Files::from([(
        "tokenizer.model",
        golden("tok-spm-llama", "tokenizer.model"),
    )]);
    let tokenizer = open(&files).unwrap();
    assert_eq!(
        tokenizer.encode("a", SpecialTokens::Add).unwrap(),
        [1, 788, 790]
    );
    assert_eq!(tokenizer.bos().map(|bos| &bos.text[..]), Some("<s>"));
    assert_eq!(tokenizer.stop_ids(), [2]);
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(13));
    assert_eq!(tokenizer.token_bytes(13).unwrap(), b"\n");
    assert_eq!(tokenizer.token_bytes(788).unwrap(), b" ");
}

#[test]
fn added_tokens_and_flags_of_every_file_apply() {
    let mut files = Files::from([(
        "tokenizer.model",
        golden("tok-spm-llama", "tokenizer.model"),
    )]);
    files.insert(
        "added_tokens.json",
        br#"{"<|end|>": 900, "<tool>": 903}"#.to_vec(),
    );
    let config = json!({
        "add_bos_token": false, "add_eos_token": true, "legacy": true, "eos_token": "<|end|>",
        "added_tokens_decoder": {
            "901": { "content": "[X]", "special": true, "rstrip": true },
            "902": { "content": "[Y]", "special": false },
        },
        "pad_token": "<nowhere>", "additional_special_tokens": ["<tool>"],
    });
    files.insert("tokenizer_config.json", config.to_string().into_bytes());
    let tokenizer = open(&files).unwrap();
    let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Add).unwrap();
    assert_eq!(
        encode("a[X]  a[Y]<tool>"),
        [788, 790, 901, 788, 790, 902, 903, 900]
    );
    let special = [900, 901, 902, 903].map(|id| tokenizer.is_special(id));
    assert_eq!(special, [true, true, false, true]);
    assert_eq!(tokenizer.eos().unwrap().id, 900);
    let text = tokenizer
        .decode(&encode("a[Y]"), SpecialText::Keep)
        .unwrap();
    assert_eq!(text, "a[Y]<|end|>");

    let clash = br#"{"<s>": 900}"#.to_vec();
    files.insert("added_tokens.json", clash);
    let error = refusal(&files);
    assert!(error.contains("`<s>` has the id 1, but 900"), "{error}");
    files.insert("added_tokens.json", br#"{"<x>": -1}"#.to_vec());
    assert!(refusal(&files).contains("added_tokens.json"));
    files.insert("added_tokens.json", b"[]".to_vec());
    assert!(refusal(&files).contains("added_tokens.json"));
}

#[test]
fn a_space_is_put_in_front_as_the_settings_say() {
    let model = golden("tok-spm-llama", "tokenizer.model");
    let encode = |settings: Value, text: &str| {
        let settings = settings.to_string().into_bytes();
        let files = Files::from([
            ("tokenizer.model", model.clone()),
            ("tokenizer_config.json", settings),
        ]);
        open(&files)
            .unwrap()
            .encode(text, SpecialTokens::Omit)
            .unwrap()
    };
    let (space, two_spaces, a) = (788, 269, 790);
    for (settings, text, expected) in [
        (
            json!({ "legacy": true }),
            "a</s>a",
            vec![space, a, 2, space, a],
        ),
        (json!({}), "a</s>a", vec![space, a, 2, space, a]),
        (json!({ "legacy": false }), "a</s>a", vec![space, a, 2, a]),
        (json!({ "legacy": false }), "</s>a", vec![2, a]),
        (json!({ "legacy": false }), " a", vec![two_spaces, a]),
        (
            json!({ "legacy": false, "added_tokens_decoder": { "900": { "content": "[Y]" } } }),
            "[Y]a",
            vec![space, 900, a],
        ),
        (
            json!({ "legacy": false, "add_prefix_space": false }),
            "a</s>a",
            vec![a, 2, a],
        ),
    ] {
        assert_eq!(
            encode(settings.clone(), text),
            expected,
            "{settings} {text:?}"
        );
    }
}

#[test]
fn user_defined_pieces_in_messages_are_text() {
    let template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
    let files = Files::from([
        ("tokenizer.model", golden("tok-spm-user", "tokenizer.model")),
        ("chat_template.jinja", template.as_bytes().to_vec()),
    ]);
    let tokenizer = open(&files).unwrap();
    let count = |content: &str, tokens| {
        let message = Message {
            role: "user".to_owned(),
            content: content.to_owned(),
        };
        let chat = tokenizer
            .render_chat(&[message], GenerationPrompt::Omit, tokens)
            .unwrap();
        let ids = tokenizer.encode_chat(&chat).unwrap();
        let end = tokenizer.token_id("<|im_end|>").unwrap();
        let text = tokenizer.decode(&ids, SpecialText::Keep).unwrap();
        assert_eq!(text, format!("<|im_start|>{content}<|im_end|>"));
        ids.iter().filter(|id| **id == end).count()
    };
    for content in ["a<|im_end|>b", "<|im_end|>", "a<|im_", "</s>"] {
        assert_eq!(count(content, MessageTokens::Plain), 1, "{content:?}");
    }
    assert_eq!(count("a<|im_end|>b", MessageTokens::Trusted), 2);
}

#[test]
fn vocabulary_and_merges_must_belong_together() {
    let whole = || {
        let names = ["vocab.json", "merges.txt", "tokenizer_config.json"];
        Files::from(names.map(|name| (name, golden("tok-vm-opt", name))))
    };
    let with = |name: &'static str, content: &[u8]| {
        let mut files = whole();
        files.insert(name, content.to_vec());
        files
    };
    let with_line = |line: &str| {
        let mut merges = golden("tok-vm-opt", "merges.txt");
        merges.extend(line.as_bytes());
        with("merges.txt", &merges)
    };
    let lines = String::from_utf8(golden("tok-vm-opt", "merges.txt")).unwrap();
    let ids = |files: &Files| {
        open(files)
            .unwrap()
            .encode("the bear", SpecialTokens::Add)
            .unwrap()
    };
    let expected = ids(&whole());
    let windows = format!("\u{feff}{}", lines.replace('\n', "\r\n"));
    assert_eq!(ids(&with("merges.txt", windows.as_bytes())), expected);
    let headless = lines.split_once('\n').unwrap().1;
    assert_eq!(ids(&with("merges.txt", headless.as_bytes())), expected);
    for (files, reason) in [
        (with_line("\nq"), "is not a pair of tokens"),
        (with_line("\nq q q"), "is not a pair of tokens"),
        (with_line("\nq qqq"), "`qqq` is not in `vocab.json`"),
        (
            with("merges.txt", b"\xff"),
            "merges.txt` cannot be used: it is not UTF-8",
        ),
        (
            with("vocab.json", b"{}"),
            "vocab.json` cannot be used: it has no tokens",
        ),
        (with("vocab.json", b"[]"), "vocab.json"),
        (
            with("vocab.json", br#"{"a": 0, "b": 0}"#),
            "have the same id 0",
        ),
        (with("vocab.json", br#"{"a": -1}"#), "is not a token id"),
        (
            with("vocab.json", br#"{"a": 5000000000}"#),
            "is not a token id",
        ),
        (
            with(
                "tokenizer_config.json",
                br#"{"tokenizer_class": "MarianTokenizer"}"#,
            ),
            "how the `MarianTokenizer` splits texts is unknown",
        ),
        (
            with("tokenizer_config.json", br#"{"add_bos_token": "yes"}"#),
            "`add_bos_token` is \"yes\"",
        ),
    ] {
        let error = refusal(&files);
        assert!(error.contains(reason), "{error}");
    }
    let mut alone = whole();
    alone.remove("merges.txt");
    assert!(refusal(&alone).contains("copy it from the original checkpoint"));
}
