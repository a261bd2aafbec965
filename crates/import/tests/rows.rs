//! Rows of a weight are the same rows of the whole weight, in every container.

use std::path::Path;

use powerinfer_import::open_checkpoint;
use powerinfer_model::Files;

#[test]
fn rows_are_rows_of_the_whole() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for name in [
        "models/llama-bin-only",
        "models/llama-sharded",
        "models/opt-fp16",
        "models/falcon-new-relu",
        "models/gemma",
        "gguf/llama-sp.q4_0.gguf",
        "gguf/tiny.powerinfer.f16.gguf",
    ] {
        let checkpoint = open_checkpoint(Files::open(&golden.join(name)).unwrap()).unwrap();
        for weight in checkpoint.config().weights() {
            let shape = checkpoint.config().shape(weight);
            let (rows, width) = match shape[..] {
                [rows, width] => (rows, width),
                _ => (1, shape[0]),
            };
            let whole = checkpoint.read(weight).unwrap();
            for range in [0..rows, 0..1, rows - 1..rows, rows / 3..rows / 3 + 1] {
                let some = checkpoint.read_rows(weight, range.clone()).unwrap();
                assert_eq!(
                    some,
                    whole[range.start * width..range.end * width],
                    "{name} {weight:?} {range:?}"
                );
            }
        }
    }
}
