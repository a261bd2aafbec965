//! Generates text from a bundle:
//!
//! ```sh
//! cargo run -p powerinfer --example generate -- demo.powerinfer/bundle "def odd(numbers):"
//! ```
//!
//! Without arguments, it packs the demo model into a temporary folder first.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints"
)]

use std::{
    error::Error,
    io::{Write, stdout},
};

use powerinfer::{
    Engine, Execution, Generation, Sampler, Silent, SpecialText, SpecialTokens, StreamDecoder, Text,
};

/// Prompt if none is given: a task of the kind that the demo was trained for.
const TASK: &str = r#"def odd(numbers):
    """Return numbers after selecting the odd numbers of numbers.""""#;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let scratch = tempfile::tempdir()?;
    let bundle = match arguments.next() {
        Some(folder) => powerinfer::open_bundle(folder)?,
        None => powerinfer::pack_plain(&powerinfer::demo()?, 256, &scratch.path().join("bundle"))?,
    };
    let prompt = arguments.next();
    let prompt = prompt.unwrap_or_else(|| TASK.to_owned());

    let tokenizer = powerinfer::tokenizer(&bundle.files())?;
    let mut engine = Engine::open(bundle, None, &Execution::on_cpu(2), &Silent)?;
    let mut session = engine.new_session(engine.context_limit())?;
    let stop = powerinfer::stop_conditions(&tokenizer, 100);
    let mut text = Text::new(Sampler::greedy(), stop).with_log_probabilities();

    print!("{prompt}");
    let ids = tokenizer.encode(&prompt, SpecialTokens::Add)?;
    let (generation, _) = Generation::start(&mut engine, &mut session, &mut text, &ids, || false)?;
    let mut stream = StreamDecoder::after(&tokenizer, &ids, SpecialText::Skip)?;
    let mut log_probability = 0.0;
    for token in generation {
        let token = token?;
        log_probability += token.log_probability.unwrap_or_default();
        if let Some(piece) = stream.push(token.id)? {
            print!("{piece}");
            stdout().flush()?;
        }
    }
    println!("{}", stream.finish()?.unwrap_or_default());
    let tokens = text.generated();
    let computed = engine.observers_mut().take_statistics().computed_share();
    eprintln!(
        "{tokens} tokens, perplexity {:.2}, {:.1}% of the FFN neurons computed",
        (-log_probability / tokens as f64).exp(),
        100.0 * computed
    );
    Ok(())
}
