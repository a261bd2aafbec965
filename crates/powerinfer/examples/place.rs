//! Makes a bundle for a memory budget, and shows what is placed where:
//!
//! ```sh
//! cargo run -p powerinfer --example place -- path/to/model text.txt 8G
//! ```
//!
//! Without arguments, it places the demo model with 1 GiB of GPU memory on a machine with an RTX 4090.
#![expect(clippy::print_stdout, reason = "a program that prints")]

use std::{error::Error, path::PathBuf};

use powerinfer::{
    CalibrationText, Files, Format, PlanOptions, Prepare, Recipe, Silent, Tokens, Training, Work,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let checkpoint = match arguments.first() {
        Some(folder) => powerinfer::open_checkpoint(Files::open(folder.as_ref())?)?,
        None => powerinfer::demo()?,
    };
    let tokenizer = powerinfer::tokenizer(checkpoint.files())?;

    let budget = arguments.get(2).map_or("1G", String::as_str);
    let training = Training {
        steps: 50,
        ..Training::default()
    };
    let how = Prepare {
        text: CalibrationText {
            paths: arguments.get(1).map(PathBuf::from).into_iter().collect(),
            tokens: Tokens::Count(2000),
            settled: 0.9,
        },
        trace_tokens: 256,
        recipe: Recipe::Train(training.settings(&checkpoint, Format::Q8_0, 0)),
        options: PlanOptions {
            vram: Some(budget.parse()?),
            hardware: Some(powerinfer::hardware("rtx4090")?),
            certify_tokens: Some(0), // no certificate: measuring it takes time
            ..PlanOptions::default()
        },
        device: None,
        seed: 0,
    };
    let scratch = tempfile::tempdir()?;
    let mut report = |work: Work<'_>| {
        if let Work::Plan(_, solved) = work {
            println!("solved in {:.3} s", solved.solve_seconds);
        }
    };
    let (bundle, _) = powerinfer::prepare(
        &checkpoint,
        &tokenizer,
        &how,
        scratch.path(),
        &Silent,
        &mut report,
    )?;
    let plan = bundle.plan();
    for line in &plan.lines {
        println!(
            "{:?} {:<20} {:>12} bytes",
            line.device, line.name, line.bytes
        );
    }
    println!(
        "{} of {} neurons on the GPU",
        plan.totals.hot_count, plan.totals.neuron_count
    );
    Ok(())
}
