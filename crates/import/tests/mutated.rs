//! Damaged checkpoints of every container: an error or a model, never a panic.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::path::{Path, PathBuf};

use powerinfer_import::open_checkpoint;
use powerinfer_model::Files;
use proptest::prelude::*;

fn golden(name: &str) -> PathBuf {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut paths = folders.map(|folder| folder.join("tests/golden").join(name));
    paths.find(|path| path.exists()).unwrap()
}

/// Offset of the damaged byte: near the start, where headers are, or near the end, where a zip has its
/// directory.
fn place(length: usize, from_end: bool, offset: usize) -> usize {
    let offset = offset % length;
    if from_end {
        length - 1 - offset
    } else {
        offset
    }
}

/// Reads all weights of the checkpoint at `path`, if it can be opened.
fn read_all(path: &Path) {
    let opened = Files::open(path).map(open_checkpoint);
    if let Ok(Ok(checkpoint)) = opened {
        for weight in checkpoint.config().weights() {
            let _ = checkpoint.read(weight);
        }
    }
}

/// Opens a copy of the golden checkpoint at `model` whose file `name` was damaged, and reads all.
fn open_damaged(model: &str, name: &str, damage: impl Fn(&mut Vec<u8>)) {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", name] {
        let bytes = std::fs::read(golden(model).join(file)).unwrap();
        std::fs::write(folder.path().join(file), bytes).unwrap();
    }
    let path = folder.path().join(name);
    let mut bytes = std::fs::read(&path).unwrap();
    damage(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    read_all(folder.path());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn safetensors(from_end in any::<bool>(), offset in 0usize..3000, byte: u8, cut in 0usize..4) {
        open_damaged("models/llama-tied-headdim", "model.safetensors", |bytes| {
            let place = place(bytes.len(), from_end, offset);
            bytes[place] = byte;
            bytes.truncate(bytes.len() - cut % 2 * offset);
        });
    }

    #[test]
    fn pickles(from_end in any::<bool>(), offset in 0usize..6000, byte: u8, cut in 0usize..4) {
        open_damaged("models/llama-bin-only", "pytorch_model.bin", |bytes| {
            let place = place(bytes.len(), from_end, offset);
            bytes[place] = byte;
            if cut == 0 {
                bytes.truncate(bytes.len() - offset);
            }
        });
    }

    #[test]
    fn configurations(offset in 0usize..700, byte: u8) {
        open_damaged("models/llama-tied-headdim", "config.json", |bytes| {
            let place = place(bytes.len(), false, offset);
            bytes[place] = byte;
        });
    }

    #[test]
    fn gguf(offset in 0usize..9000, byte: u8, cut in 0usize..4) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut bytes = std::fs::read(golden("gguf/qwen2-bias-tied.f16.gguf")).unwrap();
        bytes[offset] = byte;
        if cut == 0 {
            bytes.truncate(bytes.len() - offset);
        }
        std::fs::write(&path, bytes).unwrap();
        read_all(&path);
    }
}
