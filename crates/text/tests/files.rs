//! Files that a tokenizer is read from, and errors of missing and invalid ones.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use powerinfer_text::{
    GenerationPrompt, Message, SpecialText, SpecialTokens, TextError, Tokenizer,
};

const TOKENIZER: &str = r#"{
  "version": "1.0",
  "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
  "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
              "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
  "added_tokens": [
    {"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
     "normalized": false, "special": true},
    {"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
     "normalized": false, "special": true}
  ],
  "normalizer": null,
  "pre_tokenizer": {"type": "WhitespaceSplit"},
  "post_processor": null,
  "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "one": 2, "two": 3, "?": 4},
            "unk_token": "?"}
}"#;

/// Reads `TOKENIZER` with the given additional files.
fn tokenizer_with(files: &[(&str, &str)]) -> Result<Tokenizer, TextError> {
    let mut all = BTreeMap::from([("tokenizer.json", TOKENIZER)]);
    all.extend(files.iter().copied());
    Tokenizer::from_files(|name| all.get(name).map(|text| Cow::Borrowed(text.as_bytes())))
}

/// Formats an error and its causes, one per line.
fn message(error: &dyn Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}\n{}", message(cause)),
        None => error.to_string(),
    }
}

fn failure(files: &[(&str, &str)]) -> String {
    message(&tokenizer_with(files).unwrap_err())
}

fn render(files: &[(&str, &str)]) -> Result<String, TextError> {
    let messages = [Message {
        role: "user".to_owned(),
        content: "hi".to_owned(),
    }];
    let tokenizer = tokenizer_with(files).unwrap();
    let template = tokenizer.chat_template().unwrap();
    template.render(&messages, GenerationPrompt::Add)
}

fn render_template(template: &str) -> Result<String, TextError> {
    render(&[("chat_template.jinja", template)])
}

#[test]
fn tokenizer_json_alone_is_enough() {
    let tokenizer = Tokenizer::from_bytes(TOKENIZER.as_bytes()).unwrap();
    assert_eq!(tokenizer.vocabulary_size(), 5);
    assert_eq!(tokenizer.bos(), None);
    assert_eq!(tokenizer.eos(), None);
    assert!(tokenizer.stop_ids().is_empty());
    assert!(tokenizer.chat_template().is_none());
}

#[test]
fn truncation_and_padding_of_a_training_run_are_ignored() {
    let tokenizer = tokenizer_with(&[]).unwrap();
    let ids = tokenizer.encode("one two one", SpecialTokens::Add).unwrap();
    assert_eq!(ids, [2, 3, 2]);
}

#[test]
fn a_missing_tokenizer_is_reported() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let error = Tokenizer::from_directory(directory).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }));
    assert!(message(&error).contains("text/tokenizer.json` does not exist"));
    let error =
        Tokenizer::from_files(|name| (name == "vocab.json").then_some(Cow::Borrowed(&b"{}"[..])));
    assert!(message(&error.unwrap_err()).contains("copy it from the original checkpoint"));
}

#[test]
fn invalid_files_are_reported_by_name() {
    let error = Tokenizer::from_bytes(b"{\"version\": \"1.0\"").unwrap_err();
    assert!(message(&error).starts_with("`tokenizer.json` does not describe a tokenizer"));
    let error = Tokenizer::from_bytes(b"{\"\xff\"}").unwrap_err();
    assert!(matches!(error, TextError::NotUtf8 { .. }), "{error}");
    for file in [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ] {
        let message_text = failure(&[(file, "{\"bos_token\": ")]);
        assert!(
            message_text.starts_with(&format!("`{file}` is not")) && message_text.contains("JSON"),
            "{message_text}"
        );
    }
    let message_text = failure(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)]);
    assert!(
        message_text.starts_with("`tokenizer_config.json` sets `chat_template` to neither"),
        "{message_text}"
    );
    assert!(failure(&[("special_tokens_map.json", "[]")]).contains("is not a JSON object"));
}

