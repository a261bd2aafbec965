//! Tokenizer of a synthetic checkpoint: bytes, and as many groups of letters as the vocabulary has room for, so
//! that text gives about as many distinct tokens as with a trained vocabulary.

use serde_json::{Map, Value, json};

use crate::SynthError;

/// Minimum size of the vocabulary: bytes, a few merges, and the end of text.
pub(crate) const MIN_SIZE: usize = 260;

/// Marks a preceding space, in the alphabet of GPT-2.
const SPACE: char = 'Ġ';

/// Creates a `tokenizer.json` for a vocabulary of `size` tokens; the last token ends a text.
pub(crate) fn tokenizer(size: usize) -> Result<Vec<u8>, SynthError> {
    if size < MIN_SIZE {
        return Err(SynthError::Unsupported {
            reason: format!(
                "a vocabulary of {size} tokens has no room for all bytes; at least {MIN_SIZE} are needed"
            ),
        });
    }
    let mut tokens: Vec<String> = byte_letters().into_iter().map(String::from).collect();
    let mut merges: Vec<[String; 2]> = Vec::new();
    let letters = || 'a'..='z';
    let starts: Vec<String> = letters().chain([SPACE]).map(String::from).collect();
    let mut groups = starts;
    // Pairs first, then triples made of a pair and a letter.
    while tokens.len() < size - 1 && groups[0].chars().count() < 4 {
        let mut longer = Vec::new();
        for group in &groups {
            for letter in letters() {
                if tokens.len() == size - 1 {
                    break;
                }
                let token = format!("{group}{letter}");
                merges.push([group.clone(), letter.to_string()]);
                tokens.push(token.clone());
                longer.push(token);
            }
        }
        groups = longer;
        if groups.is_empty() {
            break;
        }
    }
    let end = "<|end|>";
    let vocabulary: Map<String, Value> = tokens
        .into_iter()
        .chain((0..).map(|number| format!("<|unused_{number}|>")))
        .take(size - 1)
        .chain([end.to_owned()])
        .enumerate()
        .map(|(id, token)| (token, id.into()))
        .collect();
    let special = json!({
        "id": size - 1, "content": end, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": merges,
        },
    });
    Ok(serde_json::to_vec(&file).expect("a map of JSON is JSON"))
}

/// Alphabet of byte-level tokenizers since GPT-2: printable bytes are themselves, others start at U+0100.
fn byte_letters() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).expect("small numbers are characters")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_one_token() {
        for size in [MIN_SIZE, 1000, 32_000] {
            let file: Value = serde_json::from_slice(&tokenizer(size).unwrap()).unwrap();
            let vocabulary = file["model"]["vocab"].as_object().unwrap();
            assert_eq!(vocabulary.len(), size, "tokens are distinct");
            let merges = file["model"]["merges"].as_array().unwrap();
            assert!(merges.iter().all(|merge| {
                let joined = format!(
                    "{}{}",
                    merge[0].as_str().unwrap(),
                    merge[1].as_str().unwrap()
                );
                vocabulary.contains_key(&joined)
            }));
        }
        assert_eq!(byte_letters()[usize::from(b' ')], SPACE);
        assert!(tokenizer(64).is_err());
    }
}
