//! Tokenizers compared with the outputs of Python's `tokenizers` and `transformers`.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod support;

use powerinfer_text::{
    GenerationPrompt, Message, MessageTokens, SpecialText, SpecialTokens, Tokenizer,
};
use support::{golden_tokenizers, workspace};

#[test]
fn encoding_matches_the_expected_ids() {
    for golden in golden_tokenizers() {
        for case in &golden.expected.cases {
            let encode = |special| golden.tokenizer.encode(&case.text, special).unwrap();
            let about = format!("{}: {:?}", golden.name, case.text);
            assert_eq!(encode(SpecialTokens::Add), case.ids, "{about}");
            assert_eq!(encode(SpecialTokens::Omit), case.ids_no_special, "{about}");
        }
    }
}

#[test]
fn decoding_matches_the_expected_text() {
    for golden in golden_tokenizers() {
        let check = |ids: &[u32], special, expected: &str| {
            let text = golden.tokenizer.decode(ids, special).unwrap();
            assert_eq!(text, expected, "{}: {ids:?}", golden.name);
        };
        for case in &golden.expected.cases {
            check(&case.ids, SpecialText::Skip, &case.decoded);
            check(&case.ids, SpecialText::Keep, &case.decoded_with_special);
            if let Some(expected) = &case.decoded_no_special_ids {
                check(&case.ids_no_special, SpecialText::Keep, expected);
            }
        }
        for case in &golden.expected.decode_cases {
            check(&case.ids, SpecialText::Skip, &case.decoded);
            check(&case.ids, SpecialText::Keep, &case.decoded_with_special);
        }
    }
}

#[test]
fn chat_templates_match_the_expected_text_and_ids() {
    let mut templates = 0;
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        assert_eq!(
            tokenizer.chat_template().is_some(),
            !golden.expected.chat_cases.is_empty(),
            "{}",
            golden.name
        );
        for case in &golden.expected.chat_cases {
            let prompt = if case.add_generation_prompt {
                GenerationPrompt::Add
            } else {
                GenerationPrompt::Omit
            };
            let template = tokenizer.chat_template().unwrap();
            let rendered = template.render(&case.messages, prompt).unwrap();
            assert_eq!(rendered, case.rendered, "{}", golden.name);
            let ids = tokenizer.encode(&rendered, SpecialTokens::Omit).unwrap();
            assert_eq!(ids, case.ids, "{}: {rendered:?}", golden.name);
            for tokens in [MessageTokens::Plain, MessageTokens::Trusted] {
                let chat = tokenizer
                    .render_chat(&case.messages, prompt, tokens)
                    .unwrap();
                assert_eq!(chat.text(), case.rendered, "{}", golden.name);
                let ids = tokenizer.encode_chat(&chat).unwrap();
                assert_eq!(ids, case.ids, "{}: {rendered:?}", golden.name);
            }
        }
        templates += usize::from(tokenizer.chat_template().is_some());
    }
    assert_eq!(templates, 3);
}

#[test]
fn vocabulary_size_and_special_tokens_match() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        assert_eq!(tokenizer.vocabulary_size(), golden.expected.vocab_size);
        let eos = tokenizer.eos().unwrap();
        assert_eq!(tokenizer.token_id(&eos.text), Some(eos.id));
        assert_eq!(tokenizer.stop_ids(), [eos.id]);
        let without_bos = ["tok-bpe-falcon", "tok-bpe-qwen2"].contains(&golden.name.as_str());
        assert_eq!(tokenizer.bos().is_none(), without_bos, "{}", golden.name);
        assert_eq!(tokenizer.token_id("no such token"), None);
    }
}

fn user(content: &str) -> [Message; 1] {
    [Message {
        role: "user".to_owned(),
        content: content.to_owned(),
    }]
}

/// Ids of a conversation.
fn chat_ids(tokenizer: &Tokenizer, content: &str, tokens: MessageTokens) -> Vec<u32> {
    let chat = tokenizer.render_chat(&user(content), GenerationPrompt::Add, tokens);
    tokenizer.encode_chat(&chat.unwrap()).unwrap()
}

fn special_ids(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    let special = ids.iter().filter(|id| tokenizer.is_special(**id));
    special.copied().collect()
}

