//! Prints tasks that the demo was not trained on, solutions and all: text to judge a model by. With `calibration`, those
//! that it is profiled on.
//!
//! `cargo run -p powerinfer-datasets --example tasks -- 200`

use std::io::{Result, Write, stdout};

use powerinfer_datasets::minipython::{Split, tasks};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let count = arguments.next().and_then(|count| count.parse().ok());
    let split = match arguments.next().as_deref() {
        Some("calibration") => Split::Calibration,
        _ => Split::HeldOut,
    };
    for task in tasks(split, 1).take(count.unwrap_or(100)) {
        writeln!(stdout(), "{}", task.text())?;
    }
    Ok(())
}
