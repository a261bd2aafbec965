//! Streaming decode equals decoding all ids at once.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[expect(dead_code, reason = "shared by several tests")]
mod support;

use std::cell::RefCell;

use powerinfer_text::{SpecialText, SpecialTokens, TextError, Tokenizer};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::{golden_tokenizers, workspace};

fn pieces(tokenizer: &Tokenizer, ids: &[u32], special: SpecialText) -> Vec<String> {
    let mut stream = tokenizer.decode_stream(special);
    let mut pieces: Vec<String> = ids
        .iter()
        .filter_map(|&id| stream.push(id).unwrap())
        .collect();
    pieces.extend(stream.finish().unwrap());
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    pieces
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    })
}

fn assert_stream_equals_decode(tokenizer: &Tokenizer, ids: &[u32]) {
    for special in [SpecialText::Keep, SpecialText::Skip] {
        let whole = tokenizer.decode(ids, special).unwrap();
        assert_eq!(pieces(tokenizer, ids, special).concat(), whole, "{ids:?}");
    }
}

#[test]
fn streaming_known_ids_equals_decoding() {
    for golden in golden_tokenizers() {
        for case in &golden.expected.cases {
            assert_stream_equals_decode(&golden.tokenizer, &case.ids);
            assert_stream_equals_decode(&golden.tokenizer, &case.ids_no_special);
        }
        for case in &golden.expected.decode_cases {
            assert_stream_equals_decode(&golden.tokenizer, &case.ids);
        }
    }
}

#[test]
fn streaming_random_ids_equals_decoding() {
    for golden in golden_tokenizers() {
        // The first few hundred ids of every vocabulary are special tokens and single bytes,
        // so that characters are split and restarted.
        let size = golden.expected.vocab_size as u32;
        let id = prop_oneof![0..size, 0..size.min(300), Just(3), 172..180_u32];
        let ids = prop::collection::vec(id, 0..40);
        runner(250)
            .run(&ids, |ids| {
                assert_stream_equals_decode(&golden.tokenizer, &ids);
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{}: {failure}", golden.name));
    }
}

#[test]
fn streaming_random_text_equals_decoding() {
    for golden in golden_tokenizers() {
        let longest = RefCell::new(0);
        runner(120)
            .run(&"[ a-z\n\u{e9}\u{4e2d}\u{1f600}]{0,60}", |text| {
                let ids = golden.tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
                assert_stream_equals_decode(&golden.tokenizer, &ids);
                let count = pieces(&golden.tokenizer, &ids, SpecialText::Keep).len();
                let mut longest = longest.borrow_mut();
                *longest = count.max(*longest);
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{}: {failure}", golden.name));
        assert!(longest.into_inner() > 10, "{} does not stream", golden.name);
    }
}

#[test]
fn a_prompt_and_its_continuation_are_the_whole_text() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        runner(120)
            .run(
                &(
                    "[a-z]{1,9}( [a-z\u{e9}]{1,9}){0,3}",
                    "( [a-z\n\u{4e2d}]{1,9}){1,4}",
                ),
                |(prompt, rest)| {
                    let whole = tokenizer
                        .encode(&(prompt.clone() + &rest), SpecialTokens::Add)
                        .unwrap();
                    let prompt = tokenizer.encode(&prompt, SpecialTokens::Add).unwrap();
                    // Skipped if the prompt's ids do not begin the whole text's ids, for example because the tokenizer appends an end token.
                    if let Some(rest) = whole.strip_prefix(&prompt[..]) {
                        for special in [SpecialText::Keep, SpecialText::Skip] {
                            let [prompt_text, all] = [&prompt, &whole]
                                .map(|ids| tokenizer.decode(ids, special).unwrap());
                            let own = tokenizer.decode_after(&prompt, rest, special).unwrap();
                            prop_assert_eq!(prompt_text + &own, all);
                        }
                    }
                    Ok(())
                },
            )
            .unwrap_or_else(|failure| panic!("{}: {failure}", golden.name));
    }
}

#[test]
fn text_is_emitted_with_the_token_that_completes_it() {
    for golden in golden_tokenizers() {
        let ids = golden
            .tokenizer
            .encode("the list of names", SpecialTokens::Omit)
            .unwrap();
        let mut stream = golden.tokenizer.decode_stream(SpecialText::Skip);
        for (index, &id) in ids.iter().enumerate() {
            let piece = stream.push(id).unwrap();
            // Only a stripped prefix space emits nothing.
            assert!(piece.is_some() || index == 0, "{}", golden.name);
        }
        assert_eq!(stream.finish().unwrap(), None);
    }
}

#[test]
fn streaming_a_repeated_byte_equals_decoding() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        for byte_token in ["å", "<0xE5>", "¡", "<0xA1>", "<0x0A>"] {
            if let Some(id) = tokenizer.token_id(byte_token) {
                assert_stream_equals_decode(tokenizer, &vec![id; 2_000]);
            }
        }
    }
}