#[test]
fn special_tokens_are_read_from_text_object_or_id() {
    let tokenizer = tokenizer_with(&[
        (
            "special_tokens_map.json",
            r#"{"bos_token": {"content": "<s>", "lstrip": false}}"#,
        ),
        (
            "tokenizer_config.json",
            r#"{"bos_token": null, "eos_token": "two", "legacy": true}"#,
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": [3, 1], "temperature": 0.5}"#,
        ),
    ])
    .unwrap();
    let bos = tokenizer.bos().unwrap();
    assert_eq!((bos.text.as_str(), bos.id), ("<s>", 0));
    let eos = tokenizer.eos().unwrap();
    assert_eq!((eos.text.as_str(), eos.id), ("two", 3));
    assert_eq!(tokenizer.stop_ids(), [1, 3]);

    let ids = r#"{"bos_token_id": 0, "eos_token_id": 1}"#;
    let tokenizer = tokenizer_with(&[("generation_config.json", ids)]).unwrap();
    assert_eq!(tokenizer.bos().unwrap().text, "<s>");
    assert_eq!(tokenizer.eos().unwrap().text, "</s>");
    assert_eq!(tokenizer.stop_ids(), [1]);
}

#[test]
fn an_empty_text_names_no_special_token() {
    let empty = r#"{"bos_token": "", "eos_token": {"content": ""}, "unk_token": ""}"#;
    let tokenizer = tokenizer_with(&[("tokenizer_config.json", empty)]).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, None));
    let ids = (
        "generation_config.json",
        r#"{"bos_token_id": [0], "eos_token_id": 1.0}"#,
    );
    let tokenizer = tokenizer_with(&[("tokenizer_config.json", empty), ids]).unwrap();
    assert_eq!(tokenizer.bos().unwrap().text, "<s>");
    assert_eq!(tokenizer.eos().unwrap().text, "</s>");
    let map = ("special_tokens_map.json", r#"{"bos_token": "two"}"#);
    let tokenizer = tokenizer_with(&[map, ("tokenizer_config.json", empty)]).unwrap();
    assert_eq!(tokenizer.bos().unwrap().text, "two");
}

