//! A Parquet file with one changed byte gives documents or a reason, and the process survives. There is no test harness because
//! this program is also the worker.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{fs, path::Path};

use powerinfer_corpus::{Corpus, Encoder, EndOfText, PARQUET_WORK};
use powerinfer_guard::worker::work_as_worker;
use powerinfer_text::{TEMPLATE_WORK, Tokenizer};

fn main() {
    if work_as_worker(&[PARQUET_WORK, TEMPLATE_WORK]) {
        return;
    }
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = own.join("../../tests/golden/models/llama-relu-gqa");
    let tokenizer = Tokenizer::from_directory(&model).unwrap();
    let encoder = Encoder {
        tokenizer: &tokenizer,
        vocabulary_size: tokenizer.vocabulary_size(),
        end: EndOfText::Omit,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flipped.parquet");
    for name in ["text.parquet", "messages.parquet"] {
        let bytes = fs::read(own.join("tests/data").join(name)).unwrap();
        for index in (0..bytes.len()).step_by(5) {
            let mut bytes = bytes.clone();
            bytes[index] ^= 0x55;
            fs::write(&path, bytes).unwrap();
            let corpus = Corpus::read(&path, &encoder, 512, 10_000).unwrap();
            assert!(
                !(corpus.documents.is_empty() && corpus.skipped.is_empty()),
                "{name}: nothing is said about byte {index}"
            );
        }
    }
}
