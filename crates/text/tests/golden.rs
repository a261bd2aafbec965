//! Tokenizers compared with the outputs of Python's `tokenizers` and `transformers`.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test ends at its first failure and prints what it skips"
)]

#[expect(dead_code, reason = "shared by several tests")]
mod support;

use powerinfer_text::{GenerationPrompt, SpecialText, SpecialTokens};
use support::golden_tokenizers;

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
            let bare = &case.ids_no_special;
            check(bare, SpecialText::Keep, &case.decoded_no_special_ids);
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
