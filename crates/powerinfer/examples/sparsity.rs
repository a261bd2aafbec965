//! Measures which neurons of a model are active:
//!
//! ```sh
//! cargo run -p powerinfer --example sparsity -- path/to/model text.txt
//! ```
//!
//! Without arguments, it measures the demo model on its own tasks.
#![expect(clippy::print_stdout, reason = "a program that prints")]

use std::{error::Error, path::PathBuf};

use powerinfer::{Amount, CalibrationText, Files, ProfileSettings, Shard, Silent, Tokens};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let checkpoint = match arguments.next() {
        Some(folder) => powerinfer::open_checkpoint(Files::open(folder.as_ref())?)?,
        None => powerinfer::demo()?,
    };
    let text = CalibrationText {
        paths: arguments.map(PathBuf::from).collect(),
        tokens: Tokens::Count(2000),
        settled: 0.9,
    };
    let files = checkpoint.files();
    let tokenizer = powerinfer::tokenizer(files)?;
    let calibration = text.read(files, checkpoint.config(), &tokenizer, 0, &Silent)?;

    let scratch = tempfile::tempdir()?;
    let settings = ProfileSettings {
        trace_tokens: 256,
        amount: Amount::Everything,
        shard: Shard::WHOLE,
        seed: 0,
    };
    let out = scratch.path().join("profile");
    let made = powerinfer::profile(
        &checkpoint,
        &calibration,
        settings,
        None,
        &out,
        false,
        &Silent,
    )?;
    let document = made.artifact.document();
    println!("layer   zeros   neurons with 80% of the activations");
    for layer in &document.layers {
        println!(
            "{:>5}  {:5.1}%  {:5.1}%",
            layer.layer,
            100.0 * layer.sparsity,
            100.0 * layer.neurons_for.most
        );
    }
    println!(
        "{} tokens of {}",
        document.tokens,
        checkpoint.identity().name
    );
    Ok(())
}
