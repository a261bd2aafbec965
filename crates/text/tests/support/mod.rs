//! Golden tokenizers: tokenizers with expected outputs.

// Each test target uses a part of this module.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use powerinfer_text::{Message, Tokenizer};
use serde::Deserialize;

/// Tokenizer with the content of its `tokenizer_golden.json`.
pub(crate) struct GoldenTokenizer {
    pub(crate) name: String,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) expected: Expected,
}

#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) vocab_size: usize,
    pub(crate) cases: Vec<EncodeCase>,
    #[serde(default)]
    pub(crate) decode_cases: Vec<DecodeCase>,
    #[serde(default)]
    pub(crate) chat_cases: Vec<ChatCase>,
}

#[derive(Deserialize)]
pub(crate) struct EncodeCase {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) ids_no_special: Vec<u32>,
    pub(crate) decoded: String,
    pub(crate) decoded_with_special: String,
    pub(crate) decoded_no_special_ids: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct DecodeCase {
    pub(crate) ids: Vec<u32>,
    pub(crate) decoded: String,
    pub(crate) decoded_with_special: String,
}

#[derive(Deserialize)]
pub(crate) struct ChatCase {
    pub(crate) messages: Vec<Message>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) rendered: String,
    pub(crate) ids: Vec<u32>,
}

/// Returns the tokenizers in `tests/golden`, and two more if they are in the neighbouring checkout.
pub(crate) fn golden_tokenizers() -> &'static [GoldenTokenizer] {
    static LOADED: LazyLock<Vec<GoldenTokenizer>> = LazyLock::new(load_all);
    &LOADED
}

fn load_all() -> Vec<GoldenTokenizer> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut directories: Vec<PathBuf> =
        std::fs::read_dir(workspace.join("tests/golden/tokenizers"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
    directories.sort();
    assert_eq!(directories.len(), 13);

    // They are not in this repository because of the licence of the first and the size of the second.
    for name in ["tok-sp-llama2-32k", "tok-vm-gpt2"] {
        let folder = workspace.join("../shared/golden").join(name);
        if folder.is_dir() {
            directories.push(folder);
        } else {
            drop(writeln!(
                std::io::stderr(),
                "skipped: {} is not there",
                folder.display()
            ));
        }
    }
    directories.iter().map(|path| load(path)).collect()
}

/// Returns the root of the repository.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn load(directory: &Path) -> GoldenTokenizer {
    let expected = std::fs::read(directory.join("tokenizer_golden.json")).unwrap();
    GoldenTokenizer {
        name: directory.file_name().unwrap().to_str().unwrap().to_owned(),
        tokenizer: Tokenizer::from_directory(directory).unwrap(),
        expected: serde_json::from_slice(&expected).unwrap(),
    }
}