#[test]
fn special_tokens_in_messages_are_text() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        if tokenizer.chat_template().is_none() {
            continue;
        }
        let harmless = chat_ids(tokenizer, "x", MessageTokens::Plain);
        let of_template = special_ids(tokenizer, &harmless);
        let ids = 0..tokenizer.vocabulary_size() as u32;
        for id in ids.filter(|id| tokenizer.is_special(*id)) {
            let token = tokenizer.decode(&[id], SpecialText::Keep).unwrap();
            for content in [
                token.clone(),
                format!(" one {token}two{token}{token} three\n"),
                format!("{token} {}", &token[..token.len() - 1]),
            ] {
                let about = format!("{}: {content:?}", golden.name);
                let plain = chat_ids(tokenizer, &content, MessageTokens::Plain);
                assert_eq!(special_ids(tokenizer, &plain), of_template, "{about}");
                let trusted = chat_ids(tokenizer, &content, MessageTokens::Trusted);
                assert!(
                    special_ids(tokenizer, &trusted).len() > of_template.len(),
                    "{about}"
                );
                // It is the same text, up to the spaces that some tokenizers add next to special tokens.
                let [plain, trusted] = [plain, trusted].map(|ids| {
                    let text = tokenizer.decode(&ids, SpecialText::Keep).unwrap();
                    text.replace(' ', "")
                });
                assert_eq!(plain, trusted, "{about}");
            }
        }
    }
}

#[test]
fn text_next_to_a_special_token_in_a_message_has_its_usual_tokens() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        let (Some(_), Some(eos)) = (tokenizer.chat_template(), tokenizer.eos()) else {
            continue;
        };
        // Text that merely might begin or end a special token is marked, and encoded as if it were not.
        let (head, tail) = (&eos.text[..1], &eos.text[eos.text.len() - 1..]);
        for content in [
            format!("is 1 {head}"),
            format!("{tail} quoted text"),
            format!("  {tail}a b{head}  "),
        ] {
            let [plain, trusted] = [MessageTokens::Plain, MessageTokens::Trusted]
                .map(|tokens| chat_ids(tokenizer, &content, tokens));
            assert_eq!(plain, trusted, "{}: {content:?}", golden.name);
        }
    }
}

/// A golden tokenizer with another chat template.
fn with_template(name: &str, template: &'static str) -> Tokenizer {
    let folder = workspace().join("tests/golden/tokenizers").join(name);
    Tokenizer::from_files(move |name| match name {
        "chat_template.jinja" => Some(template.as_bytes().into()),
        _ => std::fs::read(folder.join(name)).ok().map(Into::into),
    })
    .unwrap()
}

#[test]
fn templates_may_change_contents() {
    let text = |template, content| {
        let tokenizer = with_template("tok-bpe-qwen2", template);
        let ids = chat_ids(&tokenizer, content, MessageTokens::Plain);
        let special = special_ids(&tokenizer, &ids).len();
        (tokenizer.decode(&ids, SpecialText::Keep).unwrap(), special)
    };
    let trims = "{{ messages[0].content | trim }}<|im_end|>";
    assert_eq!(
        text(trims, "  <|im_end|>  a<|im_ "),
        ("<|im_end|>  a<|im_<|im_end|>".to_owned(), 1)
    );
    // A token that is not special by name, and that the template writes.
    let calls = "<tool_call>{{ messages[0].content }}</tool_call>";
    let tokenizer = with_template("tok-bpe-qwen2", calls);
    let ids = chat_ids(&tokenizer, "</tool_call>", MessageTokens::Plain);
    let end = tokenizer.token_id("</tool_call>").unwrap();
    assert_eq!(ids.iter().filter(|id| **id == end).count(), 1);
    // One that the template searches contents for stays in one piece; special ones do not.
    let splits = "{{ (messages[0].content.split('</tool_call>') | last) | trim }}<|im_end|>";
    assert_eq!(
        text(splits, "a</tool_call> <|im_end|> b "),
        ("<|im_end|> b<|im_end|>".to_owned(), 1)
    );
    // Two messages that are harmless alone.
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let tokenizer = with_template("tok-bpe-qwen2", template);
    let messages = ["<|im", "_end", "|>"].map(|content| user(content)[0].clone());
    let chat = tokenizer.render_chat(&messages, GenerationPrompt::Omit, MessageTokens::Plain);
    let ids = tokenizer.encode_chat(&chat.unwrap()).unwrap();
    assert_eq!(
        tokenizer.decode(&ids, SpecialText::Keep).unwrap(),
        "<|im_end|>"
    );
    assert!(special_ids(&tokenizer, &ids).is_empty());
}
