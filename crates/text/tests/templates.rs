//! A corpus of chat templates, modelled on published ones, plus one template per feature. Each must render as in jinja2 with
//! transformers' settings; `scripts/check-templates.sh` compares the stored results with those of jinja2.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{collections::BTreeMap, fs, path::PathBuf};

use powerinfer_text::{GenerationPrompt, Message, TextError, Tokenizer};
use serde::{Deserialize, de::DeserializeOwned};

#[derive(Deserialize)]
struct Conversation {
    add_generation_prompt: bool,
    messages: Vec<Message>,
}

/// Result of a template in jinja2.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Rendered {
    Text(String),
    Refused { refused: String },
    Failed { failed: bool },
}

#[derive(Deserialize)]
struct Expected {
    features: Vec<Rendered>,
    families: BTreeMap<String, BTreeMap<String, Rendered>>,
}

fn corpus(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/templates")
        .join(file)
}

fn read_json<T: DeserializeOwned>(file: &str) -> T {
    serde_json::from_str(&fs::read_to_string(corpus(file)).unwrap()).unwrap()
}

fn rendered(template: &str, conversation: &Conversation) -> Rendered {
    let tokenizer = corpus("../../../../tests/golden/tokenizers/tok-sp-legacy/tokenizer.json");
    let tokenizer = fs::read(tokenizer).unwrap();
    let tokens = br#"{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}"#;
    let files = BTreeMap::from([
        ("tokenizer.json", &*tokenizer),
        ("tokenizer_config.json", tokens),
        ("chat_template.jinja", template.as_bytes()),
    ]);
    let failed = Rendered::Failed { failed: true };
    let tokenizer = Tokenizer::from_files(|name| files.get(name).map(|bytes| (*bytes).into()));
    let Ok(tokenizer) = tokenizer else {
        return failed;
    };
    let prompt = if conversation.add_generation_prompt {
        GenerationPrompt::Add
    } else {
        GenerationPrompt::Omit
    };
    let template = tokenizer.chat_template().unwrap();
    match template.render(&conversation.messages, prompt) {
        Ok(text) => Rendered::Text(text),
        Err(TextError::TemplateRefused { reason, .. }) => Rendered::Refused { refused: reason },
        Err(_) => failed,
    }
}

#[test]
fn features_of_templates_are_those_of_jinja2_in_transformers() {
    let expected: Expected = read_json("expected.json");
    let conversations: BTreeMap<String, Conversation> = read_json("conversations.json");
    let features = fs::read_to_string(corpus("features.txt")).unwrap();
    let features = features
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with("# "));
    let features: Vec<&str> = features.collect();
    assert_eq!(features.len(), expected.features.len());
    let mut different = 0;
    for (template, expected) in features.iter().zip(&expected.features) {
        let found = rendered(template, &conversations["talk"]);
        if found != *expected {
            println!("{template}\n  expected {expected:?}\n  found    {found:?}");
            different += 1;
        }
    }
    assert_eq!(different, 0);
}

#[test]
fn forms_of_published_templates_render_as_in_transformers() {
    let expected: Expected = read_json("expected.json");
    let conversations: BTreeMap<String, Conversation> = read_json("conversations.json");
    for (family, expected) in expected.families {
        let template = fs::read_to_string(corpus(&format!("families/{family}.jinja"))).unwrap();
        for (name, expected) in expected {
            let found = rendered(&template, &conversations[&name]);
            assert_eq!(found, expected, "{family}, {name}");
        }
    }
}