#[test]
fn a_special_token_outside_the_vocabulary_is_refused() {
    let message_text = failure(&[("tokenizer_config.json", r#"{"eos_token": "<end>"}"#)]);
    assert!(
        message_text.starts_with("`tokenizer_config.json` sets `eos_token` to `<end>`"),
        "{message_text}"
    );
}

#[test]
fn an_unknown_id_is_refused() {
    let tokenizer = tokenizer_with(&[]).unwrap();
    let error = tokenizer.decode(&[2, 5], SpecialText::Keep).unwrap_err();
    assert!(message(&error).starts_with("token id 5 is not in the vocabulary of 5 tokens"));
}

#[test]
fn a_tokenizer_without_a_decoder_streams_too() {
    let tokenizer = tokenizer_with(&[]).unwrap();
    let mut stream = tokenizer.decode_stream(SpecialText::Skip);
    let mut push = |id| stream.push(id).unwrap();
    assert_eq!(push(0), None);
    assert_eq!(push(2).as_deref(), Some("one"));
    assert_eq!(push(3).as_deref(), Some(" two"));
    assert_eq!(push(1), None);
    assert_eq!(push(2).as_deref(), Some(" one"));
    assert_eq!(stream.finish().unwrap(), None);
}

#[test]
fn the_chat_template_file_wins_over_the_configuration() {
    let config = (
        "tokenizer_config.json",
        r#"{"chat_template": "from the configuration"}"#,
    );
    assert_eq!(render(&[config]).unwrap(), "from the configuration");
    let file = ("chat_template.jinja", "from the file\n");
    assert_eq!(render(&[config, file]).unwrap(), "from the file");
}

#[test]
fn the_default_of_several_chat_templates_is_used() {
    let named = r#"{"chat_template": [{"name": "rag", "template": "no"},
                                      {"name": "default", "template": "yes"}]}"#;
    assert_eq!(render(&[("tokenizer_config.json", named)]).unwrap(), "yes");
    let map = r#"{"chat_template": {"rag": "no", "default": "yes"}}"#;
    assert_eq!(render(&[("tokenizer_config.json", map)]).unwrap(), "yes");
    for wrong in [
        "[7]",
        r#"[{"name": "default"}]"#,
        r#"{"default": 7}"#,
        "true",
    ] {
        let wrong = format!("{{\"chat_template\": {wrong}}}");
        assert!(failure(&[("tokenizer_config.json", &wrong)]).contains("`chat_template`"));
    }
    let other = named.replace("default", "tool_use");
    let tokenizer = tokenizer_with(&[("tokenizer_config.json", &other)]).unwrap();
    assert!(tokenizer.chat_template().is_none());
}

#[test]
fn templates_have_the_environment_of_transformers() {
    let rendered = render(&[
        (
            "tokenizer_config.json",
            r#"{"bos_token": "<s>", "pad_token": "<pad>"}"#,
        ),
        (
            "chat_template.jinja",
            "{%- for message in messages %}\n    {% if loop.first %}\n{{ bos_token }}\n    \
             {% endif %}\n[{{ message.role.upper() }}] {{ message['content'] | tojson }}\n\
             {% break %}\n{% endfor %}\n{% if add_generation_prompt %}\n> \n{%- endif %}\n\
             {{ pad_token ~ eos_token }}{% if tools is defined and tools %}tools{% endif %}",
        ),
    ]);
    assert_eq!(rendered.unwrap(), "<s>\n[USER] \"hi\"\n><pad>");

    let date = render_template("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    assert!(date.starts_with("20") && date.len() == 10, "{date}");
}

#[test]
fn generation_blocks_render_their_content() {
    let template = "a {%- generation -%} {% set x = 1 %}b{{ x }} {% endgeneration %} c{{ x }}";
    assert_eq!(render_template(template).unwrap(), "ab1  c");
}

#[test]
fn template_errors_name_the_file_and_the_reason() {
    let message_text = failure(&[("chat_template.jinja", "{% for %}")]);
    assert!(
        message_text.starts_with("chat template `chat_template.jinja` cannot be parsed"),
        "{message_text}"
    );
    assert!(message_text.contains("chat_template:1"), "{message_text}");

    let message_text =
        message(&render_template("{{ raise_exception('no ' + 'users') }}").unwrap_err());
    assert_eq!(
        message_text,
        "chat template `chat_template.jinja` refuses the messages: no users"
    );

    let message_text = message(&render_template("{{ messages[0] + 1 }}").unwrap_err());
    assert!(
        message_text.starts_with("chat template `chat_template.jinja` failed on these messages")
    );

    let config = ("tokenizer_config.json", r#"{"chat_template": "{% if %}"}"#);
    let message_text = failure(&[config]);
    assert!(
        message_text.starts_with("chat template `tokenizer_config.json (chat_template)`"),
        "{message_text}"
    );
}

#[test]
fn templates_without_an_end_are_stopped() {
    let endless =
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let error = message(&render_template(endless).unwrap_err());
    assert!(
        error.contains("chat_template") && error.contains("fuel"),
        "{error}"
    );
}

#[test]
fn steps_that_lengthen_a_text_without_measure_are_refused() {
    let of_steps = |kind: &str, step: &str, count: usize| {
        let steps = vec![step; count].join(",");
        let found = format!(r#""{kind}": null"#);
        let changed = TOKENIZER.replace(
            &found,
            &format!(r#""{kind}": {{"type": "Sequence", "{kind}s": [{steps}]}}"#),
        );
        Tokenizer::from_bytes(changed.as_bytes()).map(|_| ())
    };
    let replace = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}"#;
    assert!(of_steps("normalizer", replace, 3).is_ok());
    let error = message(&of_steps("normalizer", replace, 40).unwrap_err());
    assert!(
        error.contains("tokenizer.json") && error.contains("without measure"),
        "{error}"
    );
}

#[test]
fn panics_of_the_library_are_errors() {
    let damaged = r#""decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": e}"#;
    let changed = TOKENIZER.replace("\"decoder\": null", damaged);
    let error = message(&Tokenizer::from_bytes(changed.as_bytes()).unwrap_err());
    assert!(
        error.contains("tokenizer.json") && error.contains("panicked"),
        "{error}"
    );
    // Two tokens of one id, and a character without a token.
    let same =
        r#""model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 2}, "merges": []}"#;
    let model = TOKENIZER.find("\"model\"").unwrap();
    let changed = format!("{}{same}}}", &TOKENIZER[..model]);
    if let Ok(tokenizer) = Tokenizer::from_bytes(changed.as_bytes()) {
        let _ = tokenizer.encode("abc", SpecialTokens::Omit);
    }
}