#[test]
fn an_unknown_id_leaves_the_stream_unchanged() {
    for golden in golden_tokenizers() {
        let tokenizer = &golden.tokenizer;
        let ids = tokenizer.encode("né", SpecialTokens::Omit).unwrap();
        let mut stream = tokenizer.decode_stream(SpecialText::Keep);
        let mut text = String::new();
        for &id in &ids {
            let refused = stream.push(u32::MAX);
            assert!(matches!(
                refused,
                Err(TextError::UnknownId { id: u32::MAX, .. })
            ));
            text.extend(stream.push(id).unwrap());
        }
        text.extend(stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&ids, SpecialText::Keep).unwrap());
    }
}

/// Decoders of `tokenizer.json` beyond those of the golden tokenizers.
const DECODERS: [&str; 11] = [
    "null",
    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#,
    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}"#,
    r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###,
    r#"{"type": "BPEDecoder", "suffix": "e"}"#,
    r#"{"type": "CTC", "pad_token": "<unk>", "word_delimiter_token": "▁", "cleanup": false}"#,
    r#"{"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 3, "stop": 0}]}"#,
    r#"{"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"},
        {"type": "Strip", "content": "e", "start": 0, "stop": 2}]}"#,
    r#"{"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "e▁"}, "content": "-"}]}"#,
    r#"{"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Strip", "content": "▁", "start": 1, "stop": 0},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}]}"#,
    r#"{"type": "Sequence", "decoders": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        {"type": "Strip", "content": "t", "start": 1, "stop": 0}]}"#,
];

#[test]
fn streaming_with_every_kind_of_decoder_equals_decoding() {
    let path = workspace().join("tests/golden/tokenizers/tok-sp-legacy/tokenizer.json");
    let original: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for decoder in DECODERS {
        let mut description = original.clone();
        description["decoder"] = serde_json::from_str(decoder).unwrap();
        let tokenizer = Tokenizer::from_bytes(description.to_string().as_bytes()).unwrap();
        let id = prop_oneof![3..640_u32, 250..300_u32, Just(0)];
        // The library's `Strip` fails if it is to strip more characters from the end than the text
        // has. Every text therefore has a token with a character that the decoder above keeps.
        let stripped = tokenizer.token_id("e");
        let kept =
            (300..640_u32).prop_filter("stripped as a whole", move |&id| Some(id) != stripped);
        let ids = (kept, prop::collection::vec(id, 0..30));
        runner(200)
            .run(&ids, |(kept, mut ids)| {
                ids.insert(ids.len() / 2, kept);
                assert_stream_equals_decode(&tokenizer, &ids);
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{decoder}: {failure}"));
    }
}

#[test]
fn streaming_tokens_with_parts_of_characters_equals_decoding() {
    // F0 9F 98 80 and E2 80 93 are one character each, split in every way between ASCII.
    let tokens = [
        "a", "ð", "Ł", "ĺ", "Ģ", "Ġð", "aðŁ", "ðŁĺ", "ŁĺĢ", "ĺĢb", "Ģâ", "âĢĵ", "câ", "câĢ", "Ģĵd",
        "ĵeð", "ÿ", "aÿ",
    ];
    let vocabulary: serde_json::Map<_, _> = tokens
        .iter()
        .zip(0_u32..)
        .map(|(token, id)| ((*token).to_owned(), id.into()))
        .collect();
    let description = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    });
    let tokenizer = Tokenizer::from_bytes(description.to_string().as_bytes()).unwrap();
    let known: Vec<u32> = tokens
        .iter()
        .map(|token| tokenizer.token_id(token).unwrap())
        .collect();
    let ids = prop::collection::vec(prop::sample::select(known), 0..20);
    runner(2_000)
        .run(&ids, |ids| {
            assert_stream_equals_decode(&tokenizer, &ids);
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_bytes_of_tokens_are_those_of_the_text() {
    const TEXT: &str = "def f(x):\n    return \"na\u{ef}ve\" + '\u{1f980}\u{4e2d}'";
    for golden in golden_tokenizers() {
        let (name, tokenizer) = (&golden.name, &golden.tokenizer);
        let ids = tokenizer.encode(TEXT, SpecialTokens::Omit).unwrap();
        let whole = tokenizer.decode(&ids, SpecialText::Keep).unwrap();
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|id| tokenizer.token_bytes(*id).unwrap())
            .collect();
        let text = String::from_utf8_lossy(&bytes);
        // The decoder drops the space that some tokenizers put before a text.
        assert_eq!(text.trim_start(), whole.trim_start(), "{name}");
    }
}
