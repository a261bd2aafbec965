//! Tokenizers without `tokenizer.json` compared with the outputs of the SentencePiece library and of transformers.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test ends at its first failure and prints what it skips"
)]

use std::path::{Path, PathBuf};

use powerinfer_text::{SpecialText, SpecialTokens, Tokenizer};
use serde_json::Value;

/// Folders of the goldens in the neighbouring checkout, and those copied into this one.
fn goldens(names: &[&str]) -> Vec<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shared = workspace.join("../shared/golden");
    if !shared.is_dir() {
        println!("skipped: {} is not there", shared.display());
        return Vec::new();
    }
    names.iter().map(|name| shared.join(name)).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn ids_and_texts_are_those_of_the_reference() {
    for folder in goldens(&["tok-spm-llama", "tok-spm-user", "tok-vm-gpt2", "tok-vm-opt"]) {
        let tokenizer = Tokenizer::from_directory(&folder).unwrap();
        let golden = json(&folder.join("tokenizer_golden.json"));
        assert_eq!(golden["vocab_size"], tokenizer.vocabulary_size());
        for case in golden["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let about = format!("{}: {text:?}", folder.display());
            let all = tokenizer.encode(text, SpecialTokens::Add).unwrap();
            assert_eq!(all, ids(&case["ids"]), "{about}");
            let bare = tokenizer.encode(text, SpecialTokens::Omit).unwrap();
            assert_eq!(bare, ids(&case["ids_no_special"]), "{about}");
            let text = tokenizer.decode(&all, SpecialText::Skip).unwrap();
            assert_eq!(case["decoded"], text, "{about}");
            let text = tokenizer.decode(&all, SpecialText::Keep).unwrap();
            assert_eq!(case["decoded_with_special"], text, "{about}");
            let mut stream = tokenizer.decode_stream(SpecialText::Keep);
            let mut streamed = String::new();
            for id in &all {
                streamed.extend(stream.push(*id).unwrap());
            }
            streamed.extend(stream.finish().unwrap());
            assert_eq!(streamed, text, "{about}");
        }
    }
}

#[test]
fn prompts_of_models_have_their_ids() {
    for folder in goldens(&["relullama-spm", "sparsellama-fatrelu"]) {
        let tokenizer = Tokenizer::from_directory(&folder).unwrap();
        let expected = json(&folder.join("expected.json"));
        println!("{}", expected);
        assert_eq!(tokenizer.eos().unwrap().text, "</s>");
    }
}
