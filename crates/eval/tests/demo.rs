//! The demo's tokenizer, tasks and checkpoint fit each other.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use powerinfer_datasets::{
    demo,
    minipython::{Split, tasks},
};
use powerinfer_model::{Checkpoint, Files};
use powerinfer_text::{SpecialText, SpecialTokens, Tokenizer};

fn tokenizer() -> Tokenizer {
    let read = |name: &str| {
        demo::FILES
            .iter()
            .find(|(file, _)| *file == name)
            .map(|(_, bytes)| (*bytes).into())
    };
    Tokenizer::from_files(read).unwrap()
}

#[test]
fn the_tokens_of_a_prompt_are_a_prefix_of_those_of_the_text() {
    let tokenizer = tokenizer();
    for split in Split::ALL {
        for task in tasks(split, 5).take(300) {
            let prompt = tokenizer.encode(task.prompt(), SpecialTokens::Add).unwrap();
            let text = tokenizer.encode(&task.text(), SpecialTokens::Add).unwrap();
            assert!(text.starts_with(&prompt), "{}", task.text());
            assert_eq!(
                tokenizer.decode(&text, SpecialText::Skip).unwrap(),
                task.text()
            );
        }
    }
}

#[test]
fn the_tokenizer_fits_the_checkpoint() {
    let checkpoint = Checkpoint::from_files(Files::Embedded {
        name: "demo",
        files: demo::FILES,
    })
    .unwrap();
    let tokenizer = tokenizer();
    assert_eq!(
        checkpoint.config().vocabulary_size,
        tokenizer.vocabulary_size()
    );
    assert_eq!(
        checkpoint.config().end_of_text,
        [tokenizer.eos().unwrap().id]
    );
    assert_eq!(
        tokenizer.encode("", SpecialTokens::Add).unwrap(),
        [tokenizer.bos().unwrap().id]
    );
}
